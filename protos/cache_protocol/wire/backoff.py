"""Pauses: random ones between attempts, so that many waiting clients do not retry at once.

Does not use `random`: training scripts seed it and rely on its next values.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom

from tenacity import RetryCallState

_REST_TIMES, _UNNOTICED_S, _LONGEST_REST_S = 4, 0.003, 1.0
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


def rest_s(took_s: float) -> float:
    """How long to wait after work that is repeated at every change.

    The work then takes at most a fifth of the time, so that what it reports is not slowed down. At
    most a second; nothing after work of a few milliseconds.
    """
    return min(_REST_TIMES * took_s, _LONGEST_REST_S) if took_s > _UNNOTICED_S else 0.0
