"""What is known of a table before it is read: its files, its splits, what it holds. Pure.

The words that the modules of `tables` and the planners share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol
from urllib.parse import unquote

import pyarrow as pa

PARTITION = b"cache.partition"  # in the metadata of a field whose values stand in paths
GIVEN = b"cache.given"  # in the metadata of a field whose type the spec gives
SOURCE_COLUMN = b"cache.source_column"  # in the metadata of a stored field: see `with_lineage`
BY_ARROW = b"cache.by_arrow"  # in the metadata of a field that only Arrow reads right of Parquet
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the dataset was planned.

    Attributes:
        path: or a URI, or what else names it to its table, such as a database and a relation.
        etag: of an object store; empty where there is none.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str = ""


@dataclass(frozen=True)
class Split:
    """The rows of one file that start in byte range ``part`` of ``parts`` equal ones.

    Attributes:
        num_rows: before any filter, at most; None where the format does not tell.
        estimated_bytes: decoded, of the columns that are kept.
        piece: what else says which rows these are, in the words of the table's format; for a table
            that is not made of files.
        group_bytes: stored, of its largest row group, of the columns that are read: what DataFusion
            holds of it at once. 0 for a format that is read in small pieces.
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
    """A table as it was pinned: enough, with the secrets of its store, to read any split of it.

    Attributes:
        name: in the query.
        format: one of `cache_protocol.spec.dataset_spec.FORMATS`.
        schema: every column, as the query sees them.
        options: settings of the store or catalogue that are no secrets.
        snapshot: what finds this state of the table again, in the words of the format.
        columns: the ones that the query reads, in the order of the schema; None for all.
        splits: all of them, in row order, of a table that is read whole; none of one that is read
            split by split.
    """

    name: str
    format: str
    schema: pa.Schema
    options: Mapping[str, str] = field(default_factory=dict)
    snapshot: str = ""
    columns: tuple[str, ...] | None = None
    splits: tuple[Split, ...] = ()

    @property
    def read_schema(self) -> pa.Schema:
        """The columns that the query reads."""
        if self.columns is None:
            return self.schema
        return pa.schema([self.schema.field(name) for name in self.columns])

    @cached_property
    def is_for_arrow(self) -> bool:
        """Whether the query reads a column that only Arrow reads right: see `BY_ARROW`."""
        return any(BY_ARROW in (field.metadata or {}) for field in self.read_schema)

    @cached_property
    def _partition_types(self) -> Mapping[str, pa.DataType]:
        return partition_types(self.schema)

    def partition_of(self, split: Split) -> dict[str, pa.Scalar]:
        """The columns of the split's rows that stand in the path of its file."""
        return partition_values(split.file.path, self._partition_types)


@dataclass(frozen=True)
class Condition:
    """What every row that a query keeps fulfils: ``column operator value``.

    Attributes:
        operator: ``=``, ``<``, ``<=``, ``>`` or ``>=``.
        value: an int, a str or a date, of the column's own type.
    """

    column: str
    operator: str
    value: object


class Sampler(Protocol):
    """Makes up rows of a table."""

    def __call__(self, num_rows: int, columns: Collection[str] | None = None, /) -> pa.RecordBatch:
        """So many rows; other columns than the named ones are null. None names all."""


@dataclass(frozen=True)
class Pin:
    """What a source holds at one moment. Made by the module of its format.

    Attributes:
        schema: every column, as the query sees them; no metadata but `PARTITION` and `BY_ARROW`
            of a field.
        content: JSON values that decide the rows, and no secret: part of the fingerprint.
        cut: stored logical schema of what is kept, see `with_lineage`, and decoded bytes of a split
            -> splits in row order.
        with_groups: splits of this pin and the columns that are read of them -> the same splits,
            with their ``group_bytes``. None for a format that has none.
        snapshot: see `PinnedTable`.
        exact_rows: every split knows exactly how many rows it holds.
        comparable: whether ``content`` is the same when the source is the same. Where it is not,
            such as for a database, a version of the same spec counts as the same until a refresh.
        prune: the same without splits of which no row fulfils all conditions, as partitions and
            statistics tell; None where there are none to tell.
        sample: makes up rows from the statistics of the table; None where the format has none.
        bytes_by: what the bytes of its splits are estimated by, for a person; empty where that is
            the metadata of every file.
        close: lets go of what keeps the state readable, such as a transaction. Called once, when
            no split will be read any more.
    """

    schema: pa.Schema
    content: Sequence[object]
    cut: Callable[[pa.Schema, int], tuple[Split, ...]]
    snapshot: str = ""
    exact_rows: bool = False
    comparable: bool = True
    prune: Callable[[Sequence[Condition]], Pin] | None = None
    sample: Sampler | None = None
    bytes_by: str = ""
    with_groups: Callable[[Sequence[Split], Collection[str]], tuple[Split, ...]] | None = None
    close: Callable[[], None] = lambda: None


def with_lineage(stored: pa.Schema, lineage: Mapping[str, str]) -> pa.Schema:
    """``stored``, the fields of which say what column of a table they stand for, and so how long.

    Args:
        lineage: by name; the others stand for none.
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
    """The column of a table that a stored field stands for: by default that of its own name.

    Returns:
        with dots, for a field of a structure; empty where it stands for none.
    """
    return str((field.metadata or {}).get(SOURCE_COLUMN, field.name.encode()).decode())


def partition_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns of a table that stand in paths: those that are marked with `PARTITION`."""
    return {field.name: field.type for field in schema if PARTITION in (field.metadata or {})}


def partition_values(path: str, types: Mapping[str, pa.DataType]) -> dict[str, pa.Scalar]:
    """The columns of a file that stand in the names of its directories, ``key=value``, as in Hive.

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


def check_names(names: Iterable[str]) -> None:
    """Raises a ValueError where several columns have one name: a query finds but one of them."""
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"several columns are named {', '.join(map(repr, repeated))}")


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows, of any types."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, dtype) for dtype in schema.types], schema=schema)
