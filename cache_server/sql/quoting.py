"""Names and values as SQL has them, whatever characters they hold. Pure.

The same for DataFusion and PostgreSQL; knows neither.
"""

from __future__ import annotations


def identifier(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """A text as SQL has it."""
    return "'" + value.replace("'", "''") + "'"
