"""`Connection`: where a cache is, and what a process shows to it."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field

from cache_client.job.arguments import flag_problems, seconds_problems
from cache_client.job.ranks import (
    check_credentials,
    check_endpoint,
    find_credentials,
    find_endpoint,
    find_ready_deadline_s,
)
from cache_protocol.errors import ConfigError, checked
from cache_protocol.wire.credentials import Credentials


@dataclass(frozen=True)
class Connection:
    """How to reach a cache: one object for datasets, `CacheClient` and engines.

    Where one is taken, the endpoint alone stands for ``Connection(endpoint)``. Immutable, may be
    compared and pickled. A repr has no token; a pickle has it.

    Args:
        endpoint: ``grpc://HOST:PORT``, the Flight endpoint of any node; default:
            ``CACHE_ENDPOINT``, else the cache of this TrainJob.
        token, token_file: show the cache who you are; default: ``CACHE_TOKEN`` or
            ``CACHE_TOKEN_FILE``. The file is read again when it changes.
        tls_ca: file of the certificates that sign those of the nodes; default: ``CACHE_TLS_CA``.
        deadline_s: how long a call waits for nodes that do not answer, and a dataset for a cache
            that loads. For the load, ``CACHE_READY_DEADLINE_S`` of the environment may give more.
        local: read shards of nodes on this machine from their files, in this process.

    Raises:
        ConfigError: quotes every bad argument, but never a token.
    """

    endpoint: str | None = None
    _: KW_ONLY
    token: str | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    tls_ca: str | os.PathLike[str] | None = None
    deadline_s: float = 60.0
    local: bool = True

    def __post_init__(self) -> None:
        problems = seconds_problems("deadline_s", self.deadline_s)
        problems += flag_problems("local", self.local)
        checked(problems, lambda: check_endpoint("endpoint", self.endpoint))
        checked(problems, lambda: check_credentials(self.token, self.token_file, self.tls_ca))
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True)
class Access:
    """How this process reaches a cache: a `Connection` with what the environment adds.

    Attributes:
        endpoint: of any node.
        credentials: of this process.
        deadline_s: how long to wait for nodes that do not answer.
        local: whether to read files of this machine.
    """

    endpoint: str
    credentials: Credentials
    deadline_s: float
    local: bool

    @property
    def ready_deadline_s(self) -> float:
        """How long to wait for a cache that loads."""
        return find_ready_deadline_s(self.deadline_s)


def access_to(cache: Connection | str | None) -> Access:
    """How this process reaches a cache.

    Args:
        cache: a connection, its endpoint, or None for the defaults.

    Raises:
        ConfigError: it is something else, no endpoint is set, or a file cannot be read.
    """
    if cache is None or isinstance(cache, str):
        cache = Connection(cache)
    if not isinstance(cache, Connection):
        raise ConfigError(f"cache must be a Connection or grpc://HOST:PORT, got {cache!r}")
    endpoint = find_endpoint(cache.endpoint)
    credentials = find_credentials(endpoint, cache.token, cache.token_file, cache.tls_ca)
    return Access(endpoint, credentials, float(cache.deadline_s), cache.local)
