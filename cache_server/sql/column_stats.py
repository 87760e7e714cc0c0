"""Statistics of the columns of rows in memory; their union is in the client. Pure.

Runs in the process of SQL, with its limits: see `sql_worker`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from cache_protocol.storage.column_stats import (
    KEPT,
    STATS_SCHEMA,
    ColumnStats,
    Words,
    bounds_of,
    union,
)

_TEXTS = 4096  # at once
_MANY = 4  # times as many hashes as are kept


def column_stats_batches(
    num_columns: int, first_row: int, lots: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """One batch of `STATS_SCHEMA`: a value for each column.

    Args:
        num_columns: of each lot.
        first_row: of the first lot, its number in the table.
        lots: consecutive rows.
    """
    found = [ColumnStats()] * num_columns
    for lot in lots:
        for number, column in enumerate(lot.columns):
            found[number] = union(found[number], stats_of(column, first_row))
        first_row += lot.num_rows
    values = pa.array([each.to_dict() for each in found], STATS_SCHEMA.field(0).type)
    yield pa.RecordBatch.from_arrays([values], schema=STATS_SCHEMA)


def stats_of(array: pa.Array, first_row: int) -> ColumnStats:
    """The statistics of consecutive rows.

    Args:
        array: their values.
        first_row: its number in the table.
    """
    if array.type == pa.float16():  # Arrow has few kernels for it
        array = array.cast(pa.float32())
    elif pa.types.is_decimal(array.type) and array.type.bit_width < 128:  # nor for these
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    dtype = array.type
    kept = array.is_valid()
    nans = 0
    if pa.types.is_floating(dtype):
        is_nan = pc.fill_null(pc.is_nan(array), False)
        nans = pc.sum(is_nan).as_py() or 0
        kept = pc.and_(kept, pc.invert(is_nan))
    values = array.filter(kept)
    keys, sample = np.empty(0, np.uint64), np.empty(0)
    if (numbers := _numbers(values)) is not None:
        rows = np.flatnonzero(kept.to_numpy(zero_copy_only=False))
        keys = mixed((rows + first_row).astype(np.uint64))
        if len(keys) > KEPT:
            numbers = numbers[least := np.argpartition(keys, KEPT)[:KEPT]]
            keys = keys[least]
        ordered = np.argsort(keys)
        keys, sample = keys[ordered], numbers[ordered]
    return ColumnStats(
        len(array), array.null_count, nans, _total(values), bounds_of(values), _hashes(values),
        keys, sample,
    )  # fmt: skip


def mixed(words: Words) -> Words:
    """A hash of each word, one to one (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _is_number(dtype: pa.DataType) -> bool:
    types = pa.types
    is_plain = types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype)
    return bool(is_plain or types.is_decimal(dtype))


def _integers(values: pa.Array) -> npt.NDArray[Any]:
    """Times, booleans and integers as integers."""
    dtype = values.type
    if pa.types.is_boolean(dtype):
        values = values.cast(pa.uint8())
    elif pa.types.is_temporal(dtype):
        values = values.view(pa.int32() if dtype.bit_width == 32 else pa.int64())
    found: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


def _numbers(values: pa.Array) -> npt.NDArray[np.float64] | None:
    dtype = values.type
    if pa.types.is_temporal(dtype) and not pa.types.is_interval(dtype):
        return _integers(values).astype(np.float64)
    if not _is_number(dtype) or pa.types.is_boolean(dtype):  # quantiles say nothing of booleans
        return None
    if pa.types.is_decimal(dtype):
        values = values.cast(pa.float64())
    return _integers(values).astype(np.float64)


def _total(values: pa.Array) -> Fraction | None:
    dtype = values.type
    if not _is_number(dtype):
        return None
    if pa.types.is_decimal(dtype):
        total = pc.sum(values.cast(pa.decimal256(76, dtype.scale))).as_py()
        return Fraction(total or 0)
    numbers = _integers(values)
    if pa.types.is_floating(dtype):
        total = float(numbers.sum(dtype=np.float64))
        return Fraction(total) if math.isfinite(total) else None
    # Halves of words, whose sums stay within 64 bits.
    words = numbers.astype(np.uint64 if dtype == pa.uint64() else np.int64)
    high, low = words >> 32, words & 0xFFFFFFFF
    return Fraction((int(high.sum()) << 32) + int(low.sum()))


def _hashes(values: pa.Array) -> Words | None:
    dtype = values.type
    if pa.types.is_nested(dtype) or pa.types.is_interval(dtype):
        return None
    is_float = pa.types.is_floating(dtype)
    if not (is_float or pa.types.is_temporal(dtype) or _is_number(dtype)) or (
        pa.types.is_decimal(dtype)
    ):
        try:
            return np.unique(_hashes_of_texts(values.unique()))[:KEPT]
        except pa.ArrowNotImplementedError:
            return None
    if is_float:
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        words = (numbers + 0.0).view(np.uint64)  # -0.0 is 0.0
    else:
        words = _integers(values).astype(np.int64).view(np.uint64)
    words = mixed(words)
    if len(words) > _MANY * KEPT:  # mostly enough, and much faster than to sort all
        least = np.unique(words[words < np.uint64(_MANY * KEPT * 2**64 // len(words))])
        if len(least) >= KEPT:
            return least[:KEPT]
    return np.unique(words)[:KEPT]


def _hashes_of_texts(values: pa.Array) -> Words:
    found = np.empty(len(values), np.uint64)
    for at in range(0, len(values), _TEXTS):  # Python values take much memory
        for number, each in enumerate(values.slice(at, _TEXTS).to_pylist(), at):
            text = each if isinstance(each, bytes) else str(each).encode()
            found[number] = xxhash.xxh3_64_intdigest(text)
    return found
