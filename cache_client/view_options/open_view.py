"""A `View` and a version -> the slots of an epoch, and what makes batches of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from cache_client.flight.routing import ShardMap
from cache_client.job.arguments import BatchFormat
from cache_client.view_options.columns import VersionNodes, row_values
from cache_client.view_options.job_view import JobView
from cache_client.view_options.lookup_options import columns_to_read, make_lookups
from cache_client.view_options.options import View
from cache_client.view_options.sampling import make_sampling
from cache_client.view_options.selection import gone_error, make_selection
from cache_client.view_options.sequences import make_sequences, sequence_columns
from cache_client.views.view import NO_SHUFFLE, Shuffle


def read_shard_map(
    options: View,
    columns: tuple[str, ...],
    plan: Callable[[tuple[str, ...]], ShardMap],
) -> tuple[ShardMap, tuple[str, ...], frozenset[str]]:
    """The shard map of the columns that a job reads, these columns, and those not shown.

    Args:
        columns: that the caller asks for; empty: all.
        plan: columns -> shard map.

    Raises:
        ConfigError: the options have other columns than those asked for.
        CacheError: as ``plan``.
    """
    columns, hidden = sequence_columns(options, columns), frozenset[str]()
    if options.codes is not None or options.join is not None:
        names = plan(()).layout.logical.names
        columns, hidden = columns_to_read(options, names, columns)
    return plan(columns), columns, hidden


def make_view(
    options: View,
    version: VersionNodes,
    shuffle: Shuffle = NO_SHUFFLE,
    batch_format: BatchFormat = "torch",
    *,
    hidden: frozenset[str] = frozenset(),
    ready_deadline_s: float = 60.0,
) -> JobView:
    """The view that the options ask for.

    Args:
        version: to read; nodes compute what a view needs of the values of rows.
        shuffle: of the job.
        batch_format: of the job.
        hidden: columns that are read and not shown.
        ready_deadline_s: how long to wait for a joined dataset that loads.

    Raises:
        ConfigError: quotes every bad option; or it needs values of rows that were erased.
    """
    selection = make_selection(options, version)

    def values(expression: str) -> pa.ChunkedArray:
        if len(version.shards.erased.gone):
            raise gone_error(f"{options}")
        return row_values(version, expression)

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
