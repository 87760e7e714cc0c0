"""Batches of groups of rows: tensors ``[B, length]`` of windows, lists of whole groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cache_client.list_column import ListColumn
from cache_client.rows import Rows
from cache_client.views.view import Samples

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
        grouped = {name: _grouped(value, counts, length) for name, value in batch.items()}
        if length is None:
            as_numpy = any(isinstance(value, np.ndarray) for value in batch.values())
            grouped[LENGTHS] = counts if as_numpy else torch.from_numpy(counts)
        return [grouped]

    return assemble


def _grouped(value: Any, counts: np.ndarray[Any, np.dtype[np.int64]], length: int | None) -> Any:
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
