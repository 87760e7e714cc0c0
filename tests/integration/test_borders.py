"""Jobs that take newer versions in the midst of an epoch, and agree on where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client import CacheClient, CacheIterableDataset, View
from cache_client.training import borders
from cache_protocol.errors import ConfigError
from cache_server import LocalCluster
from tests.erasing import Erasing, erasing

__all__ = ["erasing"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        yield running


@pytest.fixture(autouse=True)
def _near_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borders, "STEPS", 4)


def write(nodes: LocalCluster, name: str, start: int, stop: int, *, append: bool) -> None:
    row = np.arange(start, stop)
    CacheClient(nodes.endpoint).write(name, pa.table({"row": row}), append=append)


def reader(nodes: LocalCluster, name: str, **arguments: Any) -> CacheIterableDataset:
    given = {"batch_size": 2, "shuffle": True, "version": "now", "job": name, **arguments}
    return CacheIterableDataset(name, cache=nodes.endpoint, **given)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_that_are_apart_take_a_version_at_one_border(nodes: LocalCluster, world: int) -> None:
    """One rank is steps ahead when rows are appended; the others see them later."""
    name = f"apart-{world}"
    write(nodes, name, 0, 96, append=False)
    ranks = [reader(nodes, name, rank=rank, world_size=world) for rank in range(world)]
    passes = [iter(rank) for rank in ranks]
    rows = [row for _ in range(7) for row in next(passes[0])["row"].tolist()]
    write(nodes, name, 96, 120, append=True)
    for each in reversed(passes):
        rows += [row for batch in each for row in batch["row"].tolist()]

    states = [rank.state_dict() for rank in ranks]
    assert all(state == states[0] for state in states)
    # The first rank had asked for the border of step 8 before the append.
    assert [part[1:3] for part in states[0]["amended"]["parts"]] == [[0, 96], [24 * world, 120]]
    assert sorted(rows) == [*range(120)]
    resumed = [reader(nodes, name, rank=rank, world_size=world) for rank in range(world)]
    for rank in resumed:
        rank.load_state_dict(states[0])
        assert rank.epoch == 1
    given = [row for rank in resumed for batch in rank for row in batch["row"].tolist()]
    assert sorted(given) == [*range(120)]


@pytest.mark.usefixtures("forked_workers")
def test_workers_of_the_loader_go_over_too(nodes: LocalCluster) -> None:
    write(nodes, "workers", 0, 60, append=False)
    dataset, rows = reader(nodes, "workers"), list[int]()
    for step, batch in enumerate(dataset.loader(num_workers=2)):
        rows += batch["row"].tolist()
        if step == 4:
            write(nodes, "workers", 60, 70, append=True)
    assert sorted(rows) == [*range(70)]
    assert dataset.state_dict()["amended"]["parts"][-1][:3] == [0, 16, 70]


def test_a_version_with_other_rows_is_for_the_next_epoch(nodes: LocalCluster) -> None:
    write(nodes, "other", 0, 40, append=False)
    dataset, rows = reader(nodes, "other"), list[int]()
    for step, batch in enumerate(dataset):
        rows += batch["row"].tolist()
        if step == 1:
            write(nodes, "other", 100, 150, append=False)
    assert sorted(rows) == [*range(40)]
    dataset.set_epoch(1)
    assert sorted(row for batch in dataset for row in batch["row"].tolist()) == [*range(100, 150)]
    with pytest.raises(ConfigError, match="cannot be amended"):
        reader(nodes, "other", view=View(group_by="row"))
    with pytest.raises(ConfigError, match="version='now' with several ranks needs a job"):
        reader(nodes, "other", job=None, rank=0, world_size=2)


@pytest.mark.parametrize("version", ["now", "ready"])
def test_erased_rows_leave_the_epoch_at_a_border(
    nodes: LocalCluster, erasing: Erasing, version: str
) -> None:
    """A job of one rank leaves them out from the next step on; with ready, several do so later."""
    name = f"erased-{version}"
    write(nodes, name, 0, 400, append=False)
    dataset, rows, gone = reader(nodes, name, version=version), list[int](), {*range(0, 400, 3)}
    order = [row for batch in reader(nodes, name) for row in batch["row"].tolist()]
    if version == "ready":  # else all rows are fetched before
        erasing.erase(name, [row for row in gone if row not in order[:40]])
    for step, batch in enumerate(dataset):
        rows += batch["row"].tolist()
        if step == 5:
            erasing.erase(name, [row for row in gone if row not in order[:40]])
    # Rows that were fetched before may come.
    assert len({*rows}) == len(rows)
    assert {*rows} >= {*range(400)} - gone
    assert len(rows) < 400
    assert dataset.state_dict()["erased"] == 1
    dataset.set_epoch(1)
    left = sorted({*range(400)} - {row for row in gone if row not in order[:40]})
    assert sorted(row for batch in dataset for row in batch["row"].tolist()) == left
    state = dataset.state_dict()
    again = reader(nodes, name, version=version)
    again.load_state_dict(state)
    assert sorted(row for batch in again for row in batch["row"].tolist()) == left
