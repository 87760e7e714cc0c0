"""The columns that options name, as SQL. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quoted(column: str) -> str:
    """SQL of a column, which may have any name."""
    return '"' + column.replace('"', '""') + '"'


def as_sql(text: str, columns: Collection[str]) -> str:
    """SQL of an option that takes a column or an expression.

    Args:
        text: the name of a column, or SQL.
        columns: that are known. A name of letters, digits and ``_`` needs not be one of them.
    """
    return quoted(text) if text in columns or _COLUMN.fullmatch(text) else text
