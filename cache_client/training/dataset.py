"""`CacheIterableDataset`: the batches of one rank, in an exact and resumable order.

Checks the arguments, and reads one version; `cache_client.training.base` does the rest.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import torch
from torch.utils.data import get_worker_info

from cache_client.batches.device import find_device
from cache_client.batches.images import ImageMode, decode_problems
from cache_client.job.arguments import BatchFormat, argument_problems, integer_or_problem
from cache_client.job.parallel_groups import rank_in_group, rank_in_mesh
from cache_client.job.ranks import (
    find_credentials,
    find_endpoint,
    find_job,
    find_rank,
    find_ready_deadline_s,
    is_of_one_process,
)
from cache_client.order.audit import AUDIT_MODES, AuditMode
from cache_client.order.order import EpochOrder, StepPlan
from cache_client.order.states import OrderState, read_state
from cache_client.reading.shard_maps import wait_for_plan
from cache_client.reading.source import Source
from cache_client.reading.window_sizes import MESSAGE_BYTES, WindowSizes
from cache_client.training.base import RankBatches, is_epoch
from cache_client.training.first_epoch import LoadingSource
from cache_client.view_options.columns import VersionNodes
from cache_client.view_options.job_view import JobView
from cache_client.view_options.lookups import Vocabulary
from cache_client.view_options.options import (
    ViewOptions,
    make_view,
    read_plan,
    view_problems,
    without_nones,
)
from cache_client.views.view import LoggedView, Shuffle
from cache_protocol.errors import CacheError, ConfigError, checked
from cache_protocol.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MAX_MESSAGE_BYTES = 2**31 - 1  # of Arrow's own; what is asked for is half of it at most
_MAX_PREFETCHED = 2**31 - 1


# What `CacheIterableDataset._open_version` sets.
_OF_VERSION = ("_source", "_version_name", "_job_view", "_layout", "_sizes", "_observer_of")


class _Asked(NamedTuple):
    """The arguments with which every version is opened."""

    options: ViewOptions
    columns: tuple[str, ...]
    ready_deadline_s: float
    local: bool
    message_bytes: int
    prefetch_batches: int | None


class CacheIterableDataset(RankBatches):
    """Ready batches of one rank; iterate ``dataset.loader(num_workers=n)``, or the dataset.

    The batches, joined over (step, rank), are exactly the order of the epoch, for any number of
    ranks, workers, nodes and replicas. Every rank has the same number of steps.

    A batch is a dict from column to value: numbers are tensors of shape ``[B]``, fixed-size lists
    ``[B, n]``, strings a list of ``str``, lists of numbers a list of 1-d tensors (a Python list
    where one holds a null). bools are ``torch.bool``. They may be changed in place. A
    single column is contiguous. Stacks and fixed-size lists share the memory of a window: one that
    you keep keeps the others, so copy what is to stay. The last step of an epoch may be short;
    where it has fewer rows than there are ranks, some ranks take a row that another has, too: see
    `cache_client.order.order`.

    Args:
        dataset: name of a dataset in the cache.
        endpoint: ``grpc://HOST:PORT`` of any node; default: ``CACHE_ENDPOINT``, else the cache of
            this TrainJob.
        batch_size: rows of this rank in a full step.
        columns: to read, in this order; default: all.
        stack: new name -> columns; each becomes one ``[B, n]`` tensor in their place.
        stack_dtype: of every stack; default: the smallest that holds its columns, as in numpy.
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
        device_mesh: a `DeviceMesh`; the rows are divided over its data parallel dimensions only, so
            that ranks of one tensor, pipeline or context parallel group read the same rows.
        process_group: the data parallel group, instead of a mesh.
        transform: applied to every batch, in the process that yields it; with ``device``, in a
            background thread and before the copy.
        device: ``cuda``, ``cuda:<n>`` or ``cpu``: batches are copied there in the background, ahead
            of use, see `cache_client.batches.device`. Not in DataLoader workers.
        message_bytes: target size of one message of a node, in whole batches. A window has 4 to 8
            messages, fewer if batches are large. The default was measured over loopback. Windows
            from files of this machine are larger.
        prefetch_batches: about how many to fetch ahead, at least three windows; default: 32, but at
            most 256 MiB.
        deadline_s: how long to wait for a cache that loads, or for nodes that do not answer. For
            the load, ``CACHE_READY_DEADLINE_S`` of the environment may give more.
        local: read shards of nodes on this machine from their files, in this process.
        copy: give each single column contiguous memory that keeps no other rows; False: columns
            are strided views of the rows of a window, which costs less where they are many.
        job: name under which the cache shows this reader; default: ``CACHE_JOB``, the name of the
            TrainJob, torchrun's run id or Slurm's job number.
        audit: whether a digest is kept of the rows that this rank was given, for `cachectl audit`.
            ``reports``: the cache has it. ``states``: `state_dict` has it, too; then the states of
            the ranks differ, and an audit needs all of them. It costs 1 to 2 ns of CPU time a row.
        decode: binary column -> ``rgb``, ``gray`` or ``unchanged``: its encoded images become
            uint8 pixels, see `cache_client.batches.images`.
        skip_steps: epoch -> steps to leave out, as after a spike of the loss. Steps count from the
            begin of the epoch, with this batch size and world size, as if none was left out. States
            keep the rows that they name.
        follow: ``epoch``: every epoch reads the newest version of the dataset that is ready when
            the first rank begins it; see `set_epoch`. All ranks need the same ``job``. Default:
            the version that is the newest now.
        wait: ``ready``: until the version is loaded. ``first-rows``: until its first rows are.
            Epoch 0 then takes the rows in the order in which they were loaded, shuffled in groups.
            Later epochs have a shuffle of all rows. You must use the same on all ranks.
        token, token_file: show the cache who you are; default: ``CACHE_TOKEN`` or
            ``CACHE_TOKEN_FILE``. The file is read again when it changes. A pickle of the
            dataset has the token.
        tls_ca: file of the certificates that sign those of the nodes; default: ``CACHE_TLS_CA``.
        view: what to read other than each row once, see `ViewOptions`.

    Raises:
        ConfigError: quotes every bad argument.
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed; with
            ``wait="first-rows"``, a pass raises LoadError when the load fails.
        NotReadyError, NodeUnavailableError: still loading, or no answer, at the deadline.

    Thread-safety: iterate, and change epoch and state, from one thread at a time.
    """

    _source: Source

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
        decode: Mapping[str, ImageMode] | None = None,
        skip_steps: Mapping[int, Iterable[int]] | None = None,
        follow: Literal["epoch"] | None = None,
        wait: Literal["ready", "first-rows"] = "ready",
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
        options = without_nones(view)
        problems += view_problems(options, batch_format=batch_format, stacks=bool(stack))
        problems += decode_problems(decode, batch_format)
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
        if follow not in (None, "epoch"):
            problems.append(f"follow must be 'epoch' or None, got {follow!r}")
        if follow and who and who.world_size > 1 and is_of_one_process((named_job or ("",))[0]):
            problems.append(
                "follow='epoch' with several ranks needs a job of one name for all of them: pass "
                "job, or set CACHE_JOB"
            )
        if wait not in ("ready", "first-rows"):
            problems.append(f"wait must be 'ready' or 'first-rows', got {wait!r}")
        if wait == "first-rows":
            others = {"follow": follow, "skip_steps": skip_steps, **options}
            refused_with = [name for name, value in others.items() if value is not None]
            if refused_with:
                problems.append(
                    f"wait='first-rows' excludes {', '.join(refused_with)}: the rows of the first "
                    "epoch are not all known when it begins"
                )
            if shuffle is False:
                problems.append(
                    "wait='first-rows' needs shuffle=True: rows come in the order in which they "
                    "are loaded, which is not that of the source"
                )
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
        self._rank_is_given = bool(named)
        self.shuffle = shuffle
        self.shuffle_block_size = (
            None if shuffle_block_size is None else operator.index(shuffle_block_size)
        )
        self.seed = operator.index(seed)
        self.drop_last = drop_last
        self._pad_mask = pad_mask
        self._transform = transform
        self._device = target
        self._deadline_s = float(deadline_s)
        self._stack, self._stack_dtype, self._batch_format = stack, stack_dtype, batch_format
        self._decode = decode
        # Copies to a device are contiguous anyway.
        self._copy = copy and (target is None or transform is not None)
        self._job, self._job_is_named = named_job
        self._audit = audit
        self._follows, self._waits_for_rows = follow is not None, wait == "first-rows"
        self._asked: _Asked | None = _Asked(
            options,
            () if columns is None else tuple(columns),
            find_ready_deadline_s(self._deadline_s),
            local,
            operator.index(message_bytes),
            None if prefetch_batches is None else operator.index(prefetch_batches),
        )
        self._open_version(epoch=0 if self._changes_version else None)
        self._nodes = self._source.shards.nodes
        self._prepare(skip_steps)
        if not self._changes_version:
            self._asked = None  # it may be large

    @property
    def _changes_version(self) -> bool:
        """Whether epochs differ in the version, or in how it is read."""
        return self._follows or self._waits_for_rows

    def _open_version(self, *, epoch: int | None = None, fingerprint: str = "") -> None:
        """Takes a version: of this fingerprint or epoch, else the newest. Refuses bad arguments."""
        asked, before = self._asked, getattr(self, "_source", None)
        assert asked is not None
        follow, known_groups = None, None
        if self._waits_for_rows:
            known_groups = 0 if epoch == 0 else None
            if before is not None:  # all epochs are of one version
                fingerprint = before.shards.fingerprint
                if (known_groups is None) == (before.shards.log is None):
                    return
        elif epoch is not None:
            follow = pb.EpochOfJob(job=self._job, epoch=epoch)
        shards, chosen, hidden = read_plan(
            asked.options,
            asked.columns,
            lambda names: wait_for_plan(
                self.endpoint, self.name, names, asked.ready_deadline_s, self._credentials,
                fingerprint=fingerprint, follow=follow, known_groups=known_groups,
                others=() if before is None else before.shards.locations(self.endpoint),
            ),
        )  # fmt: skip
        is_same = before is not None and before.shards.fingerprint == shards.fingerprint
        if is_same and not self._waits_for_rows:
            return
        shuffle = Shuffle(self.shuffle, self.shuffle_block_size, self.seed)
        if shards.log is not None:
            self._source = LoadingSource(
                self.endpoint, shards, chosen, self._credentials,
                deadline_s=self._deadline_s, local=asked.local,
                shuffle=shuffle, ready_deadline_s=asked.ready_deadline_s,
            )  # fmt: skip
            job_view = JobView(LoggedView(shards.log))
        else:
            version = VersionNodes(
                self.endpoint, shards, self._credentials, self._deadline_s, self.rank
            )
            job_view = make_view(
                asked.options,
                version,
                shuffle,
                self._batch_format,
                hidden=hidden,
                ready_deadline_s=asked.ready_deadline_s,
            )
            self._source = Source(
                self.endpoint, shards, chosen, self._credentials,
                deadline_s=self._deadline_s, local=asked.local,
            )  # fmt: skip
        self._version_name, self._job_view = shards.dataset, job_view
        self._layout = shards.layout if job_view.lookups is None else job_view.lookups.layout
        job_view.column_names(self._converter().names, pad_mask=self._pad_mask)
        self._sizes = WindowSizes(
            shards,
            max(1, round(self.batch_size * self._view.rows_per_slot)),
            asked.message_bytes,
            asked.prefetch_batches,
        )
        self._observer_of = None  # reports are of one version

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass read ``epoch``; also reaches persistent DataLoader workers.

        Setting the epoch that is set already changes nothing: a loaded state stays. In a loop over
        epochs, call it before ``iter(loader)`` or a `for` over the loader.

        With ``follow="epoch"`` another epoch also takes the version of that epoch. The cache
        remembers it for all ranks of the job for the time of a lease, ten minutes by default. So
        ranks must begin an epoch within this time. Passes that run keep their version.

        Raises:
            ConfigError: quoting an epoch that is no integer in [0, 2**62]; or DataLoader workers
                have begun another epoch, and no batch of it is taken yet.
            NotReadyError, NodeUnavailableError: with ``follow``, no answer at the deadline; with
                ``wait="first-rows"``, the version is not loaded by then.
        """
        with self._keeping_version():
            if self._changes_version and epoch != self._cursor.epoch and is_epoch(epoch):
                self._open_version(epoch=epoch)
            super().set_epoch(epoch)
        self._tell_version()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass start at the position of a state. Takes constant time.

        It holds for one pass; a pass that is given up after one batch does not use it up. After
        that, passes are over the whole epoch until `set_epoch`. Call this before ``iter(loader)``.

        With ``follow="epoch"``, a state inside an epoch takes its version, if the cache still has
        it. A state at the end of an epoch takes the version of the next epoch.

        Raises:
            ConfigError: it is no state, one of another order (seed, shuffle), or a worker's of
                another number of workers or another size of steps; or DataLoader workers have
                begun a pass elsewhere, and no batch of it is taken yet.
            StaleVersionError: it is of another dataset or fingerprint; names both. With
                ``follow``: the cache does not have the version any more.
        """
        with self._keeping_version():
            changes = self._changes_version
            super().load_state_dict(self._followed(state_dict) if changes else state_dict)
        self._tell_version()

    def _followed(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes the version that a state needs; returns the state, of that version."""
        try:
            state = read_state(state_dict)
        except ValueError as error:
            raise ConfigError(f"bad state: {error}") from None
        if state.dataset != self._version_name:
            return state_dict  # is refused
        if self._waits_for_rows:
            self._open_version(epoch=state.epoch)
            return state_dict
        if state.rows_consumed:
            self._open_version(fingerprint=state.fingerprint.partition("-")[0])
            return state_dict
        self._open_version(epoch=state.epoch)
        return {**state_dict, "fingerprint": self.fingerprint}

    @contextmanager
    def _keeping_version(self) -> Iterator[None]:
        """Where the epoch stays, its version stays too."""
        before = {name: self.__dict__[name] for name in _OF_VERSION}
        try:
            yield
        except CacheError:
            self.__dict__.update(before)
            raise

    def _tell_version(self) -> None:
        if self._changes_version and get_worker_info() is None:
            self._shared_counts.version = self._version_number

    @property
    def _version_number(self) -> int:
        return int(hashlib.sha256(self.fingerprint.encode()).hexdigest()[:15], 16)

    def _enter_epoch(self, epoch: int) -> None:
        """Takes the version of the training process, in a worker that is older.

        Raises:
            ConfigError: it is that of a loaded state.
        """
        told = self._shared_counts.version
        if not self._changes_version or told in (0, self._version_number):
            return
        self._open_version(epoch=epoch)
        if told != self._version_number:
            raise ConfigError(
                f"a running DataLoader worker cannot take the version of epoch {epoch}, which a "
                "loaded state has: make the loader after load_state_dict"
            )

    def _state(self, epoch: int, rows_consumed: int) -> OrderState:
        state = super()._state(epoch, rows_consumed)
        if self._loading is None or epoch == 0:
            return state
        return replace(state, fingerprint=self._source.shards.fingerprint)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version; with a view, of both."""
        identity = self._job_view.identity
        if not identity:
            return self._source.shards.fingerprint
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return f"{self._source.shards.fingerprint}-{digest}"

    def vocabulary(self, column: str) -> Vocabulary:
        """The vocabulary of a column of ``codes``.

        Raises:
            ConfigError: the column has no codes, or is hashed to buckets.
        """
        return self._job_view.vocabulary(column)

    def __repr__(self) -> str:
        parts = {
            "fingerprint": self.fingerprint,
            "num_rows": self.num_rows if self._loading is None else self._loading.log.total,
            "columns": self._layout.logical.names,
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        rest = ", ".join(f"{name}={value!r}" for name, value in parts.items())
        return f"{type(self).__name__}({self.name!r}, {rest})"
