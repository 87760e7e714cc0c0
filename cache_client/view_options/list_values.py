"""Columns of lists: joined, padded to one tensor, or made of the rows of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from cache_client.batches.batch_formats import ListColumn
from cache_client.batches.null_rules import NullRules
from cache_client.job.arguments import BatchFormat
from cache_client.order.permutation import Int64Array
from cache_client.reading.rows import Rows
from cache_client.views.view import Samples
from cache_protocol.errors import RequestError
from cache_protocol.storage.nested_values import plain_type


def joined_lists(rows: Rows, column: str) -> tuple[npt.NDArray[Any], Int64Array]:
    """The values of a column of lists, joined, and the offsets of its rows among them.

    A null row has no values. The values are a view of the rows.

    Returns:
        Values of shape ``(n,)`` and int64 offsets of shape ``(rows + 1,)``.

    Raises:
        RequestError: a list has a null.
    """
    index, _ = rows.layout.place(column)
    if index in rows.matrices:
        return _joined_matrix(rows, column, rows.matrices[index])
    array = rows.arrays[index]
    hidden = NullRules(rows.layout).nulls_of(column, rows)
    if hidden is not None:  # what lies in a null struct
        array = pc.if_else(pa.array(hidden), pa.scalar(None, array.type), array)
    if array.null_count:
        array = pc.fill_null(array, pa.scalar([], array.type))
    offsets = array.offsets.to_numpy().astype(np.int64)
    start, stop = int(offsets[0]), int(offsets[-1])
    values = array.values.slice(start, stop - start)  # `flatten` would copy them
    if values.null_count:
        raise _null_in_list(column)
    offsets -= start
    return values.to_numpy(zero_copy_only=True), offsets


def _joined_matrix(
    rows: Rows, column: str, matrix: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], Int64Array]:
    lengths = np.full(len(matrix), matrix.shape[1])
    nulls = NullRules(rows.layout).nulls_of(column, rows)
    if nulls is not None and nulls.any():
        of_rows = nulls if nulls.ndim == 1 else nulls.all(axis=1)
        if nulls.ndim > 1 and (nulls.any(axis=1) & ~of_rows).any():
            raise _null_in_list(column)
        matrix, lengths[of_rows] = matrix[~of_rows], 0
    return matrix.reshape(-1), np.concatenate([[0], np.cumsum(lengths)])


def _null_in_list(column: str) -> RequestError:
    return RequestError(
        f"column {column!r} has a null in a list: replace it in the sql, as by "
        f"array_remove_all({column}, NULL)"
    )


def mask_of(column: str) -> str:
    """The name of the column that says which values of a padded column are its own."""
    return f"{column}_mask"


def padding_lists(
    convert: Callable[[Rows], Any], padding: Mapping[str, float], batch_format: BatchFormat
) -> Callable[..., list[dict[str, Any]]]:
    """A maker of batches whose columns of lists are tensors ``[B, longest]``.

    Each has a boolean column ``<column>_mask`` of the same shape, False for padding.

    Args:
        convert: makes a batch of the other columns.
        padding: column -> the value that fills its rows.
        batch_format: ``torch`` or ``numpy``.
    """

    def assemble(rows: Rows, _: Samples, __: Sequence[int]) -> list[dict[str, Any]]:
        indices = {column: rows.layout.place(column)[0] for column in padding}
        empty = {index: rows.arrays[index][:0] for index in indices.values()}
        batch: dict[str, Any] = convert(replace(rows, arrays={**rows.arrays, **empty}))
        for column, value in padding.items():
            values, offsets = joined_lists(rows, column)
            lengths = np.diff(offsets)
            longest = lengths.max(initial=0)
            if (lengths == longest).all():
                mask = np.ones((len(lengths), longest), np.bool_)
                padded = values.reshape(mask.shape).copy()
            else:
                mask = np.arange(longest) < lengths[:, None]
                padded = np.full(mask.shape, value, values.dtype)
                padded[mask] = values
            if pa.types.is_boolean(plain_type(rows.layout.flat[column].dtype).value_type):
                padded = padded.view(np.bool_)
            made = {column: padded, mask_of(column): mask}
            as_torch = batch_format == "torch"
            batch |= {k: torch.from_numpy(v) if as_torch else v for k, v in made.items()}
        return [batch]

    return assemble


LENGTHS = "lengths"
"""The column that has the number of rows of each group."""


def grouping(convert: Callable[[Rows], Any], length: int | None) -> Callable[..., list[Any]]:
    """A maker of batches with one entry a group.

    A column of numbers becomes one tensor ``[B, length, ...]`` for windows. For whole groups it
    becomes a list of B tensors ``[rows, ...]``, and the int64 column ``lengths`` says how many rows
    each has. Another column becomes a list of B lists. A record batch gets columns of lists.

    Args:
        convert: makes a batch of single rows.
        length: rows of a window; None: whole groups.
    """

    def assemble(rows: Rows, samples: Samples, _: Sequence[int]) -> list[Any]:
        assert samples.lengths is not None
        batch, counts = convert(rows), samples.lengths
        if isinstance(batch, pa.RecordBatch):
            return [_lists(batch, counts, length)]
        grouped: dict[str, Any] = _grouped(batch, counts, length)
        if length is None:
            as_numpy = any(isinstance(value, np.ndarray) for value in _leaves(batch))
            grouped[LENGTHS] = counts if as_numpy else torch.from_numpy(counts)
        return [grouped]

    return assemble


def _leaves(batch: dict[str, Any]) -> Iterator[Any]:
    for value in batch.values():
        yield from _leaves(value) if isinstance(value, dict) else [value]


def _grouped(value: Any, counts: np.ndarray[Any, np.dtype[np.int64]], length: int | None) -> Any:
    if isinstance(value, dict):
        return {name: _grouped(each, counts, length) for name, each in value.items()}
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    if is_array and length is not None:
        return value.reshape(len(counts), length, *value.shape[1:])
    parts = [value[start:stop] for start, stop in pairwise([0, *np.cumsum(counts).tolist()])]
    if isinstance(value, torch.Tensor):
        # `data`, or torch would take a change of one group in place for a change of all.
        return ListColumn(part.data for part in parts)
    return ListColumn(parts) if is_array else parts


def _lists(
    batch: pa.RecordBatch, counts: np.ndarray[Any, np.dtype[np.int64]], length: int | None
) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    arrays = [
        pa.ListArray.from_arrays(offsets, column)
        if length is None
        else pa.FixedSizeListArray.from_arrays(column, length)
        for column in batch.columns
    ]
    if length is None:
        arrays.append(pa.array(counts))
    names = [*batch.schema.names, *([LENGTHS] if length is None else [])]
    return pa.RecordBatch.from_arrays(arrays, names)
