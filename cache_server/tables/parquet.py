"""Parquet footers -> schema of the table, splits, bytes to fetch. Reads no rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cache_protocol.errors import LoadError, some_of
from cache_protocol.storage.layout import GUESSED_VALUE_BYTES, Layout
from cache_server.source.byte_ranges import Range
from cache_server.source.pinned import (
    BY_ARROW,
    UNDER_NULLS,
    SourceFile,
    Split,
    check_schema,
    partition_texts,
    sized_fields,
    source_column,
    source_type,
    with_mark,
    with_source_type,
    without_source_type,
)
from cache_server.sql.plain_columns import hides_values, plain_schema, with_fields
from cache_server.tables.column_sizes import (
    Place,
    column_of,
    leaf_paths,
    plain_bytes,
    row_bytes,
    value_bytes,
)
from cache_server.tables.common_types import common_type, may_lose, storage_schema

ARROW_SCHEMA = b"ARROW:schema"  # in the metadata of a file that Arrow wrote

_SMALL_BYTES = 8 << 20  # of a file too small to matter for the memory of a load


def common_schema(
    files: Sequence[SourceFile], schemas: Sequence[pa.Schema], *, missing: str, widen: bool
) -> pa.Schema:
    """The columns of the table: those of the first file, then further ones.

    Columns match by name, so their order may differ between files. A column is nullable if it is
    nullable or missing in some file, and has `UNDER_NULLS` if it needs that in some file. Columns
    whose types differ get their `common_type`.

    Args:
        schemas: of each file; the same object for equal ones.
        missing: for a column that some files lack: ``refuse`` or ``null``.
        widen: see `common_type`; also makes missing columns null.

    Raises:
        LoadError: naming a file whose columns differ in type, are missing, or repeat a name.
    """
    fields: dict[str, pa.Field] = {}
    several: set[str] = set()  # columns with several types in their files
    first_of = {id(schema): index for index, schema in reversed(list(enumerate(schemas)))}
    different = [(files[index], schemas[index]) for index in sorted(first_of.values())]
    for file, schema in different:
        try:
            check_schema(schema)
        except ValueError as error:
            raise LoadError(f"cannot read {file.path}: {error}") from None
        for field in schema:
            known = fields.setdefault(field.name, field)
            dtype = common_type(known.type, field.type, widen=widen)
            if dtype is None:
                wider = common_type(known.type, field.type, widen=True)
                remedy = f"; schema: union makes it {wider}" if wider is not None else ""
                raise LoadError(
                    f"{file.path} has other columns than {files[0].path}: {field.name} is "
                    f"{field.type} instead of {known.type}{remedy}"
                )
            known = fields[field.name] = known.with_type(dtype)
            if field.metadata:
                known = fields[field.name] = known.with_metadata(field.metadata)
            if field.nullable:
                known = fields[field.name] = known.with_nullable(True)
            if not source_type(known).equals(source_type(field)):
                several.add(field.name)
    for file, schema in different:
        names = set(schema.names)
        absent = [name for name in fields if name not in names]
        if absent and missing == "refuse" and not widen:
            other = next(f for f, s in zip(files, schemas, strict=True) if absent[0] in s.names)
            raise LoadError(
                f"{file.path} has other columns than {other.path}: "
                f"{some_of(absent)} missing; missing_columns: null makes them null"
            )
        fields |= {name: fields[name].with_nullable(True) for name in absent}
    fields |= {name: without_source_type(fields[name]) for name in several}
    unsafe = {
        field.name
        for schema in {id(schema): schema for schema in schemas}.values()
        for field in schema
        if may_lose(field.type, fields[field.name].type)
    }
    return pa.schema(
        [with_mark(field, BY_ARROW) if field.name in unsafe else field for field in fields.values()]
    )


def cut(
    files: Sequence[SourceFile],
    footers: Sequence[pq.FileMetaData],
    stored: pa.Schema,
    target_bytes: int,
) -> tuple[Split, ...]:
    """Splits of about ``target_bytes`` decoded: whole files, or byte ranges of large ones.

    DataFusion gives a row group to the byte range in which its first page starts, so the rows of
    each split are known from the footer. Ranges without a row group are left out.

    Args:
        stored: the logical schema that is kept, see `pinned.with_lineage`; gives row sizes.

    Raises:
        LoadError: a row group begins outside its file; names it.
    """
    splits: list[Split] = []
    layout = Layout(stored)
    for file, footer in zip(files, footers, strict=True):
        groups = _groups(footer)
        fixed = (group.num_rows * layout.fixed_row_bytes for group in groups)
        columns = [(field, _place(field, file, footer)) for field in sized_fields(layout)]
        plain = plain_bytes(footer, columns)
        sizes = [size + sum(more) for size, more in zip(fixed, plain, strict=True)]
        wanted = max(1, min(len(groups), math.ceil(sum(sizes) / target_bytes)))
        part_bytes = math.ceil(file.size / wanted)
        parts = math.ceil(file.size / part_bytes)  # so many ranges of that size, not always wanted
        rows, decoded = [0] * parts, [0] * parts
        for group, size in zip(groups, sizes, strict=True):
            start = _start(group)
            if not 0 <= start < file.size:
                raise LoadError(
                    f"cannot read {file.path}: a row group begins at byte {start} of {file.size}"
                )
            part = start // part_bytes
            rows[part] += group.num_rows
            decoded[part] += size
        splits += [
            Split(file, part, parts, rows[part], decoded[part])
            for part in range(parts)
            if rows[part]
        ]
    return tuple(splits)


def nulls(footers: Sequence[pq.FileMetaData], columns: Collection[str]) -> dict[str, int]:
    """The nulls of columns without fields, of those whose statistics tell in every row group."""
    counts = dict.fromkeys(columns, 0)
    for footer in footers:
        paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
        for index, path in enumerate(paths):
            for group in range(footer.num_row_groups) if path in counts else ():
                statistics = footer.row_group(group).column(index).statistics
                if statistics is None or not statistics.has_null_count:
                    del counts[path]
                    break
                counts[path] += statistics.null_count
        for name in counts.keys() - set(paths):  # missing_columns: null
            counts[name] += footer.num_rows
    return counts


def null_groups(footer: pq.FileMetaData, column: str) -> list[tuple[int | None, int]]:
    """The row groups whose statistics tell nulls of a column without fields, and how many.

    Returns:
        None in place of a row group: the file lacks the column, so each row has a null.
    """
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    if column not in paths:
        is_nested = column in footer.schema.to_arrow_schema().names
        return [] if is_nested or not footer.num_rows else [(None, footer.num_rows)]
    index = paths.index(column)
    found: list[tuple[int | None, int]] = []
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(index).statistics
        if statistics is not None and statistics.has_null_count and statistics.null_count:
            found.append((group, statistics.null_count))
    return found


def with_group_bytes(
    splits: Iterable[Split],
    files: Sequence[SourceFile],
    footers: Sequence[pq.FileMetaData],
    columns: Iterable[str],
) -> tuple[Split, ...]:
    """The splits with the bytes of their largest row group in the file, of the read columns.

    For a small file that is the size of the file, which is faster than to go through its footer.

    Args:
        files: at least those of the splits, with their footers.
        columns: that are read.
    """
    footer_of = {file.path: footer for file, footer in zip(files, footers, strict=True)}
    wanted = set(columns)
    largest: dict[str, dict[int, int]] = {}  # of the parts of a file
    measured = []
    for split in splits:
        path, size = split.file.path, split.file.size
        if size > _SMALL_BYTES:
            if path not in largest:
                largest[path] = largest_groups(footer_of[path], split, wanted)
            size = largest[path].get(split.part, 0)
        measured.append(replace(split, group_bytes=size))
    return tuple(measured)


def largest_groups(footer: pq.FileMetaData, split: Split, wanted: set[str]) -> dict[int, int]:
    """Part of a file -> the bytes of its largest row group, if it is cut like ``split``."""
    part_bytes = math.ceil(split.file.size / split.parts)
    leaves = [i for i, path in enumerate(leaf_paths(footer)) if column_of(path, wanted) is not None]
    largest: dict[int, int] = {}
    for group in _groups(footer):
        size = sum(group.column(leaf).total_compressed_size for leaf in leaves)
        part = _start(group) // part_bytes
        largest[part] = max(largest.get(part, 0), size)
    return largest


def ranges(footer: pq.FileMetaData, split: Split, columns: Iterable[str] | None) -> list[Range]:
    """The byte ranges that reading a split needs, in order: its pages, then the footer.

    Args:
        columns: that are read; None for all.
    """
    part_bytes = math.ceil(split.file.size / split.parts)
    wanted = set(columns) if columns is not None else None
    needed = [wanted is None or column_of(path, wanted) is not None for path in leaf_paths(footer)]
    found: list[Range] = []
    data_end = 0
    for group in _groups(footer):
        is_ours = _start(group) // part_bytes == split.part
        for i in range(group.num_columns):
            chunk = group.column(i)
            start = _chunk_start(chunk)
            stop = start + chunk.total_compressed_size
            data_end = max(data_end, stop)
            if is_ours and needed[i]:
                found.append((start, stop))
    return [*sorted(found), (data_end, split.file.size)]


def read_row_bytes(path: Path, split: Split, schema: pa.Schema) -> int:
    """Decoded bytes of a row, for the size of batches.

    Args:
        path: of the split's file on this machine.
        schema: of the columns that are read.

    Raises:
        LoadError: the file is damaged; names the split.
    """
    if all(map(pa.types.is_primitive, schema.types)):
        return int(sum(dtype.bit_width for dtype in schema.types)) // 8
    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise LoadError(f"cannot load {split}: {error}") from None
    return int(row_bytes(footer, schema.names, groups_of(footer, split)))


def groups_of(footer: pq.FileMetaData, split: Split) -> list[int]:
    """The numbers of the row groups of a split."""
    part_bytes = math.ceil(split.file.size / split.parts)
    starts = (_start(group) // part_bytes for group in _groups(footer))
    return [index for index, part in enumerate(starts) if part == split.part]


def schemas_of(footers: Sequence[pq.FileMetaData]) -> list[pa.Schema]:
    """The `_marked` schema of each footer; the same object for equal bytes in consecutive files."""
    schemas: list[pa.Schema] = []
    known: tuple[pq.ParquetSchema, bytes | None, pa.Schema] | None = None
    for footer in footers:
        stored, arrow = footer.schema, (footer.metadata or {}).get(ARROW_SCHEMA)
        if known is None or arrow != known[1] or not stored.equals(known[0]):
            known = stored, arrow, _as_in_file(_marked(_arrow_schema(stored)), stored)
        schemas.append(known[2])
    return schemas


def _marked(schema: pa.Schema) -> pa.Schema:
    """The `plain_schema`, with no metadata but `UNDER_NULLS` of a field."""
    return pa.schema(
        [
            plain.with_metadata({UNDER_NULLS: b""} if hides_values(field) else {})
            for field, plain in zip(schema, plain_schema(schema), strict=True)
        ]
    )


def _as_in_file(schema: pa.Schema, stored: pq.ParquetSchema) -> pa.Schema:
    """``schema`` with the type that Arrow gives each column of a file."""
    pairs = zip(schema, stored.to_arrow_schema(), strict=True)
    return pa.schema([with_source_type(field, source) for field, source in pairs])


def _arrow_schema(stored: pq.ParquetSchema) -> pa.Schema:
    """The schema without extension types, and with INT96 in microseconds.

    Nanoseconds end with the year 2262. Spark and Hive write INT96, often with the year 9999 as "no
    end".
    """
    schema = storage_schema(stored.to_arrow_schema())
    physical = [stored.column(i).physical_type for i in range(len(stored))]
    if "INT96" not in physical:
        return schema
    leaves = iter(physical)
    return pa.schema([_in_microseconds(field, leaves) for field in schema])


def _in_microseconds(field: pa.Field, leaves: Iterator[str]) -> pa.Field:
    """``field``, the physical types of whose leaves are the next ones."""
    dtype = field.type
    if pa.types.is_nested(dtype):
        return field.with_type(with_fields(dtype, lambda child: _in_microseconds(child, leaves)))
    if next(leaves) == "INT96":
        return field.with_type(pa.timestamp("us", dtype.tz))
    return field


def difference(first: pa.Schema, other: pa.Schema) -> str:
    """How ``other`` differs from ``first``, in words."""
    expected = {field.name: str(field.type) for field in first}
    found = {field.name: str(field.type) for field in other}
    notes = [
        f"{name} is {found.get(name, 'missing')} instead of {expected.get(name, 'absent')}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]
    return (some_of(notes, "; ") if notes else "") or (
        f"they stand as {some_of(other.names)} instead of {some_of(first.names)}"
    )


def _groups(footer: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    return [footer.row_group(i) for i in range(footer.num_row_groups)]


def _start(group: pq.RowGroupMetaData) -> int:
    return _chunk_start(group.column(0))


def _chunk_start(chunk: pq.ColumnChunkMetaData) -> int:
    offset = chunk.dictionary_page_offset
    return int(offset if offset is not None else chunk.data_page_offset)


def _place(field: pa.Field, file: SourceFile, footer: pq.FileMetaData) -> Place:
    source, constants = source_column(field), partition_texts(file.path)
    if not source:
        return GUESSED_VALUE_BYTES
    if source in constants and source not in footer.schema.to_arrow_schema().names:
        return value_bytes(field, constants[source])
    return source
