"""Calls of installed functions as SQL has them once they are planned. Pure.

``tokenize(text, 'tokenizer.json')`` is planned as ``tokenize_bound_...(text)``. The name tells
everything but the rows: the version of the function, its literals, the digests of its files, and
the types. So the SQL of a plan is enough to run it on any node, and its hash names the result. No
SQL of a user may have such a name.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

_MARK: Final = "_bound_"
# So long that no name of a person is one, such as ``upper_bound_price``.
_NAME = re.compile(rf"\b([a-z][a-z0-9_]*?){_MARK}([a-z2-7]{{100,}})\b")


@dataclass(frozen=True)
class BoundFile:
    """A file that a call names.

    Attributes:
        source: path or URI.
        table: of the spec, whose options and secrets its store takes.
        kind: of its content, see `Option`.
        sha256: of its content.
    """

    source: str
    table: str
    kind: str
    sha256: str


@dataclass(frozen=True)
class BoundFunction:
    """A function with its literals.

    Attributes:
        function, version: which one.
        columns: its column arguments, in the order of the call.
        result: type of its values.
        options: the literals that the call gives, but for files.
        files: the files that it names.
    """

    function: str
    version: str
    columns: Mapping[str, pa.DataType]
    result: pa.DataType
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, BoundFile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """In SQL."""
        types = pa.schema([*self.columns.items(), ("", self.result)]).serialize().to_pybytes()
        content = [
            self.version,
            base64.b64encode(types).decode(),
            dict(sorted(self.options.items())),
            {
                name: [file.source, file.table, file.kind, file.sha256]
                for name, file in sorted(self.files.items())
            },
        ]
        text = json.dumps(content, separators=(",", ":")).encode()
        return f"{self.function}{_MARK}{base64.b32encode(text).decode().rstrip('=').lower()}"


@lru_cache(64)
def bound_function(name: str) -> BoundFunction:
    """The function of a name that `BoundFunction.name` gave."""
    function, _, encoded = name.rpartition(_MARK)
    text = base64.b32decode(encoded.upper() + "=" * (-len(encoded) % 8))
    version, types, options, files = json.loads(text)
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(types)))
    columns = {f.name: f.type for f in list(schema)[:-1]}
    found = {key: BoundFile(*values) for key, values in files.items()}
    return BoundFunction(function, version, columns, schema.types[-1], options, found)


def is_bound(name: str) -> bool:
    """Whether a name of SQL is that of a function with its literals."""
    return _NAME.fullmatch(name) is not None


def bound_names(sql: str) -> list[str]:
    """The bound functions that a query calls, each once."""
    return list(dict.fromkeys(found[0] for found in _NAME.finditer(sql)))


def as_written(text: str) -> str:
    """SQL, or a message, with calls as a user may write them."""
    while (found := _NAME.search(text)) is not None:
        shown, stop = found[1], found.end()
        inside = _arguments(text, stop) if text[stop : stop + 1] == "(" else None
        if inside is not None and (bound := _decoded(found[0])) is not None:
            columns, stop = inside
            shown += f"({', '.join(_written(bound, columns))})"
        text = text[: found.start()] + shown + text[stop:]
    return text


def _decoded(name: str) -> BoundFunction | None:
    try:
        return bound_function(name)
    except (ValueError, TypeError):  # a text that only looks like a name
        return None


def _written(bound: BoundFunction, columns: list[str]) -> Iterator[str]:
    for place, (name, column) in enumerate(zip(bound.columns, columns, strict=False)):
        yield f"{name} => {column}" if place else column
    for name, file in bound.files.items():
        yield f"{name} => {_literal(file.source)}"
    for name, value in bound.options.items():
        yield f"{name} => {_literal(value)}"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower()


def _arguments(text: str, opening: int) -> tuple[list[str], int] | None:
    """The arguments of a call, and where it ends; None: the text is cut before."""
    depth, quote, start = 0, "", opening + 1
    found = []
    for at in range(opening, len(text)):
        letter = text[at]
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
            continue
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 or (depth == 1 and letter == ","):
            found.append(text[start:at].strip())
            start = at + 1
        if depth == 0:
            return found, at + 1
    return None
