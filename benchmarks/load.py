"""How long, and in how much memory, from Parquet files to rows that are ready to be read?

    python -m benchmarks.load [--quick] [--rows N] [--peers-python PYTHON]

The table is the 32 float32 columns and a label of `benchmarks.throughput`. This cache decodes it
into sealed, mapped shards of one node. Beside it: DataFusion streaming the same query to nowhere,
with a thread for each of its partitions; pyarrow reading a table into memory; Hugging Face building
its Arrow cache from nothing; and MosaicML's MDS files, written row by row for a part of the rows.

Time is taken in turn, in warm processes. Memory is taken in one more pass, of each in a fresh
process: the resident memory of the working process, before and at its highest, looked at every
few milliseconds. To a node's come the files of its folder, which lies in memory: it writes shards
there without mapping them. Hugging Face's cache and MDS files lie on disk and do not count.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from datafusion import RecordBatchStream, SessionContext

from benchmarks.clusters import drop_all
from benchmarks.common import (
    Timing,
    measure_in_turn,
    memory_directory,
    print_ratios,
    print_table,
    write_timings,
)
from benchmarks.processes import DEFAULT_PEERS, child_process, per_million_rows, run_reader
from benchmarks.tables import ROW_BYTES, files_of, floats
from benchmarks.throughput import ratio
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

TARGETS = {"load over DataFusion alone": 0.6}
CACHE = "cache, load, 1 node"
DATAFUSION = "DataFusion alone, streamed to nowhere"
PYARROW = "pyarrow.parquet.read_table"
_SAMPLE_S = 0.005


@dataclass(frozen=True)
class Memory:
    """Of the process that did the work, and of the files that it keeps in memory."""

    before_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        """By the work."""
        return self.peak_bytes - self.before_bytes


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--rows", type=int, help="default: 8 million, which are 1.1 GB")
    parser.add_argument("--repeats", type=int, help="default: 5")
    parser.add_argument("--peers-python", type=Path, help="with --quick: measure its packages, too")
    arguments = parser.parse_args()
    rows: int = arguments.rows or (400_000 if arguments.quick else 8_000_000)
    repeats: int = arguments.repeats or (2 if arguments.quick else 5)
    table = floats(rows)
    with memory_directory("cache-bench-") as directory:
        timings = measure_times(table, directory, rows, repeats)
        memory = measure_memory(table, directory)
    peers, left_out = measure_peers(table, 100_000 if rows >= 100_000 else rows, arguments)
    for timing, used in peers:
        timings[timing.name] = timing
        memory[timing.name] = used
    print(f"\n{rows:,} rows of {ROW_BYTES} bytes, {rows * ROW_BYTES / 1e9:.2f} GB\n")
    print_table(timings)
    print_memory(memory)
    ratios: dict[str, float | None] = {
        "load over DataFusion alone": ratio(timings, CACHE, DATAFUSION)
    }
    print()
    print_ratios(ratios, TARGETS)
    for what, why in left_out.items():
        print(f"left out: {what}: {why}")
    write_timings(
        "load",
        timings,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        memory={
            name: {**asdict(used), "added_bytes": used.added_bytes} for name, used in memory.items()
        },
        left_out=left_out,
    )


def print_memory(memory: dict[str, Memory]) -> None:
    """A line a contender."""
    width = max(len(name) for name in memory)
    print(f"\n{'memory':{width}} {'before':>9} {'peak':>9} {'added':>9}")
    for name, used in memory.items():
        values = (used.before_bytes, used.peak_bytes, used.added_bytes)
        print(f"{name:{width}} " + " ".join(f"{value / 1e9:6.2f} GB" for value in values))


# -- time ------------------------------------------------------------------------------------------


def measure_times(table: Path, directory: Path, num_rows: int, repeats: int) -> dict[str, Timing]:
    """Parquet to ready by the cache, and what others do with the same files, in turn."""
    with LocalCluster(1, directory / "time") as cluster:
        client = CacheClient(cluster.endpoint)

        def load() -> int:
            return client.load(DatasetSpec("table", table)).num_rows

        return measure_in_turn(
            {
                DATAFUSION: lambda: stream_to_nowhere(table),
                CACHE: load,
                PYARROW: lambda: read_with_pyarrow(table),
            },
            num_rows=num_rows,
            num_bytes=num_rows * ROW_BYTES,
            repeats=repeats,
            settle=partial(drop_all, client),
        )


def stream_to_nowhere(table: Path) -> int:
    """The rows that DataFusion decodes, on as many cores as it wants."""
    context = SessionContext()
    context.register_parquet("source", str(table))
    streams = context.sql("SELECT * FROM source").execute_stream_partitioned()

    def drain(stream: RecordBatchStream) -> int:
        return sum(batch.to_pyarrow().num_rows for batch in stream)

    with ThreadPoolExecutor(len(streams)) as pool:
        return sum(pool.map(drain, streams))


def read_with_pyarrow(table: Path) -> int:
    """The whole table in memory, decoded on all cores."""
    return int(pq.read_table(table).num_rows)


# -- memory ----------------------------------------------------------------------------------------


def measure_memory(table: Path, directory: Path) -> dict[str, Memory]:
    """One pass of each, in processes that have done nothing else."""
    memory = {
        DATAFUSION: memory_of_child(stream_to_nowhere, table),
        PYARROW: memory_of_child(read_with_pyarrow, table),
    }
    with LocalCluster(1, directory / "memory") as cluster:
        pid = cluster.nodes[0].pid
        assert pid is not None
        with watch_memory(pid, directory / "memory") as watched:
            CacheClient(cluster.endpoint).load(DatasetSpec("table", table))
        memory[CACHE] = watched[0]
    return memory


def memory_of_child(work: Callable[[Path], int], table: Path) -> Memory:
    """Of a fresh process that does ``work``."""
    with child_process(_work_once, work, table) as pipe:
        pid = pipe.recv()
        with watch_memory(pid) as watched:
            pipe.send("go")
            pipe.recv()
        return watched[0]


def _work_once(pipe: Connection, work: Callable[[Path], int], table: Path) -> None:
    pipe.send(os.getpid())
    pipe.recv()
    pipe.send(work(table))


@contextmanager
def watch_memory(pid: int, files: Path | None = None) -> Iterator[list[Memory]]:
    """Watches a process while it lasts; the answer is in the list afterwards.

    Args:
        files: a folder in memory, whose files count too, mapped or not.
    """

    def resident() -> int:
        if files is None:
            return int(psutil.Process(pid).memory_info().rss)
        return unshared_bytes(pid) + stored_bytes(files)

    before = peak = resident()
    over = threading.Event()
    found: list[Memory] = []

    def watch() -> None:
        nonlocal peak
        while not over.wait(_SAMPLE_S):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.append(Memory(before, peak))


def unshared_bytes(pid: int) -> int:
    """Resident memory without files of a tmpfs that are mapped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def stored_bytes(directory: Path) -> int:
    """Of all files below, as they take room; files that versions share count once."""
    found: dict[int, int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # it has just got its last name
                status = os.stat(os.path.join(folder, name))
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


# -- the other libraries ---------------------------------------------------------------------------


def measure_peers(
    table: Path, part_rows: int, arguments: argparse.Namespace
) -> tuple[list[tuple[Timing, Memory]], dict[str, str]]:
    """Hugging Face on all rows; MDS, which is slow, on a part, as seconds for a row."""
    if arguments.quick and arguments.peers_python is None:
        return [], {"other libraries": "not in --quick"}
    part = floats(part_rows)
    found: list[tuple[Timing, Memory]] = []
    left_out: dict[str, str] = {}
    works = {
        "huggingface": ("Hugging Face, Arrow cache, 2 processes", table),
        "mosaic": (f"MosaicML, MDS files ({part_rows:,} rows only)", part),
    }
    for peer, (name, paths) in works.items():
        command = ["load", "--peer", peer, "--table", "floats", "--paths", *files_of(paths)]
        lines, why = run_reader(arguments.peers_python or DEFAULT_PEERS, command)
        for line in lines:
            if "skipped" in line:
                left_out[name] = line["skipped"]
                continue
            named: dict[str, Any] = {**line, "name": name}
            memory = Memory(line["rss_before_bytes"], line["rss_peak_bytes"])
            found.append((per_million_rows(named, ROW_BYTES), memory))
        if not lines:
            left_out[name] = why
    return found, left_out


if __name__ == "__main__":
    main()
