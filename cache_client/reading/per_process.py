"""A value that each process makes for itself, also after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PerProcess(Generic[_T]):
    """Keeps one value of this process; a pickle or copy has none. For one thread at a time.

    A child of a fork inherits the value of its parent, whose locks may stay taken for ever. So it
    makes another.
    """

    def __init__(self) -> None:
        self._kept: tuple[int, _T] | None = None  # with the process that made it

    def get(self, make: Callable[[], _T]) -> _T:
        """The value of this process; ``make`` makes it at the first call."""
        if self._kept is None or self._kept[0] != os.getpid():
            self._kept = (os.getpid(), make())
        return self._kept[1]

    def latest(self) -> _T | None:
        """The value of this process or of the one that it was forked from; None before both."""
        return None if self._kept is None else self._kept[1]

    def __reduce__(self) -> tuple[type[PerProcess[_T]], tuple[()]]:
        return type(self), ()
