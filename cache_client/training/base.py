"""The batches of one rank, in an exact and resumable order: what all datasets in that order share.

It joins the parts: the order chooses slots, the view their rows, a reader fetches these, the
converter makes tensors. It adds what torch needs: workers, epochs and states. It does not know how
many versions are read.
"""

from __future__ import annotations

import copy
import os
import secrets
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from cache_client.batches.batch_formats import with_column
from cache_client.batches.convert import Converter
from cache_client.batches.device import on_device
from cache_client.batches.images import ImageMode
from cache_client.epochs.cursor import Cursor, Start
from cache_client.epochs.loader_iterators import (
    batches_taken_ahead,
    refuse_callers,
    refuse_random_split,
)
from cache_client.epochs.observer import Observer, SharedDigests
from cache_client.epochs.passes import Pass, Passes, check_pass, checked_state
from cache_client.epochs.reports import ReaderIdentity, Reporter
from cache_client.epochs.stats import ReadStats
from cache_client.flight.routing import NodeRef, ShardMap
from cache_client.job.arguments import BatchFormat
from cache_client.job.parallel_groups import warn_of_model_parallelism
from cache_client.job.ranks import Rank, find_initialised_rank
from cache_client.order.audit import AuditMode
from cache_client.order.digests import Words, step_digests
from cache_client.order.order import EpochOrder, StepPlan, runs_of_steps, step_windows
from cache_client.order.permutation import Int64Array, checked_integer
from cache_client.order.states import OrderState, WorkerState
from cache_client.reading.counts import ReadCounts, SharedCounts
from cache_client.reading.fetch_ahead import FETCH_THREADS, ask_ahead, fetch_ahead
from cache_client.reading.rows import Rows, cut
from cache_client.reading.window_sizes import WindowSizes
from cache_client.training.first_epoch import LoadingSource
from cache_client.training.loader import CacheLoader, make_loader
from cache_client.view_options.job_view import Assemble, JobView
from cache_client.views.view import PlainView, Samples, Shuffle, View
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LengthUnknownError,
    NodeUnavailableError,
)
from cache_protocol.storage.layout import Layout
from cache_protocol.wire.credentials import Credentials

_LAST_EPOCH = 2**62  # epochs lie in 64 bits, see `cache_client.epochs.cursor`


def is_epoch(epoch: object) -> bool:
    """Whether `RankBatches.set_epoch` takes this epoch."""
    try:
        checked_integer("epoch", epoch, 0, _LAST_EPOCH)
    except ValueError:
        return False
    return True


class RowReader(Protocol):
    """Fetches rows by the ids of a view. Thread-safe."""

    @property
    def num_nodes(self) -> int:
        """The most nodes that one window is requested from."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""

    def fetch(self, row_ids: Int64Array) -> list[Rows]:
        """The rows of these ids, in this order; see `cache_client.reading.reader`."""

    def request(self, row_ids: Int64Array) -> Callable[[], list[Rows]]:
        """Asks for rows; the result waits for them; see `cache_client.reading.reader`."""

    def keep_lease(self) -> None:
        """Renews leases in the background when they are due."""

    def close(self) -> None:
        """Closes every connection; running fetches fail."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class RowSource(Protocol):
    """Opens readers of what is read."""

    @property
    def shards(self) -> ShardMap:
        """The version, or several joined."""

    def open_reader(
        self, *, replica_offset: int, rows_per_message: int, counts: ReadCounts
    ) -> RowReader:
        """A reader for one pass; see `cache_client.reading.reader`."""


class RankBatches(IterableDataset[Any]):
    """The batches of one rank; base of `CacheIterableDataset` and `CacheMixture`.

    A subclass sets the attributes below and calls `_prepare`. It says what the fingerprint is.

    Thread-safety: iterate, and change epoch and state, from one thread at a time.
    """

    name: str
    endpoint: str
    batch_size: int
    rank: int
    world_size: int
    shuffle: bool
    shuffle_block_size: int | None
    seed: int
    drop_last: bool
    _credentials: Credentials
    _rank_is_given: bool
    _pad_mask: str | None
    _transform: Callable[[Any], Any] | None
    _device: torch.device | None
    _deadline_s: float
    _job_view: JobView
    _layout: Layout
    _source: RowSource
    _nodes: tuple[NodeRef, ...]
    _version_name: str
    _stack: Mapping[str, Sequence[str]] | None
    _stack_dtype: torch.dtype | str | None
    _batch_format: BatchFormat
    _decode: Mapping[str, ImageMode] | None
    _copy: bool
    _job: str
    _job_is_named: bool
    _audit: AuditMode
    _sizes: WindowSizes

    def _prepare(self, skip_steps: Mapping[int, Iterable[int]] | None) -> None:
        """Begins at the first row of epoch 0; the other attributes are set."""
        self._cursor = Cursor(SharedCounts.size(len(self._nodes)))
        self._skipped = self._skipped_runs(skip_steps)
        self._warned_of_groups = False
        self._observer_of: tuple[int, Observer] | None = None  # with the process it is of
        self._passes_of: tuple[int, Passes] | None = None  # with the process they are of
        self._worker_start: Start | None = None  # where a state of this worker stands

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what is read."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Rows of the whole dataset, of a mixture those of all sources; all ranks together.

        Raises:
            LengthUnknownError: see `__len__`.
        """
        return self._source.shards.num_rows if self._loading is None else self.num_samples

    @property
    def num_samples(self) -> int:
        """Samples of a whole epoch, all ranks together: rows, unless a view makes others.

        Raises:
            LengthUnknownError: see `__len__`.
        """
        self._require_end()
        return self._view.num_slots(self._cursor.epoch)

    @property
    def view(self) -> View:
        """Which rows each sample has."""
        return self._job_view.view

    @property
    def view_bytes(self) -> int:
        """Memory of the tables of the view, of codes and of joined datasets, in this process."""
        return self._job_view.num_bytes

    @property
    def epoch(self) -> int:
        """Epoch of the next pass, the one after it where a loaded state leaves none of it."""
        epoch, offset = self._cursor.planned()
        return epoch + 1 if offset and not self._plan(offset, epoch).num_steps else epoch

    def __len__(self) -> int:
        """Steps of a whole epoch, the same for every rank.

        A loaded state does not change it, because training frameworks use it as the length of every
        epoch. For a pass that resumes inside an epoch, see `steps_left`.

        Raises:
            LengthUnknownError: with ``wait="first-rows"``, before the load of a query that leaves
                rows out has ended.
        """
        refuse_random_split()
        self._require_end()
        return self._whole_plan(self._cursor.epoch).num_steps

    @property
    def steps_left(self) -> int:
        """Steps of the next pass, the same for every rank: fewer after a state was loaded.

        Raises:
            LengthUnknownError: see `__len__`.
        """
        self._require_end()
        return self._plan(self._cursor.next_offset, self._cursor.epoch).num_steps

    @property
    def _loading(self) -> LoadingSource | None:
        """Where the rows come from in the first epoch of a version that may load."""
        return self._source if isinstance(self._source, LoadingSource) else None

    def _knows_end(self) -> bool:
        """Whether the steps of the epoch are known; asks the cache, if they were not."""
        loading = self._loading
        if loading is not None and loading.log.total is None:
            loading.look()
        return loading is None or loading.log.total is not None

    def _require_end(self) -> None:
        if not self._knows_end():
            raise LengthUnknownError(
                f"dataset {self.name!r} is loading, and its query leaves rows out: the steps of "
                "this epoch are known when the load has ended"
            )

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
            dataset=self._version_name,
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
        self._knows_end()  # else steps of workers may be more than there are
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
            f"{type(self).__name__} has no row {index!r}: it gives batches in the cache's order; "
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
        check_pass(this, self._cursor, self._version_name, shuffle=self.shuffle)
        process = os.getpid()
        with self._source.open_reader(
            replica_offset=self.rank,
            rows_per_message=self._sizes_of(this).rows_per_message(),
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

    def _batches(self, this: Pass, reader: RowReader) -> Generator[Any, None, None]:
        """The batches of a pass; changes nothing of this dataset, and may run in any thread."""
        assemble = self._assembler()
        # A worker sends the whole storage of a batch.
        job_view = self._job_view  # a pass keeps its version
        sizes = self._sizes_of(this)
        at_once = 1 if this.in_worker else job_view.slots_at_once
        if job_view.assembler is None and not this.in_worker:
            at_once = sizes.rows_per_message()  # of one message, so that none are joined
        transform = self._transform and self._observer.timed(self._transform)
        audits, loading = self._audit != "off", self._loading
        shared = SharedDigests(self._shared_counts, this) if audits and this.in_worker else None
        steps = this.steps
        per_window = sizes.steps_per_window(reader.num_nodes)
        ask = partial(
            _ask_for_window, this, job_view, self.rank, audits=audits, loading=loading,
            given_up=lambda: reader.is_closed,
        )  # fmt: skip

        def fetch(window: range) -> _Window:
            return ask(lambda ids: partial(reader.fetch, ids), window)()

        windows = step_windows(steps, per_window)
        depth, on_wait = sizes.windows_ahead(per_window), self._observer.note_wait
        if reader.num_nodes and not sizes.in_streams and loading is None:
            results = ask_ahead(partial(ask, reader.request), windows, depth=depth, on_wait=on_wait)
        else:  # two threads share the work of files, and wait for rows that are not loaded
            results = fetch_ahead(
                fetch,
                windows,
                depth=depth,
                threads=1 if sizes.in_streams else FETCH_THREADS,
                on_wait=on_wait,
            )
        with closing(results):  # also where an error of the transform is kept, and this with it
            step = iter(steps)
            for window in _windows(results, fetch):
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
                        mask = np.arange(size) < size - padded
                        batch = with_column(batch, self._pad_mask, mask, self._batch_format)
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
        self._enter_epoch(start.epoch)
        this = Pass(worker=worker.id, num_workers=worker.num_workers, in_worker=True)
        return self._place(this, start)

    def _enter_epoch(self, epoch: int) -> None:
        """Called in a worker that begins a pass."""

    def _place(self, this: Pass, start: Start) -> Pass:
        """Makes a pass begin there; returns it."""
        this.epoch, this.plan = start.epoch, self._plan(start.offset, start.epoch)
        skipped = self._skipped.get(start.epoch, ())
        shuffle = Shuffle(self.shuffle, self.shuffle_block_size, self.seed)
        if self._loading is not None:
            self._loading.tell(this)
        else:
            this.order = shuffle.order(self._view, start.epoch, skipped)
        return this

    def note_handed_out(self, this: Pass) -> None:
        """Learns of the groups that workers have read, in the training process."""
        loading, stop = self._loading, this.handed_out * this.plan.rows_per_step
        if loading is not None and this.plan.rows_consumed + stop > this.order.num_rows:
            loading.look()
            loading.tell(this)

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
        return SharedCounts(self._cursor.extra, len(self._nodes))

    @property
    def _observer(self) -> Observer:
        """Watches the passes of this process."""
        if self._observer_of is None or self._observer_of[0] != os.getpid():
            identity = ReaderIdentity(
                run=secrets.token_hex(8),
                job=self._job,
                dataset=self._version_name,
                fingerprint=self.fingerprint,
                rank=self.rank,
                world_size=self.world_size,
            )
            nodes = [node.location for node in self._nodes]
            first = self.rank % len(nodes) if nodes else 0
            locations = dict.fromkeys((*nodes[first:], *nodes[:first], self.endpoint))
            self._observer_of = (
                os.getpid(),
                Observer(
                    identity,
                    tuple(node.id for node in self._nodes),
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
            self._layout,
            self._stack,
            self._batch_format,
            copy=self._copy,
            stack_dtype=self._stack_dtype,
            decode=self._decode,
        )

    def _assembler(self) -> Assemble:
        convert = self._converter()
        if self._job_view.assembler is not None:
            return self._job_view.assembler(convert)
        return lambda rows, _, sizes: convert.batches(rows, sizes)

    def _sizes_of(self, this: Pass) -> WindowSizes:
        """The sizes of the windows of a pass.

        Each window follows the one before where one node has all of its rows: where there is one
        node, or each window begins where the one before ends.
        """
        one_reader = self.world_size * this.num_workers == 1
        in_order = not self.shuffle and isinstance(self._view, PlainView)
        return replace(self._sizes, in_streams=in_order and (one_reader or len(self._nodes) == 1))

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
        consumed = slots_consumed(state, self._view.num_slots(state.epoch))
        late = [
            run
            for run in self._skipped.get(state.epoch, ())
            if run not in kept.get(state.epoch, ()) and run[0] < consumed
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
        return self._job_view.view if self._loading is None else self._loading.view

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

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            self._check_rank()  # the process that starts knows nothing of torch.distributed
            self._refuse_callers()
        return {
            **self.__dict__,
            "_passes_of": None,
            "_observer_of": None,
        }

    def __copy__(self) -> Self:
        """An independent dataset with the same position; only copies in workers share it."""
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(self.__getstate__(), _cursor=copy.deepcopy(self._cursor))
        return duplicate


def slots_consumed(state: OrderState, num_slots: int) -> int:
    """The slots of its epoch up to the position of a state, with those that it leaves out."""
    skipped = tuple((start, stop) for epoch, start, stop in state.skipped if epoch == state.epoch)
    order = EpochOrder(num_slots, shuffle=False, skipped=skipped)
    consumed = state.rows_consumed
    return int(order.in_epoch(np.array([consumed - 1]))[0]) + 1 if consumed else 0


class _Window(NamedTuple):
    """The rows of a run of steps.

    Attributes:
        pieces: the rows, in order.
        samples: of all steps.
        sizes: slots of each step.
        digests: of each step, if wanted.
        later: steps of the run whose rows were not sealed.
        ended: there are no more steps.
    """

    pieces: list[Rows]
    samples: Samples
    sizes: list[int]
    digests: tuple[Words, Words] | None
    later: range = range(0)
    ended: bool = False

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


def _windows(results: Iterable[_Window], fetch: Callable[[range], _Window]) -> Iterator[_Window]:
    """The windows, with the rest of those whose rows were not all sealed when they were asked."""
    for window in results:
        while window.sizes:
            yield window
            if not window.later:
                break
            window = fetch(window.later)
        if window.ended:
            return


def _ask_for_window(
    this: Pass,
    job_view: JobView,
    rank: int,
    request: Callable[[Int64Array], Callable[[], list[Rows]]],
    window: range,
    *,
    audits: bool,
    loading: LoadingSource | None,
    given_up: Callable[[], bool],
) -> Callable[[], _Window]:
    """Asks for the rows of a run of steps; the result waits for them.

    While the version loads, it waits for the first of these steps, and asks for those of them that
    can be read.

    Args:
        request: of a reader, see `Reader.request`.
        given_up: whether nothing waits for the rows any more.

    Raises:
        NodeUnavailableError: naming the first step. Others as `Reader.fetch`.
    """
    step, view, later, ended = window.start, job_view.view, range(0), False
    with _named(step):
        if loading is not None:
            view, window, later, ended = loading.wait_for(this, window, given_up)
            if not window:
                none = _Window([], Samples(np.empty(0, np.int64)), [], None, ended=ended)
                return lambda: none
        positions, sizes = this.plan.window(window, rank)
        slots = this.order.row_ids(positions)
        digests = step_digests(slots, sizes) if audits else None
        samples = view.samples(slots, this.epoch).shared(sizes)
        wait = request(samples.row_ids)

    def receive() -> _Window:
        with _named(step):
            pieces = wait()
            if job_view.lookups is not None:
                pieces = job_view.lookups.extend(pieces, samples.row_ids)
            return _Window(pieces, samples, sizes, digests, later, ended)

    return receive


@contextmanager
def _named(step: int) -> Iterator[None]:
    """Names the step of a failure."""
    try:
        yield
    except NodeUnavailableError as error:
        raise NodeUnavailableError(f"step {step}: {error}") from None
