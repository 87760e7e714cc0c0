"""What does a random row cost as the table grows, and what of that are pages?

    python -m benchmarks.size [--quick]

Tables of 32 float32 and a label, from a quarter of a GB to more than four. Of each, as many random
rows are read in batches of 1024: through this cache, on the same machine and over Flight, from
shards in huge pages, which nodes move them to by default, and from shards in the small pages that a
tmpfs gives out; and, beside it, by `numpy.take` from one matrix in memory. Nodes move pages once a
table is loaded; the benchmark waits for this and prints the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from benchmarks.clusters import drop_all
from benchmarks.common import (
    Contender,
    Timing,
    measure,
    memory_directory,
    print_ratios,
    print_table,
    write_result,
)
from benchmarks.contenders import BATCH_SIZE, Epochs, Reading
from benchmarks.tables import FEATURES, ROW_BYTES, Table, floats
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

ROWS = (2_000_000, 8_000_000, 32_000_000)
READ = 2_000_000  # rows, of each table
_MOVED = "data_cache_huge_page_bytes "
_MOVE_TIMEOUT_S = 120.0


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tables, in a few seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (200_000, 400_000) if arguments.quick else ROWS
    read, repeats = (100_000, 1) if arguments.quick else (READ, 5)
    tables: list[dict[str, Any]] = []
    ratios: dict[str, float | None] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(memory_directory("cache-bench-"))
        clusters = {
            pages: stack.enter_context(
                LocalCluster(1, directory / pages, huge_pages=pages == "huge")
            )
            for pages in ("small", "huge")
        }
        for rows in sizes:
            table = table_of(rows)
            moved_s = load(table, clusters)
            timings = measure(contenders(table, clusters, read), repeats=repeats)
            print(f"\n{rows:,} rows, {table.num_bytes / 1e9:.2f} GB; moved in {moved_s:.1f} s\n")
            print_table(timings)
            for way in ("local", "Flight"):
                name = f"{rows:,} rows: {way}, huge pages / small pages"
                ratios[name] = speed_up(timings, f"{way}, huge pages", f"{way}, small pages")
            tables.append(
                {
                    "rows": rows,
                    "num_bytes": table.num_bytes,
                    "moved_s": moved_s,
                    "timings": [timing.summary() for timing in timings.values()],
                }
            )
            for cluster in clusters.values():
                drop_all(CacheClient(cluster.endpoint))
    print()
    print_ratios(ratios, {})
    path = write_result(
        "size-quick" if arguments.quick else "size", {"tables": tables, "ratios": ratios}
    )
    print(f"\nwritten to {path}")


def table_of(rows: int) -> Table:
    """Written once."""
    path = floats(rows)
    return Table("floats", rows, ROW_BYTES, path, path, None, None, {"features": FEATURES})


def load(table: Table, clusters: dict[str, LocalCluster]) -> float:
    """Loads it everywhere; seconds from then until its pages are huge where they are to be."""
    for cluster in clusters.values():
        CacheClient(cluster.endpoint).load(DatasetSpec(table.name, str(table.paths)))
    page = f"{clusters['huge'].nodes[0].page}metrics"
    wanted = 0.9 * table.num_bytes  # the end of each shard is no whole page
    start = time.perf_counter()
    Retrying(
        retry=retry_if_result(lambda moved: moved < wanted),
        stop=stop_after_delay(_MOVE_TIMEOUT_S),
        wait=wait_fixed(0.1),
    )(lambda: moved_bytes(page))
    return time.perf_counter() - start


def moved_bytes(page: str) -> float:
    """What a node says of itself."""
    with urllib.request.urlopen(page, timeout=_MOVE_TIMEOUT_S) as answer:
        lines: Sequence[str] = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(_MOVED))


def contenders(table: Table, clusters: dict[str, LocalCluster], read: int) -> list[Contender]:
    """Each reads so many random rows."""
    ways: dict[str, Callable[[], int]] = {}
    for way, local in (("local", True), ("Flight", False)):
        for pages, cluster in clusters.items():
            reading = Reading(table, cluster.endpoint, True, local, max_rows=read)
            ways[f"cache, {way}, {pages} pages"] = Epochs(reading).run
    matrix = np.zeros((table.num_rows, ROW_BYTES // 4), np.float32)
    matrix += 1  # so that each page is there
    ids = np.random.default_rng(0).integers(0, table.num_rows, read)
    ways["bare np.take"] = partial(take, matrix, ids)
    num_bytes = round(read * table.row_bytes)
    return [Contender(name, run, read, num_bytes) for name, run in ways.items()]


def take(matrix: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> int:
    """Batches of these rows."""
    starts = range(0, len(ids), BATCH_SIZE)
    return sum(len(np.take(matrix, ids[at : at + BATCH_SIZE], axis=0)) for at in starts)


def speed_up(timings: dict[str, Timing], ours: str, theirs: str) -> float:
    """How many times as fast, at the median of the turns."""
    turns = zip(timings[f"cache, {theirs}"].seconds, timings[f"cache, {ours}"].seconds, strict=True)
    return statistics.median(slow / fast for slow, fast in turns)


if __name__ == "__main__":
    main()
