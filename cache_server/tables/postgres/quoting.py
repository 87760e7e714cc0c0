"""Names and values as SQL has them, whatever characters they hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def identifier(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """A text as SQL has it."""
    return "'" + value.replace("'", "''") + "'"


def array_literal(values: Sequence[str]) -> str:
    """An array of values that are given by their texts; its type is what the context makes it."""
    quoted = [v.replace("\\", "\\\\").replace('"', '\\"') for v in values]
    return literal("{" + ",".join(f'"{value}"' for value in quoted) + "}")
