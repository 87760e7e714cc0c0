"""How much to ask for at once, by the time that it took before. Pure."""

from __future__ import annotations

_GROWTH = 32  # at most, from one request to the next


class Pace:
    """The size of the next request, so that it takes about ``target_s``.

    Where requests are fast, as in memory, the first ones are small and all others as large as they
    may be. Any thread may use it: a lost note costs some time only.

    Args:
        first: size of the first requests.
        target_s: how long a request should take.
    """

    def __init__(self, first: int, target_s: float) -> None:
        self._size = first
        self._target_s = target_s

    def size(self, most: int) -> int:
        """The size of the next request, from 1 to ``most``."""
        return max(1, min(most, self._size))

    def note(self, size: int, seconds: float) -> None:
        """Learns how long a request of some size took."""
        fitting = int(size * self._target_s / max(seconds, 1e-9))
        if fitting < self._size:
            self._size = max(1, fitting)
        else:  # a short last request says nothing against the size of the others
            self._size = max(self._size, min(fitting, size * _GROWTH))
