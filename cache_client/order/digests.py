"""Digests of the rows of steps, and their sums over a pass. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_client.order.permutation import Int64Array, splitmix64

Words = NDArray[np.uint64]
_MAX_CHECKPOINTS: Final = 16
_CHUNK_ROWS: Final = 32_768  # two scratch arrays of 256 KiB fit the processor's cache
WORD_MASK: Final = 2**64 - 1
_ODD: Final = np.array(0x9E3779B97F4A7C15, np.uint64)
_HALF: Final = np.array(32, np.uint64)
_place_weights: dict[int, Words] = {}  # by the number of rows; of the last few sizes


def row_words(row_ids: Int64Array, out: Words, scratch: Words) -> None:
    """Writes a word for each row id to ``out``, such that sums of words tell sets of rows apart."""
    np.multiply(row_ids.view(np.uint64), _ODD, out=out)
    np.right_shift(out, _HALF, out=scratch)
    np.bitwise_xor(out, scratch, out=out)


def weights(numbers: Int64Array) -> Words:
    """An odd random word for each number, the same everywhere."""
    return splitmix64(numbers.astype(np.uint64) + np.uint64(1)) | np.uint64(1)


def _weights_of_places(num_rows: int) -> Words:
    found = _place_weights.get(num_rows)
    if found is None:
        if len(_place_weights) >= 8:
            _place_weights.clear()
        found = _place_weights[num_rows] = weights(np.arange(num_rows, dtype=np.int64))
    return found


def step_digests(row_ids: Int64Array, sizes: Sequence[int]) -> tuple[Words, Words]:
    """The digests of consecutive steps.

    Args:
        row_ids: of all steps, joined; int64.
        sizes: rows of each step; equal, but the last may be smaller.

    Returns:
        For each step the digest of its set of rows, and of its rows in order; uint64.
    """
    sets, orders = np.empty(len(sizes), np.uint64), np.empty(len(sizes), np.uint64)
    full = len(sizes) if not sizes or sizes[-1] == sizes[0] else len(sizes) - 1
    size = max(1, sizes[0]) if sizes else 1
    at_once = max(1, min(full, _CHUNK_ROWS // size))
    words, scratch = np.empty((2, at_once * size), np.uint64)

    def digest(steps: slice, rows: slice, size: int) -> None:
        chunk = row_ids[rows]
        found, spare = words[: len(chunk)], scratch[: len(chunk)]
        row_words(chunk, found, spare)
        by_step = found.reshape(-1, size)
        by_step.sum(1, out=sets[steps])
        np.multiply(by_step, _weights_of_places(size), out=spare.reshape(-1, size))
        spare.reshape(-1, size).sum(1, out=orders[steps])

    for first in range(0, full, at_once):
        last = min(first + at_once, full)
        digest(slice(first, last), slice(first * size, last * size), size)
    if full < len(sizes):
        digest(slice(full, None), slice(full * size, None), sizes[-1])
    return sets, orders


def set_digest(row_ids: Int64Array) -> int:
    """The digest of a set of rows."""
    return total_of(step_digests(row_ids, [1] * len(row_ids))[0]) if len(row_ids) else 0


def set_digest_of_all(num_rows: int) -> int:
    """The digest of the set of all rows ``[0, num_rows)``; about a second for 10**9 rows."""
    total = 0
    for start in range(0, num_rows, _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, num_rows), dtype=np.int64)
        total += total_of(step_digests(rows, [len(rows)])[0])
    return total & WORD_MASK


def total_of(words: Words) -> int:
    """The sum of words, modulo 2**64."""
    return int(words.sum(dtype=np.uint64)) if len(words) else 0


@dataclass
class Trail:
    """The digests of one pass, added up. Not thread-safe.

    Args:
        steps: number of steps added; further steps follow in order.
    """

    steps: int = 0
    rows: int = 0
    set_digest: int = 0
    order_digest: int = 0
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    _stride: int = 1

    def add(self, sets: Words, orders: Words, rows: int) -> None:
        """Adds the digests of the next steps, which have so many rows."""
        if not len(sets):
            return
        numbers = np.arange(self.steps, self.steps + len(sets), dtype=np.int64)
        sums = np.cumsum(orders * weights(numbers), dtype=np.uint64)
        first = -(-(self.steps + 1) // self._stride) * self._stride
        for after in range(first, self.steps + len(sets) + 1, self._stride):
            digest = (self.order_digest + int(sums[after - self.steps - 1])) & WORD_MASK
            if after % self._stride == 0:
                self.checkpoints.append((after, digest))
            if len(self.checkpoints) > _MAX_CHECKPOINTS:
                self._stride *= 2
                self.checkpoints = self.checkpoints[1::2]
        self.order_digest = (self.order_digest + int(sums[-1])) & WORD_MASK
        self.set_digest = (self.set_digest + total_of(sets)) & WORD_MASK
        self.steps += len(sets)
        self.rows += rows


class StepDigests:
    """The digests of the steps of a pass that were made and not yet added up. Thread-safe."""

    def __init__(self) -> None:
        self._made: deque[tuple[Words, Words]] = deque()
        self._first = 0

    def put(self, sets: Words, orders: Words) -> None:
        """Adds those of the next steps."""
        self._made.append((sets, orders))

    def take(self, steps: range) -> Words | None:
        """Removes as many; ``[steps, 2]``, or None if some are not there."""
        found: list[Words] = []
        missing = len(steps)
        while missing and self._made:
            sets, orders = self._made.popleft()
            if len(sets) > missing:
                self._made.appendleft((sets[missing:], orders[missing:]))
                sets, orders = sets[:missing], orders[:missing]
            found.append(np.stack([sets, orders], 1))
            missing -= len(sets)
        return np.concatenate(found) if found and not missing else None
