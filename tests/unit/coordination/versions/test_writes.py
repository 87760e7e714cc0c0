"""What the coordinator makes of puts that nodes report: versions, and writes that end."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_protocol.errors import (
    DatasetNotFoundError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.protocol_version import PROTOCOL
from cache_server.auth.principals import Principal
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings import holder_checks
from cache_server.coordination.versions import writes
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import LEASE_S, Clock, make_coordinator, spec

SCHEMA = pa.schema([("row", pa.int64())])
TTL_S = 50.0
NAME = "t"


class PuttingNode:
    """A remote node that takes puts and moves their shards, in messages only."""

    def __init__(
        self, coordinator: Coordinator, node_id: str, limit_bytes: int = 0, protocol: int = PROTOCOL
    ) -> None:
        self.coordinator, self.id, self.limit_bytes = coordinator, node_id, limit_bytes
        self.protocol = protocol
        self.puts: dict[str, int] = {}  # name -> number of shards
        self.moved: dict[str, dict[int, str]] = {}  # fingerprint -> shard -> checksum
        self.starts: dict[tuple[str, int], int] = {}  # (fingerprint, shard) -> first row

    def beat(self) -> pb.HeartbeatResponse:
        request = pb.HeartbeatRequest(
            node=pb.Node(
                id=self.id,
                flight_location=f"grpc://{self.id}:1",
                process=self.id,
                protocol=self.protocol,
                memory_limit_bytes=self.limit_bytes,
                stored_bytes=100 * sum(self.puts.values()),
            ),
        )
        for name, num_shards in self.puts.items():
            actual = request.datasets.add(dataset=NAME, fingerprint=name, num_shards=num_shards)
            for index in range(num_shards):
                self._add(actual, index, f"{name[-8:]}.{index}")
        for fingerprint, shards in self.moved.items():
            actual = request.datasets.add(dataset=NAME, fingerprint=fingerprint, attempt=0)
            for index, checksum in shards.items():
                self._add(actual, index, checksum, fingerprint)
        return self.coordinator.heartbeat(request, by=Principal(self.id))

    def _add(
        self, actual: pb.ActualDataset, index: int, checksum: str, fingerprint: str = ""
    ) -> None:
        start = self.starts.get((fingerprint, index))
        actual.shards.add(
            index=index, sealed=True, num_rows=5, num_bytes=100, checksum=checksum,
            rows_fixed=start is not None, row_start=start or 0,
        )  # fmt: skip

    def put(self, write_id: str, partition: int, attempt: int = 0, *, shards: int = 2) -> None:
        key = PutKey(write_id, partition, attempt, f"{partition:04x}{attempt:04x}")
        self.puts[key.version_key(NAME).fingerprint] = shards
        self.beat()

    def move(self) -> set[int]:
        """Does what the answer says; returns the shards that it moved."""
        moved: set[int] = set()
        answer = self.beat()
        for desired in answer.datasets:
            shards = self.moved.setdefault(desired.plan.fingerprint, {})
            for shard in desired.shards:
                self.starts[desired.plan.fingerprint, shard.index] = shard.row_start
                if shard.splits:
                    (split,) = shard.splits
                    shards[shard.index] = split.file.etag
                    moved.add(shard.index)
                elif shard.HasField("same_as") and not shard.same_as.copy_from:
                    base = self.moved[shard.same_as.fingerprint]
                    shards[shard.index] = base[shard.same_as.index]
        for gone in answer.gone:
            self.puts.pop(gone.fingerprint, None)
            self.moved.pop(gone.fingerprint, None)
        return moved


def begin(
    coordinator: Coordinator,
    name: str = NAME,
    *,
    append: bool = False,
    schema: pa.Schema = SCHEMA,
    **content: Any,
) -> str:
    spec = pb.DatasetSpec(name=name, **{"replicas": 1, **content})
    request = pb.BeginWriteRequest(spec=spec, ttl_s=TTL_S, full_wait_s=1.0, append=append)
    return coordinator.begin_write(request, schema).write_id


def commit(coordinator: Coordinator, write_id: str, *partitions: int) -> pb.DatasetInfo:
    info = coordinator.commit_write(write_id, [writes.Chosen(each, 0) for each in partitions])
    assert isinstance(info, pb.DatasetInfo)
    return info


def settle(*nodes: PuttingNode) -> None:
    for node in nodes * 3:
        node.move()


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

    assert coordinator.commit_write(
        write, [writes.Chosen(1, 0), writes.Chosen(2, 0), writes.Chosen(4, 2)]
    ) == [2, 4]
    with pytest.raises(RequestError, match="once"):
        coordinator.commit_write(write, [writes.Chosen(1, 0), writes.Chosen(1, 1)])
    info = coordinator.commit_write(
        write, [writes.Chosen(4, 0), writes.Chosen(1, 0), writes.Chosen(6, 0)]
    )

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


def test_a_commit_takes_only_puts_that_their_nodes_have_at_this_moment(tmp_path: Path) -> None:
    answers: dict[str, dict[VersionKey, dict[int, str]]] = {}

    def ask(
        location: str, dataset: str, keys: Collection[VersionKey]
    ) -> dict[VersionKey, dict[int, str]]:
        assert dataset == NAME and {key.fingerprint for key in keys} <= node.puts.keys()
        if location not in answers:
            raise NodeUnavailableError(f"{location} does not answer")
        return answers[location]

    coordinator = make_coordinator(tmp_path, Clock(), ask)
    node = PuttingNode(coordinator, "a")
    node.beat()
    write = begin(coordinator)
    node.put(write, 0)
    chosen = [writes.Chosen(0, 0)]
    (name,) = node.puts
    key = VersionKey(NAME, name)
    held = {index: f"{name[-8:]}.{index}" for index in range(2)}

    with pytest.raises(NotReadyError, match=r"node a has some of its rows, and does not answer"):
        coordinator.commit_write(write, chosen)
    for wrong in ({}, {key: {0: held[0]}}, {key: {**held, 1: "other"}}):
        answers["grpc://a:1"] = wrong
        assert coordinator.commit_write(write, chosen) == [0]
    assert open_writes(node) == {write: False} and node.puts
    answers["grpc://a:1"] = {key: held}
    assert isinstance(coordinator.commit_write(write, chosen), pb.DatasetInfo)


def test_what_a_node_of_the_last_release_reported_counts_for_a_commit(tmp_path: Path) -> None:
    def ask(*_: object) -> dict[VersionKey, dict[int, str]]:
        raise AssertionError("it does not know the question")

    coordinator = make_coordinator(tmp_path, Clock(), ask)
    node = PuttingNode(coordinator, "a", protocol=0)
    node.beat()
    write = begin(coordinator)
    node.put(write, 0)
    assert isinstance(coordinator.commit_write(write, [writes.Chosen(0, 0)]), pb.DatasetInfo)


def test_a_commit_is_answered_once_its_nodes_have_said_again_that_they_have_the_rows(
    tmp_path: Path,
) -> None:
    coordinator = make_coordinator(tmp_path, Clock())
    nodes = [PuttingNode(coordinator, name) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    write = begin(coordinator)
    nodes[0].put(write, 0)
    commit(coordinator, write, 0)
    assert nodes[0].move() == {0, 1}

    nodes[0].beat()  # reports the last replica
    nodes[1].beat()  # has none
    assert coordinator.get(NAME).state == pb.DATASET_STATE_LOADING and nodes[0].puts
    nodes[0].beat()
    assert coordinator.get(NAME).state == pb.DATASET_STATE_READY


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
        coordinator.commit_write(twice, [writes.Chosen(0, 0)])
    assert isinstance(coordinator.commit_write(once, [writes.Chosen(1, 0)]), pb.DatasetInfo)
    coordinator.abort_write(other)
    assert isinstance(coordinator.commit_write(twice, [writes.Chosen(0, 0)]), pb.DatasetInfo)


def test_a_commit_goes_on_after_a_restart_and_an_open_write_does_not(tmp_path: Path) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    node = PuttingNode(coordinator, "a")
    node.beat()
    committed, left = begin(coordinator), begin(coordinator)
    node.put(committed, 0)
    node.put(left, 0)
    info = coordinator.commit_write(committed, [writes.Chosen(0, 0)])
    assert isinstance(info, pb.DatasetInfo)

    node.coordinator = again = make_coordinator(tmp_path, clock)

    assert open_writes(node) == {committed: True}
    repeated = again.commit_write(committed, [])
    assert isinstance(repeated, pb.DatasetInfo) and repeated.fingerprint == info.fingerprint
    with pytest.raises(RequestError, match="no open write"):
        again.commit_write(left, [writes.Chosen(0, 0)])
    assert node.move() == {0, 1}


def test_rows_of_a_node_that_is_lost_before_it_moved_them_wait_for_it(tmp_path: Path) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    nodes = [PuttingNode(coordinator, name) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    write = begin(coordinator)
    nodes[0].put(write, 0)
    coordinator.commit_write(write, [writes.Chosen(0, 0)])

    clock.now += 15.0  # more than the timeout
    nodes[1].beat()

    info = coordinator.get(NAME)
    assert (info.state, [*info.awaited]) == (pb.DATASET_STATE_UNAVAILABLE, ["a"])
    assert "10 of its rows were written" in info.error.message and "node a." in info.error.message
    settle(nodes[0])
    assert coordinator.get(NAME).state == pb.DATASET_STATE_READY
    assert not nodes[0].puts


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
        coordinator.commit_write(write, [writes.Chosen(0, 0)])
    with pytest.raises(DatasetNotFoundError):
        coordinator.get(NAME)

    node.beat()
    for _ in range(writes.MAX_OPEN_OF_NAMESPACE):
        begin(coordinator)
    with pytest.raises(RequestError, match=f"'default' has at most {writes.MAX_OPEN_OF_NAMESPACE}"):
        begin(coordinator)
    for number in range(writes.MAX_OPEN - writes.MAX_OPEN_OF_NAMESPACE):
        begin(coordinator, f"team-{number}/{NAME}")
    with pytest.raises(RequestError, match=f"a cache has at most {writes.MAX_OPEN}"):
        begin(coordinator, f"team/{NAME}")
    assert all(write.schema_digest for write in node.beat().writes if not write.committed)
    with pytest.raises(RequestError, match="no source and no query"):
        request = pb.BeginWriteRequest(spec=pb.DatasetSpec(name=NAME, sql="SELECT 1"))
        coordinator.begin_write(request, SCHEMA)


# -- appends -----------------------------------------------------------------------------------


def test_appends_land_in_the_order_of_their_commits_and_move_their_own_rows_only(
    tmp_path: Path,
) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    nodes = [PuttingNode(coordinator, name) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    one, two, three = (begin(coordinator, append=True, readers=[each]) for each in "xyz")
    nodes[0].put(one, 0)
    nodes[1].put(two, 0)
    nodes[0].put(three, 7, shards=1)

    commit(coordinator, two, 0)  # it makes the dataset
    with pytest.raises(NotReadyError, match="not ready for an append"):
        commit(coordinator, one, 0)
    assert nodes[1].move() == {0, 1}
    settle(*nodes)
    assert coordinator.next_check(0.0) is None  # no file is read a second time
    second = commit(coordinator, one, 0)
    assert second.num_rows == 20 and second.progress.shards_reused == 2
    assert coordinator.get(NAME).fingerprint == second.fingerprint
    assert nodes[0].move() == {2, 3}
    assert open_writes(nodes[1]) == {one: True, three: False}

    def restarted() -> Coordinator:
        made = make_coordinator(tmp_path, clock)
        for node in nodes:
            node.coordinator = made
        settle(*nodes)
        while (check := made.next_check(0.0)) is not None:
            made.apply_check(check, holder_checks.Outcome.MATCHES)
        settle(*nodes)
        return made

    coordinator = restarted()  # before the second version is ready
    for _ in range(11):
        clock.now += LEASE_S / 10
        settle(*nodes)  # at last, the first version is forgotten
    assert [list(node.moved) for node in nodes] == [[second.fingerprint]] * 2
    coordinator = restarted()
    ready = coordinator.get(NAME)
    assert ready.state == pb.DATASET_STATE_READY and ready.num_rows == 20
    assert list(ready.spec.readers) == ["x", "y"]
    assert [list(shard.node_ids) for shard in ready.shards] == [["b"], ["b"], ["a"], ["a"]]
    for repeated in (one, two):  # the rows of both are there, so nothing is put again
        assert commit(coordinator, repeated, 0).fingerprint == second.fingerprint
    with pytest.raises(RequestError, match="no open write"):
        commit(coordinator, three, 7)  # the restart ended it


def test_an_append_is_refused_by_name_where_its_rows_would_not_stay_or_not_fit(
    tmp_path: Path, source: Path
) -> None:
    clock = Clock()
    coordinator = make_coordinator(tmp_path, clock)
    nodes = [PuttingNode(coordinator, name) for name in ("a", "b")]
    for node in nodes:
        node.beat()
    write = begin(coordinator, nulls="refuse", replicas=2)
    nodes[0].put(write, 0)
    commit(coordinator, write, 0)
    assert coordinator.get(NAME).state == pb.DATASET_STATE_LOADING
    late = begin(coordinator, append=True)
    with pytest.raises(RequestError, match=r"have a column 'row'; .*write all rows again"):
        begin(coordinator, append=True, schema=pa.schema([("x", pa.int64())]))
    with pytest.raises(RequestError, match="'row' comes as float, which cannot become int64"):
        begin(coordinator, append=True, schema=pa.schema([("row", pa.float32())]))
    other = begin(coordinator, schema=pa.schema([("x", pa.int64())]))
    nodes[0].put(late, 0)
    nodes[1].put(other, 0, shards=1)
    assert {write.nulls for write in nodes[0].beat().writes} == {"refuse", "keep"}
    commit(coordinator, other, 0)
    settle(*nodes)
    with pytest.raises(RequestError, match="its columns have changed"):
        commit(coordinator, late, 0)

    clock.now += 15.0  # more than the timeout
    nodes[0].beat()
    with pytest.raises(NodeUnavailableError, match=r"5 of its rows were written.*node b\."):
        begin(coordinator, append=True)
    coordinator.create(spec(source))
    with pytest.raises(RequestError, match="it was loaded, and its next load would drop"):
        begin(coordinator, spec(source).name, append=True)


def test_schemas_of_open_writes_are_bounded_by_principal_namespace_and_cache(
    coordinator: Coordinator,
) -> None:
    node = PuttingNode(coordinator, "a")
    node.beat()
    wide = pa.schema([("x" * (writes.MAX_SCHEMA_BYTES_OF_PRINCIPAL // 5), pa.int64())])

    def fill(principal: str, namespace: str) -> tuple[int, str]:
        """How many writes begin, and why the next one does not."""
        request = pb.BeginWriteRequest(spec=pb.DatasetSpec(name=f"{namespace}/t"), ttl_s=TTL_S)
        for number in range(100):
            try:
                coordinator.begin_write(request, wide, by=Principal(principal, namespace))
            except RequestError as error:
                return number, str(error)
        raise AssertionError("no bound")

    assert fill("bob", "b") == (4, fill("bob", "b")[1])
    assert "principal 'bob'" in fill("bob", "b")[1]
    assert fill("ben", "b")[0] == 4
    number, why = fill("bea", "b")
    of_namespace = writes.MAX_SCHEMA_BYTES_OF_NAMESPACE // writes.MAX_SCHEMA_BYTES_OF_PRINCIPAL
    assert number == 5 * of_namespace - 1 - 8 and "namespace 'b'" in why
    begun = {name: fill(name, name)[0] for name in ("c", "d", "e", "f", "g", "h", "i", "j", "k")}
    assert begun["c"] == 4 and begun["k"] == 0
    assert "a cache has" in fill("k", "k")[1]
    most = writes.MAX_SCHEMA_BYTES // (writes.MAX_SCHEMA_BYTES_OF_PRINCIPAL // 5)
    assert sum(begun.values()) + 8 + number in (most, most - 1)
    with pytest.raises(RequestError, match="write fewer columns"):
        writes.require_small_schema(writes.MAX_SCHEMA_BYTES_OF_PRINCIPAL + 1)

    answer = node.beat()
    assert len(answer.writes) == sum(begun.values()) + 8 + number
    assert answer.ByteSize() < 200 * len(answer.writes)
    one = answer.writes[0]
    schema = coordinator.write_schema(one.write_id)
    assert hashlib.sha256(schema).hexdigest() == one.schema_digest
    with pytest.raises(RequestError, match="no open write"):
        coordinator.write_schema("0" * 32)
