"""The view of an epoch that was amended: its slots are the positions of the epoch. Pure.

An amendment changes what a job reads in the midst of an epoch: another version, another view, or
both. See `cache_client.order.segments` for the order, and `docs/amend.md` for its use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array
from cache_client.order.segments import Due, Segment, Stream, change, key_of, seed_of, segment
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import Epochs, PlainView, Samples, Shuffle, SlotView, epoch_order

_SMALL: Final = 2**32  # row ids below it take 4 bytes


class Part(NamedTuple):
    """What a segment of an epoch reads.

    Attributes:
        at: the position of the epoch where the segment begins; 0 for the first.
        num_rows: of its version, whose rows are the first ones of every later version.
        view: slots of one row each; of the version.
    """

    at: int
    num_rows: int
    view: SlotView


@dataclass(frozen=True)
class AmendedView:
    """Slot i of the amended epoch has the row of position i; other epochs are as the last view.

    Args:
        epoch: that was amended.
        shuffle: of the job.
        parts: of the epoch, ascending by position.
    """

    epoch: int
    shuffle: Shuffle
    parts: tuple[Part, ...]
    segments: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    is_distinct: bool = field(init=False, repr=False, compare=False)
    orders_rows: bool = field(default=True, init=False)
    epochs: Epochs = field(default="any size", init=False)
    rows_per_slot: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        dues = [_due(part.view, self.epoch) for part in self.parts]
        object.__setattr__(self, "segments", _segments(self.epoch, self.shuffle, self.parts, dues))
        object.__setattr__(self, "is_distinct", all(map(_are_distinct, dues)))

    @property
    def latest(self) -> SlotView:
        """The view of the last segment, and of all other epochs."""
        return self.parts[-1].view

    @property
    def identity(self) -> str:
        """The segments: what each reads, and where it begins."""
        how = self.shuffle
        parts = "; ".join(f"{at} {num_rows} {view.identity}" for at, num_rows, view in self.parts)
        text = f"{how.shuffle} {how.shuffle_block_size} {how.seed} {self.epoch}: {parts}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return f"{self.latest.identity} amended={digest}"

    @property
    def num_bytes(self) -> int:
        """Memory of the lists of its streams, and of the last view."""
        streams = {id(stream): stream for each in self.segments for stream in each.streams}
        return self.latest.num_bytes + sum(stream.num_bytes for stream in streams.values())

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
    rows: Int64Array = np.sort(_rows(view, epoch))
    return rows


def _rows(view: SlotView, epoch: int) -> Int64Array:
    return view.samples(np.arange(view.num_slots(epoch), dtype=np.int64), epoch).row_ids


def _are_distinct(due: Due) -> bool:
    return isinstance(due, range) or bool((due[1:] > due[:-1]).all())


def _segments(
    epoch: int, shuffle: Shuffle, parts: Sequence[Part], dues: Sequence[Due]
) -> tuple[Segment, ...]:
    view = parts[0].view
    whole = epoch_order(shuffle, view.num_slots(epoch), epoch)
    first = _stream(
        dues[0] if isinstance(dues[0], range) else _rows(view, epoch), shuffle.order(view, epoch)
    )
    found = [segment(0, [first], None)]
    for (at, _, _), before, now in zip(parts[1:], dues, dues[1:], strict=False):
        made = change(found[-1].streams_at(at - found[-1].at), before, now)
        streams = list(made.streams)
        if len(made.new):
            of_new = replace(shuffle, seed=seed_of(shuffle.seed, at))
            streams.append(_stream(made.new, epoch_order(of_new, len(made.new), epoch)))
        found.append(segment(at, streams, key_of(whole)))
    return tuple(found)


def _stream(rows: Due, order: EpochOrder) -> Stream:
    if isinstance(rows, range):
        return Stream(rows, order)
    is_small = not len(rows) or int(rows.max()) < _SMALL
    return Stream(SharedArray(rows.astype(np.uint32 if is_small else np.int64)), order)
