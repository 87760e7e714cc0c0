"""The log of the groups in which the shards of a version were sealed."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.versions.sealed_groups import SealedGroups
from tests.conftest import numbered_table
from tests.fake_nodes import (
    FILES,
    ROWS_PER_FILE,
    Clock,
    FakeNode,
    failing,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)

Groups = list[list[int]]


def groups_of(coordinator: Coordinator, name: str = "table") -> Groups:
    return [list(group.shards) for group in coordinator.get(name).log.groups]


@settings(max_examples=30)
@given(st.integers(0, 60), st.integers(1, 20), st.integers())
def test_groups_divide_the_shards_and_grow(num_shards: int, at_once: int, seed: int) -> None:
    order = random.Random(seed).sample(range(num_shards), num_shards)
    log = SealedGroups("log")
    for stop in range(0, num_shards + at_once, at_once):
        group = log.next_group(set(order[:stop]), num_shards)
        assert set(group) <= set(order[:stop]) and list(group) == sorted(group)
        if group:
            assert len(group) * 4 >= log.num_shards or stop >= num_shards
            log = log.extended(group)
        assert not log.next_group(set(order[:stop]), num_shards)
    assert sorted(index for group in log.groups for index in group) == [*range(num_shards)]


def test_ten_thousand_shards_have_few_groups_and_the_first_is_one_shard() -> None:
    log, sealed = SealedGroups("log"), dict[int, None]()
    for index in range(10_000):
        sealed[index] = None
        if group := log.next_group(sealed.keys(), 10_000):
            log = log.extended(group)
    sizes = [len(group) for group in log.groups]
    assert sizes[0] == 1 and sum(sizes) == 10_000 and len(sizes) < 50


def test_a_load_is_logged_as_it_goes_on_and_tells_its_rows_if_the_files_do(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    coordinator.create(spec(source, "filtered", filter="label > 2"))
    assert not coordinator.get("table").log.groups

    for load in ([5], [2], [0, 7]):
        node.beat(load=load)
    node.beat(load=[])
    log, filtered = coordinator.get("table").log, coordinator.get("filtered").log
    assert groups_of(coordinator) == [[5], [2], [0, 7]]
    assert [list(each.num_rows) for each in log.groups] == [[5], [5], [5, 5]]
    assert (log.closed, log.num_rows) == (False, FILES * ROWS_PER_FILE)
    assert not filtered.HasField("num_rows")
    assert all(coordinator.get("table").shards[index].node_ids for index in (5, 2, 0, 7))

    settle(node)
    for name in ("table", "filtered"):
        log = coordinator.get(name).log
        assert groups_of(coordinator, name)[:3] == [[5], [2], [0, 7]]
        assert (log.closed, log.num_rows) == (True, FILES * ROWS_PER_FILE)


@pytest.mark.parametrize("filtered", [False, True])
def test_the_log_outlives_a_restart_and_the_loss_of_a_node(
    source: Path, tmp_path: Path, clock: Clock, filtered: bool
) -> None:
    coordinator = make_coordinator(tmp_path, clock)
    nodes = [FakeNode(coordinator, name) for name in ("one", "two")]
    for node in nodes:
        node.beat()
    coordinator.create(spec(source, filter="label > 2" if filtered else None))
    for load in ([1, 2, 3], [4]):
        for node in nodes:
            node.beat(load=load)
    for node in nodes:
        node.beat(load=[])
    before = coordinator.get("table").log
    assert before.groups

    again = make_coordinator(tmp_path, clock)
    assert again.get("table").log == before
    survivor = nodes[0].restart(again)  # the other one is lost, with its shards
    clock.now += 100
    settle(survivor)
    settle(survivor)

    assert state(again) == "ready"
    after = again.get("table").log
    assert (after.id, [*after.groups][: len(before.groups)]) == (before.id, [*before.groups])
    assert after.closed
    assert make_coordinator(tmp_path, clock).get("table").log == after


def test_another_load_of_the_same_rows_has_another_log(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.beat(load=[3])
    node.failing = failing("the source is gone")
    settle(node)
    first = coordinator.get("table").log
    assert state(coordinator) == "failed" and [list(g.shards) for g in first.groups] == [[3]]

    node.failing = {}
    coordinator.create(spec(source))
    assert not make_coordinator(tmp_path, clock).get("table").log.groups
    settle(node)
    second = coordinator.get("table").log
    assert state(coordinator) == "ready" and second.closed and second.id != first.id

    coordinator.delete("table")
    assert not [*tmp_path.glob("catalogue/.catalogue/*")]


def test_the_shards_of_the_version_before_are_the_first_group(
    coordinator: Coordinator, source: Path
) -> None:
    (node,) = serving(coordinator, spec(source), "one")
    pq.write_table(
        numbered_table(ROWS_PER_FILE, FILES * ROWS_PER_FILE), source / "part-900.parquet"
    )
    coordinator.create(spec(source))
    assert groups_of(coordinator) == [[*range(FILES)]]
    for _ in range(3):
        node.beat(load=range(FILES + 1))
    assert groups_of(coordinator) == [[*range(FILES)], [FILES]]


def test_a_version_of_an_earlier_release_is_one_group(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    serving(coordinator, spec(source), "one")
    (path,) = tmp_path.glob("catalogue/.catalogue/*.log")
    for content in (None, "no log", '{"attempt": 99}'):
        path.unlink() if content is None else path.write_text(content)
        again = make_coordinator(tmp_path, clock)
        FakeNode(again, "one").beat()
        assert groups_of(again) == [[*range(FILES)]] and again.get("table").log.closed


def test_a_group_that_cannot_be_written_is_no_part_of_the_log(
    coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.state.catalogue, "write_log", refuse)
        node.beat(load=[3])
        node.beat(load=[4])
        assert not coordinator.get("table").log.groups
    node.beat(load=[])
    assert groups_of(coordinator) == [[3, 4]]
    assert coordinator.get("table").state == pb.DATASET_STATE_LOADING
