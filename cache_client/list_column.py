"""A column of lists in a batch: a Python list of tensors that is pickled as one tensor.

Each tensor that a DataLoader worker sends takes a file descriptor until it arrives, and a batch may
have thousands of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch


class ListColumn(list[Any]):
    """One entry a row: a tensor, None, or a Python list if the row has nulls.

    With ``batch_format="numpy"`` the entries are arrays, which a DataLoader turns into tensors.
    Pickling joins the tensors; unpickling cuts the joined tensor into views. Not thread-safe, as
    any list.
    """

    def __copy__(self) -> Self:
        return type(self)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = [value for value in self if isinstance(value, torch.Tensor)]
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        # The training loop may have put anything here.
        if len(kinds) != 1 or any(tensor.requires_grad for tensor in tensors):
            return list, (list(self),)
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in self]
        others = [value for value in self if not isinstance(value, torch.Tensor)]
        flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        return cut, (torch.cat(flat), shapes, others)


def cut(
    values: torch.Tensor, shapes: Sequence[tuple[int, ...] | None], others: Sequence[Any]
) -> list[Any]:
    """Cuts one joined tensor into rows.

    Args:
        values: of all rows, joined; the rows share its storage.
        shapes: of each row; None for a row that is in ``others``.
        others: the rows that are no tensors, in order.
    """
    found = [shape for shape in shapes if shape is not None]
    # Unsafe, because torch would count an in-place change of one row as a change of all.
    rows = torch.unsafe_split_with_sizes(values, [math.prod(shape) for shape in found])
    pairs = zip(rows, found, strict=True)
    shaped = iter([row if len(shape) == 1 else row.view(shape) for row, shape in pairs])
    rest = iter(others)
    return [next(rest if shape is None else shaped) for shape in shapes]
