"""The packed layout: how logical columns are stored in a record batch. Pure.

Scalar columns of one dtype are *packed* row-major into one fixed-size list column. So a row is one
short run of bytes, and gathering a random row costs one copy instead of one cache miss a column.
Each fixed-size list is a *matrix* column. Everything else is *plain*, and last.

    logical   a: float32   b: int64   c: float32   img: uint8[784]   s: string
    stored    img: uint8[784]   [a c]: float32[2]   [b]: int64[1]   s: string

The layout depends only on the logical schema. The metadata of a stored schema also has it: each
packed field names its columns, and the schema carries the logical schema.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.errors import RequestError

COLUMNS_KEY = b"cache.columns"
LOGICAL_SCHEMA_KEY = b"cache.logical_schema"
GUESSED_VALUE_BYTES = 32  # of a string or list of unknown length
_ROWS_A_TIME = 512  # of a copy of columns, so that what is read stays in the processor's cache

Matrix = npt.NDArray[np.generic]


@dataclass(frozen=True)
class StoredColumn:
    """One column of a stored batch.

    Attributes:
        kind: ``packed`` (several logical scalar columns), ``matrix`` (one fixed-size list) or
            ``plain`` (one unchanged column).
        names: its logical columns; one unless packed.
        field: the stored Arrow field.
        dtype: of the values, for packed and matrix columns.
        width: values a row, for packed and matrix columns; 0 for plain ones.
        shape: of one row, for matrix columns: ``(784,)`` or ``(28, 28)``.
    """

    kind: Literal["packed", "matrix", "plain"]
    names: tuple[str, ...]
    field: pa.Field
    dtype: np.dtype[np.generic] | None = None
    width: int = 0
    shape: tuple[int, ...] = ()


class Layout:
    """The stored columns of a logical schema. Immutable, thread-safe.

    Args:
        logical: fields of storage types (see `cache_server.shards.packing`); names must be unique.

    Attributes:
        columns: of a stored batch.
        schema: of a stored batch; its metadata has the logical schema.
        fixed_row_bytes: bytes a row in packed and matrix columns.
        plain_fields: of the plain columns.
        guessed_row_bytes: bytes a row, `GUESSED_VALUE_BYTES` for each plain column.
    """

    # Computes everything here: the lock of a cached_property may stay locked in a forked child.

    def __init__(self, logical: pa.Schema) -> None:
        self.logical = logical
        self.columns: tuple[StoredColumn, ...] = _stored_columns(logical)
        self._place: dict[str, tuple[int, int]] = {
            name: (index, position)
            for index, column in enumerate(self.columns)
            for position, name in enumerate(column.names)
        }
        encoded = base64.b64encode(logical.serialize().to_pybytes())
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
        layout = cls(schema_from_bytes(base64.b64decode(encoded)))
        if not layout.schema.equals(schema):
            raise ValueError("the stored schema does not match its logical schema")
        return layout

    def place(self, name: str) -> tuple[int, int]:
        """Index of the stored column that holds ``name``, and its position inside it."""
        return self._place[name]

    def select(self, names: Sequence[str]) -> Layout:
        """The layout of these logical columns, in this order; empty means all.

        Raises:
            RequestError: names an unknown or repeated column.
        """
        if not names:
            return self
        unknown = [name for name in names if name not in self._place]
        if unknown:
            raise RequestError(
                f"no column {', '.join(map(repr, unknown))}; "
                f"columns: {', '.join(self.logical.names)}"
            )
        if len(set(names)) != len(names):
            raise RequestError(f"columns must not repeat a name, got {list(names)!r}")
        if list(names) == self.logical.names:
            return self
        return Layout(pa.schema([self.logical.field(name) for name in names]))

    def stored_bytes(self, batch: pa.RecordBatch) -> int:
        """About the bytes of a batch of logical columns, once it is stored."""
        plain = sum(int(batch.column(field.name).nbytes) for field in self.plain_fields)
        return int(batch.num_rows) * self.fixed_row_bytes + plain

    def unpack(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The logical columns of a stored batch; copies packed ones."""
        arrays: dict[str, pa.Array] = {}
        for column, array in zip(self.columns, batch.columns, strict=True):
            if column.kind == "packed":
                arrays.update(zip(column.names, _columns_of(as_matrix(array)), strict=True))
            elif column.kind == "matrix":
                arrays[column.names[0]] = nest(array, self.logical.field(column.names[0]).type)
            else:
                arrays[column.names[0]] = array
        return pa.RecordBatch.from_arrays(
            [arrays[name] for name in self.logical.names], schema=self.logical
        )


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
    if not is_scalar(dtype.value_type) or not len(array) or array.null_count:
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


def list_shape(dtype: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    """Shape of one row and type of the values of a nested fixed-size list type."""
    shape: list[int] = []
    while pa.types.is_fixed_size_list(dtype):
        shape.append(dtype.list_size)
        dtype = dtype.value_type
    return tuple(shape), dtype


def nest(array: pa.FixedSizeListArray, dtype: pa.DataType) -> pa.Array:
    """A flat fixed-size list column as the nested type ``dtype`` of the same values; no copy."""
    shape, _ = list_shape(dtype)
    if len(shape) == 1:
        return array
    levels = [dtype]
    while pa.types.is_fixed_size_list(levels[-1].value_type):
        levels.append(levels[-1].value_type)
    values: pa.Array = array.flatten()
    for level in reversed(levels):
        values = pa.FixedSizeListArray.from_arrays(values, type=level)
    return values


def is_scalar(dtype: pa.DataType) -> bool:
    """Whether values of this type are packed: integers and floats."""
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype))


def numpy_dtype(scalar: pa.DataType) -> np.dtype[np.generic]:
    """The numpy dtype of an integer or float type.

    ``to_pandas_dtype`` needs pandas before pyarrow 26.
    """
    unsigned = pa.types.is_unsigned_integer(scalar)
    kind = "f" if pa.types.is_floating(scalar) else "u" if unsigned else "i"
    return np.dtype(f"{kind}{scalar.bit_width // 8}")


def _stored_columns(logical: pa.Schema) -> tuple[StoredColumn, ...]:
    groups: dict[pa.DataType, list[str]] = {}
    order: list[pa.DataType | pa.Field] = []
    for field in logical:
        if is_scalar(field.type):
            if field.type not in groups:
                order.append(field.type)
            groups.setdefault(field.type, []).append(field.name)
        else:
            order.append(field)
    columns = [
        _packed(item, groups[item]) if isinstance(item, pa.DataType) else _single(item)
        for item in order
    ]
    # Plain columns last, so that the offsets of the others do not depend on their sizes. The others
    # by the power of two in their row size, largest first. So the offset of each column, modulo
    # that power, is the same in every file, whatever the number of rows.
    return tuple(sorted(columns, key=lambda column: (column.kind == "plain", -_alignment(column))))


def _alignment(column: StoredColumn) -> int:
    """The largest power of two that divides the bytes of a row; 0 for a plain column."""
    row_bytes = 0 if column.dtype is None else column.width * column.dtype.itemsize
    return row_bytes & -row_bytes


def _packed(value_type: pa.DataType, names: Iterable[str]) -> StoredColumn:
    columns = tuple(names)
    field = pa.field(
        f"packed_{value_type}",
        pa.list_(pa.field("item", value_type, nullable=False), len(columns)),
        nullable=False,
        metadata={COLUMNS_KEY: json.dumps(columns).encode()},
    )
    dtype = numpy_dtype(value_type)
    return StoredColumn("packed", columns, field, dtype, len(columns))


def _single(field: pa.Field) -> StoredColumn:
    shape, value_type = list_shape(field.type)
    if not shape or not is_scalar(value_type):
        return StoredColumn("plain", (field.name,), field)
    width = math.prod(shape)
    flat = pa.field(
        field.name,
        pa.list_(pa.field("item", value_type, nullable=False), width),
        nullable=False,
        metadata=field.metadata,
    )
    dtype = numpy_dtype(value_type)
    return StoredColumn("matrix", (field.name,), flat, dtype, width, shape)
