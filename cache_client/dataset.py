"""`CacheIterableDataset`: the batches of one rank, in an exact and resumable order.

It joins the parts: the order chooses rows, the reader fetches them, the converter makes tensors. It
adds what torch needs: workers, epochs and states.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import os
import secrets
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from cache_client.arguments import BatchFormat, argument_problems, integer_or_problem
from cache_client.audit import AUDIT_MODES, AuditMode, Words, step_digests
from cache_client.callers import refuse_callers, refuse_random_split
from cache_client.convert import Converter, with_mask
from cache_client.counts import SharedCounts
from cache_client.cursor import Cursor, Start
from cache_client.device import find_device, on_device
from cache_client.fetch_ahead import FETCH_THREADS, fetch_ahead
from cache_client.loader import CacheLoader, make_loader
from cache_client.loader_iterators import batches_taken_ahead
from cache_client.local_shards import LocalShards
from cache_client.node_health import NodeHealth
from cache_client.observer import Observer, SharedDigests
from cache_client.order import (
    EpochOrder,
    OrderState,
    StepPlan,
    WorkerState,
    runs_of_steps,
    step_windows,
)
from cache_client.parallel_groups import (
    rank_in_group,
    rank_in_mesh,
    warn_of_model_parallelism,
)
from cache_client.pass_checks import check_pass, checked_state
from cache_client.passes import Pass, Passes
from cache_client.permutation import checked_integer
from cache_client.plan import wait_for_plan
from cache_client.ranks import (
    Rank,
    find_credentials,
    find_endpoint,
    find_initialised_rank,
    find_job,
    find_rank,
    find_ready_deadline_s,
)
from cache_client.reader import Reader
from cache_client.reports import ReaderIdentity, Reporter
from cache_client.rows import Rows, cut
from cache_client.stats import ReadStats
from cache_client.views.columns import VersionNodes
from cache_client.views.options import (
    Assemble,
    JobView,
    ViewOptions,
    make_view,
    read_columns,
    view_problems,
)
from cache_client.views.view import Samples, Shuffle, View
from cache_client.window_sizes import MESSAGE_BYTES, WindowSizes
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    NodeUnavailableError,
    checked,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MAX_MESSAGE_BYTES = 2**31 - 1  # of Arrow's own; what is asked for is half of it at most
_MAX_PREFETCHED = 2**31 - 1
_LAST_EPOCH = 2**62  # epochs lie in 64 bits, see `cache_client.cursor`


class CacheIterableDataset(IterableDataset[Any]):
    """Ready batches of one rank; iterate ``dataset.loader(num_workers=n)``, or the dataset.

    The batches, joined over (step, rank), are exactly the order of the epoch, for any number of
    ranks, workers, nodes and replicas. Every rank has the same number of steps.

    A batch is a dict from column to value: numbers are tensors of shape ``[B]``, fixed-size lists
    ``[B, n]``, strings a list of ``str``, lists of numbers a list of 1-d tensors (a Python list
    where one holds a null). bools are ``torch.bool``. They may be changed in place. A
    single column is contiguous. Stacks and fixed-size lists share the memory of a window: one that
    you keep keeps the others, so copy what is to stay. The last step of an epoch may be short;
    where it has fewer rows than there are ranks, some ranks take a row that another has, too: see
    `cache_client.order`.

    Args:
        dataset: name of a dataset in the cache.
        endpoint: ``grpc://HOST:PORT`` of any node; default: ``CACHE_ENDPOINT``, else the cache of
            this TrainJob.
        batch_size: rows of this rank in a full step.
        columns: to read, in this order; default: all.
        stack: new name -> columns; each becomes one ``[B, n]`` tensor in their place.
        stack_dtype: of every stack; default: the smallest that holds its columns, as in numpy.
        batch_format: ``torch``, ``numpy`` (dicts) or ``arrow`` (a RecordBatch). A DataLoader makes
            tensors of arrays, unless its ``collate_fn`` returns what it is given.
        shuffle: a new permutation of all rows in every epoch.
        shuffle_block_size: permute blocks of so many consecutive rows, and rows inside windows of
            blocks, instead of all rows; for datasets on disk.
        seed: of the order; you must use the same on all ranks.
        drop_last: leave out a short last step.
        pad_mask: repeat rows so that every batch of every rank has ``batch_size`` rows, and add a
            boolean column of this name, False for the repeated ones.
        rank, world_size: default: `torch.distributed`, JAX, ``RANK``/``WORLD_SIZE`` or the
            variables of another launcher, else 0 of 1. A pass raises ConfigError where
            `torch.distributed` or JAX was initialised since and says otherwise.
        device_mesh: a `DeviceMesh`; the rows are divided over its data parallel dimensions only, so
            that ranks of one tensor, pipeline or context parallel group read the same rows.
        process_group: the data parallel group, instead of a mesh.
        transform: applied to every batch, in the process that yields it; with ``device``, in a
            background thread and before the copy.
        device: ``cuda``, ``cuda:<n>`` or ``cpu``: batches are copied there in the background, ahead
            of use, see `cache_client.device`. Not in DataLoader workers.
        message_bytes: target size of one message of a node, in whole batches. A window has 4 to 8
            messages, fewer if batches are large. The default was measured over loopback. Windows
            from files of this machine are larger.
        prefetch_batches: about how many to fetch ahead, at least three windows; default: 32, but at
            most 256 MiB.
        deadline_s: how long to wait for a cache that loads, or for nodes that do not answer. For
            the load, ``CACHE_READY_DEADLINE_S`` of the environment may give more.
        local: read shards of nodes on this machine from their files, without the node.
        copy: give each single column contiguous memory that keeps no other rows; False: columns
            are strided views of the rows of a window, which costs less where they are many.
        job: name under which the cache shows this reader; default: ``CACHE_JOB``, the name of the
            TrainJob, torchrun's run id or Slurm's job number.
        audit: whether a digest is kept of the rows that this rank was given, for `cachectl audit`.
            ``reports``: the cache has it. ``states``: `state_dict` has it, too; then the states of
            the ranks differ, and an audit needs all of them. It costs 1 to 2 ns of CPU time a row.
        skip_steps: epoch -> steps to leave out, as after a spike of the loss. Steps count from the
            begin of the epoch, with this batch size and world size, as if none was left out. States
            keep the rows that they name.
        token, token_file: show the cache who you are; default: ``CACHE_TOKEN`` or
            ``CACHE_TOKEN_FILE``. The file is read again when it changes. A pickle of the
            dataset has the token.
        tls_ca: file of the certificates that sign those of the nodes; default: ``CACHE_TLS_CA``.
        view: what to read other than each row once, see `ViewOptions`.

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
        stack_dtype: torch.dtype | str | None = None,
        batch_format: BatchFormat = "torch",
        shuffle: bool = False,
        shuffle_block_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pad_mask: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        message_bytes: int = MESSAGE_BYTES,
        prefetch_batches: int | None = None,
        deadline_s: float = 60.0,
        local: bool = True,
        copy: bool = True,
        job: str | None = None,
        audit: AuditMode = "off",
        skip_steps: Mapping[int, Iterable[int]] | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        **view: Unpack[ViewOptions],
    ) -> None:
        super().__init__()
        problems = argument_problems(
            dataset, columns, stack, deadline_s,
            batch_format=batch_format, transform=transform, local=local, copy=copy,
        )  # fmt: skip
        problems += view_problems(view, batch_format=batch_format, stacks=bool(stack))
        if audit not in AUDIT_MODES:
            problems.append(f"audit must be one of {', '.join(AUDIT_MODES)}, got {audit!r}")
        named_job = checked(problems, lambda: find_job(job))
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
        refused = numbers.count(None) > list(given.values()).count(None)
        ways = {"rank": rank, "device_mesh": device_mesh, "process_group": process_group}
        named = [way for way, value in ways.items() if value is not None]
        if len(named) > 1:
            problems.append(f"{' and '.join(named)} exclude each other: give one of them")
        if device_mesh is not None:
            who = checked(problems, lambda: rank_in_mesh(device_mesh))
        elif process_group is not None:
            who = checked(problems, lambda: rank_in_group(process_group))
        else:
            who = None if refused else checked(problems, lambda: find_rank(numbers[0], numbers[1]))
        where = checked(problems, lambda: find_endpoint(endpoint))
        credentials = checked(
            problems, lambda: find_credentials(where or "", token, token_file, tls_ca)
        )
        checked(problems, lambda: StepPlan(0, 1, batch_size, drop_last=drop_last), ValueError)
        checked(
            problems,
            lambda: EpochOrder(
                0, shuffle=shuffle, shuffle_block_size=shuffle_block_size, seed=seed
            ),
            ValueError,
        )
        if pad_mask is not None and (not isinstance(pad_mask, str) or not pad_mask):
            problems.append(f"pad_mask must be the name of a new column, got {pad_mask!r}")
        if pad_mask is not None and drop_last:
            problems.append("pad_mask and drop_last exclude each other: one step is short or none")
        if problems or who is None or where is None or named_job is None or credentials is None:
            raise ConfigError("; ".join(problems))
        self.name = dataset
        self.endpoint = where
        self._credentials = credentials
        self.batch_size = operator.index(batch_size)
        self.rank, self.world_size = who.rank, who.world_size
        self._warned_of_groups = False
        self._rank_is_given = bool(named)
        self.shuffle = shuffle
        self.shuffle_block_size = (
            None if shuffle_block_size is None else operator.index(shuffle_block_size)
        )
        self.seed = operator.index(seed)
        self.drop_last = drop_last
        self._pad_mask = pad_mask
        self._columns = read_columns(view, () if columns is None else tuple(columns))
        self._transform = transform
        self._device = target
        self._deadline_s = float(deadline_s)
        self._local = local
        self._process_shards: tuple[int, LocalShards] | None = None  # with the process they are of
        self._process_health: tuple[int, NodeHealth] | None = None  # likewise
        ready_deadline_s = find_ready_deadline_s(self._deadline_s)
        self._shards = wait_for_plan(where, dataset, self._columns, ready_deadline_s, credentials)
        self._job_view: JobView = make_view(
            view,
            VersionNodes(where, self._shards, credentials, self._deadline_s, self.rank),
            Shuffle(shuffle, self.shuffle_block_size, self.seed),
            batch_format,
        )
        self._stack, self._stack_dtype, self._batch_format = stack, stack_dtype, batch_format
        # Copies to a device are contiguous anyway.
        self._copy = copy and (target is None or transform is not None)
        names = self._converter().names  # refuses bad arguments here
        if pad_mask in names:
            raise ConfigError(f"pad_mask must be the name of a new column, got {pad_mask!r}")
        self._sizes = WindowSizes(
            self._shards,
            max(1, round(self.batch_size * self._view.rows_per_slot)),
            operator.index(message_bytes),
            None if prefetch_batches is None else operator.index(prefetch_batches),
        )
        self._cursor = Cursor(SharedCounts.size(len(self._shards.nodes)))
        self._skipped = self._skipped_runs(skip_steps)
        self._job, self._job_is_named = named_job
        self._audit = audit
        self._observer_of: tuple[int, Observer] | None = None  # with the process it is of
        self._passes_of: tuple[int, Passes] | None = None  # with the process they are of
        self._worker_start: Start | None = None  # where a state of this worker stands

    # -- properties ----------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version; with a view, of both."""
        identity = self._view.identity
        if not identity:
            return self._shards.fingerprint
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return f"{self._shards.fingerprint}-{digest}"

    @property
    def num_rows(self) -> int:
        """Rows of the whole dataset, all ranks together."""
        return self._shards.num_rows

    @property
    def num_samples(self) -> int:
        """Samples of a whole epoch, all ranks together: rows, unless a view makes others."""
        return self._view.num_slots(self._cursor.epoch)

    @property
    def view(self) -> View:
        """Which rows each sample has; it also knows its memory, ``num_bytes``."""
        return self._job_view.view

    @property
    def epoch(self) -> int:
        """Epoch of the next pass, the one after it where a loaded state leaves none of it."""
        epoch, offset = self._cursor.planned()
        return epoch + 1 if offset and not self._plan(offset, epoch).num_steps else epoch

    def __len__(self) -> int:
        """Steps of a whole epoch, the same for every rank.

        A loaded state does not change it, because training frameworks use it as the length of every
        epoch. For a pass that resumes inside an epoch, see `steps_left`.
        """
        refuse_random_split()
        return self._whole_plan(self._cursor.epoch).num_steps

    @property
    def steps_left(self) -> int:
        """Steps of the next pass, the same for every rank: fewer after a state was loaded."""
        return self._plan(self._cursor.next_offset, self._cursor.epoch).num_steps

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

        Setting the epoch that is set already changes nothing: a loaded state stays. In a loop over
        epochs, call it before ``iter(loader)`` or a `for` over the loader.

        Raises:
            ConfigError: quoting an epoch that is no integer in [0, 2**62]; or DataLoader workers
                have begun another epoch, and no batch of it is taken yet.
        """
        try:
            epoch = checked_integer("epoch", epoch, 0, _LAST_EPOCH)
        except ValueError:
            raise ConfigError(f"epoch must be an integer in [0, 2**62], got {epoch!r}") from None
        self._refuse_callers()  # a loader that divides again calls this before it iterates
        if epoch == self._cursor.epoch:
            self._passes.give_way()
        else:
            num_steps = self._plan(0, epoch).num_steps
            self._cursor.set(epoch, 0, num_steps=num_steps, any_offset=True)
            self._passes.forget()
        self._cursor.tell()

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
            epoch, consumed = self._cursor.epoch, self._consumed_after(steps)
        elif get_worker_info() is None and self._cursor.read_by_workers and not self._by_loader:
            raise ConfigError(
                "pass steps=<batches taken in this pass> to state_dict, or use dataset.loader(), "
                "which counts them: torch does not tell the dataset how many batches of its "
                "DataLoader workers were taken"
            )
        else:
            this = self._passes.current()
            epoch, consumed = self._cursor.planned() if this is None else this.position
        state = self._state(epoch, consumed).to_dict()
        worker = get_worker_info()
        if worker is None:
            state |= self._audit_of_state(steps)
        if worker is None or steps is not None:
            return state
        return WorkerState(
            **state, rows_per_step=self._rows_per_step, num_workers=worker.num_workers
        ).to_dict()

    def _audit_of_state(self, steps: int | None) -> dict[str, Any]:
        """The audit record for a state, under its key; empty unless states have it."""
        self._observer.report_soon()
        this = self._passes.current() if self._audit == "states" else None
        record = None if this is None else self._observer.record(this)
        if record is None or steps not in (None, record.steps):
            return {}
        return {"audit": record.to_dict()}

    def _state(self, epoch: int, rows_consumed: int) -> OrderState:
        return OrderState(
            dataset=self._shards.dataset,
            fingerprint=self.fingerprint,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            shuffle_block_size=self.shuffle_block_size,
            rows_consumed=rows_consumed,
            skipped=tuple((at, *run) for at, runs in sorted(self._skipped.items()) for run in runs),
        )

    def _consumed_after(self, steps: int) -> int:
        """Rows of the epoch consumed after so many batches of the pass that training consumes."""
        of_workers, in_order = self._cursor.pass_of_workers(steps), True
        if of_workers is not None:
            offset, in_order = of_workers
        else:
            this = self._passes.current()
            offset = self._cursor.next_offset if this is None else this.plan.rows_consumed
        plan = self._plan(offset, self._cursor.epoch)
        try:
            count = checked_integer("steps", steps, 0, plan.num_steps)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not in_order and 0 < count < plan.num_steps:
            raise ConfigError(
                f"a state after steps={count} of {plan.num_steps} needs batches in order, and "
                "DataLoader(in_order=False) takes them as they come: use in_order=True, or save at "
                "the end of an epoch"
            )
        return plan.rows_consumed_after(count)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass start at the position of a state. Takes constant time.

        It holds for one pass; a pass that is given up after one batch does not use it up. After
        that, passes are over the whole epoch until `set_epoch`. Call this before ``iter(loader)``.

        Raises:
            ConfigError: it is no state, one of another order (seed, shuffle), or a worker's of
                another number of workers or another size of steps; or DataLoader workers have
                begun a pass elsewhere, and no batch of it is taken yet.
            StaleVersionError: it is of another dataset or fingerprint; names both.
        """
        worker = get_worker_info()
        state = checked_state(
            state_dict,
            expected=self._state(0, 0),
            num_rows=self._view.num_slots,
            rows_per_step=self._rows_per_step,
            num_workers=0 if worker is None else worker.num_workers,
        )
        self._adopt_skipped(state)
        start = Start(state.epoch, state.rows_consumed)
        if worker is None:
            self._cursor.set(*start, num_steps=self._plan(start.offset, start.epoch).num_steps)
            self._cursor.tell()
            self._passes.forget()
        else:
            self._worker_start = start

    def stats(self) -> ReadStats:
        """What this rank has read so far; with DataLoader workers, their sum.

        Call it in the training process. How long the loop waited is known without workers, and with
        those of `loader`.
        """
        return self._observer.stats()

    # -- iteration -----------------------------------------------------------------------------

    def loader(
        self,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        **options: Any,
    ) -> CacheLoader:
        """A torch DataLoader that gives the batches of this dataset unchanged.

        Accelerate's `prepare`, Lightning and Fabric leave it alone, and it has the state of the
        dataset, with any number of workers.

        Args:
            num_workers, pin_memory, prefetch_factor, persistent_workers, multiprocessing_context:
                as torch's DataLoader.
            options: others of torch's DataLoader, such as ``timeout`` or ``worker_init_fn``.

        Raises:
            ConfigError: an option that the dataset decides, such as ``batch_size``, or a bad one.
        """
        given = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }
        return make_loader(self, {**given, **options})

    def __getitem__(self, index: object) -> Any:
        """Raises ConfigError: rows by number are those of `CacheDataset`."""
        raise ConfigError(
            f"CacheIterableDataset has no row {index!r}: it gives batches in the cache's order; "
            "use CacheDataset for rows by number, a Subset or random_split"
        )

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank; in a DataLoader worker, every n-th of them.

        The pass starts here, not at its first batch, because `StatefulDataLoader` may ask for its
        state in between. No connection is opened before the first batch.
        """
        this = self._begin_pass()
        batches = self._handed_out(this)
        this.iterator = weakref.ref(batches)
        self._passes.begin(this)
        return batches

    def _handed_out(self, this: Pass) -> Generator[Any, None, None]:
        claim, told = 0, self._cursor.told
        if not this.in_worker:
            # What was set since the iterator was made counts: nothing was given yet.
            self._place(this, self._cursor.planned())
            claim = self._cursor.begin(is_look=this.plan.num_steps > 1)
            this.ahead = batches_taken_ahead()
        check_pass(this, self._cursor, self._shards.dataset, shuffle=self.shuffle)
        process = os.getpid()
        with Reader(
            self.endpoint,
            self._shards,
            columns=self._columns,
            replica_offset=self.rank,
            rows_per_message=self._sizes.rows_per_message(),
            deadline_s=self._deadline_s,
            local=self._local_shards(),
            credentials=self._credentials,
            health=self._node_health(),
            counts=self._observer.counts,
        ) as reader:
            batches = self._batches(this, reader)
            if self._device is not None:
                batches = on_device(batches, self._device, interrupt=reader.close)
            watched = self._observer.watch(this, batches, keep_lease=reader.keep_lease)
            with closing(batches), closing(watched):
                # Counted here: batches that are made ahead are not consumed.
                for done, batch in enumerate(watched, 1):
                    if done == 2:
                        self._cursor.use(claim)
                    self._passes.hand_out(this)
                    yield batch
                    if os.getpid() != process:
                        raise CacheError(
                            f"this iterator was created in process {process}, whose threads fetch "
                            f"its rows; create a new iterator in its child {os.getpid()}"
                        )
        this.ended = True
        if this.worker == 0 and this.handed_out:
            self._cursor.end(this.epoch, told)

    def _batches(self, this: Pass, reader: Reader) -> Generator[Any, None, None]:
        """The batches of a pass; changes nothing of this dataset, and may run in any thread."""
        assemble = self._assembler()
        # A worker sends the whole storage of a batch.
        at_once = 1 if this.in_worker else self._job_view.slots_at_once
        transform = self._transform and self._observer.timed(self._transform)
        audits = self._audit != "off"
        shared = SharedDigests(self._shared_counts, this) if audits and this.in_worker else None
        steps = this.steps
        per_window = self._sizes.steps_per_window(reader.num_nodes)
        results = fetch_ahead(
            lambda window: _fetch_window(
                reader, this, self._view, self.rank, window, audits=audits
            ),
            step_windows(steps, per_window),
            depth=self._sizes.windows_ahead(per_window),
            threads=FETCH_THREADS,
            on_wait=self._observer.note_wait,
        )
        with closing(results):  # also where an error of the transform is kept, and this with it
            step = iter(steps)
            for window in results:
                if window.digests is not None:
                    if shared is None:
                        this.digests.put(*window.digests)
                    else:
                        shared.begin(*window.digests)
                for batch, size in zip(
                    window.batches(assemble, at_once), window.sizes, strict=True
                ):
                    if shared is not None:
                        shared.put_next()
                    if self._pad_mask is not None:
                        padded = this.plan.num_padded(next(step), self.rank)
                        batch = with_mask(batch, self._pad_mask, size, padded)
                    yield batch if transform is None else transform(batch)

    def _begin_pass(self) -> Pass:
        worker = get_worker_info()
        if worker is not None and self._device is not None:
            raise ConfigError(
                f"device='{self._device}' cannot be used in DataLoader workers, whose batches go "
                "to the training process through host memory: use num_workers=0, or no device"
            )
        self._check_rank()
        self._refuse_callers()
        if worker is None:
            return self._place(Pass(), self._cursor.planned())
        own, self._worker_start = self._worker_start, None
        start = self._cursor.begin_in_worker(
            worker.id, worker.seed - worker.id, own, deadline_s=self._deadline_s
        )
        this = Pass(worker=worker.id, num_workers=worker.num_workers, in_worker=True)
        return self._place(this, start)

    def _place(self, this: Pass, start: Start) -> Pass:
        """Makes a pass begin there; returns it."""
        this.epoch, this.plan = start.epoch, self._plan(start.offset, start.epoch)
        shuffle = self._shuffles_slots
        this.order = EpochOrder(
            self._view.num_slots(start.epoch),
            shuffle=shuffle,
            shuffle_block_size=self.shuffle_block_size if shuffle else None,
            seed=self.seed,
            epoch=start.epoch,
            skipped=self._skipped.get(start.epoch, ()),
        )
        return this

    def _check_rank(self) -> None:
        """Raises ConfigError where the rank was found before a library had another."""
        now = None if self._rank_is_given else find_initialised_rank()
        if now is not None and not self._warned_of_groups:
            self._warned_of_groups = warn_of_model_parallelism(self.name, self.world_size)
        if now is not None and now.rank != Rank(self.rank, self.world_size):
            raise ConfigError(
                f"the dataset reads as rank {self.rank} of {self.world_size}, but {now.library}, "
                f"initialised later, says rank {now.rank.rank} of {now.rank.world_size}: "
                "make the dataset after that, or pass rank and world_size"
            )

    @property
    def _passes(self) -> Passes:
        """Those of this process; iterators that another one made do not count."""
        if self._passes_of is None or self._passes_of[0] != os.getpid():
            self._passes_of = (os.getpid(), Passes())
        return self._passes_of[1]

    @property
    def _shared_counts(self) -> SharedCounts:
        return SharedCounts(self._cursor.extra, len(self._shards.nodes))

    @property
    def _observer(self) -> Observer:
        """Watches the passes of this process."""
        if self._observer_of is None or self._observer_of[0] != os.getpid():
            identity = ReaderIdentity(
                run=secrets.token_hex(8),
                job=self._job,
                dataset=self._shards.dataset,
                fingerprint=self.fingerprint,
                num_rows=self.num_samples,
                rank=self.rank,
                world_size=self.world_size,
                seed=self.seed,
                shuffle=self._shuffles_slots,
                shuffle_block_size=self.shuffle_block_size if self._shuffles_slots else None,
                pad=self._pad_mask is not None,
            )
            nodes = [node.location for node in self._shards.nodes]
            first = self.rank % len(nodes) if nodes else 0
            locations = dict.fromkeys((*nodes[first:], *nodes[:first], self.endpoint))
            self._observer_of = (
                os.getpid(),
                Observer(
                    identity,
                    tuple(node.id for node in self._shards.nodes),
                    self._shared_counts,
                    Reporter(
                        identity,
                        tuple(locations),
                        self._credentials,
                        is_named=self._job_is_named,
                    ),
                ),
            )
        return self._observer_of[1]

    def _converter(self) -> Converter:
        return Converter(
            self._shards.layout,
            self._stack,
            self._batch_format,
            copy=self._copy,
            stack_dtype=self._stack_dtype,
        )

    def _assembler(self) -> Assemble:
        convert = self._converter()
        if self._job_view.assembler is not None:
            return self._job_view.assembler(convert)
        return lambda rows, _, __: [convert(rows)]

    def _refuse_callers(self) -> None:
        refuse_callers(self, batch_size=self.batch_size, world_size=self.world_size)

    @property
    def _by_loader(self) -> bool:
        """Whether the pass that training consumes is one of `loader`, which counts batches."""
        this = self._passes.current()
        return this is not None and this.of_loader

    def _skipped_runs(
        self, skip_steps: Mapping[int, Iterable[int]] | None
    ) -> dict[int, tuple[tuple[int, int], ...]]:
        """The positions to leave out, by epoch."""
        runs: dict[int, tuple[tuple[int, int], ...]] = {}
        try:
            for epoch, steps in (skip_steps or {}).items():
                number = checked_integer("epoch", epoch, 0, _LAST_EPOCH)
                runs[number] = runs_of_steps(steps, self._whole_plan(number))
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                "skip_steps must map epochs to steps of this dataset, such as {0: [1234]}, got "
                f"{skip_steps!r}: {error}"
            ) from None
        return {epoch: found for epoch, found in runs.items() if found}

    def _adopt_skipped(self, state: OrderState) -> None:
        """Leaves out what a state leaves out, too.

        Raises:
            ConfigError: `skip_steps` names rows that were given before the state; or workers run
                that do not know what the state leaves out.
        """
        kept: dict[int, tuple[tuple[int, int], ...]] = {}
        for epoch, start, stop in state.skipped:
            kept[epoch] = (*kept.get(epoch, ()), (start, stop))
        num_slots = self._view.num_slots(state.epoch)
        before = EpochOrder(num_slots, shuffle=False, skipped=kept.get(state.epoch, ()))
        consumed = state.rows_consumed
        if consumed:
            consumed = int(before.in_epoch(np.array([consumed - 1]))[0]) + 1
        late = [
            run
            for run in self._skipped.get(state.epoch, ())
            if run not in before.skipped and run[0] < consumed
        ]
        if late:
            raise ConfigError(
                f"skip_steps names positions {late[0][0]} to {late[0][1] - 1} of epoch "
                f"{state.epoch}, but the state says that {consumed} were given before it: name "
                "later steps, or load an earlier state"
            )
        merged = {
            epoch: tuple(sorted({*kept.get(epoch, ()), *self._skipped.get(epoch, ())}))
            for epoch in {*kept, *self._skipped}
        }
        if merged != self._skipped and self._cursor.has_workers:
            raise ConfigError(
                "the state leaves out steps that running DataLoader workers do not know: delete "
                "their iterator and loader before load_state_dict"
            )
        self._skipped = merged

    @property
    def _view(self) -> View:
        return self._job_view.view

    @property
    def _shuffles_slots(self) -> bool:
        return self.shuffle and not self._view.orders_rows

    @property
    def _rows_per_step(self) -> int:
        return self.world_size * self.batch_size

    def _plan(self, offset: int, epoch: int) -> StepPlan:
        """The steps of an epoch from a sample on."""
        left_out = sum(stop - start for start, stop in self._skipped.get(epoch, ()))
        whole = self._whole_plan(epoch)
        return replace(whole, num_rows=whole.num_rows - left_out, rows_consumed=offset)

    def _whole_plan(self, epoch: int) -> StepPlan:
        """The steps of an epoch, as if none was left out."""
        return StepPlan(
            self._view.num_slots(epoch),
            self.world_size,
            self.batch_size,
            drop_last=self.drop_last,
            pad=self._pad_mask is not None,
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
        if get_spawning_popen() is not None:
            self._check_rank()  # the process that starts knows nothing of torch.distributed
            self._refuse_callers()
        return {
            **self.__dict__,
            "_process_shards": None,
            "_process_health": None,
            "_passes_of": None,
            "_observer_of": None,
        }

    def __copy__(self) -> Self:
        """An independent dataset with the same position; only copies in workers share it."""
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(self.__getstate__(), _cursor=copy.deepcopy(self._cursor))
        return duplicate


class _Window(NamedTuple):
    """The rows of a run of steps.

    Attributes:
        pieces: the rows, in order.
        samples: of all steps.
        sizes: slots of each step.
        digests: of each step, if wanted.
    """

    pieces: list[Rows]
    samples: Samples
    sizes: list[int]
    digests: tuple[Words, Words] | None

    def batches(self, assemble: Assemble, at_once: int) -> Iterator[Any]:
        """The batches; steps of about so many slots are made at once."""
        steps = max(1, at_once // max(self.sizes, default=1))
        runs = [self.sizes[at : at + steps] for at in range(0, len(self.sizes), steps)]
        slots_of_runs = [sum(run) for run in runs]
        stop = 0
        for rows, run in zip(
            cut(self.pieces, self.samples.rows_of_steps(slots_of_runs)), runs, strict=True
        ):
            start, stop = stop, stop + sum(run)
            yield from assemble(rows, self.samples.slots(start, stop), run)


def _fetch_window(
    reader: Reader, this: Pass, view: View, rank: int, window: range, *, audits: bool
) -> _Window:
    """Fetches a run of steps.

    Raises:
        NodeUnavailableError: naming the first step. Others as `Reader.fetch`.
    """
    positions, sizes = this.plan.window(window, rank)
    try:
        slots = this.order.row_ids(positions)
        digests = step_digests(slots, sizes) if audits else None
        samples = view.samples(slots, this.epoch).shared(sizes)
        return _Window(reader.fetch(samples.row_ids), samples, sizes, digests)
    except NodeUnavailableError as error:
        raise NodeUnavailableError(f"step {window.start}: {error}") from None
