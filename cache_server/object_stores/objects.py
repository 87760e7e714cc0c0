"""Finds and fetches the files of a remote table: URIs -> objects -> their bytes.

Decides for every store which objects a URI means, and which bytes go into one request. `client`,
`connections` and `hub` talk to the stores.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from cache_protocol.errors import LoadError, RequestError
from cache_server.object_stores.client import Location, RangesNotServedError
from cache_server.object_stores.connections import client_for
from cache_server.object_stores.hub import SCHEME, HubClient, hub_location
from cache_server.object_stores.options import store_settings
from cache_server.source import byte_ranges, listings
from cache_server.source.listings import is_hidden
from cache_server.source.pinned import SourceFile

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MAGIC = re.compile(r"[*?\[]")
_FOLDER = "_$folder$"  # Hadoop's suffix for empty objects that stand for directories
_WHOLE_BYTES = 64 * 1024 * 1024  # an object up to this size is one request
_PART_BYTES = 32 * 1024 * 1024
_THREADS = 4
_LOOKED_AT = 10_000  # objects listed to find out whether a directory is an Iceberg table


class _Client(Protocol):
    @property
    def lists(self) -> bool: ...
    def head(self, key: str) -> SourceFile | None: ...
    def walk(self, prefix: str, *, deep: bool) -> Iterator[SourceFile]: ...
    def read(self, file: SourceFile, span: tuple[int, int] | None) -> Iterator[Any]: ...


def is_remote(source: str) -> bool:
    """Whether ``source`` is a URI, but not of a local file."""
    found = _SCHEME.match(source)
    return found is not None and found[1].lower() != "file"


def expand(
    source: str,
    suffixes: tuple[str, ...],
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    is_ignored: Callable[[str], bool] = lambda uri: False,
) -> list[SourceFile]:
    """The objects that a URI means, by key: one object, those below a prefix, or those of a glob.

    - A glob has ``*``, ``?`` and ``[...]`` within a name, and ``**`` for any number of directories.
    - If an object's key equals the text of a glob, the glob means that object.
    - A prefix or glob skips names that start with ``.`` or ``_``, unless the glob has such a name.
    - A prefix skips names without one of ``suffixes``.
    - Empty objects that stand for directories are skipped.
    - Over HTTP a URI is one object. Finding one object needs no right to list.

    Args:
        suffixes: in lower case, with the dot.
        options: settings of the store, by any of their usual names.
        secrets: settings that are secret.
        is_ignored: says of a URI whether its object may belong to a Delta or Iceberg table. Such
            objects may still be in the answer.

    Returns:
        URIs in normal form (``s3a`` is ``s3``), sizes, times in whole seconds, etags without
        quotes. Empty where nothing matches.

    Raises:
        LoadError: naming a source that does not exist, or a store that fails or refuses.
        RequestError: for a URI or an option that can never be right, or files of a Delta or
            Iceberg table.
    """
    location = _location(source, options)
    client = _client(location, options, secrets)
    key = location.key
    if not client.lists:
        if not key or key.endswith("/") or "*" in key:
            raise RequestError(
                f"source {source!r}: over HTTP a directory cannot be listed; give the URI of each "
                "file"
            )
    elif _MAGIC.search(key):
        return _glob(client, location).files(source, is_ignored)
    if key and not key.endswith("/"):
        found = client.head(key)
        # Some stores have empty objects for directories.
        if found is not None and (found.size or not client.lists):
            return [found]
        below = _below(client, location, f"{key}/", suffixes) if client.lists else None
        if below is not None:
            return below.files(source, is_ignored)
        if found is not None:
            return [found]
    elif (below := _below(client, location, key, suffixes)) is not None:
        return below.files(source, is_ignored)
    raise LoadError(f"source {source!r} does not exist")


def root_of(source: str, options: Mapping[str, str]) -> str:
    """The directory that `expand` looks below, as a URI in normal form.

    Raises:
        RequestError: for a URI that can never be right.
    """
    location = _location(source, options)
    return location.base + _fixed_directory(location.key)


def check_unused(options: Mapping[str, str], secrets: Mapping[str, str]) -> None:
    """Raises a `RequestError` for settings of local files that no store has."""
    store_settings("", options, secrets)


def read_tail(
    file: SourceFile, num_bytes: int, options: Mapping[str, str], secrets: Mapping[str, str]
) -> bytes:
    """The last ``num_bytes`` of an object, or all of a smaller one, in one request.

    Raises:
        LoadError: also when the object is not the one that was planned.
    """
    client = _client(_location(file.path, options), options, secrets)
    wanted = min(num_bytes, file.size)
    if not wanted:
        return b""
    whole = wanted == file.size
    tail = bytearray()
    try:
        pieces = client.read(file, None if whole else (file.size - wanted, file.size))
    except RangesNotServedError:
        pieces = client.read(file, None)
    for piece in pieces:
        tail += piece
        del tail[:-wanted]
    if len(tail) != wanted:
        raise LoadError(f"cannot read {file.path}: only {len(tail)} of {wanted} bytes came")
    return bytes(tail)


def download(
    file: SourceFile,
    target: Path,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    ranges: Sequence[tuple[int, int]] | None = None,
    *,
    tail: bytes = b"",
) -> None:
    """Writes an object, or ranges of it, to a file at the same offsets.

    Uses a few MiB of memory. A small object is one request. A large one, or ranges that are far
    apart, are several requests at a time.

    Args:
        target: gets the full size of the object, with holes outside the ranges. It is removed
            after a failure.
        ranges: half-open; None for everything.
        tail: the last bytes of the object, from `read_tail`: they are not fetched again.

    Raises:
        LoadError: also when the object is not the one that was planned.
        OSError: when the file cannot be written.
    """
    client = _client(_location(file.path, options), options, secrets)
    known = file.size - len(tail)
    if tail:
        asked = [(0, file.size)] if ranges is None else ranges
        ranges = [(start, min(stop, known)) for start, stop in asked if start < known]
    spans = _spans(file.size, ranges)
    try:
        with open(target, "wb") as output:
            output.truncate(file.size)
            _write(output.fileno(), tail, known)
            try:
                _fetch(client, file, spans, output.fileno())
            except RangesNotServedError:
                _fetch(client, file, [(0, file.size)], output.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _fetch(
    client: _Client, file: SourceFile, spans: Sequence[tuple[int, int]], output: int
) -> None:
    def fetch(span: tuple[int, int]) -> None:
        start, stop = span
        for piece in client.read(file, None if span == (0, file.size) else span):
            start = _write(output, piece, start)
        if start != stop:
            raise LoadError(f"cannot read {file.path}: it ended at byte {start} of {stop}")

    if len(spans) == 1:
        fetch(spans[0])
    elif spans:
        with ThreadPoolExecutor(min(_THREADS, len(spans)), "download") as pool:
            for _ in pool.map(fetch, spans):
                pass


def _write(output: int, piece: Any, start: int) -> int:
    """Writes bytes at an offset of a file; returns where they end."""
    view = memoryview(piece)
    while view:
        written = os.pwrite(output, view, start)
        start += written
        view = view[written:]
    return start


def _spans(size: int, ranges: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """One range for each request: close ranges joined, large ones cut."""
    if ranges is None:
        if size <= _WHOLE_BYTES:
            return [(0, size)]
        ranges = [(0, size)]
    for start, stop in ranges:
        if not 0 <= start <= stop <= size:
            raise ValueError(f"ranges must be within 0 and {size}, got {(start, stop)}")
    return byte_ranges.requests(ranges, _PART_BYTES)


def _location(uri: str, options: Mapping[str, str]) -> Location:
    if uri.lower().startswith(f"{SCHEME}://"):
        return hub_location(uri, options)
    return Location.of(uri)


def _client(location: Location, options: Mapping[str, str], secrets: Mapping[str, str]) -> _Client:
    if location.kind == SCHEME:
        return HubClient(location, options, secrets)
    return client_for(location, options, secrets)


@dataclass
class _Listing:
    """The listed objects below a directory.

    Attributes:
        base: URI of the directory, with a slash at its end.
        names: of the objects that may count, below ``base``.
        directories: with any object, below ``base``.
        roots: URIs of the known lake tables, and their formats.
    """

    base: str
    names: dict[str, SourceFile] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    roots: dict[str, str] = field(default_factory=dict)

    def walk(
        self, client: _Client, prefix: str, *, deep: bool
    ) -> Iterator[tuple[SourceFile, str, list[str]]]:
        """The objects below ``prefix``, each with its name below it and the parts of the name."""
        for file in client.walk(prefix, deep=deep):
            if file.path.rstrip("/") == self.base.rstrip("/"):
                self.directories.add("")  # the directory itself
                continue
            name = file.path.removeprefix(self.base)
            for directory in listings.directories_of(name):
                if directory in self.directories:
                    break
                self.directories.add(directory)
            self._note(file.path)
            if not name.endswith(_FOLDER):
                yield file, name, name.split("/")

    def look_for_root(self, client: _Client, directory: str) -> None:
        """Finds out whether a directory is the root of a table; one request for each format.

        Args:
            directory: its key.
        """
        for own in listings.OWN_DIRECTORIES.values():
            found = client.walk(f"{directory}{own}/", deep=True)
            if any(self._note(file.path) for file in itertools.islice(found, _LOOKED_AT)):
                return

    def _note(self, uri: str) -> bool:
        """Whether an object is the log or the metadata of a table; notes the root of the table."""
        if (told := listings.root_told_by(uri)) is None:
            return False
        root, format = told
        self.roots[root] = format
        return True

    def files(self, source: str, is_ignored: Callable[[str], bool]) -> list[SourceFile]:
        """The files, by name, without empty objects that stand for directories.

        Raises:
            RequestError: files that are not ignored belong to a lake table.
        """
        found = sorted(
            name for name, file in self.names.items() if file.size or name not in self.directories
        )
        uris = (self.base + name for name in found)
        root = listings.first_root((uri for uri in uris if not is_ignored(uri)), self.roots)
        if root is not None:
            raise listings.refusal(source, self.base, root, self.roots[root])
        return [self.names[name] for name in found]


def _below(
    client: _Client, location: Location, prefix: str, suffixes: tuple[str, ...]
) -> _Listing | None:
    """The files of a table below a prefix; None if there is no object at all."""
    prefix = _directory(prefix)
    listing = _Listing(location.base + prefix)
    for file, name, parts in listing.walk(client, prefix, deep=True):
        if not _hidden(parts) and name.lower().endswith(suffixes):
            listing.names[name] = file
    if listing.names:
        _look_above(client, prefix, listing)
    return listing if listing.directories else None


def _glob(client: _Client, location: Location) -> _Listing:
    prefix = _fixed_directory(location.key)
    patterns = location.key.removeprefix(prefix).split("/")
    every = _hidden(patterns)
    listing = _Listing(location.base + prefix)
    # A glob of one level lists only that level: below it there may be a million objects.
    deep = len(patterns) > 1 or patterns == ["**"]
    for file, name, parts in listing.walk(client, prefix, deep=deep):
        is_directory = not file.size and "." not in parts[-1]
        if is_directory or not (every or not _hidden(parts)):
            continue
        if parts == patterns:  # it has this very name, as for a local file
            return _Listing(listing.base, {name: file})
        if _matches(parts, patterns):
            listing.names[name] = file
    if listing.names:
        if not deep:
            listing.look_for_root(client, prefix)
        _look_above(client, prefix, listing)
    return listing


def _look_above(client: _Client, prefix: str, listing: _Listing) -> None:
    for directory in listings.likely_roots_above(prefix):
        try:
            listing.look_for_root(client, directory)
        except LoadError as error:
            # A reader may lack the right to list above its source.
            logger.warning("not known whether it is part of a lake table: %s", error)


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[i:], patterns[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def _fixed_directory(key: str) -> str:
    """The directory above the first wildcard; a key without one, as a directory."""
    magic = _MAGIC.search(key)
    return _directory(key) if magic is None else key[: key.rfind("/", 0, magic.start()) + 1]


def _directory(prefix: str) -> str:
    """With one slash at the end, or empty for the whole bucket."""
    stripped = prefix.strip("/")
    return f"{stripped}/" if stripped else ""


def _hidden(names: Iterable[str]) -> bool:
    return any(map(is_hidden, names))
