"""How fast is a cached table read, beside what pyarrow does alone?

    python -m benchmarks.throughput [--quick] [--rows N] [--repeats N]

One rank, batches of 1024 rows as one ``[1024, 32]`` float32 tensor and one int64 label,
through `CacheIterableDataset` from one node in another process over loopback, against
`pyarrow.dataset` decoding the same Parquet files and stacking the same tensors. How long
loading takes: `benchmarks.load`; reading without the node, and how fast others shuffle:
`benchmarks.shuffle`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow.dataset
import torch

from benchmarks.common import (
    Timing,
    measure_in_turn,
    memory_directory,
    print_table,
    write_timings,
)
from benchmarks.tables import FEATURES, ROW_BYTES, floats
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_server import LocalCluster

BATCH_SIZE = 1024
TARGETS = {
    "sequential read over pyarrow.dataset": 2.0,
}


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--rows", type=int, help="default: 8 million, which are 1.1 GB")
    parser.add_argument("--repeats", type=int, help="default: 5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: int = arguments.rows or (400_000 if arguments.quick else 8_000_000)
    repeats: int = arguments.repeats or (2 if arguments.quick else 5)
    table = floats(rows)
    with memory_directory("cache-bench-") as directory:
        reading = measure_reads(table, directory, rows, repeats)
    print(f"\n{rows:,} rows of {ROW_BYTES} bytes\n")
    print_table(reading)
    ratios = {
        "sequential read over pyarrow.dataset": ratio(reading, "cache, sequential", "pyarrow"),
        "shuffled read over pyarrow.dataset": ratio(reading, "cache, shuffled", "pyarrow"),
        "shuffled read over sequential read": ratio(
            reading, "cache, shuffled", "cache, sequential"
        ),
    }
    print()
    for name, value in ratios.items():
        target = f"  (to reach: {TARGETS[name]:g})" if name in TARGETS else ""
        print(f"{name:48} {value:6.2f}{target}")
    write_timings(
        "throughput",
        reading,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        batch_size=BATCH_SIZE,
    )


def ratio(timings: dict[str, Timing], ours: str, theirs: str) -> float:
    """Rows per second of the contender that begins with ``ours`` over that of ``theirs``."""
    by_prefix = {
        prefix: next(t for name, t in timings.items() if name.startswith(prefix))
        for prefix in (ours, theirs)
    }
    return by_prefix[ours].rows_per_s / by_prefix[theirs].rows_per_s


def measure_reads(table: Path, directory: Path, num_rows: int, repeats: int) -> dict[str, Timing]:
    """One pass over the table by each reader, in turn."""
    with LocalCluster(1, directory / "read") as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", table))

        def cached(shuffle: bool) -> int:
            dataset = CacheIterableDataset(
                "table",
                cache=Connection(cluster.endpoint, local=False),
                batch_size=BATCH_SIZE,
                stack={"features": FEATURES},
                shuffle=shuffle,
            )
            return sum(len(batch["features"]) for batch in dataset)

        return measure_in_turn(
            {
                "pyarrow.dataset -> stacked tensors": lambda: read_with_pyarrow(table),
                "cache, sequential, 1 node over loopback": lambda: cached(shuffle=False),
                "cache, shuffled, 1 node over loopback": lambda: cached(shuffle=True),
            },
            num_rows=num_rows,
            num_bytes=num_rows * ROW_BYTES,
            repeats=repeats,
        )


def read_with_pyarrow(table: Path) -> int:
    """What one writes by hand: decode on all cores, stack columns, cut that into batches.

    Sixteen batches at a time are twice as fast as one. They are a third faster than a scan of the
    default size, whose stacks leave the processor's caches.
    """
    rows = 0
    for part in pyarrow.dataset.dataset(table).to_batches(batch_size=16 * BATCH_SIZE):
        columns = [part.column(name).to_numpy() for name in FEATURES]
        features = torch.from_numpy(np.stack(columns, axis=1))
        label = torch.from_numpy(part.column("label").to_numpy().copy())
        for start in range(0, part.num_rows, BATCH_SIZE):
            batch = features[start : start + BATCH_SIZE], label[start : start + BATCH_SIZE]
            assert len(batch[0]) == len(batch[1])
            rows += len(batch[0])
    return rows


if __name__ == "__main__":
    main()
