"""The type that a column has in files of several writers. Pure.

The type of the values counts, not how a writer laid them out or what it noted for Arrow: strings
may have short or long offsets, or be a dictionary; a column may be all null; list items may be
nullable; one instant has a name in every time zone.
"""

from __future__ import annotations

from itertools import chain

import pyarrow as pa

from cache_server.sql.plain_columns import with_fields

_UNITS = ("s", "ms", "us", "ns")
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}  # of an integer, by its bits
_EXACT_BITS = 32  # every integer of so many bits is a float64
_MOST_DIGITS = 76  # of decimal256


def storage_schema(schema: pa.Schema) -> pa.Schema:
    """``schema`` without extension types and metadata."""
    return pa.schema(
        [pa.field(field.name, _without_extensions(field.type), field.nullable) for field in schema]
    )


def _without_extensions(dtype: pa.DataType) -> pa.DataType:
    if isinstance(dtype, pa.BaseExtensionType):
        return _without_extensions(dtype.storage_type)
    if pa.types.is_dictionary(dtype):
        return pa.dictionary(dtype.index_type, _without_extensions(dtype.value_type), dtype.ordered)
    return with_fields(dtype, lambda field: field.with_type(_without_extensions(field.type)))


def common_type(one: pa.DataType, other: pa.DataType, *, widen: bool = False) -> pa.DataType | None:
    """The type that has the values of both; None if there is none.

    Args:
        widen: numbers, times and structs to a type that has more values than each.
    """
    types = pa.types
    if one.equals(other) or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_dictionary(one):
        return common_type(one.value_type, other, widen=widen)
    if types.is_dictionary(other):
        return common_type(one, other.value_type, widen=widen)
    if _is_text(one) and _is_text(other):
        is_large = types.is_large_string(one) or types.is_large_string(other)
        return pa.large_string() if is_large else pa.string()
    if _is_bytes(one) and _is_bytes(other):
        is_large = types.is_large_binary(one) or types.is_large_binary(other)
        return pa.large_binary() if is_large else pa.binary()
    if types.is_timestamp(one) and types.is_timestamp(other):
        return _common_timestamp(one, other, widen)
    if pa.int64() in (one, other) and (types.is_duration(one) or types.is_duration(other)):
        return pa.int64()  # Parquet has no durations
    if types.is_map(one) and types.is_map(other):
        key = common_type(one.key_type, other.key_type, widen=widen)
        item = common_type(one.item_type, other.item_type, widen=widen)
        return None if key is None or item is None else pa.map_(key, item)
    if _is_list(one) and _is_list(other):
        return _common_list(one, other, widen)
    if types.is_struct(one) and types.is_struct(other):
        return _common_struct(one, other, widen)
    return _wider(one, other) if widen else None


def may_lose(stored: pa.DataType, dtype: pa.DataType) -> bool:
    """Whether a cast to a `common_type` must be checked: not every value may fit."""
    types = pa.types
    if types.is_dictionary(stored):
        return may_lose(stored.value_type, dtype)
    if types.is_struct(stored) and types.is_struct(dtype):
        fields = {field.name: field.type for field in dtype}
        return any(may_lose(field.type, fields[field.name]) for field in stored)
    if types.is_map(stored) and types.is_map(dtype):
        pairs = ((stored.key_type, dtype.key_type), (stored.item_type, dtype.item_type))
        return any(may_lose(*pair) for pair in pairs)
    if _is_list(stored) and _is_list(dtype):
        return may_lose(stored.value_type, dtype.value_type)
    if types.is_timestamp(stored) and types.is_timestamp(dtype):
        return bool(stored.unit != dtype.unit)
    return bool(
        types.is_integer(stored) and stored.bit_width > _EXACT_BITS and types.is_floating(dtype)
    )


def _is_text(dtype: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(dtype) or types.is_large_string(dtype) or types.is_string_view(dtype)
    )


def _is_bytes(dtype: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_binary_view(dtype)
    )


def _is_list(dtype: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)
    )


def _common_timestamp(
    one: pa.TimestampType, other: pa.TimestampType, widen: bool
) -> pa.DataType | None:
    if (one.tz is None) != (other.tz is None) or not (widen or one.unit == other.unit):
        return None
    unit = max(one.unit, other.unit, key=_UNITS.index)
    return pa.timestamp(unit, one.tz if one.tz == other.tz else "UTC")


def _common_list(one: pa.DataType, other: pa.DataType, widen: bool) -> pa.DataType | None:
    types = pa.types
    value = common_type(one.value_type, other.value_type, widen=widen)
    if value is None:
        return None
    if types.is_fixed_size_list(one) and types.is_fixed_size_list(other):
        if one.list_size == other.list_size:
            return pa.list_(value, one.list_size)
        return pa.list_(value) if widen else None
    is_large = types.is_large_list(one) or types.is_large_list(other)
    return pa.large_list(value) if is_large else pa.list_(value)


def _common_struct(one: pa.StructType, other: pa.StructType, widen: bool) -> pa.DataType | None:
    found: dict[str, pa.DataType] = {}
    for field in chain(one, other):
        dtype = common_type(found.get(field.name, field.type), field.type, widen=widen)
        if dtype is None:
            return None
        found[field.name] = dtype
    is_same = one.num_fields == other.num_fields == len(found)
    return pa.struct(list(found.items())) if is_same or widen else None


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The smallest number type that has the values of both."""
    types = pa.types
    if types.is_integer(one) and types.is_integer(other):
        return _wider_integer(one, other)
    if types.is_decimal(one) or types.is_decimal(other):
        return _wider_decimal(one, other)
    if types.is_floating(one) and types.is_floating(other):
        return max(one, other, key=lambda dtype: dtype.bit_width)
    numbers = (types.is_integer(dtype) or types.is_floating(dtype) for dtype in (one, other))
    if all(numbers):
        return pa.float64()
    kinds = {_is_bytes(dtype) or types.is_fixed_size_binary(dtype) for dtype in (one, other)}
    return pa.binary() if kinds == {True} else None


def _wider_integer(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    signed = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
    if pa.types.is_signed_integer(one) == pa.types.is_signed_integer(other):
        return max(one, other, key=lambda dtype: dtype.bit_width)
    bits = max(
        dtype.bit_width * (2 if pa.types.is_unsigned_integer(dtype) else 1)
        for dtype in (one, other)
    )
    return next((dtype for dtype in signed if dtype.bit_width == bits), None)


def _wider_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    whole = scale = 0
    for dtype in (one, other):
        if pa.types.is_integer(dtype):
            whole = max(whole, _DIGITS[dtype.bit_width])
        elif pa.types.is_decimal(dtype):
            whole, scale = max(whole, dtype.precision - dtype.scale), max(scale, dtype.scale)
        else:
            return None
    if whole + scale > _MOST_DIGITS:
        return None
    return (pa.decimal128 if whole + scale <= 38 else pa.decimal256)(whole + scale, scale)
