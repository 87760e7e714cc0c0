"""The connections and gather streams of one reader: opened side by side, kept while idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cache_client.connections import Connection, GatherStream
from cache_protocol.errors import CacheError, NodeUnavailableError

CLOSED = "the dataset was closed meanwhile, or the program ends"
_MOST_OPENED_AT_ONCE = 64  # threads, each for as long as a node takes to answer


class NotAskedError(NodeUnavailableError):
    """The time was over before the node was asked, as others were waited for: no fault of it."""


@dataclass(eq=False)
class _Opening:
    """A stream that is being opened.

    Attributes:
        begun: whether its node was asked.
        outcome: what came of it; None: not known yet. Set once, see `NodeStreams._settle`.
    """

    location: str
    begun: bool = False
    outcome: GatherStream | BaseException | None = None


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
        self._settled = threading.Condition(self._lock)
        self._connections: dict[str, Connection] = {}
        self._idle: dict[str, list[GatherStream]] = {}
        self._busy: set[GatherStream] = set()
        self._openings: set[_Opening] = set()
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
                raise CacheError(CLOSED)
            connection = self._connections.get(location)
            if connection is None or connection.is_closed:
                connection = self._connections[location] = Connection(location)
            return connection

    def take(self, locations: Sequence[str]) -> list[GatherStream | CacheError]:
        """A fresh stream to each, in this order, or why there is none.

        Whoever takes one says what becomes of it: `give_back` or `discard`.
        """
        found = [self._take_idle(location) for location in locations]
        missing = [at for at, stream in zip(locations, found, strict=True) if stream is None]
        try:
            opened = iter(self._open(missing))
        except BaseException:  # nobody takes them
            for stream in filter(None, found):
                self.discard(stream)
            raise
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
        """Closes everything; what runs fails, also `take`, though a node be still waited for."""
        with self._lock:
            self._closed = True
            openings = list(self._openings)
            streams = [*self._busy, *(s for streams in self._idle.values() for s in streams)]
            connections = list(self._connections.values())
            self._idle.clear()
            self._connections.clear()
        for opening in openings:
            self._settle(opening, CacheError(CLOSED))
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
        openings = [_Opening(location) for location in locations]
        threads = min(len(locations), _MOST_OPENED_AT_ONCE)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="cache-open")
        try:
            with self._lock:
                if self._closed:
                    return [CacheError(CLOSED) for _ in openings]
                self._openings.update(openings)
            for opening in openings:
                pool.submit(self._open_one, opening)
            with self._settled:
                self._settled.wait_for(lambda: all(o.outcome for o in openings), self._timeout_s)
            for opening in openings:
                self._settle(opening, self._late(opening))
            return [_stream_or_error(opening) for opening in openings]
        except BaseException:  # as an interrupt: nobody takes them
            for opening in openings:
                self._settle(opening, CacheError(CLOSED))
                if isinstance(opening.outcome, GatherStream):
                    self.discard(opening.outcome)
            raise
        finally:
            with self._lock:
                self._openings.difference_update(openings)
            pool.shutdown(wait=False, cancel_futures=True)

    def _open_one(self, opening: _Opening) -> None:
        opening.begun = True
        try:
            stream = self._open_stream(self.connection(opening.location))
        except BaseException as error:  # raised, or told, where it is waited for
            self._settle(opening, error)
            return
        if not self._settle(opening, stream):
            stream.close()

    def _settle(self, opening: _Opening, outcome: GatherStream | BaseException) -> bool:
        """Says what came of an opening; whether nobody had said it before."""
        with self._lock:
            if opening.outcome is not None:
                return False
            opening.outcome = outcome
            if isinstance(outcome, GatherStream):
                self._busy.add(outcome)
            self._settled.notify_all()
            return True

    def _late(self, opening: _Opening) -> NodeUnavailableError:
        if not opening.begun:
            return NotAskedError(f"node at {opening.location} was not asked for want of time")
        return NodeUnavailableError(
            f"node at {opening.location} did not answer within {self._timeout_s:g} s"
        )


def _stream_or_error(opening: _Opening) -> GatherStream | CacheError:
    """What came of an opening that is settled; raises what nobody foresaw."""
    if isinstance(opening.outcome, GatherStream | CacheError):
        return opening.outcome
    assert opening.outcome is not None
    raise opening.outcome
