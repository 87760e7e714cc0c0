"""Nodes that are drained, as the coordinator sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.members.drains import find_node
from tests.fake_nodes import (
    SHARDS,
    Clock,
    homes,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
    told,
)


def drains(coordinator: Coordinator) -> dict[str, bool]:
    """The drained nodes, each with whether it is done."""
    return {n.id: n.drain.done for n in coordinator.nodes() if n.HasField("drain")}


def test_a_drained_node_keeps_each_shard_until_another_node_serves_it(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    held = one.holds("table")
    assert held

    assert not coordinator.drain("one").drain.done
    one.beat()
    assert one.holds("table") == held and one.drain.shards_left == len(held)
    copies = [shard for shard in told(coordinator, two).shards if shard.copy_from]
    assert {shard.index for shard in copies} == held
    assert {*copies[0].copy_from} == {one.location} and not any(c.splits for c in copies)
    settle(one, two)

    assert not one.holds("table") and two.holds("table") == SHARDS
    assert drains(coordinator) == {"one": True} and state(coordinator) == "ready"
    coordinator.create(spec(source, name="new"))
    settle(one, two)
    assert two.holds("new") == SHARDS


def test_a_drained_node_takes_its_shards_back_when_it_starts_again_or_is_undrained(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    held = one.holds("table")
    for end in ("start again", "undrain"):
        coordinator.drain("one")
        settle(one, two)
        assert not one.holds("table")
        if end == "start again":
            one.boot = "another"
        else:
            assert not coordinator.undrain("one").HasField("drain")
        settle(one, two)
        assert one.holds("table") == held and not drains(coordinator)


def test_a_drain_that_does_not_fit_is_refused_and_leaves_all_as_it_was(
    coordinator: Coordinator, source: Path
) -> None:
    nodes = serving(coordinator, spec(source), "one", "two", "three")
    for node in nodes:
        node.limit_bytes = 400
    settle(*nodes)
    before = homes(coordinator)
    coordinator.drain("one")
    settle(*nodes)  # eight shards of 100 bytes: two nodes are full now

    with pytest.raises(RequestError, match=r"two cannot be drained: .* three has room for 0"):
        coordinator.drain("two")
    settle(*nodes)
    assert drains(coordinator) == {"one": True} and not nodes[0].holds("table")
    coordinator.undrain("one")
    settle(*nodes)
    assert homes(coordinator) == before


def test_shards_go_to_the_node_with_room_and_stay_there_after_a_restart_of_the_coordinator(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    one, two, three = serving(coordinator, spec(source), "one", "two", "three")
    full = two.holds("table")
    two.limit_bytes = 100 * len(full)  # no room for one more
    settle(one, two, three)
    coordinator.drain("one")
    settle(one, two, three)
    assert two.holds("table") == full and three.holds("table") == SHARDS - full

    again = make_coordinator(tmp_path, clock)
    after = [node.restart(again) for node in (one, two, three)]
    settle(*after)
    assert [node.holds("table") for node in after] == [set(), full, SHARDS - full]
    assert drains(again) == {"one": True}


def test_a_new_coordinator_loads_nothing_that_a_node_may_hold_that_it_has_not_heard(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    nodes = serving(coordinator, spec(source), "one", "two")
    again = make_coordinator(tmp_path, clock)
    one, two = (node.restart(again) for node in nodes)
    one.sealed = {}

    assert not any(shard.splits for shard in told(again, one).shards)
    two.beat()
    assert any(shard.splits for shard in told(again, one).shards)  # they are lost


def test_a_node_that_leaves_is_drained_and_told_why_it_is_not(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    one.leaving = True
    settle(one, two)
    assert one.drain.done and two.holds("table") == SHARDS
    with pytest.raises(RequestError, match="takes shards when it starts again"):
        coordinator.undrain("one")

    two.leaving = True
    assert two.drain.refused == "no other node answers and takes shards"
    settle(one, two)
    assert two.holds("table") == SHARDS


def test_no_node_of_a_cache_that_ends_waits_for_another(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    one.leaving = True
    one.beat()
    assert not one.drain.refused and not one.drain.done
    two.leaving = True
    assert two.drain.refused
    one.beat()
    assert one.drain.refused == "no other node answers and takes shards"


def test_a_node_without_a_shard_of_its_own_leaves_at_once(
    coordinator: Coordinator, source: Path
) -> None:
    one, _ = serving(coordinator, spec(source, replicas=2), "one", "two")
    one.leaving = True
    assert one.drain.done


def test_shards_stay_when_the_nodes_that_take_them_are_lost(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, _ = serving(coordinator, spec(source), "one", "two")
    held = one.holds("table")
    coordinator.drain("one")
    clock.now += 3600.0
    for _ in range(5):
        one.beat()
    assert one.holds("table") >= held


@pytest.mark.parametrize(
    "name", ["a1", "data-cache-1", "data-cache-1.nodes.ns", "data-cache-1.nodes.ns:50051",
             "grpc://data-cache-1.nodes.ns:50051", "data-cache-1.nodes.ns:50052", "machine-1"],
)  # fmt: skip
def test_a_node_is_found_by_each_of_its_names(name: str) -> None:
    nodes = [
        pb.Node(
            id=f"a{index}",
            flight_location=f"grpc://data-cache-{index}.nodes.ns:50051",
            control_location=f"data-cache-{index}.nodes.ns:50052",
            name=f"machine-{index}",
        )
        for index in range(12)
    ]
    assert find_node(nodes, name).id == "a1"
    with pytest.raises(RequestError, match="no node 'data-cache-77'"):
        find_node(nodes, "data-cache-77")


def test_a_name_of_several_nodes_is_refused() -> None:
    nodes = [pb.Node(id=name, flight_location=f"grpc://127.0.0.1:{name}") for name in "12"]
    with pytest.raises(RequestError, match=r"names 2 nodes, 1 at .*: give an id"):
        find_node(nodes, "127.0.0.1")
