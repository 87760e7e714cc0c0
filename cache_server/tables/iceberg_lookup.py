"""Finds an Iceberg table: by a metadata file, or by its name in a catalogue.

Finds the current table, and reopens a pinned one. `iceberg` chooses the snapshot.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import TypeVar

import pydantic
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import ValidationError
from pyiceberg.io import FileIO, InputFile
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import StaticTable

from cache_protocol.errors import RequestError
from cache_server.tables import iceberg_avro, iceberg_files
from cache_server.tables.iceberg_catalogs import Settings, opened, settings_of

iceberg_avro.install()
iceberg_files.install()

_T = TypeVar("_T")

_CATALOG_TIMEOUT_S = 120.0  # as for retries of a store
_UNREAD_TYPE = re.compile(r"(?:Unsupported field type: '|Type not recognized: )(\w+)")


def find(
    source: str, options: Mapping[str, str], secrets: Mapping[str, str]
) -> tuple[StaticTable, str | None]:
    """The current table, and its name in the catalogue, if it has one.

    Args:
        source: the location of a metadata file, or the name of a table in a catalogue.

    Raises:
        RequestError: a bad setting or source.
        TimeoutError: the catalogue does not answer. Also the errors of pyiceberg.
    """
    settings = settings_of(options, secrets)
    if not settings.kind:
        if ".json" not in source:
            raise RequestError(
                f"Iceberg source {source!r} is neither the location of a metadata file "
                "(...metadata.json) nor, without a catalog, a name in one"
            )
        return _opened(source, source, settings.files), None
    location, io = _ask_catalog(source, settings)
    return _opened(source, location, io), source


def open_again(
    metadata_location: str,
    identifier: str | None,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
) -> StaticTable:
    """The table of a metadata location.

    Args:
        identifier: in the catalogue, if it has one.

    Raises:
        as `find`.
    """
    settings = settings_of(options, secrets)
    io: FileIO = settings.files
    # Other catalogues only give the metadata location, so nodes need not reach them.
    if identifier is not None and settings.kind == "rest":
        _, io = _ask_catalog(identifier, settings)
    return _opened(identifier or metadata_location, metadata_location, io)


def _ask_catalog(identifier: str, settings: Settings) -> tuple[str, FileIO]:
    """The current metadata location, and the files to read it: a catalogue may lend credentials."""

    def ask() -> tuple[str, FileIO]:
        with closing(opened(settings)) as catalog, _explained():
            found = catalog.load_table(identifier)
            return found.metadata_location, found.io

    return _answered(ask)


def _answered(ask: Callable[[], _T]) -> _T:
    """The result of ``ask``, with a time limit: a hanging call is abandoned.

    pyiceberg sets no time limit for REST, Hive and SQL catalogues.

    Raises:
        TimeoutError: there is no answer in time.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    # No pool: the interpreter would wait for its threads at exit.
    threading.Thread(target=run, name="iceberg-catalog", daemon=True).start()
    try:
        return answer.result(_CATALOG_TIMEOUT_S)
    except TimeoutError:
        if answer.done():
            raise  # an error of the catalogue
        raise TimeoutError(f"the catalog did not answer within {_CATALOG_TIMEOUT_S:g} s") from None


def _opened(name: str, location: str, io: FileIO) -> StaticTable:
    """The table of the metadata at ``location``, planned in this process."""
    with _explained(lambda: io.new_input(location)):
        metadata = FromInputFile.table_metadata(io.new_input(location))
    return StaticTable((name,), metadata, location, io, NoopCatalog("static"))


@contextmanager
def _explained(file: Callable[[], InputFile] | None = None) -> Iterator[None]:
    """Why pyiceberg refuses metadata, in one line.

    Args:
        file: gives the metadata, for the names of columns.
    """
    try:
        yield
    except (ValidationError, pydantic.ValidationError) as error:
        found = error.__cause__ if isinstance(error, ValidationError) else error
        if not isinstance(found, pydantic.ValidationError):
            raise
        first = found.errors(include_url=False, include_input=False)[0]
        if first["type"] == "union_tag_invalid":
            tag = first["ctx"]["tag"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
            raise ValueError(
                f"it is of format version {tag}; those that are read are 1 to 3"
            ) from None
        if first["type"] == "union_tag_not_found":
            raise ValueError("its metadata does not say which format version it is of") from None
        if unread := _UNREAD_TYPE.search(first["msg"]):
            column = f"column {_name_at(file(), first['loc'][1:])!r}" if file else "a column"
            raise ValueError(
                f"{column} is of type {unread[1]}, which cannot be read, and makes the others "
                "unreadable: write them into a table without it"
            ) from None
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise ValueError(f"its metadata is not that of a table: {reason}") from None


def _name_at(file: InputFile, path: Sequence[str | int]) -> str:
    """The name of the column or field at a path in metadata."""
    with file.open() as opened:
        value = json.loads(opened.read())
    names = []
    for step in path:
        value = value[step]
        if isinstance(value, dict) and "name" in value:
            names.append(value["name"])
    return ".".join(names)
