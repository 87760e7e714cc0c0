"""Weights that training sets, on a cluster: agreed by all ranks, resumable, and read by audits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, Reading, View
from cache_client import __main__ as program
from cache_client.views.sampling import WeightedView
from cache_protocol.errors import ConfigError, NotReadyError, StaleVersionError
from cache_server import LocalCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_workers")

ROWS, BATCH = 60, 4
FIRST = np.random.default_rng(3).integers(1, 5, ROWS)


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        row = np.arange(ROWS)
        table = pa.table({"row": row * 10, "weight": FIRST})
        CacheClient(running.endpoint).write("prompts", table, target_shard_bytes=200)
        yield running


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]


Reader = Callable[..., CacheIterableDataset]


@pytest.fixture
def reader(nodes: LocalCluster, job: str) -> Reader:
    def make(**arguments: Any) -> CacheIterableDataset:
        given = {
            "batch_size": BATCH,
            "shuffle": True,
            "job": job,
            "reading": Reading(row_ids="id"),
            **arguments,
        }
        given = {"view": View(weights="weight", replacement=False, epoch_rows=32), **given}
        return CacheIterableDataset("prompts", cache=nodes.endpoint, **given)

    return make


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def told(epoch: int, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """What the training of an epoch says of rows: of every third one it has had enough."""
    rows = np.asarray(ids, np.int64)
    return np.where(rows % 3 == epoch % 3, 0.0, 1.0 / (1 + rows % 7))


def together(ranks: Sequence[CacheIterableDataset], epoch: int, read: Sequence[list[int]]) -> None:
    """All ranks set the weights of an epoch, at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        asked = [
            pool.submit(rank.set_weights, epoch, rows, told(epoch, rows), timeout_s=60)
            for rank, rows in zip(ranks, read, strict=True)
        ]
        for each in asked:
            each.result()


def trained(ranks: Sequence[CacheIterableDataset], epochs: range) -> list[list[int]]:
    """What all ranks read in each epoch, in the order of steps, with weights set between them."""
    found = []
    for epoch in epochs:
        for rank in ranks:
            rank.set_epoch(epoch)
        steps = [list(rank) for rank in ranks]
        found.append([row for step in zip(*steps, strict=True) for row in ids_of(step)])
        together(ranks, epoch + 1, [ids_of(own) for own in steps])
    return found


@pytest.mark.parametrize(
    "view",
    [
        View(weights="weight", replacement=False, epoch_rows=32),
        View(weights="weight", where="row <> 0", epoch_rows=96),
    ],
    ids=["once", "drawn"],
)
def test_epochs_are_the_same_for_any_number_of_ranks(reader: Reader, view: View, job: str) -> None:
    expected = trained([reader(view=view, job=f"{job}-1")], range(3))
    ranks = [reader(view=view, rank=rank, world_size=4) for rank in range(4)]
    assert trained(ranks, range(3)) == expected
    assert len({rank.fingerprint for rank in ranks}) == 1
    off = set[int]()
    for epoch, rows in enumerate(expected):
        assert not off & set(rows)  # rows of weight 0 are not read
        off |= {row for row in rows if told(epoch + 1, [row])[0] == 0}
    assert off


def test_states_resume_on_other_ranks_and_workers(reader: Reader) -> None:
    ranks = [reader(rank=rank, world_size=2) for rank in range(2)]
    trained(ranks, range(2))
    at_end = [rank.state_dict() for rank in ranks]
    assert at_end[0] == at_end[1]
    assert at_end[0]["set_weights"][1] == 2
    whole = []
    for rank in ranks:
        rank.set_epoch(2)
    passes = [iter(rank) for rank in ranks]
    for _ in range(2):
        whole += [row for each in passes for row in ids_of([next(each)])]
    inside = ranks[0].state_dict()
    for step in zip(*passes, strict=True):
        whole += ids_of(step)

    resumed = reader(batch_size=5)
    resumed.load_state_dict(inside)
    assert ids_of(resumed.loader(num_workers=2)) == whole[2 * 2 * BATCH :]
    resumed.set_weights(3, whole, np.zeros(len(whole)))
    resumed.set_epoch(3)
    assert resumed.num_samples and not {*ids_of(resumed)} & {*whole}
    begun = reader()
    begun.load_state_dict(at_end[0])
    begun.set_epoch(begun.epoch)
    assert (begun.epoch, ids_of(begun)) == (2, whole)
    begun.set_epoch(1)
    first = ids_of(begun)
    assert first == trained([reader(job="other")], range(2))[1]
    with pytest.raises(ConfigError, match="give them as they were"):
        reader(job="other").load_state_dict(inside)


def test_a_rank_that_does_not_report_is_named_and_the_next_start_goes_on(reader: Reader) -> None:
    alone = reader(rank=1, world_size=3)
    with pytest.raises(NotReadyError, match=r"wait for rank 0, 2 of 3, after 0\.2 s"):
        alone.set_weights(1, [4], [2.0], timeout_s=0.2)

    again = [reader(rank=rank, world_size=2) for rank in range(2)]  # with one rank fewer
    read = [[1, 2], [3]]
    together(again, 1, read)
    expected = reader()
    expected.load_state_dict(again[0].state_dict())
    expected.set_epoch(1)
    assert not set(ids_of(expected)) & {1}  # 1 % 3 == 1, so it was switched off; 4 stayed
    assert again[0].state_dict()["set_weights"] == again[1].state_dict()["set_weights"]


def test_reports_of_a_start_that_was_killed_do_not_count(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(NotReadyError, match="wait for rank 1 of 2"):
        reader(rank=0, world_size=2).set_weights(1, [4, 6], [0.0, 0.0], timeout_s=0.2)

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ranks = [reader(rank=rank, world_size=2) for rank in range(2)]
    together(ranks, 1, [[3], [7]])
    view = ranks[0].slots
    assert isinstance(view, WeightedView)
    weights = np.array(view.later[-1].table.values)
    assert (weights[[3, 7]] == [weights[4] / FIRST[4] / 4, 0]).all()
    assert (weights[[4, 6]] / FIRST[[4, 6]] == weights[5] / FIRST[5]).all()


def test_weights_that_were_set_stay_and_a_later_start_can_go_on_with_them(reader: Reader) -> None:
    first = reader()
    first.set_weights(1, [5, 6], [0.0, 3.0])
    first.set_weights(1, [5, 6], [0.0, 3.0])
    with pytest.raises(ConfigError, match=r"epoch 1 of this job were set before, to other values"):
        first.set_weights(1, [5, 6], [0.0, 4.0])

    later = reader()  # from before the weights were set
    with pytest.raises(ConfigError, match="keep_sealed=True"):
        later.set_weights(1, [5, 7], [1.0, 1.0])
    later.set_weights(1, [5, 7], [1.0, 1.0], keep_sealed=True)
    assert later.state_dict() == first.state_dict()
    later.set_weights(2, [5], [1.0])
    assert later.state_dict() != first.state_dict()
    with pytest.raises(ConfigError, match="epoch 1 of this job were set before"):
        reader().set_weights(1, [8], [1.0])
    with pytest.raises(ConfigError, match="epoch must be at least 2, got 1"):
        later.set_weights(1, [5, 6], [0.0, 3.0])


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_by_them(reader: Reader, persistent: bool, job: str) -> None:
    expected = trained([reader(job=f"{job}-alone")], range(3))
    dataset = reader()
    loader = dataset.loader(num_workers=2, persistent_workers=persistent)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        read = ids_of(loader)
        assert read == expected[epoch]
        dataset.set_weights(epoch + 1, read, told(epoch + 1, read))
    dataset.set_epoch(1)
    assert ids_of(loader) == expected[1]


def test_steps_are_found_and_shown_by_them(
    nodes: LocalCluster, reader: Reader, tmp_path: Any
) -> None:
    dataset = reader()
    epochs = trained([dataset], range(3))
    state = dataset.state_dict()
    found = dataset.steps_of(range(ROWS), state)
    by_place = sorted(zip(found.epochs, found.steps, found.rows, strict=True))
    expected = sorted(
        (epoch, at // BATCH, row)
        for epoch, rows in enumerate(epochs)
        for at, row in enumerate(rows)
    )
    assert by_place == expected

    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))

    def run(*arguments: str) -> Any:
        told = CliRunner().invoke(program.app, [*arguments, "--endpoint", nodes.endpoint, "--json"])
        assert told.exit_code == 0, told.output
        return json.loads(told.output)

    row = epochs[2][5]
    seen = run(
        "seen", "prompts", "--where", f"row = {row * 10}", "--state", str(path),
        "--batch-size", str(BATCH), "--world-size", "1",
    )  # fmt: skip
    told = [(each["epoch"], place["step"]) for each in seen[0]["epochs"] for place in each["given"]]
    assert (2, 5 // BATCH) in told
    assert told == [(epoch, step) for epoch, step, own in expected if own == row]


def test_an_audit_and_the_rows_of_a_step_follow_them(
    nodes: LocalCluster, reader: Reader, job: str
) -> None:
    epochs = trained([reader(audit="reports")], range(2))
    client = CacheClient(nodes.endpoint)

    def reported() -> bool:
        return any(each.name == job and len(each.audits) == 2 for each in client.jobs(audits=True))

    wait_until(reported, 30.0, "both epochs are reported")
    for epoch, rows in enumerate(epochs):
        asked = ("--job", job, "--epoch", str(epoch), "--step", "2", "-o", "json")
        shown = CliRunner().invoke(program.app, ["rows", *asked, "--endpoint", nodes.endpoint])
        assert shown.exit_code == 0, shown.output
        found = [each["row"] for each in json.loads(shown.stdout)]
        assert found == rows[2 * BATCH : 3 * BATCH]
    audit = CliRunner().invoke(program.app, ["audit", job, "--endpoint", nodes.endpoint])
    assert audit.exit_code == 0, audit.output
    assert audit.stdout.count("each of 32 rows of 60 once") == 2


def test_the_curriculum_of_the_guide_runs_as_it_stands(
    nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reading.md").read_text("utf-8")
    (block,) = [
        each for each in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        if "set_weights" in each
    ]  # fmt: skip
    monkeypatch.setenv("CACHE_ENDPOINT", nodes.endpoint)
    read: list[list[int]] = []

    def train_step(batch: Any) -> list[float]:
        read.append(batch["row_id"].tolist())
        return [1.0 if row < 40 else 0.5 for row in read[-1]]

    exec(compile(block.replace("4096", "20"), "reading.md", "exec"), {"train_step": train_step})
    epochs = [set(each) for each in read]
    assert [len(each) for each in epochs] == [20, 20, 20]
    solved = {row for row in epochs[0] if row < 40}
    assert solved and not solved & (epochs[1] | epochs[2])


def test_a_log_that_is_gone_is_named(nodes: LocalCluster, reader: Reader) -> None:
    dataset = reader()
    dataset.set_weights(1, [3], [0.5])
    state = dataset.state_dict()
    CacheClient(nodes.endpoint).drop(state["set_weights"][0])
    with pytest.raises(StaleVersionError, match="was dropped or lost since"):
        reader().load_state_dict(state)


def test_zero_for_all_rows_does_not_count(reader: Reader) -> None:
    dataset = reader()
    for _ in range(2):
        with pytest.raises(ConfigError, match="leave 0 for each row"):
            dataset.set_weights(1, range(ROWS), np.zeros(ROWS))
    dataset.set_weights(1, range(ROWS), np.arange(ROWS) < 3)
    dataset.set_epoch(1)
    assert sorted(ids_of(dataset)) == [0, 1, 2]  # less than epoch_rows
    assert len(dataset) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, [1], [1.0]), "epoch must be at least 1, got 0"),
        ((1, [1, 2], [1.0]), "one weight for each row id"),
        ((1, [ROWS], [1.0]), f"row ids must be from 0 to {ROWS - 1}, got {ROWS}"),
        ((1, [2], [-1.0]), "weights must be from 0 to 1e\\+200, got -1.0 for row 2"),
        ((1, [2], [float("nan")]), "got nan for row 2"),
        ((1, [2.5], [1.0]), "row_ids must be integers"),
        ((1, ["a"], [1.0]), "row_ids must be integers"),
        ((1, [[1]], [[1.0]]), "one weight for each row id"),
    ],
)
def test_bad_weights_are_refused(reader: Reader, arguments: Any, problem: str) -> None:
    dataset = reader()
    ids_of(dataset)
    with pytest.raises(ConfigError, match=problem):
        dataset.set_weights(*arguments)


def test_jobs_that_cannot_set_weights_are_named(nodes: LocalCluster, reader: Reader) -> None:
    with pytest.raises(ConfigError, match=r"needs View\(weights=...\)"):
        reader(view=View(where="row > 3")).set_weights(1, [4], [1.0])
    with pytest.raises(ConfigError, match="does not go with version='each-epoch'"):
        reader(version="each-epoch").set_weights(1, [4], [1.0])
    unnamed = CacheIterableDataset(
        "prompts", batch_size=4, cache=nodes.endpoint, view=View(weights="weight")
    )
    with pytest.raises(ConfigError, match="needs a job of one name"):
        unnamed.set_weights(1, [4], [1.0])
    dataset = reader()
    running = iter(dataset)
    next(running)
    with pytest.raises(ConfigError, match="a pass over epoch 0 runs"):
        dataset.set_weights(1, [4], [1.0])
    del running
    dataset.set_weights(1, [4], [1.0])
    with pytest.raises(ConfigError, match="cannot be amended"):
        dataset.amend()


@pytest.mark.parametrize("batch_format", ["torch", "numpy", "arrow"])
def test_batches_have_the_numbers_of_their_rows(reader: Reader, batch_format: Any) -> None:
    dataset = reader(batch_format=batch_format, view=View(where="row >= 50"), pad_mask="own")
    assert dataset.column_names[-2:] == ["own", "id"]
    for batch in dataset:
        if batch_format == "arrow":
            batch = {name: np.array(batch[name]) for name in batch.schema.names}
        numbers = batch["id"]
        assert str(numbers.dtype).endswith("int64")
        assert (torch.as_tensor(np.asarray(numbers)) * 10).tolist() == batch["row"].tolist()
    with pytest.raises(ConfigError, match="row_ids and pack exclude each other"):
        reader(view=View(pack="row", sequence_length=4))
    with pytest.raises(ConfigError, match="row_ids adds a column 'row'"):
        reader(reading=Reading(row_ids="row"))
    with pytest.raises(ConfigError, match="source 'a' has row_ids"):
        CacheMixture({"a": (reader(batch_format=batch_format), 1)})
