"""Values as PostgreSQL alone has them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cache_server.sql.quoting import literal


def array_literal(values: Sequence[str]) -> str:
    """An array of values that are given by their texts; its type is what the context makes it."""
    quoted = [v.replace("\\", "\\\\").replace('"', '\\"') for v in values]
    return literal("{" + ",".join(f'"{value}"' for value in quoted) + "}")
