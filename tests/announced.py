"""Nodes of this process that prepare announced orders of tables of any size, for tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import server
from cache_server.config import NodeConfig
from cache_server.scratch.bucket_files import Bucket, BucketFiles
from cache_server.scratch.scratch import Scratch
from cache_server.server import CacheServer
from tests.conftest import write_numbered
from tests.free_ports import free_ports
from tests.waiting import files_below

ROWS = 20_000
NAME = "t"
MEMORY_BYTES = 256 << 10  # less than the table has


@contextmanager
def preparing_node(directory: Path, **settings: Any) -> Iterator[CacheServer]:
    """A node with a scratch disk, which has the table of `write_numbered`."""
    with _server(directory, **settings) as running:
        load(directory, running.endpoints.flight_location)
        yield running


@contextmanager
def _server(directory: Path, **settings: Any) -> Iterator[CacheServer]:
    """A node whose scratch disk counts with little memory."""

    def small(folder: Path, limit_bytes: int | None, _: int) -> Scratch:
        return Scratch(folder, limit_bytes, MEMORY_BYTES)

    with (
        patch.object(server, "Scratch", small),
        CacheServer(_config(directory, **settings)) as running,
    ):
        yield running


def load(directory: Path, endpoint: str) -> None:
    """Loads the table."""
    source = directory / "source"
    if not source.exists():
        write_numbered(source, ROWS, files=8)
    CacheClient(endpoint).load(DatasetSpec(NAME, source, target_shard_bytes=1))


def _config(directory: Path, **settings: Any) -> NodeConfig:
    given = {
        "scratch_limit_bytes": 1 << 30,
        "flight_port": 0,
        "control_port": 0,
        **settings,
    }
    return NodeConfig.build(
        cache_dir=directory / "node", http_port=0, heartbeat_interval_s=0.1, **given
    )


class NodeProcess:
    """Such a node in a process of its own, on ports that stay.

    Args:
        directory: of its files.
        pause_s: before each chunk that it scatters, and each bucket that it reads: a slow disk.
    """

    def __init__(self, directory: Path, pause_s: float) -> None:
        self._directory, self._pause_s = directory, pause_s
        self._ports = free_ports(2, ["127.0.0.1"])
        self.endpoint = f"grpc://127.0.0.1:{self._ports[0]}"
        self.start()

    def start(self) -> None:
        """Starts the process, and waits until it listens."""
        arguments = [str(self._directory), *map(str, self._ports), str(self._pause_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.announced", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "listens"

    def kill(self) -> None:
        """Kills it (SIGKILL)."""
        with self._process as process:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main(directory: str, flight_port: str, control_port: str, pause_s: str) -> None:
    """Runs a node until the standard input ends."""

    def pause(*_: object) -> None:
        time.sleep(float(pause_s))

    Scratch._wait_to_prepare = pause  # type: ignore[method-assign]
    read = BucketFiles.read

    def read_late(*arguments: Any) -> Bucket:
        pause()
        return read(*arguments)

    BucketFiles.read = read_late  # type: ignore[method-assign, assignment]
    ports = {"flight_port": int(flight_port), "control_port": int(control_port)}
    with _server(Path(directory), lease_s=2.0, **ports):
        print("listens", flush=True)
        sys.stdin.read()


def reader(node: CacheServer | str, **arguments: Any) -> CacheIterableDataset:
    """A shuffled job."""
    endpoint = node if isinstance(node, str) else node.endpoints.flight_location
    given = {"batch_size": 128, "shuffle": True, "seed": 7, "cache": endpoint, **arguments}
    return CacheIterableDataset(NAME, **given)


def rows(batches: Any) -> list[tuple[int, str]]:
    """Number and text of each row."""
    return [
        row for batch in batches for row in zip(batch["row"].tolist(), batch["text"], strict=True)
    ]


def scratch_files(directory: Path) -> list[Path]:
    """The files of orders below the cache directory."""
    return files_below(directory / "node" / ".scratch" / "orders")


if __name__ == "__main__":
    main(*sys.argv[1:])
