"""Pauses between attempts, by chance, so that the many who wait do not all come back at once.

The chance is their own: training scripts seed `random`, and count on what it gives them next.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom

from tenacity import RetryCallState

_CHANCE = SystemRandom()  # has no state, which forked workers would share


def backoff(first_s: float, longest_s: float) -> Callable[[RetryCallState], float]:
    """A ``wait`` for tenacity: anything up to ``first_s``, then up to twice as much each time.

    Args:
        longest_s: that no pause is longer than.
    """
    return lambda state: pause_s(state.attempt_number, first_s, longest_s)


def pause_s(attempt: int, first_s: float, longest_s: float) -> float:
    """The pause after an attempt, of which the first is 1; as that of `backoff`."""
    doublings = min(attempt - 1, 64)  # more would not fit a float
    return _CHANCE.uniform(0.0, min(first_s * 2.0**doublings, longest_s))
