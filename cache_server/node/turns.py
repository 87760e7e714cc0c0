"""Who computes next: turns by namespace, then by principal, never by request.

A team that asks for much delays itself, and no other team.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CHECK_S = 0.1

_Waiting = OrderedDict[str, OrderedDict[str, deque[object]]]


class Turns:
    """Turns for computations. Thread-safe.

    Args:
        at_once: computations that run at the same time.
        of_namespace: how many of them are of one namespace.
    """

    def __init__(self, at_once: int, of_namespace: int) -> None:
        self._at_once, self._of_namespace = at_once, of_namespace
        self._changed = threading.Condition()
        # Namespace -> principal -> requests; who had no turn for the longest time comes first.
        self._waiting: _Waiting = OrderedDict()
        self._running = Counter[str]()

    @contextmanager
    def turn(
        self, namespace: str, principal: str, check: Callable[[], None], timeout_s: float
    ) -> Iterator[None]:
        """Waits for a turn, and has it until the end.

        Args:
            check: called all the time; raises an error when the result is no longer needed.

        Raises:
            TimeoutError: others had all the turns. What ``check`` raises.
        """
        self._wait(namespace, principal, check, time.monotonic() + timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._running[namespace] -= 1
                self._running = +self._running
                self._changed.notify_all()

    def _wait(
        self, namespace: str, principal: str, check: Callable[[], None], deadline: float
    ) -> None:
        request = object()
        with self._changed:
            principals = self._waiting.setdefault(namespace, OrderedDict())
            principals.setdefault(principal, deque()).append(request)
            try:
                while self._next() is not request:
                    check()
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    self._changed.wait(_CHECK_S)
                self._running[namespace] += 1
            finally:
                self._leave(namespace, principal, request)
                self._changed.notify_all()

    def _next(self) -> object | None:
        """The request whose turn it is; None if all turns are taken."""
        if self._running.total() >= self._at_once:
            return None
        for namespace, principals in self._waiting.items():
            if self._running[namespace] < self._of_namespace:
                return next(iter(principals.values()))[0]
        return None

    def _leave(self, namespace: str, principal: str, request: object) -> None:
        """Takes a request off the queue; puts the next of both to the end."""
        principals = self._waiting[namespace]
        requests = principals[principal]
        requests.remove(request)
        principals.move_to_end(principal)
        self._waiting.move_to_end(namespace)
        if not requests:
            del principals[principal]
        if not principals:
            del self._waiting[namespace]
