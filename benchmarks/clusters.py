"""What benchmarks of loads do with a cache between two of them."""

from __future__ import annotations

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from cache_client import CacheClient

_DROP_TIMEOUT_S = 60.0


def drop_all(client: CacheClient) -> None:
    """Drops every dataset, and waits until the nodes have given their room back.

    Raises:
        RetryError: they have not after a minute.
    """
    for info in client.datasets():
        client.drop(info.name)
    Retrying(
        retry=retry_if_result(bool), stop=stop_after_delay(_DROP_TIMEOUT_S), wait=wait_fixed(0.05)
    )(lambda: any(node.stored_bytes for node in client.nodes()))
