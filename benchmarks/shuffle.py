"""How fast is a true global row shuffle, beside what one would use instead?

    python -m benchmarks.shuffle [--quick] [--peers-python PYTHON] [--tables NAME ...]

Three tables: 32 float32 columns and a label; embeddings of 768 float32; TPC-H lineitem with its
strings. Batches of 1024 rows, one process unless it says ranks. Each table is read by this cache
(from shards on the same machine, and over Flight from one and two nodes, in source order and
shuffled), by what is plainly possible in memory, by a bare Flight server that streams the same
bytes ready-made, and by other libraries (`peers/readers.py`, in an environment of their own:
`peers/requirements.txt`).

What is measured in this process is measured in turn, A B C A B C, what enters a ratio close
together; a ratio is the median of those of each turn. The other libraries read fewer rows, or stop
after some seconds; their ratios are to passes of this cache just before and after.
Processor time is that of all processes, nodes and workers too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.flight as flight
import pyarrow.parquet as pq
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.common import (
    Contender,
    Timing,
    measure,
    memory_directory,
    print_ratios,
    print_table,
    write_result,
)
from benchmarks.processes import DEFAULT_PEERS, child_process, per_million_rows, run_reader
from benchmarks.tables import MAKERS, Table, files_of
from benchmarks.throughput import read_with_pyarrow
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_client.arguments import BatchFormat
from cache_server import LocalCluster

PEERS = ("huggingface", "mosaic", "litdata", "ray", "lance", "grain")
BATCH_SIZE = 1024
RANKS = 2
MESSAGE_MEGABYTES = (1, 2, 4)  # of the bare Flight server; the best counts

PLAIN = ("bare np.take", "torch x[perm]", "torch index_select")

SOURCE_ORDER = "none: source order"
GLOBAL = "exact global"
READY = "exact global, permutation ready beforehand"

TARGETS = {
    "floats: local shuffled / torch x[perm]": 2.5,
    "floats: local shuffled / local sequential, each batch read": 0.6,
    "floats: local shuffled / bare np.take": 0.5,
    "floats: Flight shuffled / bare Flight stream": 0.55,
    "embeddings: Flight shuffled / bare Flight stream": 0.75,
    "floats: Flight shuffled / Flight sequential": 0.67,
    "floats: 33 named columns / 1 pre-stacked, local shuffled": 0.6,
    "floats: local shuffled / Hugging Face, streaming": 50.0,
    "floats: local shuffled / MosaicML Streaming": 30.0,
    "floats: local shuffled / LitData": 30.0,
    "floats: local shuffled / Grain": 30.0,
    "floats: local shuffled / Ray Data": 5.0,
    "floats: local shuffled / Lance": 5.0,
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
        contenders = cached(table, clusters, ranks, scale)
        if table.packed != table.paths:
            clients[1].load(DatasetSpec("packed", table.packed))
            stack.callback(clients[1].drop, "packed")
            contenders += stacked_or_not(table, clusters[1])
        if table.name != "lineitem":
            contenders += in_memory(table, scale)
            contenders += bare_flight(table, stack.enter_context(serve_bare_flight(table)))
        contenders.append(with_pyarrow(table))
        first, second, others = groups_of(contenders)
        timings = measure(first, repeats=scale.repeats)
        timings.update(measure(second, repeats=scale.repeats))
        timings.update(measure(others, repeats=scale.few_repeats))
        say(f"{table.name}: measured in this process")
        ratios.update(ratios_of(table, timings))
        ours = Reading(table, clusters[1].endpoint, shuffle=True, local=True)
        for peer in arguments.peers if table.peer_paths is not None else []:
            before = rates(ours)
            found = read_by_peer(peer, table, scale, arguments.peers_python, skipped)
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


def rates(ours: Reading) -> list[float]:
    """Rows per second of two passes."""
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


# -- this cache ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How to read once through this cache; travels to the processes of ranks.

    Attributes:
        local: from files of this machine, or over Flight.
        packed: the table whose numbers are stored in one list column.
        read: sum every tensor of every batch, as a consumer that looks at its data.
        max_rows: stop after so many.
    """

    table: Table
    endpoint: str
    shuffle: bool
    local: bool
    read: bool = False
    packed: bool = False
    stack: bool = True
    batch_format: BatchFormat = "torch"
    max_rows: int | None = None

    def run(self, rank: int = 0, world_size: int = 1) -> int:
        """Rows that came."""
        stacked = self.stack and not self.packed
        dataset = CacheIterableDataset(
            "packed" if self.packed else self.table.name,
            endpoint=self.endpoint,
            batch_size=BATCH_SIZE,
            shuffle=self.shuffle,
            rank=rank,
            world_size=world_size,
            stack=self.table.stack if stacked else None,
            batch_format=self.batch_format,
            local=self.local,
        )
        rows = 0
        for batch in dataset:
            if self.batch_format == "arrow":
                rows += batch.num_rows
                continue
            rows += len(next(iter(batch.values())))
            if self.read:
                for tensor in batch.values():
                    tensor.sum()
            if self.max_rows is not None and rows >= self.max_rows:
                return self.max_rows
        return rows


def cached(
    table: Table, clusters: Mapping[int, LocalCluster], ranks: Ranks, scale: Scale
) -> list[Contender]:
    """Local and over Flight, in source order and shuffled, one rank and two."""
    ways = {"local": (clusters[1].endpoint, True)}
    for nodes, cluster in clusters.items():
        name = f"Flight {nodes} node{'s' if nodes > 1 else ''}"
        ways[name] = (cluster.endpoint, False)
    as_arrow = table.name == "lineitem"
    contenders = []

    def add(name: str, run: Callable[[], int], order: str, rows: int = table.num_rows) -> None:
        contenders.append(Contender(name, run, rows, round(rows * table.row_bytes), order))

    for (way, (endpoint, local)), shuffle in itertools.product(ways.items(), (False, True)):
        reading = Reading(
            table, endpoint, shuffle, local, batch_format="arrow" if as_arrow else "torch"
        )
        order = GLOBAL if shuffle else SOURCE_ORDER
        plain = f"cache, {way}, {'shuffled' if shuffle else 'sequential'}"
        name = f"{plain}, as Arrow" if as_arrow else plain
        add(name, reading.run, order)
        add(f"{name}, {RANKS} ranks", partial(ranks.run, reading), order)
        if way == "local" and not as_arrow:
            add(f"{name}, read", replace(reading, read=True).run, order)
        if as_arrow and shuffle:
            rows = min(scale.slow_rows, table.num_rows)
            listed = replace(reading, batch_format="torch", max_rows=rows)
            add(f"{plain}, strings as lists", listed.run, order, rows)
    return contenders


def stacked_or_not(table: Table, cluster: LocalCluster) -> list[Contender]:
    """33 tensors a batch from 33 columns, against 2 from the same numbers stored as a list."""
    readings = {
        "33 named columns": Reading(table, cluster.endpoint, True, True, stack=False),
        "1 pre-stacked column": Reading(table, cluster.endpoint, True, True, packed=True),
    }
    return [
        Contender(
            f"cache, local, shuffled, {name}", reading.run, table.num_rows, table.num_bytes, GLOBAL
        )
        for name, reading in readings.items()
    ]


class Ranks:
    """Processes that each read one rank's part, started once."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def run(self, reading: Reading) -> int:
        """Rows of all ranks; returns when the last one is done."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((reading, rank, len(self._pipes)))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"a rank failed: {answer}")
        return sum(answers)


@contextmanager
def run_ranks() -> Iterator[Ranks]:
    """Two processes, ended afterwards."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(child_process(_be_a_rank)) for _ in range(RANKS)]
        yield Ranks(pipes)


def _be_a_rank(pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            reading, rank, world_size = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(reading.run(rank, world_size))
        except Exception as error:
            pipe.send(repr(error))


# -- what is plainly possible ----------------------------------------------------------------------


def in_memory(table: Table, scale: Scale) -> list[Contender]:
    """The whole table in this process, as one tensor or one matrix of packed rows."""
    columns = as_arrays(table)
    tensors = [torch.from_numpy(array) for array in columns]
    matrix = pack_rows(columns)
    rows = table.num_rows
    permutation = np.random.default_rng(0).permutation(rows)
    torch_permutation = torch.from_numpy(permutation)
    slow = min(scale.slow_rows, rows)

    def take() -> int:
        return sum(
            len(np.take(matrix, permutation[start : start + BATCH_SIZE], axis=0))
            for start in range(0, rows, BATCH_SIZE)
        )

    def index() -> int:
        seen = 0
        for start in range(0, rows, BATCH_SIZE):
            ids = torch_permutation[start : start + BATCH_SIZE]
            batch = [tensor[ids] for tensor in tensors]
            seen += len(batch[0])
        return seen

    def select() -> int:
        seen = 0
        for start in range(0, rows, BATCH_SIZE):
            ids = torch_permutation[start : start + BATCH_SIZE]
            batch = [tensor.index_select(0, ids) for tensor in tensors]
            seen += len(batch[0])
        return seen

    def drain(loader: Iterable[Sequence[torch.Tensor]]) -> int:
        return sum(len(batch[0]) for batch in loader)

    dataset = TensorDataset(*tensors)
    part = TensorDataset(*(tensor[:slow] for tensor in tensors))
    sampler = BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=False)

    def contender(name: str, run: Callable[[], int], count: int, order: str) -> Contender:
        return Contender(name, run, count, round(count * table.row_bytes), order)

    return [
        contender("bare np.take", take, rows, READY),
        contender("torch x[perm]", index, rows, READY),
        # The same rows, copied whole instead of number by number.
        contender("torch index_select", select, rows, READY),
        contender(
            "torch DataLoader(TensorDataset, shuffle=True)",
            lambda: drain(DataLoader(part, batch_size=BATCH_SIZE, shuffle=True)),
            slow,
            GLOBAL,
        ),
        # Faster, and little known: the dataset is asked for a whole batch at a time.
        contender(
            "torch DataLoader(TensorDataset, BatchSampler)",
            lambda: drain(DataLoader(dataset, batch_size=None, sampler=sampler)),
            rows,
            GLOBAL,
        ),
    ]


def as_arrays(table: Table) -> list[npt.NDArray[Any]]:
    """The columns of the packed table in memory, ``[N]`` or ``[N, n]``."""
    arrays = []
    for column in pq.read_table(table.packed).combine_chunks().columns:
        array = column.combine_chunks()
        if pa.types.is_fixed_size_list(array.type):
            array = array.flatten().to_numpy().reshape(-1, array.type.list_size)
        else:
            array = array.to_numpy()
        arrays.append(array.copy())
    return arrays


def pack_rows(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """``[N, row bytes / 4]``: all bytes of a row side by side."""
    words = [column.view(np.float32).reshape(len(column), -1) for column in columns]
    return np.concatenate(words, axis=1)


def with_pyarrow(table: Table) -> Contender:
    """Decoding the Parquet files in source order."""
    if table.name == "floats":
        return Contender(
            "pyarrow.dataset -> stacked tensors",
            lambda: read_with_pyarrow(table.paths),
            table.num_rows,
            table.num_bytes,
            SOURCE_ORDER,
        )

    def scan() -> int:
        # Scanned in batches of its own size, which is faster, and cut.
        return sum(
            part.slice(start, BATCH_SIZE).num_rows
            for part in pyarrow.dataset.dataset(table.paths).to_batches()
            for start in range(0, part.num_rows, BATCH_SIZE)
        )

    name = "pyarrow.dataset, record batches"
    return Contender(name, scan, table.num_rows, table.num_bytes, SOURCE_ORDER)


class _BareFlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Streams ready-made record batches of a table; the ticket says how many bytes each."""

    def __init__(self, table: pa.Table, row_bytes: float) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._table = table
        self._row_bytes = row_bytes

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """All rows; the streaming is Arrow's own, without Python."""
        rows = max(1, int(int(ticket.ticket) / self._row_bytes))
        batches = self._table.to_batches(max_chunksize=rows)
        return flight.RecordBatchStream(pa.Table.from_batches(batches))


def _serve_bare_flight(pipe: Connection, packed: str, row_bytes: float) -> None:
    table = pq.read_table(packed).combine_chunks()
    with _BareFlightServer(table, row_bytes) as server:
        pipe.send(server.port)
        try:
            pipe.recv()
        except EOFError:
            server.shutdown()


@contextmanager
def serve_bare_flight(table: Table) -> Iterator[str]:
    """The location of a server in a process of its own."""
    with child_process(_serve_bare_flight, str(table.packed), table.row_bytes) as pipe:
        yield f"grpc://127.0.0.1:{pipe.recv()}"


def bare_flight(table: Table, location: str) -> list[Contender]:
    """A contender for each message size."""

    def read(megabytes: int) -> int:
        ticket = flight.Ticket(str(megabytes * 1024 * 1024).encode())
        with flight.connect(location) as client:
            return sum(chunk.data.num_rows for chunk in client.do_get(ticket))

    return [
        Contender(
            f"bare Flight stream, messages of {megabytes} MB",
            partial(read, megabytes),
            table.num_rows,
            table.num_bytes,
            SOURCE_ORDER,
        )
        for megabytes in MESSAGE_MEGABYTES
    ]


# -- the other libraries ---------------------------------------------------------------------------


def read_by_peer(
    peer: str, table: Table, scale: Scale, python: Path, skipped: dict[str, str]
) -> list[Timing]:
    """What `peers/readers.py` says; a peer that does not run goes into ``skipped``."""
    assert table.peer_paths is not None and table.peer_packed is not None
    seconds = scale.peer_seconds[table.name]
    lines, why = run_reader(
        python,
        [
            "shuffle", "--peer", peer, "--table", table.name,
            "--paths", *files_of(table.peer_paths), "--packed", *files_of(table.peer_packed),
            "--seconds", str(seconds), "--repeats", str(scale.peer_repeats),
        ],
    )  # fmt: skip
    timings = []
    for line in lines:
        if "skipped" in line:
            skipped[f"{table.name}: {line['name']}"] = line["skipped"]
            continue
        timings.append(per_million_rows(line, table.row_bytes))
    if not lines:
        skipped[f"{table.name}: {peer}"] = why
    return timings


def say(what: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
