"""What does a row cost in another container of the same host, which does not see the shard files?

    python -m benchmarks.same_host [--rows N] [--repeats N] [--quick]

32 float32 columns and a label, in batches of 1024 rows. The node hands its open files over
(docs/decisions/0036). Beside it: the same files opened by their paths, the node over Flight, and a
bare Flight server that streams the same bytes ready-made, whose best message size counts.

The reader runs on the first core, the server or the node on the last one. Contenders are measured
in turn, in another order each time: one is slower after a stream of large messages. A ratio is the
median of those of each turn. Processor time is that of all processes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.common import (
    Contender,
    Timing,
    measure,
    memory_directory,
    pinned,
    print_ratios,
    print_table,
    write_timings,
)
from benchmarks.contenders import (
    GLOBAL,
    SOURCE_ORDER,
    Epochs,
    Reading,
    bare_flight,
    first_epoch,
    serve_bare_flight,
)
from benchmarks.tables import ROW_BYTES, make_floats
from cache_client import CacheClient, DatasetSpec
from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_server import LocalCluster

HANDED, SEEN, WIRE = "files handed over", "files by path", "Flight"
MAX_SHARD_BYTES = 64 * 1024 * 1024
PER_CPU = ", rows a processor second"
TARGETS = {f"{HANDED}, {way} / bare Flight{PER_CPU}": 1.0 for way in ("sequential", "shuffled")}


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000, help="4 million are 544 MB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    rows: int = 400_000 if arguments.quick else arguments.rows
    torch.set_num_threads(1)
    table = make_floats(rows, None)
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(1, directory) as cluster,
        serve_bare_flight(table) as (location, server),
    ):
        spec = DatasetSpec(table.name, table.paths, target_shard_bytes=MAX_SHARD_BYTES)
        CacheClient(cluster.endpoint).load(spec)
        (node,) = cluster.nodes
        name, elsewhere = node.cache_dir / NODE_ID_FILE, node.cache_dir / "elsewhere"

        def contenders(way: str) -> Iterator[Contender]:
            def read(run: Callable[[], int]) -> int:
                """Runs where new readers see the files of the node, or not."""
                if way == HANDED:
                    name.rename(elsewhere)
                try:
                    return run()
                finally:
                    if way == HANDED:
                        elsewhere.rename(name)

            for order, shuffle in ((SOURCE_ORDER, False), (GLOBAL, True)):
                reading = Reading(table, cluster.endpoint, shuffle, local=way != WIRE)
                runs: dict[str, Callable[[], int]] = {"": Epochs(reading).run}
                if way == HANDED:
                    runs[", first epoch"] = partial(first_epoch, reading)
                for which, run in runs.items():
                    yield Contender(
                        f"{way}{which}, {'shuffled' if shuffle else 'sequential'}",
                        pinned({node.pid: -1}, partial(read, run)),
                        rows,
                        table.num_bytes,
                        order,
                    )

        bare = bare_flight(table, location, server)
        ours = [each for way in (SEEN, WIRE, HANDED) for each in contenders(way)]
        timings = measure_shuffled([*bare, *ours], arguments.repeats)
    print_table(timings)
    best = min((timings[each.name] for each in bare), key=lambda timing: timing.median_s)
    ratios = {}
    for timing in timings.values():
        for theirs in (WIRE, SEEN, "bare Flight"):
            known = timing.name.replace(HANDED, theirs).replace(", first epoch", "")
            other = timings.get(known, best)
            if timing.name.startswith(HANDED):
                ratios[f"{timing.name} / {theirs}"] = _ratio(timing.seconds, other.seconds)
                ratios[f"{timing.name} / {theirs}{PER_CPU}"] = _ratio(
                    timing.cpu_seconds, other.cpu_seconds
                )
    print()
    print_ratios(ratios, TARGETS)
    write_timings(
        "same_host", timings, ratios, TARGETS, quick=arguments.quick, rows=rows, row_bytes=ROW_BYTES
    )


def measure_shuffled(contenders: Sequence[Contender], repeats: int) -> dict[str, Timing]:
    """Times each contender ``repeats`` times, after one turn that is not counted."""
    timings = measure(contenders, repeats=0)
    for turn in range(repeats):
        order = np.random.default_rng(turn).permutation(len(contenders))
        found = measure([contenders[index] for index in order], repeats=1, warm_ups=0)
        for name, timing in found.items():
            timings[name].seconds.extend(timing.seconds)
            timings[name].cpu_seconds.extend(timing.cpu_seconds)
    return timings


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as long theirs takes: the median of the ratios of each turn."""
    return statistics.median(their_s / our_s for our_s, their_s in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
