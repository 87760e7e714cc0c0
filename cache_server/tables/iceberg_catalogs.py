"""The catalogues of Iceberg tables: checked options -> a catalogue that reads through our files.

A catalogue is made from its class, never by a name that an option or an answer gives. Nothing of
pyiceberg's own configuration (`.pyiceberg.yaml`, PYICEBERG_...) is merged in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyiceberg.catalog import AVAILABLE_CATALOGS, Catalog, CatalogType
from pyiceberg.catalog.rest import RestCatalog
from requests import Session

from cache_protocol.datasets.secret_settings import CATALOG_PREFIX
from cache_protocol.datasets.source_options import (
    CATALOGS,
    HEADER_PREFIX,
    STORES,
    Form,
    Option,
    Options,
)
from cache_protocol.errors import RequestError
from cache_server.egress import gate as gates
from cache_server.egress.gate import Pass
from cache_server.object_stores.options import SQLITE, checked, known, lent_settings
from cache_server.secrets.redaction import redacted
from cache_server.tables.iceberg_files import OF_STORES, StoreFiles, lent_to_stores, made_for

_SCHEMES = {  # of its address -> the type of a catalogue
    **dict.fromkeys(("http", "https"), "rest"),
    "thrift": "hive",
    **dict.fromkeys(("sqlite", "postgresql", "mysql"), "sql"),
}
_SIGNING_KEYS = {"client.access-key-id", "client.secret-access-key"}
_CLIENT = "client."  # of AWS's settings, for a store and for a catalogue
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HOP_HEADERS = re.compile(
    r"host|content-length|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|proxy-.*"
)


class Settings(NamedTuple):
    """The options of an Iceberg table.

    Attributes:
        kind: of the catalogue; empty: the source is a metadata file.
        catalog: its properties, by pyiceberg's names.
        files: of the table.
        way: for connections to its server; None: they are not checked.
    """

    kind: str
    catalog: dict[str, str]
    files: StoreFiles
    way: Pass | None


def settings_of(options: Mapping[str, str], secrets: Mapping[str, str]) -> Settings:
    """The checked options of a table, for its catalogue and for its files.

    Options of a store may be among those of a catalogue by pyiceberg's names, such as
    ``s3.endpoint``.

    Raises:
        RequestError: names an option that cannot be given, or one with a wrong value.
    """
    given = {
        key.removeprefix(CATALOG_PREFIX): value
        for key, value in {**options, **secrets}.items()
        if key.startswith(CATALOG_PREFIX)
    }
    kind = _kind(given) if given else ""
    table = CATALOGS.get(kind)
    properties: dict[str, str] = {}
    of_store: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for target, part in zip(of_store, (options, secrets), strict=True):
        for key, value in part.items():
            name = key.removeprefix(CATALOG_PREFIX)
            in_catalog = name != key
            if not in_catalog or _is_of_store(name):
                target[name] = value
            own = table.find(name) if table and (in_catalog or name.startswith(_CLIENT)) else None
            if table and (own is not None or name not in target):
                _add(properties, table, name, own, value)
    gate = gates.current()
    way = None if gate is None else gate.pass_for(options, secrets)
    return Settings(kind, properties, StoreFiles(*of_store), way)


def opened(settings: Settings) -> Catalog:
    """The catalogue; it may connect to its server at once.

    Raises:
        RequestError: it has no address, or its answer has a value that is not of its form.
        Also the errors of pyiceberg.
    """
    if settings.way is not None:
        _hold(settings, settings.way)
    properties = made_for(settings.files, settings.catalog)
    name = properties.pop("name", "default")
    properties["type"] = settings.kind
    if settings.kind == "sql":
        properties["init_catalog_tables"] = "false"  # a reader creates no tables
    if settings.kind in ("rest", "sql", "hive") and "uri" not in properties:
        raise RequestError(f"{CATALOGS[settings.kind].what} needs its address, as uri")
    if settings.kind == "rest":
        return _RestCatalog(name, settings.way, properties)
    if settings.kind == "dynamodb":
        return _dynamodb(name, properties)
    return AVAILABLE_CATALOGS[CatalogType(settings.kind)](name, properties)


class _RestCatalog(RestCatalog):
    """pyiceberg's, with only those properties of its server's answer that a server may set.

    Each session reaches the server by ``way``.
    """

    def __init__(self, name: str, way: Pass | None, properties: Mapping[str, Any]) -> None:
        self._way = way
        super().__init__(name, **properties)

    def _create_session(self) -> Session:
        session = super()._create_session()
        if self._way is not None:
            session.trust_env = False  # which else takes proxies and NO_PROXY from there
            session.proxies = self._way.proxies
            session.verify = from_env() or session.verify
        return session

    def _fetch_config(self) -> None:
        given = dict(self.properties)
        super()._fetch_config()
        answer = self.properties
        of_catalog = dict(lent_settings(answer, CATALOGS["rest"]))
        self.properties = {**lent_to_stores(answer), **given, **of_catalog}
        self.uri = self.properties["uri"]


def from_env() -> str:
    """The file of certificates that requests trusts by its variables; empty: the package's."""
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""


def _hold(settings: Settings, way: Pass) -> None:
    """Refuses a catalogue whose connections cannot be checked, or one with keys of the node.

    Raises:
        RequestError: names it, and what to do.
    """
    given = settings.catalog
    if settings.kind == "sql" and given.get("uri", "").startswith(SQLITE):
        way.gate.check_file(os.path.abspath(given["uri"].removeprefix(SQLITE)))
    elif settings.kind != "rest":
        gates.refuse_unheld(CATALOGS[settings.kind].what)
    elif given.get("rest.sigv4-enabled") == "true" and not given.keys() >= _SIGNING_KEYS:
        raise RequestError(
            "the option 'catalog.rest.sigv4-enabled' would sign with the credentials of the nodes, "
            "which this cache sends to no catalogue of a caller: give "
            f"{' and '.join(sorted(_SIGNING_KEYS))}"
        )


def _dynamodb(name: str, properties: dict[str, Any]) -> Catalog:
    from pyiceberg.catalog.dynamodb import DynamoDbCatalog  # needs boto3

    class Reader(DynamoDbCatalog):
        def _ensure_catalog_table_exists_or_create(self) -> None:
            """A reader creates no table."""

    return Reader(name, **properties)


def _kind(given: Mapping[str, str]) -> str:
    """The type of a catalogue, as it is given or as its address tells."""
    kind = given.get("type", "").lower()
    if "type" in given:
        if kind not in CATALOGS:
            raise RequestError(
                f"the type of a catalog must be one of {', '.join(CATALOGS)}, "
                f"got {redacted(repr(given['type']), given.values())}"
            )
        return kind
    scheme = given.get("uri", "").partition("://")[0].partition("+")[0].lower()
    if scheme not in _SCHEMES:
        raise RequestError(
            f"a catalog needs a type ({', '.join(CATALOGS)}), or as its uri an address that tells "
            f"its type ({', '.join(_SCHEMES)})"
        )
    return _SCHEMES[scheme]


def _is_of_store(name: str) -> bool:
    """Whether a store has an option by pyiceberg's name."""
    return name.startswith(OF_STORES) and any(store.find(name) for store in STORES.values())


def _add(
    properties: dict[str, str], table: Options, name: str, own: Option | None, value: str
) -> None:
    option = known([table], f"{CATALOG_PREFIX}{name}", own)
    if option.name == HEADER_PREFIX:
        header = name.removeprefix(HEADER_PREFIX)
        if not _HEADER.fullmatch(header) or _HOP_HEADERS.fullmatch(header):
            raise RequestError(f"the option {name!r} names no header that a caller may set")
        option = option._replace(name=name)
    text = checked(f"the option '{CATALOG_PREFIX}{name}'", option, value)
    if option.form is not Form.UNUSED:
        properties[option.name] = text
