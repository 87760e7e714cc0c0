"""Sample rows made from the statistics of Parquet footers, to try a filter on. Pure.

Each row belongs to a row group, chosen in proportion to its number of rows. Each value is uniform
between the minimum and maximum of the group, independent of other columns. These are the usual
assumptions of selectivity estimation (Selinger et al., 1979); a sample makes them work for any
expression. Strings take only the minimum or the maximum. A column without statistics is null.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_server.source.pinned import no_rows

_SEED = 0  # the same footers give the same estimate
_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}  # in Parquet's words
_LARGEST = float(np.finfo(np.float64).max) / 2  # the range between two of them is a number, too

Group = tuple[pq.RowGroupMetaData, Mapping[str, pa.Scalar]]


def rows_like(
    groups: Sequence[Group],
    schema: pa.Schema,
    num_rows: int,
    columns: Collection[str] | None = None,
) -> pa.RecordBatch:
    """Sample rows of a table.

    Args:
        groups: each row group, with the columns in the path of its file.
        schema: of the table.
        num_rows: to make.
        columns: with values; the others are null. None: all.
    """
    rng = np.random.default_rng(_SEED)
    weights = np.array([group.num_rows for group, _ in groups], np.float64)
    if not weights.sum():
        return no_rows(schema)
    counts = rng.multinomial(num_rows, weights / weights.sum())
    drawn = [
        (group, constants, int(count))
        for (group, constants), count in zip(groups, counts, strict=True)
        if count
    ]

    def column(field: pa.Field) -> pa.Array:
        if columns is not None and field.name not in columns:
            return pa.nulls(num_rows, field.type)
        return pa.concat_arrays(
            [_column(group, constants, field, count, rng) for group, constants, count in drawn]
        )

    fields = [field.with_nullable(True) for field in schema]
    return pa.RecordBatch.from_arrays([column(field) for field in fields], schema=pa.schema(fields))


def _column(
    group: pq.RowGroupMetaData,
    constants: Mapping[str, pa.Scalar],
    field: pa.Field,
    count: int,
    rng: np.random.Generator,
) -> pa.Array:
    if field.name in constants:
        return pa.repeat(constants[field.name], count)
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema == field.name and chunk.statistics is not None:
            return _values(chunk, field.type, count, rng)
    return pa.nulls(count, field.type)


def _values(
    chunk: pq.ColumnChunkMetaData, dtype: pa.DataType, count: int, rng: np.random.Generator
) -> pa.Array:
    statistics = chunk.statistics
    if not statistics.has_min_max:
        return pa.nulls(count, dtype)
    try:
        values = _between(_ends(statistics, dtype), dtype, count, rng)
    except (ValueError, OverflowError, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        # Unusable statistics: another type than the column's, or minimum above maximum.
        return pa.nulls(count, dtype)
    share = (statistics.null_count or 0) / max(1, chunk.num_values)
    missing = pa.array(rng.random(count) < share)
    return pc.if_else(missing, pa.scalar(None, dtype), values)


def _ends(statistics: pq.Statistics, dtype: pa.DataType) -> pa.Array:
    """The minimum and maximum, as stored: Python cannot represent every time."""
    written = _time_of(statistics, dtype)
    if written is None:
        return pa.array([statistics.min, statistics.max], dtype)
    raw = pa.array([statistics.min_raw, statistics.max_raw], _integer_of(written))
    return raw.view(written).cast(dtype, safe=False)


def _time_of(statistics: pq.Statistics, dtype: pa.DataType) -> pa.DataType | None:
    """The time or date that a Parquet file holds for a column of ``dtype``; None for others."""
    logical = json.loads(statistics.logical_type.to_json())
    unit = _UNITS.get(logical.get("timeUnit"))
    if logical["Type"] == "Date":
        return pa.date32()
    if logical["Type"] == "Timestamp" and unit:
        return pa.timestamp(unit, getattr(dtype, "tz", None))
    if logical["Type"] == "Time" and unit:
        return pa.time32(unit) if unit == "ms" else pa.time64(unit)
    return None


def _between(ends: pa.Array, dtype: pa.DataType, count: int, rng: np.random.Generator) -> pa.Array:
    if pa.types.is_floating(dtype) or pa.types.is_decimal(dtype):
        first, last = (min(max(float(end.as_py()), -_LARGEST), _LARGEST) for end in ends)
        return pa.array(rng.uniform(first, last, count)).cast(dtype, safe=False)
    if (width := _integer_of(dtype)) is not None:
        first, last = (int(end.as_py()) for end in ends.cast(width))
        kind = np.uint64 if pa.types.is_unsigned_integer(width) else np.int64
        drawn: npt.NDArray[np.integer] = rng.integers(first, last, count, kind, endpoint=True)
        return pa.array(drawn).cast(width).cast(dtype)
    return ends.take(pa.array(rng.integers(0, 2, count)))


def _integer_of(dtype: pa.DataType) -> pa.DataType | None:
    """The integer type that stores a type; None if there is none."""
    if pa.types.is_integer(dtype):
        return dtype
    if pa.types.is_date32(dtype) or pa.types.is_time32(dtype):
        return pa.int32()
    if pa.types.is_date64(dtype) or pa.types.is_time64(dtype) or pa.types.is_timestamp(dtype):
        return pa.int64()
    return None
