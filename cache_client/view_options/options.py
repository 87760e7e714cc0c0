"""The arguments of `CacheIterableDataset` that choose a view, and the view that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from cache_client.flight.routing import ShardMap
from cache_client.job.arguments import BatchFormat
from cache_client.view_options.columns import VersionNodes, row_values
from cache_client.view_options.job_view import JobView
from cache_client.view_options.lookup_options import (
    LookupOptions,
    columns_to_read,
    lookup_problems,
    make_lookups,
)
from cache_client.view_options.sampling import SamplingOptions, make_sampling, sampling_problems
from cache_client.view_options.selection import SelectionOptions, make_selection, selection_problems
from cache_client.view_options.sequences import (
    SequenceOptions,
    make_sequences,
    sequence_columns,
    sequence_problems,
)
from cache_client.views.view import NO_SHUFFLE, Shuffle


class ViewOptions(SelectionOptions, SamplingOptions, SequenceOptions, LookupOptions, total=False):
    """What a job reads of a dataset, other than each row once.

    `SelectionOptions` choose rows. `SamplingOptions` say how often each comes. `SequenceOptions`
    make samples of several of these. `LookupOptions` add columns to each row that is read.
    """


def without_nones(options: ViewOptions) -> ViewOptions:
    """The options that are not None: None stands for an option that is left out."""
    return cast(ViewOptions, {k: v for k, v in options.items() if v is not None})


def view_problems(
    options: Mapping[str, Any], *, batch_format: object = "torch", stacks: bool = False
) -> list[str]:
    """The problems of the options that need no node; each is quoted.

    Args:
        options: as the caller gave them.
        batch_format: of the job.
        stacks: whether the job has a ``stack``.
    """
    problems = [
        f"there is no argument {name}"
        for name in options
        if name not in ViewOptions.__annotations__
    ]
    problems += selection_problems(options) + sampling_problems(options) + lookup_problems(options)
    problems += [
        f"group_by and {name} exclude each other: a group has all its rows"
        for name in ("weights", "per_class", "epoch_rows")
        if "group_by" in options and name in options
    ]
    return problems + sequence_problems(options, batch_format=batch_format, stacks=stacks)


def read_plan(
    options: Mapping[str, Any],
    columns: tuple[str, ...],
    plan: Callable[[tuple[str, ...]], ShardMap],
) -> tuple[ShardMap, tuple[str, ...], frozenset[str]]:
    """The shard map of the columns that a job reads, these columns, and those not shown.

    Args:
        options: without problems.
        columns: that the caller asks for; empty: all.
        plan: columns -> shard map.

    Raises:
        ConfigError: the options have other columns than those asked for.
        CacheError: as ``plan``.
    """
    columns, hidden = sequence_columns(options, columns), frozenset[str]()
    if options.keys() & LookupOptions.__annotations__.keys():
        names = plan(()).layout.logical.names
        columns, hidden = columns_to_read(options, names, columns)
    return plan(columns), columns, hidden


def make_view(
    options: ViewOptions,
    version: VersionNodes,
    shuffle: Shuffle = NO_SHUFFLE,
    batch_format: BatchFormat = "torch",
    *,
    hidden: frozenset[str] = frozenset(),
    ready_deadline_s: float = 60.0,
) -> JobView:
    """The view that the options ask for.

    Args:
        options: without problems.
        version: to read; nodes compute what a view needs of the values of rows.
        shuffle: of the job.
        batch_format: of the job.
        hidden: columns that are read and not shown.
        ready_deadline_s: how long to wait for a joined dataset that loads.

    Raises:
        ConfigError: quotes every bad option.
    """
    selection = make_selection(options, version)
    values = partial(row_values, version)
    job_view = make_sequences(
        options,
        make_sampling(
            options,
            selection,
            shuffle=shuffle,
            columns=version.shards.layout.logical.names,
            values=values,
        ),
        version.shards.layout,
        shuffle=shuffle,
        batch_format=batch_format,
        values=values,
    )
    lookups = make_lookups(options, version, selection, hidden, ready_deadline_s=ready_deadline_s)
    return replace(job_view, lookups=lookups)
