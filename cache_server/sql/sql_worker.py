"""Answers requests in a process that may end: the work of `sql_program`.

Some SQL takes any amount of memory or time, and Rust ends a process that gets no memory. Standard
input is a socket to the node. A request names a function of this package and has its arguments. The
program answers with the batches that the function yields, or with what it returns. Each request
has a limit for the address space.

The program is a bound for memory and time, not a sandbox: it runs as the user of the node. It gets
no environment of the node, so no secret. It ends with its standard input, and after a while without
a request.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa

from cache_protocol.errors import CacheError, from_proto, to_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.sql import (  # requests name their functions
    column_stats,  # noqa: F401
    function_runs,
    loader,  # noqa: F401
    row_queries,
)
from cache_server.sql.session import run_apart
from cache_server.sql.sql_frames import IDLE_S, Channel, Kind, Request, batch_of

_GROWN_BYTES = 256 << 20  # of address space that a request left behind: the process is replaced


def main() -> None:
    """Answers until the other end closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump for an expected end
    with suppress(OSError):  # the kernel ends this process rather than the node
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal of a node
    connection = socket.socket(fileno=os.dup(0))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    run_apart()
    base_bytes = _started()
    channel = Channel(connection)
    with connection, suppress(EOFError):
        channel.send(Kind.END)
        while channel.waits(IDLE_S):
            _, payload = channel.receive()
            request: Request = pickle.loads(payload)
            _limit(base_bytes + request.memory_bytes)
            with function_runs.running(partial(_asked, channel)):
                _answer(channel, request)
            _limit(resource.RLIM_INFINITY)
            is_grown = _mapped_bytes() > base_bytes + _GROWN_BYTES and not request.may_grow
            channel.send(Kind.END, bytes([is_grown]))


def _answer(channel: Channel, request: Request) -> None:
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


def _asked(channel: Channel, name: str, batch: pa.RecordBatch) -> pa.Array:
    """The values of a bound function, which the node lets another process compute."""
    kind, payload = channel.called(name, batch)
    if kind is Kind.ERROR:
        raise from_proto(pb.Error.FromString(payload.to_pybytes()))
    return batch_of(payload).column(0)


def _lots(channel: Channel) -> Iterator[pa.RecordBatch]:
    while True:
        channel.send(Kind.NEXT)
        kind, payload = channel.receive()
        if kind is Kind.END:
            return
        yield batch_of(payload)


def _started() -> int:
    """Starts the threads of DataFusion; returns the address space that all takes, in bytes."""
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
