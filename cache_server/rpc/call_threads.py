"""The threads that gRPC verbs run in: how many calls run, and how long one waits for a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_PATIENCE_S = 1.0  # a caller that gives up earlier did not wait for this node


class RunningCalls:
    """Counts running calls. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts one call."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def have_ended(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s``; returns whether no call runs."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, timeout_s)


class TimedPool(ThreadPoolExecutor):
    """A pool that knows how long its oldest call has not ended. Thread-safe.

    It also knows when a call came that was never read: grpc reads the request of a call in the
    pool, and not at all if the caller has given up by then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._begun: dict[Future[Any], float] = {}  # the oldest first
        self._unread_at = -math.inf
        self._call = threading.local()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs a call in the pool."""
        came_at = time.monotonic()

        def run() -> Any:
            waited_s = time.monotonic() - came_at
            self._call.is_read = False
            try:
                return fn(*args, **kwargs)
            finally:
                if not self._call.is_read and waited_s > _PATIENCE_S:
                    with self._lock:
                        self._unread_at = max(self._unread_at, came_at)

        with self._lock:
            future = super().submit(run)
            self._begun[future] = came_at
        future.add_done_callback(self._forget)
        return future

    def note_read(self) -> None:
        """Notes that the call of this thread has its request."""
        self._call.is_read = True

    def unread_at(self) -> float:
        """When the last call came that waited and was not read, in monotonic seconds."""
        return self._unread_at

    def waiting_since(self) -> float:
        """When the oldest call came that has not ended, in monotonic seconds; else infinite."""
        with self._lock:
            return next(iter(self._begun.values()), math.inf)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            del self._begun[future]


class PooledHandler:
    """A handler whose calls run in a given thread pool.

    Attributes:
        experimental_thread_pool: the pool; grpc looks for this attribute.
    """

    def __init__(self, handler: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
        self._handler = handler
        self.experimental_thread_pool = threads

    def __call__(self, request: Any, context: Any) -> Any:
        """Calls the handler, which has its request now."""
        if isinstance(self.experimental_thread_pool, TimedPool):
            self.experimental_thread_pool.note_read()
        return self._handler(request, context)
