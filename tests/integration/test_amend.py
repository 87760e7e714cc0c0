"""Epochs that are amended in their midst, with real nodes, against counts in plain Python."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from cache_client import CacheClient, CacheIterableDataset, View
from cache_client.order import audit, audit_record
from cache_protocol.errors import ConfigError, StaleVersionError
from cache_server import LocalCluster

VIEWS = {
    "all": (None, lambda row: 1),
    "few": (View(where="label < 2"), lambda row: int(row % 7 < 2)),
    "many": (View(where="label <> 3"), lambda row: int(row % 7 != 3)),
    "half": (
        View(subset=[*range(0, 20, 2), 4, 4]),
        lambda row: 3 if row == 4 else int(row < 20 and row % 2 == 0),
    ),
}
"""Name -> a view, and how often it has a row."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        yield running


class Written:
    """A dataset that grows by appends."""

    def __init__(self, nodes: LocalCluster, name: str, num_rows: int) -> None:
        self.endpoint, self.name, self.num_rows = nodes.endpoint, name, 0
        self._client = CacheClient(nodes.endpoint)
        self.append(num_rows)

    def append(self, num_rows: int) -> None:
        row = np.arange(self.num_rows, self.num_rows + num_rows)
        table = pa.table({"row": row, "label": row % 7})
        self._client.write(self.name, table, append=self.num_rows > 0)
        self.num_rows += num_rows

    def reader(self, **arguments: object) -> CacheIterableDataset:
        given = {"batch_size": 6, "shuffle": True, "seed": 3, "cache": self.endpoint, **arguments}
        return CacheIterableDataset(self.name, **given)  # type: ignore[arg-type]


def rows_of(batches: object, count: int | None = None) -> list[int]:
    rows: list[int] = []
    for number, batch in enumerate(batches, 1):  # type: ignore[arg-type, var-annotated]
        rows += batch["row"].tolist()
        if number == count:
            break
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_amended_epochs_give_each_row_as_often_as_it_is_due(nodes: LocalCluster, seed: int) -> None:
    """Ranks, batch sizes, kills and resumes change on the way; every rank sees one order."""
    draw = random.Random(seed)
    table = Written(nodes, f"any-{seed}", draw.randint(20, 90))
    shuffle, name = draw.random() < 0.8, draw.choice([*VIEWS])
    state: dict[str, object] = {}
    view, due_now, given = VIEWS[name][0], name, Counter[int]()
    for part in range(draw.randint(2, 6)):
        world, batch = draw.choice([(1, 5), (2, 3), (3, 4)])
        ranks = [
            table.reader(
                view=view, shuffle=shuffle, rank=rank, world_size=world, batch_size=batch,
                job=f"any-{seed}-{part}",
            )
            for rank in range(world)
        ]  # fmt: skip
        if state:
            for rank in ranks:
                rank.load_state_dict(json.loads(json.dumps(state)))
        passes = [iter(rank) for rank in ranks]
        for _ in range(draw.randint(1, 3)):
            left = ranks[0].num_samples - ranks[0].state_dict()["rows_consumed"]
            steps = draw.randint(0, min(3, left // (world * batch)))
            for each in passes:
                given.update(rows_of(each, steps) if steps else ())
            if draw.random() < 0.5:
                table.append(draw.randint(1, 30))
            due_now = draw.choice([*VIEWS])
            for rank in ranks:
                rank.amend(view=VIEWS[due_now][0] or View())
            states = [rank.state_dict() for rank in ranks]
            assert all(each == states[0] for each in states)
            assert (states[0]["epoch"], states[0]["rows_consumed"]) == (0, given.total())
        state = states[0]

    whole = [table.reader(view=view, shuffle=shuffle, batch_size=size) for size in (1, 7)]
    for each in whole:
        each.load_state_dict(state)
    one, other = (rows_of(each) for each in whole)
    assert one == other, "another world or batch size has another order"

    due = Counter({row: VIEWS[due_now][1](row) for row in range(table.num_rows)})
    assert Counter(one) == due - given
    for each in whole:
        each.set_epoch(each.epoch + 1)
        assert Counter(rows_of(each)) == +due


@pytest.mark.parametrize("version", ["ready", "each-epoch"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("after", [None, 5])
@pytest.mark.usefixtures("forked_workers")
def test_a_loop_goes_over_by_itself(
    nodes: LocalCluster, num_workers: int, after: int, version: str
) -> None:
    table = Written(nodes, f"loop-{num_workers}-{after}-{version}", 70)
    dataset = table.reader(version=version, job=table.name)
    dataset.load_state_dict(dataset.state_dict())  # from now on workers know the version
    loader = dataset.loader(num_workers=num_workers, persistent_workers=num_workers > 0)
    rows: list[int] = []
    for step, batch in enumerate(loader, 1):
        rows += batch["row"].tolist()
        if step == 3:
            table.append(30)
            dataset.amend(view=View(where="label <> 3"), after=after)
        if step == 8:
            state = dataset.state_dict()
    border = 6 * (after or 3)
    resumed = table.reader()
    resumed.load_state_dict(state)

    assert len(rows) == len({*rows})
    assert {*rows} == {*rows[:border]} | {row for row in range(100) if row % 7 != 3}
    assert all(row % 7 != 3 for row in rows[border:])
    assert rows_of(resumed) == rows[48:]
    assert state["amended"]["parts"] == [[0, 0, 70, 0], [0, border, 100, 1]]
    dataset.set_epoch(1)
    assert sorted(rows_of(loader)) == [row for row in range(100) if row % 7 != 3]


@pytest.mark.usefixtures("forked_workers")
def test_persistent_workers_learn_of_an_amendment_between_two_passes(nodes: LocalCluster) -> None:
    table = Written(nodes, "persistent", 70)
    dataset = table.reader()
    loader = dataset.loader(num_workers=1, persistent_workers=True)
    assert len(rows_of(loader)) == 70
    dataset.amend(view=View(where="label <> 3"))
    assert sorted(rows_of(loader)) == [row for row in range(70) if row % 7 != 3]


def test_all_ranks_take_the_version_of_the_first_that_amends(nodes: LocalCluster) -> None:
    table = Written(nodes, "ranks", 60)
    ranks = [table.reader(rank=rank, world_size=2, job="amended-ranks") for rank in range(2)]
    passes = [iter(rank) for rank in ranks]
    rows = [row for each in passes for row in rows_of(each, 2)]
    table.append(20)
    ranks[0].amend()
    table.append(20)
    ranks[1].amend()

    assert ranks[0].state_dict() == ranks[1].state_dict()
    rows += [row for each in passes for row in rows_of(each)]
    assert sorted(rows) == [*range(80)]


def test_an_audit_proves_each_segment(nodes: LocalCluster) -> None:
    table = Written(nodes, "audited", 60)
    dataset = table.reader(audit="states")
    batches = iter(dataset)
    rows_of(batches, 4)
    first = dataset.state_dict()["audit"]
    table.append(10)
    dataset.amend()
    rows_of(batches)
    second = dataset.state_dict()["audit"]

    records = [audit_record.AuditRecord.from_dict(each) for each in (first, second)]
    segments = audit.audit([audit_record.Evidence(record) for record in records])

    assert [each.outcome for each in segments] == ["proven", "proven"], segments
    assert [each.statement for each in segments] == [
        "each of 24 positions from 0 on once; amended at 24",
        "amended at position 24: each of 46 rows once",
    ]
    missing = audit.audit([audit_record.Evidence(records[1])])
    assert missing[0].outcome == "proven", "of what it has"


def test_a_hundred_amendments_take_four_kilobytes_of_a_state(nodes: LocalCluster) -> None:
    table = Written(nodes, "hundred", 400)
    dataset = table.reader(batch_size=3)
    batches, given = iter(dataset), list[int]()
    views = [View(where=f"label <> {number}") for number in range(7)]
    for number in range(100):
        given += next(batches)["row"].tolist()
        dataset.amend(view=views[number % 7], version="same")
    state = dataset.state_dict()

    assert len(json.dumps(state)) <= 4096
    resumed = table.reader(batch_size=50)
    resumed.load_state_dict(state)
    rest = rows_of(resumed)
    assert Counter(given + rest).most_common(1)[0][1] == 1
    assert {*given, *rest} >= {row for row in range(400) if row % 7 != 1}


def test_what_cannot_be_amended_is_refused_by_name(nodes: LocalCluster) -> None:
    table = Written(nodes, "refused", 40)
    dataset = table.reader()
    for arguments, message in (
        ({"version": "latest"}, "version must be 'newest' or 'same', got 'latest'"),
        ({"view": "label < 2"}, "view must be a View, got 'label < 2'"),
        ({"view": View(group_by="label")}, "group_by='label' cannot be amended"),
        ({"view": View(subset=[*range(1000)])}, "a state could not name it"),
        ({"after": "3"}, "after='3' must be a step of the pass that runs"),
        ({"after": 3}, "after=3 must be a step of the pass that runs"),
    ):
        with pytest.raises(ConfigError) as caught:
            dataset.amend(**arguments)  # type: ignore[arg-type]
        assert message in str(caught.value)
    state = dataset.state_dict()
    CacheClient(nodes.endpoint).write("refused", pa.table({"row": [1], "label": [1]}))
    with pytest.raises(ConfigError, match="does not begin with the 40 rows of"):
        dataset.amend()
    assert dataset.state_dict() == state

    replaced = table.reader()
    with pytest.raises(StaleVersionError):
        replaced.load_state_dict(
            {**state, "fingerprint": "0" * 32, "amended": {"views": [""], "parts": [[0, 0, 40, 0]]}}
        )
    with pytest.raises(ConfigError, match="bad state: amended must"):
        replaced.load_state_dict({**state, "amended": {"views": [""], "parts": [[0, 5, 40, 0]]}})
