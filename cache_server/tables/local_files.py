"""Finds the files of sources: a path, a directory with all below it, a glob, or a URI.

Nothing that may hold rows is silently skipped: links are followed, and an unreadable directory or a
broken link is an error. Reads directories, never files. `object_stores` lists other machines.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cache_protocol.datasets.dataset_spec import FILE_SUFFIXES, TableSpec
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import LoadError, RequestError, TransientLoadError, some_of
from cache_server import object_stores
from cache_server.source import listings
from cache_server.source.listings import is_hidden
from cache_server.source.outages import load_error
from cache_server.source.pinned import SourceFile

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip")  # suffixes
_Entry = os.DirEntry[str] | Path  # found in a directory; or a path without wildcards


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
                partial(_is_left_out, table, root),
            )
        else:
            object_stores.check_unused(table.options, table.secrets)
            root, paths = expand(source, suffixes, table.ignore)
            found = [_stat(path) for path in paths]
        found = [file for file in found if not _is_left_out(table, root, file.path)]
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
        relative += [below(file.path, root) for file in found]
        for file in found:
            formats.setdefault(format or _format_of(file.path), file.path)
    if len(formats) > 1:
        examples = ", ".join(f"{path} ({name})" for name, path in formats.items())
        raise RequestError(f"one dataset has one format, found several: {examples}")
    return next(iter(formats)), tuple(files), tuple(relative)


def check_unchanged(file: SourceFile) -> None:
    """Raises a `LoadError` if a file of this machine is not the planned one."""
    now = _stat(file.path)
    if now != file:
        raise TransientLoadError(
            f"source file {file.path} changed since the dataset was planned: it had {file.size} "
            f"bytes and mtime {file.mtime_ns} ns, now {now.size} bytes and {now.mtime_ns} ns"
        )


def expand(
    source: str, suffixes: tuple[str, ...], ignore: Collection[str]
) -> tuple[str, list[str]]:
    """The directory that a local source looks below, and the paths of its files.

    Args:
        source: a path, a glob or a ``file://`` URI.
        suffixes: of the files that count in a directory, in lower case.
        ignore: patterns of paths that may be unreadable; matching files may be in the answer.

    Raises:
        LoadError: it does not exist, or is neither a file nor a directory; or a directory cannot be
            read, or a link is broken. RequestError: it is not on this machine, or has files of a
            Delta or Iceberg table.
    """
    path = _path_of(source)
    if os.path.isdir(path):
        if (format := _lake_format(path)) is not None:
            raise listings.refusal(source, path, path, format)
        tree = _Tree(root=str(Path(path)), hides=is_hidden, suffixes=suffixes, ignore=ignore)
        root, paths = tree.root, tree.files(("**", "*"))
    elif glob.has_magic(path) and not os.path.exists(path):
        root, paths = _glob(source, path, ignore)
    elif _is_there(source, path):
        if not os.path.isfile(path):
            raise _neither(path)
        return os.path.dirname(path), [path]
    else:
        raise LoadError(f"source {source!r} does not exist on the node")
    _refuse_lakes(source, root, paths, ignore)
    return root, paths


def _refuse_lakes(source: str, root: str, paths: Iterable[str], ignore: Collection[str]) -> None:
    """Raises a `RequestError` if files that are not ignored belong to a lake table."""
    kept = [path for path in paths if not is_ignored(below(path, root), ignore)]
    directories = {directory for path in kept for directory in listings.directories_of(path)}
    roots = {
        directory: format
        for directory in directories
        if (format := _lake_format(directory)) is not None
    }
    if (found := listings.first_root(kept, roots)) is not None:
        raise listings.refusal(source, root, found, roots[found])


def _lake_format(directory: str) -> str | None:
    """The format of the lake table with this root; None if it is not a root."""
    if os.path.isdir(f"{directory}/{listings.DELTA_LOG}"):
        return "delta"
    try:
        with os.scandir(f"{directory}/{listings.ICEBERG_METADATA}") as entries:
            is_iceberg = any(listings.is_metadata_file(entry.name) for entry in entries)
    except OSError:
        return None
    return "iceberg" if is_iceberg else None


def _is_there(source: str, path: str | Path) -> bool:
    """Whether a path exists; raises LoadError if that cannot be told."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: not a valid path
        return False
    except OSError as error:
        raise load_error(f"cannot read source {source!r}: {error.strerror}", error) from None
    return True


def _glob(source: str, pattern: str, ignore: Collection[str]) -> tuple[str, list[str]]:
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    root = Path(*fixed)
    parts = Path(pattern).relative_to(root).parts
    if pattern.endswith("/"):  # it names only directories
        return str(root), []
    if not _is_there(source, root) or not os.path.isdir(root):
        return str(root), []
    hides = _starts_with_a_dot if any(map(is_hidden, parts)) else is_hidden
    tree = _Tree(root=str(root), hides=hides, suffixes=None, ignore=ignore)
    return tree.root, tree.files(parts)


def _starts_with_a_dot(name: str) -> bool:
    return name.startswith(".")


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """A directory tree of this machine; links are followed.

    Attributes:
        hides: says which names wildcards do not match.
        suffixes: of the files that count; None: all count.
        ignore: patterns of paths below ``root`` that may be unreadable.
    """

    root: str
    hides: Callable[[str], bool]
    suffixes: tuple[str, ...] | None
    ignore: Collection[str]

    def files(self, parts: Sequence[str]) -> list[str]:
        """The files that a glob names, by name.

        Args:
            parts: of the glob, below ``root``.

        Raises:
            LoadError: naming an unreadable directory or a broken link.
        """
        parts = (*parts, "*") if parts[-1] == "**" else tuple(parts)
        return sorted(str(Path(path)) for path in self._found(self.root, parts, ()))

    def _found(
        self, directory: str, parts: tuple[str, ...], above: tuple[tuple[int, int], ...]
    ) -> Iterator[str]:
        """The files that the parts name below a directory.

        Args:
            above: the directories on the way here, by device and inode. `**` does not enter them
                again, so that a link to a directory above itself ends.
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
        """The entries of a directory that match a part of a glob."""
        try:
            if not glob.has_magic(part):
                os.lstat(os.path.join(directory, part))
                return [Path(directory, part)]
            with os.scandir(directory) as entries:
                return [
                    entry
                    for entry in entries
                    if fnmatch.fnmatch(entry.name, part)
                    and (part.startswith(".") or not self.hides(entry.name))
                ]
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not glob.has_magic(part):
                return []
            inside = below(f"{directory}/", self.root)
            if self._ignores_all(inside):
                return []
            way_out = f"; ignore: {inside + '*'!r} leaves it out" if inside else ""
            raise _unreadable_directory(directory, error, way_out) from None

    def _ignores_all(self, below: str) -> bool:
        """Whether everything in a directory is ignored; its path ends in a slash."""
        return is_ignored(below, [pattern for pattern in self.ignore if pattern.endswith("*")])

    def _directories(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        for entry in entries:
            kind = _kind(entry)
            if kind == "directory":
                yield entry
            elif not kind and ("=" in entry.name or not Path(entry.name).suffix):
                self._refuse(entry)

    def _files(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        for entry in entries:
            if self.suffixes is None or entry.name.lower().endswith(self.suffixes):
                kind = _kind(entry)
                if kind == "file":
                    yield entry
                elif kind != "directory":
                    self._refuse(entry)

    def _refuse(self, entry: _Entry) -> None:
        """Raises a `LoadError` for an entry that is neither file nor directory, unless ignored."""
        path = os.fspath(entry)
        inside = below(path, self.root)
        if is_ignored(inside, self.ignore) or self._ignores_all(f"{inside}/"):
            return
        try:
            os.stat(path)
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, FileNotFoundError) and os.path.islink(path):
                reason = f"it is a link to {os.readlink(path)!r}, which does not exist"
            raise load_error(f"cannot read {path}: {reason}", error) from None
        raise _neither(path)


def _neither(path: str) -> LoadError:
    """The error for a pipe, a socket or a device, which may never end."""
    return LoadError(f"cannot read {path}: it is neither a file nor a directory")


def _unreadable_directory(path: str, error: OSError, way_out: str = "") -> LoadError:
    return load_error(f"cannot read directory {path}: {error.strerror}{way_out}", error)


def _identity(directory: str) -> tuple[int, int]:
    """The device and inode of a directory, which links give several names."""
    try:
        stat = os.stat(directory)
    except OSError as error:
        raise _unreadable_directory(directory, error) from None
    return stat.st_dev, stat.st_ino


def _kind(entry: _Entry) -> str:
    """The kind of an entry, after links: file, directory or other; empty for a broken link."""
    try:
        if entry.is_dir():
            return "directory"
        if entry.is_file():
            return "file"
        entry.stat()
    except OSError:
        return ""
    return "other"


def below(path: str, root: str) -> str:
    """A path relative to ``root``; only the name of a file that is not below it."""
    inside = path.removeprefix(root.rstrip("/") + "/")
    return inside if inside != path else path.rpartition("/")[2]


def is_ignored(relative: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a path below a source, or its last name."""
    names = (relative, relative.rpartition("/")[2])
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names)


def _path_of(source: str) -> str:
    if "://" not in source:
        return source
    uri = urlsplit(source)
    if uri.scheme != "file" or uri.netloc not in ("", "localhost"):
        raise RequestError(f"source {source!r}: it is not a file of the node's machine")
    if "?" in source or "#" in source:  # they end the path
        raise RequestError(
            f"source {source!r}: a file is named by its path, without a query or a fragment; write "
            "%3F for ? and %23 for #"
        )
    return unquote(uri.path)


def _of_saved_dataset(source: str, files: list[SourceFile], root: str) -> list[SourceFile]:
    """The files of a folder; of one that Hugging Face saved, only those with rows."""
    by_path = {below(file.path, root): file for file in files}
    if parts := listings.parts_of_dict(list(by_path)):
        raise RequestError(
            f"source {source!r} holds several datasets, such as the splits of a Hugging Face "
            f"DatasetDict: name the folders to load, among {some_of(parts)}"
        )
    return [by_path[path] for path in listings.without_metadata(list(by_path))]


def _is_left_out(table: TableSpec, root: str, path: str) -> bool:
    return is_ignored(below(path, root), table.ignore)


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
        raise load_error(f"cannot read source file {path}: {error.strerror}", error) from None
    return SourceFile(path, stat.st_size, stat.st_mtime_ns)
