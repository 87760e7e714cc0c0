"""What is there to read: paths, globs and URIs -> files -> splits.

Reads directory listings and Parquet footers, never rows. It does not know shards or nodes.
"""

from __future__ import annotations

import glob
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server.planning import SourceFile, Split
from protos.errors import LoadError, RequestError
from protos.layout import Layout

SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
_FOOTER_THREADS = 8
_VARIABLE_WIDTH_BYTES = 32  # of a string or list that no footer tells about


def find_files(sources: Iterable[str], format: str | None) -> tuple[str, tuple[SourceFile, ...]]:
    """The format and the files, in row order: sources as given, the files of each by name.

    In a directory, hidden files and those that start with ``_`` are passed over, as everywhere in
    the Parquet world; so are files of other formats. A glob passes over them too, unless it names
    them.

    Raises:
        LoadError: naming a path that is missing or unreadable, or a source that holds no file.
        RequestError: for a URI scheme that is not served, or a format that cannot be told.
    """
    files: list[SourceFile] = []
    formats: dict[str, str] = {}
    for source in sources:
        found = _expand(source, format)
        if not found:
            kind = f"{format} files" if format else "files of a known format"
            raise LoadError(f"source {source!r} holds no {kind} ({', '.join(SUFFIXES)})")
        for path in found:
            files.append(_stat(path))
            formats.setdefault(format or _format_of(path), path)
    if len(formats) > 1:
        examples = ", ".join(f"{path} ({name})" for name, path in formats.items())
        raise RequestError(f"one dataset has one format, found several: {examples}")
    return next(iter(formats)), tuple(files)


def check_unchanged(file: SourceFile) -> None:
    """Raises a `LoadError` when ``file`` is not the one that was planned."""
    now = _stat(file.path)
    if now != file:
        raise LoadError(
            f"source file {file.path} changed since the dataset was planned: it had {file.size} "
            f"bytes and mtime {file.mtime_ns} ns, now {now.size} bytes and {now.mtime_ns} ns"
        )


def parquet_schema(files: Sequence[SourceFile]) -> tuple[pa.Schema, tuple[pq.FileMetaData, ...]]:
    """The schema that all files share, and their footers.

    Raises:
        LoadError: naming a file whose footer cannot be read or whose columns differ.
    """
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        footers = tuple(pool.map(_footer, files))
    first = footers[0].schema.to_arrow_schema().remove_metadata()
    for file, footer in zip(files[1:], footers[1:], strict=True):
        schema = footer.schema.to_arrow_schema().remove_metadata()
        if not schema.equals(first):
            raise LoadError(
                f"{file.path} has other columns than {files[0].path}: {difference(first, schema)}"
            )
    return first, footers


def parquet_splits(
    files: Sequence[SourceFile],
    footers: Sequence[pq.FileMetaData],
    stored: pa.Schema,
    target_bytes: int,
) -> tuple[Split, ...]:
    """Splits of about ``target_bytes`` decoded: whole files, or byte ranges of large ones.

    DataFusion gives a row group to the byte range in which its first page starts, so the rows of
    each split are known from the footer. Ranges without a row group are left out.

    Args:
        stored: the logical schema that is kept; says what a row costs.
    """
    splits: list[Split] = []
    layout = Layout(stored)
    for file, footer in zip(files, footers, strict=True):
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        sizes = [_decoded_bytes(group, layout) for group in groups]
        wanted = max(1, min(len(groups), math.ceil(sum(sizes) / target_bytes)))
        part_bytes = math.ceil(file.size / wanted)
        parts = math.ceil(file.size / part_bytes)  # so many ranges of that size, not always wanted
        rows, decoded = [0] * parts, [0] * parts
        for group, size in zip(groups, sizes, strict=True):
            column = group.column(0)
            offset = column.dictionary_page_offset
            part = (offset if offset is not None else column.data_page_offset) // part_bytes
            rows[part] += group.num_rows
            decoded[part] += size
        splits += [
            Split(file, part, parts, rows[part], decoded[part])
            for part in range(parts)
            if rows[part]
        ]
    return tuple(splits)


def text_splits(files: Sequence[SourceFile], format: str, target_bytes: int) -> tuple[Split, ...]:
    """Splits of files without a footer to read: their rows are known only when loaded.

    Newline JSON is cut at line ends anywhere. CSV is not cut, because a quoted value may hold a
    newline; an Arrow file is not cut either.
    """
    splits = []
    for file in files:
        parts = max(1, math.ceil(file.size / target_bytes)) if format == "json" else 1
        if file.size:
            splits += [Split(file, part, parts, None, file.size // parts) for part in range(parts)]
    return tuple(splits)


def _decoded_bytes(group: pq.RowGroupMetaData, layout: Layout) -> int:
    encoded: dict[str, int] = {}
    for i in range(group.num_columns):
        column = group.column(i)
        name = column.path_in_schema.split(".")[0]
        encoded[name] = encoded.get(name, 0) + column.total_uncompressed_size
    # Of strings and lists the footer knows more than the type.
    rows: int = group.num_rows
    plain = [column.names[0] for column in layout.columns if column.kind == "plain"]
    return rows * layout.fixed_row_bytes + sum(
        encoded.get(name, rows * _VARIABLE_WIDTH_BYTES) for name in plain
    )


def difference(first: pa.Schema, other: pa.Schema) -> str:
    """What ``other`` has that ``first`` has not, and the other way round, in words."""
    expected = {field.name: str(field.type) for field in first}
    found = {field.name: str(field.type) for field in other}
    notes = [
        f"{name} is {found.get(name, 'missing')} instead of {expected.get(name, 'absent')}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]
    if not notes and first.names != other.names:
        notes = [f"they stand as {', '.join(other.names)} instead of {', '.join(first.names)}"]
    return "; ".join(notes) or "they differ in where nulls are allowed"


def _footer(file: SourceFile) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise LoadError(f"cannot read the Parquet footer of {file.path}: {error}") from None


def _expand(source: str, format: str | None) -> list[str]:
    path = _local_path(source)
    if os.path.isdir(path):
        return sorted(
            str(child)
            for child in Path(path).rglob("*")
            if child.is_file() and not _hidden(child.relative_to(path)) and _wanted(child, format)
        )
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        return _glob(path)
    raise LoadError(f"source {source!r} does not exist on the node")


def _glob(pattern: str) -> list[str]:
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    root = Path(*fixed)
    names_hidden = _hidden(Path(pattern).relative_to(root))
    return sorted(
        found
        for found in glob.glob(pattern, recursive=True)
        if os.path.isfile(found) and (names_hidden or not _hidden(Path(found).relative_to(root)))
    )


def _local_path(source: str) -> str:
    if "://" not in source:
        return source
    uri = urlsplit(source)
    if uri.scheme != "file" or uri.netloc not in ("", "localhost"):
        raise RequestError(f"source {source!r}: only local paths and file:// URIs are served")
    return unquote(uri.path)


def _hidden(relative: Path) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)


def _wanted(path: Path, format: str | None) -> bool:
    known = SUFFIXES.get(path.suffix.lower())
    return known is not None and (format is None or known == format)


def _format_of(path: str) -> str:
    try:
        return SUFFIXES[Path(path).suffix.lower()]
    except KeyError:
        raise RequestError(
            f"cannot tell the format of {path} by its name; give format= one of "
            f"{', '.join(sorted(set(SUFFIXES.values())))}"
        ) from None


def _stat(path: str) -> SourceFile:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise LoadError(f"cannot read source file {path}: {error.strerror}") from None
    return SourceFile(path, stat.st_size, stat.st_mtime_ns)
