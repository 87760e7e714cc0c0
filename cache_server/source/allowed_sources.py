"""Which sources a node may touch. A caller names sources; the node has the rights to read them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import parse_qs, quote, unquote, urlsplit

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.datasets.secret_settings import CATALOG_PREFIX
from cache_protocol.errors import RequestError
from cache_server.source.pinned import PinnedTable, Split

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = frozenset({"s3", "s3a", "s3n", "gs", "gcs", "az", "azure", "abfs", "abfss", "hf"})
_POSTGRES = frozenset({"postgres", "postgresql"})
_HOSTS = ("host", "hostaddr")  # of PostgreSQL: several, with commas, or a folder of sockets
# Settings that name a file of the node.
_FILES = (
    *("_file", "credentials", "service_account", "passfile", "servicefile", "sslkey", "sslcert"),
)
# Metadata servers of clouds at addresses that are not link-local.
_METADATA = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16"))
)


class AllowedSources:
    """The sources that a node may touch. Immutable, thread-safe.

    Args:
        prefixes: of paths and URIs; an empty one allows everything. None: every URI, but no path
            of this machine, and no host at a loopback, link-local or metadata address. An address
            that an option names, such as that of an S3 endpoint, counts as a URI.
    """

    def __init__(self, prefixes: Sequence[str] | None) -> None:
        self._prefixes = None if prefixes is None else tuple(map(_normal, prefixes))
        self._allows_all = self._prefixes is not None and "" in self._prefixes

    def check_spec(self, spec: DatasetSpec) -> None:
        """Refuses a spec with a source that this node may not touch.

        Raises:
            RequestError: names the source.
        """
        if self._allows_all:
            return
        for table in spec.tables:
            settings = {**table.options, **table.secrets}
            self._check_settings(settings)
            if not any(name.startswith(CATALOG_PREFIX) for name in settings):
                self._check_all(table.source)  # else the source is a name in the catalogue

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
        if self._allows_all:
            return
        for table in tables:
            self._check_settings({**table.options, **secrets.get(table.name, {})})
        self._check_all(path for split in splits if (path := split.file.path))

    def _check_all(self, sources: Iterable[str]) -> None:
        """Checks each source, and each host once."""
        hosts: set[str] = set()
        for source in sources:
            self._check(source, hosts)

    def _check(self, source: str, known_hosts: set[str]) -> None:
        found = _normal(source)
        if self._prefixes is not None:
            if not f"{found}/".startswith(self._prefixes):  # a folder itself, too
                raise _not_allowed(source, "it begins with no prefix of --allow-source")
            return
        scheme, hosts = _hosts_of(found)
        if scheme in _BUCKETS:
            return
        if not hosts:
            raise _not_allowed(source, "it is on the machine of the node")
        for host in hosts:
            if host not in known_hosts:
                _check_host(source, host)
                known_hosts.add(host)

    def _check_settings(self, settings: Mapping[str, str]) -> None:
        for name, value in settings.items():
            key = name.rpartition(".")[2].lower()
            if key in _HOSTS:
                self._check(f"postgresql://?host={quote(value)}", set())
            elif _URI.match(value) or key.endswith(_FILES):
                self._check(value, set())


def _normal(source: str) -> str:
    """A source without ``..``, ``//`` and links, so that a prefix compares."""
    found = _URI.match(source)
    if found is None or found[1].lower() == "file":
        path = unquote(urlsplit(source).path) if found else source
        if not path:
            return path
        end = "/" if path.endswith("/") else ""
        return os.path.realpath(os.path.expanduser(path)).rstrip("/") + end
    parts = urlsplit(source)
    if ".." in unquote(parts.path).split("/"):
        raise _not_allowed(source, "it has a '..'")
    return f"{found[1].lower()}://{source[found.end() :]}"


def _hosts_of(uri: str) -> tuple[str, list[str]]:
    """The scheme and the hosts of a URI; no host: it is a path of the node."""
    parts = urlsplit(uri)
    scheme = parts.scheme if _URI.match(uri) else ""
    if scheme in _POSTGRES:
        given = parse_qs(parts.query, keep_blank_values=True)
        values = [parts.netloc.rpartition("@")[2], *(v for k in _HOSTS for v in given.get(k, ()))]
        names = [name for value in values if value for name in value.split(",")]
        return scheme, [re.sub(r":\d*$", "", name).strip("[]") for name in names]
    try:
        return scheme, [parts.hostname] if scheme and parts.hostname else []
    except ValueError:
        raise _not_allowed(uri, "it is no address") from None


def _check_host(source: str, host: str) -> None:
    host = unquote(host)
    if not host or host.startswith(("/", "@")):
        raise _not_allowed(source, "it is a socket of the node")
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return  # it cannot be touched either
    for text in found:
        address = ipaddress.ip_address(str(text).partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if (
            mapped.is_loopback
            or mapped.is_link_local
            or mapped.is_unspecified
            or mapped.is_multicast
            or mapped in _METADATA
        ):
            raise _not_allowed(source, f"its host has the address {mapped}")


def _not_allowed(source: str, reason: str) -> RequestError:
    shown = re.sub(r"//[^/@]*@", "//", source)[:200]
    return RequestError(
        f"this cache may not read {shown!r}: {reason}. Its operator can allow more sources with "
        "--allow-source"
    )
