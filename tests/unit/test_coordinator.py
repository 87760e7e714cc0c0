"""What the coordinator decides, beat by beat: a fake clock, fake nodes, no thread, no socket."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cache_server import coordinator as coordinator_module
from cache_server.catalogue import Catalogue
from cache_server.coordinator import Coordinator
from cache_server.planning import VersionKey
from cache_server.versions import PlannedVersion, plan_version
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import (
    DatasetNotFoundError,
    LoadError,
    NotReadyError,
    StaleVersionError,
    from_proto,
    require_ready,
)
from protos.spec import DatasetSpec
from tests.conftest import write_numbered

TIMEOUT_S = 10.0
FILES, ROWS_PER_FILE = 8, 5  # each file becomes a shard
SHARDS = frozenset(range(FILES))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeNode:
    """A node as the coordinator sees it: it holds what it was told to, at once and perfectly.

    Attributes:
        sealed: version -> shard -> what the node holds of it.
        starts: version -> shard -> the first row id that it was told.
        failing: (dataset, shard) -> the reason why this node cannot load it.
        rows_of: shard -> rows that come out of it, where not those of its footer.
        loads: how many shards it has loaded so far.
    """

    def __init__(self, coordinator: Coordinator, node_id: str, *, limit_bytes: int = 0) -> None:
        self.coordinator = coordinator
        self.id = node_id
        self.limit_bytes = limit_bytes
        self.sealed: dict[VersionKey, dict[int, pb.SealedShard]] = {}
        self.starts: dict[VersionKey, dict[int, int]] = {}
        self.attempts: dict[VersionKey, int] = {}
        self.failing: dict[tuple[str, int], str] = {}
        self.failed: dict[VersionKey, dict[int, str]] = {}
        self.loads = 0
        self.rows_of: dict[int, int] = {}
        self.shard_bytes = 100

    def report(self) -> pb.HeartbeatRequest:
        request = pb.HeartbeatRequest(
            node=pb.Node(
                id=self.id,
                flight_location=f"grpc://{self.id}:1",
                memory_limit_bytes=self.limit_bytes,
                stored_bytes=self.shard_bytes * sum(map(len, self.sealed.values())),
            )
        )
        for key in {*self.sealed, *self.failed}:
            actual = request.datasets.add(
                dataset=key.dataset, fingerprint=key.fingerprint, attempt=self.attempts.get(key)
            )
            starts = self.starts.get(key, {})
            for index, shard in self.sealed.get(key, {}).items():
                actual.shards.add(
                    index=index,
                    sealed=True,
                    num_rows=shard.num_rows,
                    num_bytes=shard.num_bytes,
                    checksum=shard.checksum,
                    rows_fixed=index in starts,
                    row_start=starts.get(index, 0),
                )
            for index, reason in self.failed.get(key, {}).items():
                actual.shards.add(index=index, failure=reason)
        return request

    def beat(self, *, load: Iterable[int] = SHARDS) -> dict[str, set[int]]:
        """Reports, then does what it is told; returns dataset -> shards it should hold.

        Args:
            load: the shards that this node gets done now, of those that it lacks.
        """
        answer = self.coordinator.heartbeat(self.report())
        wanted: dict[str, set[int]] = {}
        keys = set()
        for desired in answer.datasets:
            key = VersionKey(desired.plan.dataset, desired.plan.fingerprint)
            keys.add(key)
            if self.attempts.get(key) not in (None, desired.plan.attempt):
                self._forget(key)
            self.attempts[key] = desired.plan.attempt
            indices = {shard.index for shard in desired.shards}
            wanted[key.dataset] = indices
            held = self.sealed.setdefault(key, {})
            for shard in desired.shards:
                if shard.index in held or shard.index in self.failed.get(key, {}):
                    continue
                if reason := self.failing.get((key.dataset, shard.index)):
                    self.failed.setdefault(key, {})[shard.index] = reason
                elif shard.index in load and (shard.splits or shard.copy_from):
                    rows = shard.num_rows or sum(split.num_rows for split in shard.splits)
                    rows = self.rows_of.get(shard.index, rows)
                    held[shard.index] = pb.SealedShard(
                        num_rows=rows, num_bytes=self.shard_bytes, checksum=f"sum-{shard.index}"
                    )
                    self.loads += 1
            for index in set(held) - indices:
                del held[index]
            self.starts[key] = (
                {s.index: s.row_start for s in desired.shards if s.index in held}
                if desired.rows_fixed
                else {}
            )
        for key in {*self.sealed, *self.failed} - keys:
            self._forget(key)
        return wanted

    def restart(self, coordinator: Coordinator | None = None) -> FakeNode:
        """The node after a restart: it has its shards, and has been told nothing."""
        again = FakeNode(coordinator or self.coordinator, self.id, limit_bytes=self.limit_bytes)
        again.sealed = {key: dict(shards) for key, shards in self.sealed.items() if shards}
        return again

    def holds(self, dataset: str) -> set[int]:
        return {
            index for key, held in self.sealed.items() if key.dataset == dataset for index in held
        }

    def _forget(self, key: VersionKey) -> None:
        for of_version in (self.sealed, self.starts, self.failed):
            of_version.pop(key, None)
        self.attempts.pop(key, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(tmp_path: Path, clock: Clock) -> Coordinator:
    return make(tmp_path, clock)


def make(directory: Path, clock: Clock) -> Coordinator:
    """A coordinator of the catalogue in ``directory``: the same one again after a restart."""
    return Coordinator(
        Catalogue(directory / "catalogue"),
        endpoints=pb.CoordinatorEndpoints(control_location="here:1"),
        heartbeat_interval_s=0.01,
        node_timeout_s=TIMEOUT_S,
        clock=clock,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", FILES * ROWS_PER_FILE, files=FILES)


def spec(source: Path, name: str = "table", **changes: object) -> DatasetSpec:
    return DatasetSpec(name, source, target_shard_bytes=1, **changes)  # type: ignore[arg-type]


def settle(*nodes: FakeNode) -> None:
    """As many rounds as it takes: loads are reported, row ids told, and those reported."""
    for _ in range(5):
        for node in nodes:
            node.beat()


def failing(reason: str) -> dict[tuple[str, int], str]:
    """What a node says that can load no shard of the dataset any more."""
    return {("table", index): reason for index in SHARDS}


def state(coordinator: Coordinator, name: str = "table") -> str:
    return pb.DatasetState.Name(coordinator.get(name).state).removeprefix("DATASET_STATE_").lower()


def homes(coordinator: Coordinator, name: str = "table") -> list[list[str]]:
    return [list(shard.node_ids) for shard in coordinator.get(name).shards]


# -- placement -------------------------------------------------------------------------------------


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
    old = FakeNode(coordinator, "old")
    old.beat()
    coordinator.create(spec(source))
    settle(old)
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


def test_a_dataset_that_is_dropped_and_loaded_again_before_any_node_reports_is_loaded(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)

    coordinator.delete("table")
    coordinator.create(spec(source, replicas=2))
    two.beat()  # while the coordinator knows only what the nodes held before
    settle(one, two)

    assert state(coordinator) == "ready"
    assert one.holds("table") == two.holds("table") == SHARDS


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


def test_a_node_that_is_silent_longer_than_the_timeout_is_lost_and_its_shards_move(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)
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


def test_a_lost_node_that_comes_back_takes_its_shards_again(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)
    before = homes(coordinator)
    clock.now += TIMEOUT_S + 1
    settle(one)
    assert homes(coordinator) == [["one"]] * FILES

    two = two.restart()
    settle(two, one)

    assert homes(coordinator) == before
    assert two.loads == 0


# -- row ids and readiness -------------------------------------------------------------------------


def test_row_ids_are_fixed_only_when_every_shard_is_sealed(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source, filter="label > 2"))  # so that no footer tells the rows
    node.rows_of = {index: index for index in SHARDS}  # 0, 1, 2, ... rows

    for index in range(FILES - 1):
        node.beat(load=[index])
        answer = coordinator.heartbeat(node.report())
        assert not answer.datasets[0].rows_fixed
        assert coordinator.get("table").num_rows == 0
    node.beat(load=[FILES - 1])
    (desired,) = coordinator.heartbeat(node.report()).datasets

    assert desired.rows_fixed
    assert [shard.row_start for shard in desired.shards] == [0, 0, 1, 3, 6, 10, 15, 21]
    assert desired.num_rows == 28


def test_a_dataset_is_ready_only_when_live_nodes_report_every_shard_with_its_row_ids(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))

    one.beat()
    two.beat()  # both have loaded, neither has said so
    assert state(coordinator) == "loading"
    one.beat()
    two.beat()  # both have said so: the ids are fixed, and told to the second
    assert state(coordinator) == "loading"
    two.beat()
    assert state(coordinator) == "loading"
    one.beat()
    assert state(coordinator) == "loading"  # told, but does not serve them yet
    one.beat()

    assert state(coordinator) == "ready"
    info = coordinator.get("table")
    assert [(s.rows.start, s.rows.stop) for s in info.shards] == [
        (5 * index, 5 * index + 5) for index in range(FILES)
    ]


def test_progress_says_how_far_a_load_is(coordinator: Coordinator, source: Path) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.beat(load=[0, 1])
    request = node.report()
    request.datasets[0].shards.add(index=2, rows_loaded=3)

    coordinator.heartbeat(request)

    info = coordinator.get("table")
    assert info.progress == pb.LoadProgress(
        shards_done=2, shards_total=8, rows_done=13, estimated_rows=40, bytes_done=200
    )
    with pytest.raises(NotReadyError, match=r"'table' is loading: 2 of 8 shards, 13 rows"):
        require_ready(info)


def test_a_source_without_a_row_group_is_ready_without_a_node(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    info = coordinator.create(spec(write_numbered(tmp_path / "empty", 0)))

    assert info.state == pb.DATASET_STATE_READY
    assert info.num_rows == 0


def test_rows_that_do_not_add_up_to_what_the_footers_say_fail_the_dataset(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    node.rows_of = {3: 4}
    coordinator.create(spec(source))

    settle(node)

    assert state(coordinator) == "failed"
    assert "came out with 39 rows" in coordinator.get("table").error.message
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
    assert ("shard 3" in message and "1 rows" in message and "2 elsewhere" in message) or (
        "2 rows" in message and "1 elsewhere" in message
    )


# -- failures --------------------------------------------------------------------------------------


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


def test_asking_for_a_failed_dataset_again_is_another_attempt_that_ignores_late_reports(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.failing = {("table", 3): "corrupt"}
    node.beat()
    late = node.report()
    node.beat()
    assert state(coordinator) == "failed"

    again = coordinator.create(spec(source))
    coordinator.heartbeat(late)

    assert again.state == pb.DATASET_STATE_LOADING
    assert again.progress.shards_done == 0
    assert state(coordinator) == "loading"
    node.failing = {}
    settle(node)
    assert state(coordinator) == "ready"
    assert node.loads == 2 * FILES - 1  # the seven of the first attempt, and all of the second


def test_a_replica_that_cannot_be_rebuilt_does_not_take_the_others_down(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    nodes = [FakeNode(coordinator, name) for name in ("one", "two", "three")]
    settle(*nodes)
    coordinator.create(spec(source, replicas=2))
    settle(*nodes)
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
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)
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


def test_asking_again_for_a_dataset_that_lost_a_shard_loads_it_anew(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)
    one.failing = failing("the share is not mounted")
    clock.now += TIMEOUT_S + 1
    settle(one)
    assert state(coordinator) == "failed"
    one.failing = {}

    coordinator.create(spec(source))
    settle(one)

    assert state(coordinator) == "ready"
    assert homes(coordinator) == [["one"]] * FILES


# -- versions --------------------------------------------------------------------------------------


def test_a_new_version_is_loaded_beside_the_old_one_which_goes_when_the_new_is_ready(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)

    new = coordinator.create(spec(source, columns=["row"]))
    assert coordinator.get("table").fingerprint == new.fingerprint
    assert coordinator.get("table", old.fingerprint).state == pb.DATASET_STATE_READY
    node.beat(load=[])
    assert len(node.sealed[VersionKey("table", old.fingerprint)]) == FILES
    settle(node)

    assert state(coordinator) == "ready"
    with pytest.raises(StaleVersionError) as caught:
        coordinator.get("table", old.fingerprint)
    assert old.fingerprint in str(caught.value) and new.fingerprint in str(caught.value)
    node.beat()
    assert set(node.sealed) == {VersionKey("table", new.fingerprint)}


def test_asking_for_the_old_version_again_gives_up_the_new_one(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)
    coordinator.create(spec(source, columns=["row"]))

    again = coordinator.create(spec(source))
    settle(node)

    assert again.state == pb.DATASET_STATE_READY
    assert again.fingerprint == old.fingerprint
    assert set(node.sealed) == {VersionKey("table", old.fingerprint)}
    assert node.loads == FILES


def test_a_deleted_dataset_is_asked_of_no_node(coordinator: Coordinator, source: Path) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)

    coordinator.delete("table")

    assert node.beat() == {}
    assert coordinator.datasets() == []
    with pytest.raises(DatasetNotFoundError, match=r"no dataset 'table'; datasets: none"):
        coordinator.delete("table")


# -- restart ---------------------------------------------------------------------------------------


def test_a_restarted_coordinator_presumes_its_nodes_alive_and_moves_nothing(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)
    share = {node.id: node.holds("table") for node in (one, two)}

    again = make(tmp_path, clock)
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

    again = make(tmp_path, clock)

    assert again.get("table").fingerprint == new.fingerprint


def test_a_replaced_version_that_is_read_outlives_a_restart_of_the_coordinator(
    source: Path, tmp_path: Path, clock: Clock
) -> None:
    coordinator = make(tmp_path, clock)
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)
    coordinator.get("table", old.fingerprint, lease=True)
    new = coordinator.create(spec(source, columns=["row"]))
    settle(node)

    again = make(tmp_path, clock)
    node = node.restart(again)
    settle(node)
    assert again.get("table", old.fingerprint).state == pb.DATASET_STATE_READY
    clock.now += 601.0  # the lease
    settle(node)

    with pytest.raises(StaleVersionError):
        again.get("table", old.fingerprint)
    assert again.get("table").fingerprint == new.fingerprint


def test_a_restarted_coordinator_knows_the_row_ids_at_once(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source, filter="label > 2"))
    settle(node)
    before = coordinator.get("table")

    again = make(tmp_path, clock)
    (desired,) = again.heartbeat(node.restart(again).report()).datasets

    assert desired.rows_fixed
    assert [s.row_start for s in desired.shards] == [s.rows.start for s in before.shards]
    assert again.get("table").fingerprint == before.fingerprint


def test_nodes_that_do_not_report_after_a_restart_are_lost_after_the_timeout(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))
    settle(one, two)

    again = make(tmp_path, clock)
    one = one.restart(again)
    settle(one)
    clock.now += TIMEOUT_S + 1
    settle(one)

    assert state(again) == "ready"
    assert homes(again) == [["one"]] * FILES


def test_a_load_that_was_under_way_goes_on_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.beat(load=[0, 1, 2])
    node.beat(load=[])

    again = make(tmp_path, clock)
    node = node.restart(again)
    settle(node)

    assert state(again) == "ready"
    assert node.loads == FILES - 3


def test_a_deleted_dataset_stays_deleted_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)
    coordinator.delete("table")

    again = make(tmp_path, clock)

    assert again.datasets() == []
    assert node.restart(again).beat() == {}


def test_a_rebuilt_replica_that_fails_does_not_fail_a_dataset_known_from_before_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source, replicas=2))
    settle(one, two)

    again = make(tmp_path, clock)
    one, two = one.restart(again), two.restart(again)
    two.sealed.clear()
    two.failing = failing("the source is gone")
    settle(one, two)

    assert two.failed
    assert state(again) == "ready"
    assert homes(again) == [["one"]] * FILES


# -- secrets ---------------------------------------------------------------------------------------

SECRETS = {"aws_secret_access_key": "hush-hush"}


def secret_spec(source: Path, **changes: object) -> DatasetSpec:
    return spec(source, storage_options=SECRETS, **changes)


def told(coordinator: Coordinator, node: FakeNode) -> pb.DesiredDataset:
    (desired,) = coordinator.heartbeat(node.report()).datasets
    return desired


def test_whoever_attaches_without_secrets_takes_none_away(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    settle(node)

    coordinator.create(spec(source))

    desired = told(coordinator, node)
    assert desired.plan.has_secrets
    assert desired.secrets.tables["source"].values == SECRETS


def test_new_secrets_replace_the_old_ones_and_none_are_missed_where_there_were_none(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)
    coordinator.create(spec(source))
    assert not told(coordinator, node).plan.has_secrets

    coordinator.create(secret_spec(source))
    coordinator.create(spec(source, storage_options={"aws_secret_access_key": "newer"}))

    desired = told(coordinator, node)
    assert desired.plan.has_secrets
    assert desired.secrets.tables["source"].values["aws_secret_access_key"] == "newer"


def test_a_load_that_lost_its_secrets_in_a_restart_goes_on_when_they_are_given_again(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    node.beat(load=[0, 1, 2])
    node.beat(load=[])

    again = make(tmp_path, clock)
    assert state(again) == "loading"  # no node has said yet what it holds
    node = node.restart(again)
    node.beat()
    info = again.get("table")
    assert info.state == pb.DATASET_STATE_FAILED
    assert "credentials of 'table' were not kept" in info.error.message
    assert "load its spec again" in info.error.message
    assert node.holds("table") == {0, 1, 2}  # nothing was asked that needs the secrets

    assert again.create(secret_spec(source)).state == pb.DATASET_STATE_LOADING
    settle(node)

    assert state(again) == "ready"
    assert node.loads == FILES - 3


def test_a_dataset_that_is_whole_misses_no_secrets_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    settle(node)

    again = make(tmp_path, clock)
    settle(node.restart(again))

    assert state(again) == "ready"


# -- attaching to what was there before ------------------------------------------------------------


def test_the_very_spec_of_a_dataset_that_was_ready_attaches_though_its_source_is_gone(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    before = coordinator.create(secret_spec(source))
    settle(node)
    again = make(tmp_path, clock)
    node = node.restart(again)
    shutil.rmtree(source)

    info = again.attach(secret_spec(source, replicas=2))

    assert info is not None and info.fingerprint == before.fingerprint
    settle(node)
    assert state(again) == "ready"
    assert told(again, node).secrets.tables["source"].values == SECRETS
    assert node.loads == 0


def test_another_spec_or_a_load_that_never_came_to_its_end_is_nothing_to_attach_to(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    assert coordinator.attach(spec(source)) is None
    coordinator.create(spec(source))
    assert coordinator.attach(spec(source)) is None
    settle(node)

    assert coordinator.attach(spec(source, columns=["row"])) is None
    assert coordinator.attach(spec(source, name="other")) is None
    assert coordinator.attach(spec(source)) is not None


# -- what keeps a source as it was planned ---------------------------------------------------------


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables whose pins were let go."""
    names: list[str] = []

    def plan_with_counted_pins(wanted: DatasetSpec) -> PlannedVersion:
        planned = plan_version(wanted)
        pins = {
            name: replace(pin, close=lambda: names.append(wanted.name))
            for name, pin in planned.pins.items()
        }
        return replace(planned, pins=pins)

    monkeypatch.setattr(coordinator_module, "plan_version", plan_with_counted_pins)
    return names


def test_a_load_that_came_out_with_the_wrong_number_of_rows_lets_go_of_its_source(
    coordinator: Coordinator, source: Path, closed: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    node.rows_of = {3: 4}
    coordinator.create(spec(source))

    settle(node)

    assert state(coordinator) == "failed"
    assert closed == ["table"]


def test_a_coordinator_that_closes_lets_go_of_the_sources_of_its_loads(
    coordinator: Coordinator, source: Path, closed: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source, name="done"))
    settle(node)
    coordinator.create(spec(source, name="under-way"))
    assert closed == ["done"]

    coordinator.close()
    coordinator.close()

    assert closed == ["done", "under-way"]


# -- what is told with a heartbeat -----------------------------------------------------------------


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


# -- capacity --------------------------------------------------------------------------------------


def test_a_dataset_that_cannot_fit_is_refused_before_the_load_with_the_numbers(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "small", limit_bytes=1000)
    node.beat()

    with pytest.raises(LoadError) as caught:
        coordinator.create(spec(source))

    for quote in ("'table'", "small", "limit of 1000", "replicas=1"):
        assert quote in str(caught.value)
    assert coordinator.datasets() == []
    assert node.beat() == {}


def test_what_a_filter_keeps_is_not_known_so_it_is_not_refused_beforehand(
    coordinator: Coordinator, source: Path
) -> None:
    FakeNode(coordinator, "small", limit_bytes=1000).beat()

    info = coordinator.create(spec(source, filter="row < 3"))

    assert info.state == pb.DATASET_STATE_LOADING


def test_a_dataset_that_fits_on_two_nodes_but_not_with_two_replicas_is_refused(
    coordinator: Coordinator, source: Path
) -> None:
    one_copy = sum(shard.estimated_bytes for shard in plan_version(spec(source)).plan.shards)
    for name in ("one", "two"):
        FakeNode(coordinator, name, limit_bytes=one_copy * 3 // 4).beat()

    coordinator.create(spec(source))
    with pytest.raises(LoadError, match="replicas=2"):
        coordinator.create(spec(source, name="twice", replicas=2))

    assert [info.spec.name for info in coordinator.datasets()] == ["table"]


def test_a_failed_dataset_makes_room_for_itself_when_it_is_loaded_again(
    coordinator: Coordinator, source: Path
) -> None:
    size = sum(shard.estimated_bytes for shard in plan_version(spec(source)).plan.shards)
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


def test_the_rate_of_a_load_is_that_of_the_nodes_that_had_something_to_read(
    coordinator: Coordinator, source: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "_FEWEST_RATED_BYTES", 1)
    nodes = [FakeNode(coordinator, f"node-{index}") for index in range(2 * FILES)]
    settle(*nodes)

    for filter in (None, "row < 3"):  # what it drops was read, too
        coordinator.create(spec(source, filter=filter))
        clock.now += 4.0
        settle(*nodes)

        assert state(coordinator) == "ready"
        foretold = coordinator.plan(spec(source, filter=filter))
        assert foretold.load_s == pytest.approx(4.0)


# -- a disk that is full ---------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What cannot be written while its name stands here."""
    names: list[str] = []
    replace_file = os.replace

    def refuse(source: Path, target: Path) -> None:
        if any(name in str(target) for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    yield names
    names.clear()


def test_a_dataset_whose_readiness_cannot_be_kept_fails_and_the_coordinator_goes_on(
    coordinator: Coordinator, source: Path, full_disk: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    settle(node)
    coordinator.create(spec(source))

    full_disk.append("table@")
    settle(node)

    info = coordinator.get("table")
    assert info.state == pb.DATASET_STATE_FAILED
    assert "catalogue entry of 'table': No space left" in info.error.message
    with pytest.raises(LoadError, match="No space left"):
        coordinator.create(spec(source))
    full_disk.clear()
    coordinator.create(spec(source))
    settle(node)
    assert state(coordinator) == "ready"


def test_members_that_cannot_be_kept_are_kept_when_there_is_room(
    tmp_path: Path, coordinator: Coordinator, clock: Clock, full_disk: list[str]
) -> None:
    full_disk.append(".members.json")
    node = FakeNode(coordinator, "one")
    node.beat()
    assert make(tmp_path, clock).nodes() == []

    full_disk.clear()
    node.beat()

    assert [node.id for node in make(tmp_path, clock).nodes()] == ["one"]


def test_whoever_attaches_while_nothing_can_be_written_changes_nothing(
    coordinator: Coordinator, source: Path, full_disk: list[str]
) -> None:
    nodes = [FakeNode(coordinator, name) for name in ("one", "two")]
    settle(*nodes)
    coordinator.create(spec(source))
    settle(*nodes)

    full_disk.append("table@")
    with pytest.raises(LoadError, match="No space left"):
        coordinator.create(spec(source, replicas=2))

    assert coordinator.get("table").spec.replicas == 1
    assert state(coordinator) == "ready"


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

    restarted = beat(shards=[pb.ActualShard(**shard)])  # it has its file, and was told nothing yet

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

    again = make(tmp_path, clock)
    del beat.datasets[:]
    desired = again.heartbeat(beat).datasets[0]

    assert not desired.run_whole
    assert state(again) == "ready"


def make_plan(source: Path):
    from cache_server.versions import plan_version

    return plan_version(spec(source)).plan


# -- watching --------------------------------------------------------------------------------------


def test_watching_gives_the_present_state_at_once_and_ends_when_ready(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    info = coordinator.create(spec(source))
    watch = coordinator.watch("table", info.fingerprint, lambda: True)

    assert next(watch).state == pb.DATASET_STATE_LOADING
    settle(node)
    assert next(watch).state == pb.DATASET_STATE_READY
    assert list(watch) == []


def test_a_change_between_two_looks_is_told_at_once(
    coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(coordinator, "one")
    info = coordinator.create(spec(source))
    monkeypatch.setattr(coordinator, "_interval_s", 60.0)
    monkeypatch.setattr(coordinator_module, "_WATCH_S", 60.0)
    watch = coordinator.watch("table", info.fingerprint, lambda: True)
    next(watch)
    settle(node)  # while whoever watches is busy with what it was told
    began = time.monotonic()
    assert next(watch).state == pb.DATASET_STATE_READY
    assert time.monotonic() - began < 30.0


def test_watching_ends_when_nobody_watches_any_more(coordinator: Coordinator, source: Path) -> None:
    coordinator.create(spec(source))
    watching = [True]
    watch = coordinator.watch("table", "", lambda: watching[0])
    next(watch)

    watching[0] = False

    assert list(watch) == []
