"""What the coordinator makes of puts that nodes report: versions, and writes that end."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cache_protocol.errors import DatasetNotFoundError, LoadError, NotReadyError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.writes import MAX_OPEN, MAX_OPEN_OF_NAMESPACE, Chosen
from cache_server.shards.put_key import PutKey
from tests.fake_nodes import Clock, make_coordinator

SCHEMA = pa.schema([("row", pa.int64())])
TTL_S = 50.0
NAME = "t"


class PuttingNode:
    """A remote node that takes puts and moves their shards, in messages only."""

    def __init__(self, coordinator: Coordinator, node_id: str, limit_bytes: int = 0) -> None:
        self.coordinator, self.id, self.limit_bytes = coordinator, node_id, limit_bytes
        self.puts: dict[str, int] = {}  # name -> number of shards
        self.moved: dict[str, dict[int, str]] = {}  # fingerprint -> shard -> checksum
        self.starts: dict[int, int] = {}

    def beat(self) -> pb.HeartbeatResponse:
        request = pb.HeartbeatRequest(
            node=pb.Node(
                id=self.id,
                flight_location=f"grpc://{self.id}:1",
                process=self.id,
                memory_limit_bytes=self.limit_bytes,
                stored_bytes=100 * sum(self.puts.values()),
            )
        )
        for name, num_shards in self.puts.items():
            actual = request.datasets.add(dataset=NAME, fingerprint=name, num_shards=num_shards)
            for index in range(num_shards):
                self._add(actual, index, f"{name[-8:]}.{index}")
        for fingerprint, shards in self.moved.items():
            actual = request.datasets.add(dataset=NAME, fingerprint=fingerprint, attempt=0)
            for index, checksum in shards.items():
                self._add(actual, index, checksum)
        return self.coordinator.heartbeat(request, by=Principal(self.id))

    def _add(self, actual: pb.ActualDataset, index: int, checksum: str) -> None:
        actual.shards.add(
            index=index, sealed=True, num_rows=5, num_bytes=100, checksum=checksum,
            rows_fixed=index in self.starts, row_start=self.starts.get(index, 0),
        )  # fmt: skip

    def put(self, write_id: str, partition: int, attempt: int = 0, *, shards: int = 2) -> None:
        key = PutKey(write_id, partition, attempt, f"{partition:04x}{attempt:04x}")
        self.puts[key.version_key(NAME).fingerprint] = shards
        self.beat()

    def move(self) -> set[int]:
        """Does what the answer says; returns the shards that it moved."""
        moved: set[int] = set()
        for desired in self.beat().datasets:
            shards = self.moved.setdefault(desired.plan.fingerprint, {})
            for shard in desired.shards:
                self.starts[shard.index] = shard.row_start
                if shard.splits:
                    (split,) = shard.splits
                    shards[shard.index] = split.file.etag
                    moved.add(shard.index)
        self.puts.clear()
        return moved


def begin(coordinator: Coordinator, name: str = NAME, replicas: int = 1) -> str:
    spec = pb.DatasetSpec(name=name, replicas=replicas)
    request = pb.BeginWriteRequest(spec=spec, ttl_s=TTL_S, full_wait_s=1.0)
    return coordinator.begin_write(request, SCHEMA).write_id


def open_writes(node: PuttingNode) -> dict[str, bool]:
    """The writes that a node is told of -> whether they are committed."""
    return {write.write_id: write.committed for write in node.beat().writes}


def test_chosen_puts_become_a_version_on_the_nodes_that_have_them_without_a_second_read(
    tmp_path: Path,
) -> None:
    coordinator = make_coordinator(tmp_path, Clock())
    with pytest.raises(NotReadyError, match="no node"):
        begin(coordinator)
    nodes = [PuttingNode(coordinator, name) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    write = begin(coordinator)
    assert open_writes(nodes[0]) == {write: False}
    nodes[1].put(write, 1)
    nodes[0].put(write, 4, 0)
    nodes[1].put(write, 4, 1)
    nodes[0].put(write, 6, shards=0)

    assert coordinator.commit_write(write, [Chosen(1, 0), Chosen(2, 0), Chosen(4, 2)]) == [2, 4]
    with pytest.raises(RequestError, match="once"):
        coordinator.commit_write(write, [Chosen(1, 0), Chosen(1, 1)])
    info = coordinator.commit_write(write, [Chosen(4, 0), Chosen(1, 0), Chosen(6, 0)])

    assert isinstance(info, pb.DatasetInfo) and info.num_rows == 20
    assert open_writes(nodes[0]) == {write: True}
    assert nodes[1].move() == {0, 1}
    assert nodes[0].move() == {2, 3}
    for node in (*nodes, *nodes):
        node.beat()
    ready = coordinator.get(NAME)
    assert ready.state == pb.DATASET_STATE_READY
    assert [list(shard.node_ids) for shard in ready.shards] == [["b"], ["b"], ["a"], ["a"]]
    assert coordinator.next_check(0.0) is None
    assert open_writes(nodes[0]) == {}


def test_copies_that_do_not_fit_are_refused_and_the_write_stays_open(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path, Clock())
    nodes = [PuttingNode(coordinator, name, limit_bytes=500) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    other, twice, once = (begin(coordinator, replicas=replicas) for replicas in (1, 2, 1))
    nodes[0].put(twice, 0)
    nodes[0].put(once, 1)
    nodes[1].put(other, 0, shards=4)
    with pytest.raises(LoadError, match=r"200 bytes on node b, which holds 400 .* limit of 500"):
        coordinator.commit_write(twice, [Chosen(0, 0)])
    assert isinstance(coordinator.commit_write(once, [Chosen(1, 0)]), pb.DatasetInfo)
    coordinator.abort_write(other)
    assert isinstance(coordinator.commit_write(twice, [Chosen(0, 0)]), pb.DatasetInfo)


def test_a_commit_goes_on_after_a_restart_and_an_open_write_does_not(tmp_path: Path) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    node = PuttingNode(coordinator, "a")
    node.beat()
    committed, left = begin(coordinator), begin(coordinator)
    node.put(committed, 0)
    node.put(left, 0)
    info = coordinator.commit_write(committed, [Chosen(0, 0)])
    assert isinstance(info, pb.DatasetInfo)

    node.coordinator = again = make_coordinator(tmp_path, clock)

    assert open_writes(node) == {committed: True}
    repeated = again.commit_write(committed, [])
    assert isinstance(repeated, pb.DatasetInfo) and repeated.fingerprint == info.fingerprint
    with pytest.raises(RequestError, match="no open write"):
        again.commit_write(left, [Chosen(0, 0)])
    assert node.move() == {0, 1}


def test_rows_of_a_node_that_is_lost_before_it_moved_them_fail_the_version(tmp_path: Path) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    nodes = [PuttingNode(coordinator, name) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    write = begin(coordinator)
    nodes[0].put(write, 0)
    coordinator.commit_write(write, [Chosen(0, 0)])

    clock.now += 15.0  # more than the timeout
    nodes[1].beat()

    info = coordinator.get(NAME)
    assert info.state == pb.DATASET_STATE_FAILED
    assert "no node has 10 of its rows" in info.error.message and "a" in info.error.message


def test_a_write_ends_when_it_is_idle_for_too_long_and_there_are_not_too_many(
    tmp_path: Path,
) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    node = PuttingNode(coordinator, "a")
    node.beat()
    write = begin(coordinator)
    clock.now += TTL_S - 1
    node.put(write, 0)
    clock.now += TTL_S - 1
    assert open_writes(node) == {write: False}  # the put counted
    clock.now += 2
    assert open_writes(node) == {}
    with pytest.raises(RequestError, match="ttl_s"):
        coordinator.commit_write(write, [Chosen(0, 0)])
    with pytest.raises(DatasetNotFoundError):
        coordinator.get(NAME)

    node.beat()
    for _ in range(MAX_OPEN_OF_NAMESPACE):
        begin(coordinator)
    with pytest.raises(RequestError, match=f"'default' has at most {MAX_OPEN_OF_NAMESPACE}"):
        begin(coordinator)
    for number in range(MAX_OPEN - MAX_OPEN_OF_NAMESPACE):
        begin(coordinator, f"team-{number}/{NAME}")
    with pytest.raises(RequestError, match=f"a cache has at most {MAX_OPEN}"):
        begin(coordinator, f"team/{NAME}")
    with pytest.raises(RequestError, match="no source and no query"):
        request = pb.BeginWriteRequest(spec=pb.DatasetSpec(name=NAME, sql="SELECT 1"))
        coordinator.begin_write(request, SCHEMA)
