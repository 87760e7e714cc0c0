"""Frames between a node and a process that runs SQL for it: see `sql_process` and `sql_program`."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import pyarrow as pa

IDLE_S = 300.0  # without a request, after which the process ends
_CHECK_MS = 100
_CALLED = b"cache.called"  # in the metadata of a CALL: the function
_HEADER = struct.Struct("<BQ")


class Kind(IntEnum):
    """What a frame holds.

    The node sends REQUEST, and after each NEXT one BATCH or END. After a CALL, the arguments of an
    installed function, it sends one BATCH or ERROR. All others are answers; the first END says that
    the process has started.
    """

    REQUEST = 1
    NEXT = 2
    BATCH = 3
    VALUE = 4
    NOTE = 5
    ERROR = 6
    END = 7
    CALL = 8


@dataclass(frozen=True)
class Request:
    """A call.

    Attributes:
        function: of a module; returns a value or yields batches.
        memory_bytes: of address space, besides what the process has mapped at its start.
        takes_lots: it gets an iterator of batches, ``lots``.
        takes_notes: it gets a function that sends a text, ``note``.
        may_grow: what it keeps in memory is wanted, so the process is kept.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    takes_lots: bool = False
    takes_notes: bool = False
    may_grow: bool = False


class Channel:
    """Frames over a socket: a kind, a length, bytes. Only `called` may be used by any thread.

    Args:
        check: called every tenth of a second while it waits for a frame.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], None] = lambda: None) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._lock = threading.Lock()
        self.check = check

    def send(self, kind: Kind, payload: bytes | pa.Buffer = b"") -> None:
        """Sends a frame.

        Raises:
            EOFError: the other process ended.
        """
        with self._lock:
            self._send(kind, payload)

    def _send(self, kind: Kind, payload: bytes | pa.Buffer) -> None:
        size = len(payload) if isinstance(payload, bytes) else payload.size
        try:
            self._socket.sendall(_HEADER.pack(kind, size))
            self._socket.sendall(payload)
        except OSError:
            raise EOFError from None

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """Sends a batch with its schema, and with its dictionaries."""
        self.send(Kind.BATCH, _stream_of(batch))

    def called(self, name: str, batch: pa.RecordBatch) -> tuple[Kind, pa.Buffer]:
        """The answer to a CALL: a BATCH or an ERROR. Any thread; a query runs in several."""
        named = batch.replace_schema_metadata({_CALLED: name})
        with self._lock:
            self._send(Kind.CALL, _stream_of(named))
            return self.receive()

    def waits(self, time_s: float) -> bool:
        """Whether a frame begins within this time."""
        return bool(self._poll.poll(time_s * 1000))

    def receive(self) -> tuple[Kind, pa.Buffer]:
        """The next frame.

        Raises:
            EOFError: the other process ended. What ``check`` raises.
        """
        kind, size = _HEADER.unpack(self._bytes(_HEADER.size))
        return Kind(kind), self._bytes(size)

    def _bytes(self, size: int) -> pa.Buffer:
        buffer = pa.allocate_buffer(size)
        view = memoryview(buffer)
        while view:
            while not self._poll.poll(_CHECK_MS):
                self.check()
            try:
                received = self._socket.recv_into(view)
            except OSError:
                received = 0
            if not received:
                raise EOFError
            view = view[received:]
        return buffer


def _stream_of(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def call_of(payload: pa.Buffer) -> tuple[str, pa.RecordBatch]:
    """The function and the arguments of a CALL."""
    batch = batch_of(payload)
    return (batch.schema.metadata or {})[_CALLED].decode(), batch


def batch_of(payload: pa.Buffer) -> pa.RecordBatch:
    """The batch of a BATCH; a view of it."""
    return pa.ipc.open_stream(payload).read_next_batch()
