"""Rows -> the batches a training loop sees: dicts of tensors or arrays, or Arrow record batches.

A scalar column is a strided view of its packed matrix; columns stacked in the order in which they
lie side by side are a view too, any other stack is a copy. Knows neither nodes nor order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from cache_client.rows import Rows
from protos.errors import ConfigError, RequestError
from protos.layout import Layout, is_scalar

BatchFormat = Literal["torch", "numpy", "arrow"]
BATCH_FORMATS: tuple[BatchFormat, ...] = ("torch", "numpy", "arrow")

_Array = npt.NDArray[np.generic]
_Getter = Callable[[Rows], Any]


class Converter:
    """Turns rows into batches of one format. Immutable, any thread.

    Args:
        layout: of the rows.
        stack: new name -> columns that it takes the place of; each becomes one ``[B, n]`` tensor.
            Columns of several dtypes become the dtype that holds them all.
        batch_format: ``torch`` (a dict of tensors), ``numpy`` (a dict of arrays) or ``arrow`` (a
            RecordBatch).

    Raises:
        ConfigError: naming an unknown or used-up column, or one that cannot be stacked.
    """

    def __init__(
        self,
        layout: Layout,
        stack: Mapping[str, Sequence[str]] | None = None,
        batch_format: BatchFormat = "torch",
    ) -> None:
        if batch_format not in BATCH_FORMATS:
            raise ConfigError(
                f"batch_format must be one of {', '.join(BATCH_FORMATS)}, got {batch_format!r}"
            )
        stacks = {name: list(columns) for name, columns in (stack or {}).items()}
        _check_stacks(layout, stacks, batch_format)
        self._layout = layout
        self._batch_format = batch_format
        self._getters = _getters(layout, stacks)

    def __call__(self, rows: Rows) -> Any:
        """The batch of these rows; tensors share their memory."""
        if self._batch_format == "arrow":
            return rows.to_batch()
        batch = {name: get(rows) for name, get in self._getters}
        if self._batch_format == "torch":
            return {name: _to_torch(value) for name, value in batch.items()}
        return batch


def _check_stacks(
    layout: Layout, stacks: Mapping[str, Sequence[str]], batch_format: BatchFormat
) -> None:
    if stacks and batch_format == "arrow":
        raise ConfigError("stack makes tensors: it cannot be used with batch_format='arrow'")
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
                raise ConfigError(f"stack {name!r}: column {column!r} is in another stack already")
            used.add(column)
    taken = [name for name in stacks if name in layout.logical.names and name not in used]
    if taken:
        raise ConfigError(f"stack {taken[0]!r} has the name of a column that is not stacked")


def _getters(layout: Layout, stacks: Mapping[str, Sequence[str]]) -> list[tuple[str, _Getter]]:
    stack_of = {column: name for name, columns in stacks.items() for column in columns}
    getters: dict[str, _Getter] = {}
    for name in layout.logical.names:
        stack = stack_of.get(name)
        if stack is None:
            getters[name] = _column_getter(layout, name)
        elif stack not in getters:
            getters[stack] = _stack_getter(layout, stacks[stack])
    return list(getters.items())


def _column_getter(layout: Layout, name: str) -> _Getter:
    index, position = layout.place(name)
    column = layout.columns[index]
    if column.kind == "packed":
        return lambda rows: rows.matrices[index][:, position]
    if column.kind == "matrix":
        shape = column.shape
        return lambda rows: rows.matrices[index].reshape(rows.num_rows, *shape)
    return lambda rows: _values(rows.arrays[index])


def _stack_getter(layout: Layout, names: Sequence[str]) -> _Getter:
    places = [layout.place(name) for name in names]
    indices = {index for index, _ in places}
    positions = [position for _, position in places]
    if len(indices) > 1:
        dtype = np.result_type(*(layout.columns[index].dtype for index, _ in places))

        def join(rows: Rows) -> _Array:
            columns = [rows.matrices[index][:, position] for index, position in places]
            return np.stack(columns, axis=1, dtype=dtype)

        return join
    index, first = places[0][0], positions[0]
    if positions == list(range(first, first + len(positions))):
        return lambda rows: rows.matrices[index][:, first : first + len(positions)]
    return lambda rows: rows.matrices[index][:, positions]


def _values(array: pa.Array) -> list[Any]:
    """Strings as ``str``, binaries as ``bytes``, lists of numbers as arrays; nulls as None."""
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        return list(array.to_pylist())
    if not is_scalar(array.type.value_type) or array.values.null_count:
        return list(array.to_pylist())
    values: _Array = array.values.to_numpy()
    offsets = array.offsets.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[a:b].copy() if ok else None
        for a, b, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)
    ]


def _to_torch(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in value]
