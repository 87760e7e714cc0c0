"""One job that reads one dataset: its readers, its history and its audit records.

Sums and orders follow each report, so that a description costs the same for 12 and 12,000 ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.jobs.agreement import Claim, Terms
from cache_server.jobs.disagreements import Disagreements
from cache_server.jobs.history import HISTORY_S, Ring
from cache_server.jobs.ranks import NODE_SUMS, SUMS, NodeWindow, Ranks, RankWindow
from cache_server.jobs.reports import audit_key
from cache_server.jobs.verdict import End, RankEnd, Verdict, judge, judge_end

MOST_RANKS: Final = 64  # in a description
_MOST_NODES: Final = 64
_NODES_OF_READER: Final = 16
_MAX_RUNS: Final = 1024  # of a rank, at once: so many processes may be started without a rank
_MAX_EXPIRY_S: Final = 600.0
_HALF_WINDOW_S: Final = 15.0
_FIRST_S: Final = 1.0  # of a run; before, workers have made more batches than the loop has taken
_FEW: Final = 64
_MOST_OF_VIEW: Final = 512  # of its text, in memory
_OVER: Final = (pb.PASS_END_STOPPED, pb.PASS_END_FAILED)
_END_NUMBERS: Final[dict[End, pb.PassEnd.ValueType]] = {
    "silent": pb.PASS_END_UNSPECIFIED,
    "finished": pb.PASS_END_FINISHED,
    "stopped": pb.PASS_END_STOPPED,
    "failed": pb.PASS_END_FAILED,
}
_ENDS: Final[dict[int, End]] = {number: end for end, number in _END_NUMBERS.items()}
_JOB_SAMPLES, _READER_SAMPLES = 240, 120


@dataclass(eq=False)
class Reader:
    """One run of one rank: the sums of its last report, and those of 15 to 30 s before.

    Attributes:
        number: unique in its job.
        sums: since its run began.
        claim: by which terms it reads; None: it does not tell.
        sent_s: when its last report was made, since its run began.
        end: how the pass of its last report ended.
        is_replaced: a later run of its rank has begun, and it was silent since.
        due_at: when its job looks at it again.
    """

    number: int
    rank: int
    run: str
    waits: Ring = field(default_factory=lambda: Ring(1, _READER_SAMPLES))
    sums: RankWindow | None = None
    claim: Claim | None = None
    end: End = "silent"
    sent_s: float = 0.0
    last_at: float = 0.0
    expires_at: float = 0.0
    epoch: int = 0
    step: int = 0
    num_steps: int = 0
    is_replaced: bool = False
    due_at: float = 0.0
    _mark: tuple[float, RankWindow] | None = None
    _before_mark: RankWindow | None = None

    def apply(self, report: pb.ReaderReport, now: float) -> RankWindow:
        """Takes a report; returns what the reader did lately."""
        is_due = self._mark is None or self.last_at - self._mark[0] >= _HALF_WINDOW_S
        if self.sums is not None and self.sums.elapsed_s >= _FIRST_S and is_due:
            self._before_mark = None if self._mark is None else self._mark[1]
            self._mark = self.last_at, self.sums
        if self.claim is None and report.process:
            self.claim = _claim(report)
        if self.claim is not None:
            self.claim.note(report.sent_s, now, is_over=report.end in _OVER)
        self.sums, self.sent_s, self.last_at = _sums(report), report.sent_s, now
        self.end = _ENDS.get(report.end, "silent")
        self.expires_at = now + min(report.expires_s, _MAX_EXPIRY_S)
        self.epoch, self.step, self.num_steps = report.epoch, report.step, report.num_steps
        window = self.sums.since(self._base(now))
        if self._mark is not None and self.waits.is_due(now):
            self.waits.add(now, window.wait_share)
        return window

    def _base(self, now: float) -> RankWindow | None:
        if self._mark is None:
            return None
        at, mark = self._mark
        return mark if now - at >= _HALF_WINDOW_S or not self._before_mark else self._before_mark


@dataclass
class Audit:
    """The last record of a pass; ``sent_s`` as of a `Reader`."""

    begun_at: float
    last_at: float
    sent_s: float
    record: str


class Job:
    """One job. One thread at a time.

    Attributes:
        readers: by rank and run.
        audits: by run and pass.
        last_at: when it last reported, in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.readers: dict[tuple[int, str], Reader] = {}
        self.audits: dict[tuple[str, str], Audit] = {}
        self.last_at = now
        self._by_number: dict[int, Reader] = {}
        self._runs: dict[int, dict[str, Reader]] = {}  # of a rank; the last to report is last
        self._live, self._ended = Ranks(), Ranks()
        self._ends: list[tuple[float, int]] = []  # a heap: when to look at a reader, its number
        self._next_number = 0
        self._gone: list[tuple[int, str]] = []
        self._history = Ring(3, _JOB_SAMPLES)
        self._verdict, self._verdict_at = judge(self._live), now
        self._fingerprint, self._world_size = "", 0
        self._disagreements = Disagreements()
        self._view, self._view_digest = "", ""

    def apply(self, report: pb.ReaderReport, now: float) -> list[tuple[int, str]]:
        """Takes a report; returns the readers that were forgotten, by rank and run."""
        reader = self.readers.get((report.rank, report.run))
        if reader is not None and report.sent_s < reader.sent_s:
            return []  # another node was faster with a later one
        self.last_at = now
        self._fingerprint, self._world_size = report.fingerprint, report.world_size
        self._view, self._view_digest = report.view, report.view_digest
        if reader is None:
            reader = self._begin(report.rank, report.run, now)
        runs = self._runs[reader.rank]
        del runs[reader.run]
        runs[reader.run] = reader
        reader.is_replaced = False
        window = reader.apply(report, now)
        if reader.number not in self._live:  # it is new, or was silent
            self._ended.drop(reader.number)
            self._look_at(reader, reader.expires_at)
        elif reader.expires_at < reader.due_at:  # the first batch may take long, later ones not
            self._look_at(reader, reader.expires_at)
        self._live.put(reader.number, window, epoch=reader.epoch, step=reader.step)
        self._end_silent(now)
        if reader.claim is not None:
            self._note(reader.claim, now)
            if self._disagreements.is_due(now):
                self._compare(now)
        if self._history.is_due(now):
            live = self._live
            self._history.add(now, live.rows_per_s, live.mean_wait_share, live.most_wait_share)
            self._judge(now)
        return self.forgotten()

    def _begin(self, rank: int, run: str, now: float) -> Reader:
        """A new reader; those of its rank that are silent from now on are replaced by it."""
        runs = self._runs.setdefault(rank, {})
        for other in list(runs.values()):
            if other.last_at < now:
                other.is_replaced = True
                self._live.drop(other.number)
                self._ended.drop(other.number)
        if len(runs) >= _MAX_RUNS:
            self._forget(next(iter(runs.values())))
            runs = self._runs.setdefault(rank, {})
        self._next_number += 1
        reader = Reader(self._next_number, rank, run)
        self.readers[rank, run] = self._by_number[reader.number] = runs[run] = reader
        return reader

    def _look_at(self, reader: Reader, at: float) -> None:
        reader.due_at = at
        heapq.heappush(self._ends, (at, reader.number))
        if len(self._ends) > 2 * len(self.readers) + _FEW:  # most are of readers that have gone
            self._ends = [(each.due_at, each.number) for each in self.readers.values()]
            heapq.heapify(self._ends)

    def _end_silent(self, now: float) -> None:
        """Ends readers that are silent for too long; forgets replaced and old ones."""
        while self._ends and self._ends[0][0] < now:
            at, number = heapq.heappop(self._ends)
            reader = self._by_number.get(number)
            if reader is None or reader.due_at != at:
                continue
            if reader.expires_at >= now:
                self._look_at(reader, reader.expires_at)
                continue
            runs = self._runs[reader.rank]
            is_newest = next(reversed(runs.values())) is reader
            if reader.is_replaced or not is_newest or now - reader.last_at > HISTORY_S:
                self._forget(reader)
                continue
            self._look_at(reader, reader.last_at + HISTORY_S)
            window = self._live.window(number)
            self._live.drop(number)
            self._ended.put(number, window, epoch=reader.epoch, step=reader.step)

    def _forget(self, reader: Reader) -> None:
        self.drop(reader)
        self._gone.append((reader.rank, reader.run))

    def forgotten(self) -> list[tuple[int, str]]:
        """The readers that were forgotten since the last call, by rank and run."""
        gone, self._gone = self._gone, []
        return gone

    def drop(self, reader: Reader) -> None:
        """Forgets a reader."""
        del self.readers[reader.rank, reader.run], self._by_number[reader.number]
        self._live.drop(reader.number)
        self._ended.drop(reader.number)
        runs = self._runs[reader.rank]
        del runs[reader.run]
        if not runs:
            del self._runs[reader.rank]

    def _note(self, claim: Claim, now: float) -> None:
        """Takes a claim that has reported; forgets processes without a reader."""
        disagreements = self._disagreements
        disagreements.note(claim, now)
        if disagreements.num_processes > 2 * len(self.readers) + _FEW:
            claims = (each.claim for each in self.readers.values())
            disagreements.keep({each.process for each in claims if each is not None})

    def _compare(self, now: float) -> None:
        """Looks whether the ranks that report read by the same terms."""
        claims = (self._by_number[number].claim for number in self._live)
        self._disagreements.compare([each for each in claims if each is not None], now)

    def disagreement(self, run: str) -> pb.Disagreement | None:
        """What the reader of a run must know; None: the ranks agree."""
        told = self._disagreements.told(run)
        return None if told is None else pb.Disagreement(run=run, **told._asdict())

    def _judge(self, now: float) -> Verdict:
        """The verdict now; remembers since when it holds."""
        if self._disagreements.text:
            self._compare(now)  # a rank may have ended since
        text = self._disagreements.text
        verdict = (
            Verdict("ranks disagree", f"ranks disagree: {text}") if text else judge(self._live)
        )
        if not self._verdict.goes_on_as(verdict):
            self._verdict_at = now
        self._verdict = verdict
        return verdict

    # -- descriptions --------------------------------------------------------------------------

    def describe(self, now: float, most_ranks: int) -> pb.JobInfo:
        """The job, without its names and its audit records."""
        self._end_silent(now)
        is_live = len(self._live) > 0
        shown = self._live if is_live else self._ended
        info = pb.JobInfo(
            fingerprint=self._fingerprint,
            view=self._view,
            view_digest=self._view_digest,
            live=is_live,
            world_size=self._world_size,
            num_ranks=shown.num_ranks,
            rows_per_s=self._live.rows_per_s,
            wait_share=self._live.most_wait_share,
            local_share=self._live.local_share,
            verdict=self._judge(now).text if is_live else "",
            verdict_s=now - (self._verdict_at if is_live else self.last_at),
            ranks_disagree=is_live and bool(self._disagreements.text),
        )
        if not is_live:
            end = judge_end(self._rank_ends())
            info.verdict = f"{end.text}, {_ago(now - self.last_at)}"
            info.end = _END_NUMBERS[end.end]
        if len(shown):
            behind = self._by_number[shown.behind()]
            info.epoch, info.step, info.num_steps = behind.epoch, behind.step, behind.num_steps
        if is_live:
            info.nodes.extend(_node_shares(self._live))
        worst = [self._by_number[number] for number in shown.worst(most_ranks)]
        for reader in sorted(worst, key=lambda reader: reader.rank):
            info.ranks.append(_describe_rank(reader, shown.window(reader.number), now))
        for at, rate, mean, most in self._history.since(now - HISTORY_S):
            info.history.add(age_s=now - at, rows_per_s=rate, wait_share=mean, most_wait_share=most)
        return info

    def _rank_ends(self) -> Iterator[RankEnd]:
        """What each rank said last."""
        for rank, runs in self._runs.items():
            last = next(reversed(runs.values()))
            # A reader of an earlier release says no goodbye.
            end: End = "stopped" if last.claim is None else last.end
            yield RankEnd(rank, end, last.epoch, last.step, last.num_steps)

    def put_audit(self, report: pb.ReaderReport, now: float) -> bool:
        """Keeps the audit record of a report in place of an earlier one of its pass, if it can."""
        key = report.run, audit_key(report)
        before = self.audits.get(key)
        if before is not None and report.sent_s < before.sent_s:
            return False
        self.audits.pop(key, None)
        begun_at = now - report.elapsed_s if before is None else before.begun_at
        self.audits[key] = Audit(begun_at, now, report.sent_s, report.audit)
        return True

    def describe_audits(self, now: float) -> Iterator[pb.AuditEntry]:
        """Its audit records."""
        for (run, _), audit in self.audits.items():
            yield pb.AuditEntry(
                run=run,
                begun_s=now - audit.begun_at,
                last_s=now - audit.last_at,
                record=audit.record,
            )


def _sums(report: pb.ReaderReport) -> RankWindow:
    """The numbers of a report; the message would keep the whole heartbeat in memory."""
    nodes = sorted(report.nodes, key=lambda node: -node.rows)[:_NODES_OF_READER]
    return RankWindow(
        rank=report.rank,
        **{name: getattr(report, name) for name in SUMS},
        nodes={
            node.node_id: NodeWindow(**{name: getattr(node, name) for name in NODE_SUMS})
            for node in nodes
        },
    )


def _claim(report: pb.ReaderReport) -> Claim:
    """By which terms a run reads, and in which process."""
    version = "" if report.follows else report.fingerprint.partition("-")[0]
    terms = Terms(
        report.world_size, report.seed, report.batch_size, version, report.order,
        report.view_digest, report.view[:_MOST_OF_VIEW],
    )  # fmt: skip
    return Claim(
        report.run, report.rank, terms, report.process, report.host, report.pid,
        report.process_rank, report.num_processes, report.attempt,
    )  # fmt: skip


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _node_shares(ranks: Ranks) -> Sequence[pb.NodeShare]:
    rows, waits = ranks.node_rows, ranks.node_waits
    all_rows, all_waits = sum(rows.values()), sum(waits.values())
    return [
        pb.NodeShare(
            node_id=node_id,
            rows_share=rows[node_id] / all_rows if all_rows else 0.0,
            wait_share=waits[node_id] / all_waits if all_waits else 0.0,
        )
        for node_id in heapq.nlargest(_MOST_NODES, rows, key=rows.__getitem__)
    ]


def _describe_rank(reader: Reader, window: RankWindow, now: float) -> pb.RankInfo:
    waits = reader.waits.since(now - HISTORY_S)
    return pb.RankInfo(
        rank=reader.rank,
        live=reader.expires_at >= now,
        epoch=reader.epoch,
        step=reader.step,
        rows_per_s=window.rows_per_s,
        wait_share=window.wait_share,
        step_s=window.step_s,
        transform_s=window.per_step(window.transform_s),
        fetch_s=window.per_step(window.fetch_s),
        age_s=now - reader.last_at,
        wait_history=[share for _, share in waits],
        wait_ages_s=[now - at for at, _ in waits],
    )
