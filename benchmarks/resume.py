"""Does the time to the first batch depend on how much of the epoch was done before?

    python -m benchmarks.resume [--peers-python PATH] [--quick]

A new `CacheIterableDataset` loads a state of 0 %, 50 % and 99 % of a shuffled epoch and yields one
batch of 1024 rows of 32 float32 and one int64; every path is the default one. ``--peers-python``
names a Python with Hugging Face datasets and MosaicML Streaming; they resume at the same points of
the same table, see ``peers/resume_readers.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    DATA,
    Timing,
    interval_name,
    measure_in_turn,
    memory_directory,
    write_timings,
)
from benchmarks.tables import FEATURES, ROW_BYTES, floats
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

BATCH_SIZE = 1024
POINTS = (0.0, 0.5, 0.99)
TARGETS = {"cache: 99% over 0%": 1.2}
PEERS = Path(__file__).parent / "peers" / "resume_readers.py"
PEER_READERS = ("hugging-face", "mosaicml")


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="2 million are 272 MB")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--peers-python", type=Path, help="measure its packages, too")
    parser.add_argument("--peer-repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: int = 200_000 if arguments.quick else arguments.rows
    repeats: int = 10 if arguments.quick else arguments.repeats
    peer_repeats: int = 2 if arguments.quick else arguments.peer_repeats
    table = floats(rows)
    with memory_directory("cache-bench-") as directory:
        timings = measure_cache(table, directory, rows, repeats)
    if arguments.peers_python is not None:
        for reader in PEER_READERS:
            timings |= measure_peer(arguments.peers_python, reader, table, rows, peer_repeats)
    print(f"\n{rows:,} rows; milliseconds from making the reader to its first batch\n")
    print(f"{'':40} {'median':>9} {interval_name(timings):>17}")
    for timing in timings.values():
        low, high = (end * 1e3 for end in timing.interval_s()[:2])
        print(f"{timing.name:40} {timing.median_s * 1e3:9.1f} {f'{low:.1f} - {high:.1f}':>17}")
    ratios = late_over_early(timings)
    print()
    for name, value in ratios.items():
        target = f"  (to reach: {TARGETS[name]:g})" if name in TARGETS else ""
        print(f"{name:40} {value:9.2f}{target}")
    write_timings(
        "resume",
        timings,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        batch_size=BATCH_SIZE,
    )


def measure_cache(table: Path, directory: Path, num_rows: int, repeats: int) -> dict[str, Timing]:
    """A new dataset, a state, the first batch; the points in turn."""
    with LocalCluster(1, directory) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", table))
        running: list[Iterator[Any]] = []

        def make() -> CacheIterableDataset:
            return CacheIterableDataset(
                "table",
                cache=cluster.endpoint,
                batch_size=BATCH_SIZE,
                stack={"features": FEATURES},
                shuffle=True,
            )

        def resumer(point: float) -> Callable[[], int]:
            steps = int(num_rows * point) // BATCH_SIZE
            state = {**make().state_dict(), "rows_consumed": steps * BATCH_SIZE}

            def resume() -> int:
                dataset = make()
                dataset.load_state_dict(state)
                batches = iter(dataset)
                running.append(batches)
                return len(next(batches)["features"])

            return resume

        def stop() -> None:
            # What was fetched ahead of the first batch is no part of this repeat, nor of the next.
            running.clear()

        return measure_in_turn(
            {label("cache", point): resumer(point) for point in POINTS},
            num_rows=BATCH_SIZE,
            num_bytes=BATCH_SIZE * ROW_BYTES,
            repeats=repeats,
            warm_ups=3,
            settle=stop,
        )


def measure_peer(
    python: Path, reader: str, table: Path, num_rows: int, repeats: int
) -> dict[str, Timing]:
    """The same points by a reader of the peers' environment."""
    command: list[str] = [
        str(python), str(PEERS), reader, "--parquet", str(table), "--rows", str(num_rows),
        "--scratch", str(DATA), "--batch-size", str(BATCH_SIZE), "--repeats", str(repeats),
        "--points", *map(str, POINTS),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    timings = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            name = label(f"{result['reader']} ({result['version']})", result["point"])
            timings[name] = Timing(name, BATCH_SIZE, BATCH_SIZE * ROW_BYTES, result["seconds"])
    return timings


def label(reader: str, point: float) -> str:
    """Name of a timing."""
    return f"{reader} at {point:.0%}"


def late_over_early(timings: dict[str, Timing]) -> dict[str, float]:
    """Of each reader, the time at the last point over that at the first."""
    first, last = label("", POINTS[0]), label("", POINTS[-1])
    readers = [name.removesuffix(first) for name in timings if name.endswith(first)]
    readers = [reader for reader in readers if reader + last in timings]  # one may yield no batch
    return {
        f"{reader}: {POINTS[-1]:.0%} over {POINTS[0]:.0%}": timings[reader + last].median_s
        / timings[reader + first].median_s
        for reader in readers
    }


if __name__ == "__main__":
    main()
