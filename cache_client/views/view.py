"""A view: which rows of a version each slot of an epoch has. Pure.

An epoch of a job has slots ``[0, num_slots)``. The order of the epoch permutes slots, divides them
over ranks and counts them in states. A view says which rows a slot has: for the plain read, slot i
has row i. So ranks, workers, resume and audit are the same for every view.

A view computes a slot by random access, from tables whose memory it states. It knows neither nodes
nor tensors, and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache_client.permutation import Int64Array

IntArray = npt.NDArray[np.signedinteger]


@dataclass(frozen=True)
class Samples:
    """The rows of some slots.

    Attributes:
        row_ids: of all slots, joined; int64, shape ``(k,)``.
        lengths: rows of each slot; int64, shape ``(slots,)``. None: each slot has one row.
        skipped: for packed lists: values of the first row of each slot that do not belong to it;
            int64, shape ``(slots,)``.
        sources: in a mixture, the number of the source of each slot; shape ``(slots,)``.
    """

    row_ids: Int64Array
    lengths: Int64Array | None = None
    skipped: Int64Array | None = None
    sources: IntArray | None = None

    def rows_of_steps(self, slots_of_steps: list[int]) -> list[int]:
        """Rows of each step, for steps of so many slots."""
        if self.lengths is None:
            return slots_of_steps
        ends = np.concatenate([[0], np.cumsum(self.lengths)])[np.cumsum([0, *slots_of_steps])]
        rows: list[int] = np.diff(ends).tolist()
        return rows

    def slots(self, start: int, stop: int) -> Samples:
        """What is known of slots ``[start, stop)``, without their row ids."""
        lengths = None if self.lengths is None else self.lengths[start:stop]
        skipped = None if self.skipped is None else self.skipped[start:stop]
        sources = None if self.sources is None else self.sources[start:stop]
        return Samples(self.row_ids[:0], lengths, skipped, sources)


class View(Protocol):
    """Slots -> rows of one version.

    Thread-safety: immutable; instances are pickled into DataLoader workers.
    """

    @property
    def identity(self) -> str:
        """What the view does, as a short text; "" for the plain read.

        Part of the fingerprint of states: two views with one identity have the same slots.
        """

    @property
    def num_bytes(self) -> int:
        """Memory of its tables."""

    @property
    def orders_rows(self) -> bool:
        """Whether it shuffles itself, so that the order leaves the slots as they are."""

    @property
    def rows_per_slot(self) -> float:
        """Mean number of rows in a slot; it sizes windows."""

    def num_slots(self, epoch: int) -> int:
        """Slots of an epoch."""

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots in ``[0, num_slots(epoch))``, in any order."""


@dataclass(frozen=True)
class PlainView:
    """Slot i has row i.

    Args:
        num_rows: of the version.
    """

    num_rows: int
    identity: str = ""
    num_bytes: int = 0
    orders_rows: bool = False
    rows_per_slot: float = 1.0

    def num_slots(self, epoch: int) -> int:
        """Rows of the version."""
        return self.num_rows

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The slots themselves."""
        return Samples(slots)
