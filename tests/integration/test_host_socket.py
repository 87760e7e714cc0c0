"""Rows of nodes on the same machine whose files this process does not see: the nodes open them."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache_client import CacheClient, CacheDataset, CacheIterableDataset, DatasetSpec
from cache_client.flight import connections, routing
from cache_client.job import ranks
from cache_client.reading import counts as reading_counts
from cache_client.reading import host_socket, joined_reader, shard_maps
from cache_client.reading import host_socket as client_socket
from cache_client.reading import source as reading_source
from cache_protocol.errors import NodeUnavailableError
from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import Credentials
from cache_protocol.wire.host_socket import open_socket, socket_name
from cache_server import LocalCluster
from tests.conftest import numbered_table, rows_of, write_numbered

ROWS, FILES = 2_000, 8  # each file becomes a shard
WAIT_S = 30.0
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # unshare(2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("source"), ROWS, files=FILES)


def start(source: Path, cache_dir: Path) -> LocalCluster:
    """Two nodes with four shards each, whose directories count as those of another machine."""
    nodes = LocalCluster(num_nodes=2, cache_dir=cache_dir)
    client = CacheClient(nodes.endpoint)
    client.load(DatasetSpec("table", source, target_shard_bytes=1))
    client.load(DatasetSpec("part", source, filter="row < 500", target_shard_bytes=1))
    for node in nodes.nodes:
        (node.cache_dir / NODE_ID_FILE).rename(node.cache_dir / "elsewhere")
    return nodes


@pytest.fixture(scope="module")
def hidden(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with start(source, tmp_path_factory.mktemp("cache")) as nodes:
        yield nodes


def dataset(nodes: LocalCluster, **arguments: object) -> CacheIterableDataset:
    return CacheIterableDataset("table", endpoint=nodes.endpoint, batch_size=64, **arguments)  # type: ignore[arg-type]


def plan(nodes: LocalCluster, name: str = "table") -> tuple[routing.ShardMap, Credentials]:
    credentials = ranks.find_credentials(nodes.endpoint)
    return shard_maps.wait_for_plan(nodes.endpoint, name, (), WAIT_S, credentials), credentials


def mapped_files(nodes: LocalCluster) -> set[str]:
    """The shard files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if str(nodes.cache_dir) in line}


def open_handles() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)}


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_every_way_of_reading_takes_the_files_that_nodes_open(
    hidden: LocalCluster, streams: list[str]
) -> None:
    table = numbered_table(ROWS)
    batches = [*dataset(hidden, batch_format="arrow", shuffle=False)]
    assert [row for batch in batches for row in batch.to_pylist()] == table.to_pylist()
    shuffled = dataset(hidden, shuffle=True, seed=3)
    assert sorted(rows_of(shuffled)) == list(range(ROWS))
    assert shuffled.stats().local_rows == ROWS

    picked = CacheDataset("table", endpoint=hidden.endpoint)
    assert [int(picked[row]["row"]) for row in (5, 1999, 0)] == [5, 1999, 0]
    before = len(mapped_files(hidden))
    with CacheClient(hidden.endpoint).read("part", rows=range(100, 250)) as read:
        assert len(mapped_files(hidden)) == before + 1  # one of its two shards
        assert read.read_all().column("row").to_pylist() == list(range(100, 250))

    assert streams == []
    assert not any("shard-" in target for target in open_handles())  # they were mapped, and closed
    assert rows_of(dataset(hidden, shuffle=False, local=False)) == list(range(ROWS))
    assert streams


def test_several_versions_are_gathered_at_once(hidden: LocalCluster) -> None:
    maps = [plan(hidden, name)[0] for name in ("table", "part")]
    credentials = ranks.find_credentials(hidden.endpoint)
    joined = joined_reader.JoinedSource(
        [
            reading_source.Source(
                hidden.endpoint, shards, (), credentials, deadline_s=WAIT_S, local=True
            )
            for shards in maps
        ]
    )
    counts = reading_counts.ReadCounts()
    with joined.open_reader(replica_offset=0, rows_per_message=0, counts=counts) as reader:
        (rows,) = reader.fetch(np.array([ROWS + 499, 0, ROWS, ROWS - 1]))
    assert rows.to_batch().column("row").to_pylist() == [499, 0, 0, ROWS - 1]


def test_workers_get_the_files_after_a_fork(hidden: LocalCluster) -> None:
    forked = dataset(hidden, shuffle=True)
    assert len(rows_of(forked)) == ROWS  # this process has the files mapped
    before = forked.stats().local_rows
    forked.set_epoch(1)
    assert sorted(rows_of(forked.loader(num_workers=2))) == list(range(ROWS))
    assert forked.stats().local_rows == before + ROWS


def test_rows_outlive_their_nodes_and_their_version_and_are_free_with_the_dataset(
    source: Path, tmp_path: Path, streams: list[str]
) -> None:
    with start(source, tmp_path / "cache") as nodes:
        reading, elsewhere = dataset(nodes, shuffle=True), dataset(nodes, shuffle=False)
        rows = iter(reading)
        first = next(rows)["row"].tolist()
        CacheClient(nodes.endpoint).drop("table")
        for node in nodes.nodes:
            node.kill()
        assert sorted(first + rows_of(rows)) == list(range(ROWS))
        assert streams == []
        assert mapped_files(nodes)
        with pytest.raises(NodeUnavailableError):
            CacheIterableDataset("table", endpoint=nodes.endpoint, batch_size=1, deadline_s=0.5)
        del reading, rows, elsewhere
        gc.collect()
        assert not mapped_files(nodes)


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="only Linux has namespaces of mounts")
def test_a_process_with_other_mounts_reads_the_same_rows(hidden: LocalCluster) -> None:
    """As a container in the same pod or network, which has no volume with the shards."""
    reading = dataset(hidden, shuffle=False)
    child = os.fork()
    if not child:
        code = 1
        try:
            user = 0 if os.getuid() == 0 else _NEW_USER
            if ctypes.CDLL(None).unshare(_NEW_MOUNTS | user):
                os._exit(77)
            mount = ["mount", "--make-rprivate", "/"]
            over = ["mount", "-t", "tmpfs", "none", str(hidden.cache_dir)]
            if any(
                subprocess.run(each, stderr=subprocess.DEVNULL).returncode for each in (mount, over)
            ):
                os._exit(77)
            rows = rows_of(reading)
            empty = not [*hidden.cache_dir.iterdir()]
            code = (
                0 if empty and rows == [*range(ROWS)] and reading.stats().local_rows == ROWS else 2
            )
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 77:
        pytest.skip("this process may not make a namespace of mounts")
    assert code == 0


def test_files_of_a_node_are_told_by_its_lines_of_the_shard_map(hidden: LocalCluster) -> None:
    """Not by the lines of another node with the same shard."""
    shards, credentials = plan(hidden)
    replica = routing.ShardFile("replica", 0, 1, "0" * 32, "/nowhere")
    files = [(*of_shard, replace(replica, shard=of_shard[0].shard)) for of_shard in shards.files]
    found = host_socket.open_files(replace(shards, files=files), credentials, range(FILES))
    assert {str(mapped.path) for mapped in found.values()} == {
        of_shard[0].path for of_shard in shards.files
    }


def test_all_messages_of_all_nodes_have_one_deadline(
    hidden: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, credentials = plan(hidden)
    told, receive = connections.Connection.open_files, socket.recv_fds
    now = 0.0

    def ask_for_each(
        self: connections.Connection, request: pb.OpenFilesRequest, timeout_s: float
    ) -> object:
        answers = []
        for shard in [*request.shards]:
            request.shards[:] = [shard]
            answers += told(self, request, timeout_s)
        return answers

    def receive_slowly(*arguments: Any) -> object:
        nonlocal now
        now += client_socket._DEADLINE_S * 0.4
        return receive(*arguments)

    monkeypatch.setattr(connections.Connection, "open_files", ask_for_each)
    monkeypatch.setattr(client_socket, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(socket, "recv_fds", receive_slowly)
    assert len(host_socket.open_files(shards, credentials, range(FILES))) == 3


@pytest.mark.parametrize("wrong", ["proof", "file", "silence"])
def test_a_socket_that_is_not_that_of_the_node_is_not_believed(
    hidden: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    shards, credentials = plan(hidden)
    monkeypatch.setattr(client_socket, "_DEADLINE_S", 0.3 if wrong == "silence" else WAIT_S)
    monkeypatch.setattr(client_socket, "socket_name", lambda node: socket_name(f"false-{node}"))
    asked: list[pb.OpenFilesRequest] = []
    told = connections.Connection.open_files

    def spy(self: connections.Connection, request: pb.OpenFilesRequest, timeout_s: float) -> object:
        asked.append(request)
        answers = told(self, request, timeout_s)
        if wrong == "file":
            answers[0].files[0].checksum = "0" * 32
        return answers

    monkeypatch.setattr(connections.Connection, "open_files", spy)
    false = open_socket()
    false.bind(socket_name(f"false-{shards.nodes[0].id}"))
    false.listen()
    child = os.fork()
    if not child:
        try:
            connection, _ = false.accept()
            connection.recv(100)
            if wrong == "proof":
                with Path(__file__).open() as file:
                    socket.send_fds(connection, [os.urandom(32)], [file.fileno()])
            connection.recv(100)
        finally:
            os._exit(0)
    false.close()
    before = open_handles()

    assert host_socket.open_files(shards, credentials, range(FILES)) == {}

    os.waitpid(child, 0)
    assert open_handles() <= before
    assert len(asked) == 1
    assert host_socket.local_shards(shards, (), credentials).shards == set()
