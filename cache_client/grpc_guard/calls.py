"""A call that one thread makes and another waits for, without a lock that an interrupt could keep.

A future's lock is entered by Python. An interrupt that reaches the main thread when it has just
taken that lock leaves it taken: the thread that is to say its result hangs, and with it the program
that awaits the thread when it ends. Here both only use a queue that is not Python.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Call(Generic[_T]):
    """``function(*args)``, to be made once and waited for once, by any threads."""

    def __init__(self, function: Callable[..., _T], *args: Any) -> None:
        self._work = [(function, args)]
        self._outcome: SimpleQueue[Callable[[], _T]] = SimpleQueue()

    def make(self) -> None:
        """Makes the call, unless somebody has begun to."""
        try:
            function, args = self._work.pop()
        except IndexError:
            return
        try:
            result = function(*args)
        except BaseException as error:  # raised where it is waited for
            self._outcome.put(_Raise(error))
        else:
            self._outcome.put(lambda: result)

    def wait(self) -> _T:
        """What the call returned or raised, once it was made."""
        return self._outcome.get()()


class _Raise:
    """Raises an error, and holds it no longer: its traceback may hold this."""

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __call__(self) -> Any:
        raise self._errors.pop()
