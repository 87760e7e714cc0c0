"""The connections and gather streams of one reader: opened side by side, kept while idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cache_client.connections import Connection, GatherStream
from protos.errors import CacheError, NodeUnavailableError

_MOST_OPENED_AT_ONCE = 64  # threads, each for as long as a node takes to answer


class NodeStreams:
    """Connections and streams to nodes, by their Flight locations. Thread-safe.

    Args:
        open_stream: begins a stream on a connection.
        timeout_s: how long opening may take; so many seconds are waited for all that are opened
            at once, however many nodes hang.
    """

    def __init__(
        self, open_stream: Callable[[Connection], GatherStream], *, timeout_s: float
    ) -> None:
        self._open_stream = open_stream
        self._timeout_s = timeout_s
        # Reentrant: a handler of a signal may close what the thread it interrupts is using.
        self._lock = threading.RLock()
        self._connections: dict[str, Connection] = {}
        self._idle: dict[str, list[GatherStream]] = {}
        self._busy: set[GatherStream] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def connection(self, location: str) -> Connection:
        """The connection to a node, made when it is first asked for.

        Raises:
            CacheError: everything is closed.
        """
        with self._lock:
            if self._closed:
                raise CacheError("the reader is closed")
            connection = self._connections.get(location)
            if connection is None or connection.is_closed:
                connection = self._connections[location] = Connection(location)
            return connection

    def take(self, locations: Sequence[str]) -> list[GatherStream | CacheError]:
        """A fresh stream to each, in this order, or why there is none.

        Whoever takes one says what becomes of it: `give_back` or `discard`.
        """
        found: list[GatherStream | CacheError | None] = [self._take_idle(at) for at in locations]
        opened = iter(self._open([at for at, s in zip(locations, found, strict=True) if s is None]))
        return [next(opened) if stream is None else stream for stream in found]

    def give_back(self, location: str, stream: GatherStream) -> None:
        """Keeps a stream for the next request: its answer was received."""
        with self._lock:
            self._busy.discard(stream)
            if not self._closed:
                self._idle.setdefault(location, []).append(stream)
                return
        stream.close()

    def discard(self, stream: GatherStream) -> None:
        """Closes a stream, whatever is under way on it."""
        with self._lock:
            self._busy.discard(stream)
        stream.close()

    def drop(self, location: str) -> None:
        """Closes the connection to a node and its idle streams; the next one is made anew."""
        with self._lock:
            connection = self._connections.pop(location, None)
            streams = self._idle.pop(location, [])
        for stream in streams:
            stream.close()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Closes everything; what runs fails."""
        with self._lock:
            self._closed = True
            streams = [*self._busy, *(s for streams in self._idle.values() for s in streams)]
            connections = list(self._connections.values())
            self._idle.clear()
            self._connections.clear()
        for stream in streams:
            stream.close()
        for connection in connections:
            connection.close()

    def _take_idle(self, location: str) -> GatherStream | None:
        with self._lock:
            idle = self._idle.get(location, [])
            stream = idle.pop() if idle else None
            if stream is not None and stream.is_fresh:
                self._busy.add(stream)
                return stream
        if stream is not None:
            stream.close()
        return None

    def _open(self, locations: Sequence[str]) -> list[GatherStream | CacheError]:
        """New streams, opened in threads: Flight waits for a node that hangs, whatever happens.

        What is not open in time is closed when it is.
        """
        if not locations:
            return []
        threads = min(len(locations), _MOST_OPENED_AT_ONCE)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="cache-open")
        openings = [pool.submit(self._open_one, location) for location in locations]
        try:
            late = wait(openings, self._timeout_s).not_done
        except BaseException:  # an interrupt: nobody takes them
            late = set(openings)
            raise
        finally:
            for opening in late:
                opening.add_done_callback(self._give_up)
            pool.shutdown(wait=False, cancel_futures=True)
        return [
            _late(location, self._timeout_s) if opening in late else opening.result()
            for location, opening in zip(locations, openings, strict=True)
        ]

    def _open_one(self, location: str) -> GatherStream | CacheError:
        try:
            stream = self._open_stream(self.connection(location))
        except CacheError as error:
            return error
        with self._lock:
            if not self._closed:
                self._busy.add(stream)
                return stream
        stream.close()
        return CacheError("the reader is closed")

    def _give_up(self, opening: Future[GatherStream | CacheError]) -> None:
        stream = None if opening.cancelled() else opening.result()
        if isinstance(stream, GatherStream):
            self.discard(stream)


def _late(location: str, timeout_s: float) -> NodeUnavailableError:
    return NodeUnavailableError(f"node at {location} did not answer within {timeout_s:g} s")
