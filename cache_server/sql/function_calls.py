"""Finds calls of installed functions in SQL, and binds them: see `bound_functions`.

The types of columns that a function takes as they come are those of the coerced plan, as
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cache_protocol.errors import RequestError, short
from cache_server.functions.declared import Column, Function, Option
from cache_server.sql.bound_functions import BoundFile, BoundFunction, as_written, bound_names
from cache_server.sql.ignored_sql import are_paired, bare, parentheses

_CALL = re.compile(r"(?<![\w.\"`$])([A-Za-z_]\w*)\s*\(")
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*=>")
_TEXT = re.compile(r"'((?:[^']|'')*)'")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_MOST_CALLS = 32

TypeOf = Callable[[str], pa.DataType]


@dataclass(frozen=True)
class Binder:
    """What binding needs of the node.

    Attributes:
        functions: that SQL may call, by name.
        why_not: says of the name of another function why it cannot be called; empty: no idea.
        file: the source of a file, its kind -> the pinned file, and its text.
        result_type: a function, the types of its columns, its options -> the type of its values.
    """

    functions: Mapping[str, Function]
    why_not: Callable[[str], str]
    file: Callable[[str, str], tuple[BoundFile, str]]
    result_type: Callable[[Function, dict[str, pa.DataType], dict[str, Any]], pa.DataType]


@dataclass(frozen=True)
class _Call:
    """A call in a text: its place, and the texts of its arguments."""

    name: str
    start: int
    stop: int
    arguments: list[str]


def bind(sql: str, type_of: TypeOf, binder: Binder) -> str:
    """SQL whose calls of installed functions are bound; the same text if it has none.

    Args:
        type_of: the SQL of an argument, with bound calls -> its type.

    Raises:
        RequestError: a call is wrong; says what to write. What the functions of ``binder`` raise.
    """
    if found := bound_names(sql):
        raise RequestError(f"{short(repr(found[0]))} is no function: write its call as documented")
    for _ in range(_MOST_CALLS):
        if (call := _last_call(sql, binder)) is None:
            return sql
        sql = sql[: call.start] + _bound(call, type_of, binder) + sql[call.stop :]
    raise RequestError(f"SQL may call at most {_MOST_CALLS} installed functions")


def _last_call(sql: str, binder: Binder) -> _Call | None:
    """The call that begins last: no other one is inside it."""
    text = bare(sql)
    for found in reversed(list(_CALL.finditer(text))):
        name = found[1].lower()
        if name not in binder.functions:
            if why_not := binder.why_not(name):
                raise RequestError(why_not)
            continue
        opening = found.end() - 1
        if not are_paired(text):
            raise RequestError(f"the call of {name} has a parenthesis without its partner")
        closing = parentheses(text)[opening]
        return _Call(name, found.start(), closing + 1, _arguments(sql, text, opening, closing))
    return None


def _arguments(sql: str, text: str, opening: int, closing: int) -> list[str]:
    depth, start, found = 0, opening + 1, []
    for at in range(opening + 1, closing):
        depth += _BRACKETS.get(text[at], 0)
        if text[at] == "," and depth == 0:
            found.append(sql[start:at])
            start = at + 1
    found.append(sql[start:closing])
    return [argument.strip() for argument in found] if any(map(str.strip, found)) else []


def _bound(call: _Call, type_of: TypeOf, binder: Binder) -> str:
    function = binder.functions[call.name]
    given = _by_name(call, function)
    types: dict[str, pa.DataType] = {}
    options: dict[str, Any] = {}
    files: dict[str, BoundFile] = {}
    texts: dict[str, str] = {}
    for name, argument in function.arguments.items():
        if isinstance(argument, Column):
            if name in given:
                types[name] = argument.type if argument.type is not None else type_of(given[name])
            continue
        if name not in given:
            continue
        options[name] = _literal(function, name, argument, given[name])
        if argument.is_file:
            files[name], texts[name] = binder.file(options.pop(name), argument.kind)
    every = {name: option.default for name, option in function.options.items()}
    result = binder.result_type(function, types, {**every, **options, **texts})
    bound = BoundFunction(function.name, function.version, types, result, options, files)
    return f"{bound.name}({', '.join(given[name] for name in types)})"


def _by_name(call: _Call, function: Function) -> dict[str, str]:
    """The arguments of a call, by name; all that must be there are."""
    names, given = list(function.arguments), dict[str, str]()
    for place, text in enumerate(call.arguments):
        found = _NAMED.match(text)
        if found is None and any(_NAMED.match(before) for before in call.arguments[:place]):
            raise _wrong(function, f"an argument without a name follows one with a name: {text}")
        if found is None and place >= len(names):
            raise _wrong(function, f"it got {len(call.arguments)} arguments")
        name = names[place] if found is None else found[1].lower()
        if name not in names:
            raise _wrong(function, f"it has no argument {name!r}")
        if name in given:
            raise _wrong(function, f"{name} is given twice")
        given[name] = text if found is None else text[found.end() :].strip()
    for name, argument in function.arguments.items():
        is_needed = (
            argument.is_required if isinstance(argument, Option) else not argument.is_optional
        )
        if is_needed and name not in given:
            raise _wrong(function, f"{name} is missing")
    return given


def _literal(function: Function, name: str, option: Option, text: str) -> Any:
    value: Any = None
    if option.kind == "integer" and _INTEGER.fullmatch(text):
        value = int(text)
    elif option.kind == "boolean" and text.lower() in ("true", "false"):
        value = text.lower() == "true"
    elif option.kind not in ("integer", "boolean") and (found := _TEXT.fullmatch(text)):
        value = found[1].replace("''", "'")
    if value is None or (value == "" and option.is_file):
        is_text = option.kind not in ("integer", "boolean")
        what = "a text in single quotes" if is_text else option.kind
        raise _wrong(function, f"{name} must be a literal, {what}, got {short(text)}")
    return value


def _wrong(function: Function, problem: str) -> RequestError:
    return RequestError(
        f"a call of {function.name} is wrong: {short(as_written(problem), 200)}; it is "
        f"{short(function.signature, 300)}"
    )
