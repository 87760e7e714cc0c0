"""The segments of an amended epoch: which row each position has. Pure.

An epoch that is never amended is one permutation. An amendment ends the segment at a position and
begins the next one, of the rows that are due now and were not given. No row that was given comes
again, and no list of given rows is kept: every row lies in one *stream*, which is a permutation,
and a stream is given from its begin on. So what was given of a stream is one number. Rows that are
not due any more are places that the stream leaves out; rows that became due are a new stream.

A segment mixes what is left of its streams. A binary tree of `Merge` says which stream a position
takes: the shorter of two runs is spread over the longer one, one item in each of as many strata.
The tree is that of Huffman (1952), by the lengths, so that nearly all positions pass few merges.
Each position and each row is computed alone, in both directions.

What an amendment costs does not depend on how many were made before: a row passes one permutation.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cache_client.order.erased import NO_ROWS, Listed, Rest, count_at_most
from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array, splitmix64
from cache_protocol.storage.row_sets import among

_MOST: Final = 2**62  # of the product of two lengths, in 64 bits
MOST_MOVED: Final = 2**17
"""Rows of short streams that move to a new one with an amendment, so that streams stay few."""


@dataclass(frozen=True)
class Stream:
    """Rows in a permuted order, given from the begin on.

    Args:
        rows: of the stream; a range, with or without all of its rows, or a list.
        order: place in the stream -> which of the rows.
        share: makes a list that the processes of a job share.
        start: places before this one are over: they were given, or left out.
        out: places that are left out, ascending, int64; None: none.
    """

    rows: range | Rest | Listed
    order: EpochOrder
    share: Callable[[Int64Array], Listed] = field(repr=False, compare=False)
    start: int = 0
    out: Listed | None = field(default=None, repr=False, compare=False)
    _passed: int = field(init=False, repr=False, compare=False)  # of those left out
    _ahead: Listed | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        passed = int(np.searchsorted(self._out, self.start))
        ahead = self._out[passed:] - self.start
        # How many are left before each place that is left out.
        before = self.share(ahead - np.arange(len(ahead))) if len(ahead) else None
        object.__setattr__(self, "_passed", passed)
        object.__setattr__(self, "_ahead", before)

    @property
    def _out(self) -> Int64Array:
        return NO_ROWS if self.out is None else self.out.values.view(np.int64)

    @property
    def num_left(self) -> int:
        """Rows that are still to be given."""
        return len(self.rows) - self.start - (len(self._out) - self._passed)

    @property
    def lists(self) -> list[Listed]:
        """Its lists; other streams may have the same ones."""
        rows = self.rows.out if isinstance(self.rows, Rest) else self.rows
        found = (None if isinstance(rows, range) else rows, self.out, self._ahead)
        return [each for each in found if each is not None]

    def places(self, left: Int64Array) -> Int64Array:
        """The places of some of those that are left, counted from the first of them."""
        places: Int64Array = left + self.start
        if self._ahead is not None:
            places += count_at_most(self._ahead.values.view(np.int64), left)
        return places

    def row_ids(self, left: Int64Array) -> Int64Array:
        """The rows of some of those that are left, counted from the first of them."""
        items = self.order.row_ids(self.places(left))
        if isinstance(self.rows, range):
            items += self.rows.start
            return items
        if isinstance(self.rows, Rest):
            return self.rows.take(items)
        return np.take(self.rows.values, items).astype(np.int64, copy=False)

    def find(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where rows stand that are not left out, given or not.

        Args:
            rows: ascending, none twice.

        Returns:
            Which of the rows, and its place; both of shape ``(found,)``, in no order.
        """
        if isinstance(self.rows, range):
            first, last = np.searchsorted(rows, [self.rows.start, self.rows.stop])
            which = np.arange(first, last, dtype=np.int64)
            items = rows[first:last] - self.rows.start
        elif isinstance(self.rows, Rest):
            which, items = self.rows.find(rows)
        else:
            values = self.rows.values
            items = np.flatnonzero(among(values, rows))
            which = np.searchsorted(rows, values[items])
        places = self.order.positions(items)
        kept = ~among(places, self._out)
        return which[kept], places[kept]

    def left_of(self, places: Int64Array) -> Int64Array:
        """The inverse of `places`; -1 for those that are over or left out."""
        left = places - self.start
        left -= np.searchsorted(self._out, places) - self._passed
        left[(places < self.start) | among(places, self._out)] = -1
        return left

    def after(self, count: int) -> Stream:
        """The stream after so many of those that are left were given."""
        if not count:
            return self
        return replace(self, start=int(self.places(np.array([count - 1]))[0]) + 1)

    def without(self, places: Int64Array) -> Stream:
        """The stream without these places, which are left in it."""
        if not len(places):
            return self
        more = np.sort(places)
        return replace(
            self, out=self.share(np.insert(self._out, self._out.searchsorted(more), more))
        )


@dataclass(frozen=True)
class Merge:
    """Two runs as one.

    With a key, the shorter run is spread over the longer one: of as many strata of the whole as it
    has items, each has one, at a place that a hash of the key says. Without, ``right`` follows.

    Args:
        left, right: what is merged: streams by their number, or merges.
        num_left, num_right: their lengths, at least 1; with a key ``num_left >= num_right``.
        key: of 64 bits, or None.

    Raises:
        ValueError: the lengths are too large for 64 bits; quotes them.
    """

    left: int | Merge
    right: int | Merge
    num_left: int
    num_right: int
    key: int | None

    def __post_init__(self) -> None:
        if self.key is not None and len(self) * self.num_right > _MOST:
            raise ValueError(
                f"an epoch of {len(self):,} rows, {self.num_right:,} of them new, cannot be "
                f"amended: their product must be at most 2**62"
            )

    def __len__(self) -> int:
        return self.num_left + self.num_right

    def split(self, positions: Int64Array) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """Whether each position is of the right run, and which item of its run it is."""
        if self.key is None:
            is_right = positions >= self.num_left
            return is_right, positions - is_right * self.num_left
        strata = ((positions + 1) * self.num_right - 1) // len(self)
        marks = self._marks(strata)
        is_right = positions == marks
        items = positions - strata - (positions > marks)
        items[is_right] = strata[is_right]
        return is_right, items

    def join(self, items: Int64Array, *, right: bool) -> Int64Array:
        """The inverse of `split`, for items of one run."""
        if self.key is None:
            return items + right * self.num_left
        if right:
            return self._marks(items)
        strata = ((items + 1) * self.num_right - 1) // self.num_left
        positions: Int64Array = items + strata
        positions += positions >= self._marks(strata)
        return positions

    def _marks(self, strata: Int64Array) -> Int64Array:
        """Where the item of the right run is in each stratum."""
        assert self.key is not None
        begins = strata * len(self) // self.num_right
        sizes = (strata + 1) * len(self) // self.num_right - begins
        words = splitmix64((strata + 1).astype(np.uint64), self.key)
        marks: Int64Array = begins + (words % sizes.astype(np.uint64)).astype(np.int64)
        return marks


@dataclass(frozen=True)
class Segment:
    """A part of an epoch: what was left of its streams when it began.

    Args:
        at: the position of the epoch where it begins.
        streams: some may have nothing left.
        mix: which stream each position takes; a stream by its number, None where nothing is left.
    """

    at: int
    streams: tuple[Stream, ...]
    mix: int | Merge | None

    @property
    def num_left(self) -> int:
        """Positions from its begin to the end of the epoch, if no other segment follows."""
        return sum(stream.num_left for stream in self.streams)

    def row_ids(self, positions: Int64Array) -> Int64Array:
        """The rows of positions in ``[0, num_left)``, counted from the begin of the segment."""
        if isinstance(self.mix, int):
            return self.streams[self.mix].row_ids(positions)
        found = np.empty(len(positions), np.int64)
        pending: list[tuple[Any, Int64Array, Int64Array]] = []
        if len(positions):
            pending.append((self.mix, positions, np.arange(len(positions))))
        while pending:
            node, items, lanes = pending.pop()
            if isinstance(node, int):
                found[lanes] = self.streams[node].row_ids(items)
                continue
            is_right, items = node.split(items)
            for child, own in ((node.left, ~is_right), (node.right, is_right)):
                if own.any():
                    pending.append((child, items[own], lanes[own]))
        return found

    def find(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where rows stand in the segment, if no other follows.

        Args:
            rows: ascending, none twice.

        Returns:
            Which of the rows, and its position, counted from the begin of the segment; in no order.
        """
        whichs, positions = [NO_ROWS], [NO_ROWS]
        for number, path in self._paths():
            which, places = self.streams[number].find(rows)
            items = self.streams[number].left_of(places)
            which, items = which[items >= 0], items[items >= 0]
            for node, right in reversed(path):
                items = node.join(items, right=right)
            whichs.append(which)
            positions.append(items)
        return np.concatenate(whichs), np.concatenate(positions)

    def _paths(self) -> list[tuple[int, list[tuple[Merge, bool]]]]:
        """Each stream that has rows left, with the merges above it, from the top."""
        found: list[tuple[int, list[tuple[Merge, bool]]]] = []
        pending: list[tuple[int | Merge, list[tuple[Merge, bool]]]] = []
        if self.mix is not None:
            pending.append((self.mix, []))
        while pending:
            node, path = pending.pop()
            if isinstance(node, int):
                found.append((node, path))
            else:
                pending.append((node.left, [*path, (node, False)]))
                pending.append((node.right, [*path, (node, True)]))
        return found

    def streams_at(self, position: int) -> tuple[Stream, ...]:
        """The streams when so many positions of the segment were given."""
        streams, pending = list(self.streams), [] if self.mix is None else [(self.mix, position)]
        while pending:
            node, count = pending.pop()
            if isinstance(node, int):
                streams[node] = streams[node].after(count)
                continue
            of_right = 0
            if count:
                is_right, items = node.split(np.array([count - 1]))
                of_right = int(items[0]) + 1 if is_right[0] else count - 1 - int(items[0])
            pending += [(node.left, count - of_right), (node.right, of_right)]
        return tuple(streams)


def segment(at: int, streams: Sequence[Stream], key: str | None) -> Segment:
    """A segment that mixes what is left of streams.

    Args:
        at: the position of the epoch where it begins.
        key: of the mix; None: what is left of one stream follows that of the stream before it.

    Raises:
        ValueError: as `Merge`.
    """
    nodes: list[tuple[int, int, int | Merge]] = [
        (stream.num_left, number, number)
        for number, stream in enumerate(streams)
        if stream.num_left
    ]
    while key is None and len(nodes) > 1:
        (size, number, first), (after, _, second) = nodes[-2:]
        nodes[-2:] = [(size + after, number, Merge(first, second, size, after, None))]
    heapq.heapify(nodes)
    number = len(streams)
    while len(nodes) > 1:
        few, _, right = heapq.heappop(nodes)
        many, _, left = heapq.heappop(nodes)
        merge = Merge(left, right, many, few, _word(f"{key} at={at} merge={number}"))
        heapq.heappush(nodes, (many + few, number, merge))
        number += 1
    return Segment(at, tuple(streams), nodes[0][2] if nodes else None)


def key_of(order: EpochOrder) -> str | None:
    """The key of the mixes of an epoch; None without a shuffle."""
    return f"amended epoch={order.epoch} seed={order.seed}" if order.shuffle else None


def seed_of(seed: int, at: int) -> int:
    """The seed of the stream that begins at a position."""
    return _word(f"stream at={at} seed={seed}")


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little")


# -- what changes ----------------------------------------------------------------------------------


Due = range | Rest | Int64Array
"""The rows that are due in an epoch, ascending, each as often as it is due."""


@dataclass(frozen=True)
class Change:
    """What an amendment changes.

    Attributes:
        streams: without the rows that are not due any more, or moved.
        new: rows of a new stream: those that became due and were not given, each as often as it
            lacks, and what was left of short streams. As `Due`.
    """

    streams: tuple[Stream, ...]
    new: Due


def change(streams: Sequence[Stream], before: Due, now: Due) -> Change:
    """What becomes of streams when other rows are due.

    A row that was given more often than it is due now does not come again.

    Args:
        streams: all of the epoch, as far as they were given.
        before: what was due by these streams.
        now: what is due.
    """
    added: Due = range(0)
    if isinstance(before, np.ndarray) or isinstance(now, np.ndarray):
        rows, due = _changed(before, now)
    else:
        (rows, due), added = _changed_spans(before, now), _appended(before, now)
    if not len(rows):
        return _with_short(streams, added)
    have = np.zeros(len(rows), np.int64)
    left: list[Int64Array] = []  # which row, stream, place
    for number, stream in enumerate(streams):
        which, places = stream.find(rows)
        have += np.bincount(which, minlength=len(rows))
        ahead = places >= stream.start
        left.append(np.stack([which[ahead], np.full(ahead.sum(), number), places[ahead]]))
    which, numbers, places = _last_first(np.concatenate(left, axis=1))
    begins = np.searchsorted(which, which)  # of the run of the same row
    out = np.arange(len(which)) - begins < (have - due)[which]
    kept = [
        stream.without(places[out & (numbers == number)]) for number, stream in enumerate(streams)
    ]
    lacking = np.repeat(rows, np.maximum(due - have, 0))
    return _with_short(kept, _joined(added, lacking))


def _with_short(streams: Sequence[Stream], new: Due) -> Change:
    """Moves what is left of short streams to the new one, the shortest first; never the first."""
    kept, moved, num_moved = list(streams), list[Int64Array](), len(new)
    for number in sorted(range(1, len(kept)), key=lambda number: kept[number].num_left):
        count = kept[number].num_left
        num_moved += count
        if not len(new) or num_moved > MOST_MOVED:
            break
        if count:
            left = np.arange(count, dtype=np.int64)
            moved.append(kept[number].row_ids(left))
            kept[number] = kept[number].without(kept[number].places(left))
    if moved:
        new = _joined(new, *moved)
    return Change(tuple(kept), new)


def _last_first(left: Int64Array) -> Int64Array:
    """By row; of a row, the latest stream and the last place first."""
    return left[:, np.lexsort((-left[2], -left[1], left[0]))]


def are_distinct(due: Due) -> bool:
    """Whether no row is due twice."""
    return not isinstance(due, np.ndarray) or bool((due[1:] > due[:-1]).all())


def _listed(due: Due) -> Int64Array:
    if isinstance(due, range):
        return np.arange(due.start, due.stop, dtype=np.int64)
    return due.listed() if isinstance(due, Rest) else due


def _joined(due: Due, *others: Int64Array) -> Due:
    more = [each for each in others if len(each)]
    return np.sort(np.concatenate([_listed(due), *more])) if more else due


def _span(due: range | Rest) -> tuple[range, Int64Array]:
    """A range, and its rows that are not due."""
    return (due.rows, due.left_out) if isinstance(due, Rest) else (due, NO_ROWS)


def _changed_spans(before: range | Rest, now: range | Rest) -> tuple[Int64Array, Int64Array]:
    """As `_changed`, of rows that both have in their ranges; without counting all rows."""
    (rows, was_out), (_, out) = _span(before), _span(now)
    out = out[: np.searchsorted(out, rows.stop)]
    lost, back = out[~among(out, was_out)], was_out[~among(was_out, out)]
    changed = np.concatenate([lost, back])
    order = np.argsort(changed)
    return changed[order], (order >= len(lost)).astype(np.int64)


def _appended(before: range | Rest, now: range | Rest) -> Due:
    """Rows of the later range that follow those of the one before."""
    (rows, _), (grown, out) = _span(before), _span(now)
    added = range(rows.stop, max(rows.stop, grown.stop))
    out = out[np.searchsorted(out, added.start) :]
    return np.setdiff1d(np.asarray(added), out) if len(out) else added


def _changed(before: Due, now: Due) -> tuple[Int64Array, Int64Array]:
    """The rows that are due another number of times, ascending, and how often they are due now."""
    was, due = _listed(before), _listed(now)
    if are_distinct(before) and are_distinct(now):  # without counting all rows
        lost, gained = was[~among(was, due)], due[~among(due, was)]
        rows = np.concatenate([lost, gained])
        order = np.argsort(rows)
        return rows[order], (order >= len(lost)).astype(np.int64)
    rows = np.union1d(was, due)
    counts = []
    for values in (was, due):
        own, times = np.unique(values, return_counts=True)
        counts.append(np.zeros(len(rows), np.int64))
        counts[-1][np.searchsorted(rows, own)] = times
    differ = counts[0] != counts[1]
    return rows[differ], counts[1][differ]
