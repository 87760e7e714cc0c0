"""Rows of a dataset by number, fetched once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa

from cache_client.control.coordinator import MIN_LOOKUP_S, remaining_time_s
from cache_client.flight.call_threads import CallThreads
from cache_client.flight.connections import NodeConnection
from cache_client.flight.routing import ShardMap
from cache_client.job.connection import Access
from cache_client.reading.reader import Reader
from cache_client.reading.rows import join
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import ConfigError
from cache_protocol.storage.row_index import Ids


def read_rows(access: Access, name: str, row_ids: Callable[[int], Ids]) -> pa.RecordBatch:
    """Rows of a dataset by number, in the order of the numbers.

    Args:
        access: to the cache.
        row_ids: called with the number of rows of the dataset; returns int64 numbers below it.

    Raises:
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
        NotReadyError: it is loading; has the progress.
    """
    name = checked_name(name)
    deadline = time.monotonic() + access.deadline_s
    with CallThreads() as threads:
        shards = threads.call(_read_shard_map, access, name)
        remaining_s = remaining_time_s(deadline) or MIN_LOOKUP_S
        with Reader(
            access.endpoint, shards, deadline_s=remaining_s, credentials=access.credentials
        ) as reader:
            pieces = threads.call(reader.fetch, row_ids(shards.num_rows))
    return join(pieces).to_batch()


def checked_name(name: object) -> str:
    """The name of a dataset. Raises ConfigError for other values."""
    if not is_text(name) or not name:
        raise ConfigError(f"name must be the name of a dataset, got {name!r}")
    return name


def _read_shard_map(access: Access, name: str) -> ShardMap:
    with NodeConnection(access.endpoint, access.credentials) as connection:
        return connection.read_shard_map(name, "", (), access.deadline_s)
