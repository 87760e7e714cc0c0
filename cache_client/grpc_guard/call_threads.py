"""Calls into gRPC on behalf of the main thread, which an interrupt may reach anywhere.

One that reaches a thread inside a call cuts short what gRPC or Flight keep count of there, so that
gRPC stays in use: every later fork waits for it in vain, and its child may hang. So the call is
made in another thread, and an interrupt ends no more than the waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cache_client.grpc_guard.calls import Call

_THREADS = 16  # begun when they are needed: those that interrupts left may still be inside a call
_T = TypeVar("_T")


class CallThreads:
    """Threads to make calls in, until it is closed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cache-call")

    def __enter__(self) -> CallThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets the threads end, each after the call that it is in."""
        self._threads.shutdown(wait=False)

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """What ``function`` returns or raises; it goes on where an interrupt ends the waiting.

        Where no interrupt comes, and where no thread begins any more, as in a program that ends, it
        is called in this thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return function(*args)
        call = Call(function, *args)
        try:
            self._threads.submit(call.make)
        except RuntimeError:  # no thread begins any more, but one that runs may have taken the call
            call.make()
        return call.wait()
