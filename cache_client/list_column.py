"""The rows of a column of lists in a batch: a Python list of tensors, which travels as one tensor.

A tensor that a DataLoader worker sends costs a file descriptor until it has arrived; a batch may
have thousands of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch


class ListColumn(list[Any]):
    """A list of one entry a row: a 1-d tensor, None, or a Python list where numbers are missing.

    With ``batch_format="numpy"`` they are arrays, of which a DataLoader makes tensors. Pickled, its
    tensors are joined to one, and cut again on the other side, where they share its storage. One
    thread at a time, as any list.
    """

    def __copy__(self) -> Self:
        return type(self)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = [value for value in self if isinstance(value, torch.Tensor)]
        kinds = {(tensor.dtype, tensor.device, tensor.dim()) for tensor in tensors}
        # What the training loop put here may be anything.
        if len(kinds) != 1 or tensors[0].dim() != 1 or any(t.requires_grad for t in tensors):
            return list, (list(self),)
        lengths = [len(value) if isinstance(value, torch.Tensor) else None for value in self]
        others = [value for value in self if not isinstance(value, torch.Tensor)]
        return cut, (torch.cat(tensors), lengths, others)


def cut(values: torch.Tensor, lengths: Sequence[int | None], others: Sequence[Any]) -> list[Any]:
    """The rows whose tensors lie end to end in one.

    Args:
        values: ``[sum of lengths]``; the rows share its storage.
        lengths: of each row; None where the next of the others takes its place.
        others: the entries that are no tensors, in order.
    """
    # `data`, or torch would take a change of one row in place for a change of all.
    sizes = [length for length in lengths if length is not None]
    rows = iter([row.data for row in torch.split_with_sizes(values, sizes)])
    rest = iter(others)
    return [next(rest if length is None else rows) for length in lengths]
