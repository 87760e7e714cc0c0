"""A column of lists in a batch: a Python list of tensors that is pickled as one tensor.

Each tensor that a DataLoader worker sends takes a file descriptor until it arrives, and a batch may
have thousands of rows.
"""

from __future__ import annotations

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
        kinds = {(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors}
        # The training loop may have put anything here.
        if len(kinds) != 1 or not all(t.dim() and not t.requires_grad for t in tensors):
            return list, (list(self),)
        lengths = [len(value) if isinstance(value, torch.Tensor) else None for value in self]
        others = [value for value in self if not isinstance(value, torch.Tensor)]
        return cut, (torch.cat(tensors), lengths, others)


def cut(values: torch.Tensor, lengths: Sequence[int | None], others: Sequence[Any]) -> list[Any]:
    """Cuts one joined tensor into rows.

    Args:
        values: ``[sum of lengths, ...]``; the rows share its storage.
        lengths: of each row; None for a row that is in ``others``.
        others: the rows that are no tensors, in order.
    """
    # `data`, because torch would count an in-place change of one row as a change of all.
    sizes = [length for length in lengths if length is not None]
    rows = iter([row.data for row in torch.split_with_sizes(values, sizes)])
    rest = iter(others)
    return [next(rest if length is None else rows) for length in lengths]
