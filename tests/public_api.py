"""The public names of `cache_client` and `cache_server`, with signatures, as text.

`public_api.txt` is a snapshot; a test compares it with the code. After a change that you mean:

    python -m tests.public_api
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = ("cache_client", "cache_server")
SNAPSHOT = Path(__file__).with_suffix(".txt")


def describe() -> str:
    """A line for each public name, and below a class one for each of its public members."""
    lines: list[str] = []
    for module in MODULES:
        lines.append(f"# {module}")
        for name in sorted(import_module(module).__all__):
            lines += ["", *_describe(name, getattr(import_module(module), name))]
        lines.append("")
    return "\n".join(lines)


def _describe(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"def {name}{_signature(value)}" if callable(value) else f"{name}: {_type(value)}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    if issubclass(value, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in value)
    elif not issubclass(value, BaseException) or "__init__" in vars(value):
        yield f"    __init__{_signature(value)}"
    for member, found in sorted(_members(value).items()):
        yield f"    {_member(member, found)}"


def _members(value: type) -> dict[str, Any]:
    """Public names of our own classes: what they define, or the annotation of a field."""
    names: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("cache_"):
            names |= vars(base) | inspect.get_annotations(base)
    if issubclass(value, enum.Enum):
        names = {name: each for name, each in names.items() if name not in value.__members__}
    return {name: each for name, each in names.items() if not name.startswith("_")}


def _member(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{name}: {value}"
    if isinstance(value, property):
        return f"{name}: {inspect.signature(value.fget).return_annotation}"  # type: ignore
    kind = ""
    if isinstance(value, classmethod | staticmethod):
        kind, value = f"{type(value).__name__} ", value.__func__
    return f"{kind}{name}{_signature(value)}" if inspect.isroutine(value) else name


def _signature(value: Any) -> str:
    """With annotations as they are written: `inspect` shows them as strings."""
    return re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(inspect.signature(value)))


def _type(value: Any) -> str:
    return type(value).__name__


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), encoding="utf-8")
