"""Bounds what callers take of a Flight port: calls, bytes on their way, and time without reading.

A message that no one reads stays in memory, and nothing in pyarrow ends a call from the server. So
the connection of a slow reader is shut down.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.storage.virtual_memory import return_free_memory
from cache_server.shards.stoppable_thread import StoppableThread

logger = logging.getLogger(__name__)

MAX_CALLS_OF_CONNECTION = 128
# A rank of a job has a stream to each node, and two while it replaces one; a job is one principal.
# The most is enough for 12,000 ranks. Each stream takes two memory maps for its thread, and a
# process has 65,530.
MIN_CALLS_OF_PRINCIPAL, MAX_CALLS_OF_PRINCIPAL = 4096, 24_576
_CALL_BYTES = 128 << 10  # of an open stream: a thread, measured 46 KB, or 111 KB once it sent rows
_CALLS_SHARE = 16  # a quarter of the memory that a container leaves to the process
# Messages that are gathered and not yet taken, with their requests; a larger one is sent alone. And
# as many bytes again of requests that wait.
MAX_BYTES_OF_CONNECTION, MAX_BYTES_OF_PRINCIPAL = 64 << 20, 256 << 20
_LOOK_EVERY_S = 1.0
_T = TypeVar("_T")


def calls_of_principal(container_bytes: int) -> int:
    """How many calls of one principal may run on a node.

    Args:
        container_bytes: memory of the container, or of the machine.
    """
    calls = container_bytes // _CALLS_SHARE // _CALL_BYTES
    return max(MIN_CALLS_OF_PRINCIPAL, min(calls, MAX_CALLS_OF_PRINCIPAL))


class StreamLimits:
    """The running calls of a Flight port. Thread-safe.

    Args:
        slow_reader_timeout_s: how long a message may wait for its reader.
        max_calls_of_principal: see `calls_of_principal`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        slow_reader_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_calls_of_principal: int = MIN_CALLS_OF_PRINCIPAL,
    ) -> None:
        self._timeout_s = slow_reader_timeout_s
        self._max_calls = MAX_CALLS_OF_CONNECTION, max_calls_of_principal
        self.clock = clock
        self._changed = threading.Condition()
        self._open: set[LimitedCall] = set()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._waiting: Counter[tuple[str, str]] = Counter()  # bytes of requests
        self._dropped = 0  # bytes of requests and messages, since they were last asked for

    def begin(self, principal: str, peer: str) -> LimitedCall:
        """Counts a call; `LimitedCall.end` must follow.

        Args:
            peer: of the connection, as gRPC names it.

        Raises:
            NodeUnavailableError: there are too many; names the limit. Another node may answer.
        """
        call = LimitedCall(self, principal, peer)
        with self._changed:
            for owner, limit in zip(call.owners, self._max_calls, strict=True):
                if self._calls[owner] >= limit:
                    raise NodeUnavailableError(
                        f"a {owner[0]} has at most {limit} running calls on a node, and "
                        f"{owner[1]!r} has them: end some"
                    )
            self._add(self._calls, call, 1)
            self._open.add(call)
        return call

    def end(self, call: LimitedCall) -> None:
        """Counts a call no more."""
        with self._changed:
            if call in self._open:
                self._open.remove(call)
                self._add(self._calls, call, -1)

    def reserve(self, call: LimitedCall, num_bytes: int, request_bytes: int = 0) -> None:
        """Waits until a message may take so much memory.

        Args:
            request_bytes: of them are taken already, by the request.

        Raises:
            NodeUnavailableError: other messages were not taken in time, or too many requests wait;
                names the limit.
        """
        refusal = NodeUnavailableError(
            f"{call.owners[1][1]!r} reads too slowly: its messages on their way have at most "
            f"{MAX_BYTES_OF_CONNECTION} bytes a connection, and {MAX_BYTES_OF_PRINCIPAL} in all"
        )
        with self._changed:
            if not self._has_room(self._bytes, call, num_bytes):
                if not self._has_room(self._waiting, call, request_bytes):
                    self._dropped += request_bytes
                    raise refusal
                self._add(self._waiting, call, request_bytes)
                try:
                    if not self._changed.wait_for(
                        lambda: self._has_room(self._bytes, call, num_bytes), self._timeout_s
                    ):
                        self._dropped += request_bytes
                        raise refusal
                finally:
                    self._add(self._waiting, call, -request_bytes)
            self._add(self._bytes, call, num_bytes)

    @staticmethod
    def _has_room(sums: Counter[tuple[str, str]], call: LimitedCall, num_bytes: int) -> bool:
        return all(
            not sums[owner] or sums[owner] + num_bytes <= limit
            for owner, limit in zip(call.owners, _MAX_BYTES, strict=True)
        )

    def release(self, call: LimitedCall, num_bytes: int) -> None:
        """Gives the memory of a message back."""
        with self._changed:
            self._add(self._bytes, call, -num_bytes)
            self._changed.notify_all()

    @staticmethod
    def _add(sums: Counter[tuple[str, str]], call: LimitedCall, amount: int) -> None:
        for owner in call.owners:
            sums[owner] += amount
            if not sums[owner]:
                del sums[owner]

    def take_dropped(self) -> int:
        """Bytes of the requests that were refused since the last call."""
        with self._changed:
            dropped, self._dropped = self._dropped, 0
            return dropped

    def slow_peers(self) -> set[str]:
        """The connections with a message that has waited for too long."""
        with self._changed:
            oldest = self.clock() - self._timeout_s
            return {
                call.owners[0][1]
                for call in self._open
                if call.sending_since is not None and call.sending_since < oldest
            }


_MAX_BYTES = (MAX_BYTES_OF_CONNECTION, MAX_BYTES_OF_PRINCIPAL)


class LimitedCall:
    """One running call. Used by its thread.

    Attributes:
        owners: its connection and its principal.
        sending_since: when its message was ready to be sent; None: it sends none.
    """

    def __init__(self, limits: StreamLimits, principal: str, peer: str) -> None:
        self._limits = limits
        self.owners = (("connection", peer), ("principal", principal))
        self.sending_since: float | None = None

    def end(self) -> None:
        """Ends it."""
        self._limits.end(self)

    def paced(self, messages: Iterable[_T], num_bytes: int, request_bytes: int = 0) -> Iterator[_T]:
        """The messages, each made when there is memory for it, and counted until it is sent.

        Args:
            num_bytes: of a message, about.
            request_bytes: of the request, which is kept meanwhile.

        Raises:
            NodeUnavailableError: see `StreamLimits.reserve`.
        """
        for_each = iter(messages)
        num_bytes += request_bytes
        while True:
            self._limits.reserve(self, num_bytes, request_bytes)
            try:
                try:
                    message = next(for_each)
                except StopIteration:
                    return
                self.sending_since = self._limits.clock()
                yield message
            finally:
                self.sending_since = None
                self._limits.release(self, num_bytes)


class SlowReaders(StoppableThread):
    """Shuts the connections of slow readers to a port down, from `start` to `close`."""

    def __init__(self, limits: StreamLimits, port: int) -> None:
        super().__init__("slow-readers")
        self._limits, self._port = limits, port

    def _run(self) -> None:
        kept = False  # freed memory that malloc may keep
        while not self._stop.wait(_LOOK_EVERY_S):
            if kept or self._limits.take_dropped():
                return_free_memory()
                kept = False
            for peer in self._limits.slow_peers():
                if shut_down(peer, self._port):
                    logger.warning("slow reader cut off peer=%s", peer)
                    kept = True


def shut_down(peer: str, port: int) -> bool:
    """Shuts the connection of a peer to a port of this process down; returns whether it was there.

    Args:
        peer: as gRPC names it, such as ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``.
        port: ours; a peer may come to several ports from the same address.
    """
    wanted = (*_address(peer), port)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile, or is not connected
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            # A duplicate: gRPC may close its descriptor, and another file may get its number.
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                host, from_port = connection.getpeername()[:2]
                to_port = connection.getsockname()[1]
                if (host.removeprefix("::ffff:"), from_port, to_port) == wanted:
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
    return False


def _address(peer: str) -> tuple[str, int]:
    host, _, port = peer.partition(":")[2].rpartition(":")
    for bracket in ("%5B", "%5D", "[", "]"):
        host = host.replace(bracket, "")
    return host.removeprefix("::ffff:"), int(port) if port.isdigit() else 0
