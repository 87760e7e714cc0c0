"""Where etcd is, and what a node shows to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from cache_protocol.errors import ConfigError


class Etcd(NamedTuple):
    """Where etcd is, and what a node shows to it; as ``etcdctl`` knows it.

    Attributes:
        endpoints: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        ca_file, cert_file, key_file: of TLS; None: those of the system, or none.
        user, password: None: etcd has no users.
    """

    endpoints: tuple[str, ...] = ("http://127.0.0.1:2379",)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        return f"Etcd({', '.join(self.endpoints)})"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Etcd:
        """By the variables of ``etcdctl``.

        ETCDCTL_ENDPOINTS, and if they are set ETCDCTL_CACERT, _CERT, _KEY, _USER and _PASSWORD.

        Raises:
            ConfigError: an endpoint is no address.
        """

        def get(name: str) -> str | None:
            return environ.get(f"ETCDCTL_{name}") or None

        given = [each.strip() for each in (get("ENDPOINTS") or "127.0.0.1:2379").split(",")]
        scheme = "https" if get("CACERT") or get("CERT") else "http"
        endpoints = [each if "://" in each else f"{scheme}://{each}" for each in given]
        for endpoint in endpoints:
            if not _is_address(endpoint):
                raise ConfigError(
                    "ETCDCTL_ENDPOINTS must be addresses such as https://HOST:2379, separated by "
                    f"commas, got {endpoint!r}"
                )
        user, separator, password = (get("USER") or "").partition(":")
        return cls(
            tuple(endpoints),
            get("CACERT"),
            get("CERT"),
            get("KEY"),
            user or None,
            password if separator else get("PASSWORD"),
        )


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False
