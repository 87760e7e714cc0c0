"""The batches of one rank, in an exact and resumable order: what all datasets in that order share.

It joins the parts: the order chooses slots, the view their rows, a reader fetches these, the
converter makes tensors. It adds what torch needs: workers, epochs and states. It does not know how
many versions are read.
"""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import pyarrow as pa
from torch.utils.data import IterableDataset, get_worker_info

from cache_client.batches.device import on_device
from cache_client.epochs.cursor import LAST_EPOCH, Cursor, Start
from cache_client.epochs.loader_iterators import (
    batches_taken_ahead,
    refuse_callers,
    refuse_random_split,
)
from cache_client.epochs.observer import Observer
from cache_client.epochs.passes import Pass, Passes, check_pass, checked_state
from cache_client.epochs.stats import ReadStats
from cache_client.epochs.training_run import training_run
from cache_client.job.parallel_groups import warn_of_model_parallelism
from cache_client.job.ranks import find_initialised_rank
from cache_client.order.order import StepPlan
from cache_client.order.permutation import checked_integer
from cache_client.order.states import OrderState, WorkerState
from cache_client.reading.counts import SharedCounts
from cache_client.reading.per_process import PerProcess
from cache_client.training.announced import in_announced_order
from cache_client.training.described import Described
from cache_client.training.familiar import count_of
from cache_client.training.first_epoch import LoadingSource
from cache_client.training.job_config import JobConfig
from cache_client.training.loader import CacheLoader, make_loader
from cache_client.training.opened import Opened
from cache_client.training.skipped_steps import skipped_runs, with_state
from cache_client.training.windows import first_batches, first_rows, pass_batches
from cache_client.views.due import due_of
from cache_client.views.view import SlotView
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LengthUnknownError,
)


class RankBatches(Described, IterableDataset[Any]):
    """The batches of one rank, from epoch 0 on; base of `CacheIterableDataset` and `CacheMixture`.

    Args:
        config: what was asked.
        opened: what is read first; a subclass may swap it.

    Thread-safety: iterate, and change epoch and state, from one thread at a time.
    """

    def __init__(self, config: JobConfig, opened: Opened) -> None:
        super().__init__()
        self._config, self._opened = config, opened
        self._nodes = opened.nodes
        self._cursor = Cursor(SharedCounts.size(len(self._nodes)))
        self._skipped = skipped_runs(config.skip_steps, self._whole_plan, LAST_EPOCH)
        self._skips = json.dumps(self._skipped, separators=(",", ":"))
        self._warned_of_groups = False
        self._process_passes: PerProcess[Passes] = PerProcess()
        self._worker_start: Start | None = None  # where a state of this worker stands
        self._run = training_run(self, self.config.job, self.rank, self._shared_counts)

    # -- what is read --------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows of the whole dataset, of a mixture those of all sources; all ranks together.

        Raises:
            LengthUnknownError: see `__len__`.
        """
        return self._opened.shards.num_rows if self._loading is None else self.num_samples

    @property
    def num_samples(self) -> int:
        """Samples of a whole epoch, all ranks together: rows, unless a view makes others.

        Raises:
            LengthUnknownError: see `__len__`.
        """
        self._require_end()
        return self._slots.num_slots(self._cursor.epoch)

    @property
    def slots(self) -> SlotView:
        """Which rows each sample has."""
        return self._opened.job_view.view

    @property
    def view_bytes(self) -> int:
        """Memory of the tables of the view, of codes and of joined datasets, in this process."""
        return self._opened.job_view.num_bytes

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
            LengthUnknownError: with ``version="first-rows"``, before the load of a query that
                leaves rows out has ended.
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
        return self._opened.loading

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
            epoch = checked_integer("epoch", epoch, 0, LAST_EPOCH)
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
            pass_ = self._passes.current()
            epoch, consumed = self._cursor.planned() if pass_ is None else pass_.position
        state = self._state(epoch, consumed).to_dict()
        worker = get_worker_info()
        if worker is None:
            state |= self._audit_of_state(steps)
        if worker is None or steps is not None:
            return state
        return WorkerState(
            **state, rows_per_step=self._config.rows_per_step, num_workers=worker.num_workers
        ).to_dict()

    def _audit_of_state(self, steps: int | None) -> dict[str, Any]:
        """The audit record for a state, under its key; empty unless states have it."""
        self._observer.report_soon()
        pass_ = self._passes.current() if self._config.audit == "states" else None
        record = None if pass_ is None else self._observer.record(pass_)
        if record is None or steps not in (None, record.steps):
            return {}
        return {"audit": record.to_dict()}

    def _state(self, epoch: int, rows_consumed: int) -> OrderState:
        return OrderState(
            dataset=self._opened.name,
            fingerprint=self.fingerprint,
            seed=self.seed,
            epoch=epoch,
            shuffle=self._config.shuffle.shuffle,
            shuffle_block_size=self._config.shuffle.shuffle_block_size,
            view=self._opened.view_text,
            rows_consumed=rows_consumed,
            skipped=tuple((at, *run) for at, runs in sorted(self._skipped.items()) for run in runs),
        )

    def _consumed_after(self, steps: int) -> int:
        """Rows of the epoch consumed after so many batches of the pass that training consumes."""
        of_workers, in_order = self._cursor.pass_of_workers(steps), True
        if of_workers is not None:
            offset, in_order = of_workers
        else:
            pass_ = self._passes.current()
            offset = self._cursor.next_offset if pass_ is None else pass_.plan.rows_consumed
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
            expected_of=lambda epoch: self._state(epoch, 0),
            num_rows=self._slots.num_slots,
            rows_per_step=self._config.rows_per_step,
            num_workers=0 if worker is None else worker.num_workers,
        )
        skipped = with_state(self._skipped, state, self._slots.num_slots(state.epoch))
        if skipped != self._skipped and self._cursor.has_workers:
            raise ConfigError(
                "the state leaves out steps that running DataLoader workers do not know: delete "
                "their iterator and loader before load_state_dict"
            )
        self._skipped = skipped
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

    def _sums(self) -> dict[str, int]:
        if self._loading:
            return {}
        return {"num_rows": self.num_rows, "num_bytes": self._opened.shards.num_bytes}

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

    def take(self, num_batches: int = 1) -> list[Any]:
        """The first batches of the next pass, for a look: it stays where it is, and none counts.

        They are as training gets them, and stay on the host. Nothing is reported to the cache.

        Raises:
            ConfigError: ``num_batches`` is no integer of at least 0. Others as a pass does.
        """
        self._check_rank()
        most, start = count_of("num_batches", num_batches), self._cursor.planned()
        pass_ = self._place(Pass(most_steps=most), start)
        return first_batches(pass_, self._config, self._opened, self._shared_counts)

    def _first_rows(self, num_rows: int) -> pa.RecordBatch:
        return first_rows(self.epoch, num_rows, self._config, self._opened)

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
        pass_ = self._begin_pass()
        batches = self._handed_out(pass_)
        pass_.iterator = weakref.ref(batches)
        self._passes.begin(pass_)
        return batches

    def _handed_out(self, pass_: Pass) -> Generator[Any, None, None]:
        yield from self._batches_of(pass_)
        while pass_.superseded:
            pass_ = self._place(Pass(iterator=pass_.iterator), self._cursor.planned())
            self._passes.begin(pass_)
            yield from self._batches_of(pass_)

    def _batches_of(self, pass_: Pass) -> Generator[Any, None, None]:
        claim, announced = 0, self._cursor.announced
        if not pass_.in_worker:
            self._place(pass_, self._cursor.planned())  # what was set since it was made counts
            pass_.superseded = False
            claim = self._cursor.begin(is_look=pass_.plan.num_steps > 1)
            pass_.ahead = batches_taken_ahead()
        check_pass(pass_, self._cursor, self._opened.name, shuffle=self._config.shuffle.shuffle)
        process, opened = os.getpid(), self._opened  # a pass keeps its version
        sizes = opened.sizes_of(self._config, pass_.num_workers)
        with (
            in_announced_order(self._config, opened, pass_, self._skipped) as (source, go_on),
            source.open_reader(
                replica_offset=self.rank,
                rows_per_message=sizes.rows_per_message(),
                counts=self._observer.counts,
            ) as reader,
        ):

            def keep_lease() -> None:
                reader.keep_lease()
                go_on()

            batches = pass_batches(
                pass_, reader, self._config, opened, sizes, self._observer, self._shared_counts
            )
            if self._config.device is not None:
                batches = on_device(batches, self._config.device, interrupt=reader.close)
            watched = self._observer.watch(pass_, batches, keep_lease=keep_lease)
            with closing(batches), closing(watched):
                # Counted here: batches that are made ahead are not consumed.
                for done, batch in enumerate(watched, 1):
                    if done == 2:
                        self._cursor.use(claim)
                    self._passes.hand_out(pass_)
                    yield batch
                    if pass_.superseded:
                        return
                    if os.getpid() != process:
                        raise CacheError(
                            f"this iterator was created in process {process}, whose threads fetch "
                            f"its rows; create a new iterator in its child {os.getpid()}"
                        )
        pass_.ended = True
        if pass_.worker == 0 and pass_.handed_out:
            self._cursor.end(pass_.epoch, announced)

    def _begin_pass(self) -> Pass:
        worker = get_worker_info()
        if worker is not None and self._config.device is not None:
            raise ConfigError(
                f"device='{self._config.device}' cannot be used in DataLoader workers, whose "
                "batches go to the training process through host memory: use num_workers=0, or no "
                "device"
            )
        self._check_rank()
        self._refuse_callers()
        if worker is None:
            return self._place(Pass(), self._cursor.planned())
        own, self._worker_start = self._worker_start, None
        start = self._cursor.begin_in_worker(
            worker.id, worker.seed - worker.id, own, deadline_s=self._config.access.deadline_s
        )
        self._enter_epoch(start.epoch)
        pass_ = Pass(worker=worker.id, num_workers=worker.num_workers, in_worker=True)
        return self._place(pass_, start)

    def _enter_epoch(self, epoch: int) -> None:
        """Called in a worker that begins a pass."""

    def _place(self, pass_: Pass, start: Start) -> Pass:
        """Makes a pass begin there; returns it."""
        pass_.epoch, pass_.plan = start.epoch, self._plan(start.offset, start.epoch)
        skipped = self._skipped.get(start.epoch, ())
        if self._loading is not None:
            pass_.due_of = lambda: due_of(self._slots, start.epoch, 0)  # changes while it loads
            self._loading.tell(pass_)
        else:
            num_rows = self._opened.shards.num_rows
            pass_.due_of = cache(partial(due_of, self._slots, start.epoch, num_rows))
            pass_.order = self._config.shuffle.order(self._slots, start.epoch, skipped)
        return pass_

    def _note_handed_out(self, pass_: Pass) -> None:
        """Learns of the groups that workers have read, in the training process."""
        loading, stop = self._loading, pass_.handed_out * pass_.plan.rows_per_step
        if loading is not None and pass_.plan.rows_consumed + stop > pass_.order.num_rows:
            loading.look()
            loading.tell(pass_)

    def _check_rank(self) -> None:
        """Raises ConfigError where the rank was found before a library had another."""
        now = None if self._config.rank_is_given else find_initialised_rank()
        if now is not None and not self._warned_of_groups:
            self._warned_of_groups = warn_of_model_parallelism(self.name, self.world_size)
        if now is not None and now.rank != self._config.rank:
            raise ConfigError(
                f"the dataset reads as rank {self.rank} of {self.world_size}, but {now.library}, "
                f"initialised later, says rank {now.rank.rank} of {now.rank.world_size}: "
                "make the dataset after that, or pass rank and world_size"
            )

    @property
    def _passes(self) -> Passes:
        """Those of this process; iterators that another one made do not count."""
        return self._process_passes.get(Passes)

    @property
    def _shared_counts(self) -> SharedCounts:
        return SharedCounts(self._cursor.extra, len(self._nodes))

    @property
    def _observer(self) -> Observer:
        """Watches the passes of this process."""
        return self._opened.observer.get(
            lambda: self._opened.make_observer(
                self._config,
                self._nodes,
                self._shared_counts,
                skipped=self._skips,
                in_worker=get_worker_info() is not None,
                run=self._run,
            )
        )

    def _refuse_callers(self) -> None:
        refuse_callers(self, batch_size=self.batch_size, world_size=self.world_size)

    @property
    def _by_loader(self) -> bool:
        """Whether the pass that training consumes is one of `loader`, which counts batches."""
        pass_ = self._passes.current()
        return pass_ is not None and pass_.of_loader

    @property
    def _amendments(self) -> object:
        """What workers that were started before know nothing of: another value after each."""
        return ()

    @property
    def _slots(self) -> SlotView:
        return self._opened.slots

    def _plan(self, offset: int, epoch: int) -> StepPlan:
        """The steps of an epoch from a sample on."""
        left_out = sum(stop - start for start, stop in self._skipped.get(epoch, ()))
        whole = self._whole_plan(epoch)
        return replace(whole, num_rows=whole.num_rows - left_out, rows_consumed=offset)

    def _whole_plan(self, epoch: int) -> StepPlan:
        """The steps of an epoch, as if none was left out."""
        return self._config.steps(self._slots.num_slots(epoch))

    def __getstate__(self) -> dict[str, Any]:
        config = self._config
        if get_spawning_popen() is not None:
            self._check_rank()  # the process that starts knows nothing of torch.distributed
            self._refuse_callers()
            if config.version == "ready":  # a worker opens no version, and the list may be large
                config = replace(config, view=replace(config.view, subset=None))
        return {
            **self.__dict__,
            "_config": config,
            "_process_passes": PerProcess(),
            "_opened": replace(self._opened, observer=PerProcess()),
        }

    def __copy__(self) -> Self:
        """An independent dataset with the same position; only copies in workers share it."""
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(self.__getstate__(), _cursor=copy.deepcopy(self._cursor))
        duplicate._shared_counts.is_told = False
        duplicate._run = training_run(
            duplicate, self.config.job, self.rank, duplicate._shared_counts
        )
        return duplicate
