"""What counts as an integer, a number or a text where a caller gives one.

NumPy's numbers do; a bool is none, and half of a pair of surrogates is no text. Pure. It raises
nothing: whoever asks knows what a bad value may be quoted as.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import TypeGuard


def as_integer(value: object) -> int | None:
    """An integer of any type as an int; None for anything else."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # which says whether it is one
    except TypeError:
        return None
    return None if isinstance(value, bool) else number


def as_number(value: object) -> float | None:
    """A real number of any type as a float; None for anything else, or for more than one holds.

    Those of NumPy count on with their own few bits: a float32 of seconds is lost in a time of day.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a text that UTF-8 can hold, as messages and files do.

    Not so a name of bytes that are no UTF-8, as Python reads it from a directory or an argument.
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
