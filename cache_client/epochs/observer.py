"""Watches the passes of one dataset object in one process: waits, counts and digests.

It sends reports to the cache, and makes the audit records of states. It changes no batch. The loop
over batches costs two readings of a clock and a few additions a batch; the rest happens once a
window, or every half second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from cache_client.epochs.passes import Pass
from cache_client.epochs.reports import ReaderIdentity, Reporter
from cache_client.epochs.stats import NodeStats, ReadStats
from cache_client.epochs.training_run import TrainingRun
from cache_client.flight.routing import ShardMap
from cache_client.order.audit_record import AuditRecord
from cache_client.order.digests import Trail, Words
from cache_client.reading.counts import (
    DEPTHS,
    FAILOVERS,
    FETCH_NS,
    LOCAL_BYTES,
    LOCAL_ROWS,
    NODE_BYTES,
    NODE_FAILURES,
    NODE_ROWS,
    NODE_WAIT_NS,
    REFETCHES,
    TRANSFORM_NS,
    WINDOWS,
    ReadCounts,
    SharedCounts,
    node_cells,
)
from cache_protocol.v1 import cache_pb2 as pb

_FIRST_TICK_NS: Final = 100_000_000
_TICK_NS: Final = 500_000_000
_MAX_DEPTHS: Final = 120
_T = TypeVar("_T")


@dataclass(eq=False)
class Watched:
    """A pass that is watched.

    Attributes:
        digests: gives those of a range of steps, once.
        trail: those of the steps handed out, as far as they were added up; None if some were lost.
        begun_ns: when the first batch was asked for.
        seen_ns: until when ``computed_ns`` is known: the last batch was handed out, or asked for.
        computed_ns: the loop worked between batches.
        due_ns: when to report, or to look for an answer.
    """

    pass_: Pass
    number: int
    digests: Callable[[range], Words | None]
    trail: Trail | None
    begun_ns: int = 0
    seen_ns: int = 0
    computed_ns: int = 0
    due_ns: int = 0

    @property
    def waited_ns(self) -> int:
        """The loop waited for the batches handed out."""
        return self.seen_ns - self.begun_ns - self.computed_ns


class SharedDigests:
    """Hands the digests of a worker's steps to the training process, step by step."""

    def __init__(self, shared: SharedCounts, pass_: Pass) -> None:
        self._shared = shared
        self._tag = ring_tag(pass_)
        self._steps = iter(pass_.steps)
        self._made: Iterator[list[int]] = iter(())

    def begin(self, sets: Words, orders: Words) -> None:
        """Takes the digests of the next steps."""
        self._made = iter(np.stack([sets, orders], 1).view(np.int64).tolist())

    def put_next(self) -> None:
        """Shows those of the next step; call it before its batch is handed out."""
        self._shared.put_digest(self._tag, next(self._steps), *next(self._made))


class Observer:
    """Watches the passes of one dataset object in one process.

    Args:
        reader: who reads what, for reports and records.
        node_ids: of the version.
        shared: with DataLoader workers.
        reporter: sends reports; None: no report is sent.
        run: tells lineage of the versions, which follow; None: it does not.

    Attributes:
        counts: of this process, for its readers.
    """

    def __init__(
        self,
        reader: ReaderIdentity,
        node_ids: tuple[str, ...],
        shared: SharedCounts,
        reporter: Reporter | None,
        run: tuple[TrainingRun, Sequence[ShardMap]] | None = None,
    ) -> None:
        self._run = run
        self.counts = ReadCounts(node_ids)
        self._reader = reader
        self._node_ids = (*node_ids, "")
        self._shared = shared
        self._reporter = reporter
        self._process = os.getpid()
        self._lock = threading.Lock()  # of trails
        self._watched: list[Watched] = []
        self._num_passes = 0
        self._begun_ns = 0
        self._waited_ns = self._computed_ns = self._batches = self._closed_rows = 0
        self._depths: deque[tuple[float, int]] = deque(maxlen=_MAX_DEPTHS)
        self._pushed = self.counts.snapshot()  # what `shared` has of this process
        if reporter is not None:
            reporter.on_late = self._look_soon

    # -- one pass ------------------------------------------------------------------------------

    def watch(
        self, pass_: Pass, batches: Iterator[_T], *, keep_lease: Callable[[], None] = lambda: None
    ) -> Generator[_T, None, None]:
        """The batches unchanged; measures the waits for them, and reports from time to time.

        Args:
            pass_: counts the batches that it hands out.
            keep_lease: called a few times a second while batches are taken.

        Raises:
            RanksDisagreeError: this rank reads by other settings than an earlier one of its job.
        """
        watched = self._begin(pass_)
        clock = time.perf_counter_ns
        watched.begun_ns = watched.seen_ns = clock()
        self._begun_ns = self._begun_ns or watched.begun_ns
        watched.due_ns = watched.begun_ns + _FIRST_TICK_NS
        end: pb.PassEnd.ValueType = pb.PASS_END_FAILED
        try:
            if not pass_.of_loader:  # which forks workers first
                self._report_if_due(watched)
            for batch in batches:
                watched.seen_ns = given_ns = clock()
                yield batch
                asked_ns = clock()
                watched.computed_ns += asked_ns - given_ns
                if asked_ns > watched.due_ns:
                    watched.seen_ns, watched.due_ns = asked_ns, asked_ns + _TICK_NS
                    keep_lease()
                    self._tick(watched)
            watched.seen_ns = clock()
            end = pb.PASS_END_FINISHED
        except (GeneratorExit, KeyboardInterrupt):
            is_whole = pass_.handed_out >= len(pass_.steps)
            end = pb.PASS_END_FINISHED if is_whole else pb.PASS_END_STOPPED
            raise
        finally:
            self._end(watched, end)

    def _begin(self, pass_: Pass) -> Watched:
        self._num_passes += 1
        if pass_.of_loader:
            self._shared.by_loader = True
            tag = ring_tag(pass_)
            watched = Watched(
                pass_, self._num_passes, lambda steps: self._shared.digests(tag, steps), Trail()
            )
        else:
            watched = Watched(
                pass_, self._num_passes, pass_.digests.take, None if pass_.in_worker else Trail()
            )
        self._watched.append(watched)
        if self._run is not None and self._reports(pass_):
            self._run[0].begin_pass(self._reader, pass_, self._run[1], self._shared)
        return watched

    def _tick(self, watched: Watched) -> None:
        self._push(watched.pass_)
        if self._reporter is not None:
            self._reporter.check()
        self._report_if_due(watched)

    def _look_soon(self) -> None:
        """Makes each pass look for the answer to a report after its next batch."""
        for watched in list(self._watched):
            watched.due_ns = 0

    def _report_if_due(self, watched: Watched) -> None:
        if self._reporter is not None and self._reporter.is_due and self._reports(watched.pass_):
            # Before the first step nobody knows whether there are digests.
            record = self.record(watched.pass_) if watched.pass_.handed_out else None
            self._reporter.send(self.stats(), record, watched.pass_)

    def _end(self, watched: Watched, end: pb.PassEnd.ValueType) -> None:
        if os.getpid() != self._process or sys.is_finalizing():
            return  # a copy of the iterator, in a fork; or no thread would send a report any more
        self._push(watched.pass_)
        if self._run is not None and self._reports(watched.pass_):
            self._run[0].end_pass(end, sys.exception())
        record = self.record(watched.pass_)
        if self._reporter is not None and self._reports(watched.pass_):
            self._reporter.send_last(self.stats(), record, watched.pass_, end)
        self._closed_rows += _rows_of(watched.pass_, self._reader.rank)
        self._batches += watched.pass_.handed_out
        self._waited_ns += watched.waited_ns
        self._computed_ns += watched.computed_ns
        self._watched.remove(watched)

    def _reports(self, pass_: Pass) -> bool:
        """Whether this process reports a pass: one process of a rank does."""
        return not pass_.in_worker or (pass_.worker == 0 and not self._shared.by_loader)

    def _push(self, pass_: Pass) -> None:
        """Adds the counts of a worker to those that all processes see."""
        if pass_.in_worker:
            now = self.counts.snapshot()
            self._shared.add(pass_.worker, now - self._pushed)
            self._pushed = now

    def report_soon(self) -> None:
        """Reports at the next occasion: a restart may begin where the loop stands now."""
        if self._reporter is not None:
            self._reporter.report_soon()

    # -- inside a pass -------------------------------------------------------------------------

    def note_wait(self, wait_ns: int, ready: int) -> None:
        """Counts a wait for a window, and how many were ready."""
        counts = self.counts
        counts.add(FETCH_NS, wait_ns)
        counts.add(DEPTHS, ready)
        counts.add(WINDOWS, 1)
        elapsed_s = (time.perf_counter_ns() - self._begun_ns) / 1e9
        if not self._depths or elapsed_s - self._depths[-1][0] >= 1.0:
            self._depths.append((elapsed_s, ready))

    def timed(self, transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A transform whose time is counted."""
        counts, clock = self.counts, time.perf_counter_ns

        def timed(batch: Any) -> Any:
            begun_ns = clock()
            try:
                return transform(batch)
            finally:
                counts.add(TRANSFORM_NS, clock() - begun_ns)

        return timed

    # -- what was seen -------------------------------------------------------------------------

    def record(self, pass_: Pass) -> AuditRecord | None:
        """What the loop was given in a pass; None where digests were lost, or this is a worker."""
        with self._lock:
            watched = next((each for each in self._watched if each.pass_ is pass_), None)
            if watched is None:
                return pass_.record
            trail = watched.trail
            if trail is None:
                return None
            steps = range(trail.steps, pass_.handed_out)
            if steps:
                found = watched.digests(steps)
                if found is None:
                    watched.trail = None
                    return None
                rows = _rows_of(pass_, self._reader.rank) - trail.rows
                trail.add(found[:, 0], found[:, 1], rows)
            elapsed_s = (time.perf_counter_ns() - watched.begun_ns) / 1e9
            pass_.record = self._reader.record(watched.number, pass_, trail, elapsed_s)
            return pass_.record

    def stats(self) -> ReadStats:
        """All numbers so far, with those of DataLoader workers."""
        cells = self.counts.snapshot() - self._pushed + self._shared.total()
        nodes = {
            node_id: NodeStats(
                int(row[NODE_ROWS]),
                int(row[NODE_BYTES]),
                int(row[NODE_WAIT_NS]) / 1e9,
                int(row[NODE_FAILURES]),
            )
            for node_id, row in zip(self._node_ids, node_cells(cells), strict=True)
            if row.any()
        }
        now = list(self._watched)
        rows = self._closed_rows + sum(_rows_of(each.pass_, self._reader.rank) for each in now)
        waited_ns = self._waited_ns + sum(each.waited_ns for each in now)
        computed_ns = self._computed_ns + sum(each.computed_ns for each in now)
        begun_ns = self._begun_ns or time.perf_counter_ns()
        made_elsewhere = not rows and bool(cells[WINDOWS])  # by workers of another DataLoader
        return ReadStats(
            elapsed_s=(time.perf_counter_ns() - begun_ns) / 1e9,
            waited_s=waited_ns / 1e9,
            computed_s=computed_ns / 1e9,
            batches=self._batches + sum(each.pass_.handed_out for each in now),
            rows=int(cells[LOCAL_ROWS] + node_cells(cells)[:, NODE_ROWS].sum())
            if made_elsewhere
            else rows,
            local_rows=int(cells[LOCAL_ROWS]),
            local_bytes=int(cells[LOCAL_BYTES]),
            nodes=nodes,
            fetch_s=int(cells[FETCH_NS]) / 1e9,
            transform_s=int(cells[TRANSFORM_NS]) / 1e9,
            failovers=int(cells[FAILOVERS]),
            refetches=int(cells[REFETCHES]),
            queue_depth=int(cells[DEPTHS]) / max(1, int(cells[WINDOWS])),
            queue_depths=tuple(self._depths),
        )


def ring_tag(pass_: Pass) -> int:
    """Names a pass among the digests that workers share: equal where the steps are equal."""
    return hash(
        (pass_.epoch, pass_.plan.rows_consumed, pass_.plan.rows_per_step, pass_.order.skipped)
    ) & (2**61 - 1)


def _rows_of(pass_: Pass, rank: int) -> int:
    """Rows of the steps that a pass has handed out."""
    steps, plan = pass_.handed_out, pass_.plan
    if pass_.in_worker or not steps:
        return 0
    return (steps - 1) * plan.batch_size + len(plan.window(range(steps - 1, steps), rank)[0])
