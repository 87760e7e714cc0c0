"""Forks beside other users of gRPC, which live as long as the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import write_numbered

# grpcio stands for Ray and jax.distributed: its channel stays open, with threads of gRPC's.
PROGRAM = """
import json, os, sys, time, logging
from concurrent import futures
import grpc
import cache_client.training.dataset
from cache_client import CacheIterableDataset, Connection
from cache_client.flight.forks import _grpc_threads

logging.basicConfig(level=logging.WARNING)
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
grpc.channel_ready_future(channel).result(30)
assert _grpc_threads()

def fork_s():
    begun = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    taken = time.perf_counter() - begun
    os.waitpid(child, 0)
    return taken

only_imported = min(fork_s() for _ in range(3))
dataset = CacheIterableDataset(
    "table", cache=Connection(sys.argv[1], local=False), batch_size=16
)
sizes, seconds = [], []
for epoch in range(3):
    dataset.set_epoch(epoch)
    sizes.append(sum(len(batch["row"]) for batch in dataset))
    seconds += [fork_s(), fork_s()]
dataset.set_epoch(3)
# Arrow has a copy of gRPC, which the fork leaves alone.
sizes.append(sum(len(batch["row"]) for batch in dataset.loader(num_workers=1)))
print(json.dumps([only_imported, seconds, sizes]), flush=True)
channel.close()
server.stop(None)
"""

# Beside another user of Flight, no call ends in a forked worker.
BESIDE_FLIGHT = """
import json, sys
import pyarrow.flight as flight
from cache_client import CacheIterableDataset, ConfigError, Connection
from cache_client.flight import forks

if __name__ == "__main__":
    forks._PROBE_S = 2.0
    dataset = CacheIterableDataset(
        "table", cache=Connection(sys.argv[1], local=False), batch_size=16
    )
    other = flight.connect(sys.argv[1])
    assert len(list(other.list_actions()))
    try:
        found = [sum(len(batch["row"]) for batch in dataset.loader(num_workers=1))]
    except ConfigError as error:
        found = [str(error)]
    spawned = dataset.loader(num_workers=1, multiprocessing_context="spawn")
    found.append(sum(len(batch["row"]) for batch in spawned))
    print(json.dumps(found), flush=True)
"""

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a program in a process that reads a table of 100 rows; returns what it prints, and logs.

    A program that spawns workers must be a file: it is imported again.
    """
    folder = tmp_path_factory.mktemp("programs")

    def run(program: str, start: Callable[..., Any] = forked_python.run) -> Any:
        file = folder / "program.py"
        file.write_text(program)
        environment = forked_python.environ()
        done = start(
            [sys.executable, str(file), cluster.endpoint], capture_output=True, timeout=100,
            text=True, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    with LocalCluster(nodes=1, insecure=True) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", write_numbered(folder / "t", 100)))
        yield run


def test_a_fork_does_not_wait_for_the_grpc_of_another_library(run: Run) -> None:
    # Executed: in a fork of a process that has imported gRPC, a worker sometimes crashes.
    (only_imported, seconds, sizes), logs = run(PROGRAM, subprocess.run)
    # Before: 2 s each.
    assert only_imported < 1.0 and min(seconds) < 1.0, (only_imported, seconds)
    assert sizes == [100] * 4
    assert "may hang" not in logs


def test_a_forked_worker_in_which_flight_answers_nothing_says_so(run: Run) -> None:
    (forked, spawned), _ = run(BESIDE_FLIGHT)
    assert "Flight answers nothing here" in forked
    assert "dataset.loader(num_workers=2, multiprocessing_context='spawn')" in forked
    assert spawned == 100
