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
from pyiceberg.catalog import CatalogType
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import ValidationError
from pyiceberg.io import FileIO, InputFile
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import StaticTable

from cache_protocol.errors import RequestError
from cache_server.object_stores.connections import check_variables
from cache_server.object_stores.options import catalog_settings
from cache_server.secrets.redaction import redacted
from cache_server.tables import iceberg_avro
from cache_server.tables.iceberg_files import catalog_of, files_of
from cache_server.tables.iceberg_settings import is_rest, store_properties

iceberg_avro.install()

_T = TypeVar("_T")

_CATALOGS = tuple(str(kind.value) for kind in CatalogType)
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
    properties = store_properties(options, secrets)
    catalog = catalog_settings(options, secrets)
    kind = catalog.get("type")
    if kind is not None and kind.lower() not in _CATALOGS:
        raise RequestError(
            f"the type of a catalog must be one of {', '.join(_CATALOGS)}, "
            f"got {redacted(repr(kind), secrets.values())}"
        )
    if not catalog:
        if ".json" not in source:
            raise RequestError(
                f"Iceberg source {source!r} is neither the location of a metadata file "
                "(...metadata.json) nor, without a catalog, a name in one"
            )
        check_variables(source, options, secrets)
        return _opened(source, source, files_of(properties, options, secrets)), None
    location, io = _ask_catalog(source, options, secrets)
    check_variables(location, options, secrets)
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
    check_variables(metadata_location, options, secrets)
    store = store_properties(options, secrets)
    catalog = catalog_settings(options, secrets)
    # Other catalogues only give the metadata location, so nodes need not reach them.
    if identifier is not None and is_rest(catalog):
        _, io = _ask_catalog(identifier, options, secrets)
    else:
        io = files_of({**catalog, **store}, options, secrets)
    return _opened(identifier or metadata_location, metadata_location, io)


def _ask_catalog(
    identifier: str, options: Mapping[str, str], secrets: Mapping[str, str]
) -> tuple[str, FileIO]:
    """The current metadata location, and the settings to read it: a catalogue may lend some."""
    properties = {**catalog_settings(options, secrets), **store_properties(options, secrets)}
    properties.setdefault("init_catalog_tables", "false")  # for SQL: a reader creates no tables
    name = properties.pop("name", "default")

    def ask() -> tuple[str, FileIO]:
        opened = catalog_of(name, properties, options, secrets)
        with closing(opened), _explained():
            found = opened.load_table(identifier)
            lent = {**found.io.properties, **properties}
            return found.metadata_location, files_of(lent, options, secrets)

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
            raise ValueError(
                f"it is of format version {first['ctx']['tag']}; those that are read are 1 to 3"
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
