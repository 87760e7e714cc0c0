"""Slots divided among sources by weights, so that any first slots have nearly each share. Pure.

Any slot is computed alone: its source, and how many slots before it have the same source.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array
from cache_client.views.view import IntArray

MAX_SUM: Final = 2**61
"""Largest sum of whole weights. Those that need more are rounded, by less than one in 10**9."""

MAX_PATTERN: Final = 65_536
"""Largest sum of whole weights whose sources are looked up in a table."""

_MAX_PRODUCT: Final = 2**61  # of the numbers of a `_Split`, so that 64 bits hold what it computes
_Number = TypeVar("_Number", int, Int64Array)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers without a common divisor, whose sum is at most `MAX_SUM`.

    Decimals count as they are written: 0.7 and 0.3 become 7 and 3. Where the sum would be larger,
    the numbers are rounded down, but those above 0 stay above 0.

    Raises:
        ValueError: a weight is negative or no finite number, or all are 0; quotes it.
    """
    exact = [_fraction(weight) for weight in weights]
    if not any(exact):
        raise ValueError(f"weights must not all be 0, got {list(weights)!r}")
    scale = math.lcm(*(each.denominator for each in exact))
    whole = _reduced([int(each * scale) for each in exact])
    if (total := sum(whole)) > MAX_SUM:
        whole = _reduced([each and max(1, each * (MAX_SUM // 2) // total) for each in whole])
    return tuple(whole)


def _reduced(numbers: Sequence[int]) -> list[int]:
    divisor = math.gcd(*numbers)
    return [each // divisor for each in numbers]


def _fraction(weight: object) -> Fraction:
    if isinstance(weight, int | np.integer) and not isinstance(weight, bool) and weight >= 0:
        return Fraction(int(weight))
    if isinstance(weight, float | np.floating) and math.isfinite(weight) and weight >= 0:
        return Fraction(str(weight))
    raise ValueError(f"a weight must be a finite number, at least 0, got {weight!r}")


class Pattern(Protocol):
    """Divides slots among sources by whole weights n: each run of ``sum(n)`` slots is the same.

    Thread-safety: immutable.

    Attributes:
        num_bytes: of the tables.
    """

    num_bytes: int

    def locate(self, slots: Int64Array) -> tuple[IntArray, Int64Array]:
        """The source of each slot, and how many earlier slots have the same source."""

    def slots_of(self, source: int, first: int, count: int) -> Int64Array:
        """The slots of a source in ``[first, first + count)``, counted from ``first``."""

    def counts(self, slots: int) -> tuple[int, ...]:
        """How many of the first ``slots`` slots each source has."""

    def slots_until(self, source: int, rows: int) -> int | None:
        """The fewest slots that hold ``rows`` rows of a source, at least 1; None: never."""


@lru_cache(maxsize=64)
def pattern_of(weights: tuple[int, ...]) -> Pattern:
    """The pattern of whole weights.

    Args:
        weights: as `whole_weights` returns them.
    """
    return TablePattern(weights) if sum(weights) <= MAX_PATTERN else TreePattern(weights)


class TablePattern:
    """A pattern that is looked up.

    Of the first i slots, source s has the floor or the ceiling of ``i * n[s] / sum(n)``. Each slot
    goes to the source whose next row is due first, among those that are not ahead. This rule,
    earliest deadline first, meets all deadlines of jobs of one slot, if anything does. Tijdeman
    proved that something does, for any weights ("The chairman assignment problem", 1980).

    Its tables have at most 2 MiB.
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
        """As `Pattern`."""
        rounds = slots // self.size
        within = slots - rounds * self.size
        sources = np.take(self._sources, within)
        rounds *= np.take(self._weights, sources)
        rounds += np.take(self._before, within)
        return sources, rounds

    def slots_of(self, source: int, first: int, count: int) -> Int64Array:
        """As `Pattern`."""
        rounds = np.arange(-(-(first % self.size + count) // self.size), dtype=np.int64)
        found = np.add.outer(rounds * self.size - first % self.size, self._slots_of[source])
        flat: Int64Array = found.reshape(-1)
        return flat[slice(*np.searchsorted(flat, (0, count)))]

    def counts(self, slots: int) -> tuple[int, ...]:
        """As `Pattern`."""
        rounds, rest = divmod(slots, self.size)
        return tuple(
            rounds * weight + int(np.searchsorted(own, rest))
            for weight, own in zip(self.weights, self._slots_of, strict=True)
        )

    def slots_until(self, source: int, rows: int) -> int | None:
        """As `Pattern`."""
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


class TreePattern:
    """A pattern that is computed, for weights of any sum.

    The sources are the leaves of Huffman's tree of their weights (1952). Each of its nodes divides
    its slots in two by rounding: of its first i slots, the rarer half has ``i * share``, rounded.
    So a source of weight w is off by at most ``1/2 + sum(w / (2 * weight of ancestor))`` rows, over
    its ancestors below the root. These weigh at least w, 2w, 3w, 5w and so on, as Fibonacci's
    numbers, so this is less than 1.7 rows. Of two sources, each is off by at most half a row.

    Shares are exact if the whole weights have a sum of at most 2**31, else to one part in 10**9.
    """

    num_bytes = 0

    def __init__(self, weights: tuple[int, ...]) -> None:
        number = len(weights)  # tells equal weights apart
        heap: list[tuple[int, int, _Split | int]] = [
            (weight, source, source) for source, weight in enumerate(weights) if weight
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            rare, _, one = heapq.heappop(heap)
            often, _, other = heapq.heappop(heap)
            split = _Split(*_share(rare, rare + often), one, other)
            heapq.heappush(heap, (rare + often, number, split))
            number += 1
        self._root = heap[0][2]
        self._paths: dict[int, tuple[tuple[_Split, bool], ...]] = {}
        self._num_sources = len(weights)
        left: list[tuple[_Split | int, tuple[tuple[_Split, bool], ...]]] = [(self._root, ())]
        while left:
            node, path = left.pop()
            if isinstance(node, _Split):
                left.append((node.rare, (*path, (node, True))))
                left.append((node.other, (*path, (node, False))))
            else:
                self._paths[node] = path

    def locate(self, slots: Int64Array) -> tuple[IntArray, Int64Array]:
        """As `Pattern`."""
        sources, rows = np.empty(len(slots), np.int16), np.empty(len(slots), np.int64)
        left: list[tuple[_Split | int, Int64Array, Int64Array]] = [
            (self._root, np.arange(len(slots)), slots)
        ]
        while left:
            node, places, at = left.pop()
            if isinstance(node, _Split):
                before, is_rare = node.rare_before(at), node.is_rare(at)
                left.append((node.rare, places[is_rare], before[is_rare]))
                left.append((node.other, places[~is_rare], (at - before)[~is_rare]))
            else:
                sources[places], rows[places] = node, at
        return sources, rows

    def slots_of(self, source: int, first: int, count: int) -> Int64Array:
        """As `Pattern`."""
        if source not in self._paths:
            return np.empty(0, np.int64)
        begin, end = self._count(source, first), self._count(source, first + count)
        return self._slot(source, np.arange(begin, end, dtype=np.int64)) - first

    def counts(self, slots: int) -> tuple[int, ...]:
        """As `Pattern`."""
        return tuple(self._count(source, slots) for source in range(self._num_sources))

    def slots_until(self, source: int, rows: int) -> int | None:
        """As `Pattern`."""
        return self._slot(source, rows - 1) + 1 if source in self._paths else None

    def _count(self, source: int, slots: int) -> int:
        if source not in self._paths:
            return 0
        for split, in_rare in self._paths[source]:
            before = split.rare_before(slots)
            slots = before if in_rare else slots - before
        return slots

    def _slot(self, source: int, rows: _Number) -> _Number:
        """The slot of a source that so many slots of it precede."""
        for split, in_rare in reversed(self._paths[source]):
            rows = split.slot_of_rare(rows) if in_rare else split.slot_of_other(rows)
        return rows


@dataclass(frozen=True)
class _Split:
    """Slots divided in two: of the first i, the rarer half has ``i * part / size``, rounded.

    Products stay below 2**63, because ``part * size`` does, and whole rounds are counted apart.
    """

    part: int
    size: int
    rare: _Split | int
    other: _Split | int

    def rare_before(self, slots: _Number) -> _Number:
        """How many of the first slots are of the rarer half."""
        rounds = slots // self.size
        rest = (slots - rounds * self.size) * self.part + self.size // 2
        return rounds * self.part + rest // self.size

    def is_rare(self, slots: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether slots are of the rarer half."""
        rest = (slots % self.size) * self.part + self.size // 2
        found: npt.NDArray[np.bool_] = rest % self.size >= self.size - self.part
        return found

    def slot_of_rare(self, before: _Number) -> _Number:
        """The slot of the rarer half that so many of it precede."""
        rounds = before // self.part
        due = (before - rounds * self.part + 1) * self.size - self.size // 2
        return rounds * self.size - -due // self.part - 1

    def slot_of_other(self, before: _Number) -> _Number:
        """The slot of the other half that so many of it precede."""
        others = self.size - self.part
        rounds = before // others
        rest = (before - rounds * others) * self.part + self.size // 2
        return before + rounds * self.part + rest // others


def _share(part: int, size: int) -> tuple[int, int]:
    """A share of at most a half as two numbers whose product 64 bits hold."""
    share = Fraction(part, size)
    if share.numerator * share.denominator > _MAX_PRODUCT:
        share = share.limit_denominator(math.isqrt(_MAX_PRODUCT * size // part))
    return share.numerator, share.denominator
