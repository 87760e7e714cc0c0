"""A view as a short text: for states, reports and records, and what differs between two. Pure.

The text is JSON of the options that were given. It is bounded: a long value has its begin, its
length and a digest in its place, so that two texts are equal only where the views are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

import numpy as np

_MOST_OF_VALUE: Final = (500, 120, 40)  # characters; the first that keeps the text below
_MOST_OF_TEXT: Final = 3000
_BEGIN: Final = 40
_MOST_SHOWN: Final = 80  # of a value in a message
_CUT: Final = "cut"
_NOTHING: Final = object()


def view_text(options: Mapping[str, Any]) -> str:
    """The text of options; "" without any.

    Args:
        options: name -> value: JSON types, tuples, arrays of integers, and objects with a
            ``digest`` or a `repr`.
    """
    if not options:
        return ""
    values = {name: _json(_plain(value)) for name, value in options.items()}
    text = ""
    for most in _MOST_OF_VALUE:
        shown = (f"{_json(name)}:{_cut(value, most)}" for name, value in values.items())
        text = f"{{{','.join(shown)}}}"
        if len(text) <= _MOST_OF_TEXT:
            break
    return text


def erased_text(text: str, until: int) -> str:
    """The text of a view, which also says until which act it leaves erased rows out."""
    return _with_option(text, "erased", until) if until else text


def set_text(text: str, told: Sequence[Any] | None) -> str:
    """The text of a view, which also says which weights training set."""
    return _with_option(text, "set_weights", list(told)) if told else text


def _with_option(text: str, name: str, value: Any) -> str:
    return f"{text[:-1] + ',' if text else '{'}{_json(name)}:{_json(value)}}}"


def view_digest(text: str) -> str:
    """A digest of a text: equal where the views are equal. "" for the plain read."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def view_options(text: str) -> dict[str, Any]:
    """The options of a text, as JSON types.

    Raises:
        ValueError: a value was cut, or it is another text; names it.
    """
    if not text:
        return {}
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(f"it is no view: {_shown(options)}")
    for name, value in _cut_values("", options):
        raise ValueError(f"{name} was too long to be kept: {value[_CUT]}...")
    return options


def _cut_values(path: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if _is_cut(value):
            yield f"{path}{name}", value
        elif isinstance(value, dict):
            yield from _cut_values(f"{path}{name}.", value)


def view_differences(
    before: str,
    now: str,
    *,
    of: str = "in the state",
    to: str = "here",
    ignored: Collection[str] = (),
) -> str:
    """Which options of two texts differ, from what to what; "" where that cannot be told.

    Args:
        of, to: where the texts are from, for people.
        ignored: options that may differ.
    """
    try:
        one, other = (json.loads(text) if text else {} for text in (before, now))
    except ValueError:
        return ""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    return "; ".join(
        f"{name} is {_shown(old)} {of} and {_shown(new)} {to}"
        for name, old, new in _differences("", one, other)
        if name not in ignored
    )


def _differences(
    path: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*one, *other)):
        old, new = one.get(name, _NOTHING), other.get(name, _NOTHING)
        full = f"{path}{name}"
        is_nested = isinstance(old, dict) and isinstance(new, dict)
        if is_nested and not _is_cut(old) and not _is_cut(new) and old.keys() == new.keys():
            yield from _differences(f"{full}.", old, new)
        elif old is _NOTHING or new is _NOTHING or _json(old) != _json(new):
            yield full, old, new


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "not given"
    if _is_cut(value):
        return f"{value[_CUT]}... (size {value['size']:,}, sha256 {value['sha256']})"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _cut(value: str, most: int) -> str:
    if len(value) <= most:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:16]
    return _json({_CUT: value[:_BEGIN], "size": len(value), "sha256": digest})


def _is_cut(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_CUT, "size", "sha256"}


def _json(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """A value as JSON types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):  # also of other libraries
        return _numbers(np.asarray(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        are_numbers = len(value) > _BEGIN and all(isinstance(each, Integral) for each in value)
        return _numbers(np.asarray(value)) if are_numbers else [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    digest = getattr(value, "digest", None)
    return repr(value) if digest is None else f"{value!r} {digest}"


def _numbers(values: np.ndarray[Any, Any]) -> Any:
    """An array of integers, of any type: a digest of a long one, without a text of all numbers."""
    if len(values) <= _BEGIN:
        return values.tolist()
    digest = hashlib.sha256(np.ascontiguousarray(values, np.int64).tobytes()).hexdigest()
    begin = ", ".join(map(str, values[:6].tolist()))
    return {_CUT: f"[{begin}", "size": len(values), "sha256": digest[:16]}
