"""Nodes that say they are one and the same, and those that only start again."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import ConfigError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.members.membership import Membership

TIMEOUT_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def membership(tmp_path: Path, clock: Clock) -> Membership:
    return Membership(Catalogue(tmp_path), TIMEOUT_S, clock)


def report(process: str, location: str = "grpc://node-0:50051") -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(node=pb.Node(id="n", flight_location=location, process=process))


def test_a_node_that_was_lost_or_came_back_unsettles_the_cache_for_a_minute(
    membership: Membership, clock: Clock
) -> None:
    membership.apply_heartbeat(report("one"), "node")
    assert membership.is_stable()
    clock.now += TIMEOUT_S + 1
    assert not membership.is_stable()
    clock.now += 60
    assert membership.is_stable()

    membership.apply_heartbeat(report("two"), "node")
    for _ in range(12):
        assert not membership.is_stable()
        clock.now += TIMEOUT_S / 2
        membership.apply_heartbeat(report("two"), "node")
    clock.now += 1
    assert membership.is_stable()


def test_two_nodes_at_one_address_are_named_and_one_of_them_stays(membership: Membership) -> None:
    membership.apply_heartbeat(report("one"), "node")
    membership.apply_heartbeat(report("two"), "node")
    for _ in range(2):
        with pytest.raises(ConfigError, match="two nodes are at grpc://node-0:50051") as caught:
            membership.apply_heartbeat(report("one"), "node")
        assert "--advertise" in str(caught.value)
        assert membership.apply_heartbeat(report("two"), "node").node.process == "two"


def test_two_nodes_of_one_directory_are_named_with_both_addresses(membership: Membership) -> None:
    membership.apply_heartbeat(report("one", "grpc://a:1"), "node")
    membership.apply_heartbeat(report("two", "grpc://b:1"), "node")
    with pytest.raises(ConfigError, match=r"grpc://a:1 and grpc://b:1 .* copy"):
        membership.apply_heartbeat(report("one", "grpc://a:1"), "node")


def test_a_node_that_starts_again_at_its_address_is_the_same_node(membership: Membership) -> None:
    for process in ("one", "two", "three"):
        for _ in range(2):
            assert membership.apply_heartbeat(report(process), "node").node.process == process


def test_of_two_nodes_at_one_address_the_other_is_let_in_when_one_has_ended(
    membership: Membership, clock: Clock
) -> None:
    membership.apply_heartbeat(report("one"), "node")
    membership.apply_heartbeat(report("two"), "node")
    with pytest.raises(ConfigError):
        membership.apply_heartbeat(report("one"), "node")
    clock.now += TIMEOUT_S
    assert membership.apply_heartbeat(report("one"), "node").node.process == "one"
