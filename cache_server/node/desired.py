"""What the coordinator wants of a node, decoded once from the answer to a heartbeat. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from cache_protocol.storage.layout import Layout
from cache_server.shards.version_key import VersionKey
from cache_server.source.pinned import WRITTEN, PinnedTable, Split


@dataclass(frozen=True)
class LoadPlan:
    """What every load of one version needs.

    Attributes:
        attempt: counts the loads of a version that failed and was requested again.
        sql: over ``tables``.
        tables: the first is read split by split, the others whole; all whole for a whole query.
        logical: schema of the stored columns.
        target_shard_bytes: of a whole query.
        keeps_every_row: the splits tell the exact number of rows.
        joined: the query also reads other tables, or subqueries.
        refuse_nulls: also those of floats.
        readers: other namespaces that may read the rows.
        secrets: by table, then by setting.
    """

    key: VersionKey
    attempt: int
    sql: str
    tables: tuple[PinnedTable, ...]
    logical: pa.Schema
    target_shard_bytes: int
    keeps_every_row: bool
    joined: bool
    refuse_nulls: bool = False
    readers: tuple[str, ...] = ()
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)

    @cached_property
    def layout(self) -> Layout:
        """Of the stored batches."""
        return Layout(self.logical)

    @property
    def is_written(self) -> bool:
        """Whether its rows were put by writers: see `plan.written_version`."""
        return any(table.format == WRITTEN for table in self.tables)


@dataclass(frozen=True, slots=True)
class SameShard:
    """A sealed shard of another version with the same rows."""

    key: VersionKey
    index: int


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A sealed shard on other nodes.

    Attributes:
        locations: Flight locations of the nodes that hold it; none if this node has it as
            ``same_as``.
        nulls: see `SealedShard`.
        same_as: the shard is of this version, and its file can be shared.
        erased: a row set: the rows that are erased in this file.
    """

    locations: tuple[str, ...]
    num_rows: int
    num_bytes: int
    checksum: str
    nulls: Mapping[str, int] = field(default_factory=dict)
    same_as: SameShard | None = None
    erased: bytes = b""

    @property
    def new_bytes(self) -> int:
        """Bytes that it takes on this node."""
        return self.num_bytes if self.locations else 0


@dataclass(frozen=True, slots=True)
class DesiredShard:
    """A shard that a node should hold.

    Without splits and without a copy, the node has it, is loading it, or waits for another node.

    Attributes:
        row_start: its first row id, once `DesiredVersion.rows_fixed`.
        splits: to read it from the source.
        copy: to copy it instead, from another node or another version.
    """

    index: int
    row_start: int = 0
    splits: tuple[Split, ...] = ()
    copy: ShardCopy | None = None


@dataclass(frozen=True, eq=False)
class DesiredVersion:
    """One version as a node should hold it.

    Attributes:
        shards: by index.
        rows_fixed: every shard is sealed somewhere, so row ids and ``num_rows`` are known.
        run_whole: this node runs the whole query.
        missing: the shards to keep of that run; empty: all of them.
        num_shards: of the result of a whole query; None until it is known.
        traceparent: of the load; empty: it is not traced.
        erased: shard -> a row set of the rows that must be erased before it is served.
        tombstones: the number of the last act on the dataset, which its loads need.
    """

    plan: LoadPlan
    shards: Mapping[int, DesiredShard] = field(default_factory=dict)
    rows_fixed: bool = False
    num_rows: int = 0
    run_whole: bool = False
    missing: frozenset[int] = frozenset()
    num_shards: int | None = None
    traceparent: str = ""
    erased: Mapping[int, bytes] = field(default_factory=dict)
    tombstones: int = 0

    @cached_property
    def obtainable(self) -> tuple[DesiredShard, ...]:
        """The shards that this node can load or copy now."""
        return tuple(shard for shard in self.shards.values() if shard.splits or shard.copy)

    @cached_property
    def estimated_bytes(self) -> int:
        """Bytes of the shards that this node can load or copy now."""
        return sum(
            shard.copy.new_bytes
            if shard.copy
            else sum(split.estimated_bytes for split in shard.splits)
            for shard in self.obtainable
        )


@dataclass(frozen=True)
class OpenWrite:
    """A write that a node keeps rows of.

    Attributes:
        schema_digest: of the schema of the stored columns: see `WriteSchemas`.
        target_shard_bytes: of a shard.
        refuse_nulls: also those of floats.
        full_wait_s: how long a put may wait for room.
        committed: it takes no more rows.
        tombstones: see `DesiredVersion`.
    """

    write_id: str
    dataset: str
    schema_digest: str
    target_shard_bytes: int
    refuse_nulls: bool
    full_wait_s: float
    committed: bool = False
    tombstones: int = 0


@dataclass(frozen=True)
class DesiredState:
    """Everything that a node should hold.

    Attributes:
        gone: versions and puts whose files go. All that is not named stays.
        orphans: what the coordinator does not know.
        retry_no_room: a load for which there is no room is tried again: nodes left or came back
            lately.
        writes: by id; the rows that were put for them stay.
    """

    versions: Mapping[VersionKey, DesiredVersion] = field(default_factory=dict)
    gone: frozenset[VersionKey] = frozenset()
    orphans: frozenset[VersionKey] = frozenset()
    retry_no_room: bool = False
    writes: Mapping[str, OpenWrite] = field(default_factory=dict)
