"""What a job asked for: its arguments, checked once and kept as one object."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from cache_client.batches.convert import Converter
from cache_client.batches.device import find_device
from cache_client.batches.images import ImageMode, decode_problems
from cache_client.batches.null_rules import Nulls, nulls_problems
from cache_client.job.arguments import (
    BatchFormat,
    argument_problems,
    flag_problems,
    integer_or_problem,
    integer_problem,
)
from cache_client.job.connection import Access, Connection, access_to
from cache_client.job.parallel_groups import data_parallel_rank
from cache_client.job.ranks import (
    Rank,
    find_job,
    find_rank,
    find_view_options,
    is_of_one_process,
)
from cache_client.order.audit_record import AUDIT_MODES, AuditMode
from cache_client.order.order import EpochOrder, StepPlan
from cache_client.reading.window_sizes import MESSAGE_BYTES, WindowSizes
from cache_client.view_options.options import View
from cache_client.views.view import Shuffle
from cache_protocol.errors import ConfigError, checked
from cache_protocol.storage.layout import Layout

_MAX_MESSAGE_BYTES = 2**31 - 1  # of Arrow's own; what is asked for is half of it at most
_MAX_PREFETCHED = 2**31 - 1

Version = Literal["ready", "each-epoch", "now", "first-rows"]
VERSIONS: tuple[Version, ...] = get_args(Version)


@dataclass(frozen=True)
class Reading:
    """How rows are fetched, and lie in batches. The defaults were measured over loopback.

    Args:
        message_bytes: target size of one message of a node, in whole batches. A window has 4 to 8
            messages, fewer if batches are large. Windows from files of this machine are larger.
        prefetch_batches: about how many to fetch ahead, at least three windows; default: 32, but at
            most 256 MiB.
        copy: give each single column and small stack its own contiguous memory; False: they are
            strided views of the rows of a window, which costs less where they are many.
        stack_dtype: of every ``stack``, a dtype of torch or numpy; default: the smallest that holds
            its columns, as in numpy.
        row_ids: add an int64 column of this name: the number of each row in the version, as
            `set_weights`, `steps_of` and `View(subset=...)` take it.

    Raises:
        ConfigError: quotes every bad argument.
    """

    message_bytes: int = MESSAGE_BYTES
    prefetch_batches: int | None = None
    copy: bool = True
    stack_dtype: torch.dtype | str | None = None
    row_ids: str | None = None

    def __post_init__(self) -> None:
        problems = integer_problem("message_bytes", self.message_bytes, 1, _MAX_MESSAGE_BYTES)
        if self.prefetch_batches is not None:
            problems += integer_problem(
                "prefetch_batches", self.prefetch_batches, 1, _MAX_PREFETCHED
            )
        problems += flag_problems("copy", self.copy)
        if self.row_ids is not None and (not isinstance(self.row_ids, str) or not self.row_ids):
            problems.append(f"row_ids must be the name of a new column, got {self.row_ids!r}")
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What a job asked for. Immutable.

    Attributes:
        access: to the cache.
        columns: to read; empty: all.
        batch_size: rows of a rank in a full step.
        rank_is_given: by an argument, rather than found.
        copy: whether single columns get their own memory.
        others: as the arguments of `CacheIterableDataset`.
    """

    name: str
    access: Access
    view: View
    columns: tuple[str, ...]
    batch_size: int
    rank: Rank
    rank_is_given: bool
    shuffle: Shuffle
    drop_last: bool
    pad_mask: str | None
    batch_format: BatchFormat
    stack: Mapping[str, Sequence[str]] | None
    stack_dtype: torch.dtype | str | None
    decode: Mapping[str, ImageMode] | None
    nulls: Nulls | None
    copy: bool
    transform: Callable[[Any], Any] | None
    device: torch.device | None
    reading: Reading
    version: Version
    job: str
    audit: AuditMode
    skip_steps: Mapping[int, Iterable[int]] | None

    @property
    def rows_per_step(self) -> int:
        """Rows of all ranks together in a full step."""
        return self.rank.world_size * self.batch_size

    @property
    def added(self) -> dict[str, str | None]:
        """Arguments that add a column to batches, each with its name; None: none."""
        return {"pad_mask": self.pad_mask, "row_ids": self.reading.row_ids}

    def steps(self, num_slots: int) -> StepPlan:
        """The steps of an epoch of so many slots."""
        return StepPlan(
            num_slots,
            self.rank.world_size,
            self.batch_size,
            drop_last=self.drop_last,
            pad=self.pad_mask is not None,
        )

    def converter(self, layout: Layout) -> Converter:
        """Makes batches of rows.

        Raises:
            ConfigError: as `Converter`.
        """
        return Converter(
            layout,
            self.stack,
            self.batch_format,
            copy=self.copy,
            stack_dtype=self.stack_dtype,
            decode=self.decode,
            nulls=self.nulls,
        )

    def window_sizes(self, shards: Any, rows_per_slot: float) -> WindowSizes:
        """The sizes of windows and messages."""
        ahead = self.reading.prefetch_batches
        return WindowSizes(
            shards,
            max(1, round(self.batch_size * rows_per_slot)),
            operator.index(self.reading.message_bytes),
            None if ahead is None else operator.index(ahead),
        )


def checked_config(
    name: str,
    *,
    batch_size: int,
    columns: Sequence[str] | None,
    view: View | None,
    cache: Connection | str | None,
    shuffle: bool,
    shuffle_block_size: int | None,
    seed: int,
    drop_last: bool,
    pad_mask: str | None,
    rank: int | None,
    world_size: int | None,
    data_parallel: Any,
    batch_format: BatchFormat,
    stack: Mapping[str, Sequence[str]] | None,
    decode: Mapping[str, ImageMode] | None,
    nulls: Nulls | None,
    transform: Callable[[Any], Any] | None,
    device: torch.device | str | None,
    reading: Reading | None,
    version: Version,
    job: str | None,
    audit: AuditMode,
    skip_steps: Mapping[int, Iterable[int]] | None,
) -> JobConfig:
    """The arguments of `CacheIterableDataset` as one object.

    Raises:
        ConfigError: quotes every bad argument.
    """
    problems = argument_problems(
        name, columns, stack, batch_format=batch_format, transform=transform
    )
    fetched = reading or Reading()
    asked = view or checked(problems, _view_of_environment) or View()
    if not isinstance(asked, View):
        problems.append(f"view must be a View, got {view!r}")
    else:
        problems += asked.problems_with(batch_format=batch_format, stacks=bool(stack))
    if not isinstance(fetched, Reading):
        problems.append(f"reading must be a Reading, got {reading!r}")
        fetched = Reading()
    problems += decode_problems(decode, batch_format) + nulls_problems(nulls)
    if audit not in AUDIT_MODES:
        problems.append(f"audit must be one of {', '.join(AUDIT_MODES)}, got {audit!r}")
    target = checked(problems, lambda: find_device(device))
    if device is not None and batch_format != "torch":
        problems.append(f"device needs batch_format='torch', got {batch_format!r}")
    found_rank = _rank(problems, rank, world_size, data_parallel)
    found_job = checked(problems, lambda: find_job(job))
    access = checked(problems, lambda: access_to(cache))
    checked(problems, lambda: StepPlan(0, 1, batch_size, drop_last=drop_last), ValueError)
    checked(
        problems,
        lambda: EpochOrder(0, shuffle=shuffle, shuffle_block_size=shuffle_block_size, seed=seed),
        ValueError,
    )
    if pad_mask is not None and (not isinstance(pad_mask, str) or not pad_mask):
        problems.append(f"pad_mask must be the name of a new column, got {pad_mask!r}")
    if pad_mask is not None and drop_last:
        problems.append("pad_mask and drop_last exclude each other: one step is short or none")
    others = {
        "row_ids": fetched.row_ids,
        "skip_steps": skip_steps,
        **(asked.given() if isinstance(asked, View) else {}),
    }
    if fetched.row_ids is not None:
        problems += [
            f"row_ids and {many} exclude each other: a sample has several rows"
            for many in ("pack", "group_by")
            if many in others
        ]
    problems += _version_problems(version, found_rank, found_job, shuffle, others)
    if problems or found_rank is None or access is None or found_job is None:
        raise ConfigError("; ".join(problems))
    block_size = None if shuffle_block_size is None else operator.index(shuffle_block_size)
    return JobConfig(
        name=name,
        access=access,
        view=asked,
        columns=() if columns is None else tuple(columns),
        batch_size=operator.index(batch_size),
        rank=found_rank,
        rank_is_given=rank is not None or data_parallel is not None,
        shuffle=Shuffle(shuffle, block_size, operator.index(seed)),
        drop_last=drop_last,
        pad_mask=pad_mask,
        batch_format=batch_format,
        stack=stack,
        stack_dtype=fetched.stack_dtype,
        decode=decode,
        nulls=nulls,
        # Copies to a device are contiguous anyway.
        copy=fetched.copy and (target is None or transform is not None),
        transform=transform,
        device=target,
        reading=fetched,
        version=version,
        job=found_job,
        audit=audit,
        skip_steps=skip_steps,
    )


def _view_of_environment() -> View:
    options = find_view_options()
    try:
        return View(**options)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"CACHE_VIEW: {error}") from None


def moved_arguments() -> dict[str, str]:
    """Names that are arguments of an object, or of `loader` -> what to write."""
    objects = {"view": View, "cache": Connection, "reading": Reading}
    return {
        **{
            each.name: f"now {argument}={kind.__name__}({each.name}=...)"
            for argument, kind in objects.items()
            for each in fields(kind)
        },
        "dataset": "now name",
        "device_mesh": "now data_parallel",
        "process_group": "now data_parallel",
        "follow": 'now version="each-epoch" or version="now"',
        "wait": 'now version="first-rows"',
        **dict.fromkeys(
            ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers"),
            "an argument of loader()",
        ),
    }


def _rank(
    problems: list[str], rank: int | None, world_size: int | None, data_parallel: Any
) -> Rank | None:
    """The rank; adds the problems of the arguments."""
    given = {"rank": rank, "world_size": world_size}
    numbers = [None if n is None else integer_or_problem(problems, k, n) for k, n in given.items()]
    if rank is not None and data_parallel is not None:
        problems.append("rank and data_parallel exclude each other: give one of them")
    if data_parallel is not None:
        return checked(problems, lambda: data_parallel_rank(data_parallel))
    if numbers.count(None) > list(given.values()).count(None):
        return None
    return checked(problems, lambda: find_rank(numbers[0], numbers[1]))


def _version_problems(
    version: object,
    rank: Rank | None,
    job: str | None,
    shuffle: object,
    others: Mapping[str, object],
) -> list[str]:
    """Why a job cannot take its versions so; ``others`` are arguments that need all rows."""
    if version not in VERSIONS:
        return [f"version must be one of {', '.join(VERSIONS)}, got {version!r}"]
    problems = []
    of_one_process = job is not None and is_of_one_process(job)
    if version in ("each-epoch", "now") and rank and rank.world_size > 1 and of_one_process:
        problems.append(
            f"version={version!r} with several ranks needs a job of one name for all of them: pass "
            "job, or set CACHE_JOB"
        )
    if version == "first-rows":
        refused = [name for name, value in others.items() if value is not None]
        if refused:
            problems.append(
                f"version='first-rows' excludes {', '.join(refused)}: the rows of the first epoch "
                "are not all known when it begins"
            )
        if shuffle is False:
            problems.append(
                "version='first-rows' needs shuffle=True: rows come in the order in which they are "
                "loaded, which is not that of the source"
            )
    return problems
