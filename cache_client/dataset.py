"""`CacheIterableDataset`: each rank's batches of a cached table, in an order it can trust.

It puts the parts together: the order says which rows, the reader brings them, the converter makes
tensors. What it adds is the bookkeeping of torch: workers, epochs, states.
"""

from __future__ import annotations

import copy
import operator
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, get_worker_info

from cache_client.arguments import BatchFormat, argument_problems, integer_or_problem
from cache_client.convert import Converter
from cache_client.cursor import Cursor
from cache_client.device import find_device, on_device
from cache_client.fetch_ahead import FETCH_THREADS, fetch_ahead
from cache_client.local_shards import LocalShards
from cache_client.node_health import NodeHealth
from cache_client.order import (
    EpochOrder,
    OrderState,
    StepPlan,
    WorkerState,
    next_cursor,
    read_state,
    step_windows,
    worker_steps,
)
from cache_client.permutation import checked_integer
from cache_client.plan import wait_for_plan
from cache_client.ranks import Rank, find_endpoint, find_initialised_rank, find_rank
from cache_client.reader import Reader
from cache_client.rows import Rows, cut
from cache_client.window_sizes import MESSAGE_BYTES, WindowSizes
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    NodeUnavailableError,
    StaleVersionError,
    checked,
)

_MOST_MESSAGE_BYTES = 2**31 - 1  # of Arrow's own; what is asked for is half of it at most
_MOST_PREFETCHED = 2**31 - 1
_LAST_EPOCH = 2**62  # epochs lie in 64 bits, see `cache_client.cursor`


@dataclass(frozen=True)
class _Pass:
    """One pass of one worker over (the rest of) an epoch."""

    epoch: int
    plan: StepPlan
    order: EpochOrder
    worker: int
    num_workers: int
    in_worker: bool

    @property
    def steps(self) -> range:
        return worker_steps(self.plan.num_steps, self.worker, self.num_workers)

    def position_after(self, batches: int) -> tuple[int, int]:
        """Epoch and rows consumed after so many batches.

        In a worker process: where the worker's own strided sequence of steps goes on. The states
        of n workers then differ by up to n - 1 steps, and each resumes its own: see `WorkerState`.
        """
        plan = self.plan
        if not self.in_worker:
            if batches == 0 and plan.num_steps:
                return self.epoch, plan.rows_consumed
            return next_cursor(plan, self.epoch, batches)
        consumed = plan.rows_consumed + batches * self.num_workers * plan.rows_per_step
        if batches == len(self.steps):
            consumed = plan.num_rows
        return self.epoch, min(consumed, plan.num_rows)


class CacheIterableDataset(IterableDataset[Any]):
    """Ready batches of one rank; use ``DataLoader(dataset, batch_size=None, num_workers=n)``.

    Concatenating the batches over (step, rank) gives the epoch's order exactly, whatever the
    number of ranks, workers, nodes and replicas; every rank has the same number of steps.

    A batch is a dict from column to value: numbers are tensors of shape ``[B]``, fixed-size lists
    ``[B, n]``, strings a list of ``str``, lists of numbers a list of 1-d tensors (a Python list
    where one holds a null). They may be changed in place. The batches of a window share memory: one
    that is kept keeps the others, so copy what is to stay. The last step of an epoch may be short;
    where it has fewer rows than there are ranks, some ranks take a row that another has, too: see
    `cache_client.order`.

    Args:
        dataset: name of a dataset in the cache.
        endpoint: ``grpc://HOST:PORT`` of any node; default: ``CACHE_ENDPOINT``, else that of the
            TrainJob this runs in.
        batch_size: rows of this rank in a full step.
        columns: to read, in this order; default: all.
        stack: new name -> columns; each becomes one ``[B, n]`` tensor in their place.
        batch_format: ``torch``, ``numpy`` (dicts) or ``arrow`` (a RecordBatch). A DataLoader makes
            tensors of arrays, unless its ``collate_fn`` returns what it is given.
        shuffle: a new permutation of all rows in every epoch.
        shuffle_block_size: permute blocks of so many consecutive rows, and rows inside windows of
            blocks, instead of all rows; for datasets on disk.
        seed: of the order; all ranks must use the same.
        drop_last: leave out a short last step.
        rank, world_size: default: `torch.distributed`, ``RANK``/``WORLD_SIZE``, else 0 of 1. A pass
            raises ConfigError where `torch.distributed` was initialised since and says otherwise.
        transform: applied to every batch, in the process that yields it; with ``device``, in a
            background thread and before the copy.
        device: ``cuda``, ``cuda:<n>`` or ``cpu``: batches are copied there in the background, ahead
            of use, see `cache_client.device`. Not in DataLoader workers.
        message_bytes: of one message of a node, about, in whole batches; 4 to 8 are asked for at
            once, fewer where batches are large. The default was measured over loopback. From files
            of this machine, windows are larger.
        prefetch_batches: fetched ahead in the background, about, but never less than three requests
            to all nodes; default: 32, fewer where they would take more than 256 MiB.
        deadline_s: how long to wait for a cache that is loading, or nodes that do not answer.
        local: read shards of nodes on this machine from their files, without the node.

    Raises:
        ConfigError: quoting every bad argument.
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
        NotReadyError, NodeUnavailableError: still loading, or no answer, at the deadline.

    Thread-safety: iterate, and change epoch and state, from one thread at a time.
    """

    def __init__(
        self,
        dataset: str,
        *,
        endpoint: str | None = None,
        batch_size: int,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        batch_format: BatchFormat = "torch",
        shuffle: bool = False,
        shuffle_block_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        message_bytes: int = MESSAGE_BYTES,
        prefetch_batches: int | None = None,
        deadline_s: float = 60.0,
        local: bool = True,
    ) -> None:
        super().__init__()
        problems = argument_problems(
            dataset, columns, stack, deadline_s,
            batch_format=batch_format, transform=transform, local=local,
        )  # fmt: skip
        if prefetch_batches is not None:
            integer_or_problem(problems, "prefetch_batches", prefetch_batches, 1, _MOST_PREFETCHED)
        integer_or_problem(problems, "message_bytes", message_bytes, 1, _MOST_MESSAGE_BYTES)
        target = checked(problems, lambda: find_device(device))
        if device is not None and batch_format != "torch":
            problems.append(f"device needs batch_format='torch', got {batch_format!r}")
        given = {"rank": rank, "world_size": world_size}
        ranks = [
            None if n is None else integer_or_problem(problems, k, n) for k, n in given.items()
        ]
        refused = ranks.count(None) > list(given.values()).count(None)
        who = None if refused else checked(problems, lambda: find_rank(ranks[0], ranks[1]))
        where = checked(problems, lambda: find_endpoint(endpoint))
        checked(problems, lambda: StepPlan(0, 1, batch_size, drop_last=drop_last), ValueError)
        checked(
            problems,
            lambda: EpochOrder(
                0, shuffle=shuffle, shuffle_block_size=shuffle_block_size, seed=seed
            ),
            ValueError,
        )
        if problems or who is None or where is None:
            raise ConfigError("; ".join(problems))
        self.name = dataset
        self.endpoint = where
        self.batch_size = operator.index(batch_size)
        self.rank, self.world_size = who.rank, who.world_size
        self._rank_is_given = rank is not None
        self.shuffle = shuffle
        self.shuffle_block_size = (
            None if shuffle_block_size is None else operator.index(shuffle_block_size)
        )
        self.seed = operator.index(seed)
        self.drop_last = drop_last
        self._columns = () if columns is None else tuple(columns)
        self._transform = transform
        self._device = target
        self._deadline_s = float(deadline_s)
        self._local = local
        self._mapped: tuple[int, LocalShards] | None = None  # with the process they are of
        self._health: tuple[int, NodeHealth] | None = None  # likewise
        self._shards = wait_for_plan(where, dataset, self._columns, self._deadline_s)
        self._converter_arguments = (stack, batch_format)
        Converter(self._shards.layout, stack, batch_format)  # refuses bad arguments here
        self._sizes = WindowSizes(
            self._shards,
            self.batch_size,
            operator.index(message_bytes),
            None if prefetch_batches is None else operator.index(prefetch_batches),
        )
        self._cursor = Cursor()
        self._start = (0, 0)  # epoch and rows consumed where no pass has begun since
        self._pass: _Pass | None = None
        self._batches_done = 0  # of the pass
        self._worker_start: tuple[int, tuple[int, int]] | None = None

    # -- what it is ----------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Of the version that is read."""
        return self._shards.fingerprint

    @property
    def num_rows(self) -> int:
        """Rows of the whole dataset, all ranks together."""
        return self._shards.num_rows

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return self._cursor.epoch

    def __len__(self) -> int:
        """Steps of a whole epoch, the same for every rank.

        A loaded state does not change it: training frameworks take it as the length of every
        epoch. A pass that goes on in the middle of one has `steps_left`.
        """
        return self._plan(0).num_steps

    @property
    def steps_left(self) -> int:
        """Steps of the next pass, the same for every rank: fewer after a state was loaded."""
        return self._plan(self._cursor.next_offset).num_steps

    def __repr__(self) -> str:
        parts = {
            "fingerprint": self.fingerprint,
            "num_rows": self.num_rows,
            "columns": self._shards.logical.names,
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        rest = ", ".join(f"{name}={value!r}" for name, value in parts.items())
        return f"{type(self).__name__}({self.name!r}, {rest})"

    # -- epochs and states ---------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass one over ``epoch``; reaches DataLoader workers that live on.

        Setting the epoch that is set already changes nothing: a loaded state stays.

        Raises:
            ConfigError: quoting an epoch that is no integer in [0, 2**62].
        """
        try:
            epoch = checked_integer("epoch", epoch, 0, _LAST_EPOCH)
        except ValueError:
            raise ConfigError(f"epoch must be an integer in [0, 2**62], got {epoch!r}") from None
        if epoch != self._cursor.epoch:
            self._cursor.set(epoch, 0)
        if epoch != self._position[0]:
            self._stand_at(epoch, 0)

    def state_dict(self, *, steps: int | None = None) -> dict[str, Any]:
        """Where this job stands: constant size; any world size, batch size and workers resume it.

        In a worker process, where `torchdata.stateful_dataloader` asks for it and needs no help,
        it is where that worker stands. Only as many workers resume that, with the same world size
        times batch size; others are refused.

        Args:
            steps: batches taken in this pass. Needed where DataLoader workers read: torch does not
                tell the dataset which of the prefetched batches the training loop has taken.

        Raises:
            ConfigError: ``steps`` is needed, or out of range.
        """
        if steps is not None:
            plan = self._plan(self._cursor.offset)
            try:
                steps = checked_integer("steps", steps, 0, plan.num_steps)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            epoch, consumed = self._cursor.epoch, plan.rows_consumed
            if steps or not plan.num_steps:
                epoch, consumed = next_cursor(plan, epoch, steps)
        elif get_worker_info() is None and self._cursor.read_by_workers:
            raise ConfigError(
                "state_dict needs steps=<batches taken in this pass>: the dataset is read by "
                "DataLoader workers, and torch does not tell it how many of their batches were "
                "taken; or use torchdata's StatefulDataLoader"
            )
        else:
            epoch, consumed = self._position
        state = OrderState(
            dataset=self._shards.dataset,
            fingerprint=self._shards.fingerprint,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            shuffle_block_size=self.shuffle_block_size,
            rows_consumed=consumed,
        ).to_dict()
        worker = get_worker_info()
        if worker is None or steps is not None:
            return state
        return WorkerState(
            **state, rows_per_step=self._plan(0).rows_per_step, num_workers=worker.num_workers
        ).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass begin where ``state_dict`` stands. Takes constant time.

        It holds for one pass. A second pass of DataLoader workers over that epoch raises
        ConfigError where torch was seeded as before the first: nothing else tells them apart.

        Raises:
            ConfigError: it is no state, one of another order (seed, shuffle), or a worker's of
                another number of workers or another size of steps.
            StaleVersionError: it is of another dataset or fingerprint; names both.
        """
        try:
            state = read_state(state_dict)
        except ValueError as error:
            raise ConfigError(f"bad state: {error}") from None
        if (state.dataset, state.fingerprint) != (self._shards.dataset, self.fingerprint):
            raise StaleVersionError(
                f"the state is of dataset {state.dataset!r} with fingerprint {state.fingerprint}, "
                f"this is {self._shards.dataset!r} with fingerprint {self.fingerprint}"
            )
        for name in ("seed", "shuffle", "shuffle_block_size"):
            if getattr(state, name) != getattr(self, name):
                raise ConfigError(
                    f"the state has {name}={getattr(state, name)!r}, the dataset "
                    f"{name}={getattr(self, name)!r}: the order would be another"
                )
        if state.rows_consumed > self.num_rows:
            raise ConfigError(
                f"bad state: rows_consumed={state.rows_consumed} of {self.num_rows} rows"
            )
        if isinstance(state, WorkerState):
            self._check_workers(state)
        self._stand_at(state.epoch, state.rows_consumed)
        if get_worker_info() is None:
            self._cursor.set(state.epoch, state.rows_consumed)
        else:
            self._worker_start = (self._cursor.generation, self._position)

    def _check_workers(self, state: WorkerState) -> None:
        worker = get_worker_info()
        workers = 0 if worker is None else worker.num_workers
        rows_per_step = self._plan(0).rows_per_step
        if (state.num_workers, state.rows_per_step) != (workers, rows_per_step):
            raise ConfigError(
                f"the state is of one of num_workers={state.num_workers} DataLoader workers, with "
                f"world_size * batch_size = {state.rows_per_step}; here num_workers={workers} and "
                f"world_size * batch_size = {rows_per_step}: rows would be lost and repeated; to "
                "go on with others, save dataset.state_dict(steps=<batches taken in this epoch>) "
                "of the training process"
            )

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank; in a DataLoader worker, every n-th of them.

        The pass begins here, not at its first batch: whoever asks for a state in between, as
        `StatefulDataLoader` does, is told where this pass stands. Nothing is opened before that.
        """
        return self._handed_out(self._begin_pass(), self._cursor.generation)

    def _handed_out(self, this: _Pass, generation: int) -> Generator[Any, None, None]:
        if generation != self._cursor.generation and not this.in_worker:
            # Told of another epoch or state since: nothing was given yet.
            this = self._begin_pass()
        process = os.getpid()
        with Reader(
            self.endpoint,
            self._shards,
            columns=self._columns,
            replica_offset=self.rank,
            rows_per_message=self._sizes.rows_per_message(),
            deadline_s=self._deadline_s,
            local=self._local_shards(),
            health=self._node_health(),
        ) as reader:
            batches = self._batches(this, reader)
            if self._device is not None:
                batches = on_device(batches, self._device, interrupt=reader.close)
            with closing(batches):
                # Counted where they are handed out: what is made ahead is not consumed.
                for done, batch in enumerate(batches, 1):
                    self._pass, self._batches_done = this, done
                    yield batch
                    if os.getpid() != process:
                        raise CacheError(
                            f"this iterator was begun in process {process}, whose threads fetch "
                            f"its rows, and cannot go on in its child {os.getpid()}: begin one here"
                        )
                    reader.keep_lease()

    def _batches(self, this: _Pass, reader: Reader) -> Generator[Any, None, None]:
        """The batches of a pass; changes nothing of this dataset, and may run in any thread."""
        convert = Converter(self._shards.layout, *self._converter_arguments)
        steps = this.steps
        per_window = self._sizes.steps_per_window(reader.num_nodes)
        results = fetch_ahead(
            lambda window: _fetch_window(reader, this, self.rank, window),
            step_windows(steps, per_window),
            depth=self._sizes.windows_ahead(per_window),
            threads=FETCH_THREADS,
        )
        with closing(results):  # also where an error of the transform is kept, and this with it
            for pieces, sizes in results:
                for rows in cut(pieces, sizes):
                    batch = convert(rows)
                    yield batch if self._transform is None else self._transform(batch)

    def _begin_pass(self) -> _Pass:
        worker = get_worker_info()
        if worker is not None and self._device is not None:
            raise ConfigError(
                f"device='{self._device}' cannot be used in DataLoader workers, whose batches "
                "reach the training process through host memory: use num_workers=0, or no device"
            )
        self._check_rank()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # The workers of one pass share torch's base seed; a pass without workers is one of a kind.
        token = secrets.randbits(62) + 1 if worker is None else worker.seed - worker.id + 1
        start = self._worker_start
        epoch, offset = self._cursor.begin(token, worker=None if worker is None else worker.id)
        if start is not None and start[0] == self._cursor.generation:
            epoch, offset = start[1]
        self._worker_start = None
        order = EpochOrder(
            self.num_rows,
            shuffle=self.shuffle,
            shuffle_block_size=self.shuffle_block_size,
            seed=self.seed,
            epoch=epoch,
        )
        this = _Pass(epoch, self._plan(offset), order, number, count, worker is not None)
        self._pass, self._batches_done = this, 0
        return this

    def _check_rank(self) -> None:
        """Raises ConfigError where the rank was found before `torch.distributed` had another."""
        now = None if self._rank_is_given else find_initialised_rank()
        if now is not None and now != Rank(self.rank, self.world_size):
            raise ConfigError(
                f"the dataset reads as rank {self.rank} of {self.world_size}, but "
                f"torch.distributed, initialised later, says rank {now.rank} of {now.world_size}: "
                "make the dataset after that, or pass rank and world_size"
            )

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch and rows consumed, as `state_dict` tells; worked out when asked for."""
        if self._pass is None:
            return self._start
        return self._pass.position_after(self._batches_done)

    def _stand_at(self, epoch: int, rows_consumed: int) -> None:
        self._start, self._pass = (epoch, rows_consumed), None

    def _plan(self, offset: int) -> StepPlan:
        return StepPlan(
            self.num_rows,
            self.world_size,
            self.batch_size,
            drop_last=self.drop_last,
            rows_consumed=offset,
        )

    def _local_shards(self) -> LocalShards | None:
        """Mapped once in each process: touching the pages of a new map costs time."""
        if not self._local:
            return None
        if self._mapped is None or self._mapped[0] != os.getpid():
            self._mapped = (os.getpid(), LocalShards(self._shards, self._columns))
        return self._mapped[1]

    def _node_health(self) -> NodeHealth:
        """Kept over passes in each process: none waits again for a node that is gone."""
        if self._health is None or self._health[0] != os.getpid():
            newest = self._shards if self._health is None else self._health[1].shards
            self._health = (os.getpid(), NodeHealth(newest))
        return self._health[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None, "_health": None}

    def __copy__(self) -> Self:
        """Stands where this one does and goes on by itself, as any copy but that in a worker."""
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(self.__getstate__(), _cursor=copy.deepcopy(self._cursor))
        return duplicate


def _fetch_window(
    reader: Reader, this: _Pass, rank: int, window: range
) -> tuple[list[Rows], list[int]]:
    """The rows of a run of steps, and how many each step has.

    Raises:
        NodeUnavailableError: naming the first step. Others as `Reader.fetch`.
    """
    positions, sizes = this.plan.window(window, rank)
    try:
        return reader.fetch(this.order.row_ids(positions)), sizes
    except NodeUnavailableError as error:
        raise NodeUnavailableError(f"step {window.start}: {error}") from None
