"""Quotes names and strings in SQL, for DataFusion and PostgreSQL. Pure."""

from __future__ import annotations

from cache_protocol.errors import short
from cache_server.sql.bound_functions import as_written


def identifier(name: str) -> str:
    """A quoted name."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """A quoted string."""
    return "'" + value.replace("'", "''") + "'"


def shown(sql: str) -> str:
    """A query in a message."""
    return short(repr(as_written(sql)))
