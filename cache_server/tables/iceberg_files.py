"""Reads the files of Iceberg tables through `object_stores`: pyiceberg's FileIO.

So all bytes of a table come through the same clients as those of plain files, and no property of
a catalogue or a table decides how: pyarrow's file systems are never made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyiceberg.io
from pyiceberg.io import FileIO, InputFile, OutputFile

from cache_protocol.datasets.source_options import STORES
from cache_protocol.errors import LoadError, RequestError
from cache_server.egress import gate as gates
from cache_server.object_stores.client import Location, ObjectClient, kind_of
from cache_server.object_stores.connections import client_for
from cache_server.object_stores.options import lent_settings, store_settings
from cache_server.source.pinned import SourceFile

OF_STORES = ("s3.", "gcs.", "adls.", "client.")  # pyiceberg's prefixes of their properties
_SERVED = ("s3", "gs", "az")
_FILES = "cache.files"  # a property of a catalogue that `made_for` made: the `StoreFiles`
_IMPLEMENTATION = "py-io-impl"  # of pyiceberg: it then imports nothing by the scheme of a location


class StoreFiles(FileIO):
    """Reads files of this machine and of object stores. Thread-safe.

    Args:
        options, secrets: of the stores; those of one store are used for its locations.
        lent: properties of a catalogue's answer; see `lent_settings`.

    Raises:
        RequestError: for an option that no store has, or a value that is not of its form.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        secrets: Mapping[str, str],
        lent: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._given = options, secrets
        self._settings = {kind: _merged(kind, options, secrets, lent or {}) for kind in _SERVED}

    def lent(self, answer: Mapping[str, object]) -> StoreFiles:
        """The same files, with credentials that a catalogue lends."""
        return StoreFiles(*self._given, answer)

    def new_input(self, location: str) -> InputFile:
        """The file at a location: a path, ``file:``, or a URI of an object store.

        Raises:
            RequestError: for another scheme, or a file that callers may not name.
        """
        path = local_path(location)
        if path is None:
            return self._object(location)
        if (gate := gates.current()) is not None:
            gate.check_file(os.path.abspath(path))
        return _LocalFile(location, path)

    def _object(self, location: str) -> InputFile:
        kind = kind_of(location)
        if kind not in _SERVED:
            raise RequestError(
                f"{location!r}: files of an Iceberg table must be on the nodes or in an object "
                f"store ({', '.join(_SERVED)})"
            )
        place = Location.of(location)
        return _StoredObject(location, place, client_for(place, *self._settings[kind]))

    def new_output(self, location: str) -> OutputFile:
        """Never: tables are only read."""
        _refuse_write(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Never: tables are only read."""
        _refuse_write(location)


def local_path(location: str) -> Path | None:
    """The path of a file of this machine; None: it is a URI of something else."""
    if location.startswith("file:"):
        return Path(location.removeprefix("file:").removeprefix("//"))
    return None if "://" in location else Path(location)


def made_for(files: StoreFiles, properties: Mapping[str, str]) -> dict[str, Any]:
    """Properties of a catalogue whose tables are always read through ``files``."""
    return {**properties, _FILES: files, _IMPLEMENTATION: f"{__name__}.{StoreFiles.__name__}"}


def install() -> None:
    """Keeps pyiceberg from importing what a property names, for catalogues of `made_for`."""
    by_name = pyiceberg.io._import_file_io

    def of_properties(implementation: str, properties: dict[str, Any]) -> FileIO | None:
        if _FILES not in properties:  # not ours, such as a catalogue of a test
            return by_name(implementation, properties)
        files = properties[_FILES]
        if not isinstance(files, StoreFiles):
            raise LoadError(f"a catalogue must not answer with the property {_FILES!r}")
        return files.lent(properties)

    pyiceberg.io._import_file_io = of_properties  # type: ignore[assignment]


def _merged(
    kind: str,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    lent: Mapping[str, object],
) -> tuple[dict[str, str], dict[str, str]]:
    """Options and secrets for a store; what is given comes before what is lent."""
    store = STORES[kind]
    public = {option.name for option in store.options if option.public}
    settings = store_settings(kind, options, secrets, shared=True)
    found = dict(lent_settings(_of_store(lent, kind), store))
    if settings.keys() - public:  # one set of credentials, not half of each
        found = {name: value for name, value in found.items() if name in public}
    found |= settings
    shown = {name: value for name, value in found.items() if name in public}
    return shown, {name: value for name, value in found.items() if name not in public}


def lent_to_stores(answer: Mapping[str, object]) -> dict[str, str]:
    """The properties of an answer that a catalogue may lend, by its names.

    Raises:
        RequestError: for a value that is not of the form of its option.
    """
    return {
        key: text
        for kind in _SERVED
        for key, value in _of_store(answer, kind).items()
        for _, text in lent_settings({key: value}, STORES[kind])
    }


def _of_store(answer: Mapping[str, object], kind: str) -> dict[str, object]:
    """The properties that are for a kind of store, by pyiceberg's prefixes such as ``s3.``."""
    prefixes = tuple(each for each in STORES[kind].prefixes if each in OF_STORES)
    return {key: value for key, value in answer.items() if key.startswith(prefixes)}


def _refuse_write(location: object) -> NoReturn:
    raise RequestError(f"Iceberg tables are only read here, got a write to {location}")


class _LocalFile(InputFile):
    def __init__(self, location: str, path: Path) -> None:
        super().__init__(location)
        self._path = path

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        return self._path.exists()

    def open(self, seekable: bool = True) -> Any:
        return pa.OSFile(str(self._path))


class _StoredObject(InputFile):
    def __init__(self, location: str, place: Location, client: ObjectClient) -> None:
        super().__init__(location)
        self._place = place
        self._client = client

    def __len__(self) -> int:
        return self._client.found(self._place.key).size

    def exists(self) -> bool:
        return self._client.head(self._place.key) is not None

    def open(self, seekable: bool = True) -> Any:
        return _ObjectReader(self._client, self._client.found(self._place.key))


class _ObjectReader:
    """An object as a file; each read is one request. One thread at a time, but `read_at`."""

    mode = "rb"

    def __init__(self, client: ObjectClient, file: SourceFile) -> None:
        self._client = client
        self._file = file
        self._at = 0
        self.closed = False

    def __enter__(self) -> _ObjectReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._file.size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int | None = None) -> bytes:
        left = max(0, self._file.size - self._at)
        data = self.read_at(left if size is None or size < 0 else size, self._at)
        self._at += len(data)
        return data

    def read_at(self, size: int, offset: int) -> bytes:
        """Bytes at an offset, fewer at the end of the object. Thread-safe."""
        stop = min(offset + size, self._file.size)
        if offset >= stop:
            return b""
        return b"".join(self._client.read(self._file, (offset, stop)))
