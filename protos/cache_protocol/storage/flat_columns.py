"""Logical columns <-> flat ones, which are stored: numbers without nulls, and Arrow columns. Pure.

    logical                         flat                                 units of null bits
    price: decimal128(10, 2)        price: int64                         price
    address: struct<zip, street>    address.zip, address.street          address, address.zip
    img: fixed_size_list<float>[3]  img: float[3]                        img, img[]
    tags: list<string>              tags: list<string>                   -

- A struct is stored as its fields, nested ones too.
- A number is stored as it is, and dates, times and booleans as numbers. A decimal of at most 18
  digits is an integer without its point. Wider decimals, intervals and binaries of a fixed size are
  a few numbers or bytes a row.
- A fixed-size list of such numbers is one matrix. Every other column is an Arrow column, which has
  its nulls in itself.
- Below a null lies NaN for floats, and 0 for others. Which values are null is in bits: see
  `null_bits`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.errors import RequestError, some_of
from cache_protocol.storage.nested_values import retyped, storage_type

Numbers: TypeAlias = npt.NDArray[np.generic]
Bits: TypeAlias = npt.NDArray[np.bool_]
_MOST_DIGITS = 18  # of a decimal whose integer fits in 64 bits
_SEPARATOR, _VALUES = ".", "[]"


@dataclass(frozen=True)
class FlatColumn:
    """One stored column, or one field of a struct.

    Attributes:
        name: the names of the fields above it and its own, as in ``address.zip``.
        kind: ``number`` (one a row), ``numbers`` (a fixed number a row) or ``arrow``.
        dtype: logical type.
        stored: Arrow type of one number, or of the column if it is ``arrow``.
        shape: of the numbers of a row.
        nullable: whether it may hold nulls.
        storage: what `storage_type` gives for ``dtype``; found once, for the sake of speed.
        is_one_number: whether a value is a number itself, and not stored as other numbers.
    """

    name: str
    kind: Literal["number", "numbers", "arrow"]
    dtype: pa.DataType
    stored: pa.DataType
    shape: tuple[int, ...] = ()
    nullable: bool = True

    storage: pa.DataType = field(init=False, compare=False)
    is_one_number: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", storage_type(self.dtype))
        object.__setattr__(self, "is_one_number", is_number(self.storage))

    @property
    def null_units(self) -> dict[str, int]:
        """Unit of null bits -> its bits a row."""
        if self.kind == "arrow":
            return {}
        units = {self.name: 1}
        if pa.types.is_fixed_size_list(self.storage):
            for depth in range(1, len(self.shape) + 1):
                units[self.name + _VALUES * depth] = math.prod(self.shape[:depth])
        return units


@dataclass(frozen=True)
class FlatStruct:
    """A struct that is stored as its fields."""

    name: str
    dtype: pa.DataType
    children: tuple[FlatColumn | FlatStruct, ...]
    nullable: bool = True

    @property
    def null_units(self) -> dict[str, int]:
        """As those of a `FlatColumn`."""
        return {self.name: 1}


FlatTree: TypeAlias = tuple[FlatColumn | FlatStruct, ...]


@dataclass
class FlatValues:
    """The values of some rows in flat columns.

    Attributes:
        values: flat column -> ``[rows]`` numbers, ``[rows, n]`` numbers, or an Arrow column.
        nulls: unit with nulls -> ``[rows, bits]``, true for a null that is in no null struct.
    """

    values: dict[str, Numbers | pa.Array] = field(default_factory=dict)
    nulls: dict[str, Bits] = field(default_factory=dict)


def flat_tree(logical: pa.Schema) -> FlatTree:
    """The flat columns of a logical schema, in structs as they are.

    Raises:
        RequestError: naming every column that cannot be stored, or names that are not unique.
    """
    problems, tree = [], []
    for column in logical:
        try:
            tree.append(_flat(column, column.name))
        except RequestError as error:
            problems.append(f"{column.name!r}: {error}")
    if problems:
        raise RequestError(some_of(problems, "; "))
    names = Counter(column.name for column in leaves(tree))
    if repeated := sorted(name for name, count in names.items() if count > 1):
        raise RequestError(
            f"several columns, or fields of structs, are named {some_of(map(repr, repeated))}: "
            "give them different names"
        )
    return tuple(tree)


def leaves(tree: Sequence[FlatColumn | FlatStruct]) -> Iterator[FlatColumn]:
    """The stored columns, in order."""
    for node in tree:
        if isinstance(node, FlatStruct):
            yield from leaves(node.children)
        else:
            yield node


def nodes(tree: Sequence[FlatColumn | FlatStruct]) -> Iterator[FlatColumn | FlatStruct]:
    """The stored columns, and the structs that they are in."""
    for node in tree:
        yield node
        if isinstance(node, FlatStruct):
            yield from nodes(node.children)


def is_number(dtype: pa.DataType) -> bool:
    """Whether a column of this stored type is one of integers or floats."""
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype))


def numpy_dtype(number: pa.DataType) -> np.dtype[np.generic]:
    """The numpy dtype of an integer or float type; of times, that of their integers.

    ``to_pandas_dtype`` needs pandas before pyarrow 26.
    """
    unsigned = pa.types.is_unsigned_integer(number)
    kind = "f" if pa.types.is_floating(number) else "u" if unsigned else "i"
    return np.dtype(f"{kind}{number.bit_width // 8}")


def pruned(logical: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The columns of these names, and structs with only the named fields.

    Args:
        names: of columns, or of fields, as in ``address.zip``; each once.

    Raises:
        RequestError: there is no such column, or one is named twice.
    """
    if len(set(names)) != len(names):
        raise RequestError(f"columns must not repeat a name, got {list(names)!r}")
    wanted: dict[str, list[str] | None] = {}
    unknown = []
    for name in names:
        top, inner = _found(logical, name)
        if top is None:
            unknown.append(name)
        elif inner is None or wanted.get(top, []) is None:
            if top in wanted:
                raise RequestError(f"columns name {top!r} and a field of it: name one of them")
            wanted[top] = None
        else:
            fields = wanted.setdefault(top, [])
            assert fields is not None
            fields.append(inner)
    if unknown:
        known = some_of(logical.names, like=unknown[0])
        raise RequestError(f"no column {some_of(map(repr, unknown))}; columns: {known}")
    return pa.schema([_pruned_field(logical.field(top), inner) for top, inner in wanted.items()])


def _found(logical: pa.Schema, name: str) -> tuple[str | None, str | None]:
    """The column of a name, and the rest of the name if it is of a field."""
    if name in logical.names:
        return name, None
    for column in logical:
        rest = name.removeprefix(column.name + _SEPARATOR)
        if rest != name and pa.types.is_struct(column.type):
            inner, _ = _found(pa.schema(list(column.type)), rest)
            if inner is not None:
                return column.name, rest
    return None, None


def field_path(logical: pa.Schema, name: str) -> list[str]:
    """The column of a name, and the fields below it, as in ``["address", "zip"]``."""
    top, inner = _found(logical, name)
    if top is None or inner is None:
        return [name]
    return [top, *field_path(pa.schema(list(logical.field(top).type)), inner)]


def _pruned_field(column: pa.Field, inner: list[str] | None) -> pa.Field:
    if inner is None:
        return column
    return column.with_type(pa.struct(list(pruned(pa.schema(list(column.type)), inner))))


def _flat(column: pa.Field, name: str) -> FlatColumn | FlatStruct:
    dtype, nullable = column.type, column.nullable
    plain = dtype.storage_type if isinstance(dtype, pa.BaseExtensionType) else dtype
    if pa.types.is_struct(plain) and len({child.name for child in plain}) == plain.num_fields > 0:
        children = [_flat(child, f"{name}{_SEPARATOR}{child.name}") for child in plain]
        return FlatStruct(name, dtype, tuple(children), nullable)
    stored = storage_type(dtype)
    if (words := _words(stored)) is not None:
        number, count = words
        if count == 1:
            return FlatColumn(name, "number", dtype, number, (), nullable)
        return FlatColumn(name, "numbers", dtype, number, (count,), nullable)
    if is_number(stored):
        return FlatColumn(name, "number", dtype, stored, (), nullable)
    shape: tuple[int, ...]
    shape, value_type = list_shape(stored)
    if shape and is_number(value_type) and 0 not in shape:
        return FlatColumn(name, "numbers", dtype, value_type, shape, nullable)
    return FlatColumn(name, "arrow", dtype, stored, (), nullable)


def list_shape(dtype: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    """Shape of one row and type of the values of a nested fixed-size list type."""
    shape: list[int] = []
    while pa.types.is_fixed_size_list(dtype):
        shape.append(dtype.list_size)
        dtype = dtype.value_type
    return tuple(shape), dtype


def _words(stored: pa.DataType) -> tuple[pa.DataType, int] | None:
    """The numbers that a value of fixed size is stored as, if it is no number itself."""
    types = pa.types
    if types.is_decimal(stored):
        if stored.bit_width <= 64:
            return (pa.int32() if stored.bit_width == 32 else pa.int64()), 1
        return pa.int64(), 1 if stored.precision <= _MOST_DIGITS else stored.bit_width // 64
    if types.is_interval(stored):
        return pa.int64(), 2
    if types.is_fixed_size_binary(stored) and stored.byte_width:
        return pa.uint8(), stored.byte_width
    return None


def take_apart(tree: FlatTree, columns: Sequence[pa.Array]) -> FlatValues:
    """The flat values of columns of the logical types of a tree."""
    found = FlatValues()
    for node, array in zip(tree, columns, strict=True):
        _take_apart(node, array, found, None)
    return found


def _take_apart(
    node: FlatColumn | FlatStruct, array: pa.Array, found: FlatValues, hidden: Bits | None
) -> None:
    """Adds the values of a column to ``found``.

    Args:
        hidden: the rows where a struct around the column is null.
    """
    if isinstance(node, FlatStruct):
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if array.null_count:
            nulls = _note_nulls(node.name, array, found, hidden)
            hidden = nulls if hidden is None else nulls | hidden
        for index, child in enumerate(node.children):
            _take_apart(child, array.field(index), found, hidden)
        return
    stored = retyped(array, node.storage)
    if node.kind == "arrow":
        found.values[node.name] = stored
        return
    if stored.null_count:
        _note_nulls(node.name, stored, found, hidden)
    if node.is_one_number:
        found.values[node.name] = _filled(stored)
        return
    if not pa.types.is_fixed_size_list(stored.type):
        found.values[node.name] = _words_of(stored, node)
        return
    num_rows = len(array)
    for depth in range(1, len(node.shape) + 1):
        size = stored.type.list_size
        around = _nulls_of(stored).reshape(-1) if stored.null_count else None
        stored = stored.values.slice(stored.offset * size, len(stored) * size)
        if stored.null_count:
            nulls = _nulls_of(stored).reshape(num_rows, math.prod(node.shape[:depth]))
            if around is not None:  # what lies in a null list is no null of its own
                nulls = nulls & ~np.repeat(around, size).reshape(nulls.shape)
            if nulls.any():
                found.nulls[node.name + _VALUES * depth] = nulls
        if around is not None:
            visible = pa.array(~np.repeat(around, size))
            stored = pc.if_else(visible, stored, pa.scalar(None, stored.type))
    found.values[node.name] = _filled(stored).reshape(num_rows, math.prod(node.shape))


def _note_nulls(name: str, array: pa.Array, found: FlatValues, hidden: Bits | None) -> Bits:
    nulls = _nulls_of(array)
    if hidden is not None:
        nulls = nulls & ~hidden
    if nulls.any():
        found.nulls[name] = nulls
    return nulls


def _filled(array: pa.Array) -> Numbers:
    """Numbers, with NaN or 0 in place of nulls."""
    if array.null_count:
        below = math.nan if pa.types.is_floating(array.type) else 0
        array = array.fill_null(pa.scalar(numpy_dtype(array.type).type(below), array.type))
    numbers: Numbers = array.to_numpy(zero_copy_only=True)
    return numbers


def _nulls_of(array: pa.Array) -> Bits:
    nulls: Bits = array.is_null().to_numpy(zero_copy_only=False)
    return nulls.reshape(len(array), 1)


def _words_of(array: pa.Array, node: FlatColumn) -> Numbers:
    """The numbers of decimals, intervals or binaries of a fixed size; 0 in place of nulls."""
    dtype = numpy_dtype(node.stored)
    each = array.type.byte_width // dtype.itemsize
    if not len(array):
        return np.empty((0,) if node.kind == "number" else (0, each), dtype)
    stop = array.offset + len(array)
    words = np.frombuffer(array.buffers()[1], dtype, stop * each).reshape(-1, each)[array.offset :]
    if node.kind == "number":
        words = words[:, 0]
    if array.null_count:
        words = words.copy()
        words[_nulls_of(array)[:, 0]] = 0
    return words


def put_together(tree: FlatTree, flat: FlatValues) -> list[pa.Array]:
    """The columns of the logical types of a tree, from their flat values.

    Args:
        flat: numbers as Arrow columns without nulls, or as arrays.
    """
    return [_put_together(node, flat) for node in tree]


def _put_together(node: FlatColumn | FlatStruct, flat: FlatValues) -> pa.Array:
    nulls = flat.nulls.get(node.name)
    if isinstance(node, FlatStruct):
        children = [_put_together(child, flat) for child in node.children]
        dtype = node.dtype
        plain = dtype.storage_type if isinstance(dtype, pa.BaseExtensionType) else dtype
        array = _from_buffers(plain, len(children[0]), nulls, children=children)
        return retyped(array, dtype)
    values = flat.values[node.name]
    if node.kind == "arrow":
        return retyped(values, node.dtype)
    stored = node.storage
    if node.shape and pa.types.is_fixed_size_list(stored):
        return retyped(_lists(node, values, stored, flat.nulls), node.dtype)
    num_rows = len(values)
    if not node.is_one_number:
        array = _from_buffers(stored, num_rows, nulls, _bytes_of(values, stored, node))
    elif nulls is None and isinstance(values, pa.Array):
        array = values
    else:
        array = _from_buffers(stored, num_rows, nulls, _buffer(values))
    return retyped(array, node.dtype)


def _lists(
    node: FlatColumn, values: Numbers | pa.Array, stored: pa.DataType, nulls: Mapping[str, Bits]
) -> pa.Array:
    levels, dtype = [], stored
    while pa.types.is_fixed_size_list(dtype):
        levels.append(dtype)
        dtype = dtype.value_type
    flat = values.reshape(-1) if isinstance(values, np.ndarray) else values.flatten()
    num_rows = len(values)
    depth = len(levels)
    mask = nulls.get(node.name + _VALUES * depth)
    array = (
        flat
        if mask is None and isinstance(flat, pa.Array)
        else _from_buffers(dtype, len(flat), mask, _buffer(flat))
    )
    for level in reversed(levels):
        depth -= 1
        mask = nulls.get(node.name + _VALUES * depth)
        count = num_rows * math.prod(node.shape[:depth])
        array = _from_buffers(level, count, mask, children=[array])
    return array


def _bytes_of(values: Numbers | pa.Array, stored: pa.DataType, node: FlatColumn) -> pa.Buffer:
    """The buffer of decimals, intervals or binaries of a fixed size."""
    if node.kind == "number" and pa.types.is_decimal(stored) and stored.bit_width > 64:
        low = np.asarray(values, np.int64)
        width = stored.bit_width // 64
        buffer = pa.allocate_buffer(len(low) * width * 8)
        words = np.frombuffer(buffer, np.int64).reshape(-1, width)
        words[:, 0] = low
        words[:, 1:] = (low >> 63)[:, None]
        return buffer
    if not isinstance(values, np.ndarray) and pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return _buffer(values)


def _buffer(values: Numbers | pa.Array) -> pa.Buffer:
    """The memory of numbers, from the first one on; no copy of Arrow's memory."""
    if isinstance(values, np.ndarray):
        return pa.py_buffer(np.ascontiguousarray(values))
    size = values.type.bit_width // 8
    return values.buffers()[1].slice(values.offset * size, len(values) * size)


def _from_buffers(
    dtype: pa.DataType,
    num_rows: int,
    nulls: Bits | None,
    data: pa.Buffer | None = None,
    children: Sequence[pa.Array] = (),
) -> pa.Array:
    validity = None
    if nulls is not None and nulls.any():
        packed = np.packbits(~nulls.reshape(-1), bitorder="little")
        validity = pa.allocate_buffer(len(packed))  # of Arrow's pool: see `layout`
        np.frombuffer(validity, np.uint8)[:] = packed
    buffers = [validity] if children else [validity, data]
    if children:
        return pa.Array.from_buffers(dtype, num_rows, buffers, children=list(children))
    return pa.Array.from_buffers(dtype, num_rows, buffers)
