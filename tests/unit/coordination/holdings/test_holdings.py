"""Which node should hold which shard, and what the answer to its heartbeat says."""

from __future__ import annotations

from pathlib import Path

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from tests.fake_nodes import (
    FILES,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    homes,
    serving,
    settle,
    spec,
    state,
    told,
)


def test_each_shard_is_asked_of_one_node_in_the_answers_to_heartbeats(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    one.beat()
    two.beat()
    coordinator.create(spec(source))

    first, second = one.beat(load=[])["table"], two.beat(load=[])["table"]

    assert first | second == SHARDS
    assert not first & second
    assert len(first) == len(second) == FILES // 2


def test_a_dataset_that_is_created_before_any_node_joins_is_placed_when_one_does(
    coordinator: Coordinator, source: Path
) -> None:
    info = coordinator.create(spec(source))
    assert info.state == pb.DATASET_STATE_LOADING
    assert homes(coordinator) == [[]] * FILES
    node = FakeNode(coordinator, "one")

    settle(node)

    assert state(coordinator) == "ready"


def test_a_shard_stays_on_its_old_node_until_its_new_home_serves_it(
    coordinator: Coordinator, source: Path
) -> None:
    (old,) = serving(coordinator, spec(source), "old")
    assert old.holds("table") == SHARDS
    new = FakeNode(coordinator, "new")

    moved = new.beat(load=[])["table"]
    assert moved and moved < SHARDS
    assert old.beat()["table"] == SHARDS  # nothing is there yet
    new.beat()  # loads them
    assert old.beat()["table"] == SHARDS  # there, but not reported
    new.beat()  # reports them sealed, with their row ids: they were fixed before
    assert old.beat()["table"] == SHARDS - moved
    settle(old, new)

    assert old.holds("table") == SHARDS - moved
    assert new.holds("table") == moved
    assert state(coordinator) == "ready"


def test_what_moved_from_a_lost_node_gives_its_room_back_before_the_load_is_ready(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    share = two.beat(load=[])["table"]
    (last, *_) = SHARDS - share
    clock.now += TIMEOUT_S + 1
    for _ in range(3):
        one.beat(load=SHARDS - {last})  # for which there is no room beside the share of the other
    assert one.holds("table") == SHARDS - {last}

    for _ in range(2):
        two.beat()
        one.beat(load=[])

    assert two.holds("table") == share
    assert one.holds("table") == SHARDS - share - {last}
    settle(one, two)
    assert state(coordinator) == "ready"


def test_a_dataset_that_is_dropped_and_loaded_again_before_any_node_reports_is_loaded(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = serving(coordinator, spec(source), "one", "two")

    coordinator.delete("table")
    coordinator.create(spec(source, replicas=2))
    two.beat()  # while the coordinator knows only what the nodes held before
    settle(one, two)

    assert state(coordinator) == "ready"
    assert one.holds("table") == two.holds("table") == SHARDS


# -- replicas --------------------------------------------------------------------------------------


def test_replicas_are_asked_of_as_many_nodes_and_of_all_when_there_are_fewer(
    coordinator: Coordinator, source: Path
) -> None:
    nodes = [FakeNode(coordinator, name) for name in ("one", "two", "three")]
    settle(*nodes)
    coordinator.create(spec(source, replicas=2))
    coordinator.create(spec(source, name="more", replicas=9))

    asked = [node.beat(load=[]) for node in nodes]

    assert sorted(i for wanted in asked for i in wanted["table"]) == sorted([*SHARDS] * 2)
    assert [wanted["more"] for wanted in asked] == [SHARDS] * 3


def test_a_replica_is_copied_from_where_it_is_and_the_source_is_read_once(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source, replicas=2))

    told = [coordinator.heartbeat(node.report()).datasets[0] for node in (one, two)]
    read = [{shard.index for shard in desired.shards if shard.splits} for desired in told]
    assert read[0] | read[1] == SHARDS and not read[0] & read[1]
    one.beat()
    one.beat()
    (desired,) = coordinator.heartbeat(two.report()).datasets
    copies = {shard.index: list(shard.copy_from) for shard in desired.shards if shard.copy_from}

    assert copies == {index: ["grpc://one:1"] for index in read[0]}
    settle(one, two)
    assert one.holds("table") == two.holds("table") == SHARDS


def test_a_spec_with_fewer_replicas_keeps_the_existing_ones(
    coordinator: Coordinator, source: Path
) -> None:
    nodes = serving(coordinator, spec(source, replicas=2), "one", "two")

    info = coordinator.create(spec(source))
    settle(*nodes)

    assert info.spec.replicas == 2
    assert [node.holds("table") for node in nodes] == [SHARDS, SHARDS]


# -- answers to heartbeats -------------------------------------------------------------------------


def test_a_shard_that_a_node_is_loading_is_not_explained_again(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.beat(load=[])
    report = node.report()
    actual = report.datasets.add(
        dataset="table", fingerprint=coordinator.get("table").fingerprint, attempt=0
    )
    actual.shards.add(index=2, rows_loaded=1)

    assert all(shard.splits for shard in told(coordinator, node).shards)
    (desired,) = coordinator.heartbeat(report).datasets

    assert [shard.index for shard in desired.shards if not shard.splits] == [2]
    assert {shard.index for shard in desired.shards} == SHARDS


def test_the_files_of_a_small_table_are_told_only_to_nodes_that_are_to_read_them(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    joined = DatasetSpec(
        "table",
        sources={"big": str(source), "small": str(source / "part-000.parquet")},
        sql="SELECT b.row FROM big b JOIN small s ON b.label = s.label",
        allow_unordered=True,
        target_shard_bytes=1,
    )
    coordinator.create(joined)

    before = told(coordinator, one)
    settle(one, two)
    after = told(coordinator, one)

    assert any(table.splits for table in before.plan.tables)
    assert not any(table.splits for table in after.plan.tables)
    assert [table.name for table in after.plan.tables] == [t.name for t in before.plan.tables]
