"""Checks arguments before any call to a node; every problem is quoted. Pure.

Needs no torch, because `CacheClient` works without it.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping, Set
from typing import Literal, get_args

from cache_client.order.permutation import checked_integer
from cache_protocol.datasets.values import as_number, is_text
from cache_protocol.errors import checked

BatchFormat = Literal["torch", "numpy", "arrow", "jax", "polars"]
_BATCH_FORMATS: tuple[BatchFormat, ...] = get_args(BatchFormat)


def argument_problems(
    name: object, columns: object, stack: object, *, batch_format: object, transform: object
) -> list[str]:
    """The problems of the arguments that both datasets take; each is quoted."""
    problems: list[str] = []
    if not is_text(name) or not name:
        problems.append(f"name must be the name of a dataset, got {name!r}")
    problems += column_problems(columns)
    if isinstance(stack, Mapping) and all(isinstance(name, str) for name in stack):
        problems += [
            f"stack {name!r} must be a list of columns, got {names!r}"
            for name, names in stack.items()
            if not are_names(names)
        ]
    elif stack is not None:
        problems.append(f"stack must be a dict from name to columns, got {stack!r}")
    if not isinstance(batch_format, str) or batch_format not in _BATCH_FORMATS:
        problems.append(
            f"batch_format must be one of {', '.join(_BATCH_FORMATS)}, got {batch_format!r}"
        )
    return problems + function_problems("transform", transform)


def column_problems(columns: object) -> list[str]:
    """The problem of optional column names, quoted; empty if there is none."""
    if columns is None:
        return []
    if not isinstance(columns, Collection) or not are_names(columns):
        return [f"columns must be a list of names, got {columns!r}"]
    if len(columns) == 0:
        return [f"columns must name a column, or be omitted for all, got {columns!r}"]
    if len(set(columns)) < len(columns):
        return [f"columns must not repeat a name, got {columns!r}"]
    return []


def seconds_problems(name: str, value: object) -> list[str]:
    """The problem of a time limit, quoted; empty if there is none."""
    if (as_number(value) or 0.0) > 0:
        return []
    return [f"{name} must be a number greater than 0, got {value!r}"]


def flag_problems(name: str, value: object) -> list[str]:
    """The problem of a boolean, quoted; empty if there is none."""
    return [] if isinstance(value, bool) else [f"{name} must be True or False, got {value!r}"]


def function_problems(name: str, value: object) -> list[str]:
    """The problem of an optional function, quoted; empty if there is none."""
    if value is None or callable(value):
        return []
    return [f"{name} must be a function, got {value!r}"]


def integer_or_problem(
    problems: list[str],
    name: str,
    value: object,
    minimum: int | None = None,
    maximum: int | None = None,
) -> int | None:
    """The argument as an int; adds a problem and returns None if it is out of bounds."""
    return checked(problems, lambda: checked_integer(name, value, minimum, maximum), ValueError)


def integer_problem(name: str, value: object, minimum: int, maximum: int) -> list[str]:
    """The problem of an integer out of bounds, quoted; empty if there is none."""
    problems: list[str] = []
    integer_or_problem(problems, name, value, minimum, maximum)
    return problems


def are_names(value: object) -> bool:
    """Whether it is an ordered collection of strings.

    A single string would be read as its letters, and the order of a set differs from run to run.
    The keys of a dict have an order.
    """
    return (
        isinstance(value, Collection)
        and getattr(value, "ndim", 1) == 1  # a 0-d array cannot be iterated
        and (not isinstance(value, (str, Set, Mapping)) or isinstance(value, KeysView))
        and all(map(is_text, value))
    )
