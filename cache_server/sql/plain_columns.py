"""Columns that DataFusion reads correctly: true nulls inside, values for dictionaries. Pure.

- In Arrow a field of a null struct has any value, and a null list any length. DataFusion gives such
  values: ``address['zip']`` of a null address is not null. So nulls go down to the fields.
- It merges the dictionaries of batches, which may outgrow their codes. So they become their values,
  as the cache stores them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.storage.nested_values import decoded


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """``schema`` with nullable fields inside its columns, and values for dictionaries."""
    return pa.schema([field.with_type(type_in_sql(field.type)) for field in schema])


def type_in_sql(dtype: pa.DataType) -> pa.DataType:
    """The type of a column of type ``dtype`` after `plain_column`: views and offsets stay."""
    if isinstance(dtype, pa.BaseExtensionType):
        return type_in_sql(dtype.storage_type)
    if pa.types.is_dictionary(dtype) or pa.types.is_run_end_encoded(dtype):
        return type_in_sql(dtype.value_type)
    return with_fields(dtype, _plain_field)


def is_nested(dtype: pa.DataType) -> bool:
    """Whether `plain_column` looks inside a column of this type."""
    return bool(_children(dtype))


def hides_values(field: pa.Field) -> bool:
    """Whether a Parquet column has values where a struct is null: of a required field in it."""
    return any(
        (field.nullable and pa.types.is_struct(field.type) and not child.nullable)
        or hides_values(child)
        for child in _children(field.type)
    )


def plain_column(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """The same values, with nulls pushed down into structs and maps, and without dictionaries.

    Numbers and strings are shared with ``array``, except those of dictionaries and null lists.

    Args:
        dtype: from `type_in_sql`, maybe with other names of list items.
    """
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        return plain_column(array.storage, dtype)
    if types.is_dictionary(array.type):
        return plain_column(decoded(array), dtype)
    if types.is_run_end_encoded(array.type):
        return plain_column(pc.run_end_decode(array), dtype)
    if types.is_struct(array.type) and array.type.num_fields:
        fields = [
            plain_column(child, field.type)
            for child, field in zip(array.flatten(), dtype, strict=True)
        ]
        return pa.StructArray.from_arrays(fields, fields=list(dtype), mask=array.is_null())
    if types.is_fixed_size_list(array.type):
        values = plain_column(array.values, dtype.value_type)
        return _rebuilt(array, dtype, array.buffers()[:1], values)
    if types.is_map(array.type):
        array = _without_hidden_rows(array)
        items = plain_column(array.items, dtype.item_type)
        keys = plain_column(array.keys, dtype.key_type)
        entries = pa.StructArray.from_arrays([keys, items], fields=list(_children(dtype)))
        return _rebuilt(array, dtype, array.buffers()[:2], entries)
    if types.is_list(array.type) or types.is_large_list(array.type):
        array = _without_hidden_rows(array)
        values = plain_column(array.values, dtype.value_type)
        return _rebuilt(array, dtype, array.buffers()[:2], values)
    return array


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(type_in_sql(field.type)).with_nullable(True)


def _children(dtype: pa.DataType) -> tuple[pa.Field, ...]:
    types = pa.types
    if types.is_struct(dtype):
        return tuple(dtype)
    if types.is_map(dtype):
        return dtype.key_field, dtype.item_field
    if types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
        return (dtype.value_field,)
    return ()


def _rebuilt(
    array: pa.Array, dtype: pa.DataType, buffers: list[pa.Buffer | None], values: pa.Array
) -> pa.Array:
    """Lists with other values inside; no copy."""
    return pa.Array.from_buffers(
        dtype, len(array), buffers, array.null_count, array.offset, children=[values]
    )


def _without_hidden_rows(array: pa.Array) -> pa.Array:
    """The same lists or maps; the null ones are empty."""
    if not array.null_count:
        return array
    lengths = np.diff(array.offsets.to_numpy())
    if not lengths[array.is_null().to_numpy(zero_copy_only=False)].any():
        return array
    whole = pa.concat_arrays([array, array.slice(0, 0)])  # see `shards.packing`: not of a slice
    return whole.take(pa.array(np.arange(len(whole))))


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


def with_short_offsets(dtype: pa.DataType) -> pa.DataType:
    """A type whose strings, binaries and lists have offsets of 32 bits, also in place of views."""
    types = pa.types
    if types.is_large_string(dtype) or types.is_string_view(dtype):
        return pa.string()
    if types.is_large_binary(dtype) or types.is_binary_view(dtype):
        return pa.binary()
    if types.is_large_list(dtype):
        dtype = pa.list_(dtype.value_field)
    return with_fields(dtype, lambda field: field.with_type(with_short_offsets(field.type)))
