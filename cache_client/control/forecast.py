"""The forecast of a load, for sizing a cache or a job. Pure: a node reads the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from cache_client.order.order import StepPlan
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.records import record


@dataclass(frozen=True)
class TableForecast:
    """One table that the query reads.

    Attributes:
        source_bytes: of its files as stored; 0 for a table without files.
        num_rows: None if the format does not tell.
        num_bytes: decoded, of the columns that the query reads.
        columns: that the query reads.
        by_split: read split by split over the nodes; else each node that needs it reads it whole.
        bytes_by: what `num_bytes` was estimated from, for people; empty if from the metadata of
            every file.
    """

    name: str
    format: str
    num_files: int
    source_bytes: int
    num_rows: int | None
    num_bytes: int
    columns: tuple[str, ...]
    by_split: bool
    bytes_by: str


@dataclass(frozen=True)
class LoadForecast:
    """What a load would take, from footers and metadata.

    Attributes:
        whole: one node runs the query over whole tables; rows and shards of its result are unknown
            before.
        why: how the query runs, and why.
        ordered: the rows have a fixed order.
        schema: of the result: logical columns in their storage types.
        num_rows: before any filter; None for a whole query, or if a format does not tell.
        rows_exact: the result will have exactly ``num_rows``.
        num_bytes: decoded, after projection and before any filter, of one replica; for a whole
            query, what it reads.
        makes_rows: an unnest or a join makes any number of rows from one; bytes count one for each.
        guessed_columns: strings and lists that the query makes; their length is unknown.
        largest_shard_bytes: decoded, as `num_bytes`; 0 for a whole query.
        node_bytes: on each node, all replicas.
        load_memory_bytes: about, of one load besides the shards: of the shard that takes the most,
            or of the whole query without its sorts, joins and groups.
        memory_limit_bytes: of each node; None for no limit.
        nodes_needed: for that limit; None if no number of nodes is enough, or if bytes are not
            known: see `bytes_known`.
        shards_reused: those that a version in the cache has too, so that they are not loaded.
        load_s: about, seconds until it is ready, at the rate of the last load of this cache; None
            before any load, and for a whole query.
        nulls: column of numbers -> its nulls, before any filter, where statistics tell.
        world_size, batch_size: as requested.
        steps_per_epoch: of each rank; None if the rows are not known, as with a filter.
        step_bytes: decoded bytes of a rank's full step; None if the rows are not known.
    """

    name: str
    fingerprint: str
    whole: bool
    why: str
    ordered: bool
    schema: pa.Schema
    tables: tuple[TableForecast, ...]
    num_rows: int | None
    rows_exact: bool
    num_bytes: int
    makes_rows: bool
    guessed_columns: tuple[str, ...]
    num_shards: int
    largest_shard_bytes: int
    node_bytes: tuple[int, ...]
    load_memory_bytes: int
    replicas: int
    memory_limit_bytes: int | None
    nodes_needed: int | None
    shards_reused: int
    load_s: float | None
    nulls: Mapping[str, int]
    world_size: int
    batch_size: int
    steps_per_epoch: int | None
    step_bytes: int | None

    @property
    def sql_goes(self) -> str:
        """How the query runs, for people."""
        return "whole, on one node" if self.whole else "split by split"

    @property
    def bytes_known(self) -> bool:
        """Whether bytes are known before the query; not if it makes rows or strings."""
        return not (self.whole or self.makes_rows or self.guessed_columns)

    @property
    def fits(self) -> bool | None:
        """Whether no node would hold more than its limit.

        Returns:
            None if bytes are not known, or if a filter may drop enough rows.
        """
        limit = self.memory_limit_bytes
        if limit is None:
            return True
        if not self.bytes_known:
            return None
        if all(size <= limit for size in self.node_bytes):
            return True
        return False if self.rows_exact else None


def from_proto(forecast: pb.LoadForecast, world_size: int, batch_size: int) -> LoadForecast:
    """The forecast of a message, for a job of so many ranks.

    Raises:
        ValueError: ``world_size`` or ``batch_size`` is not positive; quotes it.
    """
    known = forecast.num_rows if forecast.HasField("num_rows") else None
    expected = known if forecast.rows_exact else None
    steps, step_bytes = None, None
    plan = StepPlan(expected or 0, world_size, batch_size)
    if expected is not None:
        steps = plan.num_steps
        step_bytes = batch_size * (forecast.num_bytes // known) if known else 0
    return record(
        LoadForecast,
        forecast,
        name=forecast.spec.name,
        schema=schema_from_bytes(forecast.schema),
        tables=tuple(record(TableForecast, table) for table in forecast.tables),
        replicas=forecast.spec.replicas,
        memory_limit_bytes=forecast.memory_limit_bytes or None,
        nodes_needed=forecast.nodes_needed or None,
        world_size=world_size,
        batch_size=batch_size,
        steps_per_epoch=steps,
        step_bytes=step_bytes,
    )
