"""The one way out of this process for addresses that callers name.

Most libraries resolve a name again, follow redirects, or take addresses from the answer of a
catalogue. So they reach the network through a proxy of this process, which checks each connection
as it is made (`proxy`). A process without a gate may connect to everything.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets as randoms
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cache_protocol.errors import CacheError, RequestError
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.egress.hosts import Endpoint
from cache_server.egress.proxy import CheckingProxy, Credentials
from cache_server.egress.proxy_variables import ProxyVariables, from_env

_MOST_FAILURES = 1000

_current: Gate | None = None


@dataclass(frozen=True)
class Pass:
    """Lets a library through the proxy, for one table.

    Attributes:
        gate: that gave it.
        user, password: for the proxy.
        who: the table, for `failure`.
    """

    gate: Gate
    user: str
    password: str = field(repr=False)
    who: str

    @property
    def url(self) -> str:
        """The address of the proxy, with user and password: a secret."""
        host, port = self.gate.proxy_address
        return f"http://{self.user}:{self.password}@{host}:{port}"

    @property
    def proxies(self) -> dict[str, str]:
        """For libraries that want an address for each scheme."""
        return {"http": self.url, "https": self.url}

    def failure(self) -> CacheError | None:
        """Why the last connection could not be made; None if it was made."""
        return self.gate.failure_of(self.who)


class Gate:
    """Checks what libraries of this process connect to. Thread-safe; must be closed.

    Args:
        sources: that callers may name.
        variables: the proxies of the operator, through which the checked connections go on.
    """

    def __init__(self, sources: AllowedSources, variables: ProxyVariables) -> None:
        self._sources = sources
        self._key = randoms.token_bytes(32)
        self._failures: OrderedDict[str, CacheError] = OrderedDict()
        self._lock = threading.Lock()
        self._proxy = CheckingProxy(sources.hosts, variables, self)

    def close(self) -> None:
        """Stops the proxy; open connections end."""
        self._proxy.close()

    def pass_for(
        self,
        options: Mapping[str, str],
        secrets: Mapping[str, str],
        trusted: Collection[Endpoint] = (),
    ) -> Pass:
        """Lets the reader of a table through; the same arguments give the same pass.

        Args:
            options, secrets: of the table, which failures are noted for.
            trusted: hosts that the operator's own settings name.
        """
        name = json.dumps([_digest(options, secrets), sorted(trusted)])
        user = base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")
        return Pass(self, user, self._password(user), _digest(options, secrets))

    @property
    def proxy_address(self) -> tuple[str, int]:
        """The host and the port of the proxy."""
        return self._proxy.address

    def failure_of(self, who: str) -> CacheError | None:
        """Why the last connection of a `Pass` could not be made; None if it was made."""
        return self._failures.get(who)

    def check_host(self, host: str, port: int, trusted: Collection[Endpoint] = ()) -> list[str]:
        """The IP addresses of a host to connect to; raises as `Hosts.checked`."""
        return self._sources.hosts.checked(host, port, trusted)

    def check_file(self, path: str) -> None:
        """Raises a `RequestError` for a file of this machine that callers may not name."""
        self._sources.check_file(path)

    def admitted(self, user: str, password: str) -> Credentials | None:
        """What a user of the proxy may do; None if it has no pass."""
        if not hmac.compare_digest(self._password(user), password):
            return None
        digest, trusted = json.loads(base64.urlsafe_b64decode(user + "=" * (-len(user) % 4)))
        return Credentials(digest, frozenset((host, port) for host, port in trusted))

    def note(self, who: str, failure: CacheError | None) -> None:
        """Keeps why a connection could not be made; None: it was made."""
        with self._lock:
            self._failures.pop(who, None)
            if failure is not None:
                self._failures[who] = failure
            while len(self._failures) > _MOST_FAILURES:
                self._failures.popitem(last=False)

    def _password(self, user: str) -> str:
        return hmac.new(self._key, user.encode(), hashlib.sha256).hexdigest()


def current() -> Gate | None:
    """The gate of this process; None: everything may be connected to."""
    return _current


@contextmanager
def opened(sources: AllowedSources) -> Iterator[Gate | None]:
    """The gate of this process while a node runs; none where it allows everything.

    Libraries keep connections for the whole process, so the gate is one for it as well.

    Raises:
        ConfigError: for a proxy of the environment that cannot be used.
    """
    global _current
    if sources.allows_all:
        yield None
        return
    before, gate = _current, Gate(sources, from_env())
    _current = gate
    try:
        yield gate
    finally:
        _current = before
        gate.close()


def why_unreachable(options: Mapping[str, str], secrets: Mapping[str, str]) -> CacheError | None:
    """Why the last connection for a table could not be made; None if it was, or is unknown."""
    return None if _current is None else _current.failure_of(_digest(options, secrets))


def refuse_unheld(what: str) -> None:
    """Refuses what opens connections that no gate can check, where there is a gate.

    Raises:
        RequestError: names it.
    """
    if _current is not None:
        raise RequestError(
            f"this cache reads nothing through {what}: it may connect only to checked addresses, "
            f"and those of {what} cannot be checked. Its operator can allow everything with "
            "--allow-source ''"
        )


def _digest(options: Mapping[str, str], secrets: Mapping[str, str]) -> str:
    text = json.dumps([sorted(options.items()), sorted(secrets.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
