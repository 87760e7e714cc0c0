"""Loads that many callers wait for, and coordinators that end a watch before the load has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_client import CacheClient, Connection, DatasetInfo, DatasetSpec, NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadReport
from cache_server import LocalCluster
from cache_server.config import NodeConfig
from cache_server.rpc.control_service import CoordinatorServicer
from cache_server.server import CacheServer
from tests import forked_python
from tests.conftest import write_numbered
from tests.waiting import suspend, wait_until

WAIT_S, SOON_S = 60.0, 5.0
NUM_ROWS, FILES = 60, 6  # each file becomes a shard
CALLERS = 70  # more than a coordinator has threads for

Answers = Iterator[pb.WatchDatasetResponse]


@pytest.fixture
def spec(tmp_path: Path) -> DatasetSpec:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)
    return DatasetSpec("table", source, target_shard_bytes=1)


class Watches:
    """The watches of the coordinator in this process, in the order in which they are asked for.

    Attributes:
        num_asked: how many there were.
        cut: (number of the watch, from 0; its answers) -> the answers that it gives.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self.cut: Callable[[int, Answers], Answers] = lambda number, answers: answers

    def answers(self, whole: Answers) -> Answers:
        self.num_asked += 1
        return self.cut(self.num_asked - 1, whole)


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Watches:
    made = Watches()
    whole = CoordinatorServicer.WatchDataset
    monkeypatch.setattr(
        CoordinatorServicer, "WatchDataset", lambda *call: made.answers(whole(*call))
    )
    return made


@pytest.fixture
def client(watches: Watches, tmp_path: Path) -> Iterator[CacheClient]:
    """Of a node in this process, with those watches."""
    config = NodeConfig.build(
        cache_dir=tmp_path / "cache", flight_port=0, control_port=0, http_port=0
    )
    with CacheServer(config) as server:
        yield CacheClient(server.endpoints.flight_location)


def one_of_loading(answers: Answers) -> Answers:
    """The first answer alone, as of a dataset that is loading."""
    answer = next(answers)
    answer.dataset.state = pb.DATASET_STATE_LOADING
    yield answer


def test_more_callers_than_threads_wait_for_a_load_and_the_coordinator_answers_everybody(
    spec: DatasetSpec,
) -> None:
    """A coordinator that does not would lose its nodes, and its pod by the liveness probe."""
    waiting: set[int] = set()

    def load(caller: int) -> DatasetInfo:
        def note(report: LoadReport) -> None:
            waiting.add(caller)

        return CacheClient(cluster.endpoint).load(spec, on_progress=note, timeout_s=WAIT_S)

    with (
        LocalCluster(nodes=2, node_timeout_s=2 * WAIT_S) as cluster,
        grpc.insecure_channel(cluster.nodes[0].control_location) as channel,
        ThreadPoolExecutor(CALLERS) as callers,
    ):
        other = psutil.Process(cluster.nodes[1].pid)
        suspend(other)  # so that the load does not end
        try:
            loads = [callers.submit(load, caller) for caller in range(CALLERS)]
            wait_until(lambda: len(waiting) == CALLERS, WAIT_S, "every caller sees the progress")

            nodes = CacheClient(Connection(cluster.endpoint, deadline_s=SOON_S)).nodes()
            request = health_pb2.HealthCheckRequest(service="live")
            health = health_pb2_grpc.HealthStub(channel).Check(request, timeout=SOON_S)
            assert not any(load.done() for load in loads)
        finally:
            other.resume()
        infos = [load.result(WAIT_S) for load in loads]

    assert len(nodes) == 2
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert {(info.state, info.num_rows) for info in infos} == {("ready", NUM_ROWS)}


def test_a_caller_whose_watch_ends_early_asks_again_until_the_dataset_is_ready(
    client: CacheClient, watches: Watches, spec: DatasetSpec
) -> None:
    def cut(number: int, answers: Answers) -> Answers:
        if number == 0:
            return iter(())
        return one_of_loading(answers) if number == 1 else answers

    watches.cut = cut
    reports: list[LoadReport] = []

    info = client.load(spec, on_progress=reports.append, timeout_s=WAIT_S)

    assert (info.state, info.num_rows) == ("ready", NUM_ROWS)
    assert watches.num_asked == 3
    assert reports[-1].percent == 100


def test_a_caller_whose_every_watch_ends_early_keeps_its_deadline_and_asks_seldom(
    client: CacheClient, watches: Watches, spec: DatasetSpec
) -> None:
    watches.cut = lambda number, answers: one_of_loading(answers)

    with pytest.raises(NotReadyError, match=r"'table' was not ready within .* the load goes on"):
        client.load(spec, timeout_s=4.0)

    assert 2 <= watches.num_asked <= 20


def test_grpc_starts_no_thread_of_its_own_to_watch_a_load(
    cluster: LocalCluster, spec: DatasetSpec
) -> None:
    """An interrupt just before gRPC starts one would hang the closing channel."""
    client = CacheClient(cluster.endpoint)
    before = threading.enumerate()
    meanwhile: list[threading.Thread] = []

    info = client.load(spec, on_progress=lambda report: meanwhile.extend(threading.enumerate()))

    client.drop(info.name)
    assert meanwhile
    assert all(thread.name.startswith("cache-call") for thread in set(meanwhile) - set(before))


INTERRUPTED_LOAD = """
import os, signal, sys, threading, time
from cache_client import CacheClient, DatasetSpec
from cache_client.flight import forks

later = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

def interrupt_once(report):
    if later.ident is None:
        later.start()

try:
    spec = DatasetSpec("table", sys.argv[2], target_shard_bytes=1)
    CacheClient(sys.argv[1]).load(spec, on_progress=interrupt_once)
except KeyboardInterrupt as error:
    kept = error  # and with it all that it holds, as a notebook does
forks.fork_gate.before_fork()
# Without young threads, which have no name yet: one that ends now, of Python, would count.
print(bool(forks._grpc_threads(young=False)))
"""


def test_a_load_that_is_interrupted_leaves_nothing_of_grpc_that_a_fork_would_wait_for(
    spec: DatasetSpec,
) -> None:
    with LocalCluster(nodes=2, node_timeout_s=600.0) as cluster:
        away = psutil.Process(cluster.nodes[1].pid)
        suspend(away)  # so that the load does not end
        try:
            # In a process of its own: others of this suite have gRPC alive.
            arguments = [sys.executable, "-c", INTERRUPTED_LOAD, cluster.endpoint, *spec.source]
            done = subprocess.run(
                [str(part) for part in arguments], capture_output=True, text=True, timeout=WAIT_S
            )
        finally:
            away.resume()
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_who_interrupts_cachectl_is_told_that_the_load_goes_on(
    spec: DatasetSpec, tmp_path: Path
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"name: table\nsource: {spec.source[0]}\ntarget_shard_bytes: 1\n")
    with LocalCluster(nodes=2, node_timeout_s=600.0) as cluster:
        client = CacheClient(cluster.endpoint)
        away = psutil.Process(cluster.nodes[1].pid)
        suspend(away)
        command = [sys.executable, "-m", "cache_client", "load", str(file)]
        with forked_python.Popen(
            [*command, "--endpoint", cluster.endpoint],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            progress = process.stderr.readline()  # in the midst of the load
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=WAIT_S)
        assert "table" in progress
        # Python ends as the shell expects by itself, or by the signal.
        assert process.returncode in {130, -signal.SIGINT}
        assert output == ""
        assert "the load goes on; to cancel it: cachectl drop table" in errors
        assert "Traceback" not in errors

        away.resume()
        wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "it is loaded")
