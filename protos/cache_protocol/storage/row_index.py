"""Row id -> shard, and the rows of a request by shard or node. Pure.

A node and a client on the same machine gather from files in the same way: they find the shard of
each row, group the rows by shard, and restore the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

ROWS_OF_A_SHARD = 2**40
"""Where rows are numbered by shard: row k of shard i has the number ``i * ROWS_OF_A_SHARD + k``."""

_MAX_BUCKETS_PER_SHARD = 64
_RADIX_BITS = 16  # numpy sorts keys of up to so many bits by radix, ten times as fast


class RowIndex:
    """Finds the run of each row id among ascending runs. Immutable, any thread.

    A table lookup, several times as fast as a binary search. Rows are cut into buckets of a power
    of two, so small that no bucket has the first rows of two runs. So a row is in the run of its
    bucket's first row, or in the next run. If the lengths of runs differ so much that the table
    would be large, it is a binary search.

    Args:
        starts: first row of each run, ascending.
        stop: end of the last run.
    """

    def __init__(self, starts: Ids, stop: int) -> None:
        self._starts = starts
        # The last element is for run -1, before the first run.
        self._next_start = np.concatenate([starts[1:], [stop], starts[:1]])
        self._shift = _shift(starts, stop)
        if self._shift is not None:
            first_rows = np.arange(((stop - 1) >> self._shift) + 1, dtype=np.int64) << self._shift
            found = np.searchsorted(starts, first_rows, side="right") - 1
            self._run_of_bucket = found.astype(np.min_scalar_type(-max(1, len(starts))))

    def find(self, rows: Ids) -> Indices:
        """The index of the last run that starts at or before each row; -1 if there is none.

        Args:
            rows: in ``[0, stop)``.
        """
        if self._shift is None:
            return np.searchsorted(self._starts, rows, side="right") - 1
        # The table has short integers. As indices, numpy is several times as fast with intp.
        run_of = np.take(self._run_of_bucket, rows >> self._shift).astype(np.intp)
        run_of += rows >= np.take(self._next_start, run_of, mode="wrap")
        return run_of


def _shift(starts: Ids, stop: int) -> int | None:
    """Bits of a bucket; None if there would be too many buckets."""
    if not len(starts) or stop <= 0:
        return None
    for shift in range((stop // len(starts)).bit_length(), -1, -1):
        if stop >> shift > _MAX_BUCKETS_PER_SHARD * len(starts):
            return None
        if (np.diff(starts >> shift) > 0).all():
            return shift
    return None


@dataclass(frozen=True)
class Grouped:
    """Rows of a request by group; nearly so if there are very many groups.

    Attributes:
        rows: row ids.
        group_of: group of each row.
        order: position of each row in the request; None if in the order of the request.
    """

    rows: Ids
    group_of: Indices
    order: npt.NDArray[np.intp] | None

    @property
    def inverse(self) -> npt.NDArray[np.intp] | None:
        """Position in ``rows`` of each row of the request; None if in the order of the request."""
        if self.order is None:
            return None
        inverse = np.empty(len(self.order), np.intp)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Each run of rows of one group: group, start, stop."""
        breaks = np.flatnonzero(self.group_of[1:] != self.group_of[:-1]) + 1
        bounds = [0, *breaks.tolist(), len(self.rows)]
        groups = self.group_of[bounds[:-1]].tolist()
        for group, (start, stop) in zip(groups, itertools.pairwise(bounds), strict=True):
            yield group, start, stop


def group_rows(rows: Ids, group_of: Indices) -> Grouped:
    """Groups one or more rows; keeps their order inside each group.

    Args:
        group_of: shard or node of each row.
    """
    if bool((group_of[1:] >= group_of[:-1]).all()):
        return Grouped(rows, group_of, None)
    order = np.argsort(_short(group_of), kind="stable")
    return Grouped(np.take(rows, order), np.take(group_of, order), order)


def _short(group_of: Indices) -> npt.NDArray[np.int16]:
    """16-bit numbers in nearly the same order, for a radix sort."""
    excess = max(0, int(group_of.max()).bit_length() - (_RADIX_BITS - 1))
    return (group_of >> excess).astype(np.int16)


@dataclass(frozen=True)
class RowRuns:
    """Runs of consecutive rows at equal distances, as one of several ranks reads them.

    Attributes:
        start: the first row.
        length: rows of a run; 0: one run without an end.
        stride: from the first row of a run to that of the next one; 0 for one run.
    """

    start: int
    length: int = 0
    stride: int = 0

    @classmethod
    def of(cls, rows: Ids) -> RowRuns | None:
        """The runs that begin with these rows; None if these are no such runs.

        Args:
            rows: one or more; only their last run may be shorter than the others.
        """
        start = int(rows[0])
        if rows[-1] - start < len(rows) - 1:
            return None
        breaks = np.flatnonzero(np.diff(rows) != 1)
        if not len(breaks):
            return cls(start)
        length = int(breaks[0]) + 1
        stride = int(rows[length]) - start
        firsts = rows[::length]
        equal = len(breaks) == len(firsts) - 1 and (np.diff(firsts) == stride).all()
        # As many breaks as runs have ends, each at the end of a run.
        regular = equal and stride > length and not ((breaks + 1) % length).any()
        return cls(start, length, stride) if regular else None

    def after(self, num_rows: int) -> RowRuns | None:
        """The same runs without their first rows; None if they would begin inside a run."""
        if not self.length:
            return RowRuns(self.start + num_rows)
        whole, rest = divmod(num_rows, self.length)
        return None if rest else replace(self, start=self.start + whole * self.stride)

    def within(self, stop: int) -> Iterator[tuple[int, int]]:
        """Each run before row ``stop``: start, stop."""
        length, stride = self.length or stop, self.stride or stop
        for first in range(self.start, stop, max(1, stride)):
            yield first, min(first + length, stop)


def row_starts(row_counts: Sequence[int]) -> tuple[int, ...]:
    """First row id of each shard, and the total at the end: ``len(row_counts) + 1`` numbers."""
    starts = [0]
    for count in row_counts:
        starts.append(starts[-1] + count)
    return tuple(starts)
