"""Datasets that fit, and those that are refused before the load because they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from cache_server.plan.pinned_version import plan_version
from tests.fake_nodes import FILES, TIMEOUT_S, Clock, FakeNode, settle, spec, state


def test_a_dataset_that_cannot_fit_is_refused_before_the_load_with_the_numbers(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "small", limit_bytes=1000)
    node.beat()

    with pytest.raises(LoadError) as caught:
        coordinator.create(spec(source))

    for quote in ("'table'", "small", "limit of 1000", "replicas=1"):
        assert quote in str(caught.value)
    assert "lost" not in str(caught.value)
    assert coordinator.datasets() == []
    assert node.beat() == {}


def test_what_a_filter_keeps_is_not_known_so_it_is_not_refused_beforehand(
    coordinator: Coordinator, source: Path
) -> None:
    FakeNode(coordinator, "small", limit_bytes=1000).beat()

    info = coordinator.create(spec(source, filter="row < 3"))

    assert info.state == pb.DATASET_STATE_LOADING


def test_a_dataset_that_does_not_fit_while_a_node_is_lost_is_refused_with_its_name(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    size = sum(shard.estimated_bytes for shard in plan_version(spec(source)).version.shards)
    one, two = (FakeNode(coordinator, name, limit_bytes=size * 3 // 4) for name in ("one", "two"))
    settle(one, two)
    clock.now += TIMEOUT_S + 1
    one.beat()

    with pytest.raises(LoadError, match=r"cannot fit.*; node two is lost$"):
        coordinator.create(spec(source))

    two.beat()
    assert coordinator.create(spec(source)).state == pb.DATASET_STATE_LOADING


def test_a_dataset_that_fits_on_two_nodes_but_not_with_two_replicas_is_refused(
    coordinator: Coordinator, source: Path
) -> None:
    one_copy = sum(shard.estimated_bytes for shard in plan_version(spec(source)).version.shards)
    for name in ("one", "two"):
        FakeNode(coordinator, name, limit_bytes=one_copy * 3 // 4).beat()

    coordinator.create(spec(source))
    with pytest.raises(LoadError, match="replicas=2"):
        coordinator.create(spec(source, name="twice", replicas=2))

    assert [info.spec.name for info in coordinator.datasets()] == ["table"]


def test_more_replicas_of_a_dataset_that_is_there_are_refused_where_there_is_no_room(
    coordinator: Coordinator, source: Path
) -> None:
    nodes = [FakeNode(coordinator, name, limit_bytes=FILES * 100 - 1) for name in ("one", "two")]
    settle(*nodes)
    coordinator.create(spec(source, filter="row < 1000"))  # what comes of it is not known before
    settle(*nodes)
    assert state(coordinator) == "ready"

    with pytest.raises(LoadError, match=r"cannot fit.*replicas=2"):
        coordinator.create(spec(source, filter="row < 1000", replicas=2))

    assert coordinator.get("table").spec.replicas == 1


def test_a_shard_larger_than_every_node_is_refused_with_the_option_that_makes_it_smaller(
    coordinator: Coordinator, source: Path
) -> None:
    FakeNode(coordinator, "one", limit_bytes=50).beat()

    with pytest.raises(LoadError, match="needs a smaller target_shard_bytes: no number of nodes"):
        coordinator.create(DatasetSpec("table", source, target_shard_bytes=10**6))


def test_a_load_under_way_takes_the_room_that_it_is_going_to_need(
    coordinator: Coordinator, source: Path
) -> None:
    size = sum(shard.estimated_bytes for shard in plan_version(spec(source)).version.shards)
    node = FakeNode(coordinator, "one", limit_bytes=size * 3 // 2)
    node.beat()
    coordinator.create(spec(source))

    with pytest.raises(LoadError, match=rf"'other' cannot fit.* holds 0 and waits for {size} of"):
        coordinator.create(spec(source, name="other"))

    coordinator.delete("table")
    assert coordinator.create(spec(source, name="other")).spec.name == "other"


def test_a_failed_dataset_makes_room_for_itself_when_it_is_loaded_again(
    coordinator: Coordinator, source: Path
) -> None:
    size = sum(shard.estimated_bytes for shard in plan_version(spec(source)).version.shards)
    node = FakeNode(coordinator, "one", limit_bytes=size)
    node.shard_bytes = size // FILES
    settle(node)
    node.failing = {("table", 7): "the source is gone"}
    coordinator.create(spec(source))
    for _ in range(2):
        node.beat()
    assert state(coordinator) == "failed"

    node.failing = {}
    coordinator.create(spec(source))
    settle(node)

    assert state(coordinator) == "ready"


def test_what_is_dropped_and_loaded_again_takes_room_once_while_its_nodes_know_neither(
    coordinator: Coordinator, source: Path
) -> None:
    size = sum(shard.estimated_bytes for shard in plan_version(spec(source)).version.shards)
    node = FakeNode(coordinator, "one", limit_bytes=2 * size)
    node.shard_bytes = size // FILES
    node.beat()
    coordinator.create(spec(source))
    settle(node)

    coordinator.delete("table")
    coordinator.create(spec(source))
    coordinator.create(spec(source, name="other"))
    settle(node)

    assert [info.state for info in coordinator.datasets()] == [pb.DATASET_STATE_READY] * 2
