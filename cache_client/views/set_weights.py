"""Weights that training sets: what the ranks of a job report -> the weights of rows. Pure.

Reports lie in a log, in the order in which the cache took them. The first reports of all ranks seal
the weights of an epoch; what comes later changes nothing. So all who read the log from its begin
find the same weights, and a digest of all that were set until then names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array
from cache_protocol.errors import some_of

Doubles = npt.NDArray[np.float64]

MOST_WEIGHT: Final = 1e200  # so that sums of reports stay finite


@dataclass(frozen=True, eq=False)
class Report:
    """What one rank says of the weights of an epoch.

    Args:
        epoch: from which on they hold.
        start: of the job, as its launcher tells starts apart; empty: unknown.
        rank, world_size: of the job.
        row_ids: of the version, in any order; a row may come several times; shape ``(k,)``.
        weights: of these rows; shape ``(k,)``.
    """

    epoch: int
    start: str
    rank: int
    world_size: int
    row_ids: Int64Array
    weights: Doubles

    @property
    def set_key(self) -> tuple[int, str, int]:
        """What the reports of one set have in common."""
        return self.epoch, self.start, self.world_size

    def says_as(self, other: Report | None) -> bool:
        """Whether both say the same, of one rank."""
        return (
            other is not None
            and (self.epoch, self.rank, self.world_size)
            == (other.epoch, other.rank, other.world_size)
            and np.array_equal(self.row_ids, other.row_ids)
            and np.array_equal(self.weights, other.weights)
        )


class Sealed(NamedTuple):
    """The weights of an epoch, which nothing changes any more.

    Attributes:
        digest: of them, and of all that were sealed before.
    """

    epoch: int
    digest: str


class SetWeights:
    """The weights of the rows of a version, as complete sets of reports change them.

    A set is complete when each rank of one start has reported; of a rank that reported again, the
    last report counts. A row has the mean of what was reported of it; other rows keep their weight.
    A set that leaves no weight above 0 does not count.

    Args:
        weights: of each row at first; changed in place.
        rows: of each slot of the job, as row ids.
        epochs: that are asked for: ``[start, stop)``.

    Attributes:
        kept: the weights of the slots as they were sealed, ascending by epoch: those that count in
            the first of the epochs, and in later ones.
        last: the last epoch that was sealed.
        reports: by rank, those that sealed it.
        refused: sets so far that did not count.

    Thread-safety: none.
    """

    def __init__(self, weights: Doubles, rows: Int64Array, epochs: range) -> None:
        self._weights, self._rows, self._epochs = weights, rows, epochs
        self.kept: list[tuple[Sealed, Doubles]] = []
        self._open: dict[tuple[int, str, int], dict[int, Report]] = {}
        self.last: Sealed | None = None
        self.reports: Mapping[int, Report] = {}
        self.refused = 0

    def take(self, report: Report) -> Sealed | None:
        """Takes the next report of the log; returns what it seals."""
        if self.last is not None and report.epoch <= self.last.epoch:
            return None
        found = self._open.setdefault(report.set_key, {})
        found[report.rank] = report
        if len(found) < report.world_size:
            return None
        del self._open[report.set_key]
        rows, weights = reduced(found.values())
        before = self._weights[rows]
        self._weights[rows] = weights
        of_slots = self._weights[self._rows]
        if not of_slots.any():
            self._weights[rows] = before
            self.refused += 1
            return None
        self._open = {key: each for key, each in self._open.items() if key[0] > report.epoch}
        self.reports = found
        self.last = Sealed(report.epoch, self._digest(report.epoch, rows, weights))
        if report.epoch <= self._epochs.start:
            self.kept = []
        if report.epoch < self._epochs.stop:
            self.kept.append((self.last, of_slots))
        return self.last

    def pending(self, report: Report) -> Mapping[int, Report]:
        """By rank, the reports of the set that a report is of, while it is not complete."""
        return self._open.get(report.set_key, {})

    def missing(self, report: Report) -> str:
        """The ranks whose reports a set lacks, for people."""
        there = self.pending(report)
        return some_of(rank for rank in range(report.world_size) if rank not in there)

    def _digest(self, epoch: int, rows: Int64Array, weights: Doubles) -> str:
        before = "" if self.last is None else self.last.digest
        digest = hashlib.sha256(f"{before} {epoch} ".encode())
        digest.update(rows.astype("<i8").tobytes())
        digest.update(weights.astype("<f8").tobytes())
        return digest.hexdigest()[:32]


def reduced(reports: Iterable[Report]) -> tuple[Int64Array, Doubles]:
    """The rows that reports name, ascending, and the mean of what they say of each.

    It depends only on the pairs of row and weight, not on their order or on who reported them, so
    it is the same for any number of ranks. `numpy.bincount` adds one number after the other.
    """
    every = list(reports)
    rows = np.concatenate([each.row_ids for each in every])
    weights = np.concatenate([each.weights for each in every])
    order = np.lexsort((weights, rows))
    rows, weights = rows[order], weights[order]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    firsts = np.flatnonzero(is_first)
    if len(firsts) == len(rows):
        return rows, weights
    lasts = np.append(firsts[1:], len(rows)) - 1
    sums = np.bincount(is_first.cumsum() - 1, weights)
    # The sum of equal numbers by their count may be another number.
    is_one = weights[firsts] == weights[lasts]
    means = np.where(is_one, weights[firsts], sums / (lasts - firsts + 1))
    return rows[firsts], means
