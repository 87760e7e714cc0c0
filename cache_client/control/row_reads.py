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
    deadline = time.monotonic() + access.deadline_s
    shards = open_version(access, name)
    return fetch_rows(access, shards, row_ids(shards.num_rows), deadline)


def fetch_rows(
    access: Access, shards: ShardMap, row_ids: Ids, deadline: float | None = None
) -> pa.RecordBatch:
    """Rows of a version by number, in the order of the numbers.

    Args:
        deadline: monotonic seconds; None: that of ``access`` from now on.

    Raises:
        NodeUnavailableError, StaleVersionError: no node has them.
    """
    remaining_s = access.deadline_s if deadline is None else remaining_time_s(deadline)
    with (
        CallThreads() as threads,
        Reader(
            access.endpoint,
            shards,
            deadline_s=remaining_s or MIN_LOOKUP_S,
            credentials=access.credentials,
        ) as reader,
    ):
        pieces = threads.call(reader.fetch, row_ids)
    return join(pieces).to_batch()


def open_version(
    access: Access, name: str, fingerprint: str = "", *, with_log: bool = False
) -> ShardMap:
    """The shard map of a version.

    Args:
        fingerprint: of it; empty: the newest.
        with_log: as it is known while the version loads; see `ShardMap`.

    Raises:
        DatasetNotFoundError, StaleVersionError, LoadError: there is no such version.
        NotReadyError: it is loading; has the progress.
    """
    name = checked_name(name)
    with CallThreads() as threads:
        return threads.call(_read_shard_map, access, name, fingerprint, 0 if with_log else None)


def checked_name(name: object) -> str:
    """The name of a dataset. Raises ConfigError for other values."""
    if not is_text(name) or not name:
        raise ConfigError(f"name must be the name of a dataset, got {name!r}")
    return name


def _read_shard_map(
    access: Access, name: str, fingerprint: str, known_groups: int | None
) -> ShardMap:
    with NodeConnection(access.endpoint, access.credentials) as connection:
        return connection.read_shard_map(
            name, fingerprint, (), access.deadline_s, known_groups=known_groups
        )
