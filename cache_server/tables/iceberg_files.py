"""The files and the catalogue of an Iceberg table, reached only through the gate of the process.

Arrow's own filesystems follow NO_PROXY of the environment past any proxy, so files are read by
`object_stores` instead. A process without a gate uses pyiceberg's classes as they are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from requests import Session

from cache_protocol.errors import RequestError
from cache_protocol.spec.secret_settings import CATALOG_PREFIX
from cache_server.egress import gate as gates
from cache_server.object_stores.client import Location, ObjectClient
from cache_server.object_stores.connections import (
    client_for,
    is_region_unknown,
    known_settings,
)
from cache_server.object_stores.options import setting_name
from cache_server.source.pinned import SourceFile
from cache_server.tables.iceberg_settings import is_rest

# Names of pyiceberg that only it has -> those of `store_settings`.
_OTHER_NAMES = {
    "gcs.service.host": "base_url",
    "client.region": "region",
    "client.access-key-id": "access_key_id",
    "client.secret-access-key": "secret_access_key",
    "client.session-token": "session_token",
    "client.role-arn": "role_arn",
}
_LENT = ("s3.", "gcs.", "adls.", "client.")


def files_of(
    properties: Mapping[str, str], options: Mapping[str, str], secrets: Mapping[str, str]
) -> PyArrowFileIO:
    """Reads the files of a table.

    Args:
        properties: by pyiceberg's names, with those that a catalogue lends.
        options, secrets: as the dataset gives them.
    """
    gate = gates.current()
    if gate is None:
        return PyArrowFileIO(dict(properties))
    return _CheckedFileIO(gate, properties, options, secrets)


def catalog_of(
    name: str,
    properties: Mapping[str, str],
    options: Mapping[str, str],
    secrets: Mapping[str, str],
) -> Catalog:
    """The catalogue of a table.

    Raises:
        RequestError: connections to a catalogue of its kind cannot be checked, but must be.
    """
    gate = gates.current()
    if gate is None:
        return load_catalog(name, **properties)
    if not is_rest(properties):
        kind = properties.get("type") or properties.get("uri", "").partition(":")[0]
        gates.refuse_unheld(f"an Iceberg catalog of the type {kind!r}")
    return _CheckedCatalog(name, gate.pass_for(options, secrets), dict(properties))


class _CheckedCatalog(RestCatalog):
    """A REST catalogue; each session reaches it through the gate."""

    def __init__(self, name: str, way: gates.Pass, properties: dict[str, str]) -> None:
        self._way = way
        super().__init__(name, **properties)

    def _create_session(self) -> Session:
        session = super()._create_session()
        session.trust_env = False  # which else takes proxies and NO_PROXY from the environment
        session.proxies = self._way.proxies
        if session.verify is True and (bundle := from_env()):
            session.verify = bundle
        return session


def from_env() -> str:
    """The certificates that requests trusts by its variables; empty: those of its package."""
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""


class _CheckedFileIO(PyArrowFileIO):
    """Reads objects by `object_stores`, and only allowed files of this machine."""

    def __init__(
        self,
        gate: gates.Gate,
        properties: Mapping[str, str],
        options: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> None:
        super().__init__(dict(properties))
        self._gate = gate
        self._options = _store_options(options)
        self._secrets = {**_lent(properties), **_store_options(secrets)}

    def new_input(self, location: str) -> PyArrowFile:
        """The file at a location.

        Raises:
            RequestError: it is one of this machine that callers may not name, or on no known store.
        """
        scheme, _, path = self.parse_location(location, self.properties)
        if scheme == "file":
            self._gate.check_file(path)
        return super().new_input(location)

    def _initialize_fs(self, scheme: str, netloc: str | None = None) -> pyarrow.fs.FileSystem:
        if scheme == "file":
            return super()._initialize_fs(scheme, netloc)
        location = Location.of(f"{scheme}://{netloc or ''}/")
        known = known_settings(location.kind)
        options = {name: value for name, value in self._options.items() if name in known}
        secrets = {name: value for name, value in self._secrets.items() if name in known}
        if location.kind == "s3" and is_region_unknown({**options, **secrets}):
            options["region"] = _region_of(location.bucket)
        client = client_for(location, options, secrets)
        return pyarrow.fs.PyFileSystem(_Objects(client, location))


def _region_of(bucket: str) -> str:
    """The region of a bucket, as Amazon tells everyone."""
    try:
        return str(pyarrow.fs.resolve_s3_region(bucket))
    except OSError:
        return "us-east-1"  # reading says what is wrong


def _lent(properties: Mapping[str, str]) -> dict[str, str]:
    """Settings of a store by pyiceberg's names, by those of `store_settings`."""
    return {
        _OTHER_NAMES.get(name) or setting_name(name): str(value)
        for name, value in properties.items()
        if name.startswith(_LENT)
    }


def _store_options(given: Mapping[str, str]) -> dict[str, str]:
    return {
        _OTHER_NAMES.get(name) or setting_name(name): value
        for name, value in given.items()
        if not name.startswith(CATALOG_PREFIX)
    }


class _Objects(pyarrow.fs.FileSystemHandler):  # type: ignore[misc]  # no stubs
    """The objects of a bucket as a filesystem of Arrow, to read only."""

    def __init__(self, client: ObjectClient, location: Location) -> None:
        self._client = client
        self._prefix = f"{location.bucket}/"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Objects) and self._client is other._client

    def get_type_name(self) -> str:
        return "object_stores"

    def normalize_path(self, path: str) -> str:
        return path

    def _head(self, path: str) -> SourceFile | None:
        return self._client.head(path.removeprefix(self._prefix))

    def get_file_info(self, paths: list[str]) -> list[pyarrow.fs.FileInfo]:
        kinds = pyarrow.fs.FileType
        found = ((path, self._head(path)) for path in paths)
        return [
            pyarrow.fs.FileInfo(path, kinds.NotFound)
            if file is None
            else pyarrow.fs.FileInfo(path, kinds.File, size=file.size)
            for path, file in found
        ]

    def open_input_file(self, path: str) -> pa.PythonFile:
        file = self._head(path)
        if file is None:
            raise FileNotFoundError(f"there is no object {path}")
        return pa.PythonFile(_Reader(self._client, file), mode="r")

    open_input_stream = open_input_file

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise RequestError("a source is only read")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = _unused
    delete_root_dir_contents = delete_file = move = copy_file = _unused
    open_output_stream = open_append_stream = _unused


class _Reader(io.RawIOBase):
    """The bytes of one object; a read is a request."""

    def __init__(self, client: ObjectClient, file: SourceFile) -> None:
        self._client = client
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def size(self) -> int:
        return self._file.size

    def read(self, size: int = -1) -> bytes:
        stop = self._file.size if size < 0 else min(self._at + size, self._file.size)
        if stop <= self._at:
            return b""
        whole = (self._at, stop) == (0, self._file.size)
        data = b"".join(
            bytes(piece)
            for piece in self._client.read(self._file, None if whole else (self._at, stop))
        )
        self._at += len(data)
        return data
