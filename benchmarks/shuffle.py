"""How fast is a true global row shuffle, beside what one would use instead?

    python -m benchmarks.shuffle [--quick] [--peers-python PYTHON] [--tables NAME ...]

Three tables: 32 float32 columns and a label; embeddings of 768 float32; TPC-H lineitem with its
strings. Batches of 1024 rows, one process unless it says ranks. Each table is read by this cache
(from shards on the same machine, and over Flight from one and two nodes, in source order and
shuffled), by what is plainly possible in memory, by a bare Flight server that streams the same
bytes ready-made, and by other libraries (`peers/readers.py`, in a separate environment:
`peers/requirements.txt`).

What is measured in this process is measured in turn, A B C A B C, what enters a ratio close
together; a ratio is the median of those of each turn. A pass is an epoch of a dataset that was read
before, as the others are timed when their tensors are made, their connection is open, their workers
run; the first epoch of a new dataset has separate lines. The other libraries read
fewer rows, or stop after some seconds; their ratios are to epochs of this cache just before and
after. Processor time is that of all processes, nodes and workers too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import (
    Contender,
    Timing,
    measure,
    memory_directory,
    print_ratios,
    print_table,
    write_result,
)
from benchmarks.contenders import (
    BATCH_SIZE,
    Epochs,
    Ranks,
    Reading,
    bare_flight,
    cached,
    in_memory,
    run_ranks,
    serve_bare_flight,
    stacked_or_not,
    with_pyarrow,
)
from benchmarks.processes import DEFAULT_PEERS, read_by_peer
from benchmarks.tables import MAKERS, Table
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

PEERS = ("huggingface", "mosaic", "litdata", "ray", "lance", "grain")

PLAIN = ("bare np.take", "torch x[perm]", "torch index_select")

TARGETS = {
    "floats: local shuffled / torch x[perm]": 2.5,
    "floats: local shuffled / local sequential, each batch read": 0.6,
    "floats: local shuffled / bare np.take": 0.5,
    "floats: Flight shuffled / bare Flight stream": 0.55,
    "embeddings: Flight shuffled / bare Flight stream": 0.75,
    "floats: Flight shuffled / Flight sequential": 0.67,
    "floats: 33 named columns / 1 pre-stacked, local shuffled": 0.6,
    "floats: local shuffled / Hugging Face, streaming": 50.0,
    "floats: local shuffled / Hugging Face, streaming, 33 columns, torch format": 50.0,
    "floats: local shuffled / MosaicML Streaming": 30.0,
    "floats: local shuffled / LitData": 30.0,
    "floats: local shuffled / Grain": 30.0,
    "floats: local shuffled / Ray Data": 5.0,
    "floats: local shuffled / Lance": 5.0,
    "lineitem: local shuffled / Hugging Face, streaming, strings as lists": 1.0,
}


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        repeats: of what enters a ratio; of other things, ``few_repeats``.
        slow_rows: for contenders of this process that go row by row.
        peer_rows: of the tables that the other libraries read.
    """

    rows: Mapping[str, int]
    peer_rows: Mapping[str, int]
    slow_rows: int
    repeats: int
    few_repeats: int
    peer_seconds: Mapping[str, float]
    peer_repeats: int
    peers: Sequence[str] = PEERS


FULL = Scale(
    rows={"floats": 2_000_000, "embeddings": 100_000, "lineitem": 500_000},
    peer_rows={"floats": 400_000, "embeddings": 50_000, "lineitem": 100_000},
    slow_rows=100_000,
    repeats=5,
    few_repeats=3,
    peer_seconds={"floats": 1.2, "embeddings": 0.7, "lineitem": 0.7},
    peer_repeats=3,
)
QUICK = Scale(
    rows={"floats": 400_000, "embeddings": 20_000, "lineitem": 100_000},
    peer_rows={"floats": 100_000},
    slow_rows=20_000,
    repeats=1,
    few_repeats=1,
    peer_seconds={"floats": 0.5},
    peer_repeats=1,
    peers=("huggingface", "mosaic", "lance"),
)


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--peers-python", type=Path, help="with --quick: measure its packages, too")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: all")
    parser.add_argument("--tables", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--name", help="of the result file; default: shuffle, or shuffle-quick")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scale = QUICK if arguments.quick else FULL
    started = time.monotonic()
    results: dict[str, dict[str, Timing]] = {}
    ratios: dict[str, float | None] = dict.fromkeys(TARGETS)
    skipped: dict[str, str] = {}
    if arguments.peers is None:
        arguments.peers = () if arguments.quick and not arguments.peers_python else scale.peers
        skipped.update({peer: "not in --quick" for peer in PEERS if peer not in arguments.peers})
    arguments.peers_python = arguments.peers_python or DEFAULT_PEERS
    with ExitStack() as stack:
        directory = stack.enter_context(memory_directory("cache-bench-"))
        clusters = {
            nodes: stack.enter_context(LocalCluster(nodes, directory / f"nodes-{nodes}"))
            for nodes in (1, 2)
        }
        ranks = stack.enter_context(run_ranks())
        for name in arguments.tables:
            table = MAKERS[name](scale.rows[name], scale.peer_rows.get(name))
            say(f"{name}: written")
            timings = measure_table(table, clusters, ranks, scale, arguments, ratios, skipped)
            results[name] = timings
            print(f"\n{name}: {table.num_rows:,} rows of {table.row_bytes:.0f} bytes\n")
            print_table(timings)
            sys.stdout.flush()
    print()
    print_ratios(ratios, TARGETS)
    for what, why in skipped.items():
        print(f"left out: {what}: {why}")
    path = write_result(
        arguments.name or ("shuffle-quick" if arguments.quick else "shuffle"),
        {
            "batch_size": BATCH_SIZE,
            "took_s": time.monotonic() - started,
            "tables": {
                name: [timing.summary() for timing in timings.values()]
                for name, timings in results.items()
            },
            "ratios": ratios,
            "targets": TARGETS,
            "left_out": skipped,
        },
    )
    print(f"\nwritten to {path} after {time.monotonic() - started:.0f} s")


# -- one table -------------------------------------------------------------------------------------


def measure_table(
    table: Table,
    clusters: Mapping[int, LocalCluster],
    ranks: Ranks,
    scale: Scale,
    arguments: argparse.Namespace,
    ratios: dict[str, float | None],
    skipped: dict[str, str],
) -> dict[str, Timing]:
    """All contenders of a table; fills in its ratios."""
    clients = {nodes: CacheClient(cluster.endpoint) for nodes, cluster in clusters.items()}
    with ExitStack() as stack:
        for client in clients.values():
            client.load(DatasetSpec(table.name, table.paths))
            stack.callback(client.drop, table.name)
        contenders = cached(table, clusters, ranks)
        if table.packed != table.paths:
            clients[1].load(DatasetSpec("packed", table.packed))
            stack.callback(clients[1].drop, "packed")
            contenders += stacked_or_not(table, clusters[1])
        if table.name != "lineitem":
            contenders += in_memory(table, scale.slow_rows)
            contenders += bare_flight(table, *stack.enter_context(serve_bare_flight(table)))
        contenders.append(with_pyarrow(table))
        first, second, others = groups_of(contenders)
        timings = measure(first, repeats=scale.repeats)
        timings.update(measure(second, repeats=scale.repeats))
        timings.update(measure(others, repeats=scale.few_repeats))
        say(f"{table.name}: measured in this process")
        ratios.update(ratios_of(table, timings))
        ours = Epochs(Reading(table, clusters[1].endpoint, shuffle=True, local=True))
        ours.run()
        for peer in arguments.peers if table.peer_paths is not None else []:
            before = rates(ours)
            found, left_out = read_by_peer(
                "shuffle",
                peer,
                table,
                arguments.peers_python,
                seconds=scale.peer_seconds[table.name],
                repeats=scale.peer_repeats,
            )
            skipped |= {f"{table.name}: {name}": why for name, why in left_out.items()}
            beside = statistics.median(before + rates(ours))
            for timing in found:
                timings[timing.name] = timing
                timing.notes["cache_beside_rows_per_s"] = beside
                name = f"{table.name}: local shuffled / {timing.name}"
                ratios[name] = beside / timing.rows_per_s
            say(f"{table.name}: measured {peer}")
        return timings


def groups_of(
    contenders: Sequence[Contender],
) -> tuple[list[Contender], list[Contender], list[Contender]]:
    """What is divided by one another, together: in memory; over Flight; and what is left."""
    memory, over_flight, others = [], [], []
    for contender in contenders:
        name = contender.name
        if "ranks" in name:
            others.append(contender)
        elif name.startswith(("cache, local", *PLAIN)):
            memory.append(contender)
        elif name.startswith(("cache, Flight 1", "bare Flight")):
            over_flight.append(contender)
        else:
            others.append(contender)
    return memory, over_flight, others


def rates(ours: Epochs) -> list[float]:
    """Rows per second of two epochs."""
    found = []
    for _ in range(2):
        start = time.perf_counter()
        rows = ours.run()
        found.append(rows / (time.perf_counter() - start))
    return found


def ratios_of(table: Table, timings: Mapping[str, Timing]) -> dict[str, float | None]:
    """Those between contenders that were measured in turn: the median over the turns."""

    def over(ours: str, *theirs: str) -> float | None:
        found = [timings[name] for name in theirs if name in timings]
        if ours not in timings or not found:
            return None
        best = max(found, key=lambda timing: timing.rows_per_s)
        turns = zip(timings[ours].seconds, best.seconds, strict=True)
        return statistics.median(theirs_s / ours_s for ours_s, theirs_s in turns)

    bare = [name for name in timings if name.startswith("bare Flight")]
    local, flight_ = "cache, local, shuffled", "cache, Flight 1 node, shuffled"
    found = {
        "local shuffled / torch x[perm]": over(local, "torch x[perm]"),
        "local shuffled / torch index_select": over(local, "torch index_select"),
        "local shuffled / bare np.take": over(local, "bare np.take"),
        "local shuffled / local sequential, each batch read": over(
            f"{local}, read", "cache, local, sequential, read"
        ),
        "33 named columns / 1 pre-stacked, local shuffled": over(
            f"{local}, 33 named columns", f"{local}, 1 pre-stacked column"
        ),
        "Flight shuffled / bare Flight stream": over(flight_, *bare),
        "Flight shuffled / Flight sequential": over(flight_, "cache, Flight 1 node, sequential"),
    }
    return {f"{table.name}: {name}": value for name, value in found.items() if value is not None}


def say(what: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
