"""Rows -> the batches a training loop sees: dicts of tensors or arrays, or Arrow record batches.

A scalar column is a strided view of its packed matrix. A stack of neighbouring columns in stored
order is a view, too; any other stack is a copy. The views of a matrix share one storage, which
DataLoader workers send once, as a whole. For an array, torch sends everything that it spans, so in
workers arrays are copied. Knows neither nodes nor order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from cache_client.arguments import BatchFormat
from cache_client.list_column import ListColumn
from cache_client.rows import Rows
from cache_protocol.errors import ConfigError, RequestError
from cache_protocol.storage.layout import Layout, is_scalar

_Array = npt.NDArray[np.generic]
_Getter = Callable[[Rows], Any]
_Cutter = Callable[[torch.Tensor], dict[str, torch.Tensor]]


class _View(NamedTuple):
    """A column, or a stack of neighbours, inside a stored column."""

    stored: int
    part: int | slice


class Converter:
    """Turns rows into batches of one format. Immutable, any thread.

    A list of numbers becomes a 1-d tensor or array; a list with a null becomes a Python list. A
    batch may hold both.

    Args:
        layout: of the rows.
        stack: new name -> columns that it replaces; each becomes one ``[B, n]`` tensor. Several
            dtypes become the smallest dtype that holds them all. 64-bit integers with floats become
            float64, which is exact up to 2**53.
        batch_format: ``torch`` (a dict of tensors), ``numpy`` (a dict of arrays) or ``arrow`` (a
            RecordBatch).

    Raises:
        ConfigError: names a column that is unknown, used twice, or cannot be stacked. Integers
            that have no common integer dtype, such as ``int64`` and ``uint64``, are not stacked.
    """

    def __init__(
        self,
        layout: Layout,
        stack: Mapping[str, Sequence[str]] | None = None,
        batch_format: BatchFormat = "torch",
    ) -> None:
        stacks = {name: list(columns) for name, columns in (stack or {}).items()}
        _check_stacks(layout, stacks, batch_format)
        self._layout = layout
        self._batch_format = batch_format
        views = _views(layout, stacks)
        getters = _getters(layout, stacks, views)
        self._names = list(getters)
        self._cutters = _cutters(layout, views) if batch_format == "torch" else []
        cut = {index for index, _ in self._cutters}
        self._getters = [
            (name, get)
            for name, get in getters.items()
            if name not in views or views[name].stored not in cut
        ]

    def __call__(self, rows: Rows) -> Any:
        """The batch of these rows; tensors share their memory."""
        if self._batch_format == "arrow":
            return rows.to_batch()
        batch: dict[str, Any] = dict.fromkeys(self._names)
        for index, cut in self._cutters:
            batch.update(cut(torch.from_numpy(rows.matrices[index])))
        convert = self._convert_value()
        for name, get in self._getters:
            batch[name] = convert(get(rows))
        return batch

    def _convert_value(self) -> Callable[[Any], Any]:
        if self._batch_format == "torch":
            return _to_torch
        return _contiguous if get_worker_info() is not None else lambda value: value


def _check_stacks(
    layout: Layout, stacks: Mapping[str, Sequence[str]], batch_format: BatchFormat
) -> None:
    if stacks and batch_format == "arrow":
        raise ConfigError("stack cannot be used with batch_format='arrow': it makes tensors")
    used: set[str] = set()
    for name, columns in stacks.items():
        if not columns:
            raise ConfigError(f"stack {name!r} names no column")
        try:
            layout.select(columns)
        except RequestError as error:
            raise ConfigError(f"stack {name!r}: {error}") from None
        for column in columns:
            if not is_scalar(layout.logical.field(column).type):
                raise ConfigError(
                    f"stack {name!r}: column {column!r} is a "
                    f"{layout.logical.field(column).type}, only numbers can be stacked"
                )
            if column in used:
                raise ConfigError(f"stack {name!r}: column {column!r} is already in another stack")
            used.add(column)
        _check_dtypes(layout, name, columns)
    taken = [name for name in stacks if name in layout.logical.names and name not in used]
    if taken:
        raise ConfigError(f"stack {taken[0]!r} has the name of a column that is not stacked")


def _check_dtypes(layout: Layout, name: str, columns: Sequence[str]) -> None:
    dtypes = [_dtype(layout, column) for column in columns]
    common = np.result_type(*dtypes)
    if common.kind == "f" and all(dtype.kind in "iu" for dtype in dtypes):
        # One of each dtype: there may be hundreds of columns.
        of_dtype = {dtype: column for column, dtype in zip(columns, dtypes, strict=True)}
        named = ", ".join(f"{column!r} {dtype}" for dtype, column in of_dtype.items())
        raise ConfigError(
            f"stack {name!r}: no integer dtype holds columns {named}, and {common} would round them"
        )


def _dtype(layout: Layout, name: str) -> np.dtype[np.generic]:
    dtype = layout.columns[layout.place(name)[0]].dtype
    assert dtype is not None  # only scalar columns are stacked
    return dtype


def _views(layout: Layout, stacks: Mapping[str, Sequence[str]]) -> dict[str, _View]:
    """What can be a view of a packed matrix: columns, and stacks of neighbours in order."""
    stacked = {column for columns in stacks.values() for column in columns}
    views = {
        name: _View(index, position)
        for index, column in enumerate(layout.columns)
        if column.kind == "packed"
        for position, name in enumerate(column.names)
        if name not in stacked
    }
    for name, columns in stacks.items():
        places = [layout.place(column) for column in columns]
        index, first = places[0]
        if places == [(index, first + i) for i in range(len(places))]:
            views[name] = _View(index, slice(first, first + len(places)))
    return views


def _getters(
    layout: Layout, stacks: Mapping[str, Sequence[str]], views: Mapping[str, _View]
) -> dict[str, _Getter]:
    stack_of = {column: name for name, columns in stacks.items() for column in columns}
    getters: dict[str, _Getter] = {}
    for column in layout.logical.names:
        name = stack_of.get(column, column)
        if name in getters:
            continue
        if name in views:
            getters[name] = _view_getter(views[name])
        elif name in stacks:
            getters[name] = _copy_getter(layout, stacks[name])
        else:
            getters[name] = _column_getter(layout, name)
    return getters


def _view_getter(view: _View) -> _Getter:
    index, part = view
    return lambda rows: rows.matrices[index][:, part]


def _copy_getter(layout: Layout, names: Sequence[str]) -> _Getter:
    places = [layout.place(name) for name in names]
    if len({index for index, _ in places}) == 1:
        index, positions = places[0][0], [position for _, position in places]
        return lambda rows: rows.matrices[index][:, positions]
    dtype = np.result_type(*(_dtype(layout, name) for name in names))

    def join(rows: Rows) -> _Array:
        columns = [rows.matrices[index][:, position] for index, position in places]
        return np.stack(columns, axis=1, dtype=dtype)

    return join


def _column_getter(layout: Layout, name: str) -> _Getter:
    index, _ = layout.place(name)
    column = layout.columns[index]
    if column.kind == "matrix":
        shape = column.shape
        return lambda rows: rows.matrices[index].reshape(rows.num_rows, *shape)
    return lambda rows: _values(rows.arrays[index])


def _cutters(layout: Layout, views: Mapping[str, _View]) -> list[tuple[int, _Cutter]]:
    """For each packed matrix with several views: a function from its tensor to the views."""
    cuts: dict[int, dict[str, int | slice]] = {}
    for name, view in views.items():
        cuts.setdefault(view.stored, {})[name] = view.part
    return [
        (index, _cutter(layout.columns[index].width, cut))
        for index, cut in cuts.items()
        if len(cut) > 1
    ]


def _cutter(width: int, cuts: Mapping[str, int | slice]) -> _Cutter:
    single = {name: at for name, at in cuts.items() if isinstance(at, int)}
    stacked = {name: at for name, at in cuts.items() if isinstance(at, slice)}
    most = 3 * len(single) > width

    # `data`, because torch would count an in-place change of one view as a change of all.
    def cut(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        if most:  # `unbind` takes a third of the time of single selects
            columns = matrix.unbind(1)
            views = {name: columns[at].data for name, at in single.items()}
        else:
            views = {name: matrix.select(1, at).data for name, at in single.items()}
        for name, at in stacked.items():
            views[name] = matrix[:, at].data
        return views

    return cut


def _values(array: pa.Array) -> list[Any]:
    """Strings as ``str``, binaries as ``bytes``, lists of numbers as arrays; nulls as None.

    A list of numbers with a null is a Python list. In a DataLoader worker, a column of lists is a
    `ListColumn`.
    """
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        return list(array.to_pylist())
    if not is_scalar(array.type.value_type):
        return list(array.to_pylist())
    offsets = array.offsets.to_numpy()
    start = offsets[0]
    # Only these rows: the array may be a slice of a larger one.
    inner = array.values.slice(start, offsets[-1] - start)
    # Copied, so that it is writable.
    values: _Array = (inner.fill_null(0) if inner.null_count else inner).to_numpy().copy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    ends = offsets - start
    found: list[Any] = [
        values[a:b] if ok else None for a, b, ok in zip(ends[:-1], ends[1:], valid, strict=True)
    ]
    if inner.null_count:
        nulls_before = np.concatenate([[0], np.cumsum(inner.is_null())])[ends]
        for row in np.flatnonzero(valid & (np.diff(nulls_before) > 0)):
            found[row] = array[row].as_py()
    return ListColumn(found) if get_worker_info() is not None else found


def _to_torch(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(entry, np.ndarray) for entry in value):
        return type(value)(_to_torch(entry) for entry in value)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _contiguous(value: Any) -> Any:
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
