"""What the coordinator remembers of readers, and how much of it at most."""

from __future__ import annotations

import json

import pytest

from cache_protocol.errors import DatasetNotFoundError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination import jobs as jobs_module
from cache_server.coordination.jobs import Jobs, Ring, checked_report


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
        fetch_s=batches / 20, expires_s=15,
    )  # fmt: skip
    for name, value in changes.items():
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


def test_a_reader_without_reports_stops_and_its_job_is_forgotten_after_an_hour(
    jobs: Jobs, clock: Clock
) -> None:
    jobs.apply([report(0, batches=50)])
    clock.now += 16
    (job,) = jobs.jobs()
    assert not job.live
    assert job.verdict == "stopped 16 s ago"

    clock.now += 3600
    jobs.apply([report(0, batches=50, job="other")])

    assert [job.name for job in jobs.jobs()] == ["other"]
    with pytest.raises(DatasetNotFoundError, match=r"no reader of a job 'train' .* jobs: other"):
        jobs.jobs("train")


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


def test_jobs_readers_and_records_are_bounded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_MAX_JOBS", 3)
    monkeypatch.setattr(jobs_module, "_MAX_READERS", 5)
    monkeypatch.setattr(jobs_module, "_MAX_AUDITS", 2)
    for number in range(5):
        jobs.apply([report(job=f"job-{number}", audit=f'{number},"dataset"') for _ in range(4)])
    for rank in range(3):
        jobs.apply([report(rank, job="last", world_size=9, audit=f'{rank},"dataset"')])

    found = jobs.jobs(audits=True)

    assert len(found) <= 3
    assert sum(len(job.ranks) for job in found) <= 5
    assert max(len(job.audits) for job in found) <= 2
    monkeypatch.setattr(jobs_module, "_MAX_AUDIT_BYTES", 100)
    jobs.apply([report(audit="x" * 60), report(audit="y" * 60, job="other")])
    assert sum(len(audit.record) for job in jobs.jobs(audits=True) for audit in job.audits) <= 100


def test_the_history_spans_an_hour_in_a_bounded_number_of_samples() -> None:
    ring: Ring[int] = Ring()
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
    ],
)
def test_a_report_that_cannot_be_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        checked_report(report(**change))  # type: ignore[arg-type]


def test_a_report_as_readers_send_it_is_taken() -> None:
    assert checked_report(report()) == report()
