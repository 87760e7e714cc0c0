"""A coordinator that lost its disk, and nodes that still hold what it no longer knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import DatasetNotFoundError, LoadError, NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Viewer
from cache_server.coordination.coordinator import Coordinator
from cache_server.plan.pinned_version import plan_version
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import (
    FILES,
    LEASE_S,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    failing,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)


@pytest.fixture
def replaced(
    tmp_path: Path, clock: Clock, coordinator: Coordinator, source: Path
) -> list[FakeNode]:
    """Two nodes that hold a table, and report to a new coordinator that knows nothing."""
    nodes = serving(coordinator, spec(source, replicas=2), "one", "two")
    new = make_coordinator(tmp_path / "another disk", clock)
    for node in nodes:
        node.coordinator, node.loads = new, 0
    settle(*nodes)
    return nodes


def test_what_nodes_hold_is_kept_for_a_coordinator_that_is_given_the_spec_again(
    replaced: list[FakeNode], source: Path
) -> None:
    coordinator = replaced[0].coordinator
    assert [node.holds("table") for node in replaced] == [SHARDS, SHARDS]
    with pytest.raises(NotReadyError, match=r"'table'.*replaced.*load its spec again"):
        coordinator.get("table")
    with pytest.raises(DatasetNotFoundError):
        coordinator.get("tabel")

    coordinator.create(spec(source, replicas=2))
    settle(*replaced)

    assert state(coordinator) == "ready"
    assert [node.loads for node in replaced] == [0, 0]


def test_who_reads_a_version_is_told_to_wait_before_any_node_has_reported(
    tmp_path: Path, clock: Clock
) -> None:
    with pytest.raises(NotReadyError, match="replaced"):
        make_coordinator(tmp_path, clock).get("table", "0123456789abcdef")


def test_a_new_coordinator_that_restarts_is_not_older_for_it(
    replaced: list[FakeNode], tmp_path: Path, clock: Clock
) -> None:
    again = make_coordinator(tmp_path / "another disk", clock)
    for node in replaced:
        node.coordinator = again
    settle(*replaced)
    assert [node.holds("table") for node in replaced] == [SHARDS, SHARDS]


def test_an_orphan_stays_until_it_is_dropped_also_from_a_node_that_is_away(
    replaced: list[FakeNode], clock: Clock
) -> None:
    coordinator = replaced[0].coordinator
    clock.now += LEASE_S + 1
    settle(*replaced)
    assert [node.holds("table") for node in replaced] == [SHARDS, SHARDS]
    with pytest.raises(NotReadyError, match="cachectl ls --orphans"):
        coordinator.get("table")
    (orphan,) = coordinator.orphans()
    assert (orphan.dataset, [*orphan.node_ids]) == ("table", ["one", "two"])
    assert (orphan.num_shards, orphan.num_bytes) == (2 * FILES, 2 * FILES * 100)
    assert coordinator.orphans(name="other") == coordinator.drop_orphans(name="other") == []
    assert coordinator.orphans(Viewer("team", sees_all=False)) == []

    clock.now += TIMEOUT_S + 1
    settle(replaced[0])
    assert [[*each.node_ids] for each in coordinator.drop_orphans()] == [["one"]]
    settle(*replaced)
    assert [node.holds("table") for node in replaced] == [set(), set()]
    assert coordinator.orphans() == []
    with pytest.raises(DatasetNotFoundError):
        coordinator.get("table")


def test_what_a_new_coordinator_drops_is_dropped(replaced: list[FakeNode], source: Path) -> None:
    coordinator = replaced[0].coordinator
    fingerprint = coordinator.create(spec(source)).fingerprint
    settle(*replaced)
    coordinator.delete("table")
    settle(*replaced)
    assert [node.holds("table") for node in replaced] == [set(), set()]
    with pytest.raises(DatasetNotFoundError):
        coordinator.get("table", fingerprint)


def test_what_was_loaded_at_the_second_attempt_is_found_again_too(
    tmp_path: Path, clock: Clock, coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    node.failing = failing("the source is away")
    node.beat()
    coordinator.create(spec(source))
    settle(node)
    node.failing = {}
    coordinator.create(spec(source))
    settle(node)
    assert state(coordinator) == "ready" and set(node.attempts.values()) == {1}

    node.coordinator, node.loads = make_coordinator(tmp_path / "another disk", clock), 0
    settle(node)
    node.coordinator.create(spec(source))
    settle(node)

    assert state(node.coordinator) == "ready"
    assert (node.holds("table"), node.loads) == (SHARDS, 0)


def test_what_failed_under_the_lost_catalogue_does_not_fail_a_load_of_the_new_one(
    tmp_path: Path, clock: Clock, coordinator: Coordinator, source: Path
) -> None:
    one, _two = serving(coordinator, spec(source), "one", "two")
    one.failing = failing("the share is not mounted")
    clock.now += TIMEOUT_S + 1
    settle(one)
    assert state(coordinator) == "failed"

    one.coordinator = make_coordinator(tmp_path / "another disk", clock)
    one.beat()
    one.failing = {}
    one.coordinator.create(spec(source))
    assert state(one.coordinator) == "loading"
    settle(one)

    assert state(one.coordinator) == "ready"


def test_the_result_of_a_whole_query_is_found_again_in_any_order_of_reports(
    tmp_path: Path, clock: Clock, coordinator: Coordinator, source: Path
) -> None:
    query = spec(source, sql="SELECT row FROM source ORDER BY row")

    def beat(to: Coordinator, node_id: str, key: VersionKey) -> pb.DesiredDataset:
        request = pb.HeartbeatRequest(
            node=pb.Node(id=node_id, flight_location=f"grpc://{node_id}:1")
        )
        actual = request.datasets.add(
            dataset=key.dataset, fingerprint=key.fingerprint, attempt=0, num_shards=2
        )
        index = {"one": 0, "two": 1}[node_id]
        actual.shards.add(
            index=index, sealed=True, num_rows=20, num_bytes=100, checksum=f"sum-{index}",
            rows_fixed=True, row_start=20 * index,
        )  # fmt: skip
        answer = to.heartbeat(request)
        return answer.datasets[0] if answer.datasets else pb.DesiredDataset()

    key = plan_version(query).version.key
    for node_id in ("one", "two"):
        beat(coordinator, node_id, key)
    info = coordinator.create(query)
    for first, second in (("one", "two"), ("two", "one")):
        told = beat(coordinator, first, key), beat(coordinator, second, key)
        assert not any(desired.run_whole for desired in told)
        assert {shard.index for desired in told for shard in desired.shards} == {0, 1}
        assert {desired.num_shards for desired in told} == {2}
    assert info.fingerprint == key.fingerprint
    assert coordinator.get("table").num_rows == 40


def test_what_is_kept_for_a_new_coordinator_can_be_dropped(replaced: list[FakeNode]) -> None:
    coordinator = replaced[0].coordinator
    coordinator.delete("table")
    settle(*replaced)
    assert [node.holds("table") for node in replaced] == [set(), set()]
    with pytest.raises(DatasetNotFoundError):
        coordinator.delete("table")


def test_what_is_kept_for_a_new_coordinator_takes_room(
    replaced: list[FakeNode], source: Path
) -> None:
    other = spec(source, name="other", replicas=2)
    size = sum(shard.estimated_bytes for shard in plan_version(other).version.shards)
    for node in replaced:
        node.limit_bytes = size
        node.beat()
    coordinator = replaced[0].coordinator
    with pytest.raises(LoadError, match=f"cannot fit.* holds {FILES * 100} of its memory limit"):
        coordinator.create(other)
    assert coordinator.create(spec(source, replicas=2)).spec.name == "table"
