"""Long streams of rows in row order: each window takes its rows from the stream of the one before.

A stream is opened once a window has followed another one, so single reads open none. It fetches
ahead as far as the flow control of its connection lets it. Knows rows and nodes, no epochs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from cache_client.flight.routing import NodeRef
from cache_client.flight.streams import RowStream
from cache_protocol.errors import RequestError
from cache_protocol.storage.row_index import Ids, RowRuns

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 8  # ends of windows; threads may ask for some at once
_MOST_IDLE = 4  # streams that no window continues


@dataclass(eq=False)
class _Open:
    """A stream of a node, and the rows that follow those that were asked for."""

    node: NodeRef
    stream: RowStream
    runs: RowRuns | None
    is_busy: bool = True


class RowStreams:
    """The streams of one reader. Thread-safe.

    Args:
        open_stream: opens a stream of a node that begins with the first of these runs.
        timeout_s: how long a window waits for the one before.
    """

    def __init__(
        self, open_stream: Callable[[NodeRef, RowRuns], RowStream], *, timeout_s: float
    ) -> None:
        self._open_stream = open_stream
        self._timeout_s = timeout_s
        # Reentrant: a signal handler may call `close` while this thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._streams: list[_Open] = []
        self._follow: deque[RowRuns] = deque(maxlen=_MOST_REMEMBERED)
        self._is_closed = self._is_refused = False

    def receive(self, node: NodeRef, row_ids: Ids) -> list[pa.RecordBatch] | None:
        """Rows that a node holds: stored batches; None if they follow no earlier ones.

        Raises:
            CacheError: the node did not bring them.
        """
        runs = RowRuns.of(row_ids)
        if runs is None:
            return None
        after = runs.after(len(row_ids))
        with self._changed:
            follows = runs in self._follow and not (self._is_closed or self._is_refused)
            if after is not None:
                self._follow.append(after)
        if not follows:
            return None
        try:
            found = self._take(node, runs, after)
        except RequestError as error:  # another way of asking may work, or tells why
            logger.info("rows are asked for by window node=%s reason=%s", node, error)
            self._is_refused = True
            return None
        try:
            batches = found.stream.receive(len(row_ids))
        except BaseException:
            self._discard(found)
            raise
        self._give_back(found)
        return batches

    def close(self) -> None:
        """Closes every stream; running calls of `receive` fail."""
        with self._changed:
            self._is_closed = True
            streams = list(self._streams)
            self._streams.clear()
            self._changed.notify_all()
        for each in streams:
            each.stream.close()

    def _take(self, node: NodeRef, runs: RowRuns, after: RowRuns | None) -> _Open:
        """The stream that continues with these rows, or a new one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_awaited(node, runs), self._timeout_s)
            found = self._find(node, runs)
            if found is not None and not found.is_busy:
                if found.stream.is_fresh:
                    found.runs, found.is_busy = after, True
                    return found
                self._streams.remove(found)
        if found is not None and not found.is_busy:
            found.stream.close()
        opened = _Open(node, self._open_stream(node, runs), after)
        with self._changed:
            self._streams.append(opened)
            is_closed = self._is_closed
        if is_closed:
            opened.stream.close()
        return opened

    def _is_awaited(self, node: NodeRef, runs: RowRuns) -> bool:
        found = self._find(node, runs)
        return found is not None and found.is_busy and not self._is_closed

    def _find(self, node: NodeRef, runs: RowRuns) -> _Open | None:
        return next((s for s in self._streams if s.runs == runs and s.node == node), None)

    def _give_back(self, found: _Open) -> None:
        with self._changed:
            found.is_busy = False
            idle = [each for each in self._streams if not each.is_busy]
            left = idle[:-_MOST_IDLE]
            if found.runs is None:
                left.append(found)
            self._streams = [each for each in self._streams if each not in left]
            self._changed.notify_all()
        for each in left:
            each.stream.close()

    def _discard(self, found: _Open) -> None:
        with self._changed:
            if found in self._streams:
                self._streams.remove(found)
            self._changed.notify_all()
        found.stream.close()
