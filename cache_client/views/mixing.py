"""A mixture: which source each slot reads, and which of its rows. Pure.

The slots of all epochs lie on one axis, the *run*. `Mixing` gives each slot of the run a source,
and counts the rows that each source has given before it. So a source goes through its rows in
passes that do not depend on the epochs of the mixture: row number p of its part of the run is in
pass ``p // rows``. Epochs only cut the run.

Any slot is computed alone. Weights may change on the way: a change keeps the counts at its slot.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from cache_client.order.permutation import MAX_ROWS, Int64Array, Permutation, checked_integer
from cache_client.views.view import IntArray
from cache_protocol.errors import ConfigError

Draw = Literal["stratified", "random"]
Stop = Literal["first_exhausted", "all_exhausted"]
DRAWS: Final = ("stratified", "random")
STOPS: Final = ("first_exhausted", "all_exhausted")

MAX_PATTERN: Final = 65_536
"""Most slots of a pattern. Weights that need more are rounded to the nearest that do not."""

BLOCK_SLOTS: Final = 4_096
"""Slots whose sources are permuted among themselves where the draw is random."""

_STREAM_DRAWS: Final = 3


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers without a common divisor, whose sum is at most `MAX_PATTERN`.

    Decimals count as they are written: 0.7 and 0.3 become 7 and 3. Where the sum would be larger,
    the result has the sum that makes the largest relative error of a weight smallest.

    Raises:
        ValueError: a weight is negative or no finite number, or all are 0; quotes it.
    """
    exact = [_fraction(weight) for weight in weights]
    if not any(exact):
        raise ValueError(f"weights must not all be 0, got {list(weights)!r}")
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    divisor = math.gcd(*whole)
    whole = [each // divisor for each in whole]
    if sum(whole) > MAX_PATTERN:
        whole = _rounded([each / sum(whole) for each in whole])
    return tuple(whole)


def _fraction(weight: object) -> Fraction:
    if isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool):
        number = float(weight)
        if math.isfinite(number) and number >= 0:
            return Fraction(int(weight)) if number == int(weight) else Fraction(repr(number))
    raise ValueError(f"a weight must be a finite number, at least 0, got {weight!r}")


def _rounded(shares: Sequence[float]) -> list[int]:
    """Whole numbers in nearly these proportions, each at least 1 where the share is not 0."""
    positive = np.array([share for share in shares if share > 0])
    sizes = np.arange(MAX_PATTERN // 2, MAX_PATTERN + 1 - len(positive))
    tried = np.maximum(1, np.rint(positive * sizes[:, None])).astype(np.int64)
    errors = np.abs(tried / tried.sum(1, keepdims=True) / positive - 1).max(1)
    best = tried[errors.argmin()]
    left = iter(best.tolist())
    return [next(left) if share > 0 else 0 for share in shares]


class Pattern:
    """Divides slots among sources by whole weights n: each run of ``sum(n)`` slots is the same.

    Of the first i slots, source s has the floor or the ceiling of ``i * n[s] / sum(n)``. Each slot
    goes to the source whose next row is due first, among those that are not ahead. This rule,
    earliest deadline first, meets all deadlines of jobs of one slot, if anything does. Tijdeman
    proved that something does, for any weights ("The chairman assignment problem", 1980).

    Args:
        weights: as `whole_weights` returns them.

    Attributes:
        num_bytes: of the tables, at most 2 MiB.

    Thread-safety: immutable.
    """

    def __init__(self, weights: tuple[int, ...]) -> None:
        self.weights = weights
        self.size = sum(weights)
        self._sources = np.array(_by_deadline(weights), np.int16)
        self._slots_of = [np.flatnonzero(self._sources == s) for s in range(len(weights))]
        self._before = np.empty(self.size, np.int64)
        for slots in self._slots_of:
            self._before[slots] = np.arange(len(slots))
        self._weights = np.array(weights, np.int64)
        self.num_bytes = self._sources.nbytes + 2 * self._before.nbytes

    def locate(self, slots: Int64Array) -> tuple[IntArray, Int64Array]:
        """The source of each slot, and how many earlier slots have the same source."""
        rounds = slots // self.size
        within = slots - rounds * self.size
        sources = np.take(self._sources, within)
        rounds *= np.take(self._weights, sources)
        rounds += np.take(self._before, within)
        return sources, rounds

    def slots_of(self, source: int, first: int, count: int) -> Int64Array:
        """The slots of a source in ``[first, first + count)``, counted from ``first``."""
        rounds = np.arange(-(-(first % self.size + count) // self.size), dtype=np.int64)
        found = np.add.outer(rounds * self.size - first % self.size, self._slots_of[source])
        flat: Int64Array = found.reshape(-1)
        return flat[slice(*np.searchsorted(flat, (0, count)))]

    def counts(self, slots: int) -> tuple[int, ...]:
        """How many of the first ``slots`` slots each source has."""
        rounds, rest = divmod(slots, self.size)
        return tuple(
            rounds * weight + int(np.searchsorted(own, rest))
            for weight, own in zip(self.weights, self._slots_of, strict=True)
        )

    def slots_until(self, source: int, rows: int) -> int | None:
        """The fewest slots that hold ``rows`` rows of a source, at least 1; None: never."""
        if not self.weights[source]:
            return None
        rounds, rest = divmod(rows - 1, self.weights[source])
        return rounds * self.size + int(self._slots_of[source][rest]) + 1


def _by_deadline(weights: Sequence[int]) -> list[int]:
    """The source of each slot of one round."""
    size = sum(weights)
    released: list[list[int]] = [[] for _ in range(size + 1)]
    released[0] = [source for source, weight in enumerate(weights) if weight]
    counts = [0] * len(weights)
    due: list[tuple[int, int]] = []
    found = []
    for slot in range(size):
        for source in released[slot]:
            deadline = -(-(counts[source] + 1) * size // weights[source])
            heapq.heappush(due, (deadline, source))
        _, source = heapq.heappop(due)
        found.append(source)
        counts[source] += 1
        # The first slot before which fewer rows than its share are given.
        released[max(slot + 1, counts[source] * size // weights[source])].append(source)
    return found


@lru_cache(maxsize=64)
def _pattern(weights: tuple[int, ...]) -> Pattern:
    return Pattern(weights)


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
    consecutive slots among themselves, by the seed. So at the ends of blocks the proportions are as
    exact. Blocks begin anew at epochs and changes.

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
        return sum(_pattern(change.weights).num_bytes for change in self.changes)

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
        within = _pattern(change.weights).counts(slot - change.slot)
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
        slots = _pattern(change.weights).slots_until(source, left)
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
            part = in_run[here] - first
            if self.draw == "random":
                part = _permuted(part, last - first, seed=self.seed, epoch=epoch, change=number)
            part += first - change.slot
            sources[here], found = _pattern(change.weights).locate(part)
            found += np.take(np.array(change.counts, np.int64), sources[here])
            rows[here] = found
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
        pattern, rows = _pattern(change.weights), self.counts(start)
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


def _permuted(
    slots: Int64Array, num_slots: int, *, seed: int, epoch: int, change: int
) -> Int64Array:
    """Slots in ``[0, num_slots)``, permuted inside blocks; a new array."""
    key = {"seed": seed, "epoch": epoch, "stream": _STREAM_DRAWS + change}
    blocks = slots // BLOCK_SLOTS
    starts = blocks * BLOCK_SLOTS
    whole = num_slots // BLOCK_SLOTS
    found = np.empty_like(slots)
    in_whole = blocks < whole
    regular = Permutation(BLOCK_SLOTS, **key)
    found[in_whole] = regular.apply((slots - starts)[in_whole], blocks[in_whole])
    if not in_whole.all():
        last = Permutation(num_slots - whole * BLOCK_SLOTS, **key)
        found[~in_whole] = last.apply((slots - starts)[~in_whole], blocks[~in_whole])
    found += starts
    return found


# -- the view --------------------------------------------------------------------------------------


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
            if any(not 0 < sum(change.weights) <= MAX_PATTERN for change in changes):
                raise ValueError(f"weights must have a sum of 1 to {MAX_PATTERN}, got {changes}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"mixture: {error}") from None
        return found


def _numbers(values: Sequence[object], size: int) -> tuple[int, ...]:
    found = tuple(checked_integer("weight or count", value, 0) for value in values)
    if len(found) != size:
        raise ValueError(f"one number for each of {size} sources, got {values!r}")
    return found
