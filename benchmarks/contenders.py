"""The readers of `benchmarks.shuffle` in its environment: this cache and plain alternatives.

Each contender reads a table once, in batches of 1024 rows: through the cache, from memory, as a
stream of a bare Flight server, by pyarrow from Parquet. Knows nothing of turns, ratios and the
other libraries. `epochs_of` serves other benchmarks too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.flight as flight
import pyarrow.parquet as pq
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.common import Contender, pinned
from benchmarks.processes import child_process
from benchmarks.tables import Table
from benchmarks.throughput import read_with_pyarrow
from cache_client import CacheIterableDataset, CacheMixture, Connection
from cache_client.job.arguments import BatchFormat
from cache_server import LocalCluster

BATCH_SIZE = 1024
RANKS = 2
MESSAGE_MEGABYTES = (1, 2, 4)  # of the bare Flight server; the best counts

SOURCE_ORDER = "none: source order"
GLOBAL = "exact global"
READY = "exact global, permutation ready beforehand"


# -- this cache ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How to read through this cache; travels to the processes of ranks.

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


class Epochs:
    """One epoch after the other of one dataset, as a training loop reads them.

    The dataset is made once. Its first epoch maps the files and touches their pages, as long as it
    takes; `measure` does not count it, just as none of the others is timed while it makes its
    tensors, starts its workers or fills its buffer. `first_epoch` is.
    """

    def __init__(self, reading: Reading, rank: int = 0, world_size: int = 1) -> None:
        self._reading = reading
        stacked = reading.stack and not reading.packed
        self._dataset = CacheIterableDataset(
            "packed" if reading.packed else reading.table.name,
            cache=Connection(reading.endpoint, local=reading.local),
            batch_size=BATCH_SIZE,
            shuffle=reading.shuffle,
            rank=rank,
            world_size=world_size,
            stack=reading.table.stack if stacked else None,
            batch_format=reading.batch_format,
        )
        self._epoch = 0

    def run(self) -> int:
        """Reads the next epoch; rows that came."""
        self._dataset.set_epoch(self._epoch)
        self._epoch += 1
        reading, rows = self._reading, 0
        for batch in self._dataset:
            if reading.batch_format == "arrow":
                rows += batch.num_rows
                continue
            rows += len(next(iter(batch.values())))
            if reading.read:
                for tensor in batch.values():
                    tensor.sum()
            if reading.max_rows is not None and rows >= reading.max_rows:
                return reading.max_rows
        return rows


def epochs_of(dataset: CacheIterableDataset | CacheMixture) -> Callable[[], int]:
    """Reads the next epoch at each call; rows that came."""
    numbers = itertools.count()

    def run() -> int:
        dataset.set_epoch(next(numbers))
        return sum(len(batch["label"]) for batch in dataset)

    return run


def first_epoch(reading: Reading) -> int:
    """A dataset is made, its files are mapped and it is read once; rows that came."""
    return Epochs(reading).run()


def cached(table: Table, clusters: Mapping[int, LocalCluster], ranks: Ranks) -> list[Contender]:
    """Local and over Flight, in source order and shuffled, one rank and two, and first epochs.

    One rank over Flight runs on one core, and all of its nodes on another one.
    """
    ways = {"local": (clusters[1].endpoint, True)}
    on_last_core: dict[str, dict[int, int]] = {}
    for nodes, cluster in clusters.items():
        name = f"Flight {nodes} node{'s' if nodes > 1 else ''}"
        ways[name] = (cluster.endpoint, False)
        on_last_core[name] = {node.pid: -1 for node in cluster.nodes}
    as_arrow = table.name == "lineitem"
    contenders = []

    def add(name: str, run: Callable[[], int], order: str) -> None:
        contenders.append(Contender(name, run, table.num_rows, table.num_bytes, order))

    for (way, (endpoint, local)), shuffle in itertools.product(ways.items(), (False, True)):
        reading = Reading(
            table, endpoint, shuffle, local, batch_format="arrow" if as_arrow else "torch"
        )
        order = GLOBAL if shuffle else SOURCE_ORDER
        plain = f"cache, {way}, {'shuffled' if shuffle else 'sequential'}"
        name = f"{plain}, as Arrow" if as_arrow else plain
        run = Epochs(reading).run
        add(name, run if local else pinned(on_last_core[way], run), order)
        add(f"{name}, {RANKS} ranks", partial(ranks.run, reading), order)
        if shuffle:
            add(f"{name}, first epoch", partial(first_epoch, reading), order)
        if way == "local" and not as_arrow:
            add(f"{name}, read", Epochs(replace(reading, read=True)).run, order)
        if as_arrow and shuffle:
            listed = replace(reading, batch_format="torch")
            add(f"{plain}, strings as lists", Epochs(listed).run, order)
    return contenders


def stacked_or_not(table: Table, cluster: LocalCluster) -> list[Contender]:
    """33 tensors a batch from 33 columns, against 2 from the same numbers stored as a list."""
    readings = {
        "33 named columns": Reading(table, cluster.endpoint, True, True, stack=False),
        "1 pre-stacked column": Reading(table, cluster.endpoint, True, True, packed=True),
    }
    return [
        Contender(
            f"cache, local, shuffled, {name}",
            Epochs(reading).run,
            table.num_rows,
            table.num_bytes,
            GLOBAL,
        )
        for name, reading in readings.items()
    ]


class Ranks:
    """Processes that each read one rank's part, started once."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes

    def run(self, reading: Reading) -> int:
        """The next epoch; rows of all ranks. Returns when the last one is done."""
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


def _be_a_rank(pipe: Pipe) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    epochs: dict[str, Epochs] = {}
    while True:
        try:
            reading, rank, world_size = pipe.recv()
        except EOFError:
            return
        try:
            key = repr(reading)
            if key not in epochs:
                epochs[key] = Epochs(reading, rank, world_size)
            pipe.send(epochs[key].run())
        except Exception as error:
            pipe.send(repr(error))


# -- what is plainly possible ----------------------------------------------------------------------


def in_memory(table: Table, slow_rows: int) -> list[Contender]:
    """The whole table in this process, as one tensor or one matrix of packed rows.

    Args:
        slow_rows: read at most, where it goes row by row.
    """
    columns = as_arrays(table)
    tensors = [torch.from_numpy(array) for array in columns]
    matrix = pack_rows(columns)
    rows = table.num_rows
    permutation = np.random.default_rng(0).permutation(rows)
    torch_permutation = torch.from_numpy(permutation)
    slow = min(slow_rows, rows)

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
        # Scanned in the scanner's batch size, which is faster, then cut.
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


def _serve_bare_flight(pipe: Pipe, packed: str, row_bytes: float) -> None:
    table = pq.read_table(packed).combine_chunks()
    with _BareFlightServer(table, row_bytes) as server:
        pipe.send((server.port, os.getpid()))
        try:
            pipe.recv()
        except EOFError:
            server.shutdown()


@contextmanager
def serve_bare_flight(table: Table) -> Iterator[tuple[str, int]]:
    """The location of a server in a separate process, and the id of that."""
    with child_process(_serve_bare_flight, str(table.packed), table.row_bytes) as pipe:
        port, pid = pipe.recv()
        yield f"grpc://127.0.0.1:{port}", pid


def bare_flight(table: Table, location: str, server_pid: int) -> list[Contender]:
    """A contender for each message size; the server runs on another core."""
    client = flight.connect(location)

    def read(megabytes: int) -> int:
        ticket = flight.Ticket(str(megabytes * 1024 * 1024).encode())
        return sum(chunk.data.num_rows for chunk in client.do_get(ticket))

    return [
        Contender(
            f"bare Flight stream, messages of {megabytes} MB",
            pinned({server_pid: -1}, partial(read, megabytes)),
            table.num_rows,
            table.num_bytes,
            SOURCE_ORDER,
        )
        for megabytes in MESSAGE_MEGABYTES
    ]
