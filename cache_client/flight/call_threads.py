"""Makes the main thread's calls into gRPC in other threads, which no interrupt reaches.

An interrupt inside a call can leave gRPC's internal counts wrong. gRPC then counts as in use: every
later fork waits for it in vain, and the child may hang. In another thread the call ends normally,
and the interrupt only ends the wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cache_client.flight.calls import Call

_MAX_THREADS = 16  # started on demand; a call that an interrupt left may still hold one
_T = TypeVar("_T")


class CallThreads:
    """Threads to make calls in. Thread-safe."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="cache-call")

    def __enter__(self) -> CallThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets each thread end after its current call; waits for none."""
        self._threads.shutdown(wait=False)

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Returns or raises what ``function`` does; an interrupt ends the wait, not the call.

        Calls it in this thread if this is not the main thread, or if no thread starts any more, as
        in a program that ends.
        """
        if threading.current_thread() is not threading.main_thread():
            return function(*args)
        call = Call(function, *args)
        try:
            self._threads.submit(call.run)
        except RuntimeError:  # no thread starts, but a running one may have taken the call
            call.run()
        return call.wait()
