"""Quotes names and strings in SQL, for DataFusion and PostgreSQL. Pure."""

from __future__ import annotations


def identifier(name: str) -> str:
    """A quoted name."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """A quoted string."""
    return "'" + value.replace("'", "''") + "'"
