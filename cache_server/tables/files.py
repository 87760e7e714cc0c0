"""Tables made of files -> schema, splits. Reads only footers and the first rows of CSV and JSON."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from cache_protocol.datasets.column_types import parse_type
from cache_protocol.datasets.dataset_spec import TYPED_FORMATS, TableSpec
from cache_protocol.errors import LoadError, RequestError, some_of
from cache_server import object_stores
from cache_server.source.pinned import (
    BY_ARROW,
    GIVEN,
    PARTITION,
    KnownNulls,
    Pin,
    SourceFile,
    Split,
    partition_texts,
    with_mark,
)
from cache_server.sql import loader
from cache_server.tables import arrow_reader, footers, local_files, parquet
from cache_server.tables.common_types import storage_schema

_THREADS = 32  # mostly waiting for stores
_TAIL_BYTES = 64 * 1024  # of an Arrow file, which hold its footer
_HEAD_BYTES = 4 * 1024 * 1024  # of a CSV, to infer its columns
_JSON_BYTES = 4 * 1024 * 1024  # of a table of JSON, to infer its columns
_FEWEST_JSON_BYTES = 32 * 1024  # of each of its files
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def pin(table: TableSpec) -> tuple[str, Pin]:
    """The format of a table of files, and what the files hold now.

    Raises:
        LoadError: a file is missing, unreadable or empty; names it. RequestError: an unknown URI
            scheme or format, or bad types.
    """
    format, files, relative = local_files.find_files(table)
    if table.escape and format != "csv":
        raise RequestError(f"table {table.name!r}: escape is for csv, not for {format}")
    if format == "parquet":
        found = footers.read_footers(files, table)
        schema = arrow_reader.marked(
            parquet.common_schema(
                files,
                parquet.schemas_of(found),
                missing=table.missing_columns,
                widen=table.schema == "union",
            ),
            found,
        )
    else:
        found = ()
        schema = _inferred_schema(files, format, table)
    schema = _with_types(schema, format, table, [file for file in files if file.size])
    for field in _partition_fields(relative):
        if field.name not in schema.names:  # a column in the file comes first
            schema = schema.append(field)
    content: list[object] = [[file.path, file.size, file.mtime_ns, file.etag] for file in files]
    if table.types:
        content.append(dict(table.types))
    if table.schema != "same":
        content.append(table.schema)
    if table.escape:
        content.append(["escape", table.escape])
    return format, _pin(format, files, found, schema, content)


def _pin(
    format: str,
    files: Sequence[SourceFile],
    found: Sequence[pq.FileMetaData],
    schema: pa.Schema,
    content: Sequence[object],
) -> Pin:
    def cut(stored: pa.Schema, target_bytes: int) -> tuple[Split, ...]:
        if format == "parquet":
            return parquet.cut(files, found, stored, target_bytes)
        return text_splits(files, format, target_bytes)

    def with_groups(splits: Sequence[Split], columns: Collection[str]) -> tuple[Split, ...]:
        return parquet.with_group_bytes(splits, files, found, columns)

    is_parquet = format == "parquet"
    return Pin(
        schema,
        content,
        cut,
        exact_rows=is_parquet,
        bytes_by="" if is_parquet else "the sizes of the files",
        with_groups=with_groups if is_parquet else None,
        nulls=partial(parquet.nulls, found) if is_parquet else None,
        known_nulls=partial(_known_nulls, files, found) if is_parquet else lambda column: None,
    )


def _known_nulls(
    files: Sequence[SourceFile], found: Sequence[pq.FileMetaData], column: str
) -> KnownNulls | None:
    """See `Pin.known_nulls`. ``column`` is no column of paths."""
    nulls = [
        (file.path, group, count)
        for file, footer in zip(files, found, strict=True)
        for group, count in parquet.null_groups(footer, column)
    ]
    if not nulls:
        return None
    path, group, _ = nulls[0]
    return KnownNulls(
        sum(count for *_, count in nulls),
        tuple(dict.fromkeys(path for path, *_ in nulls)),
        group,
        None if object_stores.is_remote(path) else _first_null(path, group, column),
    )


def _first_null(path: str, group: int | None, column: str) -> int | None:
    """The row of the first null of a column in a file of this machine; None if it is not found."""
    if group is None:
        return 0
    with suppress(OSError, pa.ArrowException), pq.ParquetFile(path) as file:
        before: int = sum(file.metadata.row_group(index).num_rows for index in range(group))
        for batch in file.iter_batches(row_groups=[group], columns=[column]):
            row = int(batch.column(column).is_null().index(True).as_py())
            if row >= 0:
                return before + row
            before += batch.num_rows
    return None


def text_splits(files: Sequence[SourceFile], format: str, target_bytes: int) -> tuple[Split, ...]:
    """Splits of files without a footer; their rows are known only when they are loaded.

    Local newline JSON is cut at line ends. CSV is not cut, because a quoted value may hold a
    newline. Arrow files and objects of a store are not cut either.
    """
    splits = []
    for file in files:
        divisible = format == "json" and not object_stores.is_remote(file.path)
        parts = max(1, math.ceil(file.size / target_bytes)) if divisible else 1
        if file.size:
            splits += [Split(file, part, parts, None, file.size // parts) for part in range(parts)]
    return tuple(splits)


def _inferred_schema(files: Sequence[SourceFile], format: str, table: TableSpec) -> pa.Schema:
    """The schema that all files share.

    CSV is read by the position of columns, so all files must have the same ones.
    """
    filled = [file for file in files if file.size]
    if not filled:
        raise LoadError(f"{files[0].path} is empty: it does not even name its columns")
    if format == "json":
        return _schema_of_json(filled, table)

    def infer(file: SourceFile) -> pa.Schema:
        if not object_stores.is_remote(file.path):
            return loader.infer_schema(Path(file.path), format, file.path, escape=table.escape)
        with tempfile.TemporaryDirectory() as directory:
            beginning = _beginning(file, format, table, Path(directory), _HEAD_BYTES)
            is_whole = file.size <= _HEAD_BYTES
            return loader.infer_schema(
                beginning, format, file.path, is_whole=is_whole, escape=table.escape
            )

    with ThreadPoolExecutor(min(_THREADS, len(filled))) as pool:
        schemas = list(pool.map(infer, filled))
    if format == "arrow":
        return _common_arrow_schema(filled, schemas, table)
    first = schemas[0]
    for file, schema in zip(filled[1:], schemas[1:], strict=True):
        # The types inferred for CSV files may differ; reading will tell.
        if schema.names != first.names:
            raise LoadError(
                f"{file.path} has other columns than {filled[0].path}: "
                f"{parquet.difference(first, schema)}"
            )
    return first


def _common_arrow_schema(
    files: Sequence[SourceFile], schemas: Sequence[pa.Schema], table: TableSpec
) -> pa.Schema:
    """The columns of Arrow files, with `BY_ARROW` where a file has others: see `arrow_reader`."""
    stored = [
        pa.schema(
            [
                plain.with_metadata(field.metadata)
                for plain, field in zip(storage_schema(schema), schema, strict=True)
            ]
        )
        for schema in schemas
    ]
    common = parquet.common_schema(
        files, stored, missing=table.missing_columns, widen=table.schema == "union"
    )
    is_other = [
        any(
            schema.names != common.names
            or not as_stored.field(name).type.equals(common.field(name).type)
            for schema, as_stored in zip(schemas, stored, strict=True)
        )
        for name in common.names
    ]
    return pa.schema(
        [
            with_mark(field, BY_ARROW) if other else field
            for field, other in zip(common, is_other, strict=True)
        ]
    )


def _schema_of_json(files: Sequence[SourceFile], table: TableSpec) -> pa.Schema:
    """The columns of newline JSON, by the first bytes of every file.

    JSON is read by name; a missing key is null.
    """
    max_bytes = json_bytes(len(files))
    schema = pa.schema([])
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(min(_THREADS, len(files))) as pool,
    ):

        def fetched(number: int) -> Path:
            file = files[number]
            if not object_stores.is_remote(file.path):
                return Path(file.path)
            (folder := Path(directory, str(number))).mkdir()
            return _beginning(file, "json", table, folder, max_bytes)

        for file, path in zip(files, pool.map(fetched, range(len(files))), strict=True):
            schema = loader.infer_json(path, file.path, schema, table.types, max_bytes)
    return schema


def json_bytes(num_files: int) -> int:
    """The bytes of each file of newline JSON by which its columns are inferred."""
    return max(_JSON_BYTES // num_files, _FEWEST_JSON_BYTES)


def _with_types(
    schema: pa.Schema, format: str, table: TableSpec, files: Sequence[SourceFile]
) -> pa.Schema:
    """The schema with the types that the spec gives."""
    if table.types and format not in TYPED_FORMATS:
        raise RequestError(
            f"table {table.name!r}: types, got {dict(table.types)!r}, is for "
            f"{' and '.join(TYPED_FORMATS)}, not for {format}"
        )
    # Later rows of JSON may have further keys.
    has_more = format == "json" and any(file.size > json_bytes(len(files)) for file in files)
    for column, name in table.types.items():
        dtype = parse_type(name)
        field = pa.field(column, dtype, metadata={GIVEN: b"spec"})
        if column not in schema.names:
            if has_more:
                schema = schema.append(field)
                continue
            raise RequestError(
                f"table {table.name!r}: types names the column {column!r}, which the first rows do "
                f"not have; columns: {some_of(schema.names, like=column)}"
            )
        if pa.types.is_list(dtype) and format == "csv":
            raise RequestError(f"table {table.name!r}: types.{column}: {name} is for json, not csv")
        schema = schema.set(schema.names.index(column), field)
    return schema


def _beginning(
    file: SourceFile, format: str, table: TableSpec, directory: Path, head_bytes: int
) -> Path:
    """A local file with the beginning of an object, or both its ends, to infer the columns."""
    path = directory / f"beginning{Path(urlsplit(file.path).path).suffix}"
    head = (0, min(file.size, head_bytes))
    tail = (max(head[1], file.size - _TAIL_BYTES), file.size)
    wanted = [head, tail] if format == "arrow" and tail[0] < tail[1] else [head]
    whole = file.size <= head_bytes
    object_stores.download(file, path, table.options, table.secrets, None if whole else wanted)
    if format != "arrow" and not whole:
        data = path.read_bytes()[: head[1]]
        path.write_bytes(data[: data.rfind(b"\n") + 1])
    return path


def _partition_fields(relative: Sequence[str]) -> list[pa.Field]:
    """The columns of ``key=value`` directories, as in Hive, that every file has."""
    texts = [partition_texts(path) for path in relative]
    fields = []
    for key in texts[0]:
        if not all(key in found for found in texts):
            continue
        values = [value for found in texts if (value := found[key]) is not None]
        integers = bool(values) and all(map(_INTEGER.fullmatch, values))
        dtype = pa.int64() if integers else pa.string()
        fields.append(pa.field(key, dtype, metadata={PARTITION: b"path"}))
    return fields
