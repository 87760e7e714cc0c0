"""Values of a column as another type, each exactly, or the first one that does not survive. Pure.

Takes pairs of types that `type_rules` allows. Knows no column names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.storage.flat_columns import numpy_dtype
from cache_protocol.storage.type_rules import (
    MANTISSA_BITS,
    bounds,
    is_any_list,
    is_extension,
    is_view,
    largest_count,
    text_kind,
    unit_ns,
)

_T = TypeVar("_T")
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]

_LARGEST_HALF = 65_504
_MAX_SHOWN = 80  # characters of a value in an error


class Misfit(Exception):
    """A value that does not survive, and its row."""

    def __init__(self, row: int, value: str) -> None:
        super().__init__(value)
        self.row, self.value = row, value


def as_column(array: pa.Array, field: pa.Field) -> pa.Array:
    """As `become`, also for the nulls of a column."""
    if field.nullable:
        return become(array, field.type)
    _, column = _all_of([lambda: _require_no_nulls(array), lambda: become(array, field.type)])
    return column


def become(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """The values as ``dtype``, of types that `can_become` allows; raises `Misfit`."""
    kinds, old = pa.types, array.type
    if old.equals(dtype):
        return array
    if kinds.is_null(old):
        return pa.nulls(len(array), dtype)
    if is_extension(old):
        return become(array.storage, dtype)
    if kinds.is_dictionary(old):
        return _from_dictionary(array, dtype)
    if kinds.is_dictionary(dtype):
        return _to_dictionary(array, dtype)
    if is_any_list(old):
        return _to_list(array, dtype)
    if kinds.is_map(old):
        return _to_map(array, dtype)
    if kinds.is_struct(old):
        return _to_struct(array, dtype)
    if kinds.is_decimal(old) or kinds.is_decimal(dtype):
        return _to_decimal(array, dtype)
    if text_kind(old) is not None:
        return _to_text(array, dtype)
    if unit_ns(old) is not None:
        return _to_time(array, dtype)
    return _to_number(array, dtype)


def _misfit(array: pa.Array, row: int) -> NoReturn:
    if pa.types.is_temporal(array.type) or pa.types.is_nested(array.type):  # maybe none of Python
        shown = array.slice(row, 1).to_string(indent=0, skip_new_lines=True).strip("[]")
    else:
        shown = repr(array[row].as_py())
    raise Misfit(row, shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}...")


def _all_of(steps: Iterable[Callable[[], _T]]) -> list[_T]:
    """The results of steps over the same rows; after misfits, raises that of the first row."""
    results, misfits = [], []
    for step in steps:
        try:
            results.append(step())
        except Misfit as misfit:
            misfits.append(misfit)
    if misfits:
        raise min(misfits, key=lambda misfit: misfit.row)
    return results


def _refuse_first(array: pa.Array, bad: Flags) -> None:
    """Raises for the first bad value; values of nulls do not count."""
    if array.null_count:
        bad = bad & _is_valid(array)
    if bad.any():
        _misfit(array, int(bad.argmax()))


def _require_no_nulls(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = _decoded(array)
    if array.null_count:
        _misfit(array, int(_is_valid(array).argmin()))
    return array


# -- numbers and times ---------------------------------------------------------------------------


def _to_number(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    values, kinds = _values(array), pa.types
    if kinds.is_floating(array.type):
        with np.errstate(over="ignore", invalid="ignore"):
            back = values.astype(numpy_dtype(dtype)).astype(values.dtype)
        _refuse_first(array, (back != values) & (values == values))
    elif kinds.is_integer(dtype):
        _refuse_outside(array, values, *bounds(dtype))
    else:
        sizes = values.astype(np.uint64)  # of negative values: modulo 2**64
        sizes = np.where(values < 0, np.uint64(0) - sizes, sizes)
        lowest = np.maximum(sizes & (np.uint64(0) - sizes), np.uint64(1))  # its last bit
        bad = sizes // lowest >= np.uint64(2 ** MANTISSA_BITS[dtype.bit_width])
        _refuse_first(array, bad | (sizes > _LARGEST_HALF) if kinds.is_float16(dtype) else bad)
    return _of_values(values, dtype, array)


def _refuse_outside(array: pa.Array, values: Numbers, low: int, high: int) -> None:
    """Raises for the first integer that is not from ``low`` to ``high``."""
    known = np.iinfo(values.dtype)
    bad = np.zeros(len(values), np.bool_)
    if low > known.min:
        bad |= values < low
    if high < known.max:
        bad |= values > high
    _refuse_first(array, bad)


def _to_decimal(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Integers as decimals, decimals as integers or as other decimals.

    Not by pyarrow's casts: those of pyarrow 26 refuse some values that fit, and change others.
    """
    values, scale = _unscaled(array)
    is_decimal = bool(pa.types.is_decimal(dtype))
    most = 10**dtype.precision - 1 if is_decimal else 0
    low, high = (-most, most) if is_decimal else bounds(dtype)
    exponent = (dtype.scale if is_decimal else 0) - scale
    factor = 10 ** abs(exponent)
    largest = max(-int(values.min()), int(values.max())) if len(values) else 0
    if factor * max(largest, 1) >= 2**63:
        values = values.astype(object)  # Python's integers
    if exponent < 0:
        _refuse_first(array, values % factor != 0)
        values = values // factor
    else:
        values = values * factor
    _refuse_first(array, (values < low) | (values > high))
    return _of_children(array, dtype, [_with_limbs(values, dtype.bit_width)], [])


def _unscaled(array: pa.Array) -> tuple[Numbers, int]:
    """Integers or decimals as integers, 0 for nulls, of 64 bits or of Python; and their scale."""
    dtype, rows = array.type, len(array)
    if not pa.types.is_decimal(dtype):
        values, scale = _values(array), 0
        values = values.astype(object if dtype == pa.uint64() else np.int64)
    else:
        scale, num_limbs = dtype.scale, max(1, dtype.bit_width // 64)
        width = np.dtype(f"i{min(8, dtype.bit_width // 8)}")
        buffer, start = array.buffers()[1], array.offset * num_limbs
        limbs = _of_buffer(buffer, width, start, rows * num_limbs).reshape(rows, num_limbs)
        values = limbs[:, 0].astype(np.int64)
        if (limbs[:, 1:] != (values >> 63)[:, None]).any():
            values = limbs[:, -1].astype(object)
            for limb in range(num_limbs - 2, -1, -1):
                values = (values << 64) + limbs[:, limb].view(np.uint64).astype(object)
    return (np.where(_is_valid(array), values, 0) if array.null_count else values), scale


def _with_limbs(values: Numbers, bits: int) -> Numbers:
    """Integers of 64 bits or of Python as little-endian ones of so many bits."""
    if bits <= 64:
        return values.astype(f"i{bits // 8}") if values.dtype != object else _limb(values, bits)
    if values.dtype == object:
        return np.stack([_limb(values >> at, 64) for at in range(0, bits, 64)], 1).reshape(-1)
    sign = np.broadcast_to((values >> 63)[:, None], (len(values), bits // 64 - 1))
    return np.concatenate([values[:, None], sign], 1).reshape(-1)


def _limb(values: Numbers, bits: int) -> Numbers:
    """The lowest bits of Python's integers."""
    limb: Numbers = (values & (2**bits - 1)).astype(f"u{bits // 8}")
    return limb


def _to_time(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    old_ns, new_ns = unit_ns(array.type), unit_ns(dtype)
    assert old_ns is not None and new_ns is not None
    values = _values(array).astype(np.int64)
    limit = largest_count(dtype)
    if old_ns >= new_ns:
        factor = old_ns // new_ns
        _refuse_outside(array, values, -(limit // factor), (limit - 1) // factor)
        return _of_values(values * np.int64(factor), dtype, array)
    factor = new_ns // old_ns
    _refuse_first(array, values % factor != 0)
    _refuse_outside(array, values, -limit * factor, (limit - 1) * factor)
    return _of_values(values // factor, dtype, array)


# -- text and bytes ------------------------------------------------------------------------------


def _to_text(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(dtype):
        if is_view(array.type):
            array = pc.cast(array, pa.large_binary())
        lengths = pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        _refuse_first(array, lengths != dtype.byte_width)
        if not len(array):
            return pa.array([], dtype)
    return pc.cast(array, dtype)


# -- nested types --------------------------------------------------------------------------------


def _to_list(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    kinds = pa.types
    starts, sizes = _extents(array)
    if kinds.is_fixed_size_list(dtype):
        _refuse_first(array, sizes != dtype.list_size)
    ends = np.cumsum(sizes)
    values = _take(_list_values(array), _ranges(starts, sizes, ends))
    items = _within(lambda: as_column(values, dtype.value_field), ends)
    if kinds.is_fixed_size_list(dtype):
        if array.null_count:  # a null has values, too
            places = np.zeros((len(array), dtype.list_size), np.int64)
            places[:] = (ends - sizes)[:, None] + np.arange(dtype.list_size)
            places[~_is_valid(array)] = -1
            items = _take(items, places.reshape(-1))
        return _of_children(array, dtype, [], [items])
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    is_large = kinds.is_large_list(dtype) or kinds.is_large_list_view(dtype)
    if not is_large and offsets[-1] > np.iinfo(np.int32).max:
        raise pa.ArrowInvalid("more than 2**31 values")
    offsets = offsets.astype(np.int64 if is_large else np.int32)
    if kinds.is_list_view(dtype) or kinds.is_large_list_view(dtype):
        return _of_children(array, dtype, [offsets[:-1], sizes.astype(offsets.dtype)], [items])
    return _of_children(array, dtype, [offsets], [items])


def _to_map(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    starts, sizes = _extents(array)
    ends = np.cumsum(sizes)
    entries = _take(_list_values(array), _ranges(starts, sizes, ends))
    keys, items = entries.flatten()
    columns = _within(
        lambda: _all_of(
            [lambda: as_column(keys, dtype.key_field), lambda: as_column(items, dtype.item_field)]
        ),
        ends,
    )
    fields = [dtype.key_field, dtype.item_field]
    offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
    return _of_children(
        array, dtype, [offsets], [pa.StructArray.from_arrays(columns, fields=fields)]
    )


def _to_struct(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    places = {field.name: place for place, field in enumerate(array.type)}
    arrived = array.flatten()  # nulls of the struct are nulls of its fields

    def convert(field: pa.Field) -> pa.Array:
        values = arrived[places[field.name]]
        if not field.nullable and array.null_count:
            there = _is_valid(array)
            kept = _take(values, np.flatnonzero(there))
            _within(lambda: as_column(kept, field), np.cumsum(there))
            return become(values, field.type)
        return as_column(values, field)

    return _of_children(array, dtype, [], _all_of(partial(convert, field) for field in dtype))


def _within(convert: Callable[[], _T], ends: Numbers) -> _T:
    """Values of lists, with the rows of the lists in errors."""
    try:
        return convert()
    except Misfit as misfit:
        row = int(np.searchsorted(ends, misfit.row, side="right"))
        raise Misfit(row, misfit.value) from None


def _extents(array: pa.Array) -> tuple[Numbers, Numbers]:
    """Where the values of each list start, and how many they are; 0 of a null."""
    kinds, dtype, rows = pa.types, array.type, len(array)
    if kinds.is_fixed_size_list(dtype):
        starts = (np.arange(rows, dtype=np.int64) + array.offset) * dtype.list_size
        sizes = np.full(rows, dtype.list_size, np.int64)
    else:
        buffers, is_large = array.buffers(), kinds.is_large_list(dtype)
        is_large = is_large or kinds.is_large_list_view(dtype)
        width = np.dtype(np.int64 if is_large else np.int32)
        if kinds.is_list_view(dtype) or kinds.is_large_list_view(dtype):
            starts = _of_buffer(buffers[1], width, array.offset, rows)
            sizes = _of_buffer(buffers[2], width, array.offset, rows)
        else:
            offsets = _of_buffer(buffers[1], width, array.offset, rows + 1 if rows else 0)
            starts, sizes = offsets[:-1], np.diff(offsets)
        starts, sizes = starts.astype(np.int64), sizes.astype(np.int64)
    if array.null_count:
        sizes = np.where(_is_valid(array), sizes, 0)
    return starts, sizes


def _list_values(array: pa.Array) -> pa.Array:
    """The whole child of a list or a map, as its extents count it."""
    if not pa.types.is_map(array.type):
        return array.values
    keys, items = array.keys, array.items
    return pa.StructArray.from_arrays(
        [keys, items], fields=[array.type.key_field, array.type.item_field]
    )


def _ranges(starts: Numbers, sizes: Numbers, ends: Numbers) -> Numbers | slice:
    """The places of all values, list by list; a slice if they lie side by side."""
    used = sizes > 0
    starts, sizes, ends = starts[used], sizes[used], ends[used]
    if not len(starts):
        return slice(0, 0)
    if (starts[1:] == starts[:-1] + sizes[:-1]).all():
        return slice(int(starts[0]), int(starts[0] + ends[-1]))
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])


# -- dictionaries --------------------------------------------------------------------------------


def _from_dictionary(array: pa.DictionaryArray, dtype: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(dtype):
        return become(_decoded(array), dtype)
    try:
        values = become(array.dictionary, dtype)  # each once
    except Misfit:  # perhaps of a value without a row
        return become(_decoded(array), dtype)
    return _take(values, array.indices)


def _decoded(array: pa.DictionaryArray) -> pa.Array:
    return _take(array.dictionary, array.indices)


def _to_dictionary(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    values = become(array, dtype.value_type)
    plain = become(values, _WITHOUT_VIEWS.get(values.type, values.type))
    try:
        encoded = pc.dictionary_encode(plain)
        codes, known = encoded.indices, become(encoded.dictionary, dtype.value_type)
    except pa.ArrowNotImplementedError:  # of nested values
        codes, known = pa.array(np.arange(len(values)), mask=~_is_valid(values)), values
    _, most = bounds(dtype.index_type)
    if len(known) > most + 1:
        _refuse_first(array, pc.fill_null(codes, 0).to_numpy(zero_copy_only=False) > most)
        known = known.slice(0, most + 1)
    return pa.DictionaryArray.from_arrays(
        codes.cast(dtype.index_type), known, ordered=dtype.ordered
    )


_WITHOUT_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


# -- arrays --------------------------------------------------------------------------------------


def _is_valid(array: pa.Array) -> Flags:
    flags: Flags = array.is_valid().to_numpy(zero_copy_only=False)
    return flags


def _of_buffer(
    buffer: pa.Buffer | None, dtype: np.dtype[np.generic], start: int, count: int
) -> Numbers:
    if buffer is None or not count:
        return np.zeros(count, dtype)
    return np.frombuffer(buffer, dtype, count=count, offset=start * dtype.itemsize)


def _values(array: pa.Array) -> Numbers:
    """A view of fixed-width values; those of nulls are any."""
    return _of_buffer(array.buffers()[1], numpy_dtype(array.type), array.offset, len(array))


def _of_values(values: Numbers, dtype: pa.DataType, like: pa.Array) -> pa.Array:
    """A copy of numbers as a column of ``dtype``, null where ``like`` is."""
    with np.errstate(over="ignore", invalid="ignore"):  # of values of nulls
        return _of_children(like, dtype, [values.astype(numpy_dtype(dtype), copy=False)], [])


def _of_children(
    like: pa.Array, dtype: pa.DataType, parts: Sequence[Numbers], children: Sequence[pa.Array]
) -> pa.Array:
    """A column of buffers in Arrow's memory, null where ``like`` is."""
    validity = like.is_valid().buffers()[1] if like.null_count else None
    buffers = [validity, *map(_pool_buffer, parts)]
    return pa.Array.from_buffers(dtype, len(like), buffers, children=list(children) or None)


def _pool_buffer(values: Numbers) -> pa.Buffer:
    """A copy that no Python object owns: gRPC may release it without the GIL."""
    buffer = pa.allocate_buffer(values.nbytes)
    if values.nbytes:
        np.frombuffer(buffer, values.dtype)[:] = values
    return buffer


def _take(values: pa.Array, places: pa.Array | Numbers | slice) -> pa.Array:
    """Values by their places; of a null place, or -1: null."""
    if isinstance(places, slice):
        return values.slice(places.start, places.stop - places.start)
    chosen: Any = places
    if isinstance(places, np.ndarray):
        chosen = pa.array(places, mask=places < 0)
    if values.type in _WITHOUT_VIEWS:  # pyarrow has no take() of views
        taken = pc.cast(values, _WITHOUT_VIEWS[values.type]).take(chosen)
        return pc.cast(taken, values.type)
    if pa.types.is_nested(values.type):  # take() of pyarrow 26 counts the offset of a slice of
        values = pa.concat_arrays([values, values.slice(0, 0)])  # nested lists twice
    try:
        return values.take(chosen)
    except pa.ArrowNotImplementedError:
        rows = [
            values.slice(p, 1) if p is not None else pa.nulls(1, values.type)
            for p in chosen.to_pylist()
        ]
        return pa.concat_arrays(rows) if rows else values.slice(0, 0)
