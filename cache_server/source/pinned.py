"""Files, splits, pinned tables and conditions: what `tables` and the planners share. Pure."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import unquote

import pyarrow as pa

from cache_protocol.errors import some_of
from cache_protocol.storage.layout import Layout, schema_from_bytes

PARTITION = b"cache.partition"  # in the metadata of a field whose values are in paths
GIVEN = b"cache.given"  # in the metadata of a field whose type the spec gives
SOURCE_COLUMN = b"cache.source_column"  # in the metadata of a stored field: see `with_lineage`
BY_ARROW = b"cache.by_arrow"  # in the metadata of a Parquet field that only Arrow reads correctly
# In the metadata of a Parquet field that has values where a struct in it is null.
UNDER_NULLS = b"cache.under_nulls"
# In the metadata of a field that is read as another type with the same values: see `source_type`.
_SOURCE_TYPE = b"cache.source_type"
WRITTEN = "written"  # the format of a table whose rows were put by writers
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the dataset was planned.

    Attributes:
        path: or URI; for a table without files another name, such as a database and a relation.
        etag: of an object store; empty if there is none.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str = ""


@dataclass(frozen=True)
class Split:
    """The rows of one file that start in byte range ``part`` of ``parts`` equal ones.

    Attributes:
        num_rows: upper bound, before any filter; None if the format does not tell.
        estimated_bytes: decoded bytes of the kept columns.
        piece: which rows these are, in the form of the table's format; for a table without files.
        group_bytes: stored bytes of the read columns in the largest row group, which DataFusion
            holds in memory. 0 for a format that is read in small pieces.
    """

    file: SourceFile
    part: int
    parts: int
    num_rows: int | None
    estimated_bytes: int
    piece: str = ""
    group_bytes: int = 0

    def __str__(self) -> str:
        where = "" if self.parts == 1 else f" (split {self.part + 1} of {self.parts})"
        return f"{self.file.path}{where}"


@dataclass(frozen=True)
class PinnedTable:
    """A pinned table: with the secrets of its store, enough to read any split of it.

    Attributes:
        name: in the query.
        format: one of `cache_protocol.datasets.dataset_spec.FORMATS`.
        schema: every column, as the query sees them.
        options: public settings of the store or catalogue.
        snapshot: identifies this state of the table, in the form of its format.
        columns: those that the query reads, in the order of the schema; None for all.
        splits: all of them, in row order, if the table is read whole; empty if it is read split by
            split.
        escape: of quotes in CSV: a backslash, or nothing.
    """

    name: str
    format: str
    schema: pa.Schema
    options: Mapping[str, str] = field(default_factory=dict)
    snapshot: str = ""
    columns: tuple[str, ...] | None = None
    splits: tuple[Split, ...] = ()
    escape: str = ""

    @property
    def read_schema(self) -> pa.Schema:
        """The columns that the query reads."""
        if self.columns is None:
            return self.schema
        return pa.schema([self.schema.field(name) for name in self.columns])

    @cached_property
    def is_for_arrow(self) -> bool:
        """Whether the query reads a column marked with `BY_ARROW`."""
        return any(BY_ARROW in (field.metadata or {}) for field in self.read_schema)

    @cached_property
    def _partition_types(self) -> Mapping[str, pa.DataType]:
        return partition_types(self.schema)

    def partition_of(self, split: Split) -> dict[str, pa.Scalar]:
        """The columns of the split whose values are in the path of its file."""
        return partition_values(split.file.path, self._partition_types)


@dataclass(frozen=True)
class Condition:
    """A condition on every row that a query keeps: ``column operator value``.

    Attributes:
        operator: ``=``, ``<``, ``<=``, ``>`` or ``>=``.
        value: an int, a str or a date, of the column's type.
    """

    column: str
    operator: str
    value: object


@dataclass(frozen=True)
class KnownNulls:
    """Nulls of a column that metadata tell.

    Attributes:
        count: of all files.
        files: the paths of those with nulls, in order; not empty.
        group: the row group of the first file; None: it lacks the column.
        row: of the first null in its file; None: unknown.
    """

    count: int
    files: tuple[str, ...]
    group: int | None
    row: int | None


@dataclass(frozen=True)
class Pin:
    """The state of a source at one moment, from the module of its format.

    Attributes:
        schema: every column, as the query sees them; no metadata but `PARTITION`, `BY_ARROW`
            and `UNDER_NULLS` of a field.
        content: JSON values that decide the rows, without secrets: part of the fingerprint.
        cut: stored logical schema, see `with_lineage`, and decoded bytes of a split -> splits in
            row order.
        with_groups: splits of this pin and the columns to read -> the same splits with their
            ``group_bytes``. None for a format without row groups.
        snapshot: see `PinnedTable`.
        split_content: decides, with the file and the ``piece`` of a split, its rows; for a table
            whose ``snapshot`` also covers other splits. None: ``snapshot``.
        exact_rows: every split knows exactly how many rows it holds.
        guessed: the bytes of the splits are guesses, so a single split may be of any size.
        comparable: an unchanged source has the same ``content``. If false, as for a database, a
            version of the same spec counts as the same until a refresh.
        prune: the same pin without splits in which no row can fulfil all conditions, by partitions
            and statistics; None if there are none.
        bytes_by: the base of the estimated bytes, for a person; empty: the metadata of every file.
        nulls: columns -> the nulls in each, where statistics tell; None for a format without them.
        known_nulls: a column of the files -> its nulls, of the files whose statistics tell; None
            if they tell of none. It may read the one row group with the first null.
        close: releases what keeps the state readable, such as a transaction. Called once, after
            the last read.
    """

    schema: pa.Schema
    content: Sequence[object]
    cut: Callable[[pa.Schema, int], tuple[Split, ...]]
    snapshot: str = ""
    split_content: str | None = None
    exact_rows: bool = False
    guessed: bool = False
    comparable: bool = True
    prune: Callable[[Sequence[Condition]], Pin] | None = None
    bytes_by: str = ""
    with_groups: Callable[[Sequence[Split], Collection[str]], tuple[Split, ...]] | None = None
    nulls: Callable[[Collection[str]], Mapping[str, int]] | None = None
    known_nulls: Callable[[str], KnownNulls | None] = lambda column: None
    close: Callable[[], None] = lambda: None


def with_lineage(stored: pa.Schema, lineage: Mapping[str, str]) -> pa.Schema:
    """``stored`` with the source column of each field, which tells the size of its values.

    Args:
        lineage: field -> column of the table; other fields have none.
    """
    return pa.schema(
        [
            field.with_metadata(
                {**(field.metadata or {}), SOURCE_COLUMN: lineage.get(field.name, "")}
            )
            for field in stored
        ]
    )


def source_column(field: pa.Field) -> str:
    """The source column of a stored field: by default the one of the same name.

    Returns:
        with dots for a field of a struct; empty if there is none.
    """
    return str((field.metadata or {}).get(SOURCE_COLUMN, field.name.encode()).decode())


def with_mark(field: pa.Field, key: bytes, value: bytes = b"") -> pa.Field:
    """``field`` with one more entry in its metadata."""
    return field.with_metadata({**(field.metadata or {}), key: value})


def with_source_type(read: pa.Field, source: pa.Field) -> pa.Field:
    """``read`` with a note of the type that the column has in its source."""
    if read.type.equals(source.type):
        return read
    encoded = base64.b64encode(pa.schema([source.remove_metadata()]).serialize().to_pybytes())
    return with_mark(read, _SOURCE_TYPE, encoded)


def source_type(field: pa.Field) -> pa.DataType:
    """The type that a column has in its source, which may be another encoding of its values."""
    encoded = (field.metadata or {}).get(_SOURCE_TYPE)
    if encoded is None:
        return field.type
    return schema_from_bytes(base64.b64decode(encoded)).field(0).type


def without_source_type(field: pa.Field) -> pa.Field:
    """``field`` for a column that has several types in its source."""
    metadata = dict(field.metadata or {})
    metadata.pop(_SOURCE_TYPE, None)
    return field.with_metadata(metadata)


def sized_fields(layout: Layout) -> list[pa.Field]:
    """The strings and lists of a layout, with the `source_column` of each."""
    fields = []
    for plain in layout.plain_fields:
        top = next(f for f in layout.logical if f"{plain.name}.".startswith(f"{f.name}."))
        path = source_column(top)
        if path:
            path += plain.name.removeprefix(top.name)
        fields.append(plain.with_metadata({SOURCE_COLUMN: path.encode()}))
    return fields


def partition_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns of a table whose values are in paths: those marked with `PARTITION`."""
    return {field.name: field.type for field in schema if PARTITION in (field.metadata or {})}


def partition_values(path: str, types: Mapping[str, pa.DataType]) -> dict[str, pa.Scalar]:
    """The values in a file's ``key=value`` directories, as in Hive.

    Args:
        path: or URI, of the file.
        types: of these columns; see `partition_types`.
    """
    if not types:
        return {}
    return {
        key: pa.scalar(text, pa.string()).cast(types[key])
        for key, text in partition_texts(path).items()
        if key in types
    }


def partition_texts(path: str) -> dict[str, str | None]:
    """The ``key=value`` directories of a path; None for Hive's name of a null."""
    texts: dict[str, str | None] = {}
    for part in path.split("/")[:-1]:
        key, equals, text = part.partition("=")
        if key and equals:
            texts[unquote(key)] = None if text == _HIVE_NULL else unquote(text)
    return texts


def check_schema(schema: pa.Schema) -> None:
    """Refuses names of columns, fields and time zones that a query cannot use.

    Raises:
        ValueError: several columns share a name, and a query finds only one of them; or a name has
            a NUL character, where libraries in C end a text.
        UnicodeDecodeError: a name is not UTF-8. It is a ValueError.
    """
    check_names(schema.names)
    for dtype in schema.types:
        _check_texts(dtype)


def check_names(names: Sequence[str]) -> None:
    """Like `check_schema`, for the names of columns."""
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"several columns are named {some_of(map(repr, repeated))}")
    for name in names:
        _check_text(name)


def _check_texts(dtype: pa.DataType) -> None:
    if pa.types.is_timestamp(dtype):
        _check_text(dtype.tz or "")
    for child in map(dtype.field, range(dtype.num_fields)):
        _check_text(child.name)
        _check_texts(child.type)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"the name {text!r} has a NUL character: rename the column or field")


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows, of any types."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, dtype) for dtype in schema.types], schema=schema)
