"""The network of this process as that of a node that does not allow everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cache_server.egress import gate
from cache_server.egress.allowed_sources import AllowedSources


@contextmanager
def checked_network(*prefixes: str) -> Iterator[gate.Gate]:
    """Opens a gate; callers may name what begins with ``prefixes``."""
    with gate.opened(AllowedSources(prefixes)) as opened:
        assert opened is not None
        yield opened
