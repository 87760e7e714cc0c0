"""Pauses between attempts, by chance, so that the many who wait do not all come back at once.

The chance is their own: training scripts seed `random`, and count on what it gives them next.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom

from tenacity import RetryCallState, wait_exponential

_CHANCE = SystemRandom()  # has no state, which forked workers would share


def backoff(first_s: float, longest_s: float) -> Callable[[RetryCallState], float]:
    """A ``wait`` for tenacity: anything up to ``first_s``, then up to twice as much each time.

    Args:
        longest_s: that no pause is longer than.
    """
    limit = wait_exponential(multiplier=first_s, max=longest_s)

    def pause_s(state: RetryCallState) -> float:
        return _CHANCE.uniform(0.0, limit(state))

    return pause_s
