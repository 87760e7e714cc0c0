"""Which sources a node may touch. A caller names sources; the node has the rights to read them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import parse_qsl, unquote, urlsplit

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.datasets.secret_settings import CATALOG_PREFIX
from cache_protocol.errors import ConfigError, RequestError
from cache_server.egress.addresses import (
    DEFAULT_PORTS,
    HTTP,
    KINDS,
    Address,
    parse_address,
    parse_host,
    parse_source,
)
from cache_server.egress.hosts import Endpoint, Hosts, RefusedAddressError, resolved
from cache_server.source.pinned import PinnedTable, Split

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HUB = "hf"
_POSTGRES = ("postgres", "postgresql")
POSTGRES_PORT = 5432
_HOSTS = ("host", "hostaddr")  # of PostgreSQL: several, with commas, or a folder of sockets
_SQLITE = "sqlite:///"  # a file of the node


class AllowedSources:
    """The sources that a node may touch. Immutable, thread-safe.

    Args:
        prefixes: of paths and URIs; an empty one allows everything. None: every URI, but no path
            of this machine, and no host at an address that is not public. An address that an
            option names, such as that of an S3 endpoint, counts as a URI. A host that a prefix
            names may have any address.
        resolve: gives the IP addresses of a host.

    Attributes:
        allows_all: whether nothing is checked.
        hosts: that may be connected to.

    Raises:
        ConfigError: for a prefix that is no address.
    """

    def __init__(
        self,
        prefixes: Sequence[str] | None,
        resolve: Callable[[str, int], list[str]] = resolved,
    ) -> None:
        self.allows_all = prefixes is not None and "" in prefixes
        try:
            self._prefixes = None if prefixes is None else tuple(map(_normal_prefix, prefixes))
            named = [end for prefix in prefixes or () for end in _endpoints(prefix)]
        except RequestError as error:
            raise ConfigError([f"--allow-source: {error}"]) from None
        self.hosts = Hosts(named, resolve)

    def check_spec(self, spec: DatasetSpec) -> None:
        """Refuses a spec with a source that this node may not touch.

        Raises:
            RequestError: names the source.
        """
        if self.allows_all:
            return
        for table in spec.tables:
            settings = {**table.options, **table.secrets}
            self._check_settings(settings)
            sources = table.source
            in_catalog = any(name.startswith(CATALOG_PREFIX) for name in settings)
            if in_catalog and table.format in (None, "iceberg"):
                sources = tuple(filter(_URI.match, sources))  # others are names in the catalogue
            self._check_all(sources)

    def check_splits(
        self,
        tables: Iterable[PinnedTable],
        splits: Iterable[Split],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Refuses the files of a load that this node may not touch; links are followed.

        Raises:
            RequestError: names the file.
        """
        if self.allows_all:
            return
        for table in tables:
            self._check_settings({**table.options, **secrets.get(table.name, {})})
        self._check_all(path for split in splits if (path := split.file.path))

    def check_source(self, source: str) -> None:
        """Refuses one path or URI that this node may not touch.

        Raises:
            RequestError: names it.
        """
        if not self.allows_all:
            self._check_all([source])

    def check_file(self, path: str) -> None:
        """Refuses a file of this machine that this node may not touch; links are followed.

        Raises:
            RequestError: names the file.
        """
        if not self.allows_all:
            self._check_prefix(path, _normal_path(path))
            if self._prefixes is None:
                raise _not_allowed(path, "it is on the machine of the node")

    def _check_all(self, sources: Iterable[str]) -> None:
        """Checks each source, and each host once."""
        known: set[Endpoint] = set()
        for source in sources:
            self._check(source, known)

    def _check(self, source: str, known: set[Endpoint]) -> None:
        scheme = _scheme_of(source)
        if source.startswith(_SQLITE):
            self.check_file(os.path.abspath(source.removeprefix(_SQLITE)))
        elif scheme in ("", "file"):
            self.check_file(source)
        elif scheme in _POSTGRES:
            for host, port in _postgres_hosts(source):
                database = urlsplit(source).path
                self._check_prefix(source, str(Address("postgresql", host, port, database)))
                self._check_host(source, host, port, known)
        else:
            self._check_prefix(source, _normal(source))
            if scheme != _HUB and (address := _address_of(source, scheme)):
                self._check_host(source, address.host, address.used_port, known)

    def _check_prefix(self, source: str, normal: str) -> None:
        if self._prefixes is not None and not f"{normal}/".startswith(self._prefixes):
            raise _not_allowed(source, "it begins with no prefix of --allow-source")

    def _check_host(self, source: str, host: str, port: int, known: set[Endpoint]) -> None:
        if (host, port) in known:
            return
        try:
            self.hosts.checked(host, port)
        except RefusedAddressError as error:
            raise _not_allowed(source, str(error)) from None
        except OSError:
            return  # it cannot be touched either
        known.add((host, port))

    def _check_settings(self, settings: Mapping[str, str]) -> None:
        for name, value in settings.items():
            key = name.rpartition(".")[2].lower()
            if key in _HOSTS:
                ports = settings.get("port", "")
                for host, port in _pairs(value, ports, f"the option {name!r}"):
                    self._check_prefix(value, str(Address("postgresql", host, port)))
                    self._check_host(value, host, port, set())
            elif scheme := _scheme_of(value):
                if scheme in HTTP:
                    value = str(parse_address(f"the option {name!r}", value))
                self._check(value, set())


def _scheme_of(source: str) -> str:
    """In lower case; empty: it is a path."""
    found = _URI.match(source)
    return found[1].lower() if found else ""


def _normal_path(source: str) -> str:
    """A path without ``..``, ``//`` and links, so that a prefix compares."""
    path = unquote(urlsplit(source).path) if _URI.match(source) else source
    if not path:
        return path
    end = "/" if path.endswith("/") else ""
    return os.path.realpath(os.path.expanduser(path)).rstrip("/") + end


def _normal(source: str) -> str:
    """A URI in its one spelling, without a user, so that a prefix compares."""
    scheme = _scheme_of(source)
    if ".." in unquote(urlsplit(source).path).split("/"):
        raise _not_allowed(source, "it has a '..'")
    if KINDS.get(scheme) == "http":
        found = parse_source(source)
        assert found.address is not None
        return f"{_plain(found.address)}/{found.key}"
    if scheme in KINDS:
        return str(parse_source(source)).removesuffix("/" if source.count("/") < 3 else "")
    return f"{scheme}{source[len(scheme) :]}"


def _plain(address: Address) -> Address:
    """An address without a user, and without the port that its scheme has."""
    port = None if address.port == DEFAULT_PORTS.get(address.scheme) else address.port
    return Address(address.scheme, address.host, port, address.path)


def _address_of(source: str, scheme: str) -> Address | None:
    """The server that a URI names; None: a bucket."""
    if scheme in KINDS:
        return parse_source(source).address
    return parse_address("the address", source, (scheme,))


def _normal_prefix(prefix: str) -> str:
    scheme = _scheme_of(prefix)
    if scheme in ("", "file"):
        return _normal_path(prefix)
    if scheme in _POSTGRES or KINDS.get(scheme) == "http":
        if prefix.partition("://")[2] == "":
            return prefix.lower()  # every host
        address = _plain(parse_address("the prefix", prefix, (scheme,)))
        if scheme in _POSTGRES:
            port = address.port or POSTGRES_PORT
            address = Address("postgresql", address.host, port, address.path)
        return str(address) if address.path else f"{address}/"
    return _normal(prefix) if scheme not in KINDS else scheme + prefix[len(scheme) :]


def _endpoints(prefix: str) -> list[Endpoint]:
    """The host that a prefix names, if any."""
    scheme = _scheme_of(prefix)
    if KINDS.get(scheme) != "http" and scheme not in _POSTGRES:
        return []
    if prefix.partition("://")[2] == "":
        return []
    address = parse_address("the prefix", prefix, (scheme,))
    return [(address.host, address.used_port or POSTGRES_PORT)]


def _postgres_hosts(uri: str) -> list[Endpoint]:
    """The hosts that libpq would connect to for a URI."""
    parts = urlsplit(uri)
    place = parts.netloc.rpartition("@")[2]
    query = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)
    ports = next((value for name, value in query if name == "port"), "")
    items = [item for item in place.split(",") if item]
    found = []
    for item in items:
        host, colon, port = item.rpartition(":")
        bare = not colon or item.endswith("]")
        found += _pairs(
            unquote(item if bare else host), "" if bare else port or ports, "the source"
        )
    for name, value in query:
        if name in _HOSTS:
            found += _pairs(value, ports, "the source")
    if not found:
        raise _not_allowed(uri, "it is a socket of the node")
    return found


def _pairs(hosts: str, ports: str, what: str) -> list[Endpoint]:
    """Hosts and ports of two lists with commas."""
    names = hosts.split(",")
    numbers = ports.split(",") if ports else [""]
    numbers = numbers * len(names) if len(numbers) == 1 else numbers
    if len(numbers) != len(names) or not all(n == "" or n.isdecimal() for n in numbers):
        raise RequestError(f"{what} has not one port, and not one port for each host")
    found = []
    for name, number in zip(names, numbers, strict=True):
        if not name or name.startswith(("/", "@")):
            raise _not_allowed(hosts, "it is a socket of the node")
        name = f"[{name}]" if ":" in name and not name.startswith("[") else name
        found.append((parse_host(what, name), int(number or POSTGRES_PORT)))
    return found


def _not_allowed(source: str, reason: str) -> RequestError:
    shown = re.sub(r"//[^/@]*@", "//", source)[:200]
    hint = (
        ""
        if "--allow-source" in reason and "operator" in reason
        else (". Its operator can allow more sources with --allow-source")
    )
    return RequestError(f"this cache may not read {shown!r}: {reason}{hint}")
