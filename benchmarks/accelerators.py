"""How busy would accelerators be? In the unit of MLPerf Storage and DLIO.

    python -m benchmarks.accelerators [--quick]

Emulated accelerators take batches and sleep as long as a training step takes. Their utilisation is
the time that they compute over the whole time. Table, batches and times are those of the DLRM of
MLPerf Storage 3.0 (mlcommons/storage, configs/dlio/workload/dlrm_b200.yaml and dlrm_mi355.yaml):
16,384 samples in 0.375 ms on a B200 and 0.5625 ms on an MI355; a storage passes from 0.7.

Each accelerator is a process. It reads its rank of a shuffled epoch from one node of this machine,
from mapped files and over Flight, or its files by `pyarrow.dataset`, in source order. The loop is
the same. The processes share all cores of this machine with the node; a real host has more.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch

from benchmarks.common import Timing, median_interval, memory_directory, print_table, write_result
from benchmarks.ranks import reading_processes
from benchmarks.tables import DLRM_COLUMNS, DLRM_ROW_BYTES, dlrm, files_of
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_server import LocalCluster

BATCH_SIZE = 16_384
COMPUTE_S = {"B200": 0.000375, "MI355": 0.0005625}
PASSES_FROM = 0.7
ACCELERATORS = (1, 2, 4)
READERS = ("cache, local, shuffled", "cache, Flight 1 node, shuffled", "pyarrow.dataset, in order")

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """One accelerator: takes its batches, and sleeps after each.

    Attributes:
        processes: accelerators.
    """

    reader: str
    endpoint: str
    files: tuple[str, ...]
    rank: int
    processes: int
    epoch: int
    compute_s: float

    def run(self, barrier: Barrier) -> tuple[int, float, float]:
        """Rows that came, and when that began and ended."""
        batches = self._stream() if self.reader.startswith("pyarrow") else self._cached()
        barrier.wait(60.0)
        start, rows = time.monotonic(), 0
        for batch in batches:
            rows += len(batch[DLRM_COLUMNS[0]])
            time.sleep(self.compute_s)
        return rows, start, time.monotonic()

    def _cached(self) -> Iterator[Batch]:
        dataset = CacheIterableDataset(
            "table",
            cache=Connection(self.endpoint, local="local" in self.reader),
            batch_size=BATCH_SIZE,
            shuffle=True,
            rank=self.rank,
            world_size=self.processes,
        )
        dataset.set_epoch(self.epoch)
        return iter(dataset)

    def _stream(self) -> Iterator[Batch]:
        source = pyarrow.dataset.dataset(self.files[self.rank :: self.processes])
        for part in source.to_batches(columns=DLRM_COLUMNS, batch_size=BATCH_SIZE):
            yield {
                name: torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
                for name, column in zip(part.schema.names, part.columns, strict=True)
            }


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--rows", type=int, default=1_500_000, help="1.5 million are 1.1 GB")
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    rows: int = 150_000 if arguments.quick else arguments.rows
    repeats: int = 2 if arguments.quick else arguments.repeats
    numbers = ACCELERATORS[:2] if arguments.quick else ACCELERATORS
    timings = measure(dlrm(rows), rows, repeats, numbers)
    results = [described(timing) for timing in timings.values()]
    print(f"\n{rows:,} samples of {DLRM_ROW_BYTES} bytes, batches of {BATCH_SIZE:,}\n")
    print_table(timings)
    print(f"\n{'':48} {'samples/s':>12} {'utilisation':>12}  (passes from {PASSES_FROM})")
    for each in results:
        print(f"{each['name']:48} {each['rows_per_s']:12,.0f} {each['utilisation']:12.1%}")
    name = "accelerators-quick" if arguments.quick else "accelerators"
    result = {
        "rows": rows,
        "row_bytes": DLRM_ROW_BYTES,
        "batch_size": BATCH_SIZE,
        "compute_s": COMPUTE_S,
        "passes_from": PASSES_FROM,
        "timings": results,
    }
    print(f"\nwritten to {write_result(name, result)}")


def measure(table: Path, rows: int, repeats: int, numbers: tuple[int, ...]) -> dict[str, Timing]:
    """Each reader with each number of accelerators of each kind, in turn; the first round warms."""
    files = tuple(files_of(table))
    cases = list(itertools.product(COMPUTE_S, numbers, READERS))
    timings = {}
    for kind, number, reader in cases:
        name = f"{reader}, {number} x {kind}"
        notes = {"computing_s": rows / number / BATCH_SIZE * COMPUTE_S[kind]}
        timings[name] = Timing(name, rows, rows * DLRM_ROW_BYTES, notes=notes)
    with memory_directory("cache-bench-") as directory, LocalCluster(1, directory) as cluster:
        spec = DatasetSpec("table", table, columns=DLRM_COLUMNS)
        CacheClient(cluster.endpoint).load(spec)
        with reading_processes(max(numbers)) as readers:
            for turn in range(1 + repeats):
                for (kind, number, reader), timing in zip(cases, timings.values(), strict=True):
                    handled, seconds = readers.run(
                        [
                            Training(
                                reader, cluster.endpoint, files, rank, number, turn, COMPUTE_S[kind]
                            )
                            for rank in range(number)
                        ]
                    )
                    assert handled == rows, f"{timing.name}: {handled} rows, not {rows}"
                    if turn:
                        timing.seconds.append(seconds)
    return timings


def described(timing: Timing) -> dict[str, Any]:
    """For the result file."""
    shares = [timing.notes["computing_s"] / seconds for seconds in timing.seconds]
    low, high, _ = median_interval(shares)
    return {
        **timing.summary(),
        "utilisation": statistics.median(shares),
        "utilisation_interval": [low, high],
    }


if __name__ == "__main__":
    main()
