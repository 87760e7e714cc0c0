"""Writes rows into a cache: partitions are put to nodes, then committed together.

A `Write` can be pickled: an engine sends it to its tasks, and commits what they put. Knows Flight
only through `NodeConnection`, and the coordinator only through `WriteEnds`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from cache_client.flight.connections import NodeConnection
from cache_client.flight.streams import PutStream
from cache_client.reading.fetch_ahead import fetch_ahead
from cache_client.writing.arrow_sources import ArrowSource, conformed, exported, slices
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LostPartitionsError,
    NodeUnavailableError,
)
from cache_protocol.storage.layout import Layout
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import backoff
from cache_protocol.wire.credentials import Credentials
from cache_protocol.wire.load_progress import LoadReport

logger = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_TTL_S, DEFAULT_FULL_WAIT_S = 3600.0, 60.0
OWN_TTL_S = 600.0  # of a write by one process, which puts rows all the time
_PUT_TIMEOUT_S = 3600.0
_MESSAGE_BYTES = 2 * 1024 * 1024  # the best message size of Flight over loopback
_SMALL_BYTES = 256 * 1024  # of a batch: smaller ones are sent together
_STREAMS = 2  # puts at once of one process
_MOST_TRIES, _MOST_COMMITS = 5, 4  # of a partition before a commit, and of commits
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0  # between tries
_MAX_PARTITION, _MAX_ATTEMPT = 2**32 - 1, 2**64 - 1


@dataclass(frozen=True)
class PartitionAck:
    """What a node stored of one attempt at a partition.

    Attributes:
        num_bytes: of the shards.
        checksum: of the stored rows.
        node_id: the node that holds them.
        shards: their checksums, in row order.
    """

    partition: int
    attempt: int
    num_rows: int
    num_bytes: int
    checksum: str
    node_id: str
    shards: tuple[str, ...]


class WriteEnds(Protocol):
    """Ends writes; can be pickled."""

    def commit(
        self,
        write: Write,
        chosen: Sequence[pb.ChosenAttempt],
        *,
        wait: bool,
        timeout_s: float | None,
        on_progress: Callable[[LoadReport], None] | None,
    ) -> Any:
        """Commits; returns the `DatasetInfo`."""

    def abort(self, write: Write) -> None:
        """Aborts."""


@dataclass(frozen=True)
class Write:
    """A write that has begun. Can be pickled, with the token of its client; thread-safe.

    Attributes:
        name: of the dataset.
        write_id: names the write in the cache.
        schema: of the rows to put.
        stored: schema of the stored columns.
        target_shard_bytes: of a shard.
        locations: of the nodes to put rows to.
        credentials: shown to nodes.
        ends: commits or aborts it.
    """

    name: str
    write_id: str
    schema: pa.Schema
    stored: pa.Schema
    target_shard_bytes: int
    locations: tuple[str, ...]
    credentials: Credentials
    ends: WriteEnds

    def __repr__(self) -> str:
        return f"Write({self.name!r}, write_id={self.write_id!r})"

    def put(
        self, partition: int, attempt: int, data: Any, *, timeout_s: float = _PUT_TIMEOUT_S
    ) -> PartitionAck:
        """Puts the rows of one attempt at a partition, and returns when a node has sealed them.

        A repeated put of the same attempt must have the same rows. If a node fails, the rows of a
        single shard go to the next node; more rows may have been read already, and the call raises
        an error.

        Args:
            partition: its number; the rows of a version are ordered by partition.
            attempt: a new number for every try whose rows may differ, such as a task's attempt.
            data: rows, as `CacheClient.write` takes them, with the columns of `schema`.
            timeout_s: of the whole call.

        Raises:
            ConfigError: an argument is wrong. RequestError: the write has ended.
            SchemaError: the rows have other columns, or a value does not become the type of its
                column without a loss.
            LoadError: a value cannot be stored, or the node stayed full.
            NodeUnavailableError: the node stopped or does not answer: put the rows again, by
                another attempt.
        """
        for name, value, limit in (
            ("partition", partition, _MAX_PARTITION),
            ("attempt", attempt, _MAX_ATTEMPT),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
                raise ConfigError(f"{name} must be a number from 0 to {limit}, got {value!r}")
        with _Connections(self.credentials) as connections:
            groups = self._groups(exported(data).batches)
            return self._put(connections, partition, attempt, groups, timeout_s)

    def commit(
        self,
        attempts: Mapping[int, int | PartitionAck],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        on_progress: Callable[[LoadReport], None] | None = None,
    ) -> Any:
        """Makes a version of these attempts, all or nothing; it may be repeated.

        When this returns, and it waited, as many nodes as the write asks for hold every row and
        have just said so. The rows are not lost while one of them can come back. After an error
        the nodes keep what was put, so you can commit again. The rows of all other attempts are
        dropped with the commit.

        Args:
            attempts: partition -> the attempt to keep, or its `PartitionAck`.
            wait: until every replica is there and the version is ready.
            timeout_s: how long to wait; None for no limit.
            on_progress: called in this thread while it waits.

        Returns:
            The `DatasetInfo` of the version.

        Raises:
            LostPartitionsError: no live node has the rows of some partitions: put them again.
            RequestError: the write was aborted or is too old, or the coordinator started again. Or
                an append, and the dataset was loaded or got other columns meanwhile.
            LoadError: the replicas do not fit.
            NotReadyError: not within ``timeout_s``: a node with rows does not answer, rows are
                copied, or the version to append to is not ready.
            NodeUnavailableError: nodes with rows, which it names, or the coordinator are away.
        """
        chosen = [
            pb.ChosenAttempt(partition=partition, attempt=ack.attempt, checksum=ack.checksum)
            if isinstance(ack, PartitionAck)
            else pb.ChosenAttempt(partition=partition, attempt=ack)
            for partition, ack in sorted(attempts.items())
        ]
        return self.ends.commit(
            self, chosen, wait=wait, timeout_s=timeout_s, on_progress=on_progress
        )

    def abort(self) -> None:
        """Drops everything that was put. A write that has ended stays as it is."""
        self.ends.abort(self)

    def give_up(self) -> None:
        """Aborts after an error; logs why a cache did not: it drops the rows later."""
        try:
            self.abort()
        except CacheError as error:
            logger.warning("write not aborted write=%s reason=%s", self.write_id, error)

    def _groups(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """The rows of each shard."""
        stored_bytes = Layout(self.stored).stored_bytes
        return slices(self.fitted(batches), stored_bytes, self.target_shard_bytes)

    def fitted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with the columns of ``schema``.

        Raises:
            SchemaError: a column is missing or another one, or a value does not become its type
                without a loss; names the column, the value and its row.
        """
        return conformed(batches, self.schema)

    def _put(
        self,
        connections: _Connections,
        partition: int,
        attempt: int,
        groups: Iterator[list[pa.RecordBatch]],
        timeout_s: float = _PUT_TIMEOUT_S,
    ) -> PartitionAck:
        """Puts groups to one node; a single group goes to the next node if one fails."""
        first, second = next(groups, []), next(groups, None)
        places = range(len(self.locations) if second is None else 1)
        for place in places:
            location = self.locations[(partition + attempt + place) % len(self.locations)]
            rest = [first] if second is None else itertools.chain([first, second], groups)
            try:
                with connections.use(location) as connection:
                    result = self._put_to(connection, partition, attempt, rest, timeout_s)
            except NodeUnavailableError:
                if place == places[-1]:
                    raise
            else:
                return _ack(result)
        raise AssertionError("a write has a node")

    def _put_to(
        self,
        connection: NodeConnection,
        partition: int,
        attempt: int,
        groups: Iterable[list[pa.RecordBatch]],
        timeout_s: float,
    ) -> pb.PutResult:
        request = pb.PutRequest(
            dataset=self.name, write_id=self.write_id, partition=partition, attempt=attempt
        )
        num_rows = 0
        stream = connection.open_put(request, self.schema, timeout_s)
        try:
            for group in groups:
                num_rows += _send(stream, group)
            return stream.finish(num_rows)
        finally:
            stream.close()


def _ack(result: pb.PutResult) -> PartitionAck:
    return PartitionAck(
        result.partition,
        result.attempt,
        result.num_rows,
        result.num_bytes,
        result.checksum,
        result.node_id,
        tuple(shard.checksum for shard in result.shards),
    )


def _send(stream: PutStream, group: Sequence[pa.RecordBatch]) -> int:
    """Sends the rows of one shard, in messages of about `_MESSAGE_BYTES`; returns how many."""
    announced = num_rows = sum(int(batch.num_rows) for batch in group)
    if sum(batch.nbytes for batch in group) < len(group) * _SMALL_BYTES:
        group = pa.Table.from_batches(group).combine_chunks().to_batches() if group else []
    for batch in group:
        step = max(1, batch.num_rows * _MESSAGE_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, step):
            stream.send(batch.slice(start, step), announced)
            announced = 0
    return num_rows


class _Connections:
    """Connections to nodes, each used by one put at a time. Thread-safe; a context manager."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._idle: dict[str, deque[NodeConnection]] = {}
        self._is_closed = False

    def __enter__(self) -> _Connections:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    def use(self, location: str) -> _Use:
        """A connection for one put."""
        return _Use(self, location)

    def take(self, location: str) -> NodeConnection:
        """An idle connection, or a new one."""
        try:
            return self._idle.setdefault(location, deque()).pop()
        except IndexError:
            return NodeConnection(location, self._credentials)

    def give_back(self, connection: NodeConnection) -> None:
        """Keeps a connection for the next put."""
        if self._is_closed:  # an interrupt left this put behind
            connection.close()
        else:
            self._idle.setdefault(connection.location, deque()).append(connection)


class _Use:
    """Takes a connection, and gives it back unless its use failed."""

    def __init__(self, connections: _Connections, location: str) -> None:
        self._connections = connections
        self._location = location

    def __enter__(self) -> NodeConnection:
        self._connection = self._connections.take(self._location)
        return self._connection

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._connections.give_back(self._connection)
        else:
            self._connection.close()


def write_rows(
    write: Write,
    source: ArrowSource,
    on_progress: Callable[[pb.LoadProgress], None],
    commit: Callable[[Mapping[int, PartitionAck]], T],
) -> T:
    """Puts the rows of a source, each shard as a partition, and commits them.

    A partition that fails is put again, by another attempt. After an error nothing is left.

    Args:
        on_progress: called in this thread with every acknowledged partition.
        commit: `Write.commit`, with arguments.

    Raises:
        As `Write.put` and `Write.commit`.
    """
    try:
        with _Connections(write.credentials) as connections:
            return _Rows(write, connections, on_progress).write(source, commit)
    except BaseException:
        write.give_up()
        raise


class _Rows:
    """The rows of one `write_rows`, on their way. Used by one thread."""

    def __init__(
        self,
        write: Write,
        connections: _Connections,
        on_progress: Callable[[pb.LoadProgress], None],
    ) -> None:
        self._write = write
        self._connections = connections
        self._on_progress = on_progress
        self._progress = pb.LoadProgress()
        self._acks: dict[int, PartitionAck] = {}

    def write(self, source: ArrowSource, commit: Callable[[Mapping[int, PartitionAck]], T]) -> T:
        """Puts and commits."""
        self._progress.estimated_rows = source.num_rows or 0
        kept: dict[int, list[pa.RecordBatch]] = {}

        def groups() -> Iterator[tuple[int, list[pa.RecordBatch]]]:
            for partition, group in enumerate(self._write._groups(source.batches)):
                if source.is_resident:
                    kept[partition] = group
                yield partition, group

        self._put_all(groups(), 0)
        for first_attempt in range(_MOST_TRIES, _MOST_COMMITS * _MOST_TRIES, _MOST_TRIES):
            try:
                return commit(self._acks)
            except LostPartitionsError as error:
                if not kept.keys() >= set(error.partitions):
                    raise
                lost = [(partition, kept[partition]) for partition in error.partitions]
                self._put_all(lost, first_attempt)
        return commit(self._acks)

    def _put_all(
        self, groups: Iterable[tuple[int, list[pa.RecordBatch]]], first_attempt: int
    ) -> None:
        put = partial(self._put, first_attempt)
        with closing(fetch_ahead(put, groups, depth=_STREAMS + 1, threads=_STREAMS)) as acks:
            for ack in acks:
                if ack.partition not in self._acks:
                    self._progress.rows_done += ack.num_rows
                    self._progress.bytes_done += ack.num_bytes
                    self._progress.shards_done += len(ack.shards)
                self._acks[ack.partition] = ack
                self._on_progress(self._progress)

    def _put(self, first_attempt: int, numbered: tuple[int, list[pa.RecordBatch]]) -> PartitionAck:
        partition, group = numbered
        return until_sealed(
            lambda number: self._write._put(
                self._connections, partition, first_attempt + number, iter([group])
            )
        )


def until_sealed(put: Callable[[int], T]) -> T:
    """Calls ``put`` with 0, then with 1 and so on while nodes stop; returns its result.

    Raises:
        NodeUnavailableError: of the last of a few tries. Other errors of ``put``: at once.
    """
    tries = Retrying(
        retry=retry_if_exception_type(NodeUnavailableError),
        stop=stop_after_attempt(_MOST_TRIES),
        wait=backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
        reraise=True,
    )
    for attempt in tries:
        with attempt:
            return put(attempt.retry_state.attempt_number - 1)
    raise AssertionError("the last try returns or raises")
