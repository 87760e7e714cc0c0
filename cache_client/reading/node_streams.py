"""The connections and gather streams of one reader: opened in parallel, kept while idle."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cache_client.flight.connections import NodeConnection
from cache_client.flight.streams import GatherStream, RowStream
from cache_protocol.errors import CacheError, NodeUnavailableError
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials

CLOSED = "the reader was closed, or the program ends"
_MAX_OPENED_AT_ONCE = 64  # threads; each waits for one node

_Stream = GatherStream | RowStream
_S = TypeVar("_S", GatherStream, RowStream)


class NotAskedError(NodeUnavailableError):
    """The time ran out before the node was asked, because other nodes hung; it did not fail."""


@dataclass(eq=False)
class _Opening(Generic[_S]):
    """A stream that is being opened.

    Attributes:
        was_asked: whether its node was asked.
        open_stream: opens it.
        outcome: the stream or the error; None while it opens. Set once, by `NodeStreams._finish`.
    """

    location: str
    open_stream: Callable[[NodeConnection], _S]
    was_asked: bool = False
    outcome: _S | BaseException | None = None


class NodeStreams:
    """Connections and streams to nodes, by their Flight locations. Thread-safe.

    Args:
        open_stream: opens a stream on a connection.
        timeout_s: how long `take` waits for all of its streams together, however many nodes hang.
        credentials: of this process.
    """

    def __init__(
        self,
        open_stream: Callable[[NodeConnection], GatherStream],
        *,
        timeout_s: float,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._open_stream = open_stream
        self._timeout_s = timeout_s
        self._credentials = credentials
        # Reentrant: a signal handler may call `close` while this thread holds the lock.
        self._lock = threading.RLock()
        self._finished = threading.Condition(self._lock)
        self._connections: dict[str, NodeConnection] = {}
        self._idle: dict[str, list[GatherStream]] = {}
        self._busy: set[_Stream] = set()
        self._openings: set[_Opening[Any]] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def connection(self, location: str) -> NodeConnection:
        """The connection to a node; opens one if there is none.

        Raises:
            CacheError: `close` was called.
        """
        with self._lock:
            if self._closed:
                raise CacheError(CLOSED)
            connection = self._connections.get(location)
            if connection is None or connection.is_closed:
                connection = NodeConnection(location, self._credentials)
                self._connections[location] = connection
            return connection

    def take(
        self, locations: Sequence[str], patience_s: float = math.inf
    ) -> list[GatherStream | CacheError]:
        """A fresh stream to each location, in this order, or the error of opening it.

        Pass each stream to `give_back` or `discard` afterwards.

        Args:
            patience_s: how long to wait, if that is less than ``timeout_s``.
        """
        found = [self._take_idle(location) for location in locations]
        missing = [at for at, stream in zip(locations, found, strict=True) if stream is None]
        try:
            opened = iter(self._open(missing, self._open_stream, patience_s))
        except BaseException:  # the caller gets none of them
            for stream in filter(None, found):
                self.discard(stream)
            raise
        return [next(opened) if stream is None else stream for stream in found]

    def open_rows(
        self,
        location: str,
        open_stream: Callable[[NodeConnection], RowStream],
        patience_s: float = math.inf,
    ) -> RowStream:
        """A stream of rows from a location; close it afterwards.

        Args:
            open_stream: opens it on the connection to the location.
            patience_s: as for `take`.

        Raises:
            CacheError: it could not be opened.
        """
        (found,) = self._open([location], open_stream, patience_s)
        if isinstance(found, CacheError):
            raise found
        with self._lock:
            self._busy.discard(found)
        return found

    def give_back(self, location: str, stream: GatherStream) -> None:
        """Keeps a stream for the next request; its answer must have been received."""
        with self._lock:
            self._busy.discard(stream)
            if not self._closed:
                self._idle.setdefault(location, []).append(stream)
                return
        stream.close()

    def discard(self, stream: _Stream) -> None:
        """Closes a stream, even with a request under way."""
        with self._lock:
            self._busy.discard(stream)
        stream.close()

    def drop(self, location: str) -> None:
        """Closes the connection to a node and its idle streams; the next call opens a new one."""
        with self._lock:
            connection = self._connections.pop(location, None)
            streams = self._idle.pop(location, [])
        for stream in streams:
            stream.close()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Closes everything; running requests fail, and `take` stops waiting."""
        with self._lock:
            self._closed = True
            openings = list(self._openings)
            streams = [*self._busy, *(s for streams in self._idle.values() for s in streams)]
            connections = list(self._connections.values())
            self._idle.clear()
            self._connections.clear()
        for opening in openings:
            self._finish(opening, CacheError(CLOSED))
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

    def _open(
        self,
        locations: Sequence[str],
        open_stream: Callable[[NodeConnection], _S],
        patience_s: float,
    ) -> list[_S | CacheError]:
        """Opens streams in threads, because Flight cannot stop waiting for a node that hangs.

        A stream that opens too late is closed at once.
        """
        if not locations:
            return []
        timeout_s = min(patience_s, self._timeout_s)
        openings = [_Opening(location, open_stream) for location in locations]
        threads = min(len(locations), _MAX_OPENED_AT_ONCE)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="cache-open")
        try:
            with self._lock:
                if self._closed:
                    return [CacheError(CLOSED) for _ in openings]
                self._openings.update(openings)
            for opening in openings:
                pool.submit(self._open_one, opening)
            with self._finished:
                self._finished.wait_for(lambda: all(o.outcome for o in openings), timeout_s)
            for opening in openings:
                self._finish(opening, _timeout_error(opening, timeout_s))
            return [_stream_or_error(opening) for opening in openings]
        except BaseException:  # for example an interrupt: the caller gets none of them
            for opening in openings:
                self._finish(opening, CacheError(CLOSED))
                if isinstance(opening.outcome, _Stream):
                    self.discard(opening.outcome)
            raise
        finally:
            with self._lock:
                self._openings.difference_update(openings)
            pool.shutdown(wait=False, cancel_futures=True)

    def _open_one(self, opening: _Opening[_S]) -> None:
        opening.was_asked = True
        try:
            stream = opening.open_stream(self.connection(opening.location))
        except BaseException as error:  # raised or returned in the waiting thread
            self._finish(opening, error)
            return
        if not self._finish(opening, stream):
            stream.close()

    def _finish(self, opening: _Opening[_S], outcome: _S | BaseException) -> bool:
        """Sets the outcome of an opening, unless it has one; returns whether it was set."""
        with self._lock:
            if opening.outcome is not None:
                return False
            opening.outcome = outcome
            if isinstance(outcome, _Stream):
                self._busy.add(outcome)
            self._finished.notify_all()
            return True


class OrderedStreams:
    """Streams that carry the requests of several windows: one to each node, while it is fresh.

    One thread takes streams and sends. Another one receives, window by window in the same order. So
    an answer belongs to the oldest request of its stream.

    Args:
        streams: opens and closes them.
    """

    def __init__(self, streams: NodeStreams) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._newest: dict[str, GatherStream] = {}
        self._unanswered: Counter[GatherStream] = Counter()  # requests

    def take(
        self, locations: Sequence[str], patience_s: float = math.inf
    ) -> list[GatherStream | CacheError]:
        """A stream to each location, as `NodeStreams.take`, for one more request on each."""
        missing = [each for each in dict.fromkeys(locations) if not self._is_fresh(each)]
        opened = dict(zip(missing, self._streams.take(missing, patience_s), strict=True))
        found: list[GatherStream | CacheError] = []
        with self._lock:
            for location in locations:
                stream = opened.get(location) or self._newest[location]
                if isinstance(stream, GatherStream):
                    self._newest[location] = stream
                    self._unanswered[stream] += 1
                found.append(stream)
        return found

    def give_back(self, location: str, stream: GatherStream) -> None:
        """Notes that a request was answered; closes a stream that gets no more of them."""
        with self._lock:
            self._unanswered[stream] -= 1
            is_over = not self._unanswered[stream] and self._newest.get(location) is not stream
        if is_over:
            self.discard(stream)

    def discard(self, stream: GatherStream) -> None:
        """Closes a stream; other requests on it fail, too."""
        with self._lock:
            self._unanswered.pop(stream, None)
        self._streams.discard(stream)

    def _is_fresh(self, location: str) -> bool:
        with self._lock:
            stream = self._newest.get(location)
            if stream is None or stream.is_fresh:
                return stream is not None
            del self._newest[location]
            is_over = not self._unanswered[stream]
        if is_over:
            self.discard(stream)
        return False


def _timeout_error(opening: _Opening[Any], timeout_s: float) -> NodeUnavailableError:
    if not opening.was_asked:
        return NotAskedError(f"node at {opening.location} was not asked before the time limit")
    return NodeUnavailableError(f"node at {opening.location} did not answer within {timeout_s:g} s")


def _stream_or_error(opening: _Opening[_S]) -> _S | CacheError:
    """The outcome of a finished opening; raises any error that is no CacheError."""
    assert opening.outcome is not None
    if isinstance(opening.outcome, BaseException) and not isinstance(opening.outcome, CacheError):
        raise opening.outcome
    return opening.outcome
