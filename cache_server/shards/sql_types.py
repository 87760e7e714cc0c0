"""Stored columns -> the columns that SQL over stored rows sees. Pure.

Dates, times and booleans are stored as integers, and SQL sees what they were. All other columns are
seen as they are stored: a decimal as a float64.
"""

from __future__ import annotations

import pyarrow as pa


def sql_schema(logical: pa.Schema) -> pa.Schema:
    """The schema that SQL sees of a logical schema."""
    return pa.schema([field.with_type(_sql_type(field)).remove_metadata() for field in logical])


def sql_column(stored: pa.Array, dtype: pa.DataType) -> pa.Array:
    """A stored column as SQL sees it; no copy, except of booleans."""
    if stored.type.equals(dtype):
        return stored
    return stored.cast(dtype) if pa.types.is_boolean(dtype) else stored.view(dtype)


def _sql_type(field: pa.Field) -> pa.DataType:
    metadata = field.metadata or {}
    source = metadata.get(b"cache.source_type", b"").decode()
    unit = metadata.get(b"cache.unit", b"").decode()
    if not pa.types.is_integer(field.type) or not source:
        return field.type
    kind = source.partition("[")[0]
    if kind == "timestamp":
        return pa.timestamp(unit, metadata.get(b"cache.timezone", b"").decode() or None)
    if kind in ("time32", "time64", "duration"):
        made: pa.DataType = getattr(pa, kind)(unit)
        return made
    return {"bool": pa.bool_(), "date32": pa.date32(), "date64": pa.date64()}[kind]
