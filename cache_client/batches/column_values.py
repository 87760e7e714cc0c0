"""Values of one column as numpy and torch have them: times, booleans, decimals, lists, texts.

| Arrow | torch, jax | numpy |
|---|---|---|
| booleans | bool | bool |
| dates, timestamps | int64 | datetime64 |
| durations | int64 | timedelta64 |
| times of day | int64 | int64 |
| decimals | float64, the nearest | the same |

Knows no rows of other columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from cache_client.batches.batch_formats import ListColumn
from cache_client.job.arguments import BatchFormat
from cache_protocol.errors import InvalidTextError
from cache_protocol.storage.decimals import nearest_floats, scaled_floats
from cache_protocol.storage.flat_columns import (
    FlatColumn,
    FlatValues,
    is_number,
    list_shape,
    put_together,
)
from cache_protocol.storage.layout import equal_lists, pool_matrix
from cache_protocol.storage.nested_values import plain_type, retyped, storage_type

Array = npt.NDArray[np.generic]
Finish = Callable[[Any], Any]

# NumPy takes 0.03 us a string. So does `to_pylist` of pyarrow 26; that of pyarrow 22 takes 0.5 us.
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def finish_of(dtype: pa.DataType, batch_format: BatchFormat) -> Finish | None:
    """What makes stored numbers those of a type; None if they are it.

    Args:
        dtype: of one value.
    """
    types = pa.types
    if types.is_boolean(dtype):
        return _as_bools
    if not types.is_temporal(dtype) or types.is_interval(dtype):
        return None
    if batch_format != "numpy" or types.is_time(dtype):
        return _as_int64 if dtype.bit_width < 64 else None
    kind = "m" if types.is_duration(dtype) else "M"
    days, milliseconds = types.is_date32(dtype), types.is_date64(dtype)
    unit = "D" if days else "ms" if milliseconds else dtype.unit
    return lambda value: _as_times(value, f"{kind}8[{unit}]")


def _as_bools(value: Any) -> Any:
    """Numbers 0 and 1 as bools: a view of a tensor or an array; lists in place."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.bool)
    return value.view(np.bool_) if isinstance(value, np.ndarray) else _each(value, bool)


def _as_int64(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.int64)
    return value.astype(np.int64) if isinstance(value, np.ndarray) else value


def _as_times(value: Any, dtype: str) -> Any:
    """Integers as times: a view; lists in place."""
    if isinstance(value, np.ndarray):
        return value.astype(np.int64, copy=False).view(dtype)
    return _each(value, lambda number: np.int64(number).view(dtype))


def _each(values: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values]


def shape_of(column: FlatColumn) -> Callable[[Array], Array]:
    """What gives stored values ``[B, n]`` of fixed-size lists or tensors their shape; a view."""
    dtype, shape = column.dtype, column.shape
    if not isinstance(dtype, pa.FixedShapeTensorType):
        return lambda values: values.reshape(len(values), *shape)
    order = [0, *(at + 1 for at in dtype.permutation or range(len(dtype.shape)))]
    return lambda values: values.reshape(len(values), *dtype.shape).transpose(order)


def floats_of(
    column: FlatColumn, stored: Array, nulls: npt.NDArray[np.bool_] | None, fill: float
) -> Array:
    """The nearest float64 of decimals, ``fill`` for nulls; a new array."""
    dtype = plain_type(column.dtype)
    if column.kind == "number":
        found: Array = scaled_floats(stored, dtype.scale)  # type: ignore[arg-type]
    else:
        found = nearest_floats(_as_arrow(column, dtype, stored)).to_numpy().copy()
    if nulls is not None:
        found[nulls] = fill
    return found


def _as_arrow(column: FlatColumn, dtype: pa.DataType, stored: Array) -> pa.Array:
    plain = FlatColumn(column.name, column.kind, dtype, column.stored, column.shape)
    flat = FlatValues({column.name: np.ascontiguousarray(stored)})
    (found,) = put_together((plain,), flat)
    return found


def words_of(column: FlatColumn, stored: Array, nulls: npt.NDArray[np.bool_] | None) -> list[Any]:
    """Binaries of a fixed size as ``bytes``, intervals as named tuples; None for nulls."""
    dtype = plain_type(column.dtype)
    found: list[Any] = without(_as_arrow(column, dtype, stored).to_pylist(), nulls)
    return found


def without(values: Any, nulls: npt.NDArray[np.bool_] | None) -> Any:
    """The same list with None for nulls, or the same floats with NaN."""
    for row in () if nulls is None else np.flatnonzero(nulls).tolist():
        values[row] = None if isinstance(values, list) else np.nan
    return values


def values_getter(column: FlatColumn, batch_format: BatchFormat) -> Callable[[pa.Array], Any]:
    """What gives the values of an Arrow column.

    Returns:
        A function that gives strings as ``str``, binaries as ``bytes``, lists of numbers as 1-d
        arrays or tensors, fixed-size lists of decimals as one array or tensor, other values as
        ``to_pylist`` has them. Nulls are None. A list of numbers with a null is a Python list. In a
        DataLoader worker, a column of lists of numbers is a `ListColumn`. It raises
        InvalidTextError, naming the column, and the row in the batch, whose bytes are no UTF-8.
    """
    dtype, as_torch = plain_type(column.dtype), batch_format == "torch"
    shape, inner = list_shape(dtype)
    if shape and pa.types.is_decimal(inner):
        return lambda array: _decimal_matrix(array, shape, as_torch)
    if _has_numbers(dtype):
        finish = finish_of(dtype.value_type, batch_format)
        return lambda array: _finished_lists(array, as_torch, finish)
    return lambda array: _python_values(column.name, dtype, array)


def _has_numbers(dtype: pa.DataType) -> bool:
    types = pa.types
    if not types.is_list(dtype) and not types.is_large_list(dtype):
        return False
    return is_number(storage_type(dtype.value_type)) or bool(types.is_decimal(dtype.value_type))


def _finished_lists(array: pa.Array, as_torch: bool, finish: Finish | None) -> list[Any]:
    if pa.types.is_decimal(array.type.value_type):
        array = _with_values(array, nearest_floats(array.values))
    found = _number_lists(array, as_torch)
    if finish is not None:
        found = [None if value is None else finish(value) for value in found]
    return ListColumn(found) if get_worker_info() is not None else found


def _python_values(name: str, dtype: pa.DataType, array: pa.Array) -> list[Any]:
    found: list[Any]
    try:
        if array.type in _TEXTS:
            found = array.to_numpy(zero_copy_only=False).tolist()
        else:
            found = retyped(array, dtype).to_pylist()
        return found
    except (UnicodeDecodeError, pa.ArrowException):
        for row in range(len(array)):
            try:
                array[row].as_py()
            except UnicodeDecodeError as error:
                raise InvalidTextError(
                    f"column {name!r} holds no valid UTF-8 in row {row} of the batch, at "
                    f"byte {error.start} of {error.object[:32]!r}: cast it to binary in the sql, "
                    f"as in arrow_cast({name}, 'Binary')"
                ) from None
        raise


def _decimal_matrix(array: pa.Array, shape: tuple[int, ...], as_torch: bool) -> Any:
    """Fixed-size lists of decimals, as ``[B, *shape]`` of float64 with NaN for nulls."""
    num_rows = len(array)
    visible = np.ones(num_rows, np.bool_)
    for size in shape:
        visible = (visible & array.is_valid().to_numpy(zero_copy_only=False)).repeat(size)
        array = array.values.slice(array.offset * size, len(array) * size)
    floats: Array = nearest_floats(array).fill_null(np.nan).to_numpy(zero_copy_only=False)
    found = np.where(visible, floats, np.nan).reshape(num_rows, *shape)
    return torch.from_numpy(found) if as_torch else found


def _with_values(array: pa.Array, values: pa.Array) -> pa.Array:
    is_large = pa.types.is_large_list(array.type)
    dtype = pa.large_list(values.type) if is_large else pa.list_(values.type)
    return pa.Array.from_buffers(
        dtype, len(array), array.buffers()[:2], array.null_count, array.offset, [values]
    )


def _number_lists(array: pa.Array, as_torch: bool) -> list[Any]:
    if (matrix := equal_lists(array)) is not None:
        copied = pool_matrix(len(matrix), matrix.shape[1], matrix.dtype)
        copied[:] = matrix
        if not as_torch:
            return list(copied)
        # Torch does not count an in-place change of one row as a change of all.
        return list(torch.unsafe_split(torch.from_numpy(copied.reshape(-1)), matrix.shape[1]))
    offsets = array.offsets.to_numpy()
    start = offsets[0]
    # Only these rows: the array may be a slice of a larger one.
    inner = array.values.slice(start, offsets[-1] - start)
    # Copied, so that it is writable.
    values: Array = (inner.fill_null(0) if inner.null_count else inner).to_numpy().copy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    ends = offsets - start
    convert: Callable[[Array], Any] = torch.from_numpy if as_torch else lambda value: value
    found: list[Any] = [
        convert(values[a:b]) if ok else None
        for a, b, ok in zip(ends[:-1], ends[1:], valid, strict=True)
    ]
    if inner.null_count:
        nulls_before = np.concatenate([[0], np.cumsum(inner.is_null())])[ends]
        for row in np.flatnonzero(valid & (np.diff(nulls_before) > 0)):
            found[row] = array[row].as_py()
    return found
