"""The progress of a load, for people, logs and the status of a TrainJob.

Used by a node that loads a dataset from its environment, and by a client that waits for a load.
Does not know how the numbers arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_protocol.v1 import cache_pb2 as pb

_LINE_INTERVAL_S = 1.0


@dataclass(frozen=True)
class LoadReport:
    """One reading of a load.

    Attributes:
        shards_total: 0 while a whole query runs, because its result is not cut yet.
        num_bytes: of the sealed shards, decoded, of one replica.
        percent: 100 only if every shard is sealed; None if the total is unknown.
        remaining_s: at the rate since the first reading; None if unknown.
        waits: why a part of the load has to wait; empty if none has to.
    """

    dataset: str
    num_rows: int
    shards_done: int
    shards_total: int
    num_bytes: int
    percent: int | None
    remaining_s: float | None
    waits: str = ""

    def __str__(self) -> str:
        parts = [
            f"loading dataset={self.dataset}",
            f"rows={self.num_rows}",
            f"shards={self.shards_done}/{self.shards_total or '?'}",
            f"bytes={self.num_bytes}",
            f"percent={'?' if self.percent is None else self.percent}",
            f"remaining_s={'?' if self.remaining_s is None else round(self.remaining_s)}",
        ]
        if self.waits:
            parts.append(f"waits={self.waits!r}")
        return " ".join(parts)


class LoadMeter:
    """Turns the progress of one load into reports. Not thread-safe.

    Args:
        dataset: its name.
        clock: monotonic seconds.
    """

    def __init__(self, dataset: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._dataset = dataset
        self._clock = clock
        self._first: tuple[float, float] | None = None  # time and fraction done

    def read(self, progress: pb.LoadProgress) -> LoadReport:
        """The report for the current progress."""
        fraction = _fraction_done(progress)
        now = self._clock()
        if fraction is not None and self._first is None:
            self._first = now, fraction
        remaining_s = None
        if fraction is not None and self._first is not None:
            since, before = self._first
            if fraction >= 1.0:
                remaining_s = 0.0
            elif fraction > before:
                remaining_s = (1.0 - fraction) * (now - since) / (fraction - before)
        return LoadReport(
            self._dataset,
            progress.rows_done,
            progress.shards_done,
            progress.shards_total,
            progress.bytes_done,
            None if fraction is None else int(100 * fraction),
            remaining_s,
            progress.waits,
        )


class OncePerSecond:
    """Forwards one report a second, and always the first one with 100 percent.

    Args:
        forward: called with each forwarded report.
        interval_s: the shortest time between two reports.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        forward: Callable[[LoadReport], None],
        interval_s: float = _LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forward = forward
        self._interval_s = interval_s
        self._clock = clock
        self._due = clock()
        self._finished = False

    def __call__(self, report: LoadReport) -> None:
        """Forwards a report if it is time."""
        now = self._clock()
        finished = report.percent == 100
        if now < self._due and not (finished and not self._finished):
            return
        self._finished = finished
        self._due += self._interval_s  # not from now, so that delays do not add up
        if self._due <= now:
            self._due = now + self._interval_s
        self._forward(report)


def _fraction_done(progress: pb.LoadProgress) -> float | None:
    """The fraction done, from 0 to 1; 1 only if every shard is sealed.

    By rows while shards are read. A filter keeps fewer rows than estimated, so shards may tell
    more: neither overestimates, so the larger one counts.
    """
    if progress.shards_total and progress.shards_done >= progress.shards_total:
        return 1.0
    fractions = []
    if progress.shards_total:
        fractions.append(progress.shards_done / progress.shards_total)
    if progress.estimated_rows:
        fractions.append(progress.rows_done / progress.estimated_rows)
    return min(0.99, max(fractions)) if fractions else None
