"""How fast is a mixture of two tables, beside the plain read and the mixtures of other libraries?

    python -m benchmarks.mixture [--rows N] [--quick] [--peers-python PYTHON]

Shuffled epochs of 32 float32 columns and a label, in batches of 1024 rows, from files of this
machine. The mixtures read two tables in the proportions 7 to 3. The plain read and the mixtures of
this cache are measured in turn, in one run; the other libraries after them, as in
`benchmarks.shuffle`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    Contender,
    Timing,
    measure,
    memory_directory,
    print_ratios,
    print_table,
    write_timings,
)
from benchmarks.contenders import BATCH_SIZE, epochs_of
from benchmarks.processes import DEFAULT_PEERS, read_by_peer
from benchmarks.tables import FEATURES, ROW_BYTES, make_floats
from cache_client import CacheClient, CacheIterableDataset, CacheMixture, DatasetSpec
from cache_server import LocalCluster

SHARES = {"web": 0.7, "code": 0.3}
PLAIN, MIXED, RANDOM = "plain", "mixture of two", "mixture of two, random draw"
NAMED = "mixture of two, with a column of the sources"
TARGETS = {f"{MIXED} / {PLAIN}": 0.85}
PEERS = ("huggingface", "mosaic", "litdata", "grain")


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of each table")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few rows, no other libraries")
    parser.add_argument("--peers-python", type=Path, help="with --quick: measure its packages, too")
    arguments = parser.parse_args()
    rows: int = 400_000 if arguments.quick else arguments.rows
    torch.set_num_threads(1)
    table = make_floats(rows, 200_000)
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(1, directory / "cache") as cluster,
    ):
        for name in SHARES:
            CacheClient(cluster.endpoint).load(DatasetSpec(name, table.paths))
        repeats = 2 if arguments.quick else arguments.repeats
        timings: dict[str, Timing] = measure(list(readers(cluster.endpoint)), repeats=repeats)
    skipped: dict[str, str] = {}
    if arguments.peers_python or not arguments.quick:
        python = arguments.peers_python or DEFAULT_PEERS
        for peer in PEERS:
            found, left_out = read_by_peer("mix", peer, table, python, seconds=2)
            timings |= {timing.name: timing for timing in found}
            skipped |= left_out
    print_table(timings)
    ratios: dict[str, float | None] = {
        f"{name} / {PLAIN}": timing.rows_per_s / timings[PLAIN].rows_per_s
        for name, timing in timings.items()
        if name != PLAIN
    }
    print_ratios(ratios, TARGETS)
    for what, why in skipped.items():
        print(f"left out: {what}: {why}")
    write_timings(
        "mixture",
        timings,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        batch_size=BATCH_SIZE,
        left_out=skipped,
    )


def readers(endpoint: str) -> Iterator[Contender]:
    """The plain read of a table, and mixtures of two."""

    def dataset(name: str) -> CacheIterableDataset:
        return CacheIterableDataset(
            name, cache=endpoint, batch_size=BATCH_SIZE, shuffle=True, stack={"features": FEATURES}
        )

    options: dict[str, dict[str, Any]] = {
        MIXED: {},
        RANDOM: {"draw": "random"},
        NAMED: {"source_column": "source"},
    }
    read: dict[str, CacheIterableDataset | CacheMixture] = {PLAIN: dataset("web")}
    for name, given in options.items():
        sources = {each: (dataset(each), share) for each, share in SHARES.items()}
        read[name] = CacheMixture(sources, stop=len(read[PLAIN]), **given)
    for name, each in read.items():
        rows = each.num_samples
        yield Contender(name, epochs_of(each), rows, rows * ROW_BYTES, "exact global")


if __name__ == "__main__":
    main()
