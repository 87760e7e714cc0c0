"""Audits and ``cachectl rows`` say what jobs with views were given, from their reports alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    CacheMixture,
    ConfigError,
    DatasetSpec,
    StaleVersionError,
    View,
    __main__,
)
from cache_client.cli.step_rows import NotShownError
from cache_client.control.infos import JobInfo
from cache_client.order import view_text
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.waiting import wait_until

ROWS, BATCH, WORLD = 40, 4, 3
WAIT_S = 30.0


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    client = CacheClient(cluster.endpoint)
    source = write_numbered(tmp_path_factory.mktemp("due"), ROWS, files=4)
    client.load(DatasetSpec("due", source, target_shard_bytes=500))
    yield "due"
    client.drop("due")


def dataset(cluster: LocalCluster, rank: int, job: str, **options: Any) -> CacheIterableDataset:
    given: dict[str, Any] = {
        "batch_size": BATCH, "shuffle": True, "seed": 3, "audit": "reports", "world_size": WORLD,
        "columns": ["row"], "cache": cluster.endpoint, "rank": rank, "job": job,
    }  # fmt: skip
    return CacheIterableDataset("due", **(given | options))


def read(each: Any, epoch: int = 1) -> list[list[int]]:
    each.set_epoch(epoch)
    return [batch["row"].tolist() for batch in each]


def run(cluster: LocalCluster, *arguments: str) -> Result:
    return CliRunner().invoke(__main__.app, [*arguments, "--endpoint", cluster.endpoint])


def job_of(client: CacheClient, name: str, records: int) -> JobInfo:
    def reported() -> JobInfo | None:
        found = [job for job in client.jobs(audits=True) if job.name == name]
        is_whole = found and len(found[0].audits) >= records
        return found[0] if is_whole and len(found[0].ranks) == WORLD else None

    return wait_until(reported, WAIT_S, "every rank has reported")


def shown(cluster: LocalCluster, job: str, step: int, *arguments: str) -> list[list[int]]:
    """The rows of a step, by rank."""
    result = run(
        cluster, "rows", "--job", job, "--epoch", "1", "--step", str(step), "-o", "json", *arguments
    )
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads(result.stdout)
    assert all(row["row"] == row["values"]["row"] for row in rows)
    return [[row["row"] for row in rows if row["rank"] == rank] for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("plain", {}, "each of 40 rows once"),
        ("drop", {"drop_last": True}, "each of 36 rows of 40 once; 4 left out by drop_last"),
        ("where", {"view": View(where="row < 9")}, "each of 9 rows of 40 once; 31 not due"),
        ("weights", {"view": View(weights="row")}, "each of 40 draws once; each of 40 rows any"),
        (
            "once",
            {"view": View(weights="row + 1", replacement=False)},
            "each of 20 rows of 40 once; 20 not due in this epoch",
        ),
        (
            "subset",
            {"view": View(subset=[1, 1, 1, 2])},
            "each of 4 samples once; each of 2 rows of 40 1 to 3 times",
        ),
        (
            "long",
            {"view": View(epoch_rows=100)},
            "each of 100 samples once; each of 40 rows 2 to 3 times",
        ),
        ("skip", {"skip_steps": {1: [1]}}, "each of 28 rows of 40 once; 12 left out by skip_steps"),
        (
            "split",
            {"view": View(split={"train": 0.8, "val": 0.2}, part="train")},
            "each of ",
        ),
        ("buckets", {"view": View(length_buckets="row", bucket_rows=8)}, "each of 40 rows once"),
        ("alone", {"view": View(where="row = 3")}, "2 given again to fill the last step"),
    ],
)  # fmt: skip
def test_the_verdict_and_the_rows_of_each_step_are_what_the_ranks_were_given(
    cluster: LocalCluster,
    client: CacheClient,
    table: str,
    name: str,
    options: dict[str, Any],
    text: str,
) -> None:
    job = f"due-{name}"
    given = [read(dataset(cluster, rank, job, **options)) for rank in range(WORLD)]
    info = job_of(client, job, WORLD)

    result = run(cluster, "audit", job)
    assert result.exit_code == 0, result.output
    assert f"epoch 1: proven: {text}" in result.output or f"; {text}" in result.output
    view = options.get("view", View())
    assert info.view == view.text and info.view_digest == view_text.view_digest(view.text)
    assert not info.view or f"view {info.view}" in run(cluster, "top", job, "--once").output
    counts = Counter(row for of_rank in given for batch in of_rank for row in batch)
    if name in ("once", "where", "drop", "plain", "skip", "buckets"):
        assert {*counts.values()} == {1} and f"each of {len(counts)} rows" in result.output
    for step in {0, len(given[0]) - 1}:
        assert shown(cluster, job, step) == [of_rank[step] for of_rank in given]


def test_rows_of_a_mixture_name_the_source(
    cluster: LocalCluster, client: CacheClient, table: str
) -> None:
    given = []
    for rank in range(WORLD):
        views = {"few": View(where="row < 7"), "all": View()}
        sources = {
            name: (dataset(cluster, rank, "due-mixture", view=view), weight)
            for weight, (name, view) in enumerate(views.items(), 1)
        }
        given.append(read(CacheMixture(sources, stop="all_exhausted", draw="random", seed=4)))
    job_of(client, "due-mixture", WORLD)

    assert [shown(cluster, "due-mixture", step) for step in (0, 3)] == [
        [of_rank[step] for of_rank in given] for step in (0, 3)
    ]
    told = json.loads(run(cluster, "audit", "due-mixture", "-o", "json").output)[0]["statement"]
    assert "of 'few': each of 7 rows of 40" in told and "of 'all': each of 40 rows" in told


def test_rows_of_a_job_without_an_audit_need_its_seed_and_batch_size(
    cluster: LocalCluster, client: CacheClient, table: str
) -> None:
    view = View(where="row >= 20")
    given = [
        read(dataset(cluster, rank, "due-off", view=view, audit="off")) for rank in range(WORLD)
    ]
    job_of(client, "due-off", 0)
    how = ("--seed", "3", "--batch-size", str(BATCH), "--shuffle")

    assert shown(cluster, "due-off", 0, *how) == [of_rank[0] for of_rank in given]
    audited = run(cluster, "audit", "due-off")
    assert audited.exit_code == 4
    assert "cannot be shown: there is no record" in audited.output
    refused = run(cluster, "rows", "--job", "due-off", "--step", "0", "--batch-size", "4")
    assert isinstance(refused.exception, ConfigError)
    assert "no audit record of epoch 0" in str(refused.exception)
    noted = run(cluster, "rows", "due", "--step", "0", "--batch-size", "4")
    assert "due-off" in noted.stderr
    with_view = run(
        cluster, "rows", "due", "--step", "0", "--epoch", "1", "--world-size", "3", *how,
        "--view", '{"where": "row >= 20"}', "-o", "json",
    )  # fmt: skip
    assert [row["row"] for row in json.loads(with_view.stdout)] == [
        row for of_rank in given for row in of_rank[0]
    ]


def test_rows_of_a_view_that_is_too_long_to_be_kept_are_shown_if_it_is_given(
    cluster: LocalCluster, client: CacheClient, table: str, tmp_path: Any
) -> None:
    given = [
        read(dataset(cluster, rank, "due-listed", view=View(subset=[*range(20)] * 3)))
        for rank in range(WORLD)
    ]
    job_of(client, "due-listed", WORLD)
    asked = ("rows", "--job", "due-listed", "--epoch", "1", "--step", "0", "-o", "json")

    cut = run(cluster, *asked)
    assert isinstance(cut.exception, NotShownError) and "give it by --view" in str(cut.exception)
    other = run(cluster, *asked, "--view", '{"subset": [1]}')
    assert isinstance(other.exception, NotShownError)
    file = tmp_path / "view.yaml"
    file.write_text(f"subset: {[*range(20)] * 3}")
    assert shown(cluster, "due-listed", 0, "--view", str(file)) == [of_rank[0] for of_rank in given]


@pytest.mark.parametrize(
    ("saved", "loaded", "text"),
    [
        (View(where="row < 9"), View(where="row < 8"), "where is 'row < 9' in the state and"),
        (View(), View(epoch_rows=7), "epoch_rows is not given in the state and 7 here"),
        (
            View(fold=(0, 5)), View(except_fold=(0, 5)),
            r"fold is \[0, 5\] in the state and not given here; except_fold is not given",
        ),
    ],
)  # fmt: skip
def test_a_state_of_another_view_is_refused_with_the_option_that_differs(
    cluster: LocalCluster, table: str, saved: View, loaded: View, text: str
) -> None:
    state = dataset(cluster, 0, "due-state", view=saved).state_dict()
    other = dataset(cluster, 0, "due-state", view=loaded)
    with pytest.raises(StaleVersionError, match=f"the state reads other rows: {text}"):
        other.load_state_dict(json.loads(json.dumps(state)))
