"""Sends reports of a reader to the cache, in the background.

A report has sums since the run began, so a lost one loses nothing. A cache that does not know the
action gets no further ones.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cache_client.epochs.passes import Pass
from cache_client.epochs.stats import ReadStats
from cache_client.flight.connections import NodeConnection
from cache_client.flight.shared_handle import ConnectionClosedError
from cache_client.order.audit_record import AuditRecord
from cache_client.order.digests import Trail
from cache_client.order.load_log import UNKNOWN_ROWS
from cache_client.order.view_text import view_digest
from cache_client.reading.background_task import CALL_TIMEOUT_S
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 3.0
_FIRST_S: Final = 1.0  # after which a job with a name is shown
_REPORTS_PER_S: Final = 50.0  # of all ranks of a job together
_EXPIRES_INTERVALS: Final = 5.0
_MAX_NODES: Final = 16  # in a report
_ATTEMPTS: Final = 3  # to send a report


@dataclass(frozen=True)
class ReaderIdentity:
    """Who reads what.

    Attributes:
        run: random name of one dataset object in one process.
        job: its name.
        view: what it reads other than each row once, see `cache_client.order.view_text`.
        shuffle: whether the job shuffles, and the block size.
    """

    run: str
    job: str
    dataset: str
    fingerprint: str
    rank: int
    world_size: int
    view: str = ""
    shuffle: tuple[bool, int | None] = (False, None)

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
        )


class Reporter:
    """Sends the reports of one dataset object in one process.

    Args:
        reader: who reads what.
        locations: of nodes, to be asked one after the other.
        credentials: shown to them.
        is_named: whether the job was given a name. If not, a run that is shorter than the interval
            sends nothing.

    Thread-safety: `send` and `send_last` may be called from any thread.
    """

    def __init__(
        self,
        reader: ReaderIdentity,
        locations: Sequence[str],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        is_named: bool,
    ) -> None:
        self._reader = reader
        self._credentials = credentials
        self._locations = list(locations)
        self._interval_s = max(_INTERVAL_S, reader.world_size / _REPORTS_PER_S)
        self._is_named = is_named
        self._last_gap_s = self._interval_s
        now = time.monotonic()
        self._begun_at = self._sent_at = now
        self._due_at = now + (_FIRST_S if is_named else self._interval_s)
        self._refused = False
        self._pass_ends = False
        self._connection: NodeConnection | None = None  # open during a pass
        self._warned = False
        self._lock = threading.Lock()
        self._waiting: dict[Pass, pb.ReaderReport] = {}
        self._thread: threading.Thread | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a report."""
        return not self._refused and time.monotonic() >= self._due_at

    def report_soon(self) -> None:
        """Makes the next report due: a state was saved, so this is what a restart begins with."""
        self._due_at = min(self._due_at, self._sent_at + _FIRST_S)

    def send(self, sums: ReadStats, record: AuditRecord | None, pass_: Pass) -> None:
        """Sends a report in the background; replaces one of the same pass that waits."""
        now = time.monotonic()
        self._last_gap_s = max(self._last_gap_s / 2, now - self._sent_at)
        self._sent_at, self._due_at = now, now + self._interval_s
        report = self._report(sums, record, pass_)
        with self._lock:
            self._waiting[pass_] = report
            if self._thread is None:
                thread = threading.Thread(target=self._send_all, name="cache-report")
                try:
                    thread.start()
                except RuntimeError as error:  # the program ends
                    logger.debug("report not sent job=%s reason=%s", report.job, error)
                    return
                self._thread = thread

    def send_last(self, sums: ReadStats, record: AuditRecord | None, pass_: Pass) -> None:
        """Sends what is known at the end of a pass, unless the run is short and has no name."""
        is_long = time.monotonic() - self._begun_at >= self._interval_s
        if (self._is_named or is_long) and not self._refused:
            self._pass_ends = True
            self.send(sums, record, pass_)

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    if self._pass_ends and self._connection is not None:
                        self._pass_ends, connection = False, self._connection
                        self._connection = None
                        connection.close()
                    return
                report = self._waiting.pop(next(iter(self._waiting)))
            self._send(report)

    def _send(self, report: pb.ReaderReport) -> None:
        error: CacheError | None = None
        for _ in range(_ATTEMPTS):
            try:
                if self._connection is None or self._connection.is_closed:
                    self._connection = NodeConnection(self._locations[0], self._credentials)
                self._connection.report(report, CALL_TIMEOUT_S)
                return
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
                # A node of an earlier release, or a refused name: the next report would be, too.
                self._refused = True
                error = refusal
                break
        if not self._warned:
            self._warned = True
            level = logging.WARNING if self._refused else logging.INFO
            logger.log(level, "report not sent job=%s reason=%s", report.job, error)

    def _report(self, sums: ReadStats, record: AuditRecord | None, pass_: Pass) -> pb.ReaderReport:
        reader = self._reader
        nodes = sorted(sums.nodes.items(), key=lambda item: -item[1].rows)[:_MAX_NODES]
        return pb.ReaderReport(
            job=reader.job,
            dataset=reader.dataset,
            fingerprint=reader.fingerprint,
            rank=reader.rank,
            world_size=reader.world_size,
            run=reader.run,
            epoch=pass_.epoch,
            step=pass_.handed_out,
            num_steps=0 if pass_.plan.num_rows == UNKNOWN_ROWS else pass_.plan.num_steps,
            elapsed_s=sums.elapsed_s,
            waited_s=sums.waited_s,
            computed_s=sums.computed_s,
            fetch_s=sums.fetch_s,
            transform_s=sums.transform_s,
            batches=sums.batches,
            rows=sums.rows,
            local_rows=sums.local_rows,
            local_bytes=sums.local_bytes,
            nodes=[
                pb.NodeReads(
                    node_id=node_id,
                    rows=node.rows,
                    num_bytes=node.num_bytes,
                    waited_s=node.waited_s,
                    failures=node.failures,
                )
                for node_id, node in nodes
            ],
            failovers=sums.failovers,
            refetches=sums.refetches,
            queue_depth=sums.queue_depth,
            expires_s=_EXPIRES_INTERVALS * max(self._interval_s, self._last_gap_s),
            audit="" if record is None else json.dumps(record.to_dict(), separators=(",", ":")),
            view=reader.view,
            view_digest=view_digest(reader.view),
        )
