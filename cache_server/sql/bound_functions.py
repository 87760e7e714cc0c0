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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

_MARK: Final = "_bound_"
_NAME = re.compile(rf"\b([a-z][a-z0-9_]*?){_MARK}([a-z2-7]+)\b")


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
    """SQL, or a message, with the names of functions that a user wrote."""
    return _NAME.sub(r"\1", text)
