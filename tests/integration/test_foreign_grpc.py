"""Forks beside the gRPC of another library, which lives as long as the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests.conftest import write_numbered

# grpcio stands for Ray and jax.distributed: its channel stays open, with threads of gRPC's.
PROGRAM = """
import json, os, sys, time, logging
from concurrent import futures
import grpc
import cache_client.dataset
from cache_client import CacheIterableDataset
from cache_client.grpc_guard.forks import _grpc_threads

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

only_imported = fork_s()
dataset = CacheIterableDataset("table", endpoint=sys.argv[1], batch_size=16, local=False)
sizes, seconds = [], []
for epoch in range(3):
    dataset.set_epoch(epoch)
    sizes.append(sum(len(batch["row"]) for batch in dataset))
    seconds.append(fork_s())
dataset.set_epoch(3)
# gRPC itself does not survive a fork, so workers that use it beside another user are spawned.
loader = dataset.loader(num_workers=1, multiprocessing_context="spawn")
sizes.append(sum(len(batch["row"]) for batch in loader))
print(json.dumps([only_imported, seconds, sizes]), flush=True)
channel.close()
server.stop(None)
"""


def test_a_fork_does_not_wait_for_the_grpc_of_another_library(tmp_path: Path) -> None:
    with LocalCluster(num_nodes=1) as cluster:
        CacheClient(cluster.endpoint).load(
            DatasetSpec("table", write_numbered(tmp_path / "t", 100))
        )
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, cluster.endpoint],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    only_imported, seconds, sizes = json.loads(done.stdout)
    # Before: 2 s each.
    assert only_imported < 1.0 and min(seconds) < 1.0, (only_imported, seconds)
    assert sizes == [100] * 4
    assert "may hang" not in done.stderr
