"""Makes a version from a spec: pinned, fingerprinted and cut into shards.

Reads sources through `tables`, and the query through `queries`. Knows no nodes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import LoadError, RequestError, some_of, without_middle
from cache_protocol.storage.layout import Layout, schema_from_bytes, with_large_offsets
from cache_protocol.storage.nested_values import plain_type
from cache_protocol.v1 import cache_pb2 as pb
from cache_server import tables
from cache_server.plan.planned_functions import Functions, bound_query
from cache_server.plan.shard_plan import (
    ShardPlan,
    cut_shards,
    cuts_hash,
    varying_bytes,
    with_contents,
)
from cache_server.shards.null_advice import null_place, null_places, null_problem
from cache_server.shards.packing import logical_schema
from cache_server.shards.version_key import VersionKey
from cache_server.source.pinned import (
    WRITTEN,
    Pin,
    PinnedTable,
    SourceFile,
    Split,
    partition_types,
    source_type,
    with_lineage,
)
from cache_server.sql import loader, queries
from cache_server.sql.plain_columns import without_views

logger = logging.getLogger(__name__)

_SILENT_S = 5.0
_STORAGE_FORMAT = 10  # part of every fingerprint; raise it when the stored bytes change
# The most bytes of all tables that every node reads whole, beside one that is read by splits.
_SMALL_BYTES = 256 * 1024 * 1024
# Estimated bytes of strings and lists in a shard that may outgrow 32-bit offsets, with some room.
_LARGE_BYTES = 1 << 30
# Each refresh adds a shard. With so many more than needed, all are cut anew.
_MOST_EXTRA_SHARDS = 1000


@dataclass(frozen=True)
class PinnedVersion:
    """One version of a dataset.

    Attributes:
        spec: as last requested; replicas and secrets are not part of the version.
        sql: over ``tables``.
        tables: the first is read split by split, the others whole; all whole for a whole query.
        logical: schema of the rows.
        shards: in row order; None for a whole query, whose result is cut at the end.
        keeps_every_row: the splits tell the exact number of rows.
        comparable: planning again tells whether the source changed.
        joined: the query also reads other tables, or subqueries.
        has_secrets: its load needs the secrets of the spec.
        explanation: how the query runs, and why, for people.
        unsized_columns: strings and lists that the query makes, of unknown size. The catalogue does
            not keep them.
    """

    spec: DatasetSpec
    key: VersionKey
    sql: str
    tables: tuple[PinnedTable, ...]
    logical: pa.Schema
    shards: tuple[ShardPlan, ...] | None
    keeps_every_row: bool
    comparable: bool = True
    joined: bool = False
    has_secrets: bool = False
    explanation: str = field(default="", compare=False)
    unsized_columns: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def is_written(self) -> bool:
        """Whether its rows were put by writers: see `written_version`."""
        return any(table.format == WRITTEN for table in self.tables)

    @cached_property
    def max_rows(self) -> int:
        """Rows before any filter, of the shards whose format tells them."""
        return sum(shard.max_rows or 0 for shard in self.shards or ())

    def to_load_plan(self, attempt: int, *, with_splits: bool = True) -> pb.LoadPlan:
        """The message that a node needs to load any shard of this version.

        Args:
            attempt: see the message.
            with_splits: include the splits of tables that are read whole; only readers need them.
        """
        plan = pb.LoadPlan()
        plan.CopyFrom(self._whole_plan if with_splits else self._short_plan)
        plan.attempt = attempt
        return plan

    @cached_property
    def _whole_plan(self) -> pb.LoadPlan:
        return self._make_plan(self.tables)

    @cached_property
    def _short_plan(self) -> pb.LoadPlan:
        return self._make_plan([replace(table, splits=()) for table in self.tables])

    def _make_plan(self, tables: Iterable[PinnedTable]) -> pb.LoadPlan:
        return pb.LoadPlan(
            dataset=self.key.dataset,
            fingerprint=self.key.fingerprint,
            sql=self.sql,
            tables=map(table_to_proto, tables),
            logical_schema=self.logical.serialize().to_pybytes(),
            keeps_every_row=self.keeps_every_row,
            whole=self.shards is None,
            target_shard_bytes=self.spec.target_shard_bytes,
            has_secrets=self.has_secrets,
            comparable=self.comparable,
            joined=self.joined,
            refuse_nulls=self.spec.nulls == "refuse",
            readers=self.spec.readers,
        )

    @classmethod
    def from_catalogue(cls, entry: pb.CatalogueEntry) -> PinnedVersion:
        """The version of a catalogue entry."""
        shards = tuple(
            ShardPlan(index, tuple(map(split_from_proto, shard.splits)), shard.content)
            for index, shard in enumerate(entry.shards)
        )
        return cls(
            DatasetSpec.from_proto(entry.spec),
            VersionKey(entry.plan.dataset, entry.plan.fingerprint),
            entry.plan.sql,
            tuple(table_from_proto(table) for table in entry.plan.tables),
            schema_from_bytes(entry.plan.logical_schema),
            None if entry.plan.whole else shards,
            entry.keeps_every_row,
            entry.plan.comparable,
            entry.plan.joined,
            entry.plan.has_secrets,
        )


@dataclass(frozen=True)
class OpenPlan:
    """A pinned version with the open pins of its source. Close it after the last read.

    Attributes:
        pins: by the name of the table.
        table_splits: of each table, for forecasts.
        query: as checked.
    """

    version: PinnedVersion
    pins: Mapping[str, Pin]
    table_splits: Mapping[str, tuple[Split, ...]]
    query: queries.Query

    def close(self) -> None:
        """Closes the pins."""
        for pin in self.pins.values():
            pin.close()


def plan_version(
    spec: DatasetSpec,
    before: Sequence[PinnedVersion] = (),
    functions: Functions | None = None,
) -> OpenPlan:
    """Pins the tables of ``spec``, checks its query against them and cuts them into shards.

    Args:
        before: earlier versions, the newest first: the first with rows of the same kind gives the
            cuts of the shards that did not change.
        functions: that the query may call; None: those of this package.

    Raises:
        LoadError: a source cannot be read.
        RequestError: the query cannot be run.
    """
    with ExitStack() as stack:
        pins: dict[str, Pin] = {}
        formats: dict[str, str] = {}
        try:
            for table in spec.tables:
                with _telling_waits(table):
                    formats[table.name], pins[table.name] = tables.pin(table)
                stack.callback(pins[table.name].close)
            planned = _plan(spec, formats, pins, before, functions or Functions())
        except pa.ArrowException as error:  # of a type that a library lacks, or of damage
            raise LoadError(_unreadable(spec, without_middle(str(error)))) from None
        stack.pop_all()
        return planned


@contextmanager
def _telling_waits(table: TableSpec) -> Iterator[None]:
    """Logs that a source takes its time: libraries try again for half a minute without a word."""
    what = some_of(table.source)
    timer = threading.Timer(_SILENT_S, logger.warning, ("still waiting for source=%s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _unreadable(spec: DatasetSpec, reason: str) -> str:
    """The message for a source that cannot be read; the reason comes before a list of sources."""
    sources = [source for table in spec.tables for source in table.source]
    if len(sources) == 1:
        return f"cannot read {sources[0]}: {reason}"
    return f"cannot read one of {len(sources)} sources: {reason}; they are {some_of(sources)}"


def _plan(
    spec: DatasetSpec,
    formats: Mapping[str, str],
    pins: Mapping[str, Pin],
    before: Sequence[PinnedVersion],
    functions: Functions,
) -> OpenPlan:
    text = queries.query_text(spec.sql or "", spec.columns, spec.filter)
    schemas = {name: pin.schema for name, pin in pins.items()}
    text = bound_query(text, spec, schemas, functions)
    query = queries.check_query(
        text, schemas, allow_unordered=spec.allow_unordered, is_shortcut=spec.sql is None
    )
    logical = _logical(query, pins)
    splits = {}
    for name, pin in pins.items():
        if query.conditions and pin.prune is not None:
            pin = pin.prune(query.conditions)
        read = pa.schema([pin.schema.field(column) for column in query.columns[name]])
        alone = len(pins) == 1 and query.drivers
        stored = _made_of(logical, query, name) if alone else _storable(read)
        splits[name] = pin.cut(stored, spec.target_shard_bytes)
    driver, explanation = _driver(query, splits, pins)
    if driver is not None and len(pins) > 1:  # stored rows also have columns of other tables
        splits[driver] = pins[driver].cut(_made_of(logical, query, driver), spec.target_shard_bytes)
    if driver is not None and not query.joins:
        by_split = PinnedTable(driver, formats[driver], pins[driver].schema)
        splits[driver] = tuple(loader.with_rows(splits[driver], text, by_split))
    if driver is not None and not query.only_drops_rows:
        # An unnest or a join can make many rows from one: the footer is no upper bound.
        splits[driver] = tuple(replace(split, num_rows=None) for split in splits[driver])
    for name, pin in pins.items():
        if pin.with_groups is not None:
            splits[name] = pin.with_groups(splits[name], query.columns[name])
    pinned = []
    for table in sorted(spec.tables, key=lambda table: table.name != driver):
        every = len(query.columns[table.name]) == len(pins[table.name].schema)
        if every and formats[table.name] == "json":  # whose later rows may have further keys
            every = spec.columns is None and (
                spec.sql is None or queries.reads_any_column(text, schemas, table.name)
            )
        pinned.append(
            PinnedTable(
                table.name,
                formats[table.name],
                pins[table.name].schema,
                table.options,
                pins[table.name].snapshot,
                None if every else query.columns[table.name],
                () if table.name == driver else splits[table.name],
                table.escape,
            )
        )
    shards = cut_shards(splits[driver], spec.target_shard_bytes) if driver is not None else None
    logical = _with_offsets(logical, shards)
    version = PinnedVersion(
        spec,
        VersionKey(spec.name, _fingerprint(spec, formats, pins, text, driver)),
        text,
        tuple(pinned),
        logical,
        shards,
        driver is not None and query.keeps_every_row and pins[driver].exact_rows,
        all(pin.comparable for pin in pins.values()),
        query.joins,
        any(table.secrets for table in spec.tables),
        explanation,
        _unsized_columns(logical, query, driver),
    )
    _refuse_known_nulls(version, query, pins)
    version = _sharing(version, pins, before)
    return OpenPlan(version, dict(pins), splits, query)


def _refuse_known_nulls(
    version: PinnedVersion, query: queries.Query, pins: Mapping[str, Pin]
) -> None:
    """Refuses a load that is certain to find nulls that its spec refuses.

    Raises:
        LoadError: the one that the load would have.
    """
    if version.spec.nulls != "refuse" or not query.keeps_every_row:
        return  # else the query may drop the rows with nulls
    found = {}
    for name, (table, column) in query.passed_on.items():
        schema = pins[table].schema
        is_stored = column in schema.names and column not in partition_types(schema)
        if is_stored and (nulls := pins[table].known_nulls(column)):
            found[name] = nulls
    if found:
        (name, nulls), *others = found.items()
        first = null_place(nulls.files[0], nulls.row, nulls.group)
        where = null_places(first, nulls.files)
        raise LoadError(
            null_problem(name, nulls.count, where=where, others=[other for other, _ in others])
        )


def _logical(query: queries.Query, pins: Mapping[str, Pin]) -> pa.Schema:
    """The logical schema of a query: a column of a table that it gives keeps its type there.

    Raises:
        RequestError: naming the columns that cannot be stored, or repeated names.
    """
    try:
        return logical_schema(pa.schema([_logical_field(f, query, pins) for f in query.schema]))
    except RequestError as error:
        raise RequestError(f"the query cannot be stored: {error}") from None


def _logical_field(field: pa.Field, query: queries.Query, pins: Mapping[str, Pin]) -> pa.Field:
    planned = field.with_type(without_views(field.type))
    table, column = query.passed_on.get(field.name, ("", ""))
    if table not in pins or column not in pins[table].schema.names:
        return planned
    source = source_type(pins[table].schema.field(column))
    is_same = plain_type(source).equals(plain_type(planned.type))
    return planned.with_type(source) if is_same else planned


def _with_offsets(logical: pa.Schema, shards: Sequence[ShardPlan] | None) -> pa.Schema:
    """``logical`` with large offsets, if a shard may need them."""
    if shards and varying_bytes(shards, Layout(logical).fixed_row_bytes) > _LARGE_BYTES:
        return with_large_offsets(logical)
    return logical


def _sharing(
    version: PinnedVersion, pins: Mapping[str, Pin], before: Sequence[PinnedVersion]
) -> PinnedVersion:
    """The version with the content of each shard, and with the cuts of an earlier version.

    A fingerprint has one set of shards: other cuts change it.
    """
    if version.shards is None or not version.comparable:
        return version
    content = _table_content(version, pins)
    plain = with_contents(version.shards, content)
    for earlier in before:
        is_cut_alike = earlier.spec.target_shard_bytes == version.spec.target_shard_bytes
        if not (is_cut_alike and earlier.shards):
            continue
        if with_contents(earlier.shards, content) != earlier.shards:
            continue  # other rows come of the same splits
        splits = [split for shard in plain for split in shard.splits]
        cut = cut_shards(splits, version.spec.target_shard_bytes, earlier.shards)
        if _with_offsets(version.logical, cut) != version.logical:
            break
        shards = with_contents(cut, content)
        if shards == plain or len(shards) > len(plain) + _MOST_EXTRA_SHARDS:
            break
        text = f"{version.key.fingerprint}/{cuts_hash(shards)}"
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
        return replace(version, shards=shards, key=replace(version.key, fingerprint=fingerprint))
    return replace(version, shards=plain)


def _table_content(version: PinnedVersion, pins: Mapping[str, Pin]) -> bytes:
    """What decides the rows of a shard apart from its splits: the plan from which it is made."""
    plan = version.to_load_plan(0)
    for name in ("dataset", "fingerprint", "readers", "has_secrets", "target_shard_bytes"):
        plan.ClearField(name)
    plan.keeps_every_row = False  # decides how the file is written, not what is in it
    driver = pins[plan.tables[0].name]
    if driver.split_content is not None:
        plan.tables[0].snapshot = driver.split_content
    for table in plan.tables[1:]:
        table.snapshot = json.dumps(pins[table.name].content, default=list)
    return str(_STORAGE_FORMAT).encode() + plan.SerializeToString(deterministic=True)


def _driver(
    query: queries.Query, splits: Mapping[str, tuple[Split, ...]], pins: Mapping[str, Pin]
) -> tuple[str | None, str]:
    """The table to read split by split, or None for a whole query; and the explanation."""
    if not query.drivers:
        return None, f"{query.why_whole} has one answer for the whole table"
    sizes = {name: sum(split.estimated_bytes for split in of) for name, of in splits.items()}
    largest = max(sorted(query.drivers), key=lambda name: sizes[name])
    others = sum(size for name, size in sizes.items() if name != largest)
    if pins[largest].guessed and len(splits[largest]) == 1:
        return None, f"the size of {largest!r} is unknown, so its rows are cut as they come"
    if len(sizes) == 1:
        return largest, "each row is computed independently"
    if others > _SMALL_BYTES:
        return None, (
            f"the tables beside {largest!r} are {others} bytes, too many for every node to read"
        )
    names = ", ".join(repr(name) for name in sizes if name != largest)
    return (
        largest,
        f"each row of {largest!r} is computed independently; every node reads {names} whole",
    )


def _made_of(logical: pa.Schema, query: queries.Query, table: str) -> pa.Schema:
    """The stored schema, with the column of ``table`` that each field comes from."""
    return with_lineage(
        logical, {name: path for name, (of, path) in query.lineage.items() if of == table}
    )


def _unsized_columns(
    logical: pa.Schema, query: queries.Query, driver: str | None
) -> tuple[str, ...]:
    """Strings and lists that do not come from the table that is read split by split."""
    if driver is None:
        return ()
    known = {name for name, (table, _) in query.lineage.items() if table == driver}
    return tuple(
        f.name for f in Layout(logical).plain_fields if f.name.partition(".")[0] not in known
    )


def _storable(schema: pa.Schema) -> pa.Schema:
    """The columns of ``schema`` that can be stored, for estimates."""
    return pa.schema([field for field in schema if not pa.types.is_union(field.type)])


def table_to_proto(table: PinnedTable) -> pb.PinnedTable:
    """The message of a pinned table."""
    return pb.PinnedTable(
        name=table.name,
        format=table.format,
        schema=table.schema.serialize().to_pybytes(),
        options=table.options,
        snapshot=table.snapshot,
        columns=table.columns or (),
        splits=[split_to_proto(split) for split in table.splits],
        escape=table.escape,
    )


def table_from_proto(table: pb.PinnedTable) -> PinnedTable:
    """The pinned table of a message."""
    return PinnedTable(
        table.name,
        table.format,
        schema_from_bytes(table.schema),
        dict(table.options),
        table.snapshot,
        tuple(table.columns) or None,
        tuple(split_from_proto(split) for split in table.splits),
        table.escape,
    )


def split_to_proto(split: Split) -> pb.Split:
    """The message of a split."""
    return pb.Split(
        file=pb.SourceFile(
            path=split.file.path,
            size=split.file.size,
            mtime_ns=split.file.mtime_ns,
            etag=split.file.etag,
        ),
        part=split.part,
        parts=split.parts,
        num_rows=split.num_rows or 0,
        num_rows_known=split.num_rows is not None,
        estimated_bytes=split.estimated_bytes,
        piece=split.piece,
        group_bytes=split.group_bytes,
    )


def split_from_proto(split: pb.Split) -> Split:
    """The split of a message."""
    file = SourceFile(split.file.path, split.file.size, split.file.mtime_ns, split.file.etag)
    rows = split.num_rows if split.num_rows_known else None
    sizes = split.estimated_bytes, split.piece, split.group_bytes
    return Split(file, split.part, split.parts, rows, *sizes)


def _fingerprint(
    spec: DatasetSpec,
    formats: Mapping[str, str],
    pins: Mapping[str, Pin],
    sql: str,
    driver: str | None,
) -> str:
    """The hash of everything that decides the stored bytes and their shards."""
    content = {
        "storage_format": _STORAGE_FORMAT,
        "sql": sql,
        "target_shard_bytes": spec.target_shard_bytes,
        "driver": driver,
        "tables": [
            [table.name, formats[table.name], table.missing_columns, pins[table.name].content]
            for table in spec.tables
        ],
    }
    if spec.nulls != "keep":  # so that other fingerprints stay
        content["nulls"] = spec.nulls
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
