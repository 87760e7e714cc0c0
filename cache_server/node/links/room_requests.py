"""Asks the coordinator for room, with the next heartbeat, for loads and puts that do not fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_protocol.v1 import cache_pb2 as pb


class RoomAnswer(NamedTuple):
    """What the coordinator says of room.

    Attributes:
        why_not: why there is none; empty: there may be now.
        may_come: some may come later, so it is worth to ask again.
    """

    why_not: str
    may_come: bool = False


# Takes the arguments of `RoomRequests.ask`, and returns what it does.
AskRoom = Callable[[str, int, Callable[[], bool]], RoomAnswer]
_ANSWER_S = 10.0  # for the coordinator to answer


@dataclass(eq=False)
class _Request:
    lack: pb.Lack
    answered: threading.Event = field(default_factory=threading.Event)
    answer: RoomAnswer = field(default_factory=lambda: RoomAnswer(""))


class RoomRequests:
    """The requests of one node. Thread-safe.

    Args:
        wake: sends the next heartbeat now.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: list[_Request] = []
        self._sent: Sequence[_Request] = ()

    def ask(self, dataset: str, num_bytes: int, is_over: Callable[[], bool]) -> RoomAnswer:
        """Waits until the coordinator has made room, and this node has removed what goes.

        Args:
            num_bytes: that do not fit.
            is_over: whether nothing waits any more.
        """
        request = _Request(pb.Lack(dataset=dataset, num_bytes=num_bytes))
        with self._lock:
            self._waiting.append(request)
        self._wake()
        ends_at = time.monotonic() + _ANSWER_S
        try:
            while not request.answered.wait(0.1):
                if is_over() or time.monotonic() > ends_at:
                    return RoomAnswer("the coordinator does not answer")
        finally:
            with self._lock:
                if request in self._waiting:
                    self._waiting.remove(request)
        return request.answer

    def take(self) -> list[pb.Lack]:
        """What to send with a heartbeat."""
        with self._lock:
            self._sent = [*self._waiting]
        return [request.lack for request in self._sent]

    def answer(self, no_room: Sequence[str], *, may_come: bool = False) -> None:
        """Takes the answers to what was sent last, once all that goes was removed.

        Args:
            no_room: for each, why there is no room; empty: a coordinator of an earlier release.
            may_come: see `RoomAnswer`.
        """
        for index, request in enumerate(self._sent):
            why_not = "the coordinator makes none: update it"
            if index < len(no_room):
                why_not = no_room[index]
            request.answer = RoomAnswer(why_not, may_come)
            request.answered.set()
        self._sent = ()
