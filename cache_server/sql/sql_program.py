"""Runs SQL in a process that may end: a program, started by `sql_process`.

Some SQL takes any amount of memory or time, and Rust ends a process that gets no memory. Standard
input is a socket to the node. A request names a function of this package and has its arguments. The
program answers with the batches that the function yields, or with what it returns. Each request
has a limit for the address space.

The program is a bound for memory and time, not a sandbox: it runs as the user of the node. It gets
no environment of the node, so no secret. It ends with its standard input, and after a while without
a request.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

IDLE_S = 300.0  # without a request
_CHECK_MS = 100
_GROWN_BYTES = 256 << 20  # of address space that a request left behind: the process is replaced
_HEADER = struct.Struct("<BQ")


class Kind(IntEnum):
    """What a frame holds.

    The node sends REQUEST, and after each NEXT one BATCH or END. All others are answers; the first
    END says that the process has started.
    """

    REQUEST = 1
    NEXT = 2
    BATCH = 3
    VALUE = 4
    NOTE = 5
    ERROR = 6
    END = 7


@dataclass(frozen=True)
class Request:
    """A call.

    Attributes:
        function: of a module; returns a value or yields batches.
        memory_bytes: of address space, besides what the process has mapped at its start.
        takes_lots: it gets an iterator of batches, ``lots``.
        takes_notes: it gets a function that sends a text, ``note``.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    takes_lots: bool = False
    takes_notes: bool = False


class Channel:
    """Frames over a socket: a kind, a length, bytes. Not thread-safe.

    Args:
        check: called every tenth of a second while it waits for a frame.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], None] = lambda: None) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.check = check

    def send(self, kind: Kind, payload: bytes | pa.Buffer = b"") -> None:
        """Sends a frame.

        Raises:
            EOFError: the other process ended.
        """
        size = len(payload) if isinstance(payload, bytes) else payload.size
        try:
            self._socket.sendall(_HEADER.pack(kind, size))
            self._socket.sendall(payload)
        except OSError:
            raise EOFError from None

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """Sends a batch with its schema, and with its dictionaries."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self.send(Kind.BATCH, sink.getvalue())

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


def batch_of(payload: pa.Buffer) -> pa.RecordBatch:
    """The batch of a BATCH; a view of it."""
    return pa.ipc.open_stream(payload).read_next_batch()


def main() -> None:
    """Answers until the other end closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump for an expected end
    with suppress(OSError):  # the kernel ends this process rather than the node
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal of a node
    connection = socket.socket(fileno=os.dup(0))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    from cache_server.sql.session import run_apart

    run_apart()
    base_bytes = _started()
    channel = Channel(connection)
    with connection, suppress(EOFError):
        channel.send(Kind.END)
        while channel.waits(IDLE_S):
            _, payload = channel.receive()
            request: Request = pickle.loads(payload)
            _limit(base_bytes + request.memory_bytes)
            _answer(channel, request)
            _limit(resource.RLIM_INFINITY)
            is_grown = _mapped_bytes() > base_bytes + _GROWN_BYTES
            channel.send(Kind.END, bytes([is_grown]))


def _answer(channel: Channel, request: Request) -> None:
    from cache_protocol.errors import CacheError, to_proto

    options = dict(request.options)
    if request.takes_lots:
        options["lots"] = _lots(channel)
    if request.takes_notes:
        options["note"] = lambda text: channel.send(Kind.NOTE, text.encode())
    try:
        result = request.function(*request.arguments, **options)
        if isinstance(result, Iterator):
            for batch in result:
                channel.send_batch(batch)
        else:
            channel.send(Kind.VALUE, pickle.dumps(result))
    except CacheError as error:
        channel.send(Kind.ERROR, to_proto(error).SerializeToString())
    except MemoryError:
        os.abort()  # as Rust does


def _lots(channel: Channel) -> Iterator[pa.RecordBatch]:
    while True:
        channel.send(Kind.NEXT)
        kind, payload = channel.receive()
        if kind is Kind.END:
            return
        yield batch_of(payload)


def _started() -> int:
    """Loads what requests need, and starts the threads of DataFusion.

    Returns:
        The address space that it takes, in bytes.
    """
    importlib.import_module("cache_server.sql.loader")
    from cache_server.sql import row_queries

    rows = pa.RecordBatch.from_pydict({"n": [1]})
    query = row_queries.check_row_query("n + 1", (), rows.schema)
    list(row_queries.run_row_query(query, [rows]))
    return _mapped_bytes()


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _limit(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        num_bytes = hard if num_bytes == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def _end_with(connection: socket.socket) -> None:
    """Ends the process when the node closed the socket or ended, also inside a computation."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    while not poll.poll():
        pass
    os._exit(0)


class _WithoutPandas(MetaPathFinder):
    """Pretends that pandas is not installed: pyarrow would import it, for half a second."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


if __name__ == "__main__":
    sys.meta_path.insert(0, _WithoutPandas())
    package = ModuleType("cache_server")  # without its `__init__`, which imports a whole node
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["cache_server"] = package
    importlib.import_module("cache_server.sql.sql_program").main()
