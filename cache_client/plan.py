"""What every way of reading settles before the first row: the shard map, and the size of a row."""

from __future__ import annotations

from collections.abc import Sequence

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from cache_client.connections import Connection
from cache_client.reader import REQUEST_TIMEOUT_S
from cache_client.routing import ShardMap
from protos.errors import NodeUnavailableError, NotReadyError
from protos.layout import Layout


def wait_for_plan(
    endpoint: str, dataset: str, columns: Sequence[str], deadline_s: float
) -> ShardMap:
    """Where the rows of the newest version of ``dataset`` are, as soon as it is ready.

    Args:
        columns: to read, in this order; empty for all.
        deadline_s: how long to wait for a cache that is loading, or that does not answer.

    Raises:
        DatasetNotFoundError, LoadError, RequestError: at once.
        NotReadyError, NodeUnavailableError: at the deadline.
    """
    attempts = Retrying(
        retry=retry_if_exception_type((NotReadyError, NodeUnavailableError)),
        stop=stop_after_delay(deadline_s),
        wait=wait_random_exponential(multiplier=0.02, max=1.0),
        reraise=True,
    )
    for attempt in attempts:
        with attempt, Connection(endpoint) as connection:
            return connection.read_plan(dataset, "", columns, min(REQUEST_TIMEOUT_S, deadline_s))
    raise AssertionError("the last attempt returns or raises")


def row_bytes(layout: Layout) -> int:
    """Bytes of a row on the wire, at least 1; strings and lists are guessed."""
    return max(1, layout.guessed_row_bytes)
