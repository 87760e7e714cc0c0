"""The packed layout: how logical columns are stored in a record batch. Pure.

The logical schema is the dataset's schema: columns come out as they went in. They are stored as
flat columns, see `flat_columns`. Numbers of one type are *packed* row-major into one fixed-size
list column. So a row is one short run of bytes, and gathering a random row costs one copy instead
of one cache miss a column. Each fixed-size list is a *matrix* column. Everything else is *plain*.
Last are the *null bits*, if a column has nulls.

    logical   a: float32   b: bool      c: float32   img: uint8[784]   s: string
    stored    img: uint8[784]   [a c]: float32[2]   [b]: uint8[1]   s: string   bits: uint8[1]

The layout depends only on the logical schema and on the columns that have nulls. The metadata of a
stored schema has both.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.errors import RequestError
from cache_protocol.storage.flat_columns import (
    FlatColumn,
    FlatValues,
    flat_tree,
    is_number,
    leaves,
    nodes,
    numpy_dtype,
    pruned,
    put_together,
)
from cache_protocol.storage.nested_values import decoded_bytes, without_codes
from cache_protocol.storage.null_bits import NullBits

COLUMNS_KEY = b"cache.columns"
LOGICAL_SCHEMA_KEY = b"cache.logical_schema"
_NULLS_KEY = b"cache.nulls"  # these two are in the metadata of a described schema
_LARGE_KEY = b"cache.large_offsets"
NULL_BITS = "null_bits"  # the stored field; no logical column
GUESSED_VALUE_BYTES = 32  # of a string or list of unknown length
_ROWS_A_TIME = 512  # of a copy of columns, so that what is read stays in the processor's cache

Matrix = npt.NDArray[np.generic]


@dataclass(frozen=True)
class StoredColumn:
    """One column of a stored batch.

    Attributes:
        kind: ``packed`` (several flat columns of numbers), ``matrix`` (one of fixed-size lists),
            ``plain`` (one Arrow column) or ``nulls`` (the null bits).
        names: its flat columns; one unless packed, none of null bits.
        field: the stored Arrow field.
        dtype: of the numbers; None for plain columns.
        width: numbers a row; 0 for plain columns.
        shape: of one row, for matrix columns: ``(784,)`` or ``(28, 28)``.
    """

    kind: Literal["packed", "matrix", "plain", "nulls"]
    names: tuple[str, ...]
    field: pa.Field
    dtype: np.dtype[np.generic] | None = None
    width: int = 0
    shape: tuple[int, ...] = ()


class Layout:
    """The stored columns of a logical schema. Immutable, thread-safe.

    Args:
        logical: names must be unique; may be a described one.
        null_names: the units of null bits, see `flat_columns`; default: those of ``logical``.

    Attributes:
        logical: as users see it.
        described: the same with metadata that says which units have nulls, and how strings and
            lists are stored; to be sent to others.
        tree: the flat columns of the logical ones.
        flat: the flat columns by name, in order.
        nulls: the null bits of a row.
        columns: of a stored batch.
        schema: of a stored batch; its metadata has the described schema.
        fixed_row_bytes: bytes a row of all but plain columns.
        plain_fields: of the plain columns.
        guessed_row_bytes: bytes a row, `GUESSED_VALUE_BYTES` for each plain column.

    Raises:
        RequestError: naming every column that cannot be stored, or names that are not unique.
    """

    # Computes everything here: the lock of a cached_property may stay locked in a forked child.

    def __init__(self, logical: pa.Schema, null_names: Collection[str] | None = None) -> None:
        metadata = dict(logical.metadata or {})
        is_large = metadata.pop(_LARGE_KEY, None)
        known = json.loads(metadata.pop(_NULLS_KEY, b"[]"))
        self.logical = logical.with_metadata(metadata or None)
        self.tree = flat_tree(logical)
        self.flat: dict[str, FlatColumn] = {column.name: column for column in leaves(self.tree)}
        self.nulls = NullBits(self.tree, known if null_names is None else null_names)
        if is_large:
            metadata[_LARGE_KEY] = is_large
        if self.nulls.units:
            metadata[_NULLS_KEY] = json.dumps(list(self.nulls.units)).encode()
        self.described = logical.with_metadata(metadata or None)
        self.columns: tuple[StoredColumn, ...] = _stored_columns(
            list(self.flat.values()), self.nulls.width, is_large=bool(is_large)
        )
        self._place: dict[str, tuple[int, int]] = {
            name: (index, position)
            for index, column in enumerate(self.columns)
            for position, name in enumerate(column.names)
        }
        encoded = base64.b64encode(self.described.serialize().to_pybytes())
        self.schema: pa.Schema = pa.schema(
            [column.field for column in self.columns], metadata={LOGICAL_SCHEMA_KEY: encoded}
        )
        self.fixed_row_bytes: int = sum(
            c.width * c.dtype.itemsize for c in self.columns if c.dtype is not None
        )
        self.plain_fields = tuple(c.field for c in self.columns if c.kind == "plain")
        guessed = len(self.plain_fields) * GUESSED_VALUE_BYTES
        self.guessed_row_bytes: int = self.fixed_row_bytes + guessed

    @classmethod
    def of_stored(cls, schema: pa.Schema) -> Layout:
        """The layout in the metadata of a stored schema.

        Raises:
            ValueError: it is no schema of a stored batch.
        """
        encoded = (schema.metadata or {}).get(LOGICAL_SCHEMA_KEY)
        if encoded is None:
            raise ValueError("the schema has no logical schema in its metadata: not a stored batch")
        try:
            layout = cls(schema_from_bytes(base64.b64decode(encoded)))
        except RequestError as error:
            raise ValueError(f"the logical schema is damaged: {error}") from None
        if not layout.schema.equals(schema):
            raise ValueError("the stored schema does not match its logical schema")
        return layout

    @property
    def announced(self) -> pa.Schema:
        """The schema that any Flight client sees: that of the rows of DoGet.

        Its metadata has the described schema, for clients of this project.
        """
        metadata = {**(self.logical.metadata or {}), **(self.schema.metadata or {})}
        return without_codes(self.logical).with_metadata(metadata)

    @property
    def null_index(self) -> int | None:
        """Index of the stored column of null bits; None if there is none."""
        return len(self.columns) - 1 if self.nulls.width else None

    def with_nulls(self, names: Collection[str]) -> Layout:
        """The layout of the same columns with these units of null bits."""
        same = set(names) == self.nulls.units.keys()
        return self if same else Layout(self.described, names)

    def place(self, name: str) -> tuple[int, int]:
        """Index of the stored column that holds flat column ``name``, and its position inside."""
        return self._place[name]

    def select(self, names: Sequence[str]) -> Layout:
        """The layout of these columns, or fields of structs, in this order; empty means all.

        Raises:
            RequestError: names an unknown or repeated column.
        """
        if not names or list(names) == self.logical.names:
            return self
        chosen = pruned(self.described, names).with_metadata(self.described.metadata)
        units = {name for node in nodes(flat_tree(chosen)) for name in node.null_units}
        return Layout(chosen, units & self.nulls.units.keys())

    def stored_bytes(self, batch: pa.RecordBatch) -> int:
        """About the bytes of a batch of logical columns, once it is stored."""
        plain = sum(
            decoded_bytes(column)
            for column, field in zip(batch.columns, self.logical, strict=True)
            if field.name not in self.flat or self.flat[field.name].kind == "arrow"
        )
        return int(batch.num_rows) * self.fixed_row_bytes + plain

    def unpack(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The logical columns of a stored batch; copies packed ones."""
        flat = FlatValues()
        for column, array in zip(self.columns, batch.columns, strict=True):
            if column.kind == "packed":
                flat.values.update(zip(column.names, _columns_of(as_matrix(array)), strict=True))
            elif column.kind == "nulls":
                flat.nulls = self.nulls.unpack_all(as_matrix(array).view(np.uint8))
            else:
                flat.values[column.names[0]] = array
        return pa.RecordBatch.from_arrays(put_together(self.tree, flat), schema=self.logical)


def described_in(announced: pa.Schema) -> pa.Schema:
    """The described schema in an announced one."""
    encoded = (announced.metadata or {}).get(LOGICAL_SCHEMA_KEY)
    return announced if encoded is None else schema_from_bytes(base64.b64decode(encoded))


def schema_from_bytes(data: bytes) -> pa.Schema:
    """The schema of an Arrow IPC schema message."""
    return pa.ipc.read_schema(pa.py_buffer(data))


def as_matrix(array: pa.FixedSizeListArray) -> Matrix:
    """A ``[rows, width]`` view of a fixed-size list column without nulls; no copy."""
    width = array.type.list_size
    start = array.offset * width
    values: Matrix = array.values.to_numpy(zero_copy_only=True)
    return values[start : start + len(array) * width].reshape(len(array), width)


def from_matrix(values: Matrix, field: pa.Field) -> pa.FixedSizeListArray:
    """The fixed-size list column of a C-contiguous ``[rows, width]`` array; no copy."""
    return pa.FixedSizeListArray.from_arrays(_as_array(values.reshape(-1)), type=field.type)


def equal_lists(array: pa.Array) -> Matrix | None:
    """A ``[rows, width]`` view of a column of lists of numbers, all of one length.

    Returns:
        None if lengths differ or are 0, there are nulls, the values are no numbers, or there is no
        row.
    """
    dtype = array.type
    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
        return None
    if not is_number(dtype.value_type) or not len(array) or array.null_count:
        return None
    offsets = array.offsets.to_numpy()
    start, width = int(offsets[0]), int(offsets[1] - offsets[0])
    if not width or not (np.diff(offsets) == width).all():
        return None
    if start < 0 or width < 0 or start + width * len(array) > len(array.values):
        return None  # damaged
    values = array.values.slice(start, width * len(array))
    if values.null_count:
        return None
    matrix: Matrix = values.to_numpy(zero_copy_only=True).reshape(len(array), width)
    return matrix


def fits_lists(num_rows: int, width: int, dtype: pa.DataType) -> bool:
    """Whether a column of lists has offsets for so many values."""
    return bool(pa.types.is_large_list(dtype)) or num_rows * width <= np.iinfo(np.int32).max


def from_equal_lists(matrix: Matrix, dtype: pa.DataType) -> pa.Array:
    """The column of lists of type ``dtype`` with the rows of a C-contiguous matrix; no copy."""
    rows, width = matrix.shape
    is_large = pa.types.is_large_list(dtype)
    offsets = pool_matrix(1, rows + 1, np.dtype(np.int64 if is_large else np.int32))
    np.multiply(np.arange(rows + 1), width, out=offsets[0], casting="same_kind")
    values = _as_array(matrix.reshape(-1))
    return pa.Array.from_buffers(
        dtype, rows, [None, _as_array(offsets[0]).buffers()[1]], 0, children=[values]
    )


def _columns_of(matrix: Matrix) -> list[pa.Array]:
    """The columns of a matrix as columns in Arrow's memory pool; a copy."""
    rows, width = matrix.shape
    size = rows * matrix.itemsize
    buffer = _as_array(transposed(matrix).reshape(-1)).buffers()[1]
    scalar = pa.from_numpy_dtype(matrix.dtype)
    return [
        pa.Array.from_buffers(scalar, rows, [None, buffer.slice(at * size, size)], 0)
        for at in range(width)
    ]


def transposed(matrix: Matrix) -> Matrix:
    """A contiguous ``[width, rows]`` copy in Arrow's memory pool."""
    rows, width = matrix.shape
    copy = pool_matrix(width, rows, matrix.dtype)
    for start in range(0, rows, _ROWS_A_TIME):
        copy[:, start : start + _ROWS_A_TIME] = matrix[start : start + _ROWS_A_TIME].T
    return copy


def _as_array(values: npt.NDArray[np.generic]) -> pa.Array:
    """The column of a contiguous 1-D array; no copy.

    If the memory is from Arrow's pool, the column holds no Python object. So gRPC's threads can
    release sent data without the GIL. Otherwise they would wait for it, and a thread that asks for
    the GIL while the interpreter ends crashes the process.
    """
    owner: object = values
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, pa.Buffer) and values.nbytes:
        buffer = owner.slice(values.ctypes.data - owner.address, values.nbytes)  # pyright: ignore
    else:
        buffer = pa.py_buffer(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def pool_array(values: npt.NDArray[np.generic]) -> pa.Array:
    """The column of a copy of a 1-D array, in Arrow's memory pool, ready to be sent."""
    copy = pool_matrix(1, len(values), values.dtype)
    copy[0] = values
    return _as_array(copy[0])


def pool_matrix(rows: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
    """An uninitialised ``[rows, width]`` array in Arrow's memory pool.

    The pool keeps freed pages for a moment, so the next array of that size has no page faults.
    """
    buffer = pa.allocate_buffer(rows * width * dtype.itemsize)
    return np.frombuffer(buffer, dtype, count=rows * width).reshape(rows, width)


def _stored_columns(
    flat: Sequence[FlatColumn], null_bytes: int, *, is_large: bool
) -> tuple[StoredColumn, ...]:
    groups: dict[pa.DataType, list[str]] = {}
    order: list[pa.DataType | FlatColumn] = []
    for column in flat:
        if column.kind == "number":
            if column.stored not in groups:
                order.append(column.stored)
            groups.setdefault(column.stored, []).append(column.name)
        else:
            order.append(column)
    columns = [
        _packed(item, groups[item])
        if isinstance(item, pa.DataType)
        else _matrix(item)
        if item.kind == "numbers"
        else _plain(item, is_large=is_large)
        for item in order
    ]
    # Plain columns last, so that the offsets of the others do not depend on their sizes. The others
    # by the power of two in their row size, largest first. So the offset of each column, modulo
    # that power, is the same in every file, whatever the number of rows.
    columns.sort(key=lambda column: (column.kind == "plain", -_alignment(column)))
    if null_bytes:  # after all others, whose places in a file are known before the nulls are
        bits = _list_field(NULL_BITS, pa.uint8(), null_bytes)
        columns.append(StoredColumn("nulls", (), bits, np.dtype(np.uint8), null_bytes))
    return tuple(columns)


def _alignment(column: StoredColumn) -> int:
    """The largest power of two that divides the bytes of a row; 0 for a plain column."""
    row_bytes = 0 if column.dtype is None else column.width * column.dtype.itemsize
    return row_bytes & -row_bytes


def _packed(value_type: pa.DataType, names: Iterable[str]) -> StoredColumn:
    columns = tuple(names)
    metadata = {COLUMNS_KEY: json.dumps(columns).encode()}
    field = _list_field(f"packed_{value_type}", value_type, len(columns), metadata)
    return StoredColumn("packed", columns, field, numpy_dtype(value_type), len(columns))


def _matrix(column: FlatColumn) -> StoredColumn:
    width = math.prod(column.shape)
    field = _list_field(column.name, column.stored, width)
    dtype = numpy_dtype(column.stored)
    return StoredColumn("matrix", (column.name,), field, dtype, width, column.shape)


def _plain(column: FlatColumn, *, is_large: bool) -> StoredColumn:
    dtype = _large(column.stored) if is_large else column.stored
    return StoredColumn("plain", (column.name,), pa.field(column.name, dtype))


def _list_field(
    name: str, value_type: pa.DataType, width: int, metadata: Mapping[bytes, bytes] | None = None
) -> pa.Field:
    item = pa.field("item", value_type, nullable=False)
    return pa.field(name, pa.list_(item, width), nullable=False, metadata=metadata)


def with_large_offsets(logical: pa.Schema) -> pa.Schema:
    """The same logical schema, whose strings and lists are stored with 64-bit offsets.

    For shards with more than 2 GiB of values in a column.
    """
    return logical.with_metadata({**(logical.metadata or {}), _LARGE_KEY: b"1"})


def _large(dtype: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string(dtype):
        return pa.large_string()
    if types.is_binary(dtype):
        return pa.large_binary()
    if types.is_list(dtype) or types.is_large_list(dtype):
        return pa.large_list(_large(dtype.value_type))
    return dtype
