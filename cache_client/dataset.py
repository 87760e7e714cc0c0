"""`CacheIterableDataset`: the batches of one rank, in an exact and resumable order.

It joins the parts: the order chooses rows, the reader fetches them, the converter makes tensors. It
adds what torch needs: workers, epochs and states.
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

_MAX_MESSAGE_BYTES = 2**31 - 1  # Arrow's limit; `WindowSizes` asks for half of it at most
_MAX_PREFETCHED = 2**31 - 1
_LAST_EPOCH = 2**62  # an epoch has 64 bits, see `cache_client.cursor`


@dataclass(frozen=True)
class _Pass:
    """One pass of one worker over an epoch, or over the rest of it."""

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

        In a worker process, it is the position in the worker's own strided sequence of steps. The
        states of n workers then differ by up to n - 1 steps: see `WorkerState`.
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

    The batches, joined over (step, rank), are exactly the order of the epoch, for any number of
    ranks, workers, nodes and replicas. Every rank has the same number of steps.

    A batch is a dict from column to value. Numbers are tensors of shape ``[B]``, fixed-size lists
    ``[B, n]``. Strings are a list of ``str``. Lists of numbers are a list of 1-d tensors; a list
    with a null is a Python list. You may change batches in place. The batches of a window share
    memory, so copy a batch that you keep. The last step of an epoch may be short. If it has fewer
    rows than there are ranks, some ranks repeat a row of another: see `cache_client.order`.

    Args:
        dataset: name of a dataset in the cache.
        endpoint: ``grpc://HOST:PORT`` of any node; default: ``CACHE_ENDPOINT``, else the cache of
            this TrainJob.
        batch_size: rows of this rank in a full step.
        columns: to read, in this order; default: all.
        stack: new name -> columns; one ``[B, n]`` tensor replaces each group of columns.
        batch_format: ``torch``, ``numpy`` (dicts) or ``arrow`` (a RecordBatch). A DataLoader turns
            arrays into tensors, unless its ``collate_fn`` returns them unchanged.
        shuffle: a new permutation of all rows in every epoch.
        shuffle_block_size: permute blocks of so many consecutive rows, and rows inside windows of
            blocks, instead of all rows; for datasets on disk.
        seed: of the order; you must use the same on all ranks.
        drop_last: leave out a short last step.
        rank, world_size: default: `torch.distributed`, ``RANK``/``WORLD_SIZE``, else 0 of 1. A pass
            raises ConfigError if `torch.distributed` was initialised later and differs.
        transform: applied to every batch, in the process that yields it; with ``device``, in a
            background thread and before the copy.
        device: ``cuda``, ``cuda:<n>`` or ``cpu``: batches are copied there in the background, ahead
            of use, see `cache_client.device`. Not in DataLoader workers.
        message_bytes: target size of one message of a node, in whole batches. A window has 4 to 8
            messages, fewer if batches are large. The default was measured over loopback. Windows
            from files of this machine are larger.
        prefetch_batches: about how many to fetch ahead, at least three windows; default: 32, but at
            most 256 MiB.
        deadline_s: how long to wait for a cache that loads, or for nodes that do not answer.
        local: read shards of nodes on this machine from their files, without the node.

    Raises:
        ConfigError: quotes every bad argument.
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
            integer_or_problem(problems, "prefetch_batches", prefetch_batches, 1, _MAX_PREFETCHED)
        integer_or_problem(problems, "message_bytes", message_bytes, 1, _MAX_MESSAGE_BYTES)
        target = checked(problems, lambda: find_device(device))
        if device is not None and batch_format != "torch":
            problems.append(f"device needs batch_format='torch', got {batch_format!r}")
        given = {"rank": rank, "world_size": world_size}
        numbers = [
            None if n is None else integer_or_problem(problems, k, n) for k, n in given.items()
        ]
        has_bad_number = numbers.count(None) > list(given.values()).count(None)
        this_rank = (
            None if has_bad_number else checked(problems, lambda: find_rank(numbers[0], numbers[1]))
        )
        found_endpoint = checked(problems, lambda: find_endpoint(endpoint))
        checked(problems, lambda: StepPlan(0, 1, batch_size, drop_last=drop_last), ValueError)
        checked(
            problems,
            lambda: EpochOrder(
                0, shuffle=shuffle, shuffle_block_size=shuffle_block_size, seed=seed
            ),
            ValueError,
        )
        if problems or this_rank is None or found_endpoint is None:
            raise ConfigError("; ".join(problems))
        self.name = dataset
        self.endpoint = found_endpoint
        self.batch_size = operator.index(batch_size)
        self.rank, self.world_size = this_rank.rank, this_rank.world_size
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
        # Each with the id of the process that it belongs to.
        self._process_shards: tuple[int, LocalShards] | None = None
        self._process_health: tuple[int, NodeHealth] | None = None
        self._shards = wait_for_plan(found_endpoint, dataset, self._columns, self._deadline_s)
        self._converter_arguments = (stack, batch_format)
        Converter(self._shards.layout, stack, batch_format)  # raises for bad arguments
        self._sizes = WindowSizes(
            self._shards,
            self.batch_size,
            operator.index(message_bytes),
            None if prefetch_batches is None else operator.index(prefetch_batches),
        )
        self._cursor = Cursor()
        self._start = (0, 0)  # epoch and rows consumed, until a pass starts
        self._pass: _Pass | None = None
        self._batches_done = 0  # of the pass
        self._worker_start: tuple[int, tuple[int, int]] | None = None

    # -- properties ----------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version."""
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

        A loaded state does not change it, because training frameworks use it as the length of every
        epoch. For a pass that resumes inside an epoch, see `steps_left`.
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
        """Makes the next pass read ``epoch``; also reaches persistent DataLoader workers.

        If ``epoch`` is already the next one, nothing changes: a loaded state stays.

        Raises:
            ConfigError: quotes an epoch that is no integer in [0, 2**62].
        """
        try:
            epoch = checked_integer("epoch", epoch, 0, _LAST_EPOCH)
        except ValueError:
            raise ConfigError(f"epoch must be an integer in [0, 2**62], got {epoch!r}") from None
        if epoch != self._cursor.epoch:
            self._cursor.set(epoch, 0)
        if epoch != self._position[0]:
            self._set_position(epoch, 0)

    def state_dict(self, *, steps: int | None = None) -> dict[str, Any]:
        """The position of this job, in constant size.

        Any world size, batch size and number of workers can resume it. In a worker process, where
        `torchdata.stateful_dataloader` calls this, it is the position of that worker. To resume
        that, you need the same number of workers, and the same world size times batch size.

        Args:
            steps: batches taken in this pass. You must pass it if DataLoader workers read, because
                torch does not tell the dataset which prefetched batches were taken.

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
                "pass steps=<batches taken in this pass> to state_dict, or use torchdata's "
                "StatefulDataLoader: torch does not tell the dataset how many batches of its "
                "DataLoader workers were taken"
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
        """Makes the next pass start at the position of a state. Takes constant time.

        It holds for one pass. A second pass of DataLoader workers over that epoch raises
        ConfigError if torch had the same seed before both passes: nothing else tells them apart.

        Raises:
            ConfigError: it is no state, or of another order (seed, shuffle), or of a worker among
                another number of workers or with another size of steps.
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
                    f"{name}={getattr(self, name)!r}: the order would differ"
                )
        if state.rows_consumed > self.num_rows:
            raise ConfigError(
                f"bad state: rows_consumed={state.rows_consumed} of {self.num_rows} rows"
            )
        if isinstance(state, WorkerState):
            self._check_workers(state)
        self._set_position(state.epoch, state.rows_consumed)
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
                f"world_size * batch_size = {rows_per_step}: rows would be lost and repeated. To "
                "change them, save dataset.state_dict(steps=<batches taken in this epoch>) in the "
                "training process"
            )

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank; in a DataLoader worker, every n-th of them.

        The pass starts here, not at its first batch, because `StatefulDataLoader` may ask for its
        state in between. No connection is opened before the first batch.
        """
        return self._iterate(self._start_pass(), self._cursor.generation)

    def _iterate(self, this: _Pass, generation: int) -> Generator[Any, None, None]:
        if generation != self._cursor.generation and not this.in_worker:
            # Another epoch or state was set before the first batch.
            this = self._start_pass()
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
                # Counted here: batches that are made ahead are not consumed.
                for done, batch in enumerate(batches, 1):
                    self._pass, self._batches_done = this, done
                    yield batch
                    if os.getpid() != process:
                        raise CacheError(
                            f"this iterator was created in process {process}, whose threads fetch "
                            f"its rows; create a new iterator in its child {os.getpid()}"
                        )
                    reader.keep_lease()

    def _batches(self, this: _Pass, reader: Reader) -> Generator[Any, None, None]:
        """The batches of a pass; does not change this dataset, and may run in any thread."""
        convert = Converter(self._shards.layout, *self._converter_arguments)
        steps = this.steps
        per_window = self._sizes.steps_per_window(reader.num_nodes)
        results = fetch_ahead(
            lambda window: _fetch_window(reader, this, self.rank, window),
            step_windows(steps, per_window),
            depth=self._sizes.windows_ahead(per_window),
            threads=FETCH_THREADS,
        )
        with closing(results):  # even if an error of the transform keeps this frame alive
            for pieces, sizes in results:
                for rows in cut(pieces, sizes):
                    batch = convert(rows)
                    yield batch if self._transform is None else self._transform(batch)

    def _start_pass(self) -> _Pass:
        worker = get_worker_info()
        if worker is not None and self._device is not None:
            raise ConfigError(
                f"device='{self._device}' cannot be used in DataLoader workers, whose batches go "
                "to the training process through host memory: use num_workers=0, or no device"
            )
        self._check_rank()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # The workers of one pass share torch's base seed; without workers, the token is random.
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
        """Raises ConfigError if `torch.distributed` was initialised later with another rank."""
        now = None if self._rank_is_given else find_initialised_rank()
        if now is not None and now != Rank(self.rank, self.world_size):
            raise ConfigError(
                f"the dataset reads as rank {self.rank} of {self.world_size}, but "
                f"torch.distributed, initialised later, says rank {now.rank} of {now.world_size}: "
                "create the dataset after that, or pass rank and world_size"
            )

    @property
    def _position(self) -> tuple[int, int]:
        """Epoch and rows consumed, for `state_dict`."""
        if self._pass is None:
            return self._start
        return self._pass.position_after(self._batches_done)

    def _set_position(self, epoch: int, rows_consumed: int) -> None:
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
        """The mapped files, shared by the passes of a process: first reads of a map are slow."""
        if not self._local:
            return None
        if self._process_shards is None or self._process_shards[0] != os.getpid():
            self._process_shards = (os.getpid(), LocalShards(self._shards, self._columns))
        return self._process_shards[1]

    def _node_health(self) -> NodeHealth:
        """The health of nodes, shared by the passes of a process."""
        if self._process_health is None or self._process_health[0] != os.getpid():
            newest = (
                self._shards if self._process_health is None else self._process_health[1].shards
            )
            self._process_health = (os.getpid(), NodeHealth(newest))
        return self._process_health[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process_shards": None, "_process_health": None}

    def __copy__(self) -> Self:
        """An independent dataset with the same position; only copies in workers share it."""
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
