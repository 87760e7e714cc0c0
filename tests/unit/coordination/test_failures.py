"""Loads that fail: what they affect, what users see, and what repairs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import LoadError, from_proto, require_ready
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from tests.fake_nodes import (
    FILES,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    failing,
    homes,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)


def test_a_shard_that_cannot_be_loaded_fails_its_dataset_and_no_other(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    coordinator.create(spec(source, name="other"))
    one.failing = two.failing = {("table", 3): "part-003.parquet is corrupt"}

    settle(one, two)

    info = coordinator.get("table")
    assert info.state == pb.DATASET_STATE_FAILED
    assert str(from_proto(info.error)) == "dataset 'table': part-003.parquet is corrupt"
    with pytest.raises(LoadError, match=r"part-003\.parquet is corrupt"):
        require_ready(info)
    assert one.holds("table") | two.holds("table") == set()
    assert state(coordinator, "other") == "ready"


def test_a_failed_dataset_is_asked_of_no_node_so_that_all_remove_it(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.failing = {("table", 3): "corrupt"}
    node.beat()
    assert node.holds("table") == SHARDS - {3}

    assert node.beat() == {}
    assert node.holds("table") == set()


def test_what_a_dropped_load_had_read_is_no_progress_of_the_next_one(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    created = coordinator.create(spec(source))
    report = node.report()
    actual = report.datasets.add(dataset="table", fingerprint=created.fingerprint, attempt=0)
    actual.shards.add(index=3, rows_loaded=4)
    coordinator.heartbeat(report)
    assert coordinator.get("table").progress.rows_done == 4

    coordinator.delete("table")

    assert coordinator.create(spec(source)).progress.rows_done == 0


def test_a_load_that_fails_takes_nothing_away_from_the_version_there_was(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    node.beat()
    before = coordinator.create(spec(source))
    settle(node)

    node.failing = failing("the source is gone")
    failed = coordinator.create(spec(source, filter="row < 7"))
    settle(node)

    assert coordinator.get("table").fingerprint == before.fingerprint
    assert [info.fingerprint for info in coordinator.datasets()] == [before.fingerprint]
    assert state(coordinator) == "ready" and node.holds("table") == SHARDS
    told = coordinator.get("table", failed.fingerprint)
    assert "the source is gone" in told.error.message

    node.failing = {}
    coordinator.create(spec(source, filter="row < 7"))
    settle(node)
    assert coordinator.get("table").fingerprint == failed.fingerprint
    assert state(coordinator) == "ready"


def test_rows_that_do_not_add_up_to_what_the_footers_say_fail_the_dataset(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    node.rows_of = {3: 4}
    coordinator.create(spec(source))

    settle(node)

    assert state(coordinator) == "failed"
    assert "it has 39 rows" in coordinator.get("table").error.message
    assert "40" in coordinator.get("table").error.message


def test_replicas_that_differ_in_rows_fail_the_dataset(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source, filter="label > 2", replicas=2))
    one.rows_of, two.rows_of = {3: 2}, {3: 1}

    settle(one, two)

    assert state(coordinator) == "failed"
    message = coordinator.get("table").error.message
    assert ("shard 3" in message and "1 rows" in message and "2 on another node" in message) or (
        "2 rows" in message and "1 on another node" in message
    )


# -- shards that are lost --------------------------------------------------------------------------


def test_a_replica_that_cannot_be_rebuilt_does_not_take_the_others_down(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    nodes = serving(coordinator, spec(source, replicas=2), "one", "two", "three")
    *left, lost = nodes
    for node in left:
        node.failing = failing("the source is gone")

    clock.now += TIMEOUT_S + 1
    settle(*left)

    assert any(node.failed for node in left)
    assert state(coordinator) == "ready"
    assert left[0].holds("table") | left[1].holds("table") == SHARDS
    assert lost.id not in {node_id for home in homes(coordinator) for node_id in home}


def test_a_lost_shard_that_cannot_be_rebuilt_is_a_failure_until_its_node_comes_back(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")
    kept = one.holds("table")
    one.failing = failing("the source is gone")

    clock.now += TIMEOUT_S + 1
    settle(one)
    info = coordinator.get("table")
    assert info.state == pb.DATASET_STATE_FAILED
    assert info.error.message == "dataset 'table': the source is gone"
    assert one.holds("table") == kept  # what is left is not thrown away

    two = two.restart()
    settle(two, one)
    assert state(coordinator) == "ready"
    assert two.loads == 0


def test_a_rebuilt_replica_that_fails_does_not_fail_a_dataset_known_from_before_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    one, two = serving(coordinator, spec(source, replicas=2), "one", "two")

    again = make_coordinator(tmp_path, clock)
    one, two = one.restart(again), two.restart(again)
    two.sealed.clear()
    two.failing = failing("the source is gone")
    settle(one, two)

    assert two.failed
    assert state(again) == "ready"
    assert homes(again) == [["one"]] * FILES
