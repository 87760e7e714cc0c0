"""The forecast of a load, for sizing a cache or a job. Pure: a node reads the metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cache_client.order.order import StepPlan
from cache_protocol.cli.facts import counted, facts_html, facts_text, printable
from cache_protocol.cli.output import size
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.records import record

_MAX_NAMES = 6  # of columns on one line
_MOST_NULLS = 20  # columns whose nulls are listed


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
        zones: zone, or node without one -> its nodes; empty: no node has a zone.
        evicts: datasets that the load would evict, of those that the caller sees.
        evicts_datasets, evicts_bytes: how many, and the bytes of all their replicas.
        refusal: the error with which these nodes would refuse the load now; empty: they would not,
            or a number of nodes or a memory limit was given.
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
    refusal: str
    evicts: tuple[str, ...]
    evicts_datasets: int
    evicts_bytes: int
    zones: Mapping[str, int]
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

    def __repr__(self) -> str:
        """What ``cachectl plan`` shows; the attributes have it in full."""
        return facts_text(f"LoadForecast({self.name!r})", forecast_facts(self))

    def _repr_html_(self) -> str:
        """The same, for notebooks."""
        return facts_html(f"LoadForecast({self.name!r})", forecast_facts(self))


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


def nulls_text(nulls: Mapping[str, int]) -> str:
    """The nulls of columns, of not too many."""
    shown = [f"{printable(name)} {count:,}" for name, count in list(nulls.items())[:_MOST_NULLS]]
    return ", ".join([*shown, "..."] if len(nulls) > _MOST_NULLS else shown)


def query_facts(forecast: LoadForecast) -> list[tuple[str, str]]:
    """How a query runs, and what it reads."""
    order = "fixed" if forecast.ordered else "not fixed (allow_unordered)"
    facts = [("query", forecast.sql_goes), ("because", forecast.why), ("order of rows", order)]
    for table in forecast.tables:
        how = "split by split" if table.by_split else "whole"
        rows = "rows unknown" if table.num_rows is None else f"{table.num_rows:,} rows"
        files = f" in {counted(table.num_files, 'file')} of {size(table.source_bytes)}"
        facts.append(
            (
                f"reads {table.name}",
                f"{how}: {table.format}, {rows}{files if table.source_bytes else ''}, "
                f"{_bytes_of(table)}, {_column_names(table.columns)}",
            )
        )
    return facts


def _bytes_of(table: TableForecast) -> str:
    if not table.bytes_by:
        return f"{size(table.num_bytes)} decoded"
    return f"about {size(table.num_bytes)} decoded, estimated from {table.bytes_by}"


def forecast_facts(forecast: LoadForecast) -> list[tuple[str, str]]:
    """The facts of a forecast, as titles and texts."""
    facts = query_facts(forecast)
    if forecast.whole:
        facts.append(("result", "not known before the query runs"))
        facts.append(("disk to run it", f"{size(forecast.num_bytes)} on the node that runs it"))
        memory = size(forecast.load_memory_bytes)
        facts.append(
            ("memory to load", f"about {memory}, plus that of its sorts, joins and groups")
        )
        return facts
    exact = "" if forecast.rows_exact else " before the query"
    rows = "unknown" if forecast.num_rows is None else f"{forecast.num_rows:,}{exact}"
    facts.append(("rows", rows))
    if forecast.nulls:
        facts.append(("nulls", f"{nulls_text(forecast.nulls)}{exact}"))
    in_shards = f"{size(forecast.num_bytes)} in {counted(forecast.num_shards, 'shard')}"
    if forecast.makes_rows:
        facts.append(("decoded", f"unknown; {in_shards}, if each row makes one"))
    else:
        sampled = any(table.bytes_by for table in forecast.tables if table.by_split)
        about = "about " if forecast.guessed_columns or sampled else ""
        facts.append(("decoded", f"{about}{in_shards}"))
    if forecast.guessed_columns:
        names = _column_names(forecast.guessed_columns)
        facts.append(("guessed", f"{names}: the query makes its values, whose length is unknown"))
    if forecast.shards_reused:
        shards = f"{forecast.shards_reused:,} of {counted(forecast.num_shards, 'shard')}"
        facts.append(("reused", f"{shards} that the cache has"))
    nodes = len(forecast.node_bytes)
    fewer = f"; only {nodes} on {counted(nodes, 'node')}" if 0 < nodes < forecast.replicas else ""
    facts.append(("replicas", f"{forecast.replicas}{fewer}"))
    if forecast.zones:
        shares = len(forecast.zones) < min(forecast.replicas, nodes)
        share = ", so that replicas of a shard share one" if shares else ""
        zones = ", ".join(f"{zone}: {count}" for zone, count in sorted(forecast.zones.items()))
        facts.append(("nodes of zones", f"{zones}{share}"))
    if forecast.node_bytes:
        most = size(max(forecast.node_bytes))
        if_one = ", if each row makes one" if forecast.makes_rows else ""
        facts.append(("on each node", f"{most} at most, on {counted(nodes, 'node')}{if_one}"))
    if forecast.memory_limit_bytes is not None:
        facts.append(("nodes needed", _nodes_needed(forecast, size(forecast.memory_limit_bytes))))
    if forecast.evicts_datasets:
        facts.append(("evicts", _evicts(forecast)))
    if forecast.load_memory_bytes:
        memory = size(forecast.load_memory_bytes)
        facts.append(
            ("memory to load", f"about {memory} for each running load, besides the shards")
        )
    if forecast.load_s is not None:
        facts.append(
            ("time to load", f"about {forecast.load_s:.1f} s, at the rate of the last load")
        )
    job = f"{counted(forecast.world_size, 'rank')} with batches of {forecast.batch_size:,}"
    if forecast.steps_per_epoch is not None and forecast.step_bytes is not None:
        facts.append(("steps", f"{forecast.steps_per_epoch:,} an epoch, for {job}"))
        facts.append(("a step", f"{size(forecast.step_bytes)} for each rank"))
    return facts


def _evicts(forecast: LoadForecast) -> str:
    hidden = forecast.evicts_datasets - len(forecast.evicts)
    names = [*forecast.evicts] + ([f"{hidden} of other namespaces"] if hidden else [])
    return f"{', '.join(names)}; {size(forecast.evicts_bytes)} in all"


def _nodes_needed(forecast: LoadForecast, limit: str) -> str:
    if not forecast.bytes_known:
        return f"unknown; each has a limit of {limit}"
    if forecast.nodes_needed is None:
        return (
            f"no number is enough: one shard ({size(forecast.largest_shard_bytes)}) exceeds the "
            f"limit of {limit}; lower target_shard_bytes, or write smaller row groups"
        )
    fits = {True: "", False: "; it does not fit", None: "; it may fit after the query"}
    return f"{forecast.nodes_needed}, of {limit} each{fits[forecast.fits]}"


def _column_names(columns: Sequence[str]) -> str:
    if len(columns) > _MAX_NAMES:
        return f"{len(columns)} columns"
    return f"column{'' if len(columns) == 1 else 's'} {', '.join(columns)}"
