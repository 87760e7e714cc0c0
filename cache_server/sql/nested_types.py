"""The one place that rebuilds a nested type. Pure."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


def with_fields(dtype: pa.DataType, change: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """A type with other fields in its structs, maps and lists; any other type as it is.

    Args:
        change: called once for each field, in their order. A map's key stays without nulls.
    """
    types = pa.types
    if types.is_struct(dtype):
        return pa.struct([change(child) for child in dtype])
    if types.is_map(dtype):
        key = change(dtype.key_field).with_nullable(False)
        return pa.map_(key, change(dtype.item_field), dtype.keys_sorted)
    if types.is_list(dtype):
        return pa.list_(change(dtype.value_field))
    if types.is_large_list(dtype):
        return pa.large_list(change(dtype.value_field))
    if types.is_fixed_size_list(dtype):
        return pa.list_(change(dtype.value_field), dtype.list_size)
    return dtype


def without_views(dtype: pa.DataType) -> pa.DataType:
    """A type with strings and binaries in place of their views, which are DataFusion's choice."""
    if dtype == pa.string_view():
        return pa.string()
    if dtype == pa.binary_view():
        return pa.binary()
    return with_fields(dtype, lambda field: field.with_type(without_views(field.type)))


def with_wide_codes(dtype: pa.DataType) -> pa.DataType:
    """A type whose dictionaries have codes of at least 32 bits.

    Rows of several files, or of several batches of one, have the values of several dictionaries.
    """
    if not pa.types.is_dictionary(dtype):
        return with_fields(dtype, lambda field: field.with_type(with_wide_codes(field.type)))
    codes = dtype.index_type if dtype.index_type.bit_width >= 32 else pa.int32()
    return pa.dictionary(codes, with_wide_codes(dtype.value_type), dtype.ordered)
