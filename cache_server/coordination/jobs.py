"""The training jobs that read from the cache, as their readers report. Kept in memory only.

What a reader says is a claim: it changes nothing but what people see. Everything is bounded: jobs,
readers of each, the history, the audit records.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from cache_protocol.errors import DatasetNotFoundError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.verdict import (
    NodeWindow,
    RankWindow,
    Verdict,
    judge,
    node_sums,
)

HISTORY_S: Final = 3600.0
MAX_REPORT_BYTES: Final = 16 * 1024
_MAX_JOBS: Final = 256
_MAX_READERS: Final = 20_000  # of all jobs
_MAX_WORLD_SIZE: Final = 1_000_000
_MAX_AUDITS: Final = 8_192  # of a job
_MAX_AUDIT_BYTES: Final = 64 * 1024 * 1024  # of all jobs
_MAX_EXPIRY_S: Final = 600.0
_MAX_NAME: Final = 256
_WINDOW_S: Final = 30.0
_MAX_RECENT: Final = 16  # reports of a reader in the window
_SAMPLES: Final = 240
_FIRST_STRIDE_S: Final = 2.0
_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_T = TypeVar("_T")


def checked_report(report: pb.ReaderReport) -> pb.ReaderReport:
    """Checks a report that came from outside.

    Raises:
        RequestError: quotes what is wrong.
    """
    if report.ByteSize() > MAX_REPORT_BYTES:
        raise RequestError(f"a report has at most {MAX_REPORT_BYTES} bytes")
    if not _NAME.fullmatch(report.job):
        raise RequestError(f"the report has a bad name of a job: {report.job[:64]!r}")
    for name in ("dataset", "run"):
        value = getattr(report, name)
        if not 0 < len(value) <= _MAX_NAME or not value.isprintable():
            raise RequestError(f"the report has a bad {name}: {value[:64]!r}")
    if not report.rank < report.world_size <= _MAX_WORLD_SIZE:
        raise RequestError(f"the report is of rank {report.rank} of {report.world_size}")
    for field_, number in report.ListFields():
        if isinstance(number, float) and not (math.isfinite(number) and number >= 0):
            raise RequestError(f"the report has {field_.name}={number}")
    return report


class Ring(Generic[_T]):
    """The samples of the last hour, evenly spread. At most `_SAMPLES`: old ones are thinned."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, _T]] = []
        self._stride_s = _FIRST_STRIDE_S

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next sample."""
        return not self._samples or now - self._samples[-1][0] >= self._stride_s

    def add(self, now: float, sample: _T) -> None:
        """Adds a sample."""
        self._samples.append((now, sample))
        if len(self._samples) > _SAMPLES:
            if now - self._samples[0][0] < HISTORY_S:
                self._samples = self._samples[::2]
                self._stride_s *= 2
            else:
                del self._samples[0]

    def since(self, oldest: float) -> list[tuple[float, _T]]:
        """Times and samples from then on."""
        return [sample for sample in self._samples if sample[0] >= oldest]


@dataclass(eq=False)
class _Reader:
    """One run of one rank; its last reports, the newest last."""

    recent: deque[tuple[float, pb.ReaderReport]] = field(
        default_factory=lambda: deque(maxlen=_MAX_RECENT)
    )
    waits: Ring[float] = field(default_factory=Ring)
    begun_at: float = 0.0

    @property
    def last(self) -> pb.ReaderReport:
        return self.recent[-1][1]

    @property
    def last_at(self) -> float:
        return self.recent[-1][0]

    def is_live(self, now: float) -> bool:
        return now - self.last_at <= min(self.last.expires_s, _MAX_EXPIRY_S)

    def window(self) -> RankWindow:
        """What it did between its newest report and the oldest one of the last half minute."""
        newest_at, new = self.recent[-1]
        old = pb.ReaderReport()
        for at, report in reversed(self.recent):
            if report is not new:
                old = report
            if newest_at - at > _WINDOW_S:
                break
        had = {node.node_id: node for node in old.nodes}
        none = pb.NodeReads()
        return RankWindow(
            rank=new.rank,
            steps=max(0, new.batches - old.batches),
            elapsed_s=max(0.0, new.elapsed_s - old.elapsed_s),
            waited_s=max(0.0, new.waited_s - old.waited_s),
            computed_s=max(0.0, new.computed_s - old.computed_s),
            fetch_s=max(0.0, new.fetch_s - old.fetch_s),
            transform_s=max(0.0, new.transform_s - old.transform_s),
            rows=max(0, new.rows - old.rows),
            local_rows=max(0, new.local_rows - old.local_rows),
            nodes={
                node.node_id: NodeWindow(
                    max(0, node.rows - had.get(node.node_id, none).rows),
                    max(0.0, node.waited_s - had.get(node.node_id, none).waited_s),
                )
                for node in new.nodes
            },
        )


@dataclass
class _Audit:
    begun_at: float
    last_at: float
    record: str


@dataclass(eq=False)
class _Job:
    readers: dict[tuple[int, str], _Reader] = field(default_factory=dict)
    history: Ring[tuple[float, float, float]] = field(default_factory=Ring)
    audits: dict[tuple[str, str], _Audit] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=lambda: judge(()))
    verdict_at: float = 0.0
    last_at: float = 0.0

    def live(self, now: float) -> list[_Reader]:
        """Readers that have not stopped and were not replaced by a later one of their rank."""
        begun: dict[int, float] = {}
        for (rank, _), reader in self.readers.items():
            begun[rank] = max(begun.get(rank, 0.0), reader.begun_at)
        return [
            reader
            for (rank, _), reader in self.readers.items()
            if reader.is_live(now) and reader.last_at >= begun[rank]
        ]

    def judge(self, windows: Sequence[RankWindow], now: float) -> Verdict:
        """The verdict now; remembers since when it holds."""
        verdict = judge(windows)
        if verdict.key != self.verdict.key:
            self.verdict_at = now
        self.verdict = verdict
        return verdict


class Jobs:
    """What readers report, by job and dataset. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._audit_bytes = 0

    def apply(self, reports: Iterable[pb.ReaderReport]) -> None:
        """Takes reports; the caller has checked them."""
        now = self._clock()
        with self._lock:
            touched = {(report.job, report.dataset): self._apply(report, now) for report in reports}
            for job in touched.values():
                if job.history.is_due(now):
                    self._sample(job, now)
            if touched:
                self._forget_old(now)

    def _apply(self, report: pb.ReaderReport, now: float) -> _Job:
        job = self._jobs.setdefault((report.job, report.dataset), _Job(verdict_at=now))
        job.last_at = now
        if report.audit:
            # The text begins with the numbers of the run and the pass.
            name = report.run, report.audit.partition(',"dataset"')[0]
            before = job.audits.pop(name, None)
            self._audit_bytes += len(report.audit) - (0 if before is None else len(before.record))
            begun_at = now - report.elapsed_s if before is None else before.begun_at
            job.audits[name] = _Audit(begun_at, now, report.audit)
            while len(job.audits) > _MAX_AUDITS:
                self._audit_bytes -= len(job.audits.pop(next(iter(job.audits))).record)
            report.audit = ""
        reader = job.readers.setdefault((report.rank, report.run), _Reader(begun_at=now))
        reader.recent.append((now, report))
        if reader.waits.is_due(now) and len(reader.recent) > 1:
            reader.waits.add(now, reader.window().wait_share)
        return job

    def _sample(self, job: _Job, now: float) -> None:
        windows = [reader.window() for reader in job.live(now)]
        rows_per_s = sum(window.rows / max(1e-9, window.elapsed_s) for window in windows)
        shares = [window.wait_share for window in windows] or [0.0]
        job.history.add(now, (rows_per_s, sum(shares) / len(shares), max(shares)))
        job.judge(windows, now)

    def _forget_old(self, now: float) -> None:
        """Drops jobs that were silent for an hour, and readers that were replaced."""
        for name, job in list(self._jobs.items()):
            if now - job.last_at > HISTORY_S:
                self._drop(name)
                continue
            newest: dict[int, float] = {}
            for (rank, _), reader in job.readers.items():
                newest[rank] = max(newest.get(rank, 0.0), reader.last_at)
            for key, reader in list(job.readers.items()):
                replaced = reader.last_at < newest[key[0]]
                if not reader.is_live(now) and (replaced or now - reader.last_at > HISTORY_S):
                    del job.readers[key]
        by_age = sorted(self._jobs, key=lambda name: self._jobs[name].last_at)
        readers = sum(len(job.readers) for job in self._jobs.values())
        while by_age and (len(self._jobs) > _MAX_JOBS or readers > _MAX_READERS):
            readers -= len(self._drop(by_age.pop(0)).readers)
        while by_age and self._audit_bytes > _MAX_AUDIT_BYTES:
            self._drop_audits(self._jobs[by_age.pop(0)])

    def _drop(self, name: tuple[str, str]) -> _Job:
        job = self._jobs.pop(name)
        self._drop_audits(job)
        return job

    def _drop_audits(self, job: _Job) -> None:
        self._audit_bytes -= sum(len(audit.record) for audit in job.audits.values())
        job.audits.clear()

    def jobs(
        self,
        name: str = "",
        *,
        ranks: bool = True,
        audits: bool = False,
        sees: Callable[[str], bool] = lambda dataset: True,
    ) -> list[pb.JobInfo]:
        """Every job, or those of a name, live ones first.

        Args:
            ranks: with an entry for each rank.
            audits: with the audit records.
            sees: whether the jobs of a dataset are listed.

        Raises:
            DatasetNotFoundError: no reader of that job has reported; lists those that have.
        """
        now = self._clock()
        with self._lock:
            found = [
                _describe(key, job, now, ranks=ranks, audits=audits)
                for key, job in self._jobs.items()
                if name in ("", key[0]) and sees(key[1])
            ]
            known = sorted({key[0] for key in self._jobs if sees(key[1])})
        if name and not found:
            raise DatasetNotFoundError(
                f"no reader of a job {name!r} has reported; jobs: {', '.join(known) or 'none'}"
            )
        return sorted(found, key=lambda info: (not info.live, info.name, info.dataset))


def _describe(
    key: tuple[str, str], job: _Job, now: float, *, ranks: bool, audits: bool
) -> pb.JobInfo:
    live = job.live(now)
    latest_of_ranks = {rank: reader for (rank, _), reader in job.readers.items()}
    shown = sorted(live or latest_of_ranks.values(), key=lambda reader: reader.last.rank)
    latest = max(shown, key=lambda reader: reader.last_at).last
    windows = [reader.window() for reader in shown] if live else []
    rows = sum(window.rows for window in windows)
    behind = min(shown, key=lambda reader: (reader.last.epoch, reader.last.step)).last
    info = pb.JobInfo(
        name=key[0],
        dataset=key[1],
        fingerprint=latest.fingerprint,
        live=bool(live),
        world_size=latest.world_size,
        epoch=behind.epoch,
        step=behind.step,
        num_steps=behind.num_steps,
        rows_per_s=sum(window.rows / max(1e-9, window.elapsed_s) for window in windows),
        wait_share=max((window.wait_share for window in windows), default=0.0),
        local_share=sum(window.local_rows for window in windows) / rows if rows else 0.0,
        verdict=job.judge(windows, now).text if live else f"stopped {now - job.last_at:.0f} s ago",
        verdict_s=now - (job.verdict_at if live else job.last_at),
    )
    info.nodes.extend(_node_shares(windows))
    if ranks:
        for reader, window in zip(
            shown, windows or [reader.window() for reader in shown], strict=True
        ):
            info.ranks.append(_describe_rank(reader, window, now))
    for at, (rate, mean, most) in job.history.since(now - HISTORY_S):
        info.history.add(age_s=now - at, rows_per_s=rate, wait_share=mean, most_wait_share=most)
    if audits:
        for (run, _), audit in job.audits.items():
            info.audits.add(
                run=run,
                begun_s=now - audit.begun_at,
                last_s=now - audit.last_at,
                record=audit.record,
            )
    return info


def _node_shares(windows: Sequence[RankWindow]) -> list[pb.NodeShare]:
    rows, waits = node_sums(windows)
    all_rows, all_waits = sum(rows.values()), sum(waits.values())
    return [
        pb.NodeShare(
            node_id=node_id,
            rows_share=rows[node_id] / all_rows if all_rows else 0.0,
            wait_share=waits[node_id] / all_waits if all_waits else 0.0,
        )
        for node_id in sorted(rows, key=rows.__getitem__, reverse=True)
    ]


def _describe_rank(reader: _Reader, window: RankWindow, now: float) -> pb.RankInfo:
    return pb.RankInfo(
        rank=window.rank,
        live=reader.is_live(now),
        epoch=reader.last.epoch,
        step=reader.last.step,
        rows_per_s=window.rows / max(1e-9, window.elapsed_s),
        wait_share=window.wait_share,
        step_s=window.step_s,
        transform_s=window.per_step(window.transform_s),
        fetch_s=window.per_step(window.fetch_s),
        age_s=now - reader.last_at,
        wait_history=[share for _, share in reader.waits.since(now - HISTORY_S)],
    )
