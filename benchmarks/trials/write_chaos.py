"""Writes on real nodes and a real coordinator in this process, while everything fails.

A schedule is a seed: it decides the partitions, the attempts, and what fails at which step. Each
write must be there wholly, every row once and in order, or not at all. An append follows the rows
of others, among them one that is committed between its begin and its commit. Copies between nodes
and heartbeats are calls; all else is as in a server.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
)
from cache_protocol.storage.shard_files import Selection
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.versions import writes
from cache_server.node import peer_files
from cache_server.node.node import Node
from cache_server.node.puts import PutMessage
from cache_server.shards.put_key import PutKey
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey
from tests.waiting import wait_until

WAIT_S = 30.0
NAME = "written"
SCHEMA = pa.schema([("row", pa.int64()), ("half", pa.float32())])
ROW_BYTES = 12
_LOST_S = 1000.0
_MOST_ROUNDS = 6


class EndedError(Exception):
    """The coordinator ends at this step."""


class ChaosNode:
    """A node that can be killed, and started again with its files or without."""

    def __init__(self, cache: ChaosCache, index: int) -> None:
        self.cache, self.index = cache, index
        self.directory = cache.directory / f"node-{index}"
        self.location = f"grpc://node-{index}:1"
        self.id = ""
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.store = ShardStore(self.directory, address=f"node-{self.index}")
        self.id = self.store.node_id
        self.starts += 1
        self.node = Node(
            self.store,
            self.cache,
            pb.Node(
                id=self.id, flight_location=self.location, process=f"{self.index}.{self.starts}"
            ),
            load_threads=2,
        )
        self.is_up = True
        self.node.start()

    def kill(self) -> None:
        """Ends the node; the coordinator counts it as lost."""
        self.is_up = False
        self.node.close()
        self.store.close()
        self.cache.lose(self.id)

    def restart(self, *, keep_files: bool) -> None:
        if not keep_files:
            shutil.rmtree(self.directory)
            self.cache.lost_disks += 1
        self.start()


class ChaosCache:
    """Nodes and their coordinator; the link of the nodes."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, num_nodes: int = 3) -> None:
        self.directory = directory
        self.lost_disks = 0
        self.coordinator = self._make_coordinator()
        patch.setattr(peer_files, "shard_file", self._shard_file)
        self.nodes = [ChaosNode(self, index) for index in range(num_nodes)]
        self.wait_for_nodes()

    def _make_coordinator(self) -> Coordinator:
        return Coordinator(
            Catalogue(self.directory / "catalogue"),
            endpoints=pb.CoordinatorEndpoints(control_location="here:1"),
            heartbeat_interval_s=0.05,
            node_timeout_s=_LOST_S / 2,
            lease_s=0.0,
        )

    def _shard_file(
        self, location: str, key: VersionKey, index: int, **_: Any
    ) -> Iterator[pa.Buffer]:
        node = next(node for node in self.nodes if node.location == location)
        if not node.is_up:
            raise NodeUnavailableError(f"{location} is down")
        try:
            yield from node.node.shard_file(key, index, 1 << 20)
        except CacheError as error:  # as over Flight
            raise NodeUnavailableError(str(error)) from None

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        return self.coordinator.heartbeat(request)

    def get(self, name: str, fingerprint: str = "", **_: Any) -> pb.DatasetInfo:
        return self.coordinator.get(name, fingerprint)

    def write_schema(self, write_id: str) -> bytes:
        return self.coordinator.write_schema(write_id)

    def datasets(self, *_: Any) -> list[pb.DatasetInfo]:
        return self.coordinator.datasets()

    def restart_coordinator(self) -> None:
        """Another coordinator with the same disk; it knows the nodes when they have reported."""
        with self.coordinator.state.changed:
            lost = {
                node_id
                for node_id in self.coordinator.state.membership.members
                if node_id not in self.coordinator.state.membership.alive()
            }
        self.coordinator.close()
        self.coordinator = self._make_coordinator()
        for node_id in lost:
            self.lose(node_id)
        self.wait_for_nodes()

    def lose(self, node_id: str) -> None:
        """Lets a node count as lost at once."""
        with self.coordinator.state.changed:
            membership = self.coordinator.state.membership
            if node_id in membership.members:
                membership.members[node_id].last_seen -= _LOST_S
                membership._alive_until = -math.inf
                self.coordinator.state.mark_changed()

    def up(self) -> list[ChaosNode]:
        return [node for node in self.nodes if node.is_up]

    def wait_for_nodes(self) -> None:
        def reported() -> bool:
            known = {node.id: node for node in self.coordinator.nodes() if node.flight_location}
            return all(
                node.id in known and known[node.id].process == node.node.description.process
                for node in self.up()
            )

        for node in self.up():
            node.node.wake()
        wait_until(reported, WAIT_S, "every node has reported")

    def close(self) -> None:
        for node in self.up():
            node.kill()
        self.coordinator.close()

    def rows(self, info: pb.DatasetInfo) -> list[int]:
        """The numbers of all rows, in row order."""
        found: list[int] = []
        by_id = {node.id: node for node in self.up()}
        for shard in info.shards:
            holder = by_id[shard.node_ids[0]].node
            rows = holder.rows(info.spec.name, info.fingerprint)
            selection = Selection(rows.layout, ["row"])
            ids = np.arange(shard.rows.start, shard.rows.stop, dtype=np.int64)
            for stored in rows.gather(ids, selection):
                found += selection.layout.unpack(stored).column("row").to_pylist()
        return found

    def settled(self) -> str:
        """``there``, ``away``, ``failed`` or ``absent``; empty while the rows are on their way."""
        try:
            info = self.coordinator.get(NAME)
        except DatasetNotFoundError:
            return "absent"
        states = {
            pb.DATASET_STATE_READY: "there",
            pb.DATASET_STATE_FAILED: "failed",
            pb.DATASET_STATE_UNAVAILABLE: "away",
        }
        return states.get(info.state, "")

    def wait_until_settled(self) -> str:
        return wait_until(self.settled, WAIT_S, "the rows are there, away, failed or absent")

    def put_files(self) -> list[VersionKey]:
        """What lies on nodes for writes that have not been committed."""
        return [
            key
            for node in self.up()
            for key in node.store.versions()
            if PutKey.of(key.fingerprint) is not None
        ]


class ChaosWrite:
    """One write and its writer: a driver that puts again what failed, then commits.

    Attributes:
        expected: partition -> the numbers of its rows.
        wreck: lets something fail, with a probability.
    """

    def __init__(
        self, cache: ChaosCache, chance: random.Random, *, start: int = 0, append: bool = False
    ) -> None:
        self.cache, self.chance, self.append = cache, chance, append
        self.expected: dict[int, range] = {}
        for partition in sorted(chance.sample(range(20), chance.randint(1, 5))):
            stop = start + chance.choice([0, 1, 7, 40])
            self.expected[partition] = range(start, stop)
            start = stop
        self.replicas = chance.choice([1, 1, 2])
        self.attempts = dict.fromkeys(self.expected, -1)
        self.acks: dict[int, pb.PutResult] = {}
        self.write_id = ""
        self.wreck: Callable[[float], None] = lambda probability: None

    @property
    def rows(self) -> list[int]:
        return [row for partition in sorted(self.expected) for row in self.expected[partition]]

    def begin(self) -> None:
        spec = pb.DatasetSpec(name=NAME, replicas=self.replicas, target_shard_bytes=10 * ROW_BYTES)
        request = pb.BeginWriteRequest(spec=spec, ttl_s=600.0, full_wait_s=1.0, append=self.append)
        self.write_id = self.cache.coordinator.begin_write(request, SCHEMA).write_id

    def put(self, partition: int, *, attempt: int | None = None, broken: bool = False) -> None:
        """Puts a partition to some node; `acks` has its answer.

        Args:
            attempt: None: a new one.
            broken: the stream ends before its end.
        """
        if attempt is None:
            self.attempts[partition] += 1
            attempt = self.attempts[partition]
        node = self.chance.choice(self.cache.up())
        request = pb.PutRequest(
            dataset=NAME, write_id=self.write_id, partition=partition, attempt=attempt
        )
        messages = self._messages(self.expected[partition], broken=broken)
        self.acks[partition] = node.node.put(request, SCHEMA, messages)

    def _messages(self, rows: range, *, broken: bool) -> Iterator[PutMessage]:
        announce = self.chance.random() < 0.5
        shards = [rows[at : at + 10] for at in range(0, len(rows), 10)]
        for shard in shards:
            step = self.chance.choice([1, 3, 10])
            metadata = pb.PutShard(num_rows=len(shard)).SerializeToString() if announce else b""
            for at in range(0, len(shard), step):
                part = np.array(shard[at : at + step], np.int64)
                batch = pa.record_batch([part, (part / 2).astype(np.float32)], schema=SCHEMA)
                yield PutMessage(batch, metadata)
                metadata = b""
                self.wreck(0.01)
        if not broken:
            yield PutMessage(None, pb.PutEnd(num_rows=len(rows)).SerializeToString())

    def put_until_acknowledged(self, partition: int) -> None:
        """Puts as a task does that is retried, loses acknowledgements and runs twice."""
        for _ in range(_MOST_ROUNDS):
            fate = self.chance.choice(["ok", "ok", "lost ack", "same attempt", "twice", "broken"])
            with suppress(NodeUnavailableError):
                if fate == "broken":
                    with suppress(RequestError):
                        self.put(partition, broken=True)
                        raise AssertionError("a put without its end was acknowledged")
                    self.acks.pop(partition, None)
                    continue
                self.put(partition)
                if fate == "lost ack":
                    del self.acks[partition]
                    continue
                if fate == "same attempt":
                    self.put(partition, attempt=self.attempts[partition])
                if fate == "twice":
                    self.put(partition)
                return
        self.put(partition)

    def commit(self) -> pb.DatasetInfo | list[int]:
        use_checksums = self.chance.random() < 0.5
        chosen = [
            writes.Chosen(partition, ack.attempt, ack.checksum if use_checksums else "")
            for partition, ack in self.acks.items()
        ]
        for _ in range(_MOST_ROUNDS):
            with suppress(NotReadyError):
                return self.cache.coordinator.commit_write(self.write_id, chosen)
            self.cache.wait_until_settled()
        return self.cache.coordinator.commit_write(self.write_id, chosen)

    def write_calmly(self) -> None:
        """Writes all rows while nothing fails, and waits until they are there."""
        self.begin()
        for partition in self.expected:
            self.put(partition)
        assert isinstance(self.commit(), pb.DatasetInfo)
        assert self.cache.wait_until_settled() == "there"


def run_schedule(cache: ChaosCache, seed: int) -> str:
    """Runs one write under the failures of a seed, and checks what is left.

    Returns:
        ``there``, ``absent`` or ``away``.
    """
    chance = random.Random(seed)
    cache.lost_disks = 0
    append = chance.random() < 0.5
    others: list[ChaosWrite] = []  # before it, in the order of their commits
    if append and chance.random() < 0.7:
        first = ChaosWrite(cache, chance, start=10_000)
        first.write_calmly()
        others.append(first)
    write = ChaosWrite(cache, chance, append=append)
    wrecks: list[Callable[[], None]] = [
        lambda: _kill_some_node(cache, chance),
        lambda: _start_some_node(cache, chance),
        cache.restart_coordinator,
        lambda: cache.coordinator.abort_write(write.write_id),
    ]

    def wreck(probability: float) -> None:
        if chance.random() < probability:
            chance.choices(wrecks, weights=[4, 3, 2, 1])[0]()

    write.wreck = wreck
    outcome: pb.DatasetInfo | None = None
    has_crashed = False
    try:
        write.begin()
        for partition in write.expected:
            wreck(0.15)
            write.put_until_acknowledged(partition)
        if append and chance.random() < 0.3:
            other = ChaosWrite(cache, chance, start=20_000, append=True)
            other.write_calmly()
            others.append(other)
        for _ in range(_MOST_ROUNDS):
            wreck(0.3)
            if not has_crashed and chance.random() < 0.2:
                has_crashed = True
                _crash_in_commit(cache, write, chance)
            answer = write.commit()
            if isinstance(answer, pb.DatasetInfo):
                outcome = answer
                break
            for partition in answer:
                write.put_until_acknowledged(partition)
        if outcome is not None and chance.random() < 0.5:
            again = write.commit()
            assert isinstance(again, pb.DatasetInfo) and again.fingerprint == outcome.fingerprint
    except (RequestError, NodeUnavailableError, LoadError):
        pass  # the write is gone, or no node took it: it must be absent
    return _check(cache, chance, write, outcome, others)


def _check(
    cache: ChaosCache,
    chance: random.Random,
    write: ChaosWrite,
    outcome: pb.DatasetInfo | None,
    others: list[ChaosWrite],
) -> str:
    before = [row for other in others for row in other.rows]
    if outcome is None:
        # The coordinator may have ended after it wrote the commit, and the writer gave up then.
        with suppress(CacheError):
            cache.coordinator.abort_write(write.write_id)
    if chance.random() < 0.3:
        _kill_some_node(cache, chance)
    if chance.random() < 0.3:
        cache.restart_coordinator()
    cache.wait_until_settled()
    for node in cache.nodes:  # each node comes back with its rows
        if not node.is_up:
            node.restart(keep_files=True)
    cache.wait_for_nodes()
    state = cache.wait_until_settled()
    if not cache.lost_disks:
        if state != "there":
            wait_until(lambda: cache.settled() != "away", WAIT_S, "rows are back with their nodes")
        state = cache.wait_until_settled()
        assert state in ("there", "absent"), state
        assert state == "there" or outcome is None, "a commit was answered, and its rows are lost"
    if state == "there":
        info = cache.coordinator.get(NAME)
        rows = cache.rows(info)
        assert info.num_rows == len(rows)
        if rows == before and write.rows:
            state = "absent"
        else:
            assert rows == before + write.rows
    else:
        error = "" if state == "absent" else cache.coordinator.get(NAME).error.message
        assert state == "absent" or "rows" in error or "not on this node" in error, error
        assert state != "absent" or not others
    if outcome is not None and not cache.lost_disks:
        assert state == "there", "a commit was accepted, its nodes are back, and its rows are not"
    if state != "away":  # else the puts of its commit stay
        wait_until(lambda: not cache.put_files(), WAIT_S, "nodes drop rows that were not chosen")
    with suppress(DatasetNotFoundError):
        cache.coordinator.delete(NAME)
    wait_until(
        lambda: not any(node.store.versions() for node in cache.up()), WAIT_S, "nodes are empty"
    )
    return state


def _kill_some_node(cache: ChaosCache, chance: random.Random) -> None:
    if len(cache.up()) > 1:
        chance.choice(cache.up()).kill()


def _start_some_node(cache: ChaosCache, chance: random.Random) -> None:
    down = [node for node in cache.nodes if not node.is_up]
    if down:
        chance.choice(down).restart(keep_files=chance.random() < 0.5)
        cache.wait_for_nodes()


def _crash_in_commit(cache: ChaosCache, write: ChaosWrite, chance: random.Random) -> None:
    """The coordinator ends in a commit: before it writes the version, or just after it."""
    catalogue = cache.coordinator.state.catalogue
    wrote = catalogue.write

    def end(*args: Any, **kwargs: Any) -> None:
        if chance.random() < 0.5:
            wrote(*args, **kwargs)
        raise EndedError

    catalogue.write = end  # type: ignore[method-assign]
    try:
        write.commit()
    except EndedError:
        cache.restart_coordinator()
    finally:
        catalogue.write = wrote  # type: ignore[method-assign]
