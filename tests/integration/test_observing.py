"""What a cache knows of its readers, and what they are proven to have read."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    ConfigError,
    DatasetNotFoundError,
    DatasetSpec,
    __main__,
)
from cache_client.order import order
from cache_protocol.v1 import cache_pb2 as pb
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.job_arguments import grouped
from tests.waiting import wait_until

ROWS, BATCH, WORLD = 1003, 16, 2
WAIT_S = 30.0
PLAN = order.StepPlan(ROWS, WORLD, BATCH)

Ranks = Callable[..., list[CacheIterableDataset]]


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    client = CacheClient(cluster.endpoint)
    source = write_numbered(tmp_path_factory.mktemp("observed"), ROWS, files=4)
    client.load(DatasetSpec("observed", source))
    yield "observed"
    client.drop("observed")


@pytest.fixture(autouse=True)
def _a_rank_is_live_for_longer_than_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_client.epochs.reports._EXPIRES_INTERVALS", 60.0)


@pytest.fixture
def ranks(cluster: LocalCluster, table: str) -> Ranks:
    """Makes the datasets of all ranks of a job."""

    def make(job: str, **options: Any) -> list[CacheIterableDataset]:
        given = {"batch_size": BATCH, "shuffle": True, "columns": ["row"], "audit": "reports"}
        given |= options
        world = given.pop("world_size", WORLD)
        return [
            CacheIterableDataset(
                table,
                **grouped(cache=cluster.endpoint, rank=rank, world_size=world, job=job, **given),
            )
            for rank in range(world)
        ]

    return make


def job_of(client: CacheClient, name: str, *, steps: int = PLAN.num_steps) -> pb.JobInfo:
    """The job, once every rank has reported so many steps."""

    def reported() -> pb.JobInfo | None:
        found = [job for job in client.jobs(audits=True) if job.name == name]
        whole = found and len(found[0].ranks) >= found[0].world_size and found[0].step >= steps
        return found[0] if whole else None

    return wait_until(reported, WAIT_S, "every rank has reported")


def run(cluster: LocalCluster, *arguments: str) -> Result:
    return CliRunner().invoke(__main__.app, [*arguments, "--endpoint", cluster.endpoint])


# -- statistics ------------------------------------------------------------------------------------


def test_statistics_tell_waits_rows_and_where_they_came_from(ranks: Ranks) -> None:
    local, _ = ranks("stats-local")
    remote, _ = ranks("stats-remote", local=False)

    for dataset in (local, remote):
        assert len(list(dataset)) == len(dataset)

    stats = local.stats()
    assert (stats.batches, stats.local_rows, stats.nodes) == (len(local), stats.rows, {})
    assert stats.local_bytes == 8 * stats.rows
    assert 0 < stats.waited_s + stats.computed_s <= stats.elapsed_s
    of_nodes = remote.stats().nodes
    assert sum(node.rows for node in of_nodes.values()) == remote.stats().rows == stats.rows
    assert remote.stats().local_rows == 0
    assert "rows" in str(stats) and "local files" in str(stats)


def test_a_loop_that_only_computes_waits_for_no_negative_time(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_client.epochs.observer._FIRST_TICK_NS", 0)
    monkeypatch.setattr("cache_client.epochs.observer._TICK_NS", 0)
    seen: list[float] = []
    monkeypatch.setattr(
        "cache_client.epochs.observer.Observer._tick",
        lambda self, watched: seen.append(self.stats().waited_s),
    )
    dataset, _ = ranks("computes")

    for _ in dataset:
        sum(range(10_000))

    assert len(seen) == len(dataset)
    assert seen == sorted(seen)
    assert seen[0] >= 0
    assert dataset.stats().computed_s > 0


def test_rows_taken_are_counted_and_not_those_that_were_fetched_ahead(ranks: Ranks) -> None:
    dataset, _ = ranks("stats-partly")
    batches = iter(dataset)
    for _ in range(3):
        next(batches)

    assert (dataset.stats().batches, dataset.stats().rows) == (3, 3 * BATCH)
    assert dataset.stats().local_rows >= 3 * BATCH


@pytest.mark.parametrize("by_loader", [True, False])
def test_statistics_of_workers_are_summed_in_the_training_process(
    ranks: Ranks, by_loader: bool
) -> None:
    dataset, _ = ranks(f"workers-{by_loader}")
    for epoch in range(2):
        dataset.set_epoch(epoch)
        loader = (
            dataset.loader(num_workers=2)
            if by_loader
            else torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
        )
        assert len(list(loader)) == len(dataset)

    stats = wait_until(
        lambda: (s := dataset.stats()).rows >= 2 * (ROWS // 2) and s, WAIT_S, "both workers' counts"
    )
    assert stats.local_rows == stats.rows
    assert (stats.waited_s > 0) is by_loader


def test_the_time_of_a_transform_is_counted(ranks: Ranks) -> None:
    dataset, _ = ranks("transform", transform=lambda batch: sum(range(20_000)) and batch)

    list(dataset)

    assert 0 < dataset.stats().transform_s < dataset.stats().waited_s


# -- reports and audits ----------------------------------------------------------------------------


@pytest.mark.parametrize(("local", "num_workers"), [(True, 0), (True, 2), (False, 0)])
def test_a_job_is_shown_with_its_ranks_and_its_epochs_are_proven(
    cluster: LocalCluster, client: CacheClient, ranks: Ranks, local: bool, num_workers: int
) -> None:
    name = f"job-{local}-{num_workers}"
    for dataset in ranks(name, local=local):
        for epoch in range(2):
            dataset.set_epoch(epoch)
            list(dataset.loader(num_workers=num_workers))

    wait_until(lambda: len(job_of(client, name).audits) == 2 * WORLD, WAIT_S, "all records")

    job = job_of(client, name)
    assert (job.dataset, job.world_size, job.live) == ("observed", WORLD, True)
    assert [rank.rank for rank in job.ranks] == [0, 1]
    assert job.local_share == pytest.approx(float(local))
    if not local:
        assert sum(node.rows_share for node in job.nodes) == pytest.approx(1)
    result = run(cluster, "audit", name)
    assert result.exit_code == 0, result.output
    for epoch in range(2):
        assert f"epoch {epoch}: proven: each of 1,003 rows once" in result.output


def test_a_reader_of_mapped_files_without_a_name_is_shown_by_its_process(
    client: CacheClient, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_client.epochs.reports._INTERVAL_S", 0.0)
    monkeypatch.setattr("cache_client.epochs.reports._REPORTS_PER_S", 1e9)
    variables = ("CACHE_JOB", "TRAIN_JOB_NAME", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
    for name in (*variables, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    (dataset,) = ranks(None, world_size=1)  # type: ignore[arg-type]
    list(dataset)

    def found() -> bool:
        return f"{socket.gethostname()}:{os.getpid()}" in {job.name for job in client.jobs()}

    wait_until(found, WAIT_S, "the reader is shown")


def test_an_elastic_restart_is_proven_from_reports(
    cluster: LocalCluster, client: CacheClient, ranks: Ranks
) -> None:
    states = []
    for dataset in ranks("elastic"):
        batches = iter(dataset)
        for _ in range(10):
            next(batches)
        states.append(dataset.state_dict())
        batches.close()  # type: ignore[attr-defined]
    job_of(client, "elastic", steps=10)
    assert states[0] == states[1]
    for dataset in ranks("elastic", world_size=3):
        dataset.load_state_dict(states[0])
        list(dataset)

    wait_until(lambda: len(job_of(client, "elastic", steps=0).audits) == 5, WAIT_S, "all records")

    result = run(cluster, "audit", "elastic")
    assert result.exit_code == 0, result.output
    assert "epoch 0: proven: each of 1,003 rows once" in result.output


def states_of(datasets: list[CacheIterableDataset], directory: Path, name: str) -> list[Path]:
    """The files with the states of all ranks, JSON and torch in turn."""
    paths = []
    for dataset in datasets:
        path = directory / f"{name}-{dataset.rank}"
        state = {"model": [1.0], "data": {"state": dataset.state_dict()}}
        if dataset.rank % 2:
            torch.save(state, path)
        else:
            path.write_text(json.dumps(state))
        paths.append(path)
    return paths


def audit_states(cluster: LocalCluster, *paths: Path) -> Result:
    return run(cluster, "audit", *(part for path in paths for part in ("--state", str(path))))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_all_ranks_prove_an_epoch_also_over_a_restart(
    cluster: LocalCluster, ranks: Ranks, tmp_path: Path, num_workers: int
) -> None:
    first = ranks("states", audit="states")
    for dataset in first:
        batches = iter(dataset.loader(num_workers=num_workers))
        for _ in range(7):
            next(batches)
        dataset.kept = batches  # type: ignore[attr-defined]
    before = states_of(first, tmp_path, "before")
    after = ranks("states", audit="states")
    for dataset, former in zip(after, first, strict=True):
        dataset.load_state_dict(former.state_dict())
        list(dataset.loader(num_workers=num_workers))

    so_far = audit_states(cluster, *before)
    assert so_far.exit_code == 0, so_far.output
    assert "epoch 0: proven so far: each of 224 rows of 1,003 once" in so_far.output
    whole = audit_states(cluster, *before, *states_of(after, tmp_path, "after"))
    assert whole.exit_code == 0, whole.output
    assert "epoch 0: proven: each of 1,003 rows once" in whole.output
    missing = audit_states(cluster, before[0])
    assert missing.exit_code == 4, missing.output
    assert "epoch 0: cannot be shown" in missing.output


def test_a_state_without_audit_has_no_record_and_is_the_same_on_every_rank(
    cluster: LocalCluster, ranks: Ranks, tmp_path: Path
) -> None:
    datasets = ranks("plain")
    assert datasets[0].state_dict() == datasets[1].state_dict()
    result = audit_states(cluster, *states_of(datasets, tmp_path, "plain"))
    assert isinstance(result.exception, ConfigError)
    assert "make the dataset with audit='states'" in str(result.exception)


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]]) -> None:
    """Makes passes of rank 1 hand out other steps than planned."""
    window = order.StepPlan.window

    def other(self: order.StepPlan, steps: range, rank: int) -> Any:
        if rank != 1 or len(steps) < 2:
            return window(self, steps, rank)
        parts = [window(self, range(step, step + 1), rank) for step in change([*steps])]
        return np.concatenate([part[0] for part in parts]), [part[1][0] for part in parts]

    monkeypatch.setattr(order.StepPlan, "window", other)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("repeated", "rank 1 of 2: the batch of step 8 was given twice"),
        ("lost", "rank 1 of 2: the batch of step 8 was lost"),
        ("same rank", "2 processes were rank 0 of 2 at once"),
        ("seed", "rank 1 read with seed=7 instead of 0: wrong from step 0 on"),
        ("state twice", "a state was applied twice"),
    ],
)
def test_the_audit_finds_and_names(
    cluster: LocalCluster,
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    text: str,
) -> None:
    datasets = ranks("mistake", audit="states")
    files: list[Path] = []
    with monkeypatch.context() as patch:
        if mistake == "repeated":
            tampered(patch, lambda steps: [*steps[:9], 8, *steps[9:-1]])
        if mistake == "lost":
            tampered(patch, lambda steps: [*steps[:8], *steps[9:-1], *steps[-2:]])
        if mistake == "same rank":
            datasets = [ranks("mistake", audit="states")[0] for _ in range(2)]
        if mistake == "seed":
            datasets[1] = ranks("mistake", audit="states", seed=7)[1]
        passes = [(dataset, iter(dataset)) for dataset in datasets]
        for _, batches in passes:  # at once, as processes are
            for _ in range(20):
                next(batches)
        for dataset, batches in passes:
            state = dataset.state_dict()
            if mistake != "state twice":
                list(batches)
                continue
            files += states_of([dataset], tmp_path, "begun")
            for number in range(2):  # the second time is wrong
                dataset.load_state_dict(state)
                list(dataset)
                files += states_of([dataset], tmp_path, f"again-{number}")
    for number, dataset in enumerate(datasets):
        files += states_of([dataset], tmp_path, f"end-{number}") * (mistake != "state twice")

    result = audit_states(cluster, *files)

    assert result.exit_code == 1
    assert text in result.output


# -- skipped steps ---------------------------------------------------------------------------------


def rows_of(dataset: CacheIterableDataset, num_workers: int = 0) -> list[list[int]]:
    return [batch["row"].tolist() for batch in dataset.loader(num_workers=num_workers)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_steps_are_left_out_and_the_rest_is_proven(
    cluster: LocalCluster, ranks: Ranks, tmp_path: Path, num_workers: int
) -> None:
    whole = [rows_of(dataset) for dataset in ranks("whole")]
    skipping = ranks("skipping", skip_steps={0: [3, 4, 10]}, audit="states")

    found = [rows_of(dataset, num_workers) for dataset in skipping]

    for rank in range(WORLD):
        kept = [rows for step, rows in enumerate(whole[rank]) if step not in (3, 4, 10)]
        assert found[rank] == kept
    result = audit_states(cluster, *states_of(skipping, tmp_path, "skipped"))
    assert result.exit_code == 0, result.output
    assert "each of 907 rows of 1,003 once; 96 left out by skip_steps" in result.output
    skipping[0].set_epoch(1)
    assert len(rows_of(skipping[0])) == PLAN.num_steps


def test_a_state_keeps_skipped_steps_and_a_restart_may_add_some(ranks: Ranks) -> None:
    whole = rows_of(ranks("whole", world_size=1)[0])
    (first,) = ranks("first", world_size=1, skip_steps={0: [2]})
    batches = iter(first)
    taken = [next(batches)["row"].tolist() for _ in range(5)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["skipped"] == [[0, 32, 48]]

    (again,) = ranks("again", world_size=1, skip_steps={0: [8]})
    again.load_state_dict(state)

    assert again.steps_left == len(whole) - 5 - 2
    rest = [step for step in range(6, len(whole)) if step != 8]
    assert taken + rows_of(again) == [whole[step] for step in (0, 1, 3, 4, 5, *rest)]
    assert again.state_dict()["skipped"] == [[0, 32, 48], [0, 128, 144]]
    (late,) = ranks("late", world_size=1, skip_steps={0: [4]})
    with pytest.raises(ConfigError, match="positions 64 to 79 of epoch 0"):
        late.load_state_dict(state)


@pytest.mark.parametrize("bad", [{0: [63]}, {-1: [0]}, {0: ["x"]}, [3], {0: 3}])
def test_steps_that_cannot_be_skipped_are_refused(ranks: Ranks, bad: Any) -> None:
    with pytest.raises(ConfigError, match="skip_steps must map epochs to steps"):
        ranks("bad", world_size=1, skip_steps=bad)


# -- commands --------------------------------------------------------------------------------------


def test_rows_of_a_step_are_those_that_the_job_trained_on(
    cluster: LocalCluster, table: str, ranks: Ranks
) -> None:
    dataset = ranks("replay", seed=3)[1]
    dataset.set_epoch(2)
    trained = [batch["row"].tolist() for batch in dataset]

    for step in (0, 5, len(trained) - 1):
        result = run(
            cluster, "rows", table, "--seed", "3", "--epoch", "2", "--world-size", "2",
            "--batch-size", str(BATCH), "--step", str(step), "--rank", "1", "-o", "json",
        )  # fmt: skip
        found = json.loads(result.output)
        assert [each["values"]["row"] for each in found] == trained[step]
        assert [each["row"] for each in found] == trained[step]
        assert {each["rank"] for each in found} == {1}
    refused = run(cluster, "rows", table, "--batch-size", "16", "--step", "9999")
    assert isinstance(refused.exception, ConfigError)


def test_jobs_top_and_doctor_show_the_cache(
    cluster: LocalCluster, client: CacheClient, ranks: Ranks
) -> None:
    for dataset in ranks("shown"):
        list(dataset)
    job_of(client, "shown")

    listed = run(cluster, "jobs")
    assert "shown" in listed.output and "2 of 2" in listed.output
    live = run(cluster, "top", "shown", "--once")
    assert "waits for data" in live.output and "alive" in live.output
    (job,) = json.loads(run(cluster, "top", "shown", "-o", "json").output)
    assert (job["name"], len(job["ranks"])) == ("shown", 2)
    checks = json.loads(run(cluster, "doctor", "--output=json").output)
    outcomes = {check["name"]: check["outcome"] for check in checks}
    assert {"endpoint", "versions", "clock", "nodes", "open files"} <= outcomes.keys()
    assert outcomes["endpoint"] == outcomes["nodes"] == outcomes["clock"] == "ok"
    missing = run(cluster, "top", "no-such-job", "--once", "--timeout-s", "0.1")
    assert isinstance(missing.exception, DatasetNotFoundError)


def test_top_waits_for_the_first_report_of_its_job(
    cluster: LocalCluster, client: CacheClient, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Event()
    ask = CacheClient.jobs

    def jobs(self: CacheClient, name: str = "", **options: Any) -> Any:
        try:
            return ask(self, name, **options)
        finally:
            looked.set()

    monkeypatch.setattr(CacheClient, "jobs", jobs)
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(run, cluster, "top", "comes-late", "-o", "json")
        assert looked.wait(WAIT_S)
        for dataset in ranks("comes-late"):
            list(dataset)

    (job,) = json.loads(shown.result().output)
    assert job["name"] == "comes-late"


def test_the_doctor_says_how_to_mend_an_endpoint_that_does_not_answer() -> None:
    result = CliRunner().invoke(
        __main__.app, ["doctor", "--endpoint", "grpc://127.0.0.1:1", "--timeout-s", "2"]
    )

    assert result.exit_code == 1
    assert "bad" in result.output and "CACHE_ENDPOINT" in result.output


def test_a_dataset_is_loaded_by_name_and_source_without_a_file(
    cluster: LocalCluster, client: CacheClient, tmp_path: Path, dataset_name: str
) -> None:
    source = write_numbered(tmp_path, 50)

    result = run(
        cluster, "load", dataset_name, str(source), "--sql", "select row from source", "-o", "json"
    )

    assert json.loads(result.output)["columns"] == {"row": "int64"}
    assert dataset_name in run(cluster, "ls").output
    assert isinstance(run(cluster, "load", "x.yaml", "--sql", "select 1").exception, ConfigError)
    assert isinstance(run(cluster, "ls", "-w", "-o", "json").exception, ConfigError)
