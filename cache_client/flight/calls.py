"""A call that one thread runs and another waits for, safe against interrupts.

`concurrent.futures.Future` enters its lock in Python code. An interrupt of the main thread just
after that leaves the lock taken for ever: the thread that sets the result hangs, and so does the
program at its end. Here both threads only use a queue that is written in C.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Call(Generic[_T]):
    """``function(*args)``: run once and waited for once, by any threads."""

    def __init__(self, function: Callable[..., _T], *args: Any) -> None:
        self._work = [(function, args)]
        self._outcome: SimpleQueue[Callable[[], _T]] = SimpleQueue()

    def run(self) -> None:
        """Runs the call, unless another thread has taken it."""
        try:
            function, args = self._work.pop()
        except IndexError:
            return
        try:
            result = function(*args)
        except BaseException as error:  # raised in the waiting thread
            self.fail(error)
        else:
            self._outcome.put(lambda: result)

    def fail(self, error: BaseException) -> None:
        """Makes `wait` raise an error; for a call that cannot run."""
        self._outcome.put(_Raise(error))

    @property
    def has_run(self) -> bool:
        """Whether the outcome is there, and `wait` would not wait."""
        return not self._outcome.empty()

    def wait(self, late_s: float | None = None, on_late: Callable[[], object] = lambda: None) -> _T:
        """Waits for the call, then returns or raises what it did.

        Args:
            late_s: after which ``on_late`` is called once; None: never.
        """
        try:
            outcome = self._outcome.get(timeout=late_s)
        except Empty:
            on_late()
            outcome = self._outcome.get()
        return outcome()


class _Raise:
    """Raises an error and drops it: its traceback may hold this object."""

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __call__(self) -> Any:
        raise self._errors.pop()
