"""Checks for integers, numbers and strings that callers give. Pure.

NumPy's numbers count; a bool is not a number, and half a surrogate pair is not a string. Nothing is
raised here: the caller knows how to quote a bad value.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import TypeGuard


def as_integer(value: object) -> int | None:
    """An integer of any type as an int; None for anything else."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # raises for other types
    except TypeError:
        return None
    return None if isinstance(value, bool) else number


def as_number(value: object) -> float | None:
    """A real number of any type as a float; None for anything else or beyond a float's range.

    NumPy's numbers are converted, because arithmetic with a float32 would lose precision.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string that UTF-8 can encode, for messages and files.

    Python reads names that are not UTF-8 from directories and arguments as strings that cannot be
    encoded.
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
