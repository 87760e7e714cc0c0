"""`LocalCluster`: processes that are there while it is, and gone when it is."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, CacheError, ConfigError, Connection, DatasetSpec
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests import forked_python
from tests.conftest import write_numbered
from tests.flight_clients import connect
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
    assert repr(cluster) == f"<LocalCluster of 2 at {cluster.endpoint}>"
    assert len({node.pid for node in cluster.nodes}) == 2
    for node in cluster.nodes:
        assert is_running(node.pid)
    listed = {node.id: node for node in CacheClient(cluster.endpoint).nodes()}
    assert set(listed) == {node.node_id for node in cluster.nodes}
    assert all(node.alive for node in listed.values())


@pytest.mark.parametrize("bad", ["2", 1.0, True, None])
def test_a_number_of_nodes_and_a_directory_of_another_type_are_quoted(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalCluster(bad, 5)  # type: ignore[arg-type]
    assert f"nodes must be a number of nodes, got {bad!r}" in str(caught.value)
    assert "cache_dir must be a path, got 5" in str(caught.value)


@pytest.mark.parametrize("bad", ["2", None, True, -1, float("nan")])
def test_a_time_to_wait_for_nodes_that_is_none_is_quoted(cluster: LocalCluster, bad: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"number of seconds, got {bad!r}")):
        cluster.wait_for_nodes(bad)


def test_every_bad_setting_of_the_nodes_is_quoted_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalNode, "start", lambda node: pytest.fail("a node was started"))
    with pytest.raises(ConfigError) as caught:
        LocalCluster(  # type: ignore[call-overload]
            0, "", memory_limit_bytes=2.5, huge_pages="no", node_timeout_s="x", lease_s=-1
        )
    for words in (
        "nodes must be at least 1, got 0",
        "cache_dir must be a path, got ''",
        "memory_limit_bytes must be a size in bytes such as 64MiB, got 2.5",
        "huge_pages must be True or False, got 'no'",
        "node_timeout_s must be a number of seconds, got 'x'",
        "lease_s must be a number of seconds, at least 0, got -1",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("bad", [None, True, [1], 0, -1.0, float("nan"), float("inf"), 10**400])
def test_a_time_limit_of_the_nodes_that_is_none_is_quoted(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalCluster(node_timeout_s=bad)  # type: ignore[arg-type]
    assert "node_timeout_s" in str(caught.value) and f"got {bad!r:.100}" in str(caught.value)


def test_integers_of_numpy_make_a_cluster() -> None:
    limit, seconds = np.int64(10**9), np.float32(7.5)
    with LocalCluster(
        np.int64(1),  # type: ignore[arg-type]
        memory_limit_bytes=limit,  # type: ignore[arg-type]
        node_timeout_s=seconds,  # type: ignore[arg-type]
        lease_s=np.int8(0),  # type: ignore[arg-type]
    ) as cluster:
        (node,) = CacheClient(cluster.endpoint).nodes()
        assert node.memory_limit_bytes == 10**9


@pytest.mark.usefixtures("executed_nodes")
def test_a_temporary_directory_and_the_processes_are_gone_when_it_closes() -> None:
    with LocalCluster(nodes=1) as cluster:
        directory, pid = cluster.cache_dir, cluster.nodes[0].pid
        assert directory.is_dir() and is_running(pid)

    assert not directory.exists()
    assert not is_running(pid)
    cluster.close()  # again: nothing to do


def test_a_given_directory_is_kept_with_a_folder_for_each_node(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, cache_dir=tmp_path / "cache") as cluster:
        assert [node.cache_dir for node in cluster.nodes] == [
            tmp_path / "cache" / "node-0",
            tmp_path / "cache" / "node-1",
        ]

    assert (tmp_path / "cache" / "node-0" / ".log").exists()


def test_a_dataset_may_be_called_as_a_file_of_the_node_would_be(tmp_path: Path) -> None:
    with LocalCluster(nodes=1) as cluster:
        client = CacheClient(Connection(cluster.endpoint, deadline_s=WAIT_S))
        client.load(DatasetSpec("log", write_numbered(tmp_path / "source", 20)))

        assert client.head("log", 20).column("row").to_pylist() == [*range(20)]
        assert "node up" in cluster.nodes[0].log_tail()


def test_a_killed_node_is_down_and_its_restart_keeps_ports_name_and_rows(tmp_path: Path) -> None:
    with LocalCluster(nodes=1) as cluster:
        (node,) = cluster.nodes
        client = CacheClient(Connection(cluster.endpoint, deadline_s=WAIT_S))
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
    with LocalCluster(nodes=1) as cluster:
        (node,) = cluster.nodes
        client = CacheClient(Connection(cluster.endpoint, deadline_s=WAIT_S))
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
    with pytest.raises(ConfigError, match=f"nodes must be at least 1, got {num_nodes}"):
        LocalCluster(nodes=num_nodes)


def test_an_empty_directory_name_is_refused_and_is_not_the_working_directory() -> None:
    with pytest.raises(ConfigError, match="cache_dir must be a path, got ''"):
        LocalCluster(cache_dir="")


def test_a_directory_that_cannot_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"cannot use cache_dir {tmp_path}/file/cache"):
        LocalCluster(nodes=1, cache_dir=tmp_path / "file" / "cache")


def test_a_node_that_cannot_start_gives_its_log_and_the_others_are_ended(tmp_path: Path) -> None:
    with (
        LocalCluster(nodes=1, cache_dir=tmp_path / "cache"),
        pytest.raises(
            ConfigError, match=r"(?s)did not start: .*node-0 is used by another cache node"
        ),
    ):
        LocalCluster(nodes=1, cache_dir=tmp_path / "cache")


def test_the_ports_of_a_node_that_is_down_are_given_to_nobody_else(tmp_path: Path) -> None:
    with LocalCluster(nodes=1, cache_dir=tmp_path / "cache") as cluster:
        (node,) = cluster.nodes
        ports = [int(at.rpartition(":")[2]) for at in (node.endpoint, node.control_location)]
        node.kill()

        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="already in use"):
                other.bind(("127.0.0.1", port))

    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_a_node_whose_port_was_taken_by_force_gives_its_log(tmp_path: Path) -> None:
    with LocalCluster(nodes=1, cache_dir=tmp_path / "cache") as cluster:
        (node,) = cluster.nodes
        port = int(node.endpoint.rpartition(":")[2])
        node.kill()

        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ConfigError, match=f"(?s)did not start: .*Flight port 127.0.0.1:{port}"),
        ):
            node.start()

        node.start()
        assert node.endpoint == f"grpc://127.0.0.1:{port}"


def test_the_memory_limit_is_that_of_each_node() -> None:
    with LocalCluster(nodes=1, memory_limit_bytes=123_456) as cluster:
        (node,) = CacheClient(cluster.endpoint).nodes()
    assert node.memory_limit_bytes == 123_456


@pytest.mark.usefixtures("executed_nodes")
def test_nodes_that_are_told_so_look_for_no_huge_pages() -> None:
    with LocalCluster(1, huge_pages=False) as cluster:
        assert "--no-huge-pages" in Path(f"/proc/{cluster.nodes[0].pid}/cmdline").read_text()


@pytest.mark.usefixtures("executed_nodes")
def test_nodes_start_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    wait = LocalNode.wait_until_listening

    def wait_and_count(node: LocalNode) -> None:
        running.append(len(psutil.Process().children()))
        wait(node)

    before = len(psutil.Process().children())
    monkeypatch.setattr(LocalNode, "wait_until_listening", wait_and_count)
    with LocalCluster(nodes=2) as cluster:
        assert running[0] >= before + 2
        assert len({node.control_location for node in cluster.nodes}) == 2


@pytest.mark.usefixtures("executed_nodes")
def test_an_interrupt_just_after_a_node_was_started_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(real(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalCluster()
    assert started[0].poll() == -signal.SIGKILL


@pytest.mark.usefixtures("executed_nodes")
def test_an_interrupt_while_the_thread_that_starts_a_node_starts_ends_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[str]] = []
    real, kill = subprocess.Popen, LocalNode.kill
    begun, killing = threading.Event(), threading.Event()

    def begin(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(real(*arguments, **options))
        begun.set()
        assert killing.wait(30.0)
        return started[0]

    def kill_and_say(node: LocalNode) -> None:
        killing.set()
        kill(node)

    def submit(_: ThreadPoolExecutor, *call: Any) -> None:
        threads.append(threading.Thread(target=call[0], args=call[1:]))
        threads[0].start()
        assert begun.wait(30.0)
        raise KeyboardInterrupt

    threads: list[threading.Thread] = []
    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(LocalNode, "kill", kill_and_say)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        LocalCluster()
    threads[0].join(30.0)
    assert started[0].poll() == -signal.SIGKILL


def test_an_error_inside_the_block_ends_the_processes() -> None:
    with pytest.raises(ZeroDivisionError), LocalCluster(nodes=1) as cluster:
        pid, directory = cluster.nodes[0].pid, cluster.cache_dir
        raise ZeroDivisionError
    assert not is_running(pid)
    assert not directory.exists()


PARENT = """
import time
from cache_server import LocalCluster
from cache_server.local import LocalNode

if __name__ == "__main__":
    cluster = LocalCluster(nodes=2)
    print(cluster.cache_dir, *(node.pid for node in cluster.nodes), flush=True)
    while True:  # a signal just before a longer wait would not be noticed
        time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nodes_and_their_files_do_not_outlive_their_parent_however_it_ends(
    number: signal.Signals,
) -> None:
    with forked_python.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=forked_python.environ(),
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
    with LocalCluster(nodes=1) as cluster:
        psutil.Process(cluster.nodes[0].pid).send_signal(signal.SIGINT)

        with connect(cluster.endpoint) as client:
            assert [*client.list_flights(b"", flight.FlightCallOptions(timeout=WAIT_S))] == []
        assert is_running(cluster.nodes[0].pid)
