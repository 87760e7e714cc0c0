"""Sends reports of a reader to the cache, in the background.

A report has sums since the run began, so one that is lost loses nothing, but for the last one of a
pass: that is sent again until a node takes it, for half a minute, while the program runs. A cache
that refuses one gets no further ones. The answer to a report tells whether the ranks of the job
disagree. So the first reports of a run come in short intervals, also where a step takes long.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cache_client.epochs.passes import Pass
from cache_client.epochs.stats import ReadStats
from cache_client.flight.connections import NodeConnection
from cache_client.flight.shared_handle import ConnectionClosedError
from cache_client.order.audit_record import AuditRecord
from cache_client.order.digests import Trail
from cache_client.order.load_log import UNKNOWN_ROWS
from cache_client.reading.background_task import CALL_TIMEOUT_S
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    RanksDisagreeError,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_protocol.wire.records import NODE_SUMS, REPORT_SUMS

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 2.0
_SOON_S: Final = 1.0
_NEW_S: Final = 6.0  # for so long a run is new: it repeats its report, to get the answer
_REPEAT_S: Final = 0.5
_LOOK_S: Final = 0.1  # at whether the program ends
_FIRST_BATCH_S: Final = 60.0  # a loop may compile before it takes one
_REPORTS_PER_S: Final = 50.0  # of all ranks of a job together
_EXPIRES_INTERVALS: Final = 5.0
_MAX_NODES: Final = 16  # in a report
_ATTEMPTS: Final = 3  # to send a report
_AGAIN_S, _KEPT_S = 1.0, 30.0  # the last one of a pass


@dataclass(frozen=True)
class ReaderIdentity:
    """Who reads what.

    Attributes:
        run: random name of one dataset object in one process.
        job: its name.
        view: what it reads other than each row once, see `cache_client.order.view_text`.
        shuffle: whether the job shuffles, and the block size.
        amended: the epoch that was amended, and the positions where.
    """

    run: str
    job: str
    dataset: str
    fingerprint: str
    rank: int
    world_size: int
    view: str = ""
    shuffle: tuple[bool, int | None] = (False, None)
    amended: tuple[int, tuple[int, ...]] = (0, ())

    def record(self, number: int, pass_: Pass, trail: Trail, elapsed_s: float) -> AuditRecord:
        """The audit record of a pass, which began so long ago."""
        now = time.time()
        return AuditRecord(
            run=self.run,
            number=number,
            dataset=self.dataset,
            fingerprint=self.fingerprint,
            num_rows=pass_.order.num_rows,
            seed=pass_.order.seed,
            shuffle=pass_.order.shuffle,
            shuffle_block_size=pass_.order.shuffle_block_size,
            epoch=pass_.epoch,
            rows_consumed=pass_.plan.rows_consumed,
            rank=self.rank,
            world_size=self.world_size,
            batch_size=pass_.plan.batch_size,
            drop_last=pass_.plan.drop_last,
            pad=pass_.plan.pad,
            skipped=pass_.order.skipped,
            groups=pass_.order.groups,
            view=self.view,
            due=pass_.due_of(),
            job_shuffle=self.shuffle,
            begun_s=now - elapsed_s,
            made_s=now,
            steps=trail.steps,
            rows=trail.rows,
            set_digest=trail.set_digest,
            order_digest=trail.order_digest,
            checkpoints=tuple(trail.checkpoints),
            amended_at=self.amended[1] if self.amended[0] == pass_.epoch else (),
        )


class Reporter:
    """Sends the reports of one dataset object in one process.

    Args:
        reader: who reads what.
        locations: of nodes, to be asked one after the other.
        credentials: shown to them.
        standing: what each report says, such as the terms on which all ranks must agree.
        is_shared: whether other ranks have the name of the job, too. If not, a run that is shorter
            than the interval sends nothing.

    Attributes:
        on_late: called, in the thread that sends, when `check` is going to raise.

    Thread-safety: `send` and `send_last` may be called from any thread.
    """

    def __init__(
        self,
        reader: ReaderIdentity,
        locations: Sequence[str],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        standing: pb.ReaderReport,
        is_shared: bool,
    ) -> None:
        self._reader = reader
        self._credentials = credentials
        self._locations = list(locations)
        self._interval_s = max(_INTERVAL_S, reader.world_size / _REPORTS_PER_S)
        self._standing = standing
        self._is_shared = is_shared
        self._last_gap_s = self._interval_s
        now = time.monotonic()
        self._begun_at = self._sent_at = now
        self._due_at = now if is_shared else now + self._interval_s
        self._repeat_s = max(_REPEAT_S, reader.world_size / _REPORTS_PER_S)
        self.on_late: Callable[[], None] = lambda: None
        self._late = ""  # why this run must stop
        self._refused = False
        self._pass_ends = False
        self._connection: NodeConnection | None = None  # open during a pass
        self._warned = self._warned_of_ranks = False
        self._changed = threading.Condition()
        self._waiting: dict[Pass, pb.ReaderReport] = {}
        self._last: tuple[Pass, pb.ReaderReport] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a report."""
        return not self._refused and time.monotonic() >= self._due_at

    def report_soon(self) -> None:
        """Makes the next report due: a state was saved, so this is what a restart begins with."""
        self._due_at = min(self._due_at, self._sent_at + _SOON_S)

    def check(self) -> None:
        """Raises where the cache answered that this run disagrees with an earlier rank.

        Raises:
            RanksDisagreeError: names both values and both hosts.
        """
        if self._late:
            late, self._late = self._late, ""
            raise RanksDisagreeError(late)

    def send(
        self,
        sums: ReadStats,
        record: AuditRecord | None,
        pass_: Pass,
        *,
        end: pb.PassEnd.ValueType = pb.PASS_END_UNSPECIFIED,
    ) -> None:
        """Sends a report in the background; replaces one of the same pass that waits."""
        now = time.monotonic()
        self._last_gap_s = max(self._last_gap_s / 2, now - self._sent_at)
        self._sent_at, self._due_at = now, now + self._interval_s
        report = self._report(sums, record, pass_)
        report.end, report.sent_s = end, now - self._begun_at
        with self._changed:
            self._pass_ends = end != pb.PASS_END_UNSPECIFIED
            self._waiting[pass_] = report
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._send_all, name="cache-report")
                try:
                    thread.start()
                except RuntimeError as error:  # the program ends
                    logger.debug("report not sent job=%s reason=%s", report.job, error)
                    return
                self._thread = thread

    def send_last(
        self,
        sums: ReadStats,
        record: AuditRecord | None,
        pass_: Pass,
        end: pb.PassEnd.ValueType,
    ) -> None:
        """Sends what is known at the end of a pass, unless the run is short and not shared."""
        is_long = time.monotonic() - self._begun_at >= self._interval_s
        if (self._is_shared or is_long) and not self._refused:
            self.send(sums, record, pass_, end=end)

    def _send_all(self) -> None:
        while (found := self._next()) is not None:
            pass_, report = found
            if not self._send(report) and report.end != pb.PASS_END_UNSPECIFIED:
                self._keep(pass_, report)

    def _keep(self, pass_: Pass, report: pb.ReaderReport) -> None:
        """Lets the last report of a pass wait again, before later ones."""
        now = time.monotonic()
        if now - self._begun_at - report.sent_s > _KEPT_S:
            return
        with self._changed:
            while time.monotonic() < now + _AGAIN_S and threading.main_thread().is_alive():
                self._changed.wait(_LOOK_S)
            if threading.main_thread().is_alive():
                self._waiting = {pass_: report, **self._waiting}

    def _next(self) -> tuple[Pass, pb.ReaderReport] | None:
        """Waits for a report; a new run repeats its last one meanwhile. None: the thread ends."""
        with self._changed:
            repeats_at = time.monotonic() + self._repeat_s
            while not self._waiting and self._is_new:
                if time.monotonic() >= repeats_at and self._last is not None:
                    self._last[1].sent_s = time.monotonic() - self._begun_at
                    return self._last
                self._changed.wait(_LOOK_S)
            if self._waiting:
                pass_ = next(iter(self._waiting))
                self._last = pass_, self._waiting.pop(pass_)
                return self._last
            self._thread = None
            if self._pass_ends and self._connection is not None:
                connection, self._connection = self._connection, None
                connection.close()
            return None

    @property
    def _is_new(self) -> bool:
        """Whether the answer to a first report may still come."""
        is_new = time.monotonic() - self._begun_at < _NEW_S
        waits = self._is_shared and not self._pass_ends and not self._refused and not self._late
        return is_new and waits and threading.main_thread().is_alive()

    def _send(self, report: pb.ReaderReport) -> bool:
        """Whether a node took the report, or will never take it."""
        error: CacheError | None = None
        for _ in range(_ATTEMPTS):
            try:
                if self._connection is None or self._connection.is_closed:
                    self._connection = NodeConnection(self._locations[0], self._credentials)
                self._take(self._connection.report(report, CALL_TIMEOUT_S))
                return True
            except ConnectionClosedError as failed:  # by a fork of this process
                error = failed
            except NodeUnavailableError as failed:
                error = failed
                if self._connection is not None:
                    self._connection.close()
                self._locations.append(self._locations.pop(0))
            except (NotReadyError, DatasetNotFoundError) as refusal:
                error = refusal  # a later report may be taken: the dataset may come back
                break
            except CacheError as refusal:
                # Such as a refused name: the next report would be refused, too.
                self._refused = True
                error = refusal
                break
        if not self._warned:
            self._warned = True
            level = logging.WARNING if self._refused else logging.INFO
            logger.log(level, "report not sent job=%s reason=%s", report.job, error)
        return self._refused

    def _take(self, told: pb.Disagreement | None) -> None:
        """Takes the answer to a report."""
        if told is None:
            return
        if told.is_late:
            self._late = told.text
            self.on_late()
        elif not self._warned_of_ranks:
            self._warned_of_ranks = True
            logger.warning("the ranks of job %s disagree: %s", self._reader.job, told.text)

    def _report(self, sums: ReadStats, record: AuditRecord | None, pass_: Pass) -> pb.ReaderReport:
        reader = self._reader
        nodes = sorted(sums.nodes.items(), key=lambda item: -item[1].rows)[:_MAX_NODES]
        expires_s = _EXPIRES_INTERVALS * max(self._interval_s, self._last_gap_s)
        report = pb.ReaderReport(
            job=reader.job,
            dataset=reader.dataset,
            fingerprint=reader.fingerprint,
            rank=reader.rank,
            world_size=reader.world_size,
            run=reader.run,
            epoch=pass_.epoch,
            step=pass_.handed_out,
            num_steps=0 if pass_.plan.num_rows == UNKNOWN_ROWS else pass_.plan.num_steps,
            nodes=[
                pb.NodeReads(node_id=node_id, **{name: getattr(node, name) for name in NODE_SUMS})
                for node_id, node in nodes
            ],
            **{name: getattr(sums, name) for name in REPORT_SUMS},
            expires_s=expires_s if sums.batches else max(expires_s, _FIRST_BATCH_S),
            audit="" if record is None else json.dumps(record.to_dict(), separators=(",", ":")),
        )
        report.MergeFrom(self._standing)
        return report
