"""Quotes values for PostgreSQL. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cache_server.sql.quoting import literal


def array_literal(values: Sequence[str]) -> str:
    """An array of values given as strings; the context decides its type."""
    quoted = [v.replace("\\", "\\\\").replace('"', '\\"') for v in values]
    return literal("{" + ",".join(f'"{value}"' for value in quoted) + "}")
