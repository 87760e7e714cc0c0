"""Quotes names and strings in SQL, for DataFusion and PostgreSQL. Pure."""

from __future__ import annotations


def identifier(name: str) -> str:
    """A quoted name."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """A quoted string."""
    return "'" + value.replace("'", "''") + "'"


def short(text: str, length: int = 200) -> str:
    """The beginning of a text: gRPC loses errors of more than a few KiB."""
    return text if len(text) <= length else f"{text[:length]}..."


def shown(sql: str) -> str:
    """A query in a message."""
    return short(repr(sql))
