"""Options of a job that look columns up: codes of a vocabulary, columns of another dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cache_client.flight.routing import ShardMap
from cache_client.job.arguments import are_names
from cache_client.reading.counts import ReadCounts
from cache_client.reading.rows import Rows, join
from cache_client.reading.shard_maps import wait_for_plan
from cache_client.reading.source import Source
from cache_client.view_options.columns import VersionNodes, row_values
from cache_client.view_options.lookups import (
    CodesLookup,
    Frequent,
    JoinLookup,
    Lookup,
    Lookups,
    Vocabulary,
    frequent_vocabulary,
    hash_codes,
    join_index,
    sorted_vocabulary,
)
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import View, quoted
from cache_protocol.errors import ConfigError

_MAX_BUCKETS: Final = 2**31
_FETCHED_ROWS: Final = 65_536  # of a joined dataset, at once

Rule = str | int | Frequent | Vocabulary


@dataclass(frozen=True)
class Join:
    """The dataset that a key looks rows up in.

    Args:
        dataset: its name.
        key: its column with the values of the key; default: the same name.
        columns: that a batch gets; default: all others.

    Raises:
        ConfigError: quotes every bad argument.
    """

    dataset: str
    key: str | None = None
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        problems = []
        if not _is_name(self.dataset):
            problems.append(f"dataset must be a name, got {self.dataset!r}")
        if not (self.key is None or _is_name(self.key)):
            problems.append(f"key must be the name of a column, got {self.key!r}")
        if self.columns is not None and not (are_names(self.columns) and len(self.columns)):
            problems.append(f"columns must be a list of names, got {self.columns!r}")
        if problems:
            raise ConfigError("Join: " + "; ".join(problems))


class LookupOptions(TypedDict, total=False):
    """Columns that a batch gets by row number. The client keeps 4 bytes a row for each.

    - codes: columns whose values become int32 codes, or a dict from column to how: ``"sorted"``
      (the default: 1, 2, ... in the order of the values), a `Frequent`, a `Vocabulary` of an
      earlier job, or a number of hash buckets. 0 stands for nulls and unknown values; buckets
      begin at 0. `CacheIterableDataset.vocabulary` has the values.
    - join: dict from a key column to the name of a dataset, or to a `Join`: its columns follow
      those of the batch, from its row with the same key. The client holds that dataset once.
    """

    codes: Sequence[str] | Mapping[str, Rule]
    join: Mapping[str, str | Join]


def coded(options: Mapping[str, Any]) -> Mapping[str, Rule]:
    """The columns that become codes, and how."""
    codes = options.get("codes", {})
    return codes if isinstance(codes, Mapping) else dict.fromkeys(codes, "sorted")


def lookup_problems(options: Mapping[str, Any]) -> list[str]:
    """The problems of the options that need no node; each is quoted."""
    problems: list[str] = []
    codes = options.get("codes", {})
    is_list = isinstance(codes, Sequence) and not isinstance(codes, str)
    if not (isinstance(codes, Mapping) or is_list) or not all(_is_name(name) for name in codes):
        problems.append(f"codes must be columns, or a dict from column to a rule, got {codes!r}")
    else:
        problems += [
            f"codes of {column!r} must be 'sorted', a Frequent, a Vocabulary or a number of "
            f"buckets from 1 to {_MAX_BUCKETS}, got {rule!r}"
            for column, rule in coded(options).items()
            if not _is_rule(rule)
        ]
    joins = options.get("join", {})
    if not isinstance(joins, Mapping) or not all(
        _is_name(key) and (isinstance(other, Join) or _is_name(other))
        for key, other in joins.items()
    ):
        problems.append(f"join must be a dict from a key column to a dataset, got {joins!r}")
    return problems


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_rule(rule: object) -> bool:
    if isinstance(rule, int) and not isinstance(rule, bool):
        return 1 <= rule <= _MAX_BUCKETS
    return isinstance(rule, Frequent | Vocabulary) or (isinstance(rule, str) and rule == "sorted")


def columns_to_read(
    options: Mapping[str, Any], names: Sequence[str], asked: Sequence[str]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The columns that rows are read with, and which of them a batch does not show.

    Args:
        names: all columns of the version.
        asked: by the caller; empty for all.

    Raises:
        ConfigError: a column that becomes codes does not exist.
    """
    codes = coded(options)
    unknown = [name for name in (*codes, *options.get("join", {})) if name not in names]
    if unknown:
        raise ConfigError(f"no column {unknown[0]!r}; columns: {', '.join(names)}")
    read = tuple(name for name in (asked or names) if name not in codes)
    if read:
        return read, frozenset()
    first = next(iter(codes))  # a request without columns would be one for all
    return (first,), frozenset({first})


def make_lookups(
    options: Mapping[str, Any],
    version: VersionNodes,
    view: View,
    hidden: frozenset[str],
    *,
    ready_deadline_s: float,
) -> Lookups | None:
    """The lookups that the options ask for; None without any.

    Args:
        options: without problems.
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
    for key, other in options.get("join", {}).items():
        joined = other if isinstance(other, Join) else Join(other)
        made.append(_join(key, joined, version, view, ready_deadline_s))
    return Lookups(version.shards.layout, tuple(made), hidden) if made else None


def _values(column: str, version: VersionNodes) -> pa.ChunkedArray:
    """The values of a column; half floats, which Arrow does not look up, as floats."""
    found = row_values(version, quoted(column))
    return found.cast(pa.float32()) if pt.is_float16(found.type) else found


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
    key: str, joined: Join, version: VersionNodes, view: View, ready_deadline_s: float
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
        return wait_for_plan(
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
