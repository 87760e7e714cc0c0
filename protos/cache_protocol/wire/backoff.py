"""Random pauses between attempts, so that many waiting clients do not retry at once.

Does not use `random`: training scripts seed it and rely on its next values.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom

from tenacity import RetryCallState

_RANDOM = SystemRandom()  # stateless: forked workers would share a state


def backoff(first_s: float, longest_s: float) -> Callable[[RetryCallState], float]:
    """A ``wait`` for tenacity: full jitter, with a limit that doubles from ``first_s``.

    Args:
        first_s: the longest first pause.
        longest_s: the longest pause.
    """
    return lambda state: pause_s(state.attempt_number, first_s, longest_s)


def pause_s(attempt: int, first_s: float, longest_s: float) -> float:
    """The pause of `backoff` after an attempt; the first attempt is 1."""
    doublings = min(attempt - 1, 64)  # more would overflow a float
    return _RANDOM.uniform(0.0, min(first_s * 2.0**doublings, longest_s))
