"""Takes the rows that writers put on this node, and seals them as shards.

The shards of a put lie under a name like that of a version until the write is committed, or ends. A
full node takes the rows of a put more slowly, then refuses it. This module knows no Flight.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

import pyarrow as pa
from google.protobuf.message import DecodeError

from cache_protocol.datasets.dataset_names import namespace_of
from cache_protocol.errors import (
    CacheError,
    InvalidTicketError,
    LoadError,
    NodeUnavailableError,
    RequestError,
    SchemaError,
    some_of,
)
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.lossless import column_problems, conform_batch, require_no_nulls
from cache_protocol.storage.type_rules import may_expand
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE, Principal
from cache_server.node.desired import OpenWrite
from cache_server.node.links.room_requests import AskRoom
from cache_server.node.links.write_schemas import WriteSchemas
from cache_server.node.loads.load_memory import LoadMemory
from cache_server.shards.packing import ShardBuilder
from cache_server.shards.put_key import PutKey, put_checksum
from cache_server.shards.store import NoRoomError, ShardStore
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Attempt = tuple[str, int, int]  # write, partition, attempt
_LOOK_AGAIN_S = 0.2  # for room
_ASK_AGAIN_S = 2.0  # the coordinator, for room
_MESSAGES_BYTES = 32 << 20  # of a put: messages on their way, and the block that packs them
_PRINCIPAL_SHARE, _NAMESPACE_SHARE = 0.5, 0.75  # of the memory of loads and puts


class PutMessage(NamedTuple):
    """One message of a put.

    Attributes:
        batch: None: the message has only metadata.
        metadata: a `PutShard` before a batch, a `PutEnd` alone; empty: none.
    """

    batch: pa.RecordBatch | None
    metadata: bytes


class Puts:
    """The puts of one node. Thread-safe.

    Args:
        store: of the node.
        memory: that puts share with loads.
        schemas: of the open writes.
        node_id: of the node.
        beat: sends a heartbeat, and returns when its answer was applied.
        ask_room: see `RoomRequests.ask`.
        stop: set when the node stops.
        require_tombstones: see `KnownTombstones.require`.
    """

    def __init__(
        self,
        store: ShardStore,
        memory: LoadMemory,
        schemas: WriteSchemas,
        node_id: str,
        beat: Callable[[], None],
        ask_room: AskRoom,
        stop: threading.Event,
        require_tombstones: Callable[[str, int], None],
    ) -> None:
        self._store = store
        self._memory = memory
        self._schemas = schemas
        self._node_id = node_id
        self._beat = beat
        self._ask_room = ask_room
        self._stop = stop
        self._require_tombstones = require_tombstones
        self._lock = threading.Lock()
        self._writes: Mapping[str, OpenWrite] = {}
        self._complete: dict[_Attempt, tuple[VersionKey, pb.PutResult]] = {}
        self._running: set[PutKey] = set()
        self._waits: list[_Wait] = []  # of the running puts, the oldest first

    @property
    def are_running(self) -> bool:
        """Whether a put is running."""
        return bool(self._running)

    def update(self, writes: Mapping[str, OpenWrite]) -> None:
        """Takes the open writes of an answer; forgets the puts of others."""
        with self._lock:
            self._writes = writes
            self._schemas.keep(writes.values())
            for ended in [attempt for attempt in self._complete if attempt[0] not in writes]:
                del self._complete[ended]

    def complete(self) -> dict[VersionKey, int]:
        """The complete puts, with the number of shards of each. Call it before you list shards."""
        with self._lock:
            return {key: len(result.shards) for key, result in self._complete.values()}

    def put(
        self,
        request: pb.PutRequest,
        schema: pa.Schema,
        messages: Iterator[PutMessage],
        by: Principal = ANYONE,
    ) -> pb.PutResult:
        """Seals the rows of one attempt at a partition.

        The coordinator knows of the put before this returns. If this node has a complete put of the
        same attempt, its rows stay, and the new ones are only counted.

        Args:
            request: with the full name of the dataset.
            schema: of the batches.
            by: sends it.

        Raises:
            PermissionDeniedError: the write is of another namespace.
            RequestError: the write is not open, or the rows are not those of the write.
            SchemaError: the rows have other columns, or a value does not become the type of its
                column without a loss.
            LoadError: a value cannot be stored; or, as a `NoRoomError`, the node stayed full.
            NodeUnavailableError: the node stops, or cannot reach its coordinator.
        """
        write = self._open_write(request.write_id)
        by.require_own(write.dataset, "a write")
        if request.dataset != write.dataset:
            raise RequestError(
                f"write {request.write_id} is of {write.dataset!r}, not of {request.dataset!r}"
            )
        layout = self._schemas.layout(write)
        wanted = layout.logical
        problems = column_problems(schema, wanted) or _expanding(schema)
        if problems:
            raise SchemaError(
                f"the put has other columns than its write: {some_of(problems, '; ')}. Cast the "
                "rows before you put them"
            )
        has_types = all(schema.field(field.name).type.equals(field.type) for field in wanted)
        self._require_tombstones(write.dataset, write.tombstones)
        messages = self._while_open(write, messages)
        stream = _PutStream(messages, write, layout, None if has_types else wanted)
        attempt = request.write_id, request.partition, request.attempt
        _, known = self._complete.get(attempt, (None, None))
        if known is not None:
            stream.count()
            if stream.num_rows != known.num_rows:
                raise RequestError(
                    f"attempt {request.attempt} at partition {request.partition} was put with "
                    f"{known.num_rows} rows, and now with {stream.num_rows}: give other rows "
                    "another attempt"
                )
            return known
        put = PutKey(request.write_id, request.partition, request.attempt, uuid.uuid4().hex[:8])
        key = put.version_key(write.dataset)
        self._running.add(put)
        try:
            result = self._seal_all(write, put, key, stream, by.name)
            with self._lock:  # of two streams of one attempt at once, the last one stays
                self._complete[attempt] = key, result
            self._beat()
            self._require_kept(write)
        except BaseException as error:
            with self._lock:
                if self._complete.get(attempt, (None,))[0] == key:
                    del self._complete[attempt]
            self._store.drop_version(key)
            if isinstance(error, CacheError):
                self._require_kept(write)  # else its files were removed meanwhile
            raise
        finally:
            self._running.discard(put)
        logger.info(
            "put complete dataset=%s partition=%d attempt=%d rows=%d bytes=%d",
            write.dataset, put.partition, put.attempt, result.num_rows, result.num_bytes,
        )  # fmt: skip
        return result

    def _open_write(self, write_id: str) -> OpenWrite:
        write = self._writes.get(write_id)
        if write is None:  # begun after the last heartbeat
            self._beat()
            write = self._writes.get(write_id)
        if write is None or write.committed:
            raise _not_open(write_id)
        return write

    def _require_kept(self, write: OpenWrite) -> None:
        if write.write_id not in self._writes:
            raise _not_open(write.write_id)
        if self._stop.is_set():
            raise NodeUnavailableError(f"node {self._node_id} stops")

    def _while_open(self, write: OpenWrite, messages: Iterator[PutMessage]) -> Iterator[PutMessage]:
        for message in messages:
            self._require_kept(write)
            yield message

    def _seal_all(
        self, write: OpenWrite, put: PutKey, key: VersionKey, stream: _PutStream, owner: str
    ) -> pb.PutResult:
        result = pb.PutResult(partition=put.partition, attempt=put.attempt, node_id=self._node_id)
        has_plain = bool(stream.layout.plain_fields)
        unsealed = write.target_shard_bytes * (2 if has_plain else 1)
        wait = _Wait(self, write, owner)
        namespace = namespace_of(write.dataset)
        shares = {f"{namespace}/{owner}": _PRINCIPAL_SHARE, namespace: _NAMESPACE_SHARE}
        with wait, self._memory.hold(wait, _MESSAGES_BYTES + unsealed, shares):
            for index, (num_rows, batches) in enumerate(stream.shards()):
                shard = self._seal(write, stream.layout, key, index, num_rows, batches, wait)
                result.num_rows += shard.num_rows
                result.num_bytes += shard.num_bytes
                wait.sealed_bytes = wait.held_bytes = result.num_bytes
                result.shards.append(shard)
        result.checksum = put_checksum(shard.checksum for shard in result.shards)
        return result

    def _seal(
        self,
        write: OpenWrite,
        layout: Layout,
        key: VersionKey,
        index: int,
        num_rows: int,
        batches: Iterable[pa.RecordBatch],
        wait: _Wait,
    ) -> pb.SealedShard:
        with ExitStack() as stack:
            draft = None
            if layout.fixed_row_bytes:
                draft = wait.for_room(
                    lambda: stack.enter_context(
                        self._store.draft(key, index, layout, num_rows, wait.grow)
                    )
                )
            builder = ShardBuilder(
                layout.described, num_rows, draft, refuse_nulls=write.refuse_nulls
            )
            for batch in batches:
                try:
                    builder.append(batch)
                except pa.ArrowInvalid as error:
                    raise LoadError(f"cannot store rows of {write.dataset!r}: {error}") from None
            require_no_nulls(builder.refused)
            stored = builder.finish()
            if draft is None:
                mapped = wait.for_room(
                    lambda: self._store.seal(key, index, stored, nulls=builder.nulls)
                )
            else:
                mapped = self._store.seal(key, index, stored, draft, builder.nulls)
        sealed = mapped.sealed
        return pb.SealedShard(
            num_rows=sealed.num_rows,
            num_bytes=sealed.num_bytes,
            checksum=sealed.checksum,
            nulls=sealed.nulls,
        )


def _not_open(write_id: str) -> RequestError:
    return RequestError(
        f"write {write_id[:64]!r} is not open: it was committed or aborted, it is too old, or the "
        "coordinator started again"
    )


class _Wait:
    """Waits of one put, together at most as long as its write allows. A context manager.

    Two puts could wait for the room of each other. So of those whose rows came and do not fit, one
    waits, and the others give way.
    """

    def __init__(self, puts: Puts, write: OpenWrite, owner: str) -> None:
        self._puts = puts
        self._write = write
        self._ends_at: float | None = None
        self._asked_at = -math.inf
        self._why_not = ""
        self.namespace, self.owner = namespace_of(write.dataset), owner
        self.sealed_bytes = self.held_bytes = 0
        self.is_stuck = False

    def __enter__(self) -> _Wait:
        with self._puts._lock:
            self._puts._waits.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._puts._lock:
            self._puts._waits.remove(self)

    def check_wanted(self) -> None:
        """Raises an error when the put has waited for too long, or its write has ended."""
        self._puts._require_kept(self._write)
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._write.full_wait_s
        if now >= self._ends_at:
            raise NoRoomError("other loads and puts took all memory")

    def grow(self, num_bytes: int, reserve: Callable[[], None]) -> None:
        """Waits until the file of the put has room for the rows that came.

        Raises:
            NoRoomError: there is none, or the put gives way to another one.
        """
        try:
            self.for_room(reserve, gives_way=True)
        finally:
            self.is_stuck = False
        self.held_bytes = self.sealed_bytes + num_bytes

    def for_room(self, action: Callable[[], _T], *, gives_way: bool = False) -> _T:
        """Repeats an action while there is no room for it.

        Raises:
            NoRoomError: names the node, and how long it was full.
        """
        while True:
            try:
                return action()
            except NoRoomError as error:
                if not self._is_made(error):
                    self._check_patience(error, gives_way=gives_way)
            self._puts._stop.wait(_LOOK_AGAIN_S)

    def _check_patience(self, error: NoRoomError, *, gives_way: bool) -> None:
        """Raises a `NoRoomError` when the put has waited for too long, or others go first."""
        reason = f"{error}; {self._why_not}; drop a dataset, or add nodes"
        if gives_way and self._gives_way():
            raise NoRoomError(
                f"node {self._puts._node_id} is full, and other puts go first: {reason}, or put "
                "the rows again later"
            ) from None
        try:
            self.check_wanted()
        except NoRoomError:
            full_s = self._write.full_wait_s
            raise NoRoomError(
                f"node {self._puts._node_id} was full for {full_s:g} s: {reason}"
            ) from None

    def _is_made(self, error: NoRoomError) -> bool:
        """Asks the coordinator to make room, not too often; returns whether it did."""
        now = time.monotonic()
        if now - self._asked_at < _ASK_AGAIN_S:
            return False
        dataset, is_over = self._write.dataset, self._puts._stop.is_set
        answer = self._puts._ask_room(dataset, error.num_bytes, is_over)
        if not answer.why_not:
            return True
        self._asked_at, self._why_not = time.monotonic(), answer.why_not
        return False

    def _gives_way(self) -> bool:
        """Whether another put that is stuck goes first: see `_first`."""
        with self._puts._lock:
            self.is_stuck = True
            return _first(self._puts._waits) is not self


def _first(waits: Sequence[_Wait]) -> _Wait:
    """Which of the stuck puts goes first.

    Args:
        waits: of all running puts, in the order of their begins.

    Returns:
        That of the namespace, then the principal, whose puts hold the least; then the oldest.
    """
    of_namespace: Counter[str] = Counter()
    of_owner: Counter[tuple[str, str]] = Counter()
    for wait in waits:
        of_namespace[wait.namespace] += wait.held_bytes
        of_owner[wait.namespace, wait.owner] += wait.held_bytes
    return min(
        (wait for wait in waits if wait.is_stuck),
        key=lambda wait: (of_namespace[wait.namespace], of_owner[wait.namespace, wait.owner]),
    )


class _PutStream:
    """The rows of a put, shard by shard. Used by one thread.

    Args:
        wanted: the columns to give to the rows; None: they have them.

    Attributes:
        layout: of the stored rows.
        num_rows: that have come.
    """

    def __init__(
        self,
        messages: Iterator[PutMessage],
        write: OpenWrite,
        layout: Layout,
        wanted: pa.Schema | None,
    ) -> None:
        self._messages = messages if wanted is None else self._fitted(messages, wanted)
        self._write = write
        self.layout = layout
        self._next: tuple[pa.RecordBatch, int] | None = None
        self._has_ended = False
        self.num_rows = 0

    def _fitted(self, messages: Iterator[PutMessage], wanted: pa.Schema) -> Iterator[PutMessage]:
        """The messages with the wanted columns, and their batches in pieces.

        A value may take more bytes than it came with.
        """
        row = 0
        for batch, metadata in messages:
            if batch is None or not batch.num_rows:
                yield PutMessage(batch, metadata)
                continue
            for piece in _pieces(batch, self.layout, self._write.target_shard_bytes):
                yield PutMessage(conform_batch(piece, wanted, first_row=row), metadata)
                row, metadata = row + piece.num_rows, b""

    def count(self) -> None:
        """Counts all rows, and keeps none."""
        while self._take() is not None:
            pass

    def shards(self) -> Iterator[tuple[int, Iterable[pa.RecordBatch]]]:
        """The number of rows of each shard, and its batches, which must be read to their end."""
        while (taken := self._take()) is not None:
            batch, announced = taken
            if announced:
                yield announced, self._announced(batch, announced)
            else:
                yield from self._cut(batch)

    def _announced(self, batch: pa.RecordBatch, num_rows: int) -> Iterator[pa.RecordBatch]:
        """The batches of a shard whose rows were announced."""
        left = num_rows - batch.num_rows
        yield batch
        while left > 0:
            taken = self._take()
            if taken is None or taken[1]:
                break
            left -= taken[0].num_rows
            yield taken[0]
        if left:
            raise RequestError(
                f"a shard was announced with {num_rows} rows, and {num_rows - left} came"
            )

    def _cut(self, batch: pa.RecordBatch) -> Iterator[tuple[int, Iterable[pa.RecordBatch]]]:
        """Shards of about the target size, until rows are announced."""
        kept: list[pa.RecordBatch] = []
        kept_bytes, taken = 0, (batch, 0)
        while True:
            for piece in _pieces(taken[0], self.layout, self._write.target_shard_bytes):
                num_bytes = self.layout.stored_bytes(piece)
                if kept and kept_bytes + num_bytes > self._write.target_shard_bytes:
                    yield sum(one.num_rows for one in kept), kept
                    kept, kept_bytes = [], 0
                kept.append(piece)
                kept_bytes += num_bytes
            following = self._take()
            if following is None or following[1]:
                self._next = following
                break
            taken = following
        if kept:
            yield sum(one.num_rows for one in kept), kept

    def _take(self) -> tuple[pa.RecordBatch, int] | None:
        """The next batch with rows, and how many rows it announces; None at the end."""
        if self._next is not None:
            taken, self._next = self._next, None
            return taken
        if self._has_ended:
            return None
        for batch, metadata in self._messages:
            if batch is None:
                end = _parse(pb.PutEnd, metadata)
                if end.num_rows != self.num_rows:
                    raise RequestError(
                        f"the put ended after {end.num_rows} rows, and {self.num_rows} came"
                    )
                self._has_ended = True
                return None
            if batch.num_rows:
                self.num_rows += batch.num_rows
                return batch, _parse(pb.PutShard, metadata).num_rows if metadata else 0
        raise RequestError("the put ended without a PutEnd: its writer stopped")


def _pieces(batch: pa.RecordBatch, layout: Layout, shard_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in runs of rows, each at most a sixteenth of a shard."""
    row_bytes = max(1, layout.stored_bytes(batch) // batch.num_rows)
    step = max(1, shard_bytes // 16 // row_bytes)
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _expanding(schema: pa.Schema) -> list[str]:
    """Columns with types that a short message could have any number of values of."""
    return [
        f"column {field.name!r} comes as {field.type}, which a put cannot have"
        for field in schema
        if may_expand(field.type)
    ]


def _parse(message: type[pb.PutEnd] | type[pb.PutShard], data: bytes) -> pb.PutEnd | pb.PutShard:
    try:
        return message.FromString(data)
    except DecodeError:
        raise InvalidTicketError(
            f"not a {message.DESCRIPTOR.name} of this cache: {data[:64]!r}"
        ) from None
