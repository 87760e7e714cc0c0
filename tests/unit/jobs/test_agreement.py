"""Ranks that read by other settings are named; a restart and other honest jobs are not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.jobs.agreement import Claim, Terms, find_disagreements
from cache_server.jobs.jobs import Jobs

EVERY_S = 0.5  # between two reports of a process
NAMED_S = 3.0  # of the 5 s; the rest is for the heartbeat, and for the loop to look


@dataclass
class Process:
    """A training process that reports from one moment to another.

    Attributes:
        settings: fields of its reports; of each dataset that it reads, if there are several.
        delay_s: from a report to its arrival at the coordinator.
    """

    settings: Mapping[str, Any]
    begins: float = 0.0
    ends: float = 1e9
    delay_s: float = 0.2
    name: str = field(default_factory=lambda: f"{random.getrandbits(64):x}")
    end: pb.PassEnd.ValueType = pb.PASS_END_UNSPECIFIED

    def report(self, at: float, end: pb.PassEnd.ValueType) -> pb.ReaderReport:
        given = {
            "rank": 0, "world_size": 2, "seed": "0", "batch_size": 16, "fingerprint": "f",
            "order": "shuffle=True, drop_last=False", "host": "host-a", "pid": 7,
        } | dict(self.settings)  # fmt: skip
        given.setdefault("run", f"{self.name}-{given['seed']}-{given.get('view_digest', '')}")
        return pb.ReaderReport(
            job="train", dataset="t", namespace="n", principal="p", process=self.name,
            expires_s=15, sent_s=at - self.begins, end=end, **given,
        )  # fmt: skip

    def events(self, until: float) -> Iterator[tuple[float, pb.ReaderReport]]:
        """Its reports, by the time of their arrival."""
        at = self.begins
        while at < min(self.ends, until):
            yield at + self.delay_s, self.report(at, pb.PASS_END_UNSPECIFIED)
            at += EVERY_S
        if self.end != pb.PASS_END_UNSPECIFIED and self.ends < until:
            yield self.ends + self.delay_s, self.report(self.ends, self.end)


class Cache:
    """The coordinator's view of some processes in time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.jobs = Jobs(lambda: self.now)
        self.told: dict[str, tuple[float, pb.Disagreement]] = {}  # by run: the first

    def run(self, *processes: Process, until: float = NAMED_S) -> None:
        events = sorted(
            (event for each in processes for event in each.events(until)), key=lambda e: e[0]
        )
        for self.now, report in events:
            self.jobs.apply([report])
            for told in self.jobs.disagreements([report]):
                known = self.told.get(told.run)
                if known is None or (told.is_late and not known[1].is_late):
                    self.told[told.run] = self.now, told

    @property
    def verdict(self) -> str:
        (job,) = self.jobs.jobs()
        assert job.ranks_disagree is job.verdict.startswith("ranks disagree")
        return job.verdict


HEALTHY: Final = ({"rank": 0, "host": "host-a"}, {"rank": 1, "host": "host-b"})
# What the second of two processes does otherwise, and what its message must name.
MISTAKES: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "same rank": ({"rank": 0}, ("rank 0",)),
    "world size": ({"world_size": 3}, ("world_size=2", "world_size=3")),
    "batch size": ({"batch_size": 32}, ("batch_size=16", "batch_size=32")),
    "seed": ({"seed": "7"}, ("seed=0", "seed=7")),
    "where": (
        {"view": "View(where='a > 1')", "view_digest": "d"},
        ("each row once", "a > 1"),
    ),
    "version": ({"fingerprint": "g-1"}, ("version=f", "version=g")),
    "shuffle": ({"order": "shuffle=False, drop_last=False"}, ("shuffle=True", "shuffle=False")),
    "drop_last": ({"order": "shuffle=True, drop_last=True"}, ("drop_last=True",)),
}
PAIRS: Final = [(one,) for one in MISTAKES] + list(combinations(MISTAKES, 2))


@pytest.mark.parametrize("names", [pytest.param(each, id="+".join(each)) for each in PAIRS])
@pytest.mark.parametrize("later_s", [0.0, 0.3, 70.0])
def test_a_mistake_is_named_with_both_values_and_both_hosts(
    names: tuple[str, ...], later_s: float
) -> None:
    first, second = HEALTHY
    changes = {key: value for name in names for key, value in MISTAKES[name][0].items()}
    if {"shuffle", "drop_last"} <= set(names):
        changes["order"] = "shuffle=False, drop_last=True"
    cache = Cache()
    late = Process({**second, **changes}, begins=later_s)
    early = Process(first, delay_s=0.25)

    cache.run(early, late, until=later_s + NAMED_S)

    told = {disagreement.is_late: (at, disagreement) for at, disagreement in cache.told.values()}
    assert told.keys() == {True, False}
    at, disagreement = told[True]
    assert at <= later_s + NAMED_S
    assert len(disagreement.text) <= 600
    wanted = [text for name in names for text in MISTAKES[name][1]]
    for text in (*wanted, "host-a", "host-b"):
        assert text in disagreement.text
        assert text in cache.verdict


def test_two_processes_without_a_rank_are_named() -> None:
    alone = {"rank": 0, "world_size": 1}
    cache = Cache()

    cache.run(Process({**alone, "pid": 11}), Process({**alone, "pid": 12}, begins=1.0))

    assert cache.verdict == (
        "ranks disagree: two processes are rank 0 of 1: host-a (process 11) and host-a (process 12)"
    )


def test_many_processes_without_a_rank_are_all_told_but_the_first() -> None:
    cache = Cache()
    many = [Process({"world_size": 1}, begins=0.01 * number) for number in range(100)]

    cache.run(*many)

    assert [told.is_late for _, told in cache.told.values()].count(True) == 99
    assert "(98 more processes disagree)" in cache.verdict


def test_the_verdict_stays_red_when_the_late_rank_has_ended_and_not_when_it_came_again() -> None:
    first, second = HEALTHY
    cache = Cache()
    early = Process(first)
    late = Process({**second, "seed": "7"}, begins=1, ends=4, end=pb.PASS_END_FAILED)
    cache.run(early, late, until=30)
    assert "seed=7" in cache.verdict

    cache = Cache()
    cache.run(early, late, Process(second, begins=8), until=30)

    assert not cache.verdict.startswith("ranks disagree")


def test_readers_of_an_earlier_release_are_not_compared() -> None:
    jobs = Cache()
    old = [Process({"seed": seed, "run": seed}, name="") for seed in ("0", "1")]

    jobs.run(*old)

    assert not jobs.told


def test_the_settings_of_processes_that_are_gone_are_forgotten() -> None:
    cache = Cache()
    for number in range(400):
        cache.now += 20
        process = Process({"rank": 0, "world_size": 1, "run": f"r-{number}"}, name=f"p-{number}")
        cache.jobs.apply([process.report(cache.now, pb.PASS_END_UNSPECIFIED)])

    (job,) = cache.jobs._jobs.values()
    assert job._disagreements.num_processes < 100


def test_long_views_are_shown_where_they_differ() -> None:
    condition = " AND ".join(f"column_{number} > 0" for number in range(20))
    cache = Cache()
    first, second = (
        {
            **rank,
            "view": f"View(where='{condition} AND last > {number}')",
            "view_digest": str(number),
        }
        for number, rank in enumerate(HEALTHY)
    )

    cache.run(Process(first), Process(second, begins=1))

    assert "last > 0" in cache.verdict and "last > 1" in cache.verdict
    assert len(cache.verdict) < 600


# -- honest jobs -----------------------------------------------------------------------------------


def restarted_job(number: int) -> list[Process]:
    """Processes end, by a word or without one; others begin, maybe with other settings."""
    draw = random.Random(number)
    counts_restarts = draw.random() < 0.5
    ends = (pb.PASS_END_UNSPECIFIED, pb.PASS_END_FAILED, pb.PASS_END_STOPPED)
    processes: list[Process] = []
    begins, delays = 0.0, [draw.uniform(0, 1.5) for _ in range(3)]  # of nodes
    for attempt in range(draw.randint(2, 3)):
        world, batch_size, seed = draw.randint(1, 4), draw.choice([16, 32]), draw.choice("07")
        last = begins + draw.uniform(1, 8)
        for rank in range(world):
            settings = {
                "rank": rank, "world_size": world, "batch_size": batch_size, "seed": seed,
                "attempt": f"restarts={attempt}" if counts_restarts else "",
                "host": f"host-{rank}",
            }  # fmt: skip
            process = Process(
                settings,
                begins=begins + draw.uniform(0, 1),
                ends=last - draw.uniform(0, 0.9),
                delay_s=draw.choice(delays),
                name=f"{attempt}-{rank}",
                end=draw.choice(ends),
            )
            processes.append(process)
        stop = max(last, *(each.ends for each in processes))
        begins = stop + draw.uniform(0.5, 3)  # a process that starts imports torch first
    return processes


@pytest.mark.parametrize("fifty", range(10))
def test_an_elastic_restart_is_no_contradiction(fifty: int) -> None:
    for number in range(50 * fifty, 50 * fifty + 50):
        cache = Cache()

        cache.run(*restarted_job(number), until=60)

        assert cache.told == {}, number


def part(rank: int, number: int, **changes: Any) -> dict[str, Any]:
    """A reader of some of the rows, in process ``number`` of a launcher with four."""
    return {
        "rank": rank,
        "process_rank": number,
        "num_processes": 4,
        "run": f"r-{number}",
    } | changes


TRAIN, VALID = {"view_digest": "train"}, {"view_digest": "valid", "batch_size": 64}
HONEST: Final[dict[str, list[Process]]] = {
    "one rank is far behind the other": [Process(HEALTHY[0]), Process(HEALTHY[1], begins=20)],
    "training and validation at once": [
        Process({"rank": rank, **of}, name=f"p{rank}", begins=rank + 0.1 * at)
        for rank in range(2)
        for at, of in enumerate((TRAIN, VALID))
    ],
    "another seed in each epoch": [
        Process({"rank": rank, "seed": str(at)}, name=f"p{rank}", begins=4 * at + 2 * rank,
                ends=4 * at + 2 * rank + 4)
        for rank in range(2)
        for at in range(5)
    ],
    "each process evaluates all rows": [
        Process(part(0, number, world_size=1)) for number in range(4)
    ],
    "one process evaluates all rows": [
        Process(part(0, 0, world_size=1)), Process(part(1, 1, world_size=4)),
    ],
    "each process filters its own rows": [
        Process(part(0, number, world_size=1, view_digest=str(number))) for number in range(4)
    ],
    "tensor parallel groups": [Process(part(number // 2, number)) for number in range(4)],
    "each epoch has its version": [
        Process({"rank": rank, "follows": True, "fingerprint": f"f{rank}"}) for rank in range(2)
    ],
    "versions of views": [
        Process({"rank": rank, "fingerprint": f"f-{rank}"}) for rank in range(2)
    ],
    "steps of one job of Slurm": [
        Process({"world_size": 1, "attempt": f"SLURM_STEP_ID={step}"}) for step in range(3)
    ],
    "a notebook that makes its dataset again": [
        Process({"world_size": 1, "run": f"r{at}"}, name="kernel", begins=at) for at in range(3)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_job_is_no_contradiction(name: str) -> None:
    cache = Cache()

    cache.run(*HONEST[name], until=40)

    assert cache.told == {}


def test_a_report_that_arrives_late_does_not_prove_that_its_process_lives() -> None:
    rank = {"rank": 0, "world_size": 1}
    dead = Process(rank, ends=0.9)  # its reports at 0 and 0.5 arrive at 0.2 and, from a node, late
    alive = Process(rank, begins=3.0)
    cache = Cache()
    events = [*dead.events(9), *alive.events(9)]
    first, second = events[:2]

    for cache.now, report in sorted([first, (8.0, second[1]), *events[2:]], key=lambda e: e[0]):
        cache.jobs.apply([report])

    assert not list(cache.jobs.disagreements([report]))


def terms(world_size: int, seed: str) -> Terms:
    return Terms(world_size, seed, 16, "f", "shuffle=True", "")


def test_the_decision_is_a_pure_function_of_claims() -> None:
    def claim(seed: str, begun: float, *sent: float) -> Claim:
        found = Claim("r" + seed, int(seed), terms(2, seed), "p" + seed, "host", 7)
        for at in (begun, *sent):
            found.note(at - begun, at)
        return found

    early, late = claim("0", 0.0, 5.0), claim("1", 2.0)

    (found,) = find_disagreements([late, early])
    assert (found.early, found.late) == (early, late)
    assert not find_disagreements([claim("0", 0.0, 2.2), late])  # not alive long enough
    late.is_over = True
    assert not find_disagreements([late, early])


def test_one_rank_among_three_thousand_is_found() -> None:
    def claim(rank: int, seed: str = "0") -> Claim:
        found = Claim(f"r{rank}", rank, terms(3_000, seed), f"p{rank}", "host", 7)
        for sent_s in (0.0, 100.0):
            found.note(sent_s, sent_s + 0.001 * rank)
        return found

    claims = [claim(rank) for rank in range(2_999)]
    assert not find_disagreements(claims)

    late = claim(2_999, seed="7")

    (found,) = find_disagreements([late, *claims])
    assert found.late is late
