"""Ranks of a job that read by other settings are named within seconds, by real readers."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    DatasetSpec,
    NodeUnavailableError,
    RanksDisagreeError,
    View,
)
from cache_client.flight.connections import NodeConnection
from cache_client.job.ranks import find_process
from cache_client.training import opened
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import write_numbered
from tests.waiting import wait_until

LOOK_S = 0.3
WAIT_S = 60.0  # the goal is 5 s, on a machine that does nothing else
MISTAKES = {
    "same-rank": "two processes are rank 0 of 2",
    "world-size": "world_size=",
    "batch-size": "batch_size=",
    "where": "view ",
    "seed": "seed=",
}
CHANGES: dict[str, dict[str, Any]] = {
    "same-rank": {"rank": 0},
    "world-size": {"world_size": 3},
    "batch-size": {"batch_size": 32},
    "where": {"view": View(where="row >= 1")},
    "seed": {"seed": 7},
}


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    client = CacheClient(cluster.endpoint)
    source = write_numbered(tmp_path_factory.mktemp("agreed"), 1600)
    client.load(DatasetSpec("agreed", source))
    yield "agreed"
    client.drop("agreed")


@pytest.fixture
def as_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the next datasets pass for those of another process."""
    name = "first"

    def find(job: str, *, in_worker: bool) -> Any:
        return replace(find_process(job, in_worker=in_worker), name=name, host=f"host-{name}")

    def take(other: str) -> None:
        nonlocal name
        name = other

    monkeypatch.setattr(opened, "find_process", find)
    return take


def batches(dataset: CacheIterableDataset) -> Iterator[Any]:
    for epoch in range(10**9):
        dataset.set_epoch(epoch)
        yield from dataset


def test_real_processes_that_differ_are_named_and_a_restarted_rank_is_not(
    cluster: LocalCluster, client: CacheClient, table: str
) -> None:
    program = Path(__file__).resolve().parents[1] / "disagreeing_ranks.py"
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "CACHE_JOB")
    environment = {name: value for name, value in os.environ.items() if name not in variables}

    def start(side: int) -> subprocess.Popen[str]:
        return forked_python.Popen(
            [sys.executable, str(program), cluster.endpoint, table, str(side)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "PYTHONPATH": str(program.parents[1])},
        )  # fmt: skip

    def shown(name: str) -> str:
        return next((job.verdict for job in client.jobs() if job.name == name), "")

    named = {"no-rank": "two processes are rank 0 of 1", **MISTAKES}
    processes = [start(0), start(1)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "reads\n"
        for job, text in named.items():
            pattern = re.compile(rf"ranks disagree: .*{re.escape(text)}")
            wait_until(
                lambda job=job, p=pattern: p.match(shown(job)), WAIT_S, f"{job} is named", LOOK_S
            )
        assert not shown("restart").startswith("ranks disagree")
        killed = processes.pop()
        killed.kill()
        killed.communicate()
        processes.append(start(1))
        wait_until(
            lambda: (
                len(_job(client, "restart").ranks) == 2
                and _job(client, "restart").ranks[1].step > 0
                and _job(client, "restart").ranks[1].age_s < 3
            ),
            WAIT_S,
            "the restarted rank reports",
            LOOK_S,
        )
        assert not shown("restart").startswith("ranks disagree")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _job(client: CacheClient, name: str) -> Any:
    return client.jobs(name)[0]


def test_one_rank_raises_and_the_other_one_warns_for_each_pair_of_mistakes(
    cluster: LocalCluster,
    table: str,
    as_processes: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = {"world_size": 2, "batch_size": 16, "shuffle": True, "cache": cluster.endpoint}
    pairs = {".".join(pair): pair for pair in combinations(CHANGES, 2)}
    loops: dict[tuple[str, str], Iterator[Any]] = {}
    for job, pair in pairs.items():
        changed = {key: value for name in pair for key, value in CHANGES[name].items()}
        for side, given in (("a", {"rank": 0}), ("b", {"rank": 1, **changed})):
            as_processes(side)
            loops[job, side] = batches(
                CacheIterableDataset(table, **{**right, **given, "job": job})
            )
            next(loops[job, side])
    raised: dict[str, str] = {}

    def warned() -> set[str]:
        return {
            job for job in pairs for line in caplog.messages if f"of job {job} disagree" in line
        }

    def all_are_told() -> bool:
        for (job, side), loop in list(loops.items()):
            try:
                next(loop)
            except RanksDisagreeError as error:
                assert job not in raised, "both ranks raise"
                raised[job] = str(error)
                del loops[job, side]
        return raised.keys() == warned() == pairs.keys()

    with caplog.at_level(logging.WARNING, "cache_client.epochs.reports"):
        wait_until(all_are_told, WAIT_S, "one rank raises, and the other one warns")

    for job, text in raised.items():
        assert "host-a" in text and "host-b" in text and len(text) <= 600
        for name in pairs[job]:
            wanted = "both are rank 0" if name == "same-rank" else MISTAKES[name]
            assert wanted in text


def test_a_reader_goes_on_when_no_node_takes_its_reports(
    cluster: LocalCluster, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise NodeUnavailableError("no answer")

    monkeypatch.setattr(NodeConnection, "report", away)
    dataset = CacheIterableDataset(
        table, batch_size=16, cache=cluster.endpoint, job="away", rank=0, world_size=2
    )

    assert len(list(dataset)) == len(dataset)


def test_it_is_said_once_how_to_give_a_job_a_name(
    cluster: LocalCluster,
    table: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CACHE_JOB", "TRAIN_JOB_NAME", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(opened, "_said", False)

    for _ in range(2):
        dataset = CacheIterableDataset(
            table, batch_size=16, cache=cluster.endpoint, rank=0, world_size=2
        )
        next(iter(dataset))

    said = [each for each in caplog.records if "CACHE_JOB" in each.getMessage()]
    assert [each.levelname for each in said] == ["WARNING"]
