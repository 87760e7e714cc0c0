"""The training jobs that read from the cache, as their readers report. Kept in memory only.

What a reader says is a claim: it changes nothing but what the people of its namespace see. A job is
of the namespace of the principals that report it, also if it reads a dataset of another one. All is
bounded for each principal and each namespace: see ADR 0042.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from cache_protocol.errors import DatasetNotFoundError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import EVERYTHING, Viewer
from cache_server.jobs.history import HISTORY_S
from cache_server.jobs.job import MOST_RANKS, Job
from cache_server.jobs.reports import audit_key, owner_of
from cache_server.jobs.shares import Bounds, Rates, Shares

_JOBS: Final = Bounds(principal=128, namespace=256, total=2048)
_READERS: Final = Bounds(principal=16_384, namespace=16_384, total=32_768)
_AUDIT_BYTES: Final = Bounds(principal=24 << 20, namespace=48 << 20, total=192 << 20)
_AUDIT_OVERHEAD: Final = 512  # bytes of a record, apart from its text
# All ranks of the largest job may report at once. Later, each job sends 50 a second.
_REPORTS_PER_S, _BURST = 1000.0, 16_384


class JobKey(NamedTuple):
    """A job that reads one dataset, which has its full name."""

    namespace: str
    name: str
    dataset: str


class Jobs:
    """What readers report, by job and dataset. Thread-safe; no call holds its lock for long.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[JobKey, Job] = {}  # the one that was silent longest first
        self._shares: Shares[JobKey] = Shares(_JOBS)
        self._readers: Shares[tuple[JobKey, int, str]] = Shares(_READERS)
        self._audits: Shares[tuple[JobKey, str, str]] = Shares(_AUDIT_BYTES)
        self._rates = Rates(_REPORTS_PER_S, _BURST)

    def apply(self, reports: Iterable[pb.ReaderReport]) -> None:
        """Takes reports; the caller has checked them.

        Left out are those of principals that send too many.
        """
        now = self._clock()
        for report in reports:
            with self._lock:
                if self._rates.take(owner_of(report), now):
                    self._apply(report, now)
        with self._lock:
            while self._jobs:
                key = next(iter(self._jobs))
                if now - self._jobs[key].last_at <= HISTORY_S:
                    break
                self._drop(key)

    def disagreements(self, reports: Iterable[pb.ReaderReport]) -> Iterator[pb.Disagreement]:
        """What the readers of these reports must know: their ranks disagree with others."""
        runs = {
            (JobKey(report.namespace, report.job, report.dataset), report.run)
            for report in reports
            if report.process
        }
        for key, run in runs:
            with self._lock:
                job = self._jobs.get(key)
                told = None if job is None else job.disagreement(run)
            if told is not None:
                told.namespace = key.namespace
                yield told

    def _apply(self, report: pb.ReaderReport, now: float) -> None:
        owner = owner_of(report)
        key = JobKey(owner.namespace, report.job, report.dataset)
        job = self._jobs.pop(key, None) or Job(now)
        self._jobs[key] = job
        for rank, run in job.apply(report, now):
            self._readers.drop((key, rank, run))
        for gone in self._shares.put(key, owner):
            self._drop(gone)
        for reader in self._readers.put((key, report.rank, report.run), owner):
            self._drop_reader(*reader)
        if report.audit and job.put_audit(report, now):
            record = key, report.run, audit_key(report)
            num_bytes = len(report.audit) + _AUDIT_OVERHEAD
            for of_job, run, number in self._audits.put(record, owner, num_bytes):
                del self._jobs[of_job].audits[run, number]

    def _drop(self, key: JobKey) -> None:
        job = self._jobs.pop(key)
        self._shares.drop(key)
        for reader in job.readers.values():
            self._readers.drop((key, reader.rank, reader.run))
        for run, number in job.audits:
            self._audits.drop((key, run, number))

    def _drop_reader(self, key: JobKey, rank: int, run: str) -> None:
        job = self._jobs[key]
        job.drop(job.readers[rank, run])
        if not job.readers:
            self._drop(key)

    def jobs(
        self,
        name: str = "",
        *,
        viewer: Viewer = EVERYTHING,
        most_ranks: int = MOST_RANKS,
        audits: bool = False,
    ) -> list[pb.JobInfo]:
        """The jobs of a viewer's namespace, or those of a name, live ones first.

        Args:
            name: as the viewer calls it: NAMESPACE/NAME for a job of another namespace.
            viewer: who asks. One that sees every namespace sees all jobs.
            most_ranks: of each job, those that wait most.
            audits: with the audit records.

        Raises:
            DatasetNotFoundError: no reader of that job has reported; lists those that have.
        """
        with self._lock:
            seen = {
                key: _shown(key, viewer)
                for key in self._jobs
                if viewer.sees_all or key.namespace == viewer.namespace
            }
        found = []
        for key, shown in seen.items():
            if name in ("", shown):
                with self._lock:
                    if (job := self._jobs.get(key)) is None:
                        continue
                    info = job.describe(self._clock(), most_ranks)
                    for gone in job.forgotten():
                        self._readers.drop((key, *gone))
                    if audits:
                        info.audits.extend(job.describe_audits(self._clock()))
                info.name, info.dataset = shown, viewer.shown(key.dataset)
                info.namespace = key.namespace
                found.append(info)
        if name and not found:
            known = sorted(set(seen.values()))
            raise DatasetNotFoundError(
                f"no reader of a job {name!r} has reported; jobs: {some_of(known, like=name)}"
            )
        return sorted(found, key=lambda info: (not info.live, info.name, info.dataset))


def _shown(key: JobKey, viewer: Viewer) -> str:
    return key.name if key.namespace == viewer.namespace else f"{key.namespace}/{key.name}"
