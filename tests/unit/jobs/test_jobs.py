"""What the coordinator remembers of readers, and how much of it at most."""

from __future__ import annotations

import json

import pytest

from cache_protocol.errors import DatasetNotFoundError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Viewer
from cache_server.jobs import jobs as jobs_module
from cache_server.jobs.history import Ring
from cache_server.jobs.jobs import Jobs
from cache_server.jobs.reports import WaitingReports, checked_report
from cache_server.jobs.shares import Bounds


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(clock: Clock) -> Jobs:
    return Jobs(clock)


def report(rank: int = 0, *, batches: int = 0, **changes: object) -> pb.ReaderReport:
    """A rank that takes 10 batches of 100 rows a second, and waits for half of the time."""
    made = pb.ReaderReport(
        job="train", dataset="t", fingerprint="f", rank=rank, world_size=2, run=f"run-{rank}",
        step=batches, num_steps=1000, batches=batches, rows=100 * batches,
        elapsed_s=batches / 10, waited_s=batches / 20, computed_s=batches / 20,
        fetch_s=batches / 20, expires_s=15, namespace="default", principal="trainer",
    )  # fmt: skip
    for name, value in changes.items():
        if name == "nodes":
            made.nodes.extend(value)  # type: ignore[arg-type]
        else:
            setattr(made, name, value)
    return made


def test_rates_and_shares_are_those_between_two_reports(jobs: Jobs, clock: Clock) -> None:
    jobs.apply([report(0, batches=50), report(1, batches=50)])
    clock.now += 5
    jobs.apply([report(0, batches=100), report(1, batches=90)])

    (job,) = jobs.jobs()

    assert (job.live, job.world_size, job.step) == (True, 2, 90)
    assert job.rows_per_s == pytest.approx(2000)
    assert job.wait_share == pytest.approx(0.5)
    assert job.verdict.startswith("input bound")
    assert [rank.rank for rank in job.ranks] == [0, 1]
    assert len(job.history) == 2


def test_a_job_has_the_view_of_its_last_report(jobs: Jobs) -> None:
    jobs.apply([report(0, view='{"where":"a > 1"}', view_digest="d1"), report(1)])
    jobs.apply([report(0, view='{"where":"a > 1"}', view_digest="d1")])

    (job,) = jobs.jobs()

    assert (job.view, job.view_digest) == ('{"where":"a > 1"}', "d1")


def test_a_reader_without_reports_stops_and_its_job_is_forgotten_after_an_hour(
    jobs: Jobs, clock: Clock
) -> None:
    jobs.apply([report(0, batches=50)])
    clock.now += 16
    (job,) = jobs.jobs()
    assert not job.live
    assert job.verdict == "stopped at step 50 of 1,000 of epoch 0, 16 s ago"

    clock.now += 3600
    jobs.apply([report(0, batches=50, job="other")])

    assert [job.name for job in jobs.jobs()] == ["other"]
    with pytest.raises(DatasetNotFoundError, match=r"no reader of a job 'train' .* jobs: other"):
        jobs.jobs("train")


def test_a_job_that_waited_long_for_its_first_batch_ends_as_soon_as_any_other(
    jobs: Jobs, clock: Clock
) -> None:
    jobs.apply([report(0, expires_s=60)])
    clock.now += 2
    jobs.apply([report(0, batches=20, expires_s=10)])
    clock.now += 11

    (job,) = jobs.jobs()

    assert (job.live, job.verdict) == (False, "stopped at step 20 of 1,000 of epoch 0, 11 s ago")


@pytest.mark.parametrize(
    ("ends", "said", "end"),
    [
        (("FINISHED", "FINISHED"), "finished epoch 4", "FINISHED"),
        (("FINISHED", "STOPPED"), "stopped at step 9 of 1,000 of epoch 4", "STOPPED"),
        (
            ("STOPPED", "FAILED"),
            "failed: rank 1 raised an error at step 9 of 1,000 of epoch 4",
            "FAILED",
        ),
        (
            ("UNSPECIFIED", "FAILED"),
            "crashed or hangs: rank 0 was last heard of at step 9 of 1,000 of epoch 4",
            "UNSPECIFIED",
        ),
    ],
)
def test_a_job_that_finished_and_one_that_crashed_are_told_apart(
    jobs: Jobs, clock: Clock, ends: tuple[str, str], said: str, end: str
) -> None:
    for rank, of_rank in enumerate(ends):
        number = pb.PassEnd.Value(f"PASS_END_{of_rank}")
        jobs.apply([report(rank, batches=9, epoch=4, process=f"p-{rank}", end=number)])
    clock.now += 16

    (job,) = jobs.jobs()

    assert (job.live, job.verdict) == (False, f"{said}, 16 s ago")
    assert job.end == pb.PassEnd.Value(f"PASS_END_{end}")


def test_a_restarted_rank_replaces_its_former_run_at_once(jobs: Jobs, clock: Clock) -> None:
    jobs.apply([report(0, batches=50), report(1, batches=50)])
    clock.now += 5
    jobs.apply([report(0, batches=10, run="again"), report(1, batches=10, run="again-1")])

    (job,) = jobs.jobs()

    assert [(rank.rank, rank.step) for rank in job.ranks] == [(0, 10), (1, 10)]


def test_two_processes_of_one_rank_are_both_shown(jobs: Jobs, clock: Clock) -> None:
    for _ in range(2):
        jobs.apply([report(0, batches=50), report(0, batches=50, run="twin")])
        clock.now += 3

    assert [rank.rank for rank in jobs.jobs()[0].ranks] == [0, 0]


def test_audit_records_are_kept_by_run_and_pass_and_given_when_asked_for(
    jobs: Jobs, clock: Clock
) -> None:
    def audit(number: int, steps: int) -> str:
        text = {"format": 1, "run": "r", "number": number, "dataset": "t", "steps": steps}
        return json.dumps(text, separators=(",", ":"))

    jobs.apply([report(audit=audit(1, 5))])
    clock.now += 5
    jobs.apply([report(audit=audit(1, 9)), report(audit=audit(2, 1))])

    assert not jobs.jobs()[0].audits
    records = [json.loads(entry.record) for entry in jobs.jobs("train", audits=True)[0].audits]
    assert [(each["number"], each["steps"]) for each in records] == [(1, 9), (2, 1)]


def test_a_report_that_comes_after_a_later_one_changes_nothing_but_other_passes(
    jobs: Jobs,
) -> None:
    def audit(number: int, steps: int) -> str:
        return json.dumps({"number": number, "dataset": "t", "steps": steps}, separators=(",", ":"))

    jobs.apply([report(batches=90, sent_s=9, epoch=2, audit=audit(2, 90))])
    jobs.apply([report(batches=50, sent_s=5, epoch=2, audit=audit(2, 50))])  # by another node
    jobs.apply([report(batches=20, sent_s=2, epoch=1, audit=audit(1, 20))])

    (job,) = jobs.jobs("train", audits=True)
    assert (job.epoch, job.step) == (2, 90)
    assert [json.loads(entry.record)["steps"] for entry in job.audits] == [90, 20]


def test_reports_wait_for_the_answer_to_their_heartbeat_the_oldest_first() -> None:
    waiting = WaitingReports()
    waiting.put(report(0, batches=1))
    waiting.put(report(1, batches=2))
    waiting.put(report(0, batches=3))

    assert [each.step for each in waiting.take()] == [2, 3]
    waiting.put(report(1, batches=4))  # and the answer is late
    assert [each.step for each in waiting.take()] == [3, 4]
    waiting.put(report(0, batches=5))
    assert [each.step for each in waiting.drop_taken()] == [3, 4]
    assert [each.step for each in waiting.take()] == [5]


KINDS = {
    "jobs": ("_JOBS", lambda number: {"job": f"job-{number}"}),
    "ranks": ("_READERS", lambda number: {"rank": number, "run": f"run-{number}"}),
    "audit bytes": ("_AUDIT_BYTES", lambda number: {"audit": f'{number:03d},"dataset"'}),
}


def kept(jobs: Jobs, kind: str, namespace: str) -> int:
    found = jobs.jobs(viewer=Viewer(namespace, sees_all=False), audits=True)
    of_job = {"jobs": lambda job: 1, "ranks": lambda job: job.num_ranks}
    return sum(of_job.get(kind, lambda job: len(job.audits))(job) for job in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_principal_that_floods_takes_nothing_from_others(
    jobs: Jobs, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name, changes = KINDS[kind]
    unit = 525 if kind == "audit bytes" else 1
    bounds = Bounds(principal=6 * unit, namespace=10 * unit, total=30 * unit)
    monkeypatch.setattr(jobs_module, name, bounds)
    jobs = Jobs(clock)

    def send(namespace: str, principal: str, numbers: range, prefix: str) -> None:
        for number in numbers:
            clock.now += 0.001
            sent = report(world_size=1000, **{"job": prefix, "run": prefix, **changes(number)})
            sent.job = f"{prefix}-{sent.job}"
            sent.namespace, sent.principal = namespace, principal
            jobs.apply([sent])

    send("team-b", "bob", range(3), "of-bob")
    send("team-a", "alice", range(3), "of-alice")
    send("team-a", "flood", range(200, 260), "flood")

    assert kept(jobs, kind, "team-b") == 3
    of_a = jobs.jobs(viewer=Viewer("team-a", sees_all=False), audits=True)
    assert {job.name.startswith("of-alice") for job in of_a} == {True, False}
    assert kept(jobs, kind, "team-a") == 9
    for number in range(5):  # the namespace is full: whoever holds most loses the oldest
        send("team-a", f"late-{number}", range(300 + number, 301 + number), f"late-{number}")
    assert kept(jobs, kind, "team-a") <= 10
    of_a = jobs.jobs(viewer=Viewer("team-a", sees_all=False), audits=True)
    assert sum(job.name.startswith("late") for job in of_a) == 5
    for number in range(7):
        send(f"team-{number}x", "flood", range(60), "flood")
    assert kept(jobs, kind, "team-b") == 3
    everyone = [f"team-{number}x" for number in range(7)] + ["team-a", "team-b"]
    assert sum(kept(jobs, kind, namespace) for namespace in everyone) <= 30


def test_a_job_is_of_the_namespace_that_reports_it(jobs: Jobs) -> None:
    of_a = {"namespace": "team-a", "dataset": "team-a/houses"}
    jobs.apply([report(0, batches=9, **of_a), report(0, batches=5, **{**of_a, "namespace": "b"})])

    def seen(namespace: str, *, sees_all: bool = False) -> list[tuple[str, str, int]]:
        found = jobs.jobs(viewer=Viewer(namespace, sees_all=sees_all))
        return [(job.name, job.dataset, job.step) for job in found]

    assert seen("team-a") == [("train", "houses", 9)]
    assert seen("b") == [("train", "team-a/houses", 5)]
    assert seen("c") == []
    assert seen("team-a", sees_all=True) == [("b/train", "houses", 5), ("train", "houses", 9)]
    (job,) = jobs.jobs("b/train")
    assert job.namespace == "b"
    with pytest.raises(DatasetNotFoundError, match=r"no reader of a job 'train' .* jobs: none"):
        jobs.jobs("train", viewer=Viewer("c", sees_all=False))


def test_a_principal_that_sends_too_often_is_left_out_for_a_while(
    jobs: Jobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_BURST", 10)
    jobs = Jobs(clock)
    jobs.apply([report(0, batches=number) for number in range(20)])
    jobs.apply([report(1, batches=7, principal="other")])
    assert {rank.rank: rank.step for rank in jobs.jobs()[0].ranks} == {0: 9, 1: 7}
    clock.now += 1
    jobs.apply([report(0, batches=30)])
    assert {rank.rank: rank.step for rank in jobs.jobs()[0].ranks} == {0: 30, 1: 7}


def test_the_ranks_that_wait_most_are_shown_with_the_number_of_all(
    jobs: Jobs, clock: Clock
) -> None:
    for batches in (10, 20):
        clock.now += 20
        jobs.apply(
            report(rank, batches=batches, world_size=300, waited_s=batches * rank, computed_s=1000)
            for rank in range(300)
        )

    (job,) = jobs.jobs()
    assert job.num_ranks == 300
    assert [rank.rank for rank in job.ranks] == list(range(236, 300))
    assert job.wait_share == max(rank.wait_share for rank in job.ranks)
    clock.now += 100
    (job,) = jobs.jobs()
    assert (job.live, job.num_ranks, len(job.ranks)) == (False, 300, 64)


def test_a_reader_that_was_silent_and_reports_again_is_live_until_it_is_silent_again(
    jobs: Jobs, clock: Clock
) -> None:
    for _ in range(3):
        jobs.apply([report(0, batches=5)])
        assert jobs.jobs()[0].live
        clock.now += 16
        assert not jobs.jobs()[0].live


def test_the_history_spans_an_hour_in_a_bounded_number_of_samples() -> None:
    ring = Ring(1, 240)
    for second in range(3 * 3600):
        if ring.is_due(second):
            ring.add(second, second)

    samples = ring.since(2 * 3600)

    assert 100 <= len(samples) <= 240
    assert samples[0][0] <= 2 * 3600 + 32
    assert samples[-1][0] >= 3 * 3600 - 32


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"job": "a b"}, "bad name of a job: 'a b'"),
        ({"job": ""}, "bad name of a job: ''"),
        ({"run": ""}, "bad run: ''"),
        ({"dataset": "a\x1b[2J"}, "bad dataset"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"waited_s": float("nan")}, "waited_s=nan"),
        ({"elapsed_s": -1.0}, "elapsed_s=-1.0"),
        ({"audit": "x" * 40_000}, "at most 16384 bytes"),
        ({"waited_s": 1e16}, "waited_s=1e\\+16"),
        ({"nodes": [pb.NodeReads(node_id="a")] * 65}, "at most 64 nodes, got 65"),
        ({"view": "x" * 4097}, "the report has a bad view"),
        ({"nodes": [pb.NodeReads(node_id="\x1b")]}, "bad node_id"),
        ({"nodes": [pb.NodeReads(node_id="a", rows=2**60)]}, "rows=11529"),
    ],
)
def test_a_report_that_cannot_be_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        checked_report(report(**change))  # type: ignore[arg-type]


def test_a_report_as_readers_send_it_is_taken() -> None:
    assert checked_report(report()) == report()
