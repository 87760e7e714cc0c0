"""Jobs whose rows are erased: before they begin, while they read, and after a state was saved."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, Connection, View
from cache_protocol.errors import ConfigError
from cache_server import LocalCluster
from tests.erasing import Erasing, erasing

__all__ = ["erasing"]

ROWS = 60
VIEWS = {
    "plain": None,
    "where": View(where="label <> 3"),
    "split": View(split={"train": 0.8, "val": 0.2}, part="train"),
    "epoch_rows": View(epoch_rows=50),
    "subset": View(subset=[*range(50, 0, -2), 4]),
    "weights": View(weights="1 + label", replacement=False, epoch_rows=20),
    "per_class": View(per_class="label", epoch_rows=21),
    "group_by": View(group_by="label"),
    "length_buckets": View(length_buckets="label + 1", bucket_rows=16),
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        client = CacheClient(running.endpoint)
        row = np.arange(ROWS)
        client.write("rows", pa.table({"row": row, "label": row % 7}))
        yield running


def rows_of(batches: object, count: int | None = None) -> list[int]:
    rows: list[int] = []
    for number, batch in enumerate(batches, 1):  # type: ignore[arg-type, var-annotated]
        values = batch["row"]
        flat = values if hasattr(values, "tolist") else np.hstack([*values, np.empty(0, np.int64)])
        rows += flat.reshape(-1).astype(int).tolist() if hasattr(flat, "astype") else flat.tolist()
        if number == count:
            break
    return rows


def reader(nodes: LocalCluster, name: str = "rows", **arguments: object) -> CacheIterableDataset:
    given = {"batch_size": 5, "shuffle": True, "seed": 3, "cache": nodes.endpoint, **arguments}
    return CacheIterableDataset(name, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*VIEWS])
def test_a_job_reads_what_it_would_without_the_rows(
    nodes: LocalCluster, erasing: Erasing, name: str
) -> None:
    gone = [0, 3, 17, 18, 40, 59]
    view, style = VIEWS[name], {"batch_format": "numpy"} if name == "group_by" else {}
    before = Counter(rows_of(reader(nodes, view=view, **style)))
    erasing.erase("rows", gone)
    dataset = reader(nodes, view=view, **style)

    for epoch in range(2):
        dataset.set_epoch(epoch)
        rows = rows_of(dataset)
        assert not {*rows} & {*gone}
        if name in ("plain", "where", "split", "subset", "group_by", "length_buckets"):
            assert Counter(rows) == Counter({r: n for r, n in before.items() if r not in gone})
        assert len(rows) > 10
    again = reader(nodes, view=view, **style)
    again.load_state_dict(json.loads(json.dumps(reader(nodes, view=view, **style).state_dict())))
    assert len(rows_of(again)) > 10


@pytest.mark.parametrize("name", [*VIEWS])
def test_a_pass_that_runs_leaves_out_rows_when_they_are_erased(
    nodes: LocalCluster, erasing: Erasing, name: str
) -> None:
    """No batch fails, none has an erased row, and every other row comes."""
    view, style = VIEWS[name], {"batch_format": "numpy"} if name == "group_by" else {}
    whole = Counter(rows_of(reader(nodes, view=view, **style)))
    ranks = [
        reader(nodes, view=view, rank=rank, world_size=2, job=f"runs-{name}", batch_size=3, **style)
        for rank in range(2)
    ]
    gone = [*range(0, ROWS, 4)]
    erasing.erase("rows", gone)
    given, steps = list[int](), [0, 0]
    for number, rank in enumerate(ranks):
        for batch in rank:
            given += rows_of([batch])
            steps[number] += 1

    assert steps == [len(ranks[0])] * 2, "ranks have as many steps as before"
    left = Counter({row: count for row, count in whole.items() if row not in gone})
    # The last short step may give a row to two ranks.
    assert sum((left - Counter(given)).values()) == 0
    assert not {*given} & {*gone}


def test_batches_of_one_size_have_other_rows_in_place(
    nodes: LocalCluster, erasing: Erasing, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, gone, given = reader(nodes, pad_mask="real"), [*range(0, ROWS, 3)], list[int]()
    erasing.erase("rows", gone)
    for batch in dataset:
        assert batch["row"].shape == (5,)
        assert not {*batch["row"].tolist()} & {*gone}
        given += batch["row"][batch["real"]].tolist()
    assert sorted(given) == [row for row in range(ROWS) if row not in gone]
    assert "rows of dataset 'rows' were forgotten: batches leave them out" in caplog.text


@pytest.mark.parametrize("seed", range(8))
def test_an_older_state_gives_each_row_that_is_left_once(
    nodes: LocalCluster, erasing: Erasing, seed: int
) -> None:
    draw = random.Random(seed)
    name = draw.choice(["plain", "split", "epoch_rows", "subset"])
    dataset = reader(nodes, view=VIEWS[name])
    batches, given, gone = iter(dataset), Counter[int](), set[int]()
    for _ in range(4):
        given.update(rows_of(batches, draw.randint(1, 2)))
        state = dataset.state_dict()
        act = draw.sample(range(ROWS), 4)
        erasing.erase("rows", act)
        gone |= {*act}
        dataset = reader(nodes, view=VIEWS[name], batch_size=draw.choice([2, 5]))
        dataset.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(dataset)
    rest = Counter(rows_of(batches))

    due = Counter(rows_of(reader(nodes, view=VIEWS[name])))
    assert not {*due, *rest} & gone
    assert rest == due - given
    ranks = [reader(nodes, view=VIEWS[name], rank=rank, world_size=3) for rank in range(3)]
    shared = Counter[int]()
    for rank in ranks:
        rank.load_state_dict(state)
        shared.update(rows_of(rank))
    assert shared >= rest
    assert {*shared} == {*rest}
    dataset.set_epoch(1)
    assert not {*rows_of(dataset)} & gone


@pytest.mark.parametrize("replacement", [False, True])
def test_even_weights_need_no_values_that_are_gone(
    nodes: LocalCluster, erasing: Erasing, replacement: bool
) -> None:
    view = View(weights="1", replacement=replacement, epoch_rows=30)
    dataset = reader(nodes, view=view)
    batches = iter(dataset)
    given = Counter(rows_of(batches, 2))
    state = json.loads(json.dumps(dataset.state_dict()))
    gone = [*range(0, ROWS, 4)]
    erasing.erase("rows", gone)

    due = Counter(rows_of(reader(nodes, view=view)))
    ranks = [reader(nodes, view=view, rank=rank, world_size=2) for rank in range(2)]
    for resumed in ([reader(nodes, view=view)], ranks):
        for each in resumed:
            each.load_state_dict(state)
        rest = Counter(row for each in resumed for row in rows_of(each))
        assert not {*rest} & {*gone}
        assert {*rest} == {*(due - given)}
    with pytest.raises(ConfigError, match="rows were erased since"):
        other = reader(nodes, view=VIEWS["weights"])
        other.load_state_dict({**state, "fingerprint": other.fingerprint})


def test_weights_that_training_set_stay_when_rows_are_erased(
    nodes: LocalCluster, erasing: Erasing
) -> None:
    view = View(weights="1", replacement=False, epoch_rows=30)
    options: dict[str, Any] = {"view": view, "job": "erased-weights"}
    dataset = reader(nodes, **options)
    dataset.set_weights(1, range(ROWS), np.arange(ROWS) % 7)
    dataset.set_epoch(1)
    whole = rows_of(dataset)
    dataset.set_epoch(0)
    dataset.set_epoch(1)
    batches = iter(dataset)
    begun = rows_of(batches, 2)
    state = json.loads(json.dumps(dataset.state_dict()))
    gone = {*range(0, ROWS, 4)}
    erasing.erase("rows", sorted(gone))

    rest = [row for row in whole[len(begun) :] if row not in gone]
    assert begun == whole[: len(begun)]
    resumed = reader(nodes, batch_size=2, **options)
    resumed.load_state_dict(state)
    assert rows_of(resumed) == rest
    anew = reader(nodes, **options)
    anew.set_weights(1, [], [], keep_sealed=True)
    anew.set_epoch(1)
    assert not {*rows_of(anew)} & gone


def test_conditions_on_values_that_are_gone_are_known_from_the_state(
    nodes: LocalCluster, erasing: Erasing
) -> None:
    """A state that was saved before rows were erased lacks them, and is refused by name."""
    dataset = reader(nodes, view=VIEWS["where"])
    batches = iter(dataset)
    given = rows_of(batches, 2)
    before = dataset.state_dict()
    erasing.erase("rows", [3, 4, 10, 11])
    dataset.amend()
    given += rows_of(batches, 2)
    erasing.erase("rows", [5, 17, 18])
    dataset.amend()
    state = json.loads(json.dumps(dataset.state_dict()))
    rest = rows_of(batches)

    resumed = reader(nodes, view=VIEWS["where"])
    resumed.load_state_dict(state)
    assert rows_of(resumed) == rest
    gone = {3, 4, 10, 11, 5, 17, 18}
    assert sorted({*given, *rest} - gone) == [
        row for row in range(ROWS) if row % 7 != 3 and row not in gone
    ]
    assert len({*given, *rest}) == len(given) + len(rest)
    with pytest.raises(ConfigError, match="rows were erased since, and the condition"):
        resumed.load_state_dict(before)
    resumed.load_state_dict(reader(nodes, view=VIEWS["where"]).state_dict())
    with pytest.raises(ConfigError, match="rows were erased since, and the condition"):
        resumed.load_state_dict(before)


def test_mixtures_leave_out_rows_and_resume(nodes: LocalCluster, erasing: Erasing) -> None:
    cache = Connection(nodes.endpoint, local=False)  # nodes know nothing of what is erased here

    def mixture() -> CacheMixture:
        return CacheMixture(
            {
                "left": (reader(nodes, cache=cache), 2),
                "right": (reader(nodes, seed=9, view=View(fold=(0, 2)), cache=cache), 1),
            },
            source_column="source",
        )

    whole = [row for batch in mixture() for row in batch["row"].tolist()]
    running, gone = mixture(), {*range(0, ROWS, 5)}
    state = running.state_dict(steps=4)
    erasing.erase("rows", sorted(gone))
    assert rows_of(running) == [row for row in whole if row not in gone]
    resumed = mixture()
    assert not {*rows_of(mixture())} & gone
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert rows_of(resumed) == [row for row in whole[20:] if row not in gone]


def test_packed_sequences_have_no_tokens_of_erased_rows(
    nodes: LocalCluster, erasing: Erasing
) -> None:
    tokens = pa.array([[row] * (row % 5 + 1) for row in range(40)], pa.list_(pa.int32()))
    CacheClient(nodes.endpoint).write("texts", pa.table({"tokens": tokens}))
    view = View(pack="tokens", sequence_length=8, pad_token=-1)
    running = reader(nodes, "texts", view=view, batch_size=2)
    gone = [*range(0, 40, 3)]
    erasing.erase("texts", gone)
    for dataset in (running, reader(nodes, "texts", view=view, batch_size=2)):
        found = {token for batch in dataset for token in batch["tokens"].unique().tolist()}
        assert found - {-1} == {*range(40)} - {*gone}
