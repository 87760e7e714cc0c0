"""Tables made of files: paths, globs and URIs -> files -> splits.

Reads listings, footers and the first rows of texts, never more. Files of this machine are looked
up here, others by `object_stores`. Knows neither shards nor nodes.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server import loader, object_stores
from cache_server.pinned import (
    PARTITION,
    Pin,
    SourceFile,
    Split,
    partition_texts,
    partition_types,
    partition_values,
)
from cache_server.tables import parquet
from cache_server.tables.synthetic import rows_like
from protos.errors import LoadError, RequestError
from protos.spec import FILE_SUFFIXES, TableSpec

_THREADS = 32  # that wait for stores most of the time
_FOOTER_BYTES = 64 * 1024  # read at once from the end of an object: most footers are shorter
_HEAD_BYTES = 4 * 1024 * 1024  # of a text, to see its columns
_DELTA_LOG = "_delta_log"
_HIDDEN = (".", "_")  # how names begin that are passed over
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")

_Entry = os.DirEntry[str] | Path  # of a directory; of a path that is written out


def pin(table: TableSpec) -> tuple[str, Pin]:
    """The format of a table of files, and what the files hold now.

    Raises:
        LoadError: naming what is missing, unreadable or empty. RequestError: for a URI scheme that
            is not served, or a format that cannot be told.
    """
    format, files, relative = find_files(table)
    if format == "parquet":
        footers = read_footers(files, table)
        schema = parquet.common_schema(files, footers, missing=table.missing_columns)
    else:
        footers = ()
        schema = _inferred_schema(files, format, table)
    for field in _partition_fields(relative):
        if field.name not in schema.names:  # a file's own column of that name counts
            schema = schema.append(field)
    content = [[file.path, file.size, file.mtime_ns, file.etag] for file in files]
    return format, _pin(format, files, footers, schema, content)


def _pin(
    format: str,
    files: Sequence[SourceFile],
    footers: Sequence[pq.FileMetaData],
    schema: pa.Schema,
    content: Sequence[object],
) -> Pin:
    def cut(stored: pa.Schema, target_bytes: int) -> tuple[Split, ...]:
        if format == "parquet":
            return parquet.cut(files, footers, stored, target_bytes)
        return text_splits(files, format, target_bytes)

    def sample(num_rows: int, columns: Collection[str] | None = None, /) -> pa.RecordBatch:
        types = partition_types(schema)
        constants = [partition_values(file.path, types) for file in files]
        groups = [
            (footer.row_group(index), values)
            for footer, values in zip(footers, constants, strict=True)
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
    )


def find_files(table: TableSpec) -> tuple[str, tuple[SourceFile, ...], tuple[str, ...]]:
    """The format, the files and their paths below the source that names them, in row order.

    Sources come as given, the files of each by name.

    In a directory, hidden files and those that start with ``_`` are passed over, as everywhere in
    the Parquet world; so are files of other formats. A glob passes over them too, unless it names
    them. Links are followed, but for one to a directory above it: what is there is read once.

    Raises:
        LoadError: naming a path that is missing or unreadable, a link that leads nowhere, or a
            source that holds no file.
        RequestError: for a URI scheme that is not served, or a format that cannot be told.
    """
    format = table.format
    suffixes = [suffix for suffix, kind in FILE_SUFFIXES.items() if format in (None, kind)]
    files: list[SourceFile] = []
    relative: list[str] = []
    formats: dict[str, str] = {}
    for source in table.source:
        if object_stores.is_remote(source):
            root = object_stores.root_of(source, table.options)
            found = object_stores.expand(source, suffixes, table.options, table.secrets)
        else:
            root, paths = _expand(source, suffixes, table.ignore)
            found = [_stat(path) for path in paths]
        names = {file: _below(file.path, root) for file in found}
        found = [file for file in found if not _ignored(names[file], table.ignore)]
        if not found:
            kind = f"{format} files" if format else "files of a known format"
            raise LoadError(f"source {source!r} holds no {kind} ({', '.join(FILE_SUFFIXES)})")
        files += found
        relative += [names[file] for file in found]
        for file in found:
            formats.setdefault(format or _format_of(file.path), file.path)
    if len(formats) > 1:
        examples = ", ".join(f"{path} ({name})" for name, path in formats.items())
        raise RequestError(f"one dataset has one format, found several: {examples}")
    return next(iter(formats)), tuple(files), tuple(relative)


def check_unchanged(file: SourceFile) -> None:
    """Raises a `LoadError` when a file of this machine is not the one that was planned."""
    now = _stat(file.path)
    if now != file:
        raise LoadError(
            f"source file {file.path} changed since the dataset was planned: it had {file.size} "
            f"bytes and mtime {file.mtime_ns} ns, now {now.size} bytes and {now.mtime_ns} ns"
        )


def read_footers(files: Sequence[SourceFile], table: TableSpec) -> tuple[pq.FileMetaData, ...]:
    """The Parquet footers of all files.

    Raises:
        LoadError: naming a file whose footer cannot be read.
    """

    def read(file: SourceFile) -> pq.FileMetaData:
        if object_stores.is_remote(file.path):
            return read_remote_footer(
                file,
                lambda size: object_stores.read_tail(file, size, table.options, table.secrets),
            )
        try:
            return pq.read_metadata(file.path)
        except (pa.ArrowInvalid, OSError) as error:
            raise LoadError(f"cannot read the Parquet footer of {file.path}: {error}") from None

    with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
        return tuple(pool.map(read, files))


def read_remote_footer(file: SourceFile, read_tail: Callable[[int], bytes]) -> pq.FileMetaData:
    """The Parquet footer of an object, in one request where it is of usual size.

    Args:
        read_tail: the last so many bytes of the object.

    Raises:
        LoadError: naming the object when it has no sound footer.
    """
    tail = read_tail(min(file.size, _FOOTER_BYTES))
    length = int.from_bytes(tail[-parquet.MAGIC_BYTES : -4], "little") + parquet.MAGIC_BYTES
    if tail[-4:] == b"PAR1" and len(tail) < length <= file.size:
        tail = read_tail(length)
    try:
        return pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowInvalid, OSError) as error:
        raise LoadError(f"cannot read the Parquet footer of {file.path}: {error}") from None


def text_splits(files: Sequence[SourceFile], format: str, target_bytes: int) -> tuple[Split, ...]:
    """Splits of files without a footer to read: their rows are known only when loaded.

    Newline JSON of this machine is cut at line ends anywhere. CSV is not cut, because a quoted
    value may hold a newline; an Arrow file is not cut either, and no object of a store.
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

    Rows of CSV and Arrow files are read by the position of their columns, so every file must name
    the same ones. JSON is read by name, and a name that a file lacks is null.
    """
    filled = [file for file in files if file.size]
    if not filled:
        raise LoadError(f"{files[0].path} is empty: it does not even name its columns")

    def infer(file: SourceFile) -> pa.Schema:
        if not object_stores.is_remote(file.path):
            return loader.infer_schema(Path(file.path), format, file.path)
        with tempfile.TemporaryDirectory() as directory:
            beginning = _beginning(file, format, table, Path(directory))
            return loader.infer_schema(beginning, format, file.path)

    compared = filled if format != "json" else filled[:1]
    with ThreadPoolExecutor(min(_THREADS, len(compared))) as pool:
        schemas = list(pool.map(infer, compared))
    first = schemas[0]
    for file, schema in zip(compared[1:], schemas[1:], strict=True):
        # The types that a sample of a CSV suggests may differ; reading it will tell.
        same = schema.names == first.names if format == "csv" else schema.equals(first)
        if not same:
            raise LoadError(
                f"{file.path} has other columns than {filled[0].path}: "
                f"{parquet.difference(first, schema)}"
            )
    return first


def _beginning(file: SourceFile, format: str, table: TableSpec, directory: Path) -> Path:
    """A local file that tells the columns of an object: its first lines, or both its ends."""
    path = directory / f"beginning{Path(urlsplit(file.path).path).suffix}"
    head = (0, min(file.size, _HEAD_BYTES))
    tail = (max(head[1], file.size - _FOOTER_BYTES), file.size)
    wanted = [head, tail] if format == "arrow" and tail[0] < tail[1] else [head]
    whole = file.size <= _HEAD_BYTES
    object_stores.download(file, path, table.options, table.secrets, None if whole else wanted)
    if format != "arrow" and not whole:
        data = path.read_bytes()[: head[1]]
        path.write_bytes(data[: data.rfind(b"\n") + 1])
    return path


def _partition_fields(relative: Sequence[str]) -> list[pa.Field]:
    """The columns that stand in the names of directories, as in Hive; where every file has them."""
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


def _expand(
    source: str, suffixes: Collection[str], ignore: Collection[str]
) -> tuple[str, list[str]]:
    """The directory below which a source of this machine finds its files, and their paths."""
    path = _local_path(source)
    if os.path.isdir(path):
        if os.path.isdir(os.path.join(path, _DELTA_LOG)):
            raise RequestError(f"source {source!r} is a Delta table: say format: delta")
        tree = _Tree(root=str(Path(path)), hidden=_HIDDEN, suffixes=suffixes, ignore=ignore)
        return tree.root, tree.files(("**", "*"))
    if os.path.exists(path):
        return os.path.dirname(path), [path]
    if glob.has_magic(path):
        return _glob(path, ignore)
    raise LoadError(f"source {source!r} does not exist on the node")


def _glob(pattern: str, ignore: Collection[str]) -> tuple[str, list[str]]:
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    root = Path(*fixed)
    parts = Path(pattern).relative_to(root).parts
    if pattern.endswith("/") or not os.path.isdir(root):  # the former names directories only
        return str(root), []
    hidden = (".",) if any(part.startswith(_HIDDEN) for part in parts) else _HIDDEN
    tree = _Tree(root=str(root), hidden=hidden, suffixes=None, ignore=ignore)
    return tree.root, tree.files(parts)


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """What a directory of this machine holds; links are followed.

    Nothing that may hold rows is left out without a word: what cannot be read is an error.

    Attributes:
        hidden: how the names begin that no wildcard stands for.
        suffixes: of the files that count; None if all do.
        ignore: patterns of paths below ``root`` that need not be readable.
    """

    root: str
    hidden: tuple[str, ...]
    suffixes: Collection[str] | None
    ignore: Collection[str]

    def files(self, parts: Sequence[str]) -> list[str]:
        """The files that a glob names, by name.

        Args:
            parts: of the glob, below ``root``.

        Raises:
            LoadError: naming a directory that cannot be read, or a link that leads nowhere.
        """
        parts = (*parts, "*") if parts[-1] == "**" else tuple(parts)
        return sorted(str(Path(path)) for path in self._found(self.root, parts, ()))

    def _found(
        self, directory: str, parts: tuple[str, ...], above: tuple[tuple[int, int], ...]
    ) -> Iterator[str]:
        """The files that the parts name below a directory.

        Args:
            above: which directories led here, by device and inode. `**` goes into none of them
                again: a link to a directory above itself has no end.
        """
        above = (*above, _identity(directory))
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield from self._found(directory, rest, above)
            for entry in self._directories(self._named(directory, "*")):
                if _identity(os.fspath(entry)) not in above:
                    yield from self._found(os.fspath(entry), parts, above)
        elif rest:
            for entry in self._directories(self._named(directory, part)):
                yield from self._found(os.fspath(entry), rest, above)
        else:
            yield from map(os.fspath, self._files(self._named(directory, part)))

    def _named(self, directory: str, part: str) -> list[_Entry]:
        """What a directory holds by the names that a part of a glob stands for."""
        try:
            if not glob.has_magic(part):
                os.lstat(os.path.join(directory, part))
                return [Path(directory, part)]
            with os.scandir(directory) as entries:
                return [
                    entry
                    for entry in entries
                    if fnmatch.fnmatch(entry.name, part)
                    and (part.startswith(".") or not entry.name.startswith(self.hidden))
                ]
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not glob.has_magic(part):
                return []
            below = _below(f"{directory}/", self.root)
            if self._ignores_all(below):
                return []
            way_out = f"; ignore: {below + '*'!r} leaves it out" if below else ""
            raise _unreadable_directory(directory, error, way_out) from None

    def _ignores_all(self, below: str) -> bool:
        """Whether whatever may be in a directory is ignored; its path ends in a slash."""
        return _ignored(below, [pattern for pattern in self.ignore if pattern.endswith("*")])

    def _directories(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        for entry in entries:
            kind = _kind(entry)
            if kind == "directory":
                yield entry
            elif not kind and ("=" in entry.name or not Path(entry.name).suffix):
                self._refuse(entry)

    def _files(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        for entry in entries:
            suffix = Path(entry.name).suffix.lower()
            if self.suffixes is None or suffix in self.suffixes:
                kind = _kind(entry)
                if kind == "file":
                    yield entry
                elif kind != "directory":
                    self._refuse(entry)

    def _refuse(self, entry: _Entry) -> None:
        """Raises a `LoadError` for what is neither file nor directory, if it is not ignored."""
        path = os.fspath(entry)
        below = _below(path, self.root)
        if _ignored(below, self.ignore) or self._ignores_all(f"{below}/"):
            return
        try:
            os.stat(path)
            reason = "it is neither a file nor a directory"
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, FileNotFoundError) and os.path.islink(path):
                reason = f"it is a link to {os.readlink(path)!r}, which does not exist"
        raise LoadError(f"cannot read {path}: {reason}")


def _unreadable_directory(path: str, error: OSError, way_out: str = "") -> LoadError:
    return LoadError(f"cannot read directory {path}: {error.strerror}{way_out}")


def _identity(directory: str) -> tuple[int, int]:
    """The device and the inode of a directory, which has other names where links lead to it."""
    try:
        stat = os.stat(directory)
    except OSError as error:
        raise _unreadable_directory(directory, error) from None
    return stat.st_dev, stat.st_ino


def _kind(entry: _Entry) -> str:
    """What an entry is, or where it leads: file, directory or other; empty if that is nowhere."""
    try:
        if entry.is_dir():
            return "directory"
        if entry.is_file():
            return "file"
        entry.stat()
    except OSError:
        return ""
    return "other"


def _below(path: str, root: str) -> str:
    """A path from the directory ``root`` on; the name alone of a file that is not below it."""
    inside = path.removeprefix(root.rstrip("/") + "/")
    return inside if inside != path else path.rpartition("/")[2]


def _ignored(relative: str, patterns: Iterable[str]) -> bool:
    names = (relative, relative.rpartition("/")[2])
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names)


def _local_path(source: str) -> str:
    if "://" not in source:
        return source
    uri = urlsplit(source)
    if uri.scheme != "file" or uri.netloc not in ("", "localhost"):
        raise RequestError(f"source {source!r}: this is no file of the node's machine")
    return unquote(uri.path)


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
