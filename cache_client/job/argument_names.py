"""Unknown names of arguments: says where an argument is, or which one is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def names_explained(
    elsewhere: Callable[[], Mapping[str, str]] = dict,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function name each unknown argument, all at once, with what to write.

    Args:
        elsewhere: called for an unknown name; returns name -> what to write instead, such as
            ``where`` -> ``view=View(where=...)``.

    Returns:
        A decorator; the function raises TypeError for unknown names.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [name for name in signature(function).parameters if name != "self"]
        owner = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            unknown = [name for name in kwargs if name not in known]
            if unknown:
                places = elsewhere()
                advice = "; ".join(_advice(name, known, places) for name in unknown)
                raise TypeError(f"{owner} does not take {', '.join(unknown)}. {advice}")
            return function(*args, **kwargs)

        return checked

    return decorate


def _advice(name: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    if name in elsewhere:
        return f"{name} is {elsewhere[name]}"
    near = get_close_matches(name, [*known, *elsewhere], n=1)
    if not near:
        return f"{name}: it takes {', '.join(known)}"
    meant = elsewhere.get(near[0])
    return f"{name}: did you mean {near[0]}?" + (f" It is {meant}" if meant else "")
