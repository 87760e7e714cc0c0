"""A value that each process makes for itself, also after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PerProcess(Generic[_T]):
    """Keeps one value of this process; a pickle or copy has none. Thread-safe.

    A child of a fork inherits the value of its parent, whose locks may stay taken for ever. So it
    makes another. For the same reason this has no lock: two threads may each make a value, and then
    use the one that `setdefault` keeps.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _T] = {}  # by process id

    def get(self, make: Callable[[], _T], close: Callable[[_T], None] = lambda value: None) -> _T:
        """The value of this process.

        Args:
            make: makes it at the first call.
            close: called with a value that another thread made first.
        """
        if (kept := self._kept.get(os.getpid())) is not None:
            return kept
        made = make()
        kept = self._kept.setdefault(os.getpid(), made)
        if kept is not made:
            close(made)
        return kept

    def latest(self) -> _T | None:
        """The value of this process or of the one that it was forked from; None before both."""
        return next(reversed(self._kept.values()), None)

    def pop(self) -> _T | None:
        """Forgets and returns the value of this process; None: there is none."""
        return self._kept.pop(os.getpid(), None)

    def __reduce__(self) -> tuple[type[PerProcess[_T]], tuple[()]]:
        return type(self), ()
