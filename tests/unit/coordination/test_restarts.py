"""A coordinator that restarts with its catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import (
    DatasetNotFoundError,
    NotReadyError,
    StaleVersionError,
    from_proto,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal, Role
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.versions import orphans
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import (
    FILES,
    LEASE_S,
    ROWS_PER_FILE,
    Clock,
    FakeNode,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)


def test_the_newest_version_is_the_one_asked_for_last_also_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    new = coordinator.create(spec(source, columns=["row"]))
    for _ in range(3):  # the old one is done first, and is written again when it is ready
        node.report()
        answer = coordinator.heartbeat(node.report())
        for desired in answer.datasets:
            if desired.plan.fingerprint == old.fingerprint:
                key = VersionKey("table", old.fingerprint)
                node.attempts[key] = 0
                node.sealed[key] = {
                    s.index: pb.SealedShard(num_rows=ROWS_PER_FILE, num_bytes=1, checksum="x")
                    for s in desired.shards
                }
                node.starts[key] = (
                    {s.index: s.row_start for s in desired.shards} if desired.rows_fixed else {}
                )
    assert coordinator.get("table", old.fingerprint).state == pb.DATASET_STATE_READY

    again = make_coordinator(tmp_path, clock)

    assert again.get("table").fingerprint == new.fingerprint


def test_a_replaced_version_that_is_read_outlives_a_restart_of_the_coordinator(
    source: Path, tmp_path: Path, clock: Clock
) -> None:
    coordinator = make_coordinator(tmp_path, clock)
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)
    coordinator.get("table", old.fingerprint, lease=True)
    new = coordinator.create(spec(source, columns=["row"]))
    settle(node)

    again = make_coordinator(tmp_path, clock)
    node = node.restart(again)
    settle(node)
    assert again.get("table", old.fingerprint).state == pb.DATASET_STATE_READY
    clock.now += LEASE_S + 1
    settle(node)

    with pytest.raises(StaleVersionError):
        again.get("table", old.fingerprint)
    assert again.get("table").fingerprint == new.fingerprint


def test_a_restarted_coordinator_knows_the_row_ids_at_once(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    (node,) = serving(coordinator, spec(source, filter="label > 2"), "one")
    before = coordinator.get("table")

    again = make_coordinator(tmp_path, clock)
    (desired,) = again.heartbeat(node.restart(again).report()).datasets

    assert desired.rows_fixed
    assert [s.row_start for s in desired.shards] == [s.rows.start for s in before.shards]
    assert again.get("table").fingerprint == before.fingerprint


def test_an_act_waits_for_nodes_that_have_not_reported_since_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    (one, _) = serving(coordinator, spec(source, replicas=2), "one", "two")
    again = make_coordinator(tmp_path, clock)
    one.restart(again).beat()
    request = pb.ForgetRowsRequest(name="table", where=["label = 1"], reason="request 12")

    with pytest.raises(NotReadyError, match="node two has not reported since the coordinator"):
        again.forget(request, Principal("ann", roles=frozenset({Role.ADMIN})))


def test_a_load_that_was_under_way_goes_on_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.beat(load=[0, 1, 2])
    node.beat(load=[])

    again = make_coordinator(tmp_path, clock)
    node = node.restart(again)
    settle(node)

    assert state(again) == "ready"
    assert node.loads == FILES - 3


def test_a_load_that_failed_does_not_begin_again_by_itself_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    node.beat()
    before = coordinator.create(spec(source))
    settle(node)
    node.failing = {("table", 3): "the source is gone"}
    failed = coordinator.create(spec(source, columns=["row"]))
    settle(node)

    again = make_coordinator(tmp_path, clock)
    node = node.restart(again)  # and would load it by now
    settle(node)

    info = again.get("table", failed.fingerprint)
    assert info.state == pb.DATASET_STATE_FAILED
    assert str(from_proto(info.error)) == "dataset 'table': the source is gone"
    assert again.get("table").fingerprint == before.fingerprint
    assert node.loads == 0

    again.create(spec(source, columns=["row"]))
    settle(node)
    assert again.get("table").fingerprint == failed.fingerprint
    assert state(again) == "ready"
    assert state(make_coordinator(tmp_path, clock)) != "failed"


def test_a_deleted_dataset_stays_deleted_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    (node,) = serving(coordinator, spec(source), "one")
    coordinator.delete("table")

    again = make_coordinator(tmp_path, clock)

    assert again.datasets() == []
    assert node.restart(again).beat() == {}


def test_a_version_dropped_before_a_restart_is_not_kept_for_its_readers(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    fingerprint = coordinator.create(spec(source)).fingerprint
    settle(node)
    node.idle_s = 0.0
    coordinator.delete("table")

    again = make_coordinator(tmp_path, clock)
    node.coordinator = again
    node.beat()

    assert node.holds("table") == set()
    with pytest.raises(DatasetNotFoundError):
        again.get("table", fingerprint)


def test_only_the_latest_drops_are_remembered(
    coordinator: Coordinator, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "_REMEMBERED", 2)
    for name in ("first", "second", "third", "second"):
        coordinator.create(spec(source, name=name))
        coordinator.delete(name)

    dropped = Catalogue(tmp_path / "catalogue").read_dropped()

    assert [(key.dataset, attempt) for key, attempt in dropped.items()] == [
        ("third", 0),
        ("second", 1),
    ]


# -- whole queries ---------------------------------------------------------------------------------


def test_the_shards_of_a_whole_query_stay_where_they_are_once_it_has_run(
    coordinator: Coordinator, source: Path
) -> None:
    coordinator.heartbeat(_whole_report())
    info = coordinator.create(spec(source, sql="SELECT row FROM source ORDER BY row"))
    # This view knows of no shard: none must follow it when the query has run.
    assert coordinator.heartbeat(_whole_report()).datasets[0].run_whole

    coordinator.heartbeat(_whole_report(info.fingerprint))
    for _ in range(2):  # nodes drop what they need not hold once it is served
        (desired,) = coordinator.heartbeat(_whole_report(info.fingerprint, served=True)).datasets
        assert [shard.index for shard in desired.shards] == [0, 1]
    assert state(coordinator) == "ready"


def _whole_report(fingerprint: str = "", *, served: bool = False) -> pb.HeartbeatRequest:
    """A report of a node that has run a whole query, if there is a fingerprint."""
    request = pb.HeartbeatRequest(node=pb.Node(id="one", flight_location="grpc://one:1"))
    if fingerprint:
        actual = request.datasets.add(
            dataset="table", fingerprint=fingerprint, attempt=0, num_shards=2
        )
        for index in range(2):
            actual.shards.add(
                index=index, sealed=True, num_rows=20, num_bytes=9, checksum=f"sum-{index}",
                rows_fixed=served, row_start=index * 20 if served else 0,
            )  # fmt: skip
    return request


def test_a_whole_query_of_a_second_attempt_is_not_run_again_by_a_node_that_restarted(
    coordinator: Coordinator, source: Path
) -> None:
    query = spec(source, sql="SELECT row FROM source ORDER BY row")
    node = pb.Node(id="one", flight_location="grpc://one:1")

    def beat(**actual: object) -> pb.DesiredDataset:
        request = pb.HeartbeatRequest(node=node)
        if actual:
            request.datasets.add(dataset="table", fingerprint=info.fingerprint, **actual)  # type: ignore[arg-type]
        return coordinator.heartbeat(request).datasets[0]

    coordinator.heartbeat(pb.HeartbeatRequest(node=node))
    info = coordinator.create(query)
    failing = pb.HeartbeatRequest(node=node)
    failing.datasets.add(dataset="table", fingerprint=info.fingerprint, attempt=0, failure="gone")
    coordinator.heartbeat(failing)
    assert state(coordinator) == "failed"
    coordinator.create(query)
    shard = {"index": 0, "sealed": True, "num_rows": 40, "num_bytes": 9, "checksum": "x"}
    beat(attempt=1, num_shards=1, shards=[pb.ActualShard(**shard)])
    told = beat(attempt=1, num_shards=1, shards=[pb.ActualShard(**shard, rows_fixed=True)])
    assert not told.run_whole and state(coordinator) == "ready"

    restarted = beat(shards=[pb.ActualShard(**shard)])  # it has its file, and no answer yet

    assert not restarted.run_whole


def test_an_empty_result_is_ready_after_a_restart_and_is_not_made_again(
    tmp_path: Path, clock: Clock, coordinator: Coordinator, source: Path
) -> None:
    query = {"sql": "SELECT row FROM source WHERE row < 0 ORDER BY row"}
    coordinator.create(spec(source, **query))
    beat = pb.HeartbeatRequest(node=pb.Node(id="one", flight_location="grpc://one:1"))
    desired = coordinator.heartbeat(beat).datasets[0]
    assert desired.run_whole
    beat.datasets.add(
        dataset="table", fingerprint=desired.plan.fingerprint, num_shards=0,
        attempt=desired.plan.attempt,
    )  # fmt: skip
    coordinator.heartbeat(beat)
    assert state(coordinator) == "ready"

    again = make_coordinator(tmp_path, clock)
    del beat.datasets[:]
    desired = again.heartbeat(beat).datasets[0]

    assert not desired.run_whole
    assert state(again) == "ready"
