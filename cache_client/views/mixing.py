"""A mixture: which source each slot reads, and which of its rows. Pure.

The slots of all epochs lie on one axis, the *run*. `Mixing` gives each slot of the run a source,
and counts the rows that each source has given before it. So a source goes through its rows in
passes that do not depend on the epochs of the mixture: row number p of its part of the run is in
pass ``p // rows``. Epochs only cut the run.

Any slot is computed alone. Weights may change on the way: a change keeps the counts at its slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from cache_client.order.permutation import MAX_ROWS, Int64Array, checked_integer, splitmix64
from cache_client.views.patterns import MAX_SUM, pattern_of
from cache_client.views.view import IntArray
from cache_protocol.errors import ConfigError

Draw = Literal["stratified", "random"]
Stop = Literal["first_exhausted", "all_exhausted"]
DRAWS: Final = ("stratified", "random")
STOPS: Final = ("first_exhausted", "all_exhausted")

BLOCK_SLOTS: Final = 4_096
"""Slots whose sources are permuted among themselves where the draw is random."""


class Change(NamedTuple):
    """Weights that count from a slot of the run on.

    Attributes:
        slot: of the run.
        weights: of each source, whole.
        counts: rows that each source has given before the slot.
    """

    slot: int
    weights: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Mixing:
    """Slots of epochs -> sources and the rows of their passes.

    Epoch e ends where ``stop`` says: with ``first_exhausted`` at the slot where a source is the
    first to have given all rows of e + 1 passes, with ``all_exhausted`` where the last one has. A
    number is the slots of each epoch.

    ``stratified`` draws by `Pattern`. ``random`` permutes the sources of every `BLOCK_SLOTS`
    consecutive slots among themselves, by the seed; each source gives its rows in the same order.
    So at the ends of blocks the proportions are as exact. Blocks begin anew at epochs and changes.

    Args:
        rows: of one pass over each source, at least 1.
        stop: where an epoch ends.
        draw: how slots get their sources.
        seed: of the random draw.
        changes: ascending by slot, the first at 0; see `mixing`.

    Raises:
        ConfigError: ``all_exhausted`` with a source whose last weight is 0.

    Thread-safety: immutable.
    """

    rows: tuple[int, ...]
    stop: Stop | int
    draw: Draw
    seed: int
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        self.epoch_start(1)

    @property
    def num_bytes(self) -> int:
        """Memory of the patterns."""
        return sum(pattern_of(change.weights).num_bytes for change in self.changes)

    def changed(self, slot: int, weights: tuple[int, ...]) -> Mixing:
        """With other weights from a slot of the run on, and without all later changes."""
        kept = tuple(change for change in self.changes if change.slot < slot)
        new = Change(slot, weights, self.counts(slot) if kept else (0,) * len(weights))
        return replace(self, changes=(*kept, new))

    def resumed(self, slot: int, planned: Mixing) -> Mixing:
        """With the weights of ``planned`` from a slot of the run on."""
        found = replace(self, stop=1).changed(slot, planned.weights(slot))
        for change in planned.changes:
            if change.slot > slot:
                found = found.changed(change.slot, change.weights)
        return replace(found, stop=self.stop)

    def counts(self, slot: int) -> tuple[int, ...]:
        """Rows that each source has given before a slot of the run."""
        change = [each for each in self.changes if each.slot <= slot][-1]
        within = pattern_of(change.weights).counts(slot - change.slot)
        return tuple(a + b for a, b in zip(change.counts, within, strict=True))

    def weights(self, slot: int) -> tuple[int, ...]:
        """The weights that count at a slot of the run."""
        return [each for each in self.changes if each.slot <= slot][-1].weights

    def epoch_start(self, epoch: int) -> int:
        """The first slot of an epoch on the run.

        Raises:
            ConfigError: the epoch never begins, or after more than 2**62 slots.
        """
        if not epoch:
            return 0
        if isinstance(self.stop, int):
            found: list[int | None] = [epoch * self.stop]
        else:
            found = [self._slots_until(s, epoch * rows) for s, rows in enumerate(self.rows)]
        if self.stop == "all_exhausted" and None in found:
            raise ConfigError(
                f"an epoch never ends: source {found.index(None)} has weight 0 from a step on, and "
                "stop='all_exhausted' waits for its last row"
            )
        ends = [slots for slots in found if slots is not None]
        start = min(ends) if self.stop == "first_exhausted" else max(ends)
        if start > MAX_ROWS:
            raise ConfigError(f"epoch {epoch} begins after {start} rows, more than 2**62")
        return start

    def num_slots(self, epoch: int) -> int:
        """Slots of an epoch."""
        return self.epoch_start(epoch + 1) - self.epoch_start(epoch)

    def _slots_until(self, source: int, rows: int) -> int | None:
        change = [each for each in self.changes if each.counts[source] < rows][-1]
        left = rows - change.counts[source]
        slots = pattern_of(change.weights).slots_until(source, left)
        return None if slots is None else change.slot + slots

    def locate(self, slots: Int64Array, epoch: int) -> tuple[IntArray, Int64Array]:
        """The source of each slot of an epoch, and which row of its part of the run it reads."""
        start, stop = self.epoch_start(epoch), self.epoch_start(epoch + 1)
        in_run = slots + start
        sources = np.empty(len(slots), np.int16)
        rows = np.empty(len(slots), np.int64)
        ends = [*(change.slot for change in self.changes[1:]), MAX_ROWS]
        for number, (change, end) in enumerate(zip(self.changes, ends, strict=True)):
            first, last = max(start, change.slot), min(stop, end)
            if first >= last:
                continue
            is_whole = (first, last) == (start, stop)
            here = slice(None) if is_whole else (in_run >= first) & (in_run < last)
            if self.draw == "random":
                part = in_run[here] - first
                sources[here], found = self._drawn(part, first, last, epoch, number)
            else:
                part = in_run[here] - change.slot
                sources[here], found = pattern_of(change.weights).locate(part)
            found += np.take(np.array(change.counts, np.int64), sources[here])
            rows[here] = found
        return sources, rows

    def _drawn(
        self, slots: Int64Array, first: int, last: int, epoch: int, number: int
    ) -> tuple[IntArray, Int64Array]:
        """As `Pattern.locate`, drawn, for slots of ``[first, last)``, counted from ``first``."""
        change = self.changes[number]
        sources, rows = np.empty(len(slots), np.int16), np.empty(len(slots), np.int64)
        blocks = slots // BLOCK_SLOTS
        within = slots - blocks * BLOCK_SLOTS
        ends = [*(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(slots)]
        for begin, end in pairwise([0, *ends] if len(slots) else []):
            block = int(blocks[begin])
            start = first + block * BLOCK_SLOTS
            of_block, rows_of_block = _drawn_block(
                change.weights, start - change.slot, min(BLOCK_SLOTS, last - start), block,
                seed=self.seed, epoch=epoch, change=number,
            )  # fmt: skip
            np.take(of_block, within[begin:end], out=sources[begin:end])
            np.take(rows_of_block, within[begin:end], out=rows[begin:end])
        return sources, rows

    def locate_run(self, first: int, count: int, epoch: int) -> list[tuple[Int64Array, int]] | None:
        """As `locate`, for consecutive slots, at a fraction of the cost.

        Returns:
            For each source its places among the slots, and the row that the first of them reads;
            None if the draw is random, or the weights change on the way.
        """
        start = self.epoch_start(epoch) + first
        if self.draw == "random" or any(start < c.slot < start + count for c in self.changes):
            return None
        change = [each for each in self.changes if each.slot <= start][-1]
        pattern, rows = pattern_of(change.weights), self.counts(start)
        return [
            (pattern.slots_of(source, start - change.slot, count), row)
            for source, row in enumerate(rows)
        ]

    def change_slot(self, slot: int, epoch: int) -> int:
        """The first slot of the run from which on weights can change, if those before are read."""
        if self.draw == "stratified":
            return slot
        ends = [*(each.slot for each in self.changes if each.slot > slot), MAX_ROWS]
        last = max(each.slot for each in self.changes if each.slot <= slot)
        first, end = max(last, self.epoch_start(epoch)), min(ends[0], self.epoch_start(epoch + 1))
        blocks = -(-(slot - first) // BLOCK_SLOTS)
        return min(first + blocks * BLOCK_SLOTS, end)


def mixing(
    rows: Sequence[int],
    weights: Sequence[tuple[int, tuple[int, ...]]],
    *,
    stop: Stop | int,
    draw: Draw = "stratified",
    seed: int = 0,
) -> Mixing:
    """A `Mixing` of pairs of slots and weights, ascending, the first at slot 0.

    Raises:
        ConfigError: as `Mixing`.
    """
    (_, first), *later = weights
    # An epoch may end only thanks to a later change, so the stop is checked last.
    found = Mixing(tuple(rows), 1, draw, seed, (Change(0, first, (0,) * len(first)),))
    for slot, changed in later:
        found = found.changed(slot, changed)
    return replace(found, stop=stop)


@lru_cache(maxsize=32)  # 40 kB each; neighbouring windows and steps share blocks
def _drawn_block(
    weights: tuple[int, ...],
    start: int,
    size: int,
    block: int,
    *,
    seed: int,
    epoch: int,
    change: int,
) -> tuple[IntArray, Int64Array]:
    """Slots of a pattern whose sources are permuted; each source keeps the order of its rows."""
    slots = np.arange(size, dtype=np.int64)
    sources, rows = pattern_of(weights).locate(slots + start)
    text = f"draw seed={seed} epoch={epoch} change={change}"
    key = hashlib.blake2b(text.encode("ascii"), digest_size=8).digest()
    numbers = (slots + (block * BLOCK_SLOTS + 1)).astype(np.uint64)
    # Sorting hashes takes a third of the time of a keyed permutation. Their last bits are the slot.
    hashes = splitmix64(numbers, int.from_bytes(key, "little"))
    hashes &= ~np.uint64(BLOCK_SLOTS - 1)
    hashes |= slots.view(np.uint64)
    hashes.sort()
    drawn = sources[hashes & np.uint64(BLOCK_SLOTS - 1)]
    found = np.empty_like(rows)
    found[np.argsort(drawn, kind="stable")] = rows[np.argsort(sources, kind="stable")]
    return drawn, found


# -- states ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureState:
    """What a state of a mixture has beside the position: a few numbers for each change of weights.

    Attributes:
        schedule: pairs of steps and weights, as the job gave them.
        steps: of an epoch, as the job gave them; None: ``stop`` says where a source ends.
        epoch_slots: of each epoch of so many steps, also with another batch size; None likewise.
        changes: of its `Mixing`.
    """

    schedule: tuple[tuple[int, tuple[int, ...]], ...]
    steps: int | None
    epoch_slots: int | None
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON types."""
        return {
            "plan": [[step, list(weights)] for step, weights in self.schedule],
            "steps": self.steps,
            "epoch_slots": self.epoch_slots,
            "changes": [[c.slot, list(c.weights), list(c.counts)] for c in self.changes],
        }

    @classmethod
    def from_dict(cls, mapping: Any, num_sources: int) -> MixtureState:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: it is no such state; quotes it.
        """
        try:
            schedule = tuple(
                (checked_integer("step", step, 0), _numbers(weights, num_sources))
                for step, weights in mapping["plan"]
            )
            changes = tuple(
                Change(
                    checked_integer("slot", slot, 0, MAX_ROWS),
                    _numbers(weights, num_sources),
                    _numbers(counts, num_sources),
                )
                for slot, weights, counts in mapping["changes"]
            )
            steps, slots = (
                None if mapping[name] is None else checked_integer(name, mapping[name], 1)
                for name in ("steps", "epoch_slots")
            )
            if (steps is None) != (slots is None):
                raise ValueError(f"steps={steps} and epoch_slots={slots} go together")
            found = cls(
                schedule,
                steps,
                slots,
                changes,
            )
            ascending = [change.slot for change in changes]
            if not changes or ascending[0] or ascending != sorted(set(ascending)):
                raise ValueError(f"changes must ascend from slot 0, got {ascending}")
            if any(sum(change.counts) != change.slot for change in changes):
                raise ValueError(f"counts must add up to the slot of their change, got {changes}")
            if any(not 0 < sum(change.weights) <= MAX_SUM for change in changes):
                raise ValueError(f"weights must have a sum of 1 to {MAX_SUM}, got {changes}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"mixture: {error}") from None
        return found


def _numbers(values: Sequence[object], size: int) -> tuple[int, ...]:
    found = tuple(checked_integer("weight or count", value, 0) for value in values)
    if len(found) != size:
        raise ValueError(f"one number for each of {size} sources, got {values!r}")
    return found
