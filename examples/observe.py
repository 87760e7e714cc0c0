"""Four ranks on two nodes, and three verdicts: all is well, one rank is slow, one node is slow.

Starts a cache on this machine, reads a small table with four synchronous ranks, and asks the cache
what the job waits for. Run it, and open the page that it prints:

    python examples/observe.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, Reading
from cache_server import LocalCluster

RANKS, SLOW_RANK = 4, 2
COLUMNS, ROWS = 32, 200_000
SHARD_BYTES = 1024 * 1024  # small, so that both nodes hold some
STEP_S = 0.010  # of computing
SLOW_TRANSFORM_S = 0.040
STOPPED_S, RUNNING_S = 0.600, 0.010  # of a node that is throttled

fork = multiprocessing.get_context("fork")


def main() -> None:
    """Runs the three jobs, and prints the verdict on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each job")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=2) as cluster:
        client = CacheClient(cluster.endpoint)
        source = write_table(Path(directory))
        client.load(DatasetSpec("rows", source, target_shard_bytes=SHARD_BYTES))
        print(f"page: {cluster.nodes[0].page}", flush=True)
        second = cluster.nodes[1]
        print_verdict(client, cluster.endpoint, "healthy", arguments.seconds)
        print_verdict(client, cluster.endpoint, "slow-rank", arguments.seconds, slow=SLOW_RANK)
        with throttled(second.pid):
            print(f"node {second.node_id} is throttled now", flush=True)
            print_verdict(client, cluster.endpoint, "slow-node", arguments.seconds)


def write_table(directory: Path) -> Path:
    """Writes a table of random numbers."""
    values = np.random.default_rng(0).random((COLUMNS, ROWS), np.float32)
    table = pa.table({f"x{index}": column for index, column in enumerate(values)})
    pq.write_table(table, directory / "rows.parquet", row_group_size=ROWS // 16)
    return directory


def print_verdict(
    client: CacheClient, endpoint: str, job: str, seconds: float, slow: int | None = None
) -> None:
    """Trains for a while, and prints what the cache says of the job."""
    with training(endpoint, job, slow):
        time.sleep(seconds)
        print(f"{job}: {client.jobs(job)[0].verdict}", flush=True)


@contextmanager
def training(endpoint: str, job: str, slow: int | None = None) -> Iterator[None]:
    """Trains meanwhile, with four ranks; one of them may be slow."""
    ends, together = fork.Event(), fork.Barrier(RANKS)
    ranks = [
        fork.Process(target=train, args=(endpoint, job, rank, rank == slow, together, ends))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        yield
    finally:
        ends.set()
        for process in ranks:
            process.join()


def train(
    endpoint: str, job: str, rank: int, is_slow: bool, together: Barrier, ends: Event
) -> None:
    """One rank: takes a batch, computes, and waits for the others, as in synchronous training."""

    def transform(batch: object) -> object:
        if is_slow:
            time.sleep(SLOW_TRANSFORM_S)
        return batch

    dataset = CacheIterableDataset(
        "rows",
        cache=Connection(endpoint, local=False),
        batch_size=256,
        shuffle=True,
        job=job,
        rank=rank,
        world_size=RANKS,
        transform=transform,
        reading=Reading(message_bytes=64 * 1024, prefetch_batches=8),
    )
    epoch = 0
    try:
        while True:
            dataset.set_epoch(epoch)
            for _ in dataset:
                time.sleep(STEP_S)
                if ends.is_set():
                    together.abort()
                together.wait()
            epoch += 1
    except threading.BrokenBarrierError:
        return


@contextmanager
def throttled(pid: int) -> Iterator[None]:
    """Stops a process most of the time."""
    ends = threading.Event()

    def throttle() -> None:
        while not ends.is_set():
            os.kill(pid, signal.SIGSTOP)
            ends.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            ends.wait(RUNNING_S)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


if __name__ == "__main__":
    main()
