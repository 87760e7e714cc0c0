"""What writers and damaged files can do to other teams, on a real node with tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_protocol.errors import LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.local import LocalNode
from tests.answering_control import answering_control
from tests.conftest import write_numbered
from tests.http_pages import ask
from tests.waiting import files_below, wait_until

ROWS, WAIT_S = 2000, 30.0
LIMIT_BYTES = 40_000_000
TEAMS = {"alice": "team-a", "bob": "team-b", "root": "default"}
SCHEMA = pa.schema([("row", pa.int64()), ("f", pa.float32())])


def token(name: str) -> str:
    return f"the-token-of-{name}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("rows") / "source", ROWS, files=2)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Iterator[LocalNode]:
    """A node with a memory limit, two teams, and the dataset ``t`` of each."""
    directory = tmp_path_factory.mktemp("attacks")
    principals = [
        {"name": name, "namespace": TEAMS.get(name, "default"), "roles": [role],
         "sha256": hashlib.sha256(token(name).encode()).hexdigest()}
        for name, role in
        [("alice", "writer"), ("bob", "writer"), ("root", "admin"), ("node", "node")]
    ]  # fmt: skip
    (directory / "tokens.json").write_text(json.dumps({"principals": principals}))
    arguments = ["--allow-source", "", "--auth-tokens", str(directory / "tokens.json")]
    arguments += ["--heartbeat-interval-s", "0.1", "--node-timeout-s", "1"]
    arguments += ["--memory-limit", str(LIMIT_BYTES)]
    running = LocalNode(directory / "node", arguments, token("node"))
    try:
        running.start()
        for name in ("alice", "bob"):
            client(running, name).load(DatasetSpec("t", source, target_shard_bytes=1))
        yield running
    finally:
        running.close()


def client(node: LocalNode, name: str) -> CacheClient:
    return CacheClient(Connection(node.endpoint, token=token(name)))


def rows(node: LocalNode, name: str) -> list[int]:
    dataset = CacheIterableDataset(
        "t",
        batch_size=100,
        cache=Connection(node.endpoint, local=False, token=token(name), deadline_s=WAIT_S),
        columns=["row"],
    )
    return [row for batch in dataset for row in batch["row"].tolist()]


class Control:
    """The coordinator's verbs for one principal."""

    def __init__(self, node: LocalNode, name: str) -> None:
        options = [("grpc.max_receive_message_length", 64 << 20)]
        self._channel = grpc.insecure_channel(node.control_location, options)
        self._stub = cache_pb2_grpc.CoordinatorStub(self._channel)
        self._metadata = [("authorization", f"Bearer {token(name)}")]

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def begin(self, dataset: str, schema: pa.Schema, full_wait_s: float = 0.0) -> str:
        request = pb.BeginWriteRequest(
            spec=pb.DatasetSpec(name=dataset),
            schema=schema.serialize().to_pybytes(),
            ttl_s=600,
            full_wait_s=full_wait_s,
        )
        answer = self._stub.BeginWrite(request, metadata=self._metadata, timeout=WAIT_S)
        return str(answer.write_id)

    def abort(self, write_id: str) -> None:
        request = pb.AbortWriteRequest(write_id=write_id)
        self._stub.AbortWrite(request, metadata=self._metadata, timeout=WAIT_S)

    def heartbeat(self) -> pb.HeartbeatResponse:
        """The answer to a node that joins."""
        node = pb.Node(id="new", process="one", flight_location="grpc://127.0.0.1:1")
        with answering_control() as node.control_location:
            answer: pb.HeartbeatResponse = self._stub.Heartbeat(
                pb.HeartbeatRequest(node=node),
                metadata=self._metadata,
                timeout=WAIT_S,
            )
        return answer


def seconds_of_a_load(node: LocalNode, source: Path) -> float:
    begun = time.monotonic()
    client(node, "alice").load(DatasetSpec("other", source))
    took_s = time.monotonic() - begun
    client(node, "alice").drop("other")
    return took_s


def test_schemas_of_open_writes_stop_no_other_team(node: LocalNode, source: Path) -> None:
    wide = pa.schema([(f"column-{n:06d}" + "x" * 40, pa.float32()) for n in range(60_000)])
    process, begun = psutil.Process(node.pid), []
    usual_s = seconds_of_a_load(node, source)
    before = process.memory_info().rss
    with Control(node, "bob") as bob, Control(node, "node") as false_node:
        with pytest.raises(grpc.RpcError, match="'bob' has open writes with schemas of at most"):
            for number in range(28):
                begun.append(bob.begin(f"wide-{number}", wide))
        answer = false_node.heartbeat()
        took_s = seconds_of_a_load(node, source)
        grown = process.memory_info().rss - before
        for write_id in begun:
            bob.abort(write_id)

    assert len(answer.writes) == len(begun) == 2
    assert sum(write.ByteSize() for write in answer.writes) < 1000
    assert took_s < 5.0 + 5 * usual_s
    assert grown < 400 << 20


class Put:
    """One stream of a put."""

    def __init__(self, node: LocalNode, name: str, dataset: str, write_id: str) -> None:
        self._client = fl.connect(node.endpoint)
        headers = [(b"authorization", f"Bearer {token(name)}".encode())]
        request = pb.PutRequest(dataset=dataset, write_id=write_id)
        self._writer, self._reader = self._client.do_put(
            fl.FlightDescriptor.for_command(request.SerializeToString()),
            SCHEMA,
            fl.FlightCallOptions(timeout=WAIT_S, headers=headers),
        )

    def send(self, num_rows: int, announce: int) -> None:
        values = [np.arange(num_rows), np.zeros(num_rows, np.float32)]
        batch = pa.record_batch(values, schema=SCHEMA)
        self._writer.write_with_metadata(batch, pb.PutShard(num_rows=announce).SerializeToString())

    def end(self, num_rows: int) -> None:
        self._writer.write_metadata(pb.PutEnd(num_rows=num_rows).SerializeToString())
        self._writer.done_writing()
        self._reader.read()
        self._writer.close()  # tells why the node refused it
        self._client.close()

    def close(self) -> None:
        with contextlib.suppress(pa.ArrowException):  # the node refused the put
            self._writer.close()
        self._client.close()


def test_a_put_that_announces_rows_and_sends_none_takes_no_room_of_others(node: LocalNode) -> None:
    with Control(node, "bob") as bob, Control(node, "alice") as alice:
        held, mine = bob.begin("held", SCHEMA), alice.begin("mine", SCHEMA)
        idle = Put(node, "bob", "held", held)
        idle.send(5, announce=36_000_000 // 12)
        wait_until(lambda: any(_drafts(node, "held")), WAIT_S, "the announced shard")
        put = Put(node, "alice", "mine", mine)
        put.send(24_000_000 // 12, announce=24_000_000 // 12)
        put.end(24_000_000 // 12)

        idle.send(3_000_000 - 5, announce=0)
        with pytest.raises(pa.ArrowException, match="was full for 0 s"):
            idle.end(3_000_000)
        idle.close()
        bob.abort(held)
        alice.abort(mine)
    for dataset in ("held", "mine"):
        wait_until(lambda name=dataset: not _drafts(node, name), WAIT_S, "no row is kept")


def _drafts(node: LocalNode, dataset: str) -> list[Path]:
    """The shard files of a dataset, also those that are being written."""
    return [
        path for path in files_below(*node.cache_dir.glob(f"team-?@{dataset}"))
        if "shard-" in path.name
    ]  # fmt: skip


def test_damaged_state_files_stop_no_other_team_and_cost_no_row(node: LocalNode) -> None:
    (entry,) = node.cache_dir.glob(".catalogue/team-a@t@*.json")
    (manifest,) = node.cache_dir.glob("team-b@t/*/manifest.jsonl")
    good, name = entry.read_bytes(), node.cache_dir / ".node-id"
    shards = {path.stat().st_ino for path in node.cache_dir.glob("team-a@t/*/shard-*")}
    flipped = bytes([good[300] ^ 4]).join([good[:300], good[301:]])
    for damage in (b"", flipped, b"[" * 100_000):
        node.kill()
        entry.write_bytes(damage)
        name.write_bytes(bytes([name.read_bytes()[0] ^ 1]) + name.read_bytes()[1:])
        with manifest.open("ab") as file:
            file.write(b"[" * 100_000 + b"\n")
        node.start()

        assert rows(node, "bob") == list(range(ROWS))
        assert {info.name: info.state for info in client(node, "alice").datasets()} == {
            "t": "failed"
        }
        with pytest.raises(LoadError, match=rf"damaged.*{entry.name}\.damaged.*or drop it"):
            rows(node, "alice")
        assert "\ndata_cache_damaged_entries 1.0\n" in ask(node.page, "/metrics/node")[2]
        assert {path.stat().st_ino for path in node.cache_dir.glob("team-a@t/*/shard-*")} == shards

        node.kill()
        entry.write_bytes(good)
        node.start()
        assert rows(node, "alice") == list(range(ROWS))
    assert "damaged file set aside" in node.log_tail()
