"""The state and the progress of a load, for both ends and for people.

Used by a node that loads a dataset from its environment, and by a client that waits for a load.
Does not know how the numbers arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential

from cache_protocol.v1 import cache_pb2 as pb

_LINE_INTERVAL_S = 1.0
_PAUSE = wait_exponential(multiplier=0.25, max=2.0)  # not random: scripts may seed `random`
_MIN_PAUSE_S = 0.05  # before a deadline

STATE_NAMES: dict[int, str] = {
    pb.DATASET_STATE_LOADING: "loading",
    pb.DATASET_STATE_READY: "ready",
    pb.DATASET_STATE_FAILED: "failed",
    pb.DATASET_STATE_UNAVAILABLE: "unavailable",
    pb.DATASET_STATE_EVICTED: "evicted",
}


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


def wait_for_load(
    watch: Callable[[pb.DatasetInfo], Iterable[pb.DatasetInfo]],
    info: pb.DatasetInfo,
    on_progress: Callable[[LoadReport], None],
    deadline: float | None = None,
) -> pb.DatasetInfo:
    """Waits until the dataset is ready or failed, and returns it.

    If very many callers watch, the coordinator ends some watches early. Those are repeated after a
    pause.

    Args:
        watch: starts one watch, given the last known state; yields the dataset at every change.
            Must raise after the deadline; this function does not.
        info: the last known state of the dataset.
        on_progress: called in this thread at every change.
        deadline: by `time.monotonic`; the last pause ends before it, for one more watch.
    """
    meter = LoadMeter(info.spec.name)

    def watch_once() -> pb.DatasetInfo:
        nonlocal info
        for latest in watch(info):
            info = latest
            on_progress(meter.read(info.progress))
        return info

    def pause_s(state: RetryCallState) -> float:
        if deadline is None:
            return _PAUSE(state)
        return min(_PAUSE(state), max((deadline - time.monotonic()) / 2, _MIN_PAUSE_S))

    return Retrying(
        retry=retry_if_result(lambda known: known.state == pb.DATASET_STATE_LOADING), wait=pause_s
    )(watch_once)


def state_name(state: int) -> str:
    """The name of a state; also for states of later releases."""
    return STATE_NAMES.get(state, f"state {state}")


def shorten_shards(info: pb.DatasetInfo) -> None:
    """Replaces the checksums and the node ids of all shards by their short forms.

    A shard map names the same few nodes again and again, and a checksum in hexadecimal takes twice
    its bytes. 100,000 shards on 1,000 nodes take 8.9 MB, and 4.5 MB in the short form.

    A checksum that is not one of hexadecimal digits in small letters stays as it is.
    """
    place = {node.id: number for number, node in enumerate(info.nodes)}
    for shard in info.shards:
        shard.short_nodes.extend([place[node_id] for node_id in shard.node_ids])
        shard.ClearField("node_ids")
        try:
            short = bytes.fromhex(shard.checksum)
        except ValueError:
            continue
        if short.hex() == shard.checksum:
            shard.short_checksum = short
            shard.ClearField("checksum")


def lengthen_shards(info: pb.DatasetInfo) -> None:
    """Undoes `shorten_shards`; other shards stay as they are.

    Raises:
        IndexError: a shard names a node that is not there.
    """
    names = [node.id for node in info.nodes]
    for shard in info.shards:
        if shard.short_nodes:
            shard.node_ids.extend([names[number] for number in shard.short_nodes])
            shard.ClearField("short_nodes")
        if shard.short_checksum:
            shard.checksum = shard.short_checksum.hex()
            shard.ClearField("short_checksum")
