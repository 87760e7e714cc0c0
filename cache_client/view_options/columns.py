"""What a job needs of the values of all rows: computed by the nodes, once for a job.

Only the small results travel: numbers of rows, lengths, labels, weights, keys.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_delay

from cache_client.flight.call_threads import CallThreads
from cache_client.flight.connections import NodeConnection
from cache_client.flight.routing import ShardMap
from cache_client.reading.background_task import CALL_TIMEOUT_S
from cache_client.reading.shard_maps import newer_shard_map
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from cache_protocol.storage.column_stats import ColumnStats, union
from cache_protocol.wire.channels import backoff
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials

_ROWS_AT_ONCE = 4 * 1024 * 1024  # of one answer
_BYTES_AT_ONCE = 128 * 1024 * 1024  # likewise, of its rows as they are stored
_REQUESTS_A_NODE, _MAX_REQUESTS = 2, 32  # at the same time
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
# Only the coordinator can say for good that a version is gone: a node may have just started.
_OF_ONE_NODE = (NodeUnavailableError, NotReadyError, StaleVersionError, DatasetNotFoundError)


@dataclass(frozen=True)
class VersionNodes:
    """The nodes of one version, and how this process asks them.

    Args:
        endpoint: of any node; asked for a fresh shard map where no replica answers.
        shards: of the version.
        credentials: of this process.
        deadline_s: how long to wait for nodes that do not answer.
        replica_offset: which replica to ask first.
    """

    endpoint: str
    shards: ShardMap
    credentials: Credentials = NO_CREDENTIALS
    deadline_s: float = 60.0
    replica_offset: int = 0


def row_values(
    version: VersionNodes, expression: str, where: str | Sequence[str] = ()
) -> pa.ChunkedArray:
    """The value of an expression for each row, in the order of the row ids.

    Dates, times and booleans are what they were in the source; other columns are as the cache
    stores them.

    Args:
        expression: SQL of one value a row, such as ``"array_length(tokens)"`` or ``'"label"'``.
        where: SQL of one or more conditions; only rows that fulfil all of them have a value.

    Raises:
        RequestError: the expression or the condition is wrong, or needs other rows; says why.
        NodeUnavailableError: nodes did not answer before the deadline; names them.
        StaleVersionError: the version is gone.
    """
    parts = _parts(version.shards)
    if not parts:  # only nodes know its type
        return pa.chunked_array([], pa.null())
    answers = _ask(version, parts, expression, where)
    return pa.chunked_array(
        itertools.chain.from_iterable(a.chunks for a in answers), answers[0].type
    )


def column_stats(version: VersionNodes, columns: Sequence[str]) -> list[ColumnStats]:
    """The statistics of columns, in their order; nodes compute them.

    Raises:
        RequestError, NodeUnavailableError, StaleVersionError: as for `row_values`.
    """
    found = [ColumnStats()] * len(columns)
    for answer in _ask(version, _parts(version.shards), stats=columns):
        read = [ColumnStats.of(value) for value in answer]
        found = [union(one, other) for one, other in zip(found, read, strict=True)]
    return found


def selected_rows(
    version: VersionNodes, where: str | Sequence[str]
) -> list[npt.NDArray[np.uint32]]:
    """For each shard, the rows that fulfil all conditions, counted from its first row; ascending.

    Raises:
        RequestError, NodeUnavailableError, StaleVersionError: as for `row_values`.
    """
    parts = list(enumerate(_shard_ranges(version.shards)))
    return [answer.combine_chunks().to_numpy() for answer in _ask(version, parts, "", where)]


def _parts(shards: ShardMap) -> list[tuple[int, range]]:
    """Shards, and the rows of each that are asked for at once."""
    stored_bytes = max(1, shards.num_bytes // max(1, shards.num_rows))  # of a row
    step = min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // stored_bytes))
    return [
        (shard, range(at, min(at + step, rows.stop)))
        for shard, rows in enumerate(_shard_ranges(shards))
        for at in range(rows.start, rows.stop, step)
    ]


def _shard_ranges(shards: ShardMap) -> list[range]:
    bounds = [*shards.starts.tolist(), shards.num_rows]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _ask(
    version: VersionNodes,
    parts: list[tuple[int, range]],
    expression: str = "",
    where: str | Sequence[str] = (),
    stats: Sequence[str] = (),
) -> list[pa.ChunkedArray]:
    conditions = [where] if isinstance(where, str) else where
    if not parts:
        return []
    with CallThreads() as threads:
        return threads.call(_ValueRequests(version, expression, conditions, stats).answers, parts)


class _ValueRequests:
    """Asks replicas for values until one answers, for each part. Thread-safe."""

    def __init__(
        self, version: VersionNodes, expression: str, where: Sequence[str], stats: Sequence[str]
    ) -> None:
        self._version = version
        self._expression, self._where, self._stats = expression, where, stats
        self._shards = version.shards  # the newest
        self._lock = threading.Lock()
        self._connections: dict[str, NodeConnection] = {}

    def answers(self, parts: list[tuple[int, range]]) -> list[pa.ChunkedArray]:
        """The answers for parts of shards, in their order; several nodes work at the same time."""
        num_threads = min(_REQUESTS_A_NODE * len(self._shards.nodes), _MAX_REQUESTS, len(parts))
        try:
            with ThreadPoolExecutor(num_threads, "cache-values") as pool:
                asked = [pool.submit(self._answer, *part) for part in parts]
                try:
                    return [answer.result() for answer in asked]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            for connection in self._connections.values():
                connection.close()

    def _answer(self, shard: int, rows: range) -> pa.ChunkedArray:
        deadline = time.monotonic() + self._version.deadline_s
        attempts = Retrying(
            retry=retry_if_exception_type(_OF_ONE_NODE),
            stop=stop_after_delay(self._version.deadline_s),
            wait=backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            before_sleep=lambda _: self._refresh(deadline),
            reraise=True,
        )
        return attempts(self._ask_replicas, shard, rows, deadline)

    def _ask_replicas(self, shard: int, rows: range, deadline: float) -> pa.ChunkedArray:
        shards = self._shards
        first = (self._version.replica_offset + shard) % max(1, len(shards.replicas[shard]))
        failure: CacheError = NodeUnavailableError(f"no node holds shard {shard}")
        for node in (*shards.replicas[shard][first:], *shards.replicas[shard][:first]):
            timeout_s = max(0.0, deadline - time.monotonic())
            try:
                return self._connection(shards.nodes[node].location).row_values(
                    shards.dataset,
                    shards.fingerprint,
                    rows,
                    self._expression,
                    self._where,
                    timeout_s,
                    stats=self._stats,
                )
            except _OF_ONE_NODE as error:
                failure = error
        raise failure

    def _refresh(self, deadline: float) -> None:
        """Reads a fresh shard map; raises as `newer_shard_map`."""
        self._shards = newer_shard_map(
            self._shards,
            self._version.endpoint,
            self._shards.logical.names,
            self._connection,
            timeout_s=CALL_TIMEOUT_S,
            deadline=deadline,
        )

    def _connection(self, location: str) -> NodeConnection:
        with self._lock:
            found = self._connections.get(location)
            if found is None or found.is_closed:
                found = self._connections[location] = NodeConnection(
                    location, self._version.credentials
                )
            return found
