"""Reports that no honest node sends, and reports that contradict what other nodes hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cache_protocol.errors import ConfigError, InvalidTicketError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination import membership
from cache_server.coordination.coordinator import Coordinator
from tests.fake_nodes import FILES, SHARDS, Clock, FakeNode, homes, make_coordinator, settle, spec
from tests.fake_nodes import state as state_of


def lie(coordinator: Coordinator, *, attempt: int | None = 0, process: str = "") -> None:
    """A made-up node claims that shard 0 has one row, and that shard 1 failed."""
    fingerprint = coordinator.get("table").fingerprint
    request = pb.HeartbeatRequest(
        node=pb.Node(id="liar", flight_location="grpc://liar:1", process=process)
    )
    claim = request.datasets.add(dataset="table", fingerprint=fingerprint, attempt=attempt)
    claim.shards.add(index=0, sealed=True, num_rows=1, num_bytes=1, checksum="x", rows_fixed=True)
    claim.shards.add(index=1, failure="because")
    answer = coordinator.heartbeat(request)
    assert not answer.datasets or attempt is None


def untrusted(coordinator: Coordinator) -> dict[str, str]:
    return {node.id: node.untrusted for node in coordinator.nodes() if node.untrusted}


def test_a_lie_about_a_ready_version_marks_the_node_and_not_the_version(
    coordinator: Coordinator, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)

    for _ in range(3):
        lie(coordinator)
        assert state_of(coordinator) == "ready"
        node.beat()

    assert node.holds("table") == SHARDS and homes(coordinator) == [["one"]] * FILES
    assert "shard 0 has 1 rows on node liar and 5 on another node" in untrusted(coordinator)["liar"]
    assert caplog.text.count("node untrusted id=liar") == 1
    assert not next(node for node in coordinator.nodes() if node.id == "liar").alive
    lie(coordinator, process="another")  # its next process lies again
    assert caplog.text.count("node untrusted id=liar") == 2


def test_a_restarted_node_with_an_older_load_is_no_liar_and_drops_what_differs(
    coordinator: Coordinator, source: Path
) -> None:
    node, other = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    coordinator.create(spec(source, replicas=2))
    settle(node, other)
    (shards,) = other.sealed.values()
    shards[0].num_rows = 4
    other.attempts.clear()

    other.beat()

    assert state_of(coordinator) == "ready" and untrusted(coordinator) == {}
    assert homes(coordinator)[0] == ["one"]
    settle(node, other)
    assert sorted(homes(coordinator)[0]) == ["one", "two"]


def test_a_lie_right_after_a_restart_of_the_coordinator_fails_nothing(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)

    again = make_coordinator(tmp_path, clock)
    lie(again, attempt=None)
    assert state_of(again) == "loading"  # the honest node has not reported yet
    settle(node.restart(again))

    assert state_of(again) == "ready" and node.holds("table") == SHARDS


def _report(change: Callable[[pb.HeartbeatRequest], object]) -> pb.HeartbeatRequest:
    request = pb.HeartbeatRequest(node=pb.Node(id="n", flight_location="grpc://n:1"))
    claim = request.datasets.add(dataset="t", fingerprint="f")
    claim.shards.add(index=0, sealed=True, checksum="c")
    change(request)
    return request


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r.node, "id", "../x"),
        lambda r: setattr(r.node, "id", ""),
        lambda r: setattr(r.node, "flight_location", "file:///etc"),
        lambda r: setattr(r.node, "control_location", "somewhere"),
        lambda r: setattr(r.node, "cache_dir", "relative"),
        lambda r: setattr(r.datasets[0], "dataset", "../x"),
        lambda r: setattr(r.datasets[0], "fingerprint", "a/b"),
        lambda r: setattr(r.datasets[0], "num_shards", 4_000_000_000),
        lambda r: setattr(r.datasets[0].shards[0], "index", 4_000_000_000),
        lambda r: setattr(r.datasets[0].shards[0], "checksum", "\n"),
        lambda r: setattr(r.datasets[0], "failure", "x" * membership.MAX_HEARTBEAT_BYTES),
    ],
)
def test_a_report_that_no_node_sends_is_refused_and_changes_nothing(
    coordinator: Coordinator, change: Callable[[pb.HeartbeatRequest], object]
) -> None:
    with pytest.raises(InvalidTicketError):
        coordinator.heartbeat(_report(change))
    assert coordinator.nodes() == []
    coordinator.heartbeat(_report(lambda request: None))


def test_the_number_of_members_is_bounded(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_MEMBERS", 2)
    FakeNode(coordinator, "one").beat()
    FakeNode(coordinator, "two").beat()
    with pytest.raises(ConfigError, match="node three cannot join: a cache has at most 2 members"):
        FakeNode(coordinator, "three").beat()
    FakeNode(coordinator, "one").beat()
