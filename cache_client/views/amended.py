"""The view of an epoch that was amended: its slots are the positions of the epoch. Pure.

An amendment changes what a job reads in the midst of an epoch: another version, another view, or
both. See `cache_client.order.segments` for the order, and `docs/amend.md` for its use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np

from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array
from cache_client.order.segments import (
    Due,
    Segment,
    Stream,
    are_distinct,
    change,
    key_of,
    seed_of,
    segment,
)
from cache_client.views.rows_view import RestView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import Epochs, PlainView, Samples, Shuffle, SlotView, epoch_order

_SMALL: Final = 2**32  # row ids below it take 4 bytes


class Part(NamedTuple):
    """What a segment of an epoch reads.

    Attributes:
        at: the position of the epoch where the segment begins; 0 for the first.
        num_rows: of its version, whose rows are the first ones of every later version.
        view: slots of one row each; of the version.
        erased: the last act whose rows it leaves out.
        text: of its view, see `cache_client.order.view_text`.
    """

    at: int
    num_rows: int
    view: SlotView
    erased: int = 0
    text: str = ""

    @property
    def told(self) -> tuple[int, int, str]:
        """What two parts have in common that read the same rows."""
        return self.at, self.num_rows, self.view.identity


@dataclass(frozen=True)
class AmendedView:
    """Slot i of the amended epoch has the row of position i; other epochs are as the last view.

    Args:
        epoch: that was amended.
        shuffle: of the job.
        parts: of the epoch, ascending by position.
        segments: of the parts, see `amended_view`.
        is_distinct: no row comes twice.
    """

    epoch: int
    shuffle: Shuffle
    parts: tuple[Part, ...]
    segments: tuple[Segment, ...] = field(default=(), repr=False, compare=False)
    is_distinct: bool = field(default=True, repr=False, compare=False)
    orders_rows: bool = field(default=True, init=False)
    epochs: Epochs = field(default="any size", init=False)
    rows_per_slot: float = field(default=1.0, init=False)

    @property
    def latest(self) -> SlotView:
        """The view of the last segment, and of all other epochs."""
        return self.parts[-1].view

    @property
    def amended_at(self) -> tuple[int, tuple[int, ...]]:
        """The epoch, and the positions where it was amended."""
        return self.epoch, tuple(part.at for part in self.parts[1:])

    @property
    def identity(self) -> str:
        """The segments: what each reads, and where it begins."""
        how = self.shuffle
        parts = "; ".join(" ".join(map(str, part.told)) for part in self.parts)
        text = f"{how.shuffle} {how.shuffle_block_size} {how.seed} {self.epoch}: {parts}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return f"{self.latest.identity} amended={digest}"

    @property
    def num_bytes(self) -> int:
        """Memory of the lists of its streams, and of its views."""
        streams = [stream for each in self.segments for stream in each.streams]
        lists = {id(each): each.values.nbytes for stream in streams for each in stream.lists}
        views = {id(part.view): part.view.num_bytes for part in self.parts}
        return sum(lists.values()) + sum(views.values())

    def num_slots(self, epoch: int) -> int:
        """Positions of the epoch."""
        if epoch != self.epoch:
            return self.latest.num_slots(epoch)
        return self.segments[-1].at + self.segments[-1].num_left

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of positions."""
        if epoch != self.epoch:
            slots = self.shuffle.order(self.latest, epoch).row_ids(slots)
            return self.latest.samples(slots, epoch)
        last = self.segments[-1]
        if len(slots) and slots.min() >= last.at:  # what training reads
            return Samples(last.row_ids(slots - last.at))
        begins = np.array([each.at for each in self.segments])
        numbers = np.searchsorted(begins, slots, side="right") - 1
        rows = np.empty(len(slots), np.int64)
        for number in np.unique(numbers).tolist():
            own, part = numbers == number, self.segments[number]
            rows[own] = part.row_ids(slots[own] - part.at)
        return Samples(rows)

    def positions(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where rows stand in the amended epoch.

        Args:
            rows: ascending, none twice.

        Returns:
            Which of the rows, and its position; in no order.
        """
        ends = [*(each.at for each in self.segments[1:]), self.num_slots(self.epoch)]
        found = []
        for part, end in zip(self.segments, ends, strict=True):
            which, positions = part.find(rows)
            given = positions < end - part.at
            found.append((which[given], positions[given] + part.at))
        whichs, places = zip(*found, strict=True)
        return np.concatenate(whichs), np.concatenate(places)


def _due(view: SlotView, epoch: int) -> Due:
    if isinstance(view, PlainView):
        return range(view.num_rows)
    if isinstance(view, RestView):
        return view.rest
    rows: Int64Array = np.sort(_rows(view, epoch))
    return rows


def chosen_rows(view: SlotView) -> Int64Array:
    """The rows that the options of a view choose, before others say how often each comes."""
    while (inner := getattr(view, "inner", None)) is not None:
        view = inner
    return _rows(view, 0)


def _rows(view: SlotView, epoch: int) -> Int64Array:
    return view.samples(np.arange(view.num_slots(epoch), dtype=np.int64), epoch).row_ids


def amended_view(
    epoch: int, shuffle: Shuffle, parts: Sequence[Part], before: SlotView | None = None
) -> AmendedView:
    """The view of an epoch with these parts.

    Args:
        before: of the same version or of an earlier one; its segments are taken over, if it has
            some of these parts.
    """
    known: tuple[Segment, ...] = ()
    is_distinct = True
    if isinstance(before, AmendedView) and (before.epoch, before.shuffle) == (epoch, shuffle):
        pairs = zip(before.parts, parts, strict=False)
        same = list(takewhile(lambda pair: pair[0].told == pair[1].told, pairs))
        known, is_distinct = before.segments[: len(same)], before.is_distinct
    found = list(known)
    due = _due(parts[len(known) - 1].view, epoch) if known else range(0)
    for part in parts[len(known) :]:
        now = _due(part.view, epoch)
        is_distinct = is_distinct and are_distinct(now)
        found.append(
            _next(found[-1], part, due, now, epoch, shuffle)
            if found
            else _first(part, now, epoch, shuffle)
        )
        due = now
    return AmendedView(epoch, shuffle, tuple(parts), tuple(found), is_distinct)


def _first(part: Part, due: Due, epoch: int, shuffle: Shuffle) -> Segment:
    rows = _rows(part.view, epoch) if isinstance(due, np.ndarray) else due
    return segment(0, [_stream(rows, shuffle.order(part.view, epoch))], None)


def _next(
    last: Segment, part: Part, before: Due, now: Due, epoch: int, shuffle: Shuffle
) -> Segment:
    made = change(last.streams_at(part.at - last.at), before, now)
    streams = list(made.streams)
    if len(made.new):
        of_new = replace(shuffle, seed=seed_of(shuffle.seed, part.at))
        streams.append(_stream(made.new, epoch_order(of_new, len(made.new), epoch)))
    return segment(part.at, streams, key_of(epoch_order(shuffle, 0, epoch)))


def _stream(rows: Due, order: EpochOrder) -> Stream:
    if not isinstance(rows, np.ndarray):
        return Stream(rows, order, SharedArray)
    is_small = not len(rows) or int(rows.max()) < _SMALL
    return Stream(SharedArray(rows.astype(np.uint32 if is_small else np.int64)), order, SharedArray)
