"""The Arrow types that the columns of a dataset arrived with. Pure.

A dataset is stored with other types than it arrived with: times as integers, booleans as uint8. The
metadata of its fields says what they were. Writes compare the types that arrived.
"""

from __future__ import annotations

import re

import pyarrow as pa

_SOURCE_TYPE, _UNIT, _ZONE = b"cache.source_type", b"cache.unit", b"cache.timezone"
_DECIMAL = re.compile(r"(decimal\d+)\((\d+), (-?\d+)\)")
_PLAIN = {"bool": pa.bool_(), "date32": pa.date32(), "date64": pa.date64()}


def arrived_schema(stored: pa.Schema) -> pa.Schema:
    """The columns of a dataset as they arrived, each nullable.

    Without dictionaries and extension types, which are not stored; views are as they are stored.
    """
    return pa.schema([pa.field(field.name, _with_values(field, field.type)) for field in stored])


def wanted_schema(arriving: pa.Schema, stored: pa.Schema) -> pa.Schema:
    """The columns to give to rows of ``arriving``, so that they can be stored as ``stored``.

    A column that comes as the cache gave it, with stored values and their metadata, stays so.
    """
    came = {field.name: field for field in arriving}
    return pa.schema(
        came[known.name] if _is_as_stored(came.get(known.name), known) else wanted
        for known, wanted in zip(stored, arrived_schema(stored), strict=True)
    )


def _is_as_stored(field: pa.Field | None, stored: pa.Field) -> bool:
    return (
        field is not None and _SOURCE_TYPE in (field.metadata or {}) and field.equals(stored, True)
    )


def _with_values(field: pa.Field, dtype: pa.DataType) -> pa.DataType:
    """A stored type with the values that arrived."""
    kinds = pa.types
    if kinds.is_fixed_size_list(dtype):
        return pa.list_(_with_values(field, dtype.value_type), dtype.list_size)
    if kinds.is_list(dtype):
        return pa.list_(_with_values(field, dtype.value_type))
    if kinds.is_large_list(dtype):
        return pa.large_list(_with_values(field, dtype.value_type))
    metadata = field.metadata or {}
    source = metadata.get(_SOURCE_TYPE, b"").decode()
    unit, zone = metadata.get(_UNIT, b"").decode(), metadata.get(_ZONE, b"").decode()
    kind = source.partition("[")[0]
    if kind == "timestamp":
        return pa.timestamp(unit, zone or None)
    if kind in ("time32", "time64", "duration"):
        made: pa.DataType = getattr(pa, kind)(unit)
        return made
    if kind == "fixed_size_binary":
        return pa.binary(int(source.partition("[")[2].rstrip("]")))
    if found := _DECIMAL.fullmatch(source):
        made = getattr(pa, found[1])(int(found[2]), int(found[3]))
        return made
    return _PLAIN.get(kind, dtype)
