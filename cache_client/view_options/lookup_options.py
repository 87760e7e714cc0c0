"""Options of a job that look columns up: codes of a vocabulary, columns of another dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cache_client.flight.routing import ShardMap
from cache_client.reading.counts import ReadCounts
from cache_client.reading.rows import Rows, join
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.source import Source
from cache_client.view_options.columns import VersionNodes, row_values
from cache_client.view_options.lookups import (
    CodesLookup,
    Frequent,
    Join,
    JoinLookup,
    Lookup,
    Lookups,
    Rule,
    Vocabulary,
    frequent_vocabulary,
    hash_codes,
    join_index,
    sorted_vocabulary,
)
from cache_client.view_options.options import View
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import SlotView, as_keys, quoted
from cache_protocol.errors import ConfigError, some_of

_FETCHED_ROWS: Final = 65_536  # of a joined dataset, at once


def coded(options: View) -> Mapping[str, Rule]:
    """The columns that become codes, and how."""
    codes = options.codes or {}
    return codes if isinstance(codes, Mapping) else dict.fromkeys(codes, "sorted")


def columns_to_read(
    options: View, names: Sequence[str], asked: Sequence[str]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The columns that rows are read with, and which of them a batch does not show.

    Args:
        names: all columns of the version.
        asked: by the caller; empty for all.

    Raises:
        ConfigError: a column that becomes codes does not exist.
    """
    codes = coded(options)
    unknown = [name for name in (*codes, *(options.join or {})) if name not in names]
    if unknown:
        raise ConfigError(f"no column {unknown[0]!r}; columns: {some_of(names, like=unknown[0])}")
    read = tuple(name for name in (asked or names) if name not in codes)
    if read:
        return read, frozenset()
    first = next(iter(codes))  # a request without columns would be one for all
    return (first,), frozenset({first})


def make_lookups(
    options: View,
    version: VersionNodes,
    view: SlotView,
    hidden: frozenset[str],
    *,
    ready_deadline_s: float,
) -> Lookups | None:
    """The lookups that the options ask for; None without any.

    Args:
        version: with the columns that are read.
        view: its rows must all have a row in the joined datasets.
        hidden: columns that are read and not shown.
        ready_deadline_s: how long to wait for a joined dataset that loads.

    Raises:
        ConfigError: a key has no row in the other dataset, or two; or columns have one name.
        DatasetNotFoundError, LoadError, NotReadyError: of a joined dataset.
        RequestError, NodeUnavailableError: as `row_values`.
    """
    made: list[Lookup] = [
        _codes(column, rule, _values(column, version)) for column, rule in coded(options).items()
    ]
    for key, other in (options.join or {}).items():
        joined = other if isinstance(other, Join) else Join(other)
        made.append(_join(key, joined, version, view, ready_deadline_s))
    return Lookups(version.shards.layout, tuple(made), hidden) if made else None


def _values(column: str, version: VersionNodes) -> pa.ChunkedArray:
    found: pa.ChunkedArray = as_keys(row_values(version, quoted(column)))
    return found


def _codes(column: str, rule: Rule, found: pa.ChunkedArray) -> CodesLookup:
    kind = found.type
    if pt.is_nested(kind):
        raise ConfigError(f"codes need single values, and column {column!r} is {kind}")
    if isinstance(rule, int):
        return CodesLookup(column, SharedArray(hash_codes(found, rule)), None, f"{rule} buckets")
    if isinstance(rule, Vocabulary):
        vocabulary = rule
    elif isinstance(rule, Frequent):
        vocabulary = frequent_vocabulary(found, rule)
    else:
        vocabulary = sorted_vocabulary(found)
    parts = [vocabulary.encode(chunk) for chunk in found.chunks]
    codes = np.concatenate([np.empty(0, np.int32), *parts])
    return CodesLookup(column, SharedArray(codes), vocabulary, vocabulary.digest)


def _join(
    key: str, joined: Join, version: VersionNodes, view: SlotView, ready_deadline_s: float
) -> JoinLookup:
    other_key = joined.key or key
    other = replace(version, shards=_plan(joined, other_key, version, ready_deadline_s))
    others = _values(other_key, other).combine_chunks()
    keys = _values(key, version)
    index = join_index(key, keys, joined.dataset, others)
    needed = view.samples(np.arange(view.num_slots(0)), 0).row_ids
    missing = needed[index[needed] < 0]
    if len(missing):
        raise ConfigError(
            f"join: {key}={keys[int(missing[0])].as_py()!r} of row {missing[0]}, and {key} of "
            f"{len(missing) - 1} more, have no row in dataset {joined.dataset!r}: leave these rows "
            "out by where"
        )
    table = _all_rows(other, version)
    return JoinLookup(
        key,
        joined.dataset,
        other.shards.fingerprint,
        SharedArray(index),
        table.layout,
        {number: SharedArray(matrix) for number, matrix in table.matrices.items()},
        table.arrays,
    )


def _plan(joined: Join, other_key: str, version: VersionNodes, ready_deadline_s: float) -> ShardMap:
    """The shard map of the other dataset, with the columns that a batch gets."""

    def plan(columns: Sequence[str]) -> ShardMap:
        return wait_for_shard_map(
            version.endpoint, joined.dataset, columns, ready_deadline_s, version.credentials
        )

    if joined.columns is not None:
        return plan(tuple(joined.columns))
    others = [name for name in plan(()).layout.logical.names if name != other_key]
    if not others:
        raise ConfigError(f"join: dataset {joined.dataset!r} has no column but {other_key!r}")
    return plan(others)


def _all_rows(other: VersionNodes, version: VersionNodes) -> Rows:
    shards = other.shards
    source = Source(
        version.endpoint,
        shards,
        tuple(shards.layout.logical.names),
        version.credentials,
        deadline_s=version.deadline_s,
        local=True,
    )
    with source.open_reader(
        replica_offset=version.replica_offset, rows_per_message=0, counts=ReadCounts()
    ) as reader:
        pieces = [
            piece
            for start in range(0, max(shards.num_rows, 1), _FETCHED_ROWS)
            for piece in reader.fetch(
                np.arange(start, min(start + _FETCHED_ROWS, shards.num_rows), dtype=np.int64)
            )
        ]
    return join(pieces)
