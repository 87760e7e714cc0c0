"""The bucket of each row in an epoch, for nodes that lay rows out as they are read. Pure.

A bucket has the rows of consecutive positions, about as many as any other. Nodes get a
number of two bytes for each row, in the order of the rows: see `cache.v1.Announcement`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array
from cache_client.views.view import PlainView, SlotView

_AT_ONCE = 1 << 20  # slots


class EpochBuckets:
    """Where the rows of a version stand in an epoch, in buckets.

    Args:
        view: of the job.
        order: of the epoch.
        num_rows: of the version.
        start: positions that were read, without the skipped ones.
        of: what is read, and by which seeds.

    Attributes:
        name: equal for all ranks of a job and after a restart.
        num_rows: that are read from the start of the epoch on, at most.
        start: share of the epoch that was read.

    Thread-safety: one thread at a time.
    """

    def __init__(
        self, view: SlotView, order: EpochOrder, num_rows: int, start: int, of: str
    ) -> None:
        self.name = hashlib.sha256(f"{of} {order!r}".encode()).hexdigest()[:32]
        self._view, self._order, self._num_rows = view, order, num_rows
        self._size = max(1, order.num_rows)
        slots = view.num_slots(order.epoch) * view.rows_per_slot
        self.num_rows = min(num_rows, round(slots))
        is_left = 0 < start < order.num_left
        self._first = int(order.in_epoch(np.array([start]))[0]) if is_left else 0
        self.start = self._first / self._size
        self._numbers: npt.NDArray[np.uint16] | None = None  # of all rows, for so many buckets:
        self._of_buckets = 0

    def numbers(self, rows: range, num_buckets: int) -> bytes:
        """The bucket of each of these rows, from 1; 0: it is not read any more.

        The plain read computes those of these rows. Other views take a pass over their slots at the
        first call, and two bytes a row of the version. A row that an epoch has several times is in
        the bucket of the first one.
        """
        if isinstance(self._view, PlainView):
            ids = np.arange(rows.start, rows.stop, dtype=np.int64)
            return self._buckets(self._order.positions(ids), num_buckets).tobytes()
        if self._numbers is None or self._of_buckets != num_buckets:
            self._numbers, self._of_buckets = self._of_all(num_buckets), num_buckets
        return self._numbers[rows.start : rows.stop].tobytes()

    def forget(self) -> None:
        """Frees the memory of `numbers`."""
        self._numbers = None

    def _buckets(self, positions: Int64Array, num_buckets: int) -> npt.NDArray[np.uint16]:
        numbers = positions * num_buckets // self._size + 1
        numbers[positions < self._first] = 0
        found: npt.NDArray[Any] = numbers.astype("<u2")
        return found

    def _of_all(self, num_buckets: int) -> npt.NDArray[np.uint16]:
        found = np.zeros(self._num_rows, "<u2")
        order = replace(self._order, skipped=())
        for at in range(self._first, order.num_rows, _AT_ONCE):
            positions = np.arange(at, min(at + _AT_ONCE, order.num_rows), dtype=np.int64)
            samples = self._view.samples(order.row_ids(positions), order.epoch)
            if samples.lengths is not None:
                positions = np.repeat(positions, samples.lengths)
            rows = samples.row_ids
            is_new = found[rows] == 0
            # Of equal rows the last one counts, so the first position comes last.
            found[rows[is_new][::-1]] = self._buckets(positions[is_new], num_buckets)[::-1]
        return found
