"""What a package declares of a function that SQL may call. Pure.

A function is pure: the same arguments give the same values on every node, at any time. It gets
Arrow arrays of a batch of rows, and what the call names as literals: texts, numbers, files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from cache_protocol.errors import ConfigError

Kind: TypeAlias = Literal["text", "integer", "boolean", "json file", "text file"]
FILE_KINDS: Final = ("json file", "text file")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_REQUIRED: Final = "required"


@dataclass(frozen=True)
class Column:
    """An argument that has a value in each row: any expression of SQL.

    Attributes:
        type: that it is coerced to; None: it comes in the type that the expression has.
        is_optional: a call may leave it out, and its nulls do not make the result null.
    """

    type: pa.DataType | None = None
    is_optional: bool = False

    def __str__(self) -> str:
        return "any" if self.type is None else str(self.type)


@dataclass(frozen=True)
class Option:
    """An argument that is a literal, the same for all rows.

    Attributes:
        kind: of the literal; a file is a path or a URI, and the function gets its text.
        default: if a call leaves it out; by default it must not.
    """

    kind: Kind
    default: Any = field(default=_REQUIRED)

    @property
    def is_file(self) -> bool:
        """Whether the literal names a file."""
        return self.kind in FILE_KINDS

    @property
    def is_required(self) -> bool:
        """Whether a call must give it."""
        return self.default is _REQUIRED

    def __str__(self) -> str:
        if self.is_required:
            return self.kind
        shown = "none" if self.default is None else repr(self.default)
        return f"{self.kind} = {shown.lower() if self.kind == 'boolean' else shown}"


Compute: TypeAlias = Callable[..., pa.Array]
"""Takes an array for each column argument of the call, by name; gives one of the same length."""


@dataclass(frozen=True)
class Function:
    """A function that SQL may call on nodes.

    Attributes:
        name: in SQL, in lower case.
        version: of its results. Another version makes another version of a dataset. Name the
            libraries that decide them.
        arguments: by name, in the order of a call; at least one `Column`.
        make: gives the function for the options of a call. Called once in each process.
        returns: type of the result; or computes it from the types of columns, and the options.
        shows: the result in the signature, if ``returns`` computes it.
        sees_nulls: it gets rows with nulls; otherwise their values are null, and it gets others.
        text: says what it does, in a line.

    Raises:
        ConfigError: a bad name, or no column.
    """

    name: str
    version: str
    arguments: Mapping[str, Column | Option]
    make: Callable[[Mapping[str, Any]], Compute]
    returns: pa.DataType | Callable[[Mapping[str, pa.DataType], Mapping[str, Any]], pa.DataType]
    shows: str = ""
    sees_nulls: bool = False
    text: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.arguments):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"a function and its arguments have names of a-z, 0-9 and _, got {name!r}"
                )
        if not self.version or not any(self.columns):
            raise ConfigError(f"function {self.name!r} must have a version and a column argument")

    @property
    def columns(self) -> dict[str, Column]:
        """The arguments that are columns."""
        return {name: arg for name, arg in self.arguments.items() if isinstance(arg, Column)}

    @property
    def options(self) -> dict[str, Option]:
        """The arguments that are literals."""
        return {name: arg for name, arg in self.arguments.items() if isinstance(arg, Option)}

    @property
    def signature(self) -> str:
        """Arguments and result, for people."""
        arguments = ", ".join(
            f"{name}: {argument}{' = null' * getattr(argument, 'is_optional', False)}"
            for name, argument in self.arguments.items()
        )
        result = self.returns if isinstance(self.returns, pa.DataType) else self.shows or "any"
        return f"{self.name}({arguments}) -> {result}"

    def result_type(
        self, types: Mapping[str, pa.DataType], options: Mapping[str, Any]
    ) -> pa.DataType:
        """The type of the result of a call.

        Args:
            types: of the columns that the call gives.
            options: all of them; of a file, its text.
        """
        if isinstance(self.returns, pa.DataType):
            return self.returns
        return self.returns(types, options)
