"""How far a load is: for a person who watches it, a log, or the status of a TrainJob.

Both sides say it: a node that loads what its environment asks for, and a client that waits for a
load. Knows nothing of how the numbers arrive.
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
        shards_total: 0 while a query runs whose result is not cut yet.
        num_bytes: of the shards that are sealed, decoded, of one replica.
        percent: 100 only when every shard is sealed; None where nothing tells how much there is.
        remaining_s: at the rate since the first reading; None before there is one.
        waits: why a part of it cannot go on yet; empty where it can.
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
    """Turns the progress of one load into reports. One thread at a time.

    Args:
        dataset: its name.
        clock: monotonic seconds.
    """

    def __init__(self, dataset: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._dataset = dataset
        self._clock = clock
        self._first: tuple[float, float] | None = None  # time and share done

    def read(self, progress: pb.LoadProgress) -> LoadReport:
        """The report for what the coordinator says now."""
        share = _share(progress)
        now = self._clock()
        if share is not None and self._first is None:
            self._first = now, share
        remaining_s = None
        if share is not None and self._first is not None:
            since, before = self._first
            if share >= 1.0:
                remaining_s = 0.0
            elif share > before:
                remaining_s = (1.0 - share) * (now - since) / (share - before)
        return LoadReport(
            self._dataset,
            progress.rows_done,
            progress.shards_done,
            progress.shards_total,
            progress.bytes_done,
            None if share is None else int(100 * share),
            remaining_s,
            progress.waits,
        )


class EachSecond:
    """Passes on one report a second, and the one that says that every shard is done.

    Args:
        say: is given the reports that are passed on.
        interval_s: between two of them, at least.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        say: Callable[[LoadReport], None],
        interval_s: float = _LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._interval_s = interval_s
        self._clock = clock
        self._due = clock()
        self._finished = False

    def __call__(self, report: LoadReport) -> None:
        """Takes in a report."""
        now = self._clock()
        finished = report.percent == 100
        if now < self._due and not (finished and not self._finished):
            return
        self._finished = finished
        self._due += self._interval_s  # so that lines which come a little late do not add up
        if self._due <= now:
            self._due = now + self._interval_s
        self._say(report)


def _share(progress: pb.LoadProgress) -> float | None:
    """How much is done, from 0 to 1, and 1 only when every shard is sealed.

    By rows while shards are being read. A filter keeps fewer rows than are estimated, so the
    shards tell more then: the larger of both never says too much.
    """
    if progress.shards_total and progress.shards_done >= progress.shards_total:
        return 1.0
    shares = []
    if progress.shards_total:
        shares.append(progress.shards_done / progress.shards_total)
    if progress.estimated_rows:
        shares.append(progress.rows_done / progress.estimated_rows)
    return min(0.99, max(shares)) if shares else None
