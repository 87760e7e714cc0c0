"""Reports that no honest node sends, and reports that contradict what other nodes hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cache_protocol.errors import ConfigError, InvalidTicketError, PermissionDeniedError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal, Role
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings import holder_checks
from cache_server.coordination.members import membership, placement
from cache_server.plan.pinned_version import plan_version
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
    told,
)
from tests.fake_nodes import state as state_of

EVIL, HONEST = (Principal(name, roles=frozenset({Role.NODE})) for name in ("evil", "honest"))


def lie(coordinator: Coordinator, *, attempt: int | None = 0, process: str = "") -> None:
    """A made-up node claims that shard 0 has one row, and that shard 1 failed."""
    fingerprint = coordinator.get("table").fingerprint
    request = pb.HeartbeatRequest(
        node=pb.Node(id="liar", flight_location="grpc://liar:1", process=process)
    )
    claim = request.datasets.add(dataset="table", fingerprint=fingerprint, attempt=attempt)
    claim.shards.add(index=0, sealed=True, num_rows=1, num_bytes=1, checksum="x", rows_fixed=True)
    claim.shards.add(index=1, failure="because")
    answer = coordinator.heartbeat(request, by=EVIL)
    assert not answer.datasets or attempt is None


def untrusted(coordinator: Coordinator) -> dict[str, str]:
    return {node.id: node.untrusted for node in coordinator.nodes() if node.untrusted}


def test_a_lie_about_a_ready_version_marks_the_node_and_not_the_version(
    coordinator: Coordinator, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = serving(coordinator, spec(source), "one")

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
    (node,) = serving(coordinator, spec(source), "one")

    again = make_coordinator(tmp_path, clock)
    lie(again, attempt=None)
    assert state_of(again) == "loading"  # the honest node has not reported yet
    settle(node.restart(again))

    assert state_of(again) == "ready" and node.holds("table") == SHARDS


def claim(
    coordinator: Coordinator,
    fingerprint: str,
    checksums: Mapping[int, str],
    *,
    location: str = "grpc://evil:1",
    num_shards: int | None = None,
) -> None:
    """A node that was asked to load nothing claims shards, before others do."""
    request = pb.HeartbeatRequest(node=pb.Node(id="evil", flight_location=location))
    report = request.datasets.add(dataset="table", fingerprint=fingerprint, attempt=0)
    if num_shards is not None:
        report.num_shards = num_shards
    for index, checksum in checksums.items():
        report.shards.add(
            index=index, sealed=True, num_rows=ROWS_PER_FILE, num_bytes=100, checksum=checksum,
            rows_fixed=True, row_start=ROWS_PER_FILE * index,
        )  # fmt: skip
    coordinator.heartbeat(request, by=EVIL)


def read_back(coordinator: Coordinator) -> None:
    """Every file that is due is given, with the checksum that its node claims."""
    while (check := coordinator.next_check(0.0)) is not None:
        coordinator.apply_check(check, holder_checks.Outcome.MATCHES)


FALSE = {index: f"false-{index}" for index in SHARDS}


def test_a_node_that_was_asked_for_nothing_makes_no_record_of_a_load(
    coordinator: Coordinator, source: Path
) -> None:
    honest = FakeNode(coordinator, "one", by=HONEST)
    honest.beat()
    claim(coordinator, "f00", {})
    fingerprint = coordinator.create(spec(source)).fingerprint
    asked = honest.beat(load=[])["table"]
    assert asked and asked < SHARDS
    for _ in range(4):
        claim(coordinator, fingerprint, FALSE)
        read_back(coordinator)
        honest.beat()
    shards = {shard.index: shard for shard in coordinator.get("table").shards}
    for index in asked:
        assert list(shards[index].node_ids) == ["one"]
        assert shards[index].checksum == f"sum-{index}"


def test_orphans_count_only_on_the_nodes_that_would_load_them(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    fingerprint = plan_version(spec(source)).version.key.fingerprint
    honest = FakeNode(coordinator, "one", by=HONEST)
    honest.beat()
    claim(coordinator, fingerprint, FALSE)
    coordinator.create(spec(source))
    read_back(coordinator)
    believed = {i for i, nodes in enumerate(homes(coordinator)) if nodes}
    asked = honest.beat(load=[])["table"]
    assert asked and believed == SHARDS - asked
    for _ in range(4):
        honest.beat()
        claim(coordinator, fingerprint, FALSE)
        read_back(coordinator)
    assert [homes(coordinator)[index] for index in asked] == [["one"]] * len(asked)


def test_an_honest_cache_adopts_its_orphans_after_they_were_read_back(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    nodes = [FakeNode(coordinator, name, by=HONEST) for name in ("one", "two", "three")]
    settle(*nodes)
    coordinator.create(spec(source, replicas=2))
    for _ in range(2):
        settle(*nodes)
        read_back(coordinator)
    assert state_of(coordinator) == "ready"
    new = make_coordinator(tmp_path / "another disk", clock)
    for node in nodes:
        node.coordinator, node.loads = new, 0
        node.beat()
    new.create(spec(source, replicas=2))
    settle(*nodes)
    assert state_of(new) == "loading"
    read_back(new)
    settle(*nodes)
    assert state_of(new) == "ready" and [node.loads for node in nodes] == [0, 0, 0]


def test_a_node_that_was_asked_for_nothing_says_no_number_of_shards(
    coordinator: Coordinator, source: Path
) -> None:
    query = spec(source, sql="SELECT row FROM source ORDER BY row")
    fingerprint = plan_version(query).version.key.fingerprint
    names = (f"node-{number}" for number in itertools.count())
    best = next(
        name for name in names if placement.place(fingerprint, 1, [name, "evil"], 1) == ((name,),)
    )
    honest = FakeNode(coordinator, best, by=HONEST)
    honest.beat()
    claim(coordinator, fingerprint, {})
    coordinator.create(query)
    assert told(coordinator, honest).run_whole
    claim(coordinator, fingerprint, {0: "false"}, num_shards=1)
    assert coordinator.get("table").progress.shards_total == 0


def test_the_location_of_the_coordinator_makes_no_claim_true(
    coordinator: Coordinator, source: Path
) -> None:
    honest = FakeNode(coordinator, "one", by=HONEST)
    honest.beat()
    info = coordinator.create(spec(source))
    settle(honest)
    for location in ("grpc://here:1", honest.location):
        sums = {index: f"sum-{index}" for index in SHARDS}
        claim(coordinator, info.fingerprint, sums, location=location)
        assert homes(coordinator) == [["one"]] * FILES


def test_an_own_node_keeps_its_id_from_others(coordinator: Coordinator, source: Path) -> None:
    own = FakeNode(coordinator, "own")
    thief = FakeNode(coordinator, "own", by=EVIL)
    thief.location = "grpc://evil:1"
    thief.beat()  # after a restart it is first
    own.beat()
    with pytest.raises(PermissionDeniedError, match="'evil' reported for node own"):
        thief.beat()
    assert [node.flight_location for node in coordinator.nodes()] == [own.location]


def test_a_lost_shard_fails_no_ready_version_by_a_node_that_does_not_load_it(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = (FakeNode(coordinator, name, by=HONEST) for name in ("one", "two"))
    one.beat()
    info = coordinator.create(spec(source))
    settle(one)
    clock.now += TIMEOUT_S - 1
    two.beat(load=[])
    claim(coordinator, "f00", {})
    clock.now += 2
    asked = two.beat(load=[])["table"]
    assert asked and asked < SHARDS
    request = pb.HeartbeatRequest(node=pb.Node(id="evil", flight_location="grpc://evil:1"))
    report = request.datasets.add(dataset="table", fingerprint=info.fingerprint, attempt=0)
    for index in asked:
        report.shards.add(index=index, failure="because")
    coordinator.heartbeat(request, by=EVIL)
    assert state_of(coordinator) != "failed"


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


def test_a_report_that_names_a_shard_twice_is_refused_and_harms_no_other_node(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    report = one.report()
    twice = report.datasets[0].shards[-1]
    report.datasets[0].shards.add().CopyFrom(twice)
    with pytest.raises(InvalidTicketError, match=f"shard {twice.index} of 'table' .* more than"):
        coordinator.heartbeat(report)
    for _ in range(4):
        clock.now += TIMEOUT_S / 2
        two.beat()
    assert state_of(coordinator) == "ready" and homes(coordinator) == [["two"]] * FILES
