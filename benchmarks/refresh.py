"""How much faster is a refresh after ten new files of a thousand than the whole load?

    python -m benchmarks.refresh [--quick] [--files N] [--repeats N]

Files of 32 random float32 columns and an int64 label, of three sizes, on a tmpfs. Two fresh nodes
load them all; then ten files are added and the dataset is refreshed, several times. The first
refresh of each cluster is counted as the others are.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import cpu_seconds, memory_directory, print_ratios, write_result
from benchmarks.load import stored_bytes
from benchmarks.tables import FEATURES, ROW_BYTES
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

ROWS_PER_FILE = (1_000, 5_000, 20_000)
NEW_FILES, REFRESHES = 10, 5
TARGET = 10.0
Case = dict[str, Any]


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few files, in less than a minute")
    parser.add_argument("--files", type=int, help="default: 1,000")
    parser.add_argument("--repeats", type=int, help="clusters a size; default: 3")
    arguments = parser.parse_args()
    files: int = arguments.files or (200 if arguments.quick else 1_000)
    repeats: int = arguments.repeats or (1 if arguments.quick else 3)
    cases = [measure_size(files, rows, repeats) for rows in ROWS_PER_FILE]
    ratios = {name_of(files, case): case["ratio"] for case in cases}
    print()
    print_ratios(ratios, dict.fromkeys(ratios, TARGET))
    result = {"files": files, "new_files": NEW_FILES, "row_bytes": ROW_BYTES, "cases": cases}
    path = write_result("refresh-quick" if arguments.quick else "refresh", result)
    print(f"\nwritten to {path}")


def name_of(files: int, case: Case) -> str:
    """A line of the table of ratios."""
    return f"load / refresh, {files} files of {case['rows_per_file'] * ROW_BYTES / 1e6:.1f} MB"


def measure_size(files: int, rows: int, repeats: int) -> Case:
    """Loads and refreshes of files of one size: seconds, processor time, bytes in memory."""
    loads: list[list[float]] = []
    refreshes: list[list[float]] = []
    bytes_per_new_row = 0.0
    for _ in range(repeats):
        with memory_directory("cache-bench-") as directory:
            source = directory / "source"
            source.mkdir()
            write_files(source, range(files), rows)
            with LocalCluster(2, directory / "nodes") as cluster:
                loads.append(timed(cluster, source))
                stored = stored_bytes(directory / "nodes")
                for turn in range(REFRESHES):
                    first = files + turn * NEW_FILES
                    write_files(source, range(first, first + NEW_FILES), rows)
                    refreshes.append(timed(cluster, source))
                added = stored_bytes(directory / "nodes") - stored
                bytes_per_new_row = added / (REFRESHES * NEW_FILES * rows)
    (load_s, load_cpu_s), (refresh_s, refresh_cpu_s) = (
        [median(values) for values in zip(*each, strict=True)] for each in (loads, refreshes)
    )
    print(
        f"{rows:>7,} rows a file: load {load_s:.2f} s ({load_cpu_s:.2f} of a processor), "
        f"refresh {refresh_s:.3f} s ({refresh_cpu_s:.3f}), {bytes_per_new_row:.0f} bytes a new row"
    )
    return {
        "rows_per_file": rows,
        "loads": loads,
        "refreshes": refreshes,
        "load_s": load_s,
        "refresh_s": refresh_s,
        "load_cpu_s": load_cpu_s,
        "refresh_cpu_s": refresh_cpu_s,
        "bytes_per_new_row": bytes_per_new_row,
        "ratio": load_s / refresh_s,
    }


def timed(cluster: LocalCluster, source: Path) -> list[float]:
    """Seconds and processor time until the files that are there now can be read."""
    cpu, start = cpu_seconds(), time.perf_counter()
    CacheClient(cluster.endpoint).load(DatasetSpec("table", source), refresh=True)
    return [time.perf_counter() - start, cpu_seconds() - cpu]


def write_files(to: Path, numbers: range, rows: int) -> None:
    """One file for each number."""
    for number in numbers:
        chance = np.random.default_rng(number)
        columns = {name: chance.random(rows, np.float32) for name in FEATURES}
        table = pa.table({**columns, "label": np.arange(rows)})
        pq.write_table(table, to / f"part-{number:05}.parquet")


if __name__ == "__main__":
    main()
