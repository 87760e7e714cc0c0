"""Statistics of a column in parts of a table, and of their union. Pure.

Rows, nulls, bounds and sums are exact. Different values and quantiles come from two sketches whose
union is that of the whole, however the rows were divided:

- the `KEPT` least hashes of values (k minimum values, Bar-Yossef et al. 2002). Fewer are all, so
  that their number is exact. Of more, the standard error is 1 / sqrt(KEPT), 2.2%;
- the values of the `KEPT` rows with the least keys (bottom-k, Cohen and Kaplan 2007). A key is a
  hash of the row number, so they are a uniform sample, the same in each run. The rank of a quantile
  is off by at most 2.2 points in 95 of 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

KEPT: Final = 2048
Words = npt.NDArray[np.uint64]

STATS: Final = "stats"
STATS_SCHEMA: Final = pa.schema(
    [
        (
            STATS,
            pa.struct(
                {
                    "rows": pa.int64(),
                    "nulls": pa.int64(),
                    "nans": pa.int64(),
                    "total": pa.string(),
                    "bounds": pa.binary(),
                    "hashes": pa.list_(pa.uint64()),
                    "keys": pa.list_(pa.uint64()),
                    "sample": pa.list_(pa.float64()),
                }
            ),
        )
    ]
)


@dataclass(frozen=True, eq=False)
class ColumnStats:
    """Statistics of a column. Immutable.

    Attributes:
        rows: with nulls and NaN.
        nulls, nans: of them. NaN is in no other number.
        total: the sum; None: the values are no numbers, or their sum is not finite.
        bounds: the least and the greatest value; None: there is no value, or no order.
        hashes: of different values, ascending, shape ``(k,)``; None: they are not counted.
        keys: of rows with values, ascending, shape ``(k,)``.
        sample: the values of these rows; times as integers in their unit. Empty: no numbers.
    """

    rows: int = 0
    nulls: int = 0
    nans: int = 0
    total: Fraction | None = None
    bounds: pa.Array | None = None
    hashes: Words | None = None
    keys: Words = field(default_factory=lambda: np.empty(0, np.uint64))
    sample: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def num_values(self) -> int:
        """Rows with a value."""
        return self.rows - self.nulls - self.nans

    @property
    def mean(self) -> float | None:
        """Of the values; None: they are no numbers, or there is none."""
        if self.total is None or not self.num_values:
            return None
        return float(self.total / self.num_values)

    @property
    def distinct(self) -> int | None:
        """Different values, about; None: they are not counted."""
        if self.hashes is None or self.distinct_exact:
            return None if self.hashes is None else len(self.hashes)
        return min(self.num_values, round((KEPT - 1) / ((int(self.hashes[-1]) + 1) / 2**64)))

    @property
    def distinct_exact(self) -> bool:
        """Whether `distinct` is no estimate."""
        return self.hashes is None or len(self.hashes) < KEPT

    @property
    def quantiles_exact(self) -> bool:
        """Whether the sample has every value."""
        return len(self.sample) == self.num_values

    def quantiles(self, at: Sequence[float]) -> list[float]:
        """The values of the sample at these ranks, from 0 to 1; empty if there are none."""
        if not len(self.sample):
            return []
        found: list[float] = np.quantile(self.sample, at, method="inverted_cdf").tolist()
        return found

    def to_dict(self) -> dict[str, Any]:
        """As a value of `STATS_SCHEMA`."""
        return {
            "rows": self.rows,
            "nulls": self.nulls,
            "nans": self.nans,
            "total": None if self.total is None else str(self.total),
            "bounds": None if self.bounds is None else _to_bytes(self.bounds),
            "hashes": self.hashes,
            "keys": self.keys,
            "sample": self.sample,
        }

    @classmethod
    def of(cls, value: pa.StructScalar) -> ColumnStats:
        """Reads a value of `STATS_SCHEMA`."""
        total, bounds = value["total"].as_py(), value["bounds"].as_py()
        return cls(
            value["rows"].as_py(),
            value["nulls"].as_py(),
            value["nans"].as_py(),
            None if total is None else Fraction(total),
            None if bounds is None else _from_bytes(bounds),
            value["hashes"].values.to_numpy() if value["hashes"].is_valid else None,
            value["keys"].values.to_numpy(),
            value["sample"].values.to_numpy(),
        )


def union(one: ColumnStats, other: ColumnStats) -> ColumnStats:
    """The statistics of the rows of both."""
    if not one.rows or not other.rows:
        return one if one.rows else other
    keys = np.concatenate([one.keys, other.keys])
    least = np.argsort(keys, kind="stable")[:KEPT]
    hashes = [each.hashes for each in (one, other) if each.hashes is not None]
    bounds = [each.bounds for each in (one, other) if each.bounds is not None]
    totals = one.total, other.total
    return ColumnStats(
        one.rows + other.rows,
        one.nulls + other.nulls,
        one.nans + other.nans,
        None if totals[0] is None or totals[1] is None else totals[0] + totals[1],
        bounds_of(pa.concat_arrays(bounds)) if bounds else None,
        np.unique(np.concatenate(hashes))[:KEPT] if len(hashes) == 2 else None,
        keys[least],
        np.concatenate([one.sample, other.sample])[least],
    )


def bounds_of(values: pa.Array) -> pa.Array | None:
    """The least and the greatest of some values; None: there is no value, or no order."""
    dtype = values.type
    if pa.types.is_duration(dtype):  # Arrow has no kernel for it
        values = values.view(pa.int64())
    try:
        found = pc.min_max(values)
    except pa.ArrowNotImplementedError:
        return None
    if not found["min"].is_valid:
        return None
    return pa.array([found["min"], found["max"]], values.type).view(dtype)


def _to_bytes(values: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([values], names=["bounds"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _from_bytes(written: bytes) -> pa.Array:
    with pa.ipc.open_stream(written) as reader:
        return reader.read_next_batch().column(0)
