"""Values of one Arrow type as another type that holds the same values. Pure.

The cache stores few types: see `storage_type`. This module turns a column into its stored type, and
back. It changes how values are written, never a value.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.errors import RequestError

_OFFSET_BYTES = 8
# Arrow type -> the one that is stored instead. Both have the same buffers, or Arrow casts them.
_PLAIN = {
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.bool_(): pa.uint8(),
    pa.date32(): pa.int32(),
    pa.date64(): pa.int64(),
}


def storage_type(dtype: pa.DataType) -> pa.DataType:
    """The type that a column, or the value of a list, is stored as.

    - Booleans are bytes of 0 and 1. Dates, times, timestamps and durations are integers.
    - Dictionaries, runs and extensions are their values. Views are plain strings and lists.
    - Inside of structs and maps only the latter rule holds.

    Raises:
        RequestError: no column of this type can be stored; names it.
    """
    return _storage_type(dtype, is_inside=False)


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """As `storage_type`, but dates, times and booleans stay: the type without its encoding.

    Two types with the same plain type have the same values.

    Raises:
        RequestError: as `storage_type`.
    """
    return _storage_type(dtype, is_inside=True)


def _storage_type(dtype: pa.DataType, *, is_inside: bool) -> pa.DataType:
    types = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        return _storage_type(dtype.storage_type, is_inside=is_inside)
    if types.is_dictionary(dtype) or types.is_run_end_encoded(dtype):
        return _storage_type(dtype.value_type, is_inside=is_inside)
    if dtype in (pa.string_view(), pa.binary_view()):
        return _PLAIN[dtype]
    if not is_inside and (dtype in _PLAIN or _is_time(dtype)):
        return _PLAIN.get(dtype) or (pa.int32() if types.is_time32(dtype) else pa.int64())
    if types.is_struct(dtype):
        return pa.struct([(f.name, _storage_type(f.type, is_inside=True)) for f in dtype])
    if types.is_map(dtype):
        key = _storage_type(dtype.key_type, is_inside=True)
        return pa.map_(key, _storage_type(dtype.item_type, is_inside=True), dtype.keys_sorted)
    if types.is_list(dtype) or types.is_list_view(dtype):
        return pa.list_(_storage_type(dtype.value_type, is_inside=is_inside))
    if types.is_large_list(dtype) or types.is_large_list_view(dtype):
        return pa.large_list(_storage_type(dtype.value_type, is_inside=is_inside))
    if types.is_fixed_size_list(dtype):
        return pa.list_(_storage_type(dtype.value_type, is_inside=is_inside), dtype.list_size)
    if types.is_union(dtype):
        raise RequestError(f"a column of {dtype} cannot be stored: select its fields as columns")
    return dtype


def without_codes(schema: pa.Schema) -> pa.Schema:
    """The schema with the plain type of each column that holds a dictionary."""
    return pa.schema(
        [
            field.with_type(plain_type(field.type)) if _has_codes(field.type) else field
            for field in schema
        ]
    )


def _has_codes(dtype: pa.DataType) -> bool:
    if isinstance(dtype, pa.BaseExtensionType):
        return _has_codes(dtype.storage_type)
    return pa.types.is_dictionary(dtype) or any(
        _has_codes(dtype.field(index).type) for index in range(dtype.num_fields)
    )


def _is_time(dtype: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_time(dtype) or types.is_timestamp(dtype) or types.is_duration(dtype))


def retyped(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """The same values as ``dtype``: the stored type of ``array``, or the type it was stored from.

    Shares memory where both types have the same buffers.

    Raises:
        RequestError: a dictionary has more values than its codes can count; says so.
    """
    types, given = pa.types, array.type
    if given.equals(dtype):
        return array
    if isinstance(given, pa.BaseExtensionType):
        return retyped(array.storage, dtype)
    if isinstance(dtype, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(dtype, retyped(array, dtype.storage_type))
    if types.is_dictionary(given):
        return retyped(decoded(array), dtype)
    if types.is_dictionary(dtype):
        return _encoded(retyped(array, dtype.value_type), dtype)
    if types.is_run_end_encoded(given):
        return retyped(pc.run_end_decode(array), dtype)
    if types.is_run_end_encoded(dtype):
        return pc.run_end_encode(retyped(array, dtype.value_type), run_end_type=dtype.run_end_type)
    if types.is_list_view(given) or types.is_large_list_view(given):
        return retyped(_from_list_view(array, dtype.value_type), dtype)
    if types.is_list_view(dtype) or types.is_large_list_view(dtype):
        return _as_list_view(array, dtype)
    if types.is_nested(given):
        return _rebuilt(array, dtype)
    if types.is_integer(given) and not types.is_boolean(dtype):
        return array.view(dtype)
    if types.is_integer(dtype) and not types.is_boolean(given):
        return array.view(dtype)
    return array.cast(dtype)


def decoded(array: pa.DictionaryArray) -> pa.Array:
    """The values of a dictionary column."""
    value_type = array.type.value_type
    dictionary = array.dictionary
    if isinstance(value_type, pa.BaseExtensionType):
        dictionary = dictionary.storage
    if dictionary.type in (pa.string_view(), pa.binary_view()):  # Arrow cannot take values of views
        kind = pa.large_string() if dictionary.type == pa.string_view() else pa.large_binary()
        values = dictionary.cast(kind).take(array.indices).cast(dictionary.type)
    else:
        if pa.types.is_nested(dictionary.type):
            # take() of pyarrow 26 counts the offset of a slice of nested lists twice
            dictionary = pa.concat_arrays([dictionary, dictionary.slice(0, 0)])
        values = dictionary.take(array.indices)
    if isinstance(value_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(value_type, values)
    return values


def decoded_bytes(array: pa.Array) -> int:
    """About the bytes of a column, with values in place of codes."""
    if isinstance(array, pa.ExtensionArray):
        return decoded_bytes(array.storage)
    if not _has_codes(array.type):
        return int(array.nbytes)
    if pa.types.is_dictionary(array.type):
        values, kind = array.dictionary, array.type.value_type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            lengths = pc.binary_length(values).take(array.indices)
            return int(pc.sum(lengths).as_py() or 0) + _OFFSET_BYTES * len(array)
        return len(array) * (decoded_bytes(values) // max(1, len(values)) + 1)
    if pa.types.is_struct(array.type):
        return sum(map(decoded_bytes, array.flatten()))
    if pa.types.is_map(array.type):
        return int(array.nbytes) + decoded_bytes(array.keys) + decoded_bytes(array.items)
    return int(array.nbytes) + decoded_bytes(array.flatten())


def _encoded(values: pa.Array, dtype: pa.DictionaryType) -> pa.Array:
    kind, plain = values.type, values
    if kind in (pa.string_view(), pa.binary_view()):
        plain = values.cast(pa.large_string() if kind == pa.string_view() else pa.large_binary())
    encoded = plain.dictionary_encode()
    try:
        indices = encoded.indices.cast(dtype.index_type)
    except pa.ArrowInvalid:
        raise RequestError(
            f"{len(encoded.dictionary)} values in one batch are more than {dtype} can count: read "
            "fewer rows at once, or store the column as its values, without a dictionary"
        ) from None
    dictionary = encoded.dictionary.cast(kind) if kind != plain.type else encoded.dictionary
    return pa.DictionaryArray.from_arrays(indices, dictionary, ordered=dtype.ordered)


def _from_list_view(array: pa.Array, value_type: pa.DataType) -> pa.Array:
    is_large = pa.types.is_large_list_view(array.type)
    inner = array.type.value_field.with_type(value_type)
    plain = pa.Array.from_buffers(  # Arrow cannot join values of extension types
        pa.large_list_view(inner) if is_large else pa.list_view(inner),
        len(array),
        array.buffers()[:3],
        array.null_count,
        array.offset,
        [retyped(array.values, value_type)],
    )
    lengths = pc.list_value_length(plain).fill_null(0).to_numpy()
    return (pa.LargeListArray if is_large else pa.ListArray).from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if is_large else pa.int32()),
        plain.flatten(),
        type=pa.large_list(inner) if is_large else pa.list_(inner),
        mask=array.is_null() if array.null_count else None,
    )


def _as_list_view(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    large = pa.types.is_large_list_view(dtype)
    plain = retyped(
        array, pa.large_list(dtype.value_field) if large else pa.list_(dtype.value_field)
    )
    offsets = plain.offsets.to_numpy()
    kind = pa.LargeListViewArray if large else pa.ListViewArray
    return kind.from_arrays(
        pa.array(offsets[:-1]),
        pa.array(np.diff(offsets)),
        plain.values,
        type=dtype,
        mask=plain.is_null() if plain.null_count else None,
    )


def _rebuilt(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """A struct, map or list with other types inside."""
    types = pa.types
    if types.is_struct(array.type):
        children = [retyped(array.field(index), field.type) for index, field in enumerate(dtype)]
        return pa.Array.from_buffers(
            dtype, len(array), [_validity(array)], array.null_count, 0, children=children
        )
    if types.is_fixed_size_list(array.type):
        size = array.type.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return pa.Array.from_buffers(
            dtype,
            len(array),
            [_validity(array)],
            array.null_count,
            0,
            children=[retyped(values, dtype.value_type)],
        )
    if types.is_map(array.type):
        keys, items = retyped(array.keys, dtype.key_type), retyped(array.items, dtype.item_type)
        entries = pa.StructArray.from_arrays(
            [keys, items], fields=[dtype.key_field, dtype.item_field]
        )
        return pa.Array.from_buffers(
            dtype, len(array), array.buffers()[:2], array.null_count, array.offset, [entries]
        )
    is_large = types.is_large_list(dtype)
    if types.is_large_list(array.type) != is_large:
        # A cast of Arrow loses the values of lists with columns of nulls
        offsets = (array.offsets if len(array) else pa.array([0])).cast(pa.int64())
        start, stop = offsets[0].as_py(), offsets[-1].as_py()
        offsets = pc.subtract(offsets, start).cast(pa.int64() if is_large else pa.int32())
        values = retyped(array.values.slice(start, stop - start), dtype.value_type)
        buffers = [_validity(array), offsets.buffers()[1]]
        return pa.Array.from_buffers(dtype, len(array), buffers, children=[values])
    values = retyped(array.values, dtype.value_type)
    return pa.Array.from_buffers(
        dtype, len(array), array.buffers()[:2], array.null_count, array.offset, [values]
    )


def _validity(array: pa.Array) -> pa.Buffer | None:
    """The validity bits of a column, from its first row on."""
    if not array.null_count:
        return None
    if not array.offset:
        return array.buffers()[0]
    valid = array.is_valid()  # bits of its own, without an offset
    return valid.buffers()[1] if not valid.offset else pa.concat_arrays([valid]).buffers()[1]
