"""The streams of a connection: gathered rows, rows in order, puts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from cache_client.flight.forks import fork_gate
from cache_client.flight.shared_handle import (
    ConnectionClosedError,
    SharedHandle,
    StreamEndedError,
    flight_call,
)
from cache_protocol.errors import (
    CacheError,
    NodeUnavailableError,
)
from cache_protocol.storage.layout import pool_array
from cache_protocol.storage.row_index import Ids
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import tracing

_EARLY_S = 0.5  # before its time limit a stream may end by it
_ROW_SCHEMA = pa.schema([pa.field("row", pa.int64())])


class GatherStream:
    """One DoExchange call: requests, and their answers in the same order.

    Thread-safety: one thread sends and one receives; `close` may be called from any.
    """

    def __init__(
        self, location: str, ends: tuple[Any, Any], usable_until: float, ends_at: float
    ) -> None:
        self._location = location
        self._name = f"the stream from {location}"
        self._ends = SharedHandle(
            ends, cancel=lambda ends: ends[1].cancel(), release=lambda ends: ends[0].close()
        )
        self._usable_until, self._ends_at = usable_until, ends_at
        self._heard_at = time.monotonic()  # from the node
        fork_gate.add(self)

    @property
    def is_fresh(self) -> bool:
        """Whether a new request may be sent on this stream."""
        return not self._ends.is_closed and time.monotonic() < self._usable_until

    def begin(self) -> None:
        """Sends the schema of requests to the node."""
        with self._in_use():
            self._ends.value[0].begin(_ROW_SCHEMA)

    def send(self, row_ids: Ids) -> None:
        """Asks for rows. Where that fails, `receive` says why: a node may have told the reason."""
        batch = pa.RecordBatch.from_arrays([pool_array(row_ids)], schema=_ROW_SCHEMA)
        traceparent = tracing.traceparent()
        with suppress(CacheError), self._in_use():
            if traceparent:
                metadata = pa.py_buffer(traceparent.encode())
                self._ends.value[0].write_with_metadata(batch, metadata)
            else:
                self._ends.value[0].write_batch(batch)

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        """The answer to the oldest request, which asked for ``num_rows`` rows: stored batches.

        They have fewer rows if the stream came to its end while messages came: the node is slow,
        and did not fail. The stream is closed then.

        Raises:
            ConnectionClosedError: the stream was closed, or ended before this call.
            CacheError: the reason of the node, or what broke the stream.
        """
        if time.monotonic() >= self._ends_at:
            raise ConnectionClosedError(f"{self._name} ended before its answer was taken")
        batches: list[pa.RecordBatch] = []
        missing = num_rows
        while missing > 0:
            try:
                with self._in_use():
                    batches.append(self._ends.value[1].read_chunk().data)
            except NodeUnavailableError:
                if not self._was_cut_short():
                    raise
                self.close()
                return batches
            self._heard_at = time.monotonic()
            missing -= batches[-1].num_rows
        if missing < 0:
            raise CacheError(f"{self._name} brought {-missing} rows more than {num_rows}")
        return batches

    def _was_cut_short(self) -> bool:
        """Whether the time limit of the stream ended it, and not a node that says nothing."""
        now, silence_s = time.monotonic(), self._ends_at - self._usable_until
        at_end = now >= self._ends_at - _EARLY_S and not self._ends.is_closed
        return at_end and now - self._heard_at < silence_s

    def close(self) -> None:
        """Cancels the stream without waiting; a running `send` or `receive` fails."""
        self._ends.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Surrounds every call into Flight; tells a closed stream from a broken one."""
        try:
            with flight_call(self._location), self._ends.use(self._name):
                yield
        except NodeUnavailableError:
            if self._ends.is_closed:
                raise ConnectionClosedError(f"{self._name} was closed") from None
            raise


class RowStream:
    """One DoGet call: rows in their order, in packed columns. Used by one thread.

    Thread-safety: only `close` may be called from other threads.
    """

    def __init__(self, location: str, reader: Any, usable_until: float) -> None:
        self._location = location
        self._name = f"the stream of rows from {location}"
        self._reader = SharedHandle(
            reader, cancel=lambda reader: reader.cancel(), release=lambda reader: None
        )
        self._usable_until = usable_until
        self._left: pa.RecordBatch | None = None  # received, not yet asked for
        fork_gate.add(self)

    @property
    def is_fresh(self) -> bool:
        """Whether more rows may be received from this stream."""
        return not self._reader.is_closed and time.monotonic() < self._usable_until

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        """The next rows: stored batches.

        Raises:
            StreamEndedError: the stream has fewer rows.
        """
        batches: list[pa.RecordBatch] = []
        missing = num_rows
        while missing > 0:
            batch = self._left if self._left is not None else self._next()
            self._left = batch.slice(missing) if batch.num_rows > missing else None
            batches.append(batch if self._left is None else batch.slice(0, missing))
            missing -= batches[-1].num_rows
        return batches

    def close(self) -> None:
        """Cancels the stream without waiting; a running `receive` fails."""
        self._reader.close()

    def _next(self) -> pa.RecordBatch:
        try:
            with (
                flight_call(self._location),
                self._reader.use(self._name),
                suppress(StopIteration),
            ):
                return self._reader.value.read_chunk().data
        except NodeUnavailableError:
            if self._reader.is_closed:
                raise ConnectionClosedError(f"{self._name} was closed") from None
            raise
        raise StreamEndedError(f"{self._name} ended early")


class PutStream:
    """One DoPut call: batches of rows, then their end. Used by one thread."""

    def __init__(self, location: str, ends: tuple[Any, Any]) -> None:
        self._location = location
        self._name = f"the put to {location}"
        # Closing an unfinished stream ends it without a `PutEnd`, so the node drops its rows.
        self._ends = SharedHandle(ends, cancel=None, release=lambda ends: ends[0].close())
        fork_gate.add(self)

    def send(self, batch: pa.RecordBatch, shard_rows: int = 0) -> None:
        """Sends rows.

        Args:
            shard_rows: of the shard that begins with this batch; 0: the batch begins none.

        Raises:
            CacheError: the reason of the node, if it refused the put.
            NodeUnavailableError: the stream broke.
        """
        try:
            with self._in_use():
                if shard_rows:
                    metadata = pb.PutShard(num_rows=shard_rows).SerializeToString()
                    self._ends.value[0].write_with_metadata(batch, pa.py_buffer(metadata))
                else:
                    self._ends.value[0].write_batch(batch)
        except CacheError:
            with self._in_use():  # raises the reason of the node, if there is one
                self._ends.value[0].close()
            raise

    def finish(self, num_rows: int) -> pb.PutResult:
        """Ends the rows, and returns what the node stored of them.

        Args:
            num_rows: that were sent.

        Raises:
            CacheError, NodeUnavailableError: as `send`.
        """
        end = pb.PutEnd(num_rows=num_rows).SerializeToString()
        answer = None
        try:
            with self._in_use():
                self._ends.value[0].write_metadata(pa.py_buffer(end))
                self._ends.value[0].done_writing()
                answer = self._ends.value[1].read()
        finally:
            with self._in_use():  # raises the reason of the node, if there is one
                self._ends.value[0].close()
        if answer is None:
            raise NodeUnavailableError(f"{self._name} was not acknowledged")
        return pb.PutResult.FromString(answer.to_pybytes())

    def close(self) -> None:
        """Ends the call; what was sent is dropped, unless `finish` returned."""
        self._ends.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with flight_call(self._location), self._ends.use(self._name):
            yield
