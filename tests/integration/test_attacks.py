"""Attacks on a real node with tokens. Others are in `test_lying_peers` and `test_slow_readers`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator

import grpc
import psutil
import pytest

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.coordination.membership import MAX_HEARTBEAT_BYTES
from cache_server.local import LocalNode
from tests.conftest import write_numbered
from tests.waiting import suspend, wait_until

ROWS, FILES, WAIT_S = 2000, 4, 30.0


def token(role: str) -> str:
    return f"the-token-of-the-{role}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """A node with a token for each role, and the dataset ``t``."""
    directory = tmp_path_factory.mktemp("attacks")
    source = write_numbered(directory / "source", ROWS, files=FILES)
    principals = [
        {"name": role, "sha256": hashlib.sha256(token(role).encode()).hexdigest(), "roles": [role]}
        for role in ("node", "admin", "writer", "reader")
    ]
    (directory / "tokens.json").write_text(json.dumps({"principals": principals}))
    arguments = ["--allow-source", "", "--auth-tokens", str(directory / "tokens.json")]
    arguments += ["--heartbeat-interval-s", "0.1"]
    running = LocalNode(directory / "node", arguments, token("node"))
    try:
        running.start()
        CacheClient(running.endpoint, token=token("writer")).load(
            DatasetSpec("t", source, target_shard_bytes=1)
        )
        yield running
    finally:
        running.close()


def rows(node: LocalNode, *, local: bool = False) -> list[int]:
    dataset = CacheIterableDataset(
        "t", batch_size=100, endpoint=node.endpoint, columns=["row"], local=local,
        token=token("reader"),
    )  # fmt: skip
    return [row for batch in dataset for row in batch["row"].tolist()]


def heartbeat(node: LocalNode, report: pb.HeartbeatRequest, given: str) -> grpc.StatusCode:
    """How the coordinator answers a heartbeat."""
    with grpc.insecure_channel(node.control_location) as channel:
        metadata = [("authorization", f"Bearer {given}")] if given else []
        try:
            cache_pb2_grpc.CoordinatorStub(channel).Heartbeat(
                report, timeout=WAIT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def false_node(**fields: str) -> pb.HeartbeatRequest:
    of = {"id": "false", "flight_location": "grpc://127.0.0.1:1", "cache_dir": "/nowhere", **fields}
    return pb.HeartbeatRequest(node=pb.Node(process="one", **of))


def test_only_the_token_of_a_node_sends_heartbeats(node: LocalNode) -> None:
    for given in ("", "wrong"):
        assert heartbeat(node, false_node(), given) is grpc.StatusCode.UNAUTHENTICATED
    for role in ("reader", "writer", "admin"):
        assert heartbeat(node, false_node(), token(role)) is grpc.StatusCode.PERMISSION_DENIED


def test_heartbeats_of_a_stolen_token_stop_no_reader(node: LocalNode) -> None:
    admin = CacheClient(node.endpoint, token=token("admin"))
    info = admin.describe("t")
    lie = false_node()
    claim = lie.datasets.add(dataset="t", fingerprint=info.fingerprint, attempt=0)
    claim.shards.add(index=0, sealed=True, num_rows=1, checksum="x", rows_fixed=True)
    large = false_node(id="large")
    large.datasets.add(dataset="t", fingerprint="f00", failure="x" * (MAX_HEARTBEAT_BYTES + 1))
    for report, code in (
        (lie, grpc.StatusCode.OK),
        (false_node(id="r", cache_dir="relative"), grpc.StatusCode.INVALID_ARGUMENT),
        (false_node(id="../x"), grpc.StatusCode.INVALID_ARGUMENT),
        (false_node(id=node.node_id), grpc.StatusCode.PERMISSION_DENIED),
        (large, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        assert heartbeat(node, report, token("node")) is code
        wait_until(lambda: admin.describe("t").state == "ready", WAIT_S, "ready")
        assert rows(node) == list(range(ROWS))
    assert {n.id for n in admin.nodes() if n.untrusted} == {"false"}


def test_a_file_that_is_cut_in_place_costs_no_row(node: LocalNode) -> None:
    process = psutil.Process(node.pid)
    (path, *_) = node.cache_dir.glob("t/*/shard-*.arrow")
    suspend(process)  # it looks for changed files only afterwards
    path.chmod(0o644)
    os.truncate(path, 0)
    process.resume()

    def is_whole() -> bool:
        if node.exit_code is not None:  # SIGBUS
            node.restart()
        return all(path.stat().st_size for path in node.cache_dir.glob("t/*/shard-*.arrow"))

    wait_until(lambda: is_whole() and rows(node) == list(range(ROWS)), WAIT_S, "every row")
