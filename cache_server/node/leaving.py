"""Waits until the coordinator has moved the shards of a node that leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cache_protocol.v1 import cache_pb2 as pb

_GONE_S = 5.0  # for a coordinator that does not answer
_LOOK_EVERY_S = 0.2  # whether the node stops


class Leaving:
    """What the coordinator says of the drain of this node. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drain = pb.Drain()  # of the last answer
        self._unanswered_since: float | None = None  # monotonic seconds

    def take(self, drain: pb.Drain) -> None:
        """Takes the answer to a heartbeat."""
        with self._changed:
            self._drain, self._unanswered_since = drain, None
            self._changed.notify_all()

    def note_failure(self, begun_s: float) -> None:
        """Notes a heartbeat without an answer.

        Args:
            begun_s: when it was sent; monotonic seconds.
        """
        with self._changed:
            if self._unanswered_since is None:
                self._unanswered_since = begun_s

    def wait(self, timeout_s: float, stops: Callable[[], bool]) -> str:
        """Waits until the drain is done, refused or hopeless.

        Args:
            timeout_s: for all of it.
            stops: whether to end at once.

        Returns:
            Why shards are still only here; empty: none is.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                drain, now = self._drain, time.monotonic()
                if drain.done or drain.refused:
                    return drain.refused
                since = self._unanswered_since
                is_gone = since is not None and now - since >= _GONE_S
                if is_gone or now >= deadline or stops():
                    return _what_is_left(drain, coordinator_is_gone=is_gone)
                self._changed.wait(min(deadline - now, _LOOK_EVERY_S))


def _what_is_left(drain: pb.Drain, *, coordinator_is_gone: bool) -> str:
    reasons = [f"{drain.shards_left} shards of {drain.bytes_left} bytes are still to be moved"]
    if drain.waits:
        reasons.append(drain.waits)
    if coordinator_is_gone:
        reasons.append(f"the coordinator did not answer for {_GONE_S:g} s")
    return "; ".join(reasons)
