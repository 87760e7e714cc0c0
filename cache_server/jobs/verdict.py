"""Judges from the reports of all ranks what a training job waits for. Pure.

In synchronous training every step takes as long as its slowest rank. A rank that is late with its
batch makes all others wait in the collective, which looks like computing to them. So the data stall
of a job is that of the rank that waits most for data, and the ranks that wait least for data wait
for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from cache_protocol.errors import some_of
from cache_server.jobs.ranks import Ranks, RankWindow

_STALLED: Final = 0.1  # share of its time that a rank waits for data, in an input bound job
_SLOW: Final = 2.0  # times the waits of the median rank
_SLOW_SHARE: Final = 0.05  # of a step; less is no reason to name a rank
_HOT: Final = 1.3  # times the fair share of a node; hashed shards give up to 1.2
_MOST: Final = 0.65  # of the waits for nodes


Kind = Literal["unknown", "compute bound", "input bound", "slow rank", "ranks disagree"]


@dataclass(frozen=True)
class Verdict:
    """What a job waits for.

    Attributes:
        text: for people.
        ranks: that everyone waits for.
        node: that most waits are for, or that serves most rows.
    """

    kind: Kind
    text: str
    ranks: frozenset[int] = frozenset()
    node: str | None = None

    def goes_on_as(self, later: Verdict) -> bool:
        """Whether a later verdict says the same: numbers change, and some slow ranks may."""
        return (self.kind, self.node) == (later.kind, later.node) and (
            self.ranks == later.ranks or bool(self.ranks & later.ranks)
        )


End = Literal["silent", "failed", "stopped", "finished"]
"""How a pass ended; the worst first. ``silent``: its rank said no goodbye."""


@dataclass(frozen=True)
class RankEnd:
    """What a rank that is silent said last.

    Attributes:
        step, num_steps: of the pass; 0 of them: their number is not known.
    """

    rank: int
    end: End
    epoch: int
    step: int
    num_steps: int

    @property
    def place(self) -> str:
        """Where it was, for people."""
        of = f" of {self.num_steps:,}" if self.num_steps else ""
        return f"step {self.step:,}{of} of epoch {self.epoch}"


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    end: End
    text: str


def judge_end(ranks: Iterable[RankEnd]) -> JobEnd:
    """How a job ended; the rank with the worst end decides."""
    by_end: dict[End, RankEnd] = {}
    for each in ranks:
        by_end.setdefault(each.end, each)
    if (silent := by_end.get("silent")) is not None:
        text = f"crashed or hangs: rank {silent.rank} was last heard of at {silent.place}"
        return JobEnd("silent", text)
    if (failed := by_end.get("failed")) is not None:
        text = f"failed: rank {failed.rank} raised an error at {failed.place}"
        return JobEnd("failed", text)
    if (stopped := by_end.get("stopped")) is not None:
        return JobEnd("stopped", f"stopped at {stopped.place}")
    last = max((each.epoch for each in by_end.values()), default=0)
    return JobEnd("finished", f"finished epoch {last}")


def judge(ranks: Ranks) -> Verdict:
    """The verdict on a job, of its running ranks."""
    worst = ranks.most_waiting()
    if worst is None:
        return Verdict("unknown", "no batch was taken lately")
    if worst.wait_share < _STALLED:
        return Verdict(
            "compute bound", f"compute bound: no rank waits more than {worst.wait_share:.0%}"
        )
    node = _node_to_blame(ranks)
    if node is not None:
        return node
    slow = _slow_ranks(ranks)
    if slow is not None:
        return slow
    return Verdict("input bound", f"input bound: {_cause_for_all(worst)}")


def _node_to_blame(ranks: Ranks) -> Verdict | None:
    """The node that most waits are for, where the waits are for rows of nodes."""
    rows, waits = ranks.node_rows, ranks.node_waits
    all_rows, all_waits = max(1, sum(rows.values())), sum(waits.values())
    if ranks.waits_in_transform or len(rows) < 2 or not all_waits:
        return None
    fair = 1 / len(rows)
    hot, slow = max(rows, key=rows.__getitem__), max(waits, key=waits.__getitem__)
    hot_share, slow_share = rows[hot] / all_rows, waits[slow] / all_waits
    if hot_share > _HOT * fair and hot_share >= 0.5:
        text = f"input bound: node {hot} serves {hot_share:.0%} of the rows"
        return Verdict("input bound", text, node=hot)
    if slow_share > _HOT * fair and slow_share >= _MOST:
        text = (
            f"input bound: node {slow} is slow: {slow_share:.0%} of the waits are for it, and it "
            f"serves {rows[slow] / all_rows:.0%} of the rows"
        )
        return Verdict("input bound", text, node=slow)
    return None


def _slow_ranks(ranks: Ranks) -> Verdict | None:
    """All ranks that wait much longer than the median: two that take turns are one verdict."""
    if (found := ranks.slowest()) is None:
        return None
    slowest, others = found
    waited, much = slowest.per_step(slowest.waited_s), _SLOW_SHARE * slowest.step_s
    least = max(_SLOW * others, others + much)
    if waited <= least:
        return None
    slow = ranks.slower_than(max(least, waited / _SLOW))
    text = f"rank {slowest.rank} is slow: {_cause(slowest)}"
    if len(slow) > 1:
        text = f"ranks {some_of(sorted(slow))} are slow: up to {_cause(slowest)}"
    return Verdict("slow rank", text, ranks=slow)


def _cause_for_all(rank: RankWindow) -> str:
    return f"each rank waits up to {rank.wait_share:.0%}: {_cause(rank)}"


def _cause(rank: RankWindow) -> str:
    transform, fetch = rank.per_step(rank.transform_s), rank.per_step(rank.fetch_s)
    waited = rank.per_step(rank.waited_s)
    if transform >= fetch and transform >= waited / 2:
        return f"{_ms(transform)} a step in transform"
    if fetch >= waited / 2:
        local = rank.local_rows > rank.rows / 2
        return f"{_ms(fetch)} a step for rows of {'local files' if local else 'nodes'}"
    return f"{_ms(waited)} a step until a batch is made"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
