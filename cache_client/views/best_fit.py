"""Documents -> sequences with little padding, by best fit over a whole epoch. Pure.

Best fit, longest first: a document goes into the fullest sequence that has room for it. All
documents of one length, and all sequences with the same room, are placed at once, so a pass takes
as many steps as there are lengths and rooms, and not as there are documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array
from cache_client.views.packing import PackingView
from cache_client.views.view import Epochs, Samples, epoch_order, joined_ranges

_EPOCHS_KEPT: Final = 2


class _Table(NamedTuple):
    """The sequences of an epoch.

    Attributes:
        row_ids: of the documents of each sequence, joined.
        starts: of each sequence among them; one more at the end.
        num_tokens: of all of them.
    """

    row_ids: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    num_tokens: int


@dataclass(frozen=True)
class BestFitView(PackingView):
    """Slot s has the documents of sequence s of the epoch, packed by best fit.

    ``long`` drops or truncates long documents; no document is split. The table of an epoch takes 4
    bytes a document and 4 a sequence (8 from 2**32 documents on); two are kept.
    """

    _tables: dict[int, _Table] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tables": {}}

    @property
    def identity(self) -> str:
        """That of the inner view, and how documents are packed."""
        return f"{super().identity}best()"

    @property
    def epochs(self) -> Epochs:
        """The same documents fill as many sequences in any order: only their lengths count."""
        return "same size" if self.inner.epochs == "same rows" else "any size"

    @property
    def num_bytes(self) -> int:
        """Bytes of the lengths, of the tables that are kept, and of the inner view."""
        tables = sum(each.row_ids.nbytes + each.starts.nbytes for each in self._tables.values())
        return super().num_bytes + tables

    def num_slots(self, epoch: int) -> int:
        """Sequences of an epoch. The first call for an epoch packs all documents."""
        return len(self._table(epoch).starts) - 1

    def num_tokens(self, epoch: int) -> int:
        """Tokens of an epoch, without padding."""
        return self._table(epoch).num_tokens

    def num_padding(self, epoch: int) -> int:
        """Places in the sequences of an epoch that have no token."""
        return self.num_slots(epoch) * self.sequence_length - self.num_tokens(epoch)

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The documents of each sequence, the longest first."""
        table = self._table(epoch)
        firsts = table.starts[slots].astype(np.int64)
        lengths = table.starts[slots + 1] - firsts
        row_ids = table.row_ids[joined_ranges(firsts, lengths)]
        return Samples(row_ids.astype(np.int64), lengths, np.zeros_like(lengths))

    def _table(self, epoch: int) -> _Table:
        table = self._tables.get(epoch)
        if table is None:
            table = self._tables[epoch] = self._packed(epoch)
            for old in list(self._tables)[:-_EPOCHS_KEPT]:
                self._tables.pop(old, None)
        return table

    def _packed(self, epoch: int) -> _Table:
        pieces = list(self._epoch(epoch))
        none = np.empty(0, np.int64)
        row_ids = np.concatenate([none, *(each.row_id for each in pieces)])
        lengths = np.concatenate([none, *(each.length for each in pieces)])
        longest_first = np.argsort(-lengths, kind="stable")
        bins = best_fit(lengths[longest_first], self.sequence_length)
        # Sequences of long documents are made first: they are put in the order of the epoch.
        firsts = np.full(int(bins.max(initial=-1)) + 1, len(lengths))
        np.minimum.at(firsts, bins, longest_first)
        place = np.argsort(np.argsort(firsts))
        order = epoch_order(self.shuffle, len(firsts), epoch)
        if self.shuffle.shuffle and len(firsts):
            place = order.row_ids(np.arange(len(firsts)))[place]
        places = place[bins]
        by_place = np.argsort(places, kind="stable")
        starts = np.zeros(len(firsts) + 1, np.int64)
        np.cumsum(np.bincount(places, minlength=len(firsts)), out=starts[1:])
        ordered = row_ids[longest_first[by_place]]
        return _Table(_narrow(ordered), _narrow(starts), int(lengths.sum()))


def _narrow(numbers: Int64Array) -> npt.NDArray[Any]:
    """The same numbers in 4 bytes each, if they fit."""
    return numbers.astype(np.uint32) if numbers.max(initial=0) < 1 << 32 else numbers


def best_fit(lengths: Int64Array, size: int) -> Int64Array:
    """For each document the bin that it goes into.

    Args:
        lengths: from 1 to ``size``, descending.
        size: of a bin.
    """
    room = _Room(size)
    kinds, firsts = np.unique(-lengths, return_index=True)
    ends = np.append(firsts[1:], len(lengths))
    for kind, left in zip((-kinds).tolist(), (ends - firsts).tolist(), strict=True):
        count = left
        while count:
            count -= room.place(kind, count)
    return np.concatenate([np.empty(0, np.int64), *room.placed])


class _Room:
    """Bins by the room that they have left, and what was placed so far.

    Attributes:
        placed: the bins of the documents, in their order, in pieces.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rooms: list[int] = []  # ascending; each has bins
        self._bins: dict[int, list[tuple[int, int]]] = {}  # room -> runs of bins
        self._num_bins = 0
        self.placed: list[Int64Array] = []

    def place(self, length: int, count: int) -> int:
        """Places some of ``count`` documents of one length; returns how many."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            room, first = self._size, self._num_bins
            num_bins = -(-count // (room // length))
            self._num_bins += num_bins
        else:
            room = self._rooms[at]
            first, num_bins = self._take(at)
        each = room // length
        full = min(num_bins, count // each)
        rest = min(count - full * each, each) if full < num_bins else 0
        self.placed.append(np.repeat(np.arange(first, first + full), each))
        self.placed.append(np.full(rest, first + full))
        self._give(room - each * length, first, full)
        if full < num_bins:
            self._give(room - rest * length, first + full, 1)
            self._give(room, first + full + 1, num_bins - full - 1)
        return full * each + rest

    def _take(self, at: int) -> tuple[int, int]:
        room = self._rooms[at]
        run = self._bins[room].pop()
        if not self._bins[room]:
            del self._bins[room], self._rooms[at]
        return run

    def _give(self, room: int, first: int, num_bins: int) -> None:
        if not room or not num_bins:
            return
        if room not in self._bins:
            insort(self._rooms, room)
        self._bins.setdefault(room, []).append((first, num_bins))
