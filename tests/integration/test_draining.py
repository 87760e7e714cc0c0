"""Nodes that are replaced one after the other while jobs read, with one replica and no source."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cache_client import (
    CacheClient,
    Connection,
    DatasetSpec,
    RequestError,
)
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.conftest import numbered_table, write_numbered
from tests.reading_jobs import ReadingJob
from tests.waiting import suspend, wait_until

WAIT_S = 60.0
NUM_ROWS, FILES = 6_000, 12  # each file becomes a shard


@pytest.fixture
def replaceable() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def client(replaceable: LocalCluster, tmp_path: Path) -> CacheClient:
    """Of a cache with a loaded table, whose source is gone, and a written one."""
    client = CacheClient(replaceable.endpoint)
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)
    client.load(DatasetSpec("loaded", source, target_shard_bytes=1))
    shutil.rmtree(source)
    client.write("written", numbered_table(NUM_ROWS), target_shard_bytes=4096)
    return client


def remote(cluster: LocalCluster) -> Connection:
    """Not by the files of this machine."""
    return Connection(cluster.endpoint, deadline_s=WAIT_S, local=False)


def replace(cluster: LocalCluster, node: LocalNode) -> None:
    """A new process without a shard at the place of a drained one."""
    assert node.stop() == 0
    for folder in (node.cache_dir / "loaded", node.cache_dir / "written"):
        assert not list(folder.rglob("*.arrow"))
    node.start()
    cluster.wait_for_nodes()


def test_jobs_read_through_a_replacement_of_every_node(
    replaceable: LocalCluster, client: CacheClient
) -> None:
    with (
        ReadingJob(remote(replaceable), "loaded") as one,
        ReadingJob(remote(replaceable), "written") as two,
    ):
        for node in (*replaceable.nodes[1:], replaceable.nodes[0]):
            drained = client.drain(node.node_id, deadline_s=WAIT_S)
            assert drained.drain is not None and drained.drain.done
            for job in (one, two):
                job.read_on()
            replace(replaceable, node)
        for job in (one, two):
            job.read_on()

    for job in (one, two):
        assert job.error is None
        assert all(sorted(rows) == list(range(NUM_ROWS)) for rows in job.epochs)
        assert job.longest_pause_s < WAIT_S / 2  # no request waited for its deadline
    # No source was there to read. The new nodes took shards of the loaded table back.
    info = client.describe("loaded")
    assert info.state == client.describe("written").state == "ready" and not info.files_read
    wait_until(
        lambda: all(node.stored_shards for node in client.nodes()), WAIT_S, "shards on each node"
    )
    assert client.read("written").read_all().num_rows == NUM_ROWS


@contextmanager
def leaving_node(cluster: LocalCluster, directory: Path) -> Iterator[LocalNode]:
    """One more node, which leaves at SIGTERM."""
    settings = ["--leave-timeout-s", "600", "--drain-timeout-s", "1", "--allow-source", ""]
    coordinator = ["--coordinator", cluster.nodes[0].control_location]
    node = LocalNode(directory, [*settings, *coordinator], cluster.token)
    node.start()
    try:
        client = CacheClient(cluster.endpoint)
        wait_until(
            lambda: node.node_id in {each.id for each in client.nodes() if each.alive},
            WAIT_S,
            "the node joins",
        )
        yield node
    finally:
        node.close()


def test_a_node_that_is_stopped_moves_its_rows_before_it_ends(tmp_path: Path) -> None:
    with LocalCluster(nodes=1) as cluster, leaving_node(cluster, tmp_path / "node") as node:
        client = CacheClient(cluster.endpoint)
        rows = numbered_table(NUM_ROWS)
        written = client.write("written", rows, target_shard_bytes=4096)
        assert any(node.node_id in nodes for nodes in written.placement.values())

        assert node.stop() == 0
        assert "node left" in node.log_tail()
        shutil.rmtree(node.cache_dir)
        assert client.read("written").read_all().sort_by("row").equals(rows)


def test_a_coordinator_that_loses_its_memory_and_keeps_its_catalogue_knows_all_rows(
    tmp_path: Path,
) -> None:
    lasting = ["--advertise", "127.0.0.1", "--leave-timeout-s", "600"]
    own = [*lasting, "--catalogue-dir", str(tmp_path / "catalogue")]
    first = LocalNode(tmp_path / "first", own, None)
    first.begin()
    second = LocalNode(
        tmp_path / "second", [*lasting, "--coordinator", first.control_location], None
    )
    try:
        first.wait_until_listening()
        second.start()
        client = CacheClient(Connection(first.endpoint, local=False))
        wait_until(lambda: sum(n.alive for n in client.nodes()) == 2, WAIT_S, "both join")
        rows = numbered_table(NUM_ROWS)
        written = client.write("written", rows, target_shard_bytes=4096)
        assert any(first.node_id in nodes for nodes in written.placement.values())
        before = first.node_id

        assert first.stop() == 0
        shutil.rmtree(first.cache_dir)
        first.start()
        assert first.node_id == before
        wait_until(
            lambda: second.node_id in {n.id for n in client.nodes() if n.alive and n.stored_shards},
            WAIT_S,
            "the other node reports",
        )
        assert client.read("written").read_all().sort_by("row").equals(rows)
    finally:
        second.close()
        first.close()


def test_a_second_signal_ends_a_node_that_leaves_at_once(tmp_path: Path) -> None:
    with LocalCluster(nodes=1) as cluster, leaving_node(cluster, tmp_path / "node") as node:
        CacheClient(cluster.endpoint).write("written", numbered_table(NUM_ROWS))
        process, coordinator = psutil.Process(node.pid), psutil.Process(cluster.nodes[0].pid)
        suspend(coordinator)
        process.terminate()
        wait_until(lambda: "node leaves" in node.log_tail(), WAIT_S, "the node leaves")
        process.terminate()
        wait_until(lambda: node.exit_code == 0, WAIT_S, "the node ends")
        assert "node down" in node.log_tail() and "did not answer for" not in node.log_tail()
        coordinator.resume()


def test_a_drain_that_cannot_fit_says_so_and_leaves_all_as_it_was(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, memory_limit_bytes=120_000) as cluster:
        client = CacheClient(cluster.endpoint)
        source = write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)
        before = client.load(DatasetSpec("loaded", source, target_shard_bytes=1)).placement
        first, second = (node.node_id for node in cluster.nodes)

        with pytest.raises(RequestError, match=rf"do not fit on the other nodes: {first} has room"):
            client.drain(second)
        assert [node.drain for node in client.nodes()] == [None, None]
        assert client.describe("loaded").placement == before
