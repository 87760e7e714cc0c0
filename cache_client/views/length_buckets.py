"""Rows in an order of similar lengths, without packing. Pure.

The rows of an epoch, shuffled, are cut into windows of 64 buckets. The rows of a window are sorted
by length and cut into buckets, and the buckets are shuffled. Inside a bucket, rows lie so that any
run of them has lengths from all of the bucket, evenly: in the order of van der Corput (1935), the
bits of a number reversed, with a random shift. So steps have rows of similar lengths, and the runs
that ranks take of a step have about equal sums of lengths, and of their squares.

All of this is a function of slots. World size and batch size decide only how the slots are cut, so
a state holds with others, at any step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cache_client.order.permutation import Int64Array, Permutation
from cache_client.views.view import Epochs, Numbers, Samples, Shuffle, SlotView

WINDOW_BUCKETS: Final = 64
_WINDOWS_KEPT: Final = 4
_STREAM_BUCKETS: Final = 3  # of `Permutation`; the order of rows uses 0, 1 and 2
_STREAM_SHIFTS: Final = 4


@dataclass(frozen=True)
class LengthBucketsView:
    """Slot i has one row; slots near each other have rows of similar lengths.

    Its memory is that of ``lengths``, and 8 bytes for each row of the last four windows.

    Args:
        inner: its slots are ordered; each must have one row.
        lengths: of each row of the version, shape ``(num_rows,)``.
        bucket_rows: rows of a bucket, at least 1.
        shuffle: of the rows before they are cut into windows, and of buckets. Without it, the
            lengths of a window ascend.
        column: name of the column, for the identity.

    Thread-safety: immutable, but for a cache. Threads may make the same window twice.
    """

    inner: SlotView
    lengths: Numbers
    bucket_rows: int
    shuffle: Shuffle
    column: str = ""
    orders_rows: bool = field(init=False, default=True)
    rows_per_slot: float = field(init=False, default=1.0)
    _windows: dict[tuple[int, int], Int64Array] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": {}}

    @property
    def identity(self) -> str:
        """The inner view, the column and the rows of a bucket."""
        return f"{self.inner.identity}length_buckets({self.column!r},{self.bucket_rows})"

    @property
    def epochs(self) -> Epochs:
        """As the inner view."""
        return self.inner.epochs

    @property
    def num_bytes(self) -> int:
        """Bytes of the lengths, of the windows that are kept, and of the inner view."""
        windows = sum(rows.nbytes for rows in list(self._windows.values()))
        return self.inner.num_bytes + self.lengths.values.nbytes + windows

    def num_slots(self, epoch: int) -> int:
        """Slots of the inner view."""
        return self.inner.num_slots(epoch)

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The row of each slot."""
        size = WINDOW_BUCKETS * self.bucket_rows
        numbers, in_window = np.divmod(slots, size)
        row_ids = np.empty(len(slots), np.int64)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            row_ids[here] = self._window(epoch, number)[in_window[here]]
        return Samples(row_ids)

    def _window(self, epoch: int, number: int) -> Int64Array:
        """The rows of a window, in order."""
        rows = self._windows.get((epoch, number))
        if rows is None:
            rows = self._windows[epoch, number] = self._make_window(epoch, number)
            for old in list(self._windows)[:-_WINDOWS_KEPT]:
                self._windows.pop(old, None)
        return rows

    def _make_window(self, epoch: int, number: int) -> Int64Array:
        size = WINDOW_BUCKETS * self.bucket_rows
        stop = min((number + 1) * size, self.inner.num_slots(epoch))
        order = self.shuffle.order(self.inner, epoch)
        slots = order.row_ids(np.arange(number * size, stop))
        rows = self.inner.samples(slots, epoch).row_ids
        by_length = rows[np.argsort(self.lengths.values[rows], kind="stable")]
        buckets = np.split(by_length, np.arange(self.bucket_rows, len(rows), self.bucket_rows))
        chosen = shifts = np.arange(len(buckets))
        if self.shuffle.shuffle:
            chosen = self._permuted(len(buckets), len(buckets), epoch, number, _STREAM_BUCKETS)
            domain = max(self.bucket_rows, len(buckets))
            shifts = self._permuted(domain, len(buckets), epoch, number, _STREAM_SHIFTS)
        return np.concatenate([_evenly(buckets[at], int(shifts[at])) for at in chosen.tolist()])

    def _permuted(self, size: int, count: int, epoch: int, tweak: int, stream: int) -> Int64Array:
        """The first values of a permutation of so many."""
        permutation = Permutation(size, seed=self.shuffle.seed, epoch=epoch, stream=stream)
        return permutation.apply(np.arange(count), np.full(count, tweak))


def _evenly(rows: Int64Array, shift: int) -> Int64Array:
    """Sorted rows in an order in which each run of them has some from everywhere."""
    bits = (len(rows) - 1).bit_length()
    reversed_bits = np.zeros(1, np.int64)
    for _ in range(bits):
        reversed_bits = np.concatenate([2 * reversed_bits, 2 * reversed_bits + 1])
    order = reversed_bits ^ (shift & ((1 << bits) - 1))
    found: Int64Array = rows[order[order < len(rows)]]
    return found
