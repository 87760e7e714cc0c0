"""Row id -> shard, and the rows of a request by shard or node. Pure.

A node and a client on the same machine gather from the same files in the same way: they find the
shard of each row, group the rows by shard, and know how to bring them back into order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

_MOST_BUCKETS_PER_SHARD = 64
_RADIX_BITS = 16  # numpy sorts keys of so many bits by radix, ten times as fast as longer ones


class RowIndex:
    """Which of some ascending runs of rows each row id falls into. Immutable, any thread.

    Found by a table lookup, several times as fast as a binary search: rows are cut into buckets of
    a power of two, so small that no bucket holds the first rows of two runs. The run of a row is
    then that of its bucket's first row, or the next one. Where runs differ so much in length that
    the table would be large, it is a binary search.

    Args:
        starts: first row of each run, ascending.
        stop: after the last row that will be asked for.
    """

    def __init__(self, starts: Ids, stop: int) -> None:
        self._starts = starts
        # Of run -1, which is before the first, it stands at the end.
        self._next_start = np.concatenate([starts[1:], [stop], starts[:1]])
        self._shift = _shift(starts, stop)
        if self._shift is not None:
            first_rows = np.arange(((stop - 1) >> self._shift) + 1, dtype=np.int64) << self._shift
            found = np.searchsorted(starts, first_rows, side="right") - 1
            self._run_of_bucket = found.astype(np.min_scalar_type(-max(1, len(starts))))

    def find(self, rows: Ids) -> Indices:
        """The index of the last run that starts at each row or before; -1 where none does.

        Args:
            rows: in ``[0, stop)``.
        """
        if self._shift is None:
            return np.searchsorted(self._starts, rows, side="right") - 1
        # Short numbers in the table; of the size of a pointer where numpy takes by them, which is
        # several times as fast.
        run_of = np.take(self._run_of_bucket, rows >> self._shift).astype(np.intp)
        run_of += rows >= np.take(self._next_start, run_of, mode="wrap")
        return run_of


def _shift(starts: Ids, stop: int) -> int | None:
    """Bits of a bucket; None where too many of them would be needed."""
    if not len(starts) or stop <= 0:
        return None
    for shift in range((stop // len(starts)).bit_length(), -1, -1):
        if stop >> shift > _MOST_BUCKETS_PER_SHARD * len(starts):
            return None
        if (np.diff(starts >> shift) > 0).all():
            return shift
    return None


@dataclass(frozen=True)
class Grouped:
    """Rows of a request, those of one group together, or nearly so where groups are very many.

    Attributes:
        rows, group_of: together.
        order: where in the request each of them stands; None where they are in its order.
    """

    rows: Ids
    group_of: Indices
    order: npt.NDArray[np.intp] | None

    @property
    def inverse(self) -> npt.NDArray[np.intp] | None:
        """Where in ``rows`` each row of the request stands; None where they are in its order."""
        if self.order is None:
            return None
        inverse = np.empty(len(self.order), np.intp)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Each stretch of rows of one group: group, start, stop."""
        breaks = np.flatnonzero(self.group_of[1:] != self.group_of[:-1]) + 1
        bounds = [0, *breaks.tolist(), len(self.rows)]
        groups = self.group_of[bounds[:-1]].tolist()
        for group, (start, stop) in zip(groups, itertools.pairwise(bounds), strict=True):
            yield group, start, stop


def group_rows(rows: Ids, group_of: Indices) -> Grouped:
    """The rows, of which there is at least one, by group; as they come inside each.

    Args:
        group_of: of each row: its shard, or its node.
    """
    if bool((group_of[1:] >= group_of[:-1]).all()):
        return Grouped(rows, group_of, None)
    order = np.argsort(_short(group_of), kind="stable")
    return Grouped(np.take(rows, order), np.take(group_of, order), order)


def _short(group_of: Indices) -> npt.NDArray[np.int16]:
    """Numbers in nearly the same order that are short enough to be sorted by radix."""
    excess = max(0, int(group_of.max()).bit_length() - (_RADIX_BITS - 1))
    return (group_of >> excess).astype(np.int16)


def row_starts(row_counts: Sequence[int]) -> tuple[int, ...]:
    """First row id of each shard, and the total at the end: ``len(row_counts) + 1`` numbers."""
    starts = [0]
    for count in row_counts:
        starts.append(starts[-1] + count)
    return tuple(starts)
