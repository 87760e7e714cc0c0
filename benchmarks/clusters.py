"""What benchmarks of loads do with a cache between two of them."""

from __future__ import annotations

import time

from cache_client import CacheClient

_DROP_TIMEOUT_S = 60.0


def drop_all(client: CacheClient) -> None:
    """Drops every dataset, and waits until the nodes have given their room back."""
    for info in client.datasets():
        client.drop(info.name)
    deadline = time.monotonic() + _DROP_TIMEOUT_S
    while any(node.stored_bytes for node in client.nodes()):
        assert time.monotonic() < deadline, f"not dropped within {_DROP_TIMEOUT_S:g} s"
        time.sleep(0.05)
