"""`LocalCluster`: processes that are there while it is, and gone when it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, CacheError, ConfigError, DatasetSpec
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.conftest import write_numbered
from tests.waiting import wait_until

WAIT_S = 30.0


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_endpoint_is_the_coordinators_and_every_node_is_a_process(
    cluster: LocalCluster,
) -> None:
    assert cluster.endpoint == cluster.nodes[0].endpoint
    assert cluster.endpoint.startswith("grpc://127.0.0.1:")
    assert len({node.pid for node in cluster.nodes}) == 2
    for node in cluster.nodes:
        assert is_running(node.pid)
    listed = {node.id: node for node in CacheClient(cluster.endpoint).nodes()}
    assert set(listed) == {node.node_id for node in cluster.nodes}
    assert all(node.alive for node in listed.values())


def test_a_temporary_directory_and_the_processes_are_gone_when_it_closes() -> None:
    with LocalCluster(num_nodes=1) as cluster:
        directory, pid = cluster.cache_dir, cluster.nodes[0].pid
        assert directory.is_dir() and is_running(pid)

    assert not directory.exists()
    assert not is_running(pid)
    cluster.close()  # again: nothing to do


def test_a_given_directory_is_kept_with_a_folder_for_each_node(tmp_path: Path) -> None:
    with LocalCluster(num_nodes=2, cache_dir=tmp_path / "cache") as cluster:
        assert [node.cache_dir for node in cluster.nodes] == [
            tmp_path / "cache" / "node-0",
            tmp_path / "cache" / "node-1",
        ]

    assert (tmp_path / "cache" / "node-0" / ".log").exists()


def test_a_dataset_may_be_called_as_a_file_of_the_node_would_be(tmp_path: Path) -> None:
    with LocalCluster(num_nodes=1) as cluster:
        client = CacheClient(cluster.endpoint, timeout_s=10.0)
        client.load(DatasetSpec("log", write_numbered(tmp_path / "source", 20)))

        assert client.head("log", 20).column("row").to_pylist() == [*range(20)]
        assert "node up" in cluster.nodes[0].log_tail()


def test_a_killed_node_is_down_and_its_restart_keeps_ports_name_and_rows(tmp_path: Path) -> None:
    with LocalCluster(num_nodes=1) as cluster:
        (node,) = cluster.nodes
        client = CacheClient(cluster.endpoint, timeout_s=10.0)
        client.load(DatasetSpec("table", write_numbered(tmp_path / "source", 20)))
        pid, endpoint, node_id = node.pid, node.endpoint, node.node_id

        node.kill()
        assert not is_running(pid)
        with pytest.raises(CacheError, match="not running"):
            _ = node.pid
        node.restart()

        assert node.pid != pid
        assert (node.endpoint, node.node_id) == (endpoint, node_id)
        wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "ready")
        assert client.head("table", 20).column("row").to_pylist() == [*range(20)]


def test_a_restart_of_a_running_node_ends_it_in_order_first_and_keeps_its_rows(
    tmp_path: Path,
) -> None:
    with LocalCluster(num_nodes=1) as cluster:
        (node,) = cluster.nodes
        client = CacheClient(cluster.endpoint, timeout_s=10.0)
        client.load(DatasetSpec("table", write_numbered(tmp_path / "source", 20)))
        first = node.pid

        node.restart()

        assert node.pid != first and not is_running(first)
        wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "ready")
        assert node.stop() == 0
        assert "node down" in node.log_tail() and "Traceback" not in node.log_tail()


def test_a_node_is_not_started_twice(cluster: LocalCluster) -> None:
    node = cluster.nodes[1]
    with pytest.raises(CacheError, match=f"running already, as process {node.pid}"):
        node.start()
    assert is_running(node.pid)


@pytest.mark.parametrize("num_nodes", [0, -1])
def test_a_cluster_of_no_nodes_is_refused_with_the_number(num_nodes: int) -> None:
    with pytest.raises(ConfigError, match=f"num_nodes must be at least 1, got {num_nodes}"):
        LocalCluster(num_nodes=num_nodes)


def test_a_directory_that_cannot_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"cannot use cache_dir {tmp_path}/file/cache"):
        LocalCluster(num_nodes=1, cache_dir=tmp_path / "file" / "cache")


def test_a_node_that_cannot_start_gives_its_log_and_the_others_are_ended(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with (
        LocalCluster(num_nodes=1, cache_dir=tmp_path / "cache"),
        pytest.raises(
            ConfigError, match=r"(?s)did not start: .*node-0 is used by another cache node"
        ),
    ):
        LocalCluster(num_nodes=1, cache_dir=tmp_path / "cache")

    port = cluster.nodes[0].endpoint.rpartition(":")[2]
    node = LocalNode(tmp_path / "clash", [])
    node._ports = (int(port), 0)
    with pytest.raises(ConfigError, match=f"(?s)did not start: .*Flight port 127.0.0.1:{port}"):
        node.start()


def test_the_memory_limit_is_that_of_each_node() -> None:
    with LocalCluster(num_nodes=1, memory_limit_bytes=123_456) as cluster:
        (node,) = CacheClient(cluster.endpoint).nodes()
    assert node.memory_limit_bytes == 123_456


def test_an_error_inside_the_block_ends_the_processes() -> None:
    with pytest.raises(ZeroDivisionError), LocalCluster(num_nodes=1) as cluster:
        pid, directory = cluster.nodes[0].pid, cluster.cache_dir
        raise ZeroDivisionError
    assert not is_running(pid)
    assert not directory.exists()


PARENT = """
import time
from cache_server import LocalCluster

if __name__ == "__main__":
    cluster = LocalCluster(num_nodes=2)
    print(cluster.cache_dir, *(node.pid for node in cluster.nodes), flush=True)
    while True:  # a signal just before a longer wait would not be noticed
        time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nodes_and_their_files_do_not_outlive_their_parent_however_it_ends(
    number: signal.Signals,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        directory, *pids = parent.stdout.readline().split()
        assert all(is_running(int(pid)) for pid in pids)

        parent.send_signal(number)

        wait_until(lambda: not any(is_running(int(pid)) for pid in pids), WAIT_S, "no node")
        wait_until(lambda: not Path(directory).exists(), WAIT_S, "no directory")
        assert parent.wait(WAIT_S) != 0


def test_an_interrupt_of_the_whole_terminal_leaves_the_nodes_to_their_parent() -> None:
    """Ctrl-C reaches every process of the group, and a trainer may want to save its state first."""
    with LocalCluster(num_nodes=1) as cluster:
        psutil.Process(cluster.nodes[0].pid).send_signal(signal.SIGINT)

        with flight.connect(cluster.endpoint) as client:
            assert [*client.list_flights(b"", flight.FlightCallOptions(timeout=10))] == []
        assert is_running(cluster.nodes[0].pid)
