"""Snapshots of Iceberg tables: one snapshot -> a split a data file.

pyiceberg plans the files of a snapshot and the deletes that apply to them. Unsupported features are
refused by name before a row is read. `iceberg_lookup` finds the table, `iceberg_rows` reads rows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pyarrow as pa
from pyiceberg.expressions import (
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    LessThan,
    LessThanOrEqual,
)
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
)
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, ManifestGroupPlanner, StaticTable
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import NameMapping
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from cache_protocol.datasets.dataset_spec import TableSpec
from cache_protocol.errors import LoadError, RequestError, some_of
from cache_protocol.storage.layout import GUESSED_VALUE_BYTES
from cache_server.source.pinned import Condition, Pin, PinnedTable, SourceFile, Split, source_column
from cache_server.tables import footers, lake, plain_files
from cache_server.tables.column_sizes import Place, value_bytes
from cache_server.tables.iceberg_files import local_path
from cache_server.tables.iceberg_lookup import find, open_again
from cache_server.tables.iceberg_rows import absent_values, live_rows

_DATA_FORMATS = (FileFormat.PARQUET, FileFormat.ORC)
_DELETE_FORMATS = (FileFormat.PARQUET, FileFormat.ORC, FileFormat.PUFFIN)
_MAX_LISTED = 20  # snapshots, tags or branches in a message
_COMPARISONS = {
    "=": EqualTo,
    "<": LessThan,
    "<=": LessThanOrEqual,
    ">": GreaterThan,
    ">=": GreaterThanOrEqual,
}
_PLAN_AGE_S = 900.0  # then planned again: credentials of a catalogue expire


@dataclass(frozen=True)
class _State:
    """Identifies a snapshot: kept in `PinnedTable.snapshot`, so without secrets.

    Attributes:
        metadata_location: of the table as it was pinned.
        identifier: in the catalogue; None without one.
        snapshot_id: None for a table without snapshots.
        schema_id: of the columns that the query sees.
    """

    metadata_location: str
    identifier: str | None
    snapshot_id: int | None
    schema_id: int

    def to_json(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True)

    def __str__(self) -> str:
        where = self.metadata_location
        return f"{self.identifier} ({where})" if self.identifier else where


@dataclass(frozen=True)
class _Plan:
    """A snapshot with its data files by path, and the deletes of each."""

    table: StaticTable
    schema: Schema
    tasks: Mapping[str, FileScanTask]


_PLANS = lake.OpenedSnapshots[_Plan](max_age_s=_PLAN_AGE_S)


def pin(table: TableSpec) -> Pin:
    """The snapshot that ``table`` names, or the current one.

    Splits are ordered by the time that their file was added, then by path. So rows that are added
    come last, except in tables of format 1, which does not tell.

    A snapshot id or a tag gives the columns of that snapshot. The current snapshot or a branch has
    the current columns of the table. Iceberg's Java library does the same.

    Raises:
        LoadError: the table, its metadata or its manifests cannot be read.
        RequestError: the table does not have the snapshot, tag or branch; or there are equality
            deletes, or files of an unsupported format.
    """
    if len(table.source) != 1:
        raise RequestError(
            f"an Iceberg table has one source, a metadata location or a name in a catalogue; "
            f"got {len(table.source)}: {some_of(table.source)}"
        )
    (source,) = table.source
    what = f"Iceberg table {source}"
    with lake.naming(what, table.options, table.secrets):
        opened, identifier = find(source, table.options, table.secrets)
        metadata = opened.metadata
        snapshot_id, is_fixed = _snapshot_id(metadata, table.snapshot, what)
        schema = _schema(metadata, snapshot_id if is_fixed else None, what)
        state = _State(opened.metadata_location, identifier, snapshot_id, schema.schema_id)
        tasks = _tasks(opened, snapshot_id, what)
    by_path = {task.file.file_path: task.file for task in tasks}

    @lru_cache(maxsize=lake.MOST_FOOTERS)
    def footer_of(data: lake.DataFile) -> lake.Footer | None:
        path = data.file.path
        with lake.naming(
            f"Iceberg data file {path} of table {source}", table.options, table.secrets
        ):
            return _footer(opened, schema, by_path[path])

    def cut_files(kept: Collection[str], stored_schema: pa.Schema) -> tuple[Split, ...]:
        files = [_data_file(task) for task in tasks if task.file.file_path in kept]
        return lake.cut(files, stored_schema, footer_of)

    whole = Pin(
        schema=lake.plain_schema(schema_to_pyarrow(schema, include_field_ids=False)),
        content=_content(metadata, state, schema, tasks),
        cut=lambda stored_schema, _: cut_files(by_path, stored_schema),
        snapshot=state.to_json(),
        split_content=_split_content(metadata, schema),
        bytes_by=lake.bytes_by(len(tasks)),
        exact_rows=not any(task.delete_files for task in tasks),
    )

    def prune(conditions: Sequence[Condition]) -> Pin:
        with lake.naming(what, table.options, table.secrets):
            kept = _paths_that_may_hold(opened, snapshot_id, schema, conditions)
        if kept is None:
            return replace(whole, prune=None)
        return replace(whole, cut=lambda stored, _: cut_files(kept, stored), prune=None)

    return replace(whole, prune=prune)


def _paths_that_may_hold(
    table: StaticTable,
    snapshot_id: int | None,
    schema: Schema,
    conditions: Sequence[Condition],
) -> set[str] | None:
    """The data files with rows that may fulfil all conditions, by partitions and bounds.

    Returns:
        None if that is unknown: a scan binds names to the current columns.
    """
    today = {field.name: field.field_id for field in table.metadata.schema().fields}
    usable = [
        _COMPARISONS[c.operator](c.column, c.value)
        for c in conditions
        if today.get(c.column) == schema.find_field(c.column).field_id
    ]
    if snapshot_id is None or not usable:
        return None
    row_filter: BooleanExpression = usable[0]
    for comparison in usable[1:]:
        row_filter = And(row_filter, comparison)
    try:
        tasks = list(table.scan(row_filter=row_filter, snapshot_id=snapshot_id).plan_files())
    except (TypeError, ValueError, OverflowError):
        # Iceberg cannot compare the value with the column, or Python cannot represent it.
        return None
    return {task.file.file_path for task in tasks}


def read(table: PinnedTable, split: Split, secrets: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The live rows of one data file, in order. Thread-safe.

    Args:
        secrets: of the store and the catalogue.

    Raises:
        LoadError: the data file or the metadata cannot be read; names the data file.
    """
    state, plan, task = _planned_file(table, split, secrets)
    path, schema = split.file.path, table.read_schema
    wanted = set(schema.names) or {plan.schema.fields[0].name}  # counting needs a column
    projected = Schema(*(field for field in plan.schema.fields if field.name in wanted))
    with lake.naming(f"Iceberg data file {path} of table {state}", table.options, secrets):
        for batch in live_rows(plan.table, task, projected):
            yield from lake.conform(batch, schema)


def plain_file(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> plain_files.PlainFile | None:
    """The data file, if it holds the rows of the split as they are.

    It then has no deletes, and each column that is read has the name and the type of the table, or
    is not in the file.

    Raises:
        as `read`.
    """
    state, plan, task = _planned_file(table, split, secrets)
    if task.delete_files or task.file.file_format != FileFormat.PARQUET:
        return None
    path, metadata, io = split.file.path, plan.table.metadata, plan.table.io
    what = f"Iceberg data file {path} of table {state}"
    named = partial(lake.naming, what, table.options, secrets)
    with named():
        source = io.new_input(path)
        footer = plain_files.footer_of(source.open)
        stored = pyarrow_to_schema(footer.schema.to_arrow_schema(), metadata.name_mapping(), True)
        by_id = {field.field_id: field for field in stored.fields}
        absent = {}
        for column in table.read_schema:
            field = plan.schema.find_field(column.name)
            if (found := by_id.get(field.field_id)) is not None:
                if not _are_same(found, field):
                    return None
                continue
            value = absent_values(plan.table, task, Schema(field), stored).get(field.field_id)
            value = field.initial_default if value is None else value
            if value is None and field.required:
                return None
            absent[column.name] = pa.scalar(value, column.type)
        if not plain_files.is_plain(footer, split, table.read_schema, absent):
            return None
    return plain_files.PlainFile(local_path(path), source.open, footer, named, absent)


def _are_same(one: NestedField, other: NestedField) -> bool:
    """Whether two columns have the same ids and names, and so have all fields in them."""
    return (one.field_id, one.name) == (other.field_id, other.name) and all(
        map(_are_same, _fields(one.field_type), _fields(other.field_type))
    )


def _fields(dtype: IcebergType) -> tuple[NestedField, ...]:
    if isinstance(dtype, StructType):
        return dtype.fields
    if isinstance(dtype, ListType):
        return (dtype.element_field,)
    return (dtype.key_field, dtype.value_field) if isinstance(dtype, MapType) else ()


def _planned_file(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> tuple[_State, _Plan, FileScanTask]:
    state = _State(**json.loads(table.snapshot))
    with lake.naming(f"Iceberg table {state}", table.options, secrets):
        plan = _planned(state, table.options, secrets)
    task = plan.tasks.get(split.file.path)
    if task is None:
        raise LoadError(
            f"Iceberg table {state}: snapshot {state.snapshot_id} has no data file "
            f"{split.file.path}"
        )
    return state, plan, task


def _planned(state: _State, options: Mapping[str, str], secrets: Mapping[str, str]) -> _Plan:
    """The plan of ``state``, made once for all its splits."""
    return _PLANS.get(state, options, secrets, lambda: _make_plan(state, options, secrets))


def _make_plan(state: _State, options: Mapping[str, str], secrets: Mapping[str, str]) -> _Plan:
    table = open_again(state.metadata_location, state.identifier, options, secrets)
    what = f"Iceberg table {state}"
    schema = _schema_by_id(table.metadata, state.schema_id, what)
    tasks = {task.file.file_path: task for task in _tasks(table, state.snapshot_id, what)}
    return _Plan(table, schema, tasks)


def _snapshot_id(
    metadata: TableMetadata, wanted: int | str | None, what: str
) -> tuple[int | None, bool]:
    """The requested snapshot, and whether it never changes."""
    if wanted is None or wanted == MAIN_BRANCH:
        current = metadata.current_snapshot()
        return current.snapshot_id if current is not None else None, False
    if isinstance(wanted, str):
        ref = metadata.refs.get(wanted)
        if ref is None:
            raise RequestError(
                f"{what} has no tag or branch {wanted!r}; there are{_listed(sorted(metadata.refs))}"
            )
        return ref.snapshot_id, ref.snapshot_ref_type == SnapshotRefType.TAG
    known = [snapshot.snapshot_id for snapshot in metadata.snapshots]
    if wanted not in known:
        raise RequestError(f"{what} has no snapshot {wanted}; there are{_listed(known)}")
    return wanted, True


def _listed(known: Sequence[int | str]) -> str:
    more = f" (the last {_MAX_LISTED} of {len(known)})" if len(known) > _MAX_LISTED else ""
    return f"{more}: {', '.join(map(str, known[-_MAX_LISTED:])) or 'none'}"


def _schema(metadata: TableMetadata, snapshot_id: int | None, what: str) -> Schema:
    """The columns of a snapshot; None: the current columns of the table."""
    snapshot = metadata.snapshot_by_id(snapshot_id) if snapshot_id is not None else None
    if snapshot is None or snapshot.schema_id is None:  # format 1 may leave it out
        return metadata.schema()
    return _schema_by_id(metadata, snapshot.schema_id, what)


def _schema_by_id(metadata: TableMetadata, schema_id: int, what: str) -> Schema:
    for schema in metadata.schemas:
        if schema.schema_id == schema_id:
            return schema
    raise LoadError(f"{what}: its metadata has no schema {schema_id}, which the snapshot names")


def _tasks(table: StaticTable, snapshot_id: int | None, what: str) -> tuple[FileScanTask, ...]:
    """The data files of a snapshot as they were added, each with its deletes."""
    if snapshot_id is None:
        return ()
    added: dict[str, int] = {}

    def note(entry: ManifestEntry) -> bool:
        added[entry.data_file.file_path] = entry.file_sequence_number or 0
        return True

    try:
        snapshot = table.scan(snapshot_id=snapshot_id).snapshot()
        manifests = snapshot.manifests(table.io) if snapshot is not None else ()
        planner = ManifestGroupPlanner(table.metadata, table.io)
        planned = list(planner.plan_files(manifests, note))
    except ValueError:
        deletes = _equality_deletes(table, snapshot_id)
        if deletes is None:
            raise
        raise RequestError(
            f"{what}: snapshot {snapshot_id} has equality deletes ({deletes}), which cannot be "
            "honoured here; rewrite the table's data files to apply them"
        ) from None
    by_path = sorted(planned, key=lambda task: str(task.file.file_path))
    for task in by_path:
        _check_readable(task, what)
    for task, following in itertools.pairwise(by_path):
        if task.file.file_path == following.file.file_path and (
            task.delete_files != following.delete_files
        ):
            raise RequestError(
                f"{what} lists data file {task.file.file_path} twice, with different deletes"
            )
    return tuple(sorted(by_path, key=lambda task: added[task.file.file_path]))


def _equality_deletes(table: StaticTable, snapshot_id: int) -> str | None:
    """The first file of equality deletes in a snapshot."""
    snapshot = table.metadata.snapshot_by_id(snapshot_id)
    for manifest in snapshot.manifests(table.io) if snapshot is not None else ():
        if manifest.content == ManifestContent.DELETES:
            for entry in manifest.fetch_manifest_entry(table.io):
                if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                    return str(entry.data_file.file_path)
    return None


def _check_readable(task: FileScanTask, what: str) -> None:
    if task.file.file_format not in _DATA_FORMATS:
        raise RequestError(
            f"{what}: data file {task.file.file_path} is {task.file.file_format.value}, which "
            "cannot be read here"
        )
    for delete in task.delete_files:
        if delete.content != DataFileContent.POSITION_DELETES:
            raise RequestError(
                f"{what}: {delete.file_path} holds {delete.content.name.lower()}, which cannot be "
                "honoured here"
            )
        if delete.file_format not in _DELETE_FORMATS:
            raise RequestError(
                f"{what}: positional deletes {delete.file_path} are {delete.file_format.value}, "
                "which cannot be read here"
            )


def _data_file(task: FileScanTask) -> lake.DataFile:
    size, groups = task.file.file_size_in_bytes, len(task.file.split_offsets or ())
    file = SourceFile(task.file.file_path, size, 0)
    if task.delete_files or task.file.file_format != FileFormat.PARQUET:
        return lake.DataFile(file, task.file.record_count, deletes="\n".join(_deletes(task)))
    # Groups are of one size; the last one is smaller.
    group_bytes = min(size // max(1, groups - 1), lake.MOST_GROUP_BYTES)
    return lake.DataFile(file, task.file.record_count, group_bytes)


def _footer(table: StaticTable, schema: Schema, file: DataFile) -> lake.Footer | None:
    """The footer of a data file, whose columns have the ids of ``schema`` and their own names."""
    if file.file_format != FileFormat.PARQUET:
        return None
    with table.io.new_input(file.file_path).open() as opened:
        footer = footers.of_file(opened)
    names = table.metadata.name_mapping()
    stored = pyarrow_to_schema(footer.schema.to_arrow_schema(), names, True)
    partition = {
        field.source_id: file.partition[position]
        for position, field in enumerate(table.metadata.specs()[file.spec_id].fields)
        if isinstance(field.transform, IdentityTransform)
    }

    def place(field: pa.Field) -> Place:
        if not (source := source_column(field)):
            return GUESSED_VALUE_BYTES
        column = schema.find_field(source)
        name = stored.find_column_name(column.field_id)
        if name is None:  # one value for all rows, or null
            value = partition.get(column.field_id, column.initial_default)
            return value_bytes(field, None if value is None else str(value))
        return name

    return footer, place


def _deletes(task: FileScanTask) -> list[str]:
    """The files of the deletes of a data file."""
    return sorted(str(delete.file_path) for delete in task.delete_files)


def _identity(metadata: TableMetadata) -> str:
    # Metadata without a uuid gets a new one at each read.
    given = "table_uuid" in metadata.model_fields_set
    return str(metadata.table_uuid) if given else metadata.location


def _split_content(metadata: TableMetadata, schema: Schema) -> str:
    """What decides the rows of a data file, apart from its deletes."""
    names = metadata.name_mapping()
    specs = {number: spec.model_dump_json() for number, spec in metadata.specs().items()}
    mapping = names.model_dump_json() if names is not None else None
    return json.dumps([_identity(metadata), schema.model_dump_json(), mapping, specs])


def _content(
    metadata: TableMetadata, state: _State, schema: Schema, tasks: tuple[FileScanTask, ...]
) -> list[object]:
    names: NameMapping | None = metadata.name_mapping()
    files = [
        [
            task.file.file_path,
            task.file.file_size_in_bytes,
            _deletes(task),
        ]
        for task in tasks
    ]
    return [
        "iceberg",
        _identity(metadata),
        state.snapshot_id,
        [[field.field_id, field.name, str(field.field_type)] for field in schema.fields],
        names.model_dump_json() if names is not None else None,
        files,
    ]
