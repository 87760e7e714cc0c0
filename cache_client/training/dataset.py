"""`CacheIterableDataset`: the batches of one rank, in an exact and resumable order.

Checks the arguments, and reads one version; `cache_client.training.base` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import get_worker_info

from cache_client.batches.images import ImageMode
from cache_client.batches.null_rules import Nulls
from cache_client.epochs.cursor import Start, is_epoch
from cache_client.epochs.passes import Pass
from cache_client.job.argument_names import names_explained
from cache_client.job.arguments import BatchFormat
from cache_client.job.connection import Connection
from cache_client.order.audit_record import AuditMode
from cache_client.order.states import AmendedPart, OrderState, parts_of, read_state
from cache_client.training import borders
from cache_client.training.amendments import (
    OtherRowsError,
    agreed_version,
    as_in_other_epochs,
    check_amendable,
    open_parts,
    with_notes,
)
from cache_client.training.borders import Asked, has_news
from cache_client.training.job_config import (
    JobConfig,
    Reading,
    Version,
    checked_config,
    moved_arguments,
)
from cache_client.training.opened import Opened, open_version
from cache_client.training.set_weights import WeightedEpochs, number_of
from cache_client.training.skipped_steps import slots_consumed
from cache_client.view_options.lookups import Vocabulary
from cache_client.view_options.options import View
from cache_client.views.amended import AmendedView
from cache_protocol.datasets.values import as_integer
from cache_protocol.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class CacheIterableDataset(WeightedEpochs):
    """Ready batches of one rank; iterate ``dataset.loader(num_workers=n)``, or the dataset.

    The batches, joined over (step, rank), are exactly the order of the epoch, for any number of
    ranks, workers, nodes and replicas. Every rank has the same number of steps.

    A batch is a dict from column to value: numbers are tensors of shape ``[B]``, fixed-size lists
    ``[B, n]``, strings a list of ``str``, lists of numbers a list of 1-d tensors (a Python list
    where one holds a null). bools are ``torch.bool``, times ``torch.int64``, decimals
    ``torch.float64``. A struct is a dict of its fields. They may be changed in place. A
    single column owns its memory. Larger stacks and fixed-size lists share that of a window: one
    that you keep keeps the others, so copy what is to stay. The last step of an epoch may be short;
    where it has fewer rows than there are ranks, some ranks take a row that another has, too: see
    `cache_client.order.order`.

    Args:
        name: of a dataset in the cache.
        batch_size: rows of this rank in a full step.
        columns: to read, in this order; default: all. ``address.zip`` is one field of a struct.
        view: what to read other than each row once: a filter, a split, weights, packed sequences,
            and others; default: the options in ``CACHE_VIEW``, as JSON.
        cache: how to reach the cache: a `Connection`, or its endpoint ``grpc://HOST:PORT``;
            default: ``CACHE_ENDPOINT``, else the cache of this TrainJob.
        stack: new name -> columns; each becomes one ``[B, n]`` tensor in their place, of the
            smallest dtype that holds them, as in numpy, or `Reading.stack_dtype`.
        batch_format: ``torch``, ``numpy``, ``jax`` (dicts), ``arrow`` (a RecordBatch) or ``polars``
            (a DataFrame). A DataLoader makes tensors of arrays, unless its ``collate_fn`` returns
            what it is given. No ``jax`` and no ``polars`` in DataLoader workers.
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
        data_parallel: instead of ``rank`` and ``world_size``, a `DeviceMesh`: the rows are divided
            over its data parallel dimensions only, so that ranks of one tensor, pipeline or context
            parallel group read the same rows. Or the data parallel process group.
        transform: applied to every batch, in the process that yields it; with ``device``, in a
            background thread and before the copy.
        device: ``cuda``, ``cuda:<n>`` or ``cpu``: batches are copied there in the background, ahead
            of use, see `cache_client.batches.device`. Not in DataLoader workers.
        reading: how rows are fetched, and lie in batches.
        version: which version is read. ``ready``: the newest one that is ready. ``each-epoch``:
            every epoch reads the newest version that is ready when the first rank begins it; see
            `set_epoch`. All ranks need the same ``job``. ``now``: likewise, and a running epoch
            goes over to a newer version with more rows at a border of steps, see `amend`; use
            `loader` for workers. ``first-rows``: the newest one, as soon as
            its first rows are loaded. Epoch 0 then takes the rows in the order in which they were
            loaded, shuffled in groups. Later epochs have a shuffle of all rows. You must use the
            same on all ranks.
        job: name under which the cache shows this reader; default: ``CACHE_JOB``, the name of the
            TrainJob, torchrun's run id or Slurm's job number. Processes of one name must be ranks
            of one job: see RanksDisagreeError.
        audit: whether a digest is kept of the rows that this rank was given, for `cachectl audit`.
            ``reports``: the cache has it. ``states``: `state_dict` has it, too; then the states of
            the ranks differ, and an audit needs all of them. It costs 1 to 2 ns of CPU time a row.
        decode: binary column -> ``rgb``, ``gray`` or ``unchanged``: its encoded images become
            uint8 pixels, see `cache_client.batches.images`.
        nulls: what tensors have for nulls of numbers: column -> value, or ``mask``, which adds
            ``<column>.valid``. Default: NaN in floats; a pass refuses nulls of other numbers by
            name. Record batches and frames have their nulls. See "Values" in the guide.
        skip_steps: epoch -> steps to leave out, as after a spike of the loss. Steps count from the
            begin of the epoch, with this batch size and world size, as if none was left out. States
            keep the rows that they name.
        replay: a state from before some rows were given that are forgotten by now. The dataset
            reads on from there in the order that the job had, without these rows. The steps stay,
            and their batches are shorter, or empty where all rows were forgotten.
        without: with ``replay``: what `cachectl forget` attested.
        fill: with ``replay``: later rows move up, so that batches are full.

    Raises:
        ConfigError: quotes every bad argument. TypeError: says where an unknown one is.
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed; with
            ``version="first-rows"``, a pass raises LoadError when the load fails.
        NotReadyError, NodeUnavailableError: still loading, or no answer, at the deadline.
        RanksDisagreeError: by a pass: an earlier rank of this job reads by other settings, or is
            the same rank.

    Thread-safety: iterate, and change epoch and state, from one thread at a time.
    """

    @names_explained(moved_arguments)
    def __init__(
        self,
        name: str,
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        view: View | None = None,
        cache: Connection | str | None = None,
        shuffle: bool = False,
        shuffle_block_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pad_mask: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: DeviceMesh | ProcessGroup | None = None,
        batch_format: BatchFormat = "torch",
        stack: Mapping[str, Sequence[str]] | None = None,
        decode: Mapping[str, ImageMode] | None = None,
        nulls: Nulls | None = None,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        reading: Reading | None = None,
        version: Version = "ready",
        job: str | None = None,
        audit: AuditMode = "off",
        skip_steps: Mapping[int, Iterable[int]] | None = None,
        replay: Mapping[str, Any] | None = None,
        without: Mapping[str, Any] | str | None = None,
        fill: bool = False,
    ) -> None:
        config = checked_config(
            name,
            batch_size=batch_size,
            columns=columns,
            view=view,
            cache=cache,
            shuffle=shuffle,
            shuffle_block_size=shuffle_block_size,
            seed=seed,
            drop_last=drop_last,
            pad_mask=pad_mask,
            rank=rank,
            world_size=world_size,
            data_parallel=data_parallel,
            batch_format=batch_format,
            stack=stack,
            decode=decode,
            nulls=nulls,
            transform=transform,
            device=device,
            reading=reading,
            version=version,
            job=job,
            audit=audit,
            skip_steps=skip_steps,
        )
        if version == "now":
            check_amendable(config.view)
        self._begin(config, open_version(config, epoch=None if version == "ready" else 0))
        if replay is not None and without is not None:
            self._replay(replay, without, fill=fill)
        elif replay is not without or fill:
            raise ConfigError(
                f"replay, without and fill go together, got replay={replay!r:.80}, "
                f"without={without!r:.80}, fill={fill!r}"
            )

    def _begin(self, config: JobConfig, opened: Opened) -> None:
        super().__init__(config, opened)
        self._asked: Asked | None = None  # what is read from the next border of steps on
        self._num_amended = 0

    def amend(
        self,
        *,
        view: View | None = None,
        version: Literal["newest", "same"] = "newest",
        after: int | None = None,
    ) -> None:
        """Changes what is read in the midst of an epoch; rows that were given do not come again.

        From the position of the job on, the epoch gives the rows that are due by the new view and
        version and were not given yet, each as often as it is due: rows that became due come, and
        rows that are not due any more do not. All rows of the rest are shuffled. Later epochs read
        the new view and version. A running pass continues with them, also with the workers of
        `loader`. `state_dict`, `load_state_dict`, ``skip_steps`` and audits count it.

        Call it on every rank, after the same step.

        Args:
            view: from now on; default: as before. Its ``codes``, ``join`` and ``pad_lists`` are
                those of before.
            version: ``newest``: the newest one that is ready, the same for all ranks of the job.
                It must begin with the rows of the version that is read now, as after an append.
                ``same``: as before.
            after: steps of this pass after which the change counts; default: those that were
                taken. A later step needs a pass that runs.

        Raises:
            ConfigError: quotes a bad argument; a view whose samples are not single rows; a version
                with other rows; DataLoader workers of another loader run.
            NotReadyError, NodeUnavailableError: no answer at the deadline.
        """
        if self._replayed:
            raise ConfigError(
                "a replay cannot be amended: it gives the order that the job had. Give a state of "
                "after the amendment, or take the rows in a job of its own"
            )
        if version not in ("newest", "same"):
            raise ConfigError(f"version must be 'newest' or 'same', got {version!r}")
        wanted = self.view if view is None else view
        if not isinstance(wanted, View):
            raise ConfigError(f"view must be a View, got {view!r}")
        check_amendable(self.view)
        if self._opened.set_until:
            raise ConfigError(
                "an epoch whose weights training set cannot be amended: its weights are of the row "
                "ids of one version. Change the weights of the next epoch, or begin another job"
            )
        text = check_amendable(wanted)
        if self._loading is not None:
            raise ConfigError(
                f"dataset {self.name!r} is loading, so its rows are not all known: amend the epoch "
                "after the first"
            )
        config = replace(self._config, view=wanted.with_columns_of(self.view))
        pass_, now = self._passes.current(), partial(self._amend, config, text, version)
        taken = 0 if pass_ is None else pass_.handed_out - pass_.ahead
        if self._cursor.has_workers and (pass_ is None or not pass_.of_loader):
            raise ConfigError(
                "running DataLoader workers would read on as before: call amend in a loop over "
                "dataset.loader(), or delete the iterator, and a loader of persistent workers, "
                "before"
            )
        steps = taken if after is None else as_integer(after)
        if steps == taken:
            now()
        elif pass_ is None or steps is None or not taken < steps <= len(pass_.steps):
            raise ConfigError(
                f"after={after!r} must be a step of the pass that runs, from the {taken} that were "
                "taken on"
            )
        else:
            pass_.amend_after, pass_.amend = steps, now

    def _amend(
        self, config: JobConfig, text: str, version: str, *, at_border: bool = False
    ) -> None:
        pass_ = self._passes.current()
        epoch, consumed = self._cursor.planned() if pass_ is None else pass_.position
        before = self._state(epoch, consumed)
        at = slots_consumed(before, self._slots.num_slots(epoch))
        self._num_amended += not at_border
        number = 0 if at_border else self._num_amended
        latest = agreed_version(config, epoch, at, number, self._opened, same=version == "same")
        self._amend_to(config, text, Start(epoch, consumed), at, latest)

    def _amend_to(
        self, config: JobConfig, text: str, start: Start, at: int, latest: Opened
    ) -> None:
        """Reads a version and a view from a position of an epoch on."""
        pass_, (epoch, consumed) = self._passes.current(), start
        shards = self._opened.shards
        notes = self._known_notes(latest.shards.erased.acts)
        told = AmendedPart(epoch, 0, shards.num_rows, self.view.rows.text, shards.erased.until)
        history = self._history or (told._replace(epoch=0),)
        if parts_of(history, epoch)[-1][2:] != told[2:]:  # the epoch began with another version
            history = (*history, told)
        until = latest.shards.erased.until
        now = AmendedPart(epoch, at, latest.shards.num_rows, text, until)
        history = (*(part for part in history if part[:2] < now[:2]), now)
        self._first_view = self._first_view or self.view
        with self._keeping_version():
            self._opened = open_parts(config, epoch, history, latest, self._opened, notes)
            self._config, self._history, self._notes = config, history, notes
            runs, stop = self._skipped.get(epoch, ()), self._slots.num_slots(epoch)
            if runs:
                cut = [(start, min(end, stop)) for start, end in runs if start < stop]
                self._skipped = {**self._skipped, epoch: tuple(cut)}
            self._cursor.set(epoch, consumed, num_steps=self._plan(consumed, epoch).num_steps)
        self._cursor.tell()
        self._tell_version()
        if pass_ is not None:
            pass_.superseded = True
        self._passes.forget()

    def _leave_out_erased(self) -> None:
        """Leaves out the rows that were erased since a state, from its position on."""
        if self._loses_rows and get_worker_info() is None:
            start, shards = self._cursor.planned(), self._opened.shards
            latest = open_version(self._config, fingerprint=shards.fingerprint)
            at = slots_consumed(self._state(*start), self._slots.num_slots(start.epoch))
            self._amend_to(self._config, self.view.rows.text, start, at, latest)

    @property
    def _loses_rows(self) -> bool:
        """Whether rows were erased since this was opened, and an amendment can leave them out."""
        is_fixed = self._loading is not None or self._replayed or self._opened.set_until
        if is_fixed or not len(self._opened.left_out.rows):
            return False
        try:
            check_amendable(self.view)
        except ConfigError:
            return False
        return True

    def _place(self, pass_: Pass, start: Start) -> Pass:
        if not pass_.in_worker and pass_.most_steps is None and not self._replayed:
            pass_.on_step = partial(self._at_step, pass_)
        return super()._place(pass_, start)

    def _at_step(self, pass_: Pass) -> None:
        """Takes a newer version at a border of steps, and leaves out rows that were erased."""
        step, left = pass_.handed_out, len(pass_.steps) - pass_.handed_out
        if self._config.version != "now":
            if self.world_size == 1 and left > 0 and self._loses_rows and not pass_.ahead:
                self._amend(self._config, self.view.rows.text, "same")
        elif step % borders.STEPS == borders.STEPS // 2 and left > borders.STEPS // 2:
            epoch, consumed = pass_.epoch, pass_.plan.rows_consumed
            consumed += (step + borders.STEPS // 2) * pass_.plan.rows_per_step
            at = slots_consumed(self._state(epoch, consumed), self._slots.num_slots(epoch))
            self._asked = Asked(partial(has_news, self._config, epoch, at, self._opened))
        elif step % borders.STEPS == 0 and left > 0 and self._asked is not None:
            asked, self._asked = self._asked, None
            if asked.answer():
                with suppress(OtherRowsError):  # the next epoch takes them
                    self._amend(self._config, self.view.rows.text, "newest", at_border=True)

    @property
    def _changes_version(self) -> bool:
        """Whether epochs differ in the version, or in how it is read."""
        return self._config.version != "ready"

    def _open_version(self, *, epoch: int | None = None, fingerprint: str = "") -> None:
        """Takes a version: of this fingerprint or epoch, else the newest."""
        self._opened = open_version(
            self._config, self._opened, epoch=epoch, fingerprint=fingerprint
        )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass read ``epoch``; also reaches persistent DataLoader workers.

        Setting the epoch that is set already changes nothing: a loaded state stays. In a loop over
        epochs, call it before ``iter(loader)`` or a `for` over the loader.

        With ``version="each-epoch"`` another epoch also takes the version of that epoch. The cache
        remembers it for all ranks of the job for the time of a lease, ten minutes by default. So
        ranks must begin an epoch within this time. Passes that run keep their version.

        Raises:
            ConfigError: quoting an epoch that is no integer in [0, 2**62]; or DataLoader workers
                have begun another epoch, and no batch of it is taken yet.
            NotReadyError, NodeUnavailableError: with ``version="each-epoch"``, no answer at the
                deadline; with ``version="first-rows"``, the version is not loaded by then.
        """
        before = self._opened
        with self._keeping_version():
            if epoch != self._cursor.epoch and is_epoch(epoch):
                if self._history and epoch <= self._history[-1].epoch:  # the job begins anew
                    self._history = (self._history[-1]._replace(epoch=0, at=0),)
                self._opened = as_in_other_epochs(self._opened, self.view.text)
                if self._changes_version:
                    self._open_version(epoch=epoch)
                elif self.world_size == 1 and self._loses_rows:
                    self._open_version(fingerprint=self._opened.shards.fingerprint)
                self._know_weights(epoch)
                self._note_epoch(epoch, before)
            super().set_epoch(epoch)
        self._tell_version()

    def _note_epoch(self, epoch: int, before: Opened) -> None:
        """Notes where the epoch begins with another version, or without other rows."""
        shards, text = self._opened.shards, self.view.rows.text
        is_same = shards.erased.until == before.shards.erased.until
        if self._replayed or (not self._history and is_same):
            return
        was = before.shards.num_rows, text, before.shards.erased.until
        now = AmendedPart(epoch, 0, shards.num_rows, text, shards.erased.until)
        history = self._history or (AmendedPart(0, 0, *was),)
        if parts_of(history, epoch)[-1][2:] != now[2:]:
            self._first_view = self._first_view or self.view
            self._notes = with_notes(self._notes, before, text, shards.erased.acts)
            self._history = (*history, now) if epoch else (now,)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass start at the position of a state.

        It takes constant time, unless the job was amended. It holds for one pass; a pass that is
        given up after one batch does not use it up. After that, passes are over the whole epoch
        until `set_epoch`. Call this before ``iter(loader)``.

        With ``version="each-epoch"``, a state inside an epoch takes its version, if the cache still
        has it. A state at the end of an epoch takes the version of the next epoch.

        Raises:
            ConfigError: it is no state, one of another order (seed, shuffle), or a worker's of
                another number of workers or another size of steps; or DataLoader workers have
                begun a pass elsewhere, and no batch of it is taken yet.
            StaleVersionError: it is of another dataset or fingerprint; names both. With
                ``version="each-epoch"``: the cache does not have the version any more.
        """
        if self._replayed:
            raise ConfigError("a replay has its state: give it as replay= to a new dataset")
        if isinstance(state_dict, Mapping) and state_dict.get("replayed") == "filled":
            raise ConfigError(
                "the state is of a replay, whose order only a replay has: give it as replay= to a "
                "dataset, with its without= and fill=True"
            )
        with self._keeping_version():
            changes = self._changes_version
            state_dict = self._take_history(state_dict)
            super().load_state_dict(self._followed(state_dict) if changes else state_dict)
            self._leave_out_erased()
        self._tell_version()

    def _followed(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes the version that a state needs; returns the state, of that version."""
        try:
            state = read_state(state_dict)
        except ValueError as error:
            raise ConfigError(f"bad state: {error}") from None
        if state.dataset != self._opened.name:
            return state_dict  # is refused
        if self._config.version == "first-rows":
            self._open_version(epoch=state.epoch)
            return state_dict
        if state.rows_consumed:
            version = state.fingerprint.partition("-")[0]
            if self._opened.shards.fingerprint != version:
                self._open_version(fingerprint=version)
            return state_dict
        self._open_version(epoch=state.epoch)
        return {**state_dict, "fingerprint": self.fingerprint}

    @contextmanager
    def _keeping_version(self) -> Iterator[None]:
        """Where the epoch stays, its version stays too."""
        before = self._config, self._opened, self._history, self._skipped, self._notes
        try:
            yield
        except CacheError:
            self._config, self._opened, self._history, self._skipped, self._notes = before
            raise

    def _tell_version(self) -> None:
        is_told = self._changes_version or self._opened.set_until or self._shared_counts.version
        if is_told and get_worker_info() is None:
            self._shared_counts.version = self._version_number

    @property
    def _version_number(self) -> int:
        return number_of(self.fingerprint)

    def _enter_epoch(self, epoch: int) -> None:
        """Takes the version of the training process, in a worker that is older.

        Raises:
            ConfigError: it is that of a loaded state.
        """
        wanted = self._shared_counts.version
        if not self._changes_version:
            self._follow_weights(epoch, wanted)
            return
        if wanted in (0, self._version_number):
            return
        self._open_version(epoch=epoch)
        if wanted != self._version_number:
            raise ConfigError(
                f"a running DataLoader worker cannot take the version of epoch {epoch}, which a "
                "loaded state has: make the loader after load_state_dict"
            )

    def _state(self, epoch: int, rows_consumed: int) -> OrderState:
        erased = self._opened.shards.erased.until
        state = super()._state(epoch, rows_consumed)
        state = replace(
            state, erased=erased, replayed=self._replayed, set_weights=self._opened.set_until
        )
        if erased or len(self._opened.left_out.rows) or self._notes:
            state = replace(state, notes=self._known_notes())
        if self._history:
            opened, slots = self._opened, self._opened.slots
            if isinstance(slots, AmendedView) and slots.epoch != epoch:
                opened = as_in_other_epochs(opened, self.view.text)
            return replace(
                state, amended=self._history, view=self.view.text, fingerprint=opened.fingerprint
            )
        if self._loading is None or epoch == 0:
            return state
        return replace(state, fingerprint=self._opened.shards.fingerprint)

    def vocabulary(self, column: str) -> Vocabulary:
        """The vocabulary of a column of ``codes``.

        Raises:
            ConfigError: the column has no codes, or is hashed to buckets.
        """
        return self._opened.job_view.vocabulary(column)

    @property
    def _title(self) -> str:
        return self.name

    def _facts(self) -> dict[str, Any]:
        given, loading = self.view.given(), self._loading
        num_rows = self._opened.shards.num_rows if loading is None else loading.log.total
        return {
            "fingerprint": self.fingerprint,
            "num_samples": self.num_samples if given and loading is None else None,
            "table_rows" if given else "num_rows": num_rows,
            "columns": self._opened.layout.logical.names,
            "view": self.view if given else None,
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "shuffle": self._config.shuffle.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
        }


def dataset_of(config: JobConfig, opened: Opened) -> CacheIterableDataset:
    """A dataset that reads what was opened before."""
    made = CacheIterableDataset.__new__(CacheIterableDataset)
    made._begin(config, opened)
    return made
