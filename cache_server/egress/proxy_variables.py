"""The proxies that the operator's environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # no stub

from cache_protocol.errors import ConfigError

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_DEFAULT_PORT = 80


@dataclass(frozen=True)
class OperatorProxy:
    """A proxy by HTTP; ``user`` is empty without one."""

    host: str
    port: int
    user: str = ""
    password: str = ""


class ProxyVariables:
    """The proxies of an environment. Immutable.

    Raises:
        ConfigError: a proxy is not reached by plain HTTP.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        given = {name: environ.get(name) or environ.get(name.upper(), "") for name in _NAMES}
        self._excluded = {"no": given["no_proxy"]}
        self._proxies = {
            scheme: _proxy(name, value)
            for scheme in ("http", "https")
            for name in (f"{scheme}_proxy" if given[f"{scheme}_proxy"] else "all_proxy",)
            if (value := given[name])
        }

    def proxy_for(self, scheme: str, host: str, port: int) -> OperatorProxy | None:
        """The proxy for connections to a host; None: they are direct."""
        found = self._proxies.get(scheme)
        if found is None or proxy_bypass_environment(f"{host}:{port}", self._excluded):
            return None
        return found


def from_env() -> ProxyVariables:
    """The proxies of the environment of this process."""
    return ProxyVariables(os.environ)


def _proxy(name: str, value: str) -> OperatorProxy:
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(
            [
                f"{name.upper()} must be the address of a proxy by plain HTTP, such as "
                "http://proxy.example:3128, for a cache that checks addresses (--allow-source)"
            ]
        )
    return OperatorProxy(
        parts.hostname, port, unquote(parts.username or ""), unquote(parts.password or "")
    )
