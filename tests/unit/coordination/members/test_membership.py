"""Which nodes there are: who is lost, who comes back, who is presumed alive."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from cache_protocol.errors import ConfigError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.members import membership
from cache_server.node.links.heartbeat_messages import ReportEncoder
from tests.fake_nodes import (
    FILES,
    ROWS_PER_FILE,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    homes,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)


def test_a_node_that_is_silent_longer_than_the_timeout_is_lost_and_its_shards_move(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, _two = serving(coordinator, spec(source), "one", "two")
    kept = one.holds("table")

    clock.now += TIMEOUT_S
    assert one.beat()["table"] == kept  # not yet
    clock.now += 0.001
    assert {node.id: node.alive for node in coordinator.nodes()} == {"one": True, "two": False}
    assert state(coordinator) == "loading"
    assert one.beat()["table"] == SHARDS
    settle(one)

    assert state(coordinator) == "ready"
    assert homes(coordinator) == [["one"]] * FILES


def test_a_restarted_coordinator_presumes_its_nodes_alive_and_moves_nothing(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    share = {node.id: node.holds("table") for node in (one, two)}

    again = make_coordinator(tmp_path, clock)
    one = one.restart(again)
    assert one.beat()["table"] == share["one"]  # two has not reported, and is not lost
    assert state(again) == "loading"
    two = two.restart(again)
    assert two.beat()["table"] == share["two"]
    one.beat()
    two.beat()

    assert state(again) == "ready"
    assert again.get("table").num_rows == FILES * ROWS_PER_FILE
    assert one.loads == two.loads == 0


def test_two_nodes_of_one_id_are_told_from_one_that_moved(
    coordinator: Coordinator, clock: Clock
) -> None:
    node, elsewhere = (FakeNode(coordinator, "one", by=ANYONE) for _ in range(2))
    elsewhere.location = "grpc://elsewhere:1"
    node.beat()
    elsewhere.beat()
    for _ in range(3):
        elsewhere.beat()
        with pytest.raises(ConfigError, match=r"one:1 and grpc://elsewhere:1.*id one.*\.node-id"):
            node.beat()
        clock.now += TIMEOUT_S * 0.9
    assert [found.flight_location for found in coordinator.nodes()] == ["grpc://elsewhere:1"]

    # The other one has ended, and this one, which never stopped asking, may take its place.
    for _ in range(int(TIMEOUT_S * 2)):
        clock.now += 0.5
        with contextlib.suppress(ConfigError):
            node.beat()
    node.beat()
    assert [found.flight_location for found in coordinator.nodes()] == ["grpc://one:1"]


def test_nodes_report_less_often_as_they_get_more(tmp_path: Path, clock: Clock) -> None:
    members = membership.Membership(Catalogue(tmp_path), TIMEOUT_S, clock)
    assert members.interval_s(0.5) == 0.5
    for number, interval_s in ((200, 1.0), (600, 3.0), (1_000, TIMEOUT_S / 2.5)):
        for node in range(len(members.members), number):
            request = pb.HeartbeatRequest(node=pb.Node(id=f"node-{node}"))
            members.apply_heartbeat(request, "", is_own=False)
        assert members.interval_s(0.5) == interval_s
    assert members.interval_s(60.0) == 60.0


def test_nodes_report_more_often_while_one_of_them_is_about_to_be_lost(
    tmp_path: Path, clock: Clock
) -> None:
    members = membership.Membership(Catalogue(tmp_path), TIMEOUT_S, clock)

    def report(nodes: range) -> None:
        for node in nodes:
            request = pb.HeartbeatRequest(node=pb.Node(id=f"node-{node}"))
            members.apply_heartbeat(request, "", is_own=False)

    report(range(600))
    clock.now += 3.0
    report(range(1, 600))
    assert members.interval_s(0.5) == 3.0
    clock.now += 3.0
    assert members.interval_s(0.5) == TIMEOUT_S / 5
    report(range(1, 600))
    clock.now += TIMEOUT_S - 5.9
    assert "node-0" not in members.alive()
    assert members.interval_s(0.5) == 3.0


def test_a_lost_member_gives_its_place_to_a_new_node_and_a_live_one_does_not(
    coordinator: Coordinator, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_MEMBERS", 3)
    nodes = [FakeNode(coordinator, name) for name in ("one", "two", "three")]
    settle(*nodes)
    with pytest.raises(ConfigError, match="node four cannot join: a cache has at most 3 members"):
        FakeNode(coordinator, "four").beat()
    clock.now += TIMEOUT_S + 1
    for node in nodes[1:]:
        node.beat()

    FakeNode(coordinator, "four").beat()

    assert {node.id for node in coordinator.nodes()} == {"two", "three", "four"}


def test_a_machine_has_a_bounded_number_of_places_also_for_members_that_move_to_it(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_MEMBERS_OF_HOST", 2)

    def beat(name: str, host: str, process: str = "one") -> None:
        node = pb.Node(id=name, flight_location=f"grpc://{host}:1", process=process)
        coordinator.heartbeat(pb.HeartbeatRequest(node=node), by=ANYONE, host=host)

    beat("a", "machine-1")
    beat("b", "machine-1")
    beat("a", "machine-1", "restarted")
    with pytest.raises(ConfigError, match="at most 2 members on a machine, and machine-1 has them"):
        beat("c", "machine-1")
    beat("c", "machine-2")
    with pytest.raises(ConfigError, match="node c cannot join"):
        beat("c", "machine-1", "moved")


def test_a_node_tells_its_functions_once_and_again_to_a_restarted_coordinator(
    coordinator: Coordinator, tmp_path: Path, clock: Clock
) -> None:
    encoder = ReportEncoder()
    node = pb.Node(id="one", flight_location="grpc://one:1", process="p")
    node.functions.add(name="tokenize", version="1")

    def beat(to: Coordinator) -> bool:
        request = encoder.encode(node, {}, {})
        told = bool(request.node.functions)
        response = to.heartbeat(request)
        encoder.apply(response)
        return told

    assert [beat(coordinator) for _ in range(3)] == [True, False, False]
    assert coordinator.nodes()[0].functions == node.functions
    again = make_coordinator(tmp_path, clock)
    assert [beat(again) for _ in range(3)] == [False, True, False]
    assert again.nodes()[0].functions == node.functions
