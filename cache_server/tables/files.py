"""Tables made of files: paths, globs and URIs -> files -> splits.

Reads only listings, footers and the first rows of CSV and JSON. `local_files` finds files of this
machine, `object_stores` others.
"""

from __future__ import annotations

import glob
import math
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from cache_protocol.datasets.column_types import parse_type
from cache_protocol.datasets.dataset_spec import FILE_SUFFIXES, TYPED_FORMATS, TableSpec
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import LoadError, RequestError
from cache_server import object_stores
from cache_server.source.pinned import (
    BY_ARROW,
    GIVEN,
    PARTITION,
    Pin,
    SourceFile,
    Split,
    partition_texts,
    partition_types,
    partition_values,
    with_mark,
)
from cache_server.source.saved_datasets import parts_of_dict, without_metadata
from cache_server.sql import loader
from cache_server.sql.formats.first_bytes import FIRST_BYTES, objection
from cache_server.tables import arrow_reader, footers, local_files, parquet
from cache_server.tables.common_types import storage_schema
from cache_server.tables.synthetic import rows_like

_THREADS = 32  # mostly waiting for stores
_FOOTERS_AT_ONCE = 256  # in memory as bytes
_TAIL_BYTES = 64 * 1024  # of an Arrow file, which hold its footer
_KNOWN = footers.KnownFooters(64 * 1024 * 1024)
_HEAD_BYTES = 4 * 1024 * 1024  # of a CSV, to infer its columns
_JSON_BYTES = 4 * 1024 * 1024  # of a table of JSON, to infer its columns
_FEWEST_JSON_BYTES = 32 * 1024  # of each of its files
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip")  # suffixes
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def pin(table: TableSpec) -> tuple[str, Pin]:
    """The format of a table of files, and what the files hold now.

    Raises:
        LoadError: a file is missing, unreadable or empty; names it. RequestError: an unknown URI
            scheme or format, or bad types.
    """
    format, files, relative = find_files(table)
    if table.escape and format != "csv":
        raise RequestError(f"table {table.name!r}: escape is for csv, not for {format}")
    if format == "parquet":
        found = read_footers(files, table)
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

    def sample(num_rows: int, columns: Collection[str] | None = None, /) -> pa.RecordBatch:
        types = partition_types(schema)
        constants = [partition_values(file.path, types) for file in files]
        groups = [
            (footer.row_group(index), values)
            for footer, values in zip(found, constants, strict=True)
            for index in range(footer.num_row_groups)
        ]
        return rows_like(groups, schema, num_rows, columns)

    is_parquet = format == "parquet"
    return Pin(
        schema,
        content,
        cut,
        exact_rows=is_parquet,
        sample=sample if is_parquet else None,
        bytes_by="" if is_parquet else "the sizes of the files",
        with_groups=with_groups if is_parquet else None,
        nulls=partial(parquet.nulls, found) if is_parquet else None,
    )


def find_files(table: TableSpec) -> tuple[str, tuple[SourceFile, ...], tuple[str, ...]]:
    """The format, the files and their paths below their source, in row order.

    - Sources keep their order; the files of a source are sorted by name.
    - A directory skips names that start with ``.`` or ``_``, and files of other formats. A glob
      skips them too, unless it names them.
    - Links are followed, except for a link to a directory above itself.

    Raises:
        LoadError: naming a path that is missing, unreadable or not UTF-8, a broken link, or a
            source without files.
        RequestError: an unknown URI scheme, option or format, files of a Delta or Iceberg table, or
            a compressed file.
    """
    format = table.format
    plain = [suffix for suffix, kind in FILE_SUFFIXES.items() if format in (None, kind)]
    # Compressed files too: skipping them would silently lose rows.
    suffixes = (*plain, *(suffix + end for suffix in plain for end in _COMPRESSED))
    files: list[SourceFile] = []
    relative: list[str] = []
    formats: dict[str, str] = {}
    for source in table.source:
        if object_stores.is_remote(source):
            root = object_stores.root_of(source, table.options)
            found = object_stores.expand(
                source,
                suffixes,
                table.options,
                table.secrets,
                partial(_is_ignored, table, root),
            )
        else:
            object_stores.check_unused(table.options, table.secrets)
            root, paths = local_files.expand(source, suffixes, table.ignore)
            found = [_stat(path) for path in paths]
        found = [file for file in found if not _is_ignored(table, root, file.path)]
        if not glob.has_magic(source):
            found = _of_saved_dataset(source, found, root)
        if not found:
            raise _holds_nothing(source, format, table.ignore)
        for file in found:
            if not is_text(file.path):  # protobuf cannot carry it
                raise LoadError(f"cannot read {file.path!r}: its name is not UTF-8")
            if file.path.lower().endswith(_COMPRESSED):
                raise RequestError(
                    f"{file.path} is compressed, which is not read: unpack it, or leave it out by "
                    "ignore"
                )
        files += found
        relative += [local_files.below(file.path, root) for file in found]
        for file in found:
            formats.setdefault(format or _format_of(file.path), file.path)
    if len(formats) > 1:
        examples = ", ".join(f"{path} ({name})" for name, path in formats.items())
        raise RequestError(f"one dataset has one format, found several: {examples}")
    return next(iter(formats)), tuple(files), tuple(relative)


def _of_saved_dataset(source: str, files: list[SourceFile], root: str) -> list[SourceFile]:
    """The files of a folder; of one that Hugging Face saved, only those with rows."""
    by_path = {local_files.below(file.path, root): file for file in files}
    if parts := parts_of_dict(list(by_path)):
        raise RequestError(
            f"source {source!r} holds several datasets, such as the splits of a Hugging Face "
            f"DatasetDict: name the folders to load, among {', '.join(parts)}"
        )
    return [by_path[path] for path in without_metadata(list(by_path))]


def _is_ignored(table: TableSpec, root: str, path: str) -> bool:
    return local_files.is_ignored(local_files.below(path, root), table.ignore)


def check_unchanged(file: SourceFile) -> None:
    """Raises a `LoadError` if a file of this machine is not the planned one."""
    now = _stat(file.path)
    if now != file:
        raise LoadError(
            f"source file {file.path} changed since the dataset was planned: it had {file.size} "
            f"bytes and mtime {file.mtime_ns} ns, now {now.size} bytes and {now.mtime_ns} ns"
        )


def read_footers(files: Sequence[SourceFile], table: TableSpec) -> tuple[pq.FileMetaData, ...]:
    """The Parquet footers of all files.

    Raises:
        LoadError: a footer cannot be read; names the file.
    """

    def tail(file: SourceFile) -> bytes:
        if object_stores.is_remote(file.path):
            return footers.read_tail(
                file.size,
                lambda size: object_stores.read_tail(file, size, table.options, table.secrets),
            )
        try:
            with open(file.path, "rb") as opened:
                return footers.tail_of(opened)
        except OSError as error:
            raise _no_footer(file, b"", error) from None

    def parsed(tail: bytes) -> pq.FileMetaData | None:
        with suppress(pa.ArrowInvalid, OSError):  # the check tells the reason
            return footers.parsed(tail)
        return None

    store = hash((tuple(sorted(table.options.items())), tuple(sorted(table.secrets.items()))))
    known = {file: _KNOWN.get((file, store)) for file in files}
    # A pickle holds the bytes of the footer, and is parsed in half the time.
    found: dict[SourceFile, pq.FileMetaData] = {
        file: pickle.loads(pickled) for file, pickled in known.items() if pickled is not None
    }
    new = [file for file, pickled in known.items() if pickled is None]
    with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
        for start in range(0, len(new), _FOOTERS_AT_ONCE):
            some = new[start : start + _FOOTERS_AT_ONCE]
            tails = list(pool.map(tail, some))
            footers_of_some = pool.map(parsed, tails)  # meanwhile
            if (fault := footers.first_fault(tails)) is not None:
                index, reason = fault
                raise _bad_footer(some[index], tails[index], reason)
            found.update(zip(some, footers_of_some, strict=True))
            for file in some:
                if file.mtime_ns or file.etag:
                    _KNOWN.add((file, store), pickle.dumps(found[file]))
    return tuple(found[file] for file in files)


def read_remote_footer(file: SourceFile, last: Callable[[int], bytes]) -> pq.FileMetaData:
    """The Parquet footer of an object; one request if it has a usual size.

    Args:
        last: returns the last bytes of the object, as many as given.

    Raises:
        LoadError: the footer is not valid; names the object.
    """
    tail = footers.read_tail(file.size, last)
    try:
        return footers.checked(tail)
    except pa.ArrowInvalid as error:
        raise _bad_footer(file, tail, str(error)) from None


def _bad_footer(file: SourceFile, tail: bytes, reason: str) -> LoadError:
    is_remote = object_stores.is_remote(file.path)
    whole = tail if len(tail) == file.size else b""
    return _no_footer(file, whole if is_remote else _first_bytes(file.path), reason)


def _no_footer(file: SourceFile, head: bytes, error: Exception | str) -> LoadError:
    if (reason := objection(head[:FIRST_BYTES], "parquet")) is not None:
        return LoadError(f"cannot read {file.path} as parquet: {reason}")
    return LoadError(f"cannot read the Parquet footer of {file.path}: {error}")


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as opened:
            return opened.read(FIRST_BYTES)
    except OSError:
        return b""  # the caller reports its own error


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
                f"not have; columns: {', '.join(schema.names)}"
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


def _holds_nothing(source: str, format: str | None, ignore: Collection[str]) -> LoadError:
    if glob.has_magic(source):
        left = " that is not ignored" if ignore else ""
        return LoadError(f"source {source!r} matches no file{left}")
    kind = f"{format} files" if format else "files of a known format"
    return LoadError(f"source {source!r} holds no {kind} ({', '.join(FILE_SUFFIXES)})")


def _format_of(path: str) -> str:
    try:
        return FILE_SUFFIXES[Path(path).suffix.lower()]
    except KeyError:
        raise RequestError(
            f"cannot tell the format of {path} by its name; give format= one of "
            f"{', '.join(sorted(set(FILE_SUFFIXES.values())))}"
        ) from None


def _stat(path: str) -> SourceFile:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise LoadError(f"cannot read source file {path}: {error.strerror}") from None
    return SourceFile(path, stat.st_size, stat.st_mtime_ns)
