"""What does a row cost over the wire, beside a bare Flight stream of the same bytes?

    python -m benchmarks.wire [--rows N] [--tables NAME ...] [--repeats N] [--quick]

Three tables, in batches of 1024 rows: 32 numbers of three types as columns with names (160 bytes a
row), an embedding of 384 float16 with an id (776 bytes), and 34 float32 in one list column (136
bytes). A bare Flight server streams ready record batches of the stored columns, which its client
drops; the best of its message sizes counts. Our reader never uses files of this machine. It reads
in source order, as tensors and as Arrow batches, and shuffled, from one node and from two.

The client runs on the first core, the server or the nodes on the last one. Contenders are measured
in turn, A B C A B C; a ratio is the median of those of each turn. Processor time is that of the
client, and of the server or its nodes, apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.common import (
    Contender,
    Timing,
    measure,
    median_interval,
    memory_directory,
    pinned,
    print_table,
    process_cpu_s,
    write_result,
)
from benchmarks.contenders import (
    GLOBAL,
    SOURCE_ORDER,
    Epochs,
    Reading,
    bare_flight,
    serve_bare_flight,
)
from benchmarks.tables import Table
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

BARE, SEQUENTIAL, AS_ARROW = "bare Flight stream", "sequential", "sequential, as Arrow"
SHUFFLED, SHUFFLED_TWO = "shuffled, 1 node", "shuffled, 2 nodes"
NUM_BYTES = 512 * 1024 * 1024  # of each table
MAX_SHARD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Kind:
    """A table to read.

    Attributes:
        columns: stored column -> dtype and values a row.
        named: each value is a column with a name; else each stored column is one list or number.
        least_rate, most_cpu: of the rows/s and of the processor time of the bare stream, what a
            contender must reach and may use.
    """

    columns: Mapping[str, tuple[str, int]]
    named: bool
    least_rate: Mapping[str, float]
    most_cpu: Mapping[str, float]

    @property
    def row_bytes(self) -> int:
        """Of the values of a row."""
        return sum(np.dtype(dtype).itemsize * width for dtype, width in self.columns.values())


KINDS = {
    "named": Kind(
        {"f": ("float32", 24), "i": ("int64", 6), "d": ("float64", 2)},
        named=True,
        least_rate={SEQUENTIAL: 0.65, SHUFFLED: 0.38},
        most_cpu={SEQUENTIAL: 1.5, SHUFFLED: 2.6},
    ),
    "embedding": Kind(
        {"embedding": ("float16", 384), "id": ("int64", 1)},
        named=False,
        least_rate={SEQUENTIAL: 0.8, SHUFFLED: 0.48},
        most_cpu={SEQUENTIAL: 1.25, SHUFFLED: 1.8},
    ),
    "packed": Kind(
        {"features": ("float32", 34)},
        named=False,
        least_rate={SHUFFLED: 0.75},
        most_cpu={SHUFFLED: 1.5},
    ),
}
MOST_CPU_OF_ONE_NODE = {"packed": 1.15}  # of two nodes


@dataclass
class Cost:
    """Processor seconds of a contender, one entry a run; those of warm-ups too."""

    client_s: list[float] = field(default_factory=list)
    nodes_s: list[float] = field(default_factory=list)

    def of(self, pids: Sequence[int], run: Callable[[], int]) -> Callable[[], int]:
        """A run that adds to it.

        Args:
            pids: of the server or its nodes.
        """

        def read() -> int:
            def used() -> tuple[float, float]:
                return process_cpu_s(os.getpid()), sum(map(process_cpu_s, pids))

            client_s, nodes_s = used()
            rows = run()
            now = used()
            self.client_s.append(now[0] - client_s)
            self.nodes_s.append(now[1] - nodes_s)
            return rows

        return read


@dataclass(frozen=True)
class Result:
    """One contender beside the bare stream; an interval holds a median, see `median_interval`."""

    name: str
    rows_per_s: float
    rate: float
    rate_interval: tuple[float, float]
    cpu: float
    cpu_interval: tuple[float, float]
    client_ns_per_row: float
    nodes_ns_per_row: float

    @property
    def cpu_ns_per_row(self) -> float:
        """Of client and nodes."""
        return self.client_ns_per_row + self.nodes_ns_per_row


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="of each table; else 512 MB")
    parser.add_argument("--tables", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    repeats: int = 3 if arguments.quick else arguments.repeats
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.tables:
        kind = KINDS[name]
        rows = arguments.rows or NUM_BYTES // kind.row_bytes // (8 if arguments.quick else 1)
        print(f"\n{name}: {rows:,} rows of {kind.row_bytes} bytes")
        found, timings = measure_table(name, kind, rows, repeats)
        print_results(name, found)
        results[name] = {
            "rows": rows,
            "row_bytes": kind.row_bytes,
            "contenders": [
                {**asdict(each), "cpu_ns_per_row": each.cpu_ns_per_row} for each in found.values()
            ],
            "timings": [timing.summary() for timing in timings.values()],
            "least_rate": kind.least_rate,
            "most_cpu": kind.most_cpu,
        }
    path = write_result("wire-quick" if arguments.quick else "wire", {"tables": results})
    print(f"\nwritten to {path}")


def measure_table(
    name: str, kind: Kind, rows: int, repeats: int
) -> tuple[dict[str, Result], dict[str, Timing]]:
    """The contenders of a table, by name, and their timings."""
    with memory_directory("cache-bench-") as directory, ExitStack() as stack:
        table = write_table(directory, name, kind, rows)
        clusters = [
            stack.enter_context(LocalCluster(nodes, directory / str(nodes))) for nodes in (1, 2)
        ]
        shard_bytes = min(MAX_SHARD_BYTES, max(1, table.num_bytes // 8))  # both nodes hold some
        spec = DatasetSpec(name, table.paths, target_shard_bytes=shard_bytes)
        for cluster in clusters:
            CacheClient(cluster.endpoint).load(spec)
        location, server_pid = stack.enter_context(serve_bare_flight(table))
        costs: dict[str, Cost] = {}
        contenders = []
        for pids, contender in (
            *(([server_pid], bare) for bare in bare_flight(table, location, server_pid)),
            *readers(table, *clusters),
        ):
            cost = costs[contender.name] = Cost()
            contenders.append(replace(contender, run=cost.of(pids, contender.run)))
        timings = measure(contenders, repeats=repeats)
    print_table(timings)
    return results_of(timings, costs), timings


def readers(
    table: Table, one: LocalCluster, two: LocalCluster
) -> Iterator[tuple[Sequence[int], Contender]]:
    """Our reader, each with the process ids of its nodes."""
    for name, cluster, shuffle, as_arrow in (
        (SEQUENTIAL, one, False, False),
        (AS_ARROW, one, False, True),
        (SHUFFLED, one, True, False),
        (SHUFFLED_TWO, two, True, False),
    ):
        pids = [node.pid for node in cluster.nodes]
        reading = Reading(
            table,
            cluster.endpoint,
            shuffle,
            local=False,
            batch_format="arrow" if as_arrow else "torch",
        )
        run = pinned(dict.fromkeys(pids, -1), Epochs(reading).run)
        order = GLOBAL if shuffle else SOURCE_ORDER
        yield pids, Contender(name, run, table.num_rows, table.num_bytes, order)


def results_of(timings: Mapping[str, Timing], costs: Mapping[str, Cost]) -> dict[str, Result]:
    """Each contender beside the fastest bare stream, which comes first."""
    bare = max(
        (timing for timing in timings.values() if timing.name.startswith(BARE)),
        key=lambda timing: timing.rows_per_s,
    )
    ours = [timing for timing in timings.values() if not timing.name.startswith(BARE)]
    return {
        timing.name: _beside(timing, costs[timing.name], bare, costs[bare.name])
        for timing in (bare, *ours)
    }


def _beside(timing: Timing, cost: Cost, bare: Timing, bare_cost: Cost) -> Result:
    turns = len(timing.seconds)  # those before were warm-ups
    client_s, nodes_s = cost.client_s[-turns:], cost.nodes_s[-turns:]
    bare_s = np.add(bare_cost.client_s[-turns:], bare_cost.nodes_s[-turns:])
    rates = np.divide(bare.seconds, timing.seconds).tolist()
    cpus = np.divide(np.add(client_s, nodes_s), bare_s).tolist()
    return Result(
        timing.name,
        timing.rows_per_s,
        statistics.median(rates),
        median_interval(rates)[:2],
        statistics.median(cpus),
        median_interval(cpus)[:2],
        statistics.median(client_s) / timing.num_rows * 1e9,
        statistics.median(nodes_s) / timing.num_rows * 1e9,
    )


def print_results(name: str, results: Mapping[str, Result]) -> None:
    """A line a contender: its ratios to the bare stream, and its processor time."""
    kind = KINDS[name]
    print(
        f"\n{'beside the bare stream':40} {'rate':>5} {'interval':>13} {'to reach':>9} "
        f"{'CPU':>5} {'interval':>13} {'at most':>8} {'ns/row':>7} {'client':>7} {'nodes':>7}"
    )
    for each in results.values():
        least, most = kind.least_rate.get(each.name), kind.most_cpu.get(each.name)
        print(
            f"{each.name:40} {each.rate:5.2f} {_interval(each.rate_interval):>13} "
            f"{_target(least, met=least is not None and each.rate >= least):>9} "
            f"{each.cpu:5.2f} {_interval(each.cpu_interval):>13} "
            f"{_target(most, met=most is not None and each.cpu <= most):>8} "
            f"{each.cpu_ns_per_row:7.0f} {each.client_ns_per_row:7.0f} {each.nodes_ns_per_row:7.0f}"
        )
    more = results[SHUFFLED_TWO].cpu / results[SHUFFLED].cpu
    most = MOST_CPU_OF_ONE_NODE.get(name)
    print(
        f"CPU of two nodes / of one: {more:.2f} {_target(most, met=more <= (most or 0))}".rstrip()
    )


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} - {ends[1]:.2f}"


def _target(target: float | None, *, met: bool) -> str:
    return "" if target is None else f"{target:g} {'yes' if met else 'NO'}"


def write_table(directory: Path, name: str, kind: Kind, rows: int) -> Table:
    """Parquet files of random numbers: as users have them, and with the stored columns."""
    rng = np.random.default_rng(0)
    stored = {
        column: _numbers(rng, rows, width, np.dtype(dtype))
        for column, (dtype, width) in kind.columns.items()
    }
    lists: dict[str, pa.Array] = {
        column: pa.FixedSizeListArray.from_arrays(values.reshape(-1), values.shape[1])
        for column, values in stored.items()
    }
    paths, packed = directory / "columns", directory / "packed"
    if kind.named:
        columns = {
            f"{column}{at}": pa.array(values[:, at])
            for column, values in stored.items()
            for at in range(values.shape[1])
        }
    else:
        columns = {
            column: pa.array(values[:, 0]) if values.shape[1] == 1 else lists[column]
            for column, values in stored.items()
        }
    for path, found in ((paths, columns), (packed, lists)):
        path.mkdir()
        pq.write_table(pa.table(found), path / "part-0.parquet", use_dictionary=False)
    return Table(name, rows, kind.row_bytes, paths, packed, None, None)


def _numbers(
    rng: np.random.Generator, rows: int, width: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    if dtype.kind == "i":
        return rng.integers(0, 1000, (rows, width), dtype)
    return rng.random((rows, width), np.float32).astype(dtype)


if __name__ == "__main__":
    main()
