"""Statistics of columns: exact ones, and sketches whose union is that of the whole."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.storage.column_stats import KEPT, STATS, ColumnStats, union
from cache_server.sql.column_stats import column_stats_batches, stats_of

RANDOM = np.random.default_rng(7)
DAY = dt.date(2026, 1, 1)
FEW: dict[str, pa.Array] = {
    "int8": pa.array([3, None, -4, 3], pa.int8()),
    "int64": pa.array([2**63 - 1, -(2**63), 2**63 - 1, None]),
    "uint64": pa.array([2**64 - 1, 0, None, 2**64 - 1], pa.uint64()),
    "half": pa.array(np.array([1.5, 2, np.nan], np.float16)),
    "float": pa.array([0.0, -0.0, math.nan, None, 2.5]),
    "bool": pa.array([True, False, None, True]),
    "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-2.05")]),
    "decimal32": pa.array([decimal.Decimal("9.99"), decimal.Decimal("9.99")], pa.decimal32(3, 2)),
    "decimal256": pa.array([decimal.Decimal(10) ** 40, None], pa.decimal256(60, 0)),
    "date32": pa.array([DAY, None, DAY + dt.timedelta(3)]),
    "date64": pa.array([DAY, DAY], pa.date64()),
    "time32": pa.array([1, 5], pa.time32("s")),
    "zoned": pa.array([10**18 + 1, 10**18, None], pa.timestamp("ns", "Europe/Oslo")),
    "duration": pa.array([5, None, -7], pa.duration("us")),
    "text": pa.array(["b", "å", None, "b", ""]),
    "large": pa.array(["b", "a"], pa.large_string()),
    "binary": pa.array([b"\xff", b"", None]),
    "fixed": pa.array([b"ab", b"aa"], pa.binary(2)),
    "list": pa.array([[1], None, [2, 3]]),
    "struct": pa.array([{"a": 1}, None]),
    "null": pa.nulls(3),
    "empty": pa.array([], pa.int32()),
}


def sent(array: pa.Array, *cuts: int, first_row: int = 0) -> ColumnStats:
    """Through the process and the wire."""
    edges = [0, *cuts, len(array)]
    lots = [
        pa.RecordBatch.from_arrays([array.slice(start, stop - start)], names=["x"])
        for start, stop in itertools.pairwise(edges)
    ]
    (batch,) = column_stats_batches(1, first_row, lots)
    return ColumnStats.of(batch.column(STATS)[0])


@pytest.mark.parametrize("name", FEW)
def test_few_values_of_every_type_are_summed_up_exactly(name: str) -> None:
    array = FEW[name]
    for cuts in ([], [1], [1, 2]):
        found = sent(array, *[cut for cut in cuts if cut < len(array)])
        values = [each for each in array if each.is_valid and not _is_nan(each)]
        assert (found.rows, found.nulls) == (len(array), array.null_count)
        assert found.num_values == len(values)
        if pa.types.is_nested(array.type):
            assert found.bounds is None and found.distinct is None and found.mean is None
            continue
        if values and not pa.types.is_null(array.type):
            ordered = sorted(values, key=_order)
            assert found.bounds is not None
            assert [_order(each) for each in found.bounds] == [
                _order(ordered[0]),
                _order(ordered[-1]),
            ]
            assert found.distinct == len({_order(each) for each in values})
        assert found.distinct_exact
        if name[:3] in ("int", "uin", "dec", "flo", "boo"):
            total = sum((Fraction(each.as_py()) for each in values), Fraction())
            assert found.total == total and found.quantiles_exact is (name != "bool")


def _is_nan(value: Any) -> bool:
    return pa.types.is_floating(value.type) and math.isnan(value.as_py())


def _order(value: Any) -> Any:
    return value.value if pa.types.is_temporal(value.type) else value.as_py()


def test_the_union_is_that_of_the_whole_however_the_rows_are_divided() -> None:
    array = pa.array(RANDOM.integers(0, 50_000, 30_000))
    whole = stats_of(array, 0)
    for cuts in ([15_000], [1, 7, 29_999], list(range(999, 30_000, 999))):
        parts = sent(array, *cuts)
        assert parts.hashes is not None and whole.hashes is not None
        assert np.array_equal(parts.hashes, whole.hashes)
        assert np.array_equal(parts.keys, whole.keys)
        assert np.array_equal(parts.sample, whole.sample) and parts.total == whole.total
    half = [stats_of(array.slice(15_000), 15_000), stats_of(array.slice(0, 15_000), 0)]
    assert np.array_equal(union(*half).sample, whole.sample)


@pytest.mark.parametrize("number", [KEPT - 1, KEPT, 10_000, 200_000])
@pytest.mark.parametrize("texts", [False, True])
def test_different_values_and_quantiles_are_within_the_stated_error(
    number: int, texts: bool
) -> None:
    if texts and number > 10_000:
        return
    numbers = np.arange(number)
    array = pa.array([f"t{each}" for each in numbers]) if texts else pa.array(numbers * 1.5)
    found = stats_of(array, 10**12)
    assert found.distinct is not None
    assert abs(found.distinct / number - 1) <= (0 if found.distinct_exact else 4 * 0.022)
    assert found.distinct_exact == (number < KEPT)
    if not texts:
        ranks = np.array(found.quantiles([0.1, 0.5, 0.9])) / 1.5 / number
        assert np.abs(ranks - [0.1, 0.5, 0.9]).max() <= 0.044


def test_sums_that_are_not_finite_have_no_mean() -> None:
    assert stats_of(pa.array([math.inf, 1.0]), 0).mean is None
    assert stats_of(pa.array([math.nan]), 0).mean is None
    assert stats_of(pa.array([1.0, 2.0]), 0).mean == 1.5
