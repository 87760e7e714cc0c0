"""Replays of a job without rows that were forgotten, and models that are trained by them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache_client import CacheClient, CacheIterableDataset, View
from cache_protocol.errors import ConfigError
from cache_server import LocalCluster
from tests.erasing import Erasing, erasing

__all__ = ["erasing"]

ROWS, BATCH = 90, 4
VALUES = np.random.default_rng(7).standard_normal((ROWS, 3))


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster() as running:
        row = np.arange(ROWS)
        columns = {f"x{number}": VALUES[:, number] for number in range(3)}
        table = pa.table({"row": row, "label": row % 7, **columns})
        CacheClient(running.endpoint).write("rows", table)
        CacheClient(running.endpoint).write("groups", table)
        yield running


def reader(nodes: LocalCluster, name: str = "rows", **arguments: Any) -> CacheIterableDataset:
    given = {"batch_size": BATCH, "shuffle": True, "seed": 5, "cache": nodes.endpoint, **arguments}
    return CacheIterableDataset(name, **given)


def attestation(dataset: CacheIterableDataset, number: int) -> str:
    version = dataset.fingerprint.partition("-")[0]
    return json.dumps({"attestation": {"number": number, "versions": {version: {}}}})


class Model:
    """A float64 model, trained by steps of momentum."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 5, dtype=torch.float64),
            torch.nn.Tanh(),
            torch.nn.Linear(5, 1, dtype=torch.float64),
        )
        self.optimiser = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        if not len(batch["row"]):
            return
        inputs = torch.stack([batch[f"x{number}"] for number in range(3)], dim=1)
        loss = (self.net(inputs)[:, 0] - batch["label"].to(torch.float64)).square().sum()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()

    def bits(self) -> list[bytes]:
        return [each.detach().numpy().tobytes() for each in self.net.parameters()]

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"net": self.net.state_dict(), "optimiser": self.optimiser.state_dict()}
        )

    def load(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["net"])
        self.optimiser.load_state_dict(saved["optimiser"])


def plain_batches(order: list[list[int]], fill: bool, gone: set[int]) -> Iterator[list[int]]:
    """The batches of an order, in plain Python, without rows."""
    for epoch in order:
        if fill:
            left = [row for row in epoch if row not in gone]
            yield from (left[at : at + BATCH] for at in range(0, len(left), BATCH))
        else:
            for at in range(0, len(epoch), BATCH):
                yield [row for row in epoch[at : at + BATCH] if row not in gone]


@pytest.mark.parametrize("fill", [False, True])
def test_a_replay_gives_the_weights_of_a_model_that_never_had_the_rows(
    nodes: LocalCluster, erasing: Erasing, fill: bool
) -> None:
    job, model, order = reader(nodes), Model(), list[list[int]]()
    checkpoints = []
    for epoch in range(2):
        job.set_epoch(epoch)
        order.append([])
        for step, batch in enumerate(job):
            model.step(batch)
            order[-1] += batch["row"].tolist()
            if epoch == 0 and step in (3, 6, 9):
                checkpoints.append((job.state_dict(), model.saved()))
    gone = {*order[0][8 * BATCH - 3 : 8 * BATCH + 2], order[0][-1], order[0][50]}
    act = erasing.erase("rows", sorted(gone))

    never = Model()
    for rows in plain_batches(order, fill, gone):
        columns = {f"x{n}": torch.from_numpy(VALUES[rows, n]) for n in range(3)}
        never.step({"row": torch.tensor(rows), "label": torch.tensor(rows) % 7, **columns})

    (state, saved), again = checkpoints[1], Model()
    again.load(saved)
    replay = reader(nodes, replay=state, without=attestation(job, act), fill=fill)
    steps = 0
    for epoch in range(2):
        replay.set_epoch(epoch)
        for batch in replay:
            again.step(batch)
            steps += 1

    assert again.bits() == never.bits()
    assert again.bits() != model.bits()
    if not fill:
        assert steps == 2 * len(job) - 7, "steps are as they were"
    with pytest.raises(ConfigError, match="is not clean: 5 of 7 forgotten rows"):
        reader(nodes, replay=checkpoints[2][0], without=attestation(job, act), fill=fill)


@pytest.mark.parametrize("fill", [False, True])
def test_a_replay_goes_on_after_it_was_interrupted(
    nodes: LocalCluster, erasing: Erasing, fill: bool
) -> None:
    job = reader(nodes)
    state, order = job.state_dict(), [row for batch in job for row in batch["row"].tolist()]
    gone = {*order[10:20], *order[40:46]}
    without = attestation(job, erasing.erase("rows", sorted(gone)))
    replay = reader(nodes, replay=state, without=without, fill=fill)
    batches = iter(replay)
    given = [row for _ in range(4) for row in next(batches)["row"].tolist()]
    halfway = json.loads(json.dumps(replay.state_dict()))
    again = reader(nodes, replay=halfway, without=without, fill=fill, batch_size=7)
    given += [row for batch in again for row in batch["row"].tolist()]

    assert given == [row for row in order if row not in gone]
    ordinary = reader(nodes)
    if fill:
        with pytest.raises(ConfigError, match="whose order only a replay has"):
            ordinary.load_state_dict(halfway)
    with pytest.raises(ConfigError, match="the state is of a replay that is"):
        reader(nodes, replay=halfway, without=without, fill=not fill)


def test_amended_jobs_and_groups_are_replayed(nodes: LocalCluster, erasing: Erasing) -> None:
    job = reader(nodes, "groups", view=View(split={"a": 0.5, "b": 0.5}, part="a"))
    batches = iter(job)
    given = [row for _ in range(3) for row in next(batches)["row"].tolist()]
    job.amend(view=View())
    state = job.state_dict()
    order = [row for batch in batches for row in batch["row"].tolist()]
    gone = {*order[5:20]}
    without = attestation(job, erasing.erase("groups", sorted(gone)))
    for fill in (False, True):
        replay = reader(nodes, "groups", replay=state, without=without, fill=fill)
        rows = [row for batch in replay for row in batch["row"].tolist()]
        assert rows == [row for row in order if row not in gone]
        assert replay.steps_of(given, state).rows.tolist() == given
    with pytest.raises(ConfigError, match="a replay cannot be amended"):
        replay.amend()
    with pytest.raises(ConfigError, match="without must be the attestation"):
        reader(nodes, "groups", replay=state, without="{}")
    with pytest.raises(ConfigError, match="replay, without and fill go together"):
        reader(nodes, "groups", fill=True)
    with pytest.raises(ConfigError, match="erased no rows of version"):
        reader(nodes, "groups", replay=state, without={"number": 99, "versions": []})


def test_steps_of_tells_each_step_that_had_a_row(nodes: LocalCluster) -> None:
    ranks = [reader(nodes, rank=rank, world_size=2, job="steps") for rank in range(2)]
    log = []
    for epoch in range(3):
        for rank, dataset in enumerate(ranks):
            dataset.set_epoch(epoch)
            for step, batch in enumerate(dataset):
                log += [(epoch, step, rank, row) for row in batch["row"].tolist()]
                if epoch == 2 and step == 4:
                    break
    state = ranks[0].state_dict()
    found = ranks[1].steps_of([*range(0, ROWS, 2)], state)

    told = [*zip(*(each.tolist() for each in found), strict=True)]
    assert sorted(told) == sorted(
        (epoch, step, rank, row) for epoch, step, rank, row in log if row % 2 == 0
    )
    with pytest.raises(ConfigError, match="steps_of needs row ids and a state"):
        ranks[0].steps_of(["seven"], state)  # type: ignore[list-item]
