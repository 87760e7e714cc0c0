"""The SQL of columns and a filter, and the way back. Pure.

DataFusion plans SQL in a time that grows with the square of the columns, but not a table, or a
table with a filter. So `loader` and `queries` recognise a query that only selects, and plan it
without SQL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from cache_server.sql.quoting import identifier

_NAME = r'"(?:[^"]|"")*"'
_SELECTION = re.compile(
    rf"SELECT (?P<columns>\*|{_NAME}(?:, {_NAME})*) FROM (?P<table>{_NAME}|[a-z]\w*)"
    r"(?: WHERE \((?P<filter>.*)\))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Selection:
    """A query that selects columns and rows of one table.

    Attributes:
        columns: in the order of the result; None for all.
        filter: a condition on each row, if it can be parsed; empty for none.
    """

    table: str
    columns: tuple[str, ...] | None
    filter: str


def select(columns: tuple[str, ...] | None, table: str, filter: str | None = None) -> str:
    """The SQL of a selection; ``table`` is SQL too."""
    names = ", ".join(identifier(name) for name in columns) if columns else "*"
    where = f" WHERE ({filter})" if filter else ""
    return f"SELECT {names} FROM {table}{where}"


@lru_cache(16)
def selection_of(sql: str) -> Selection | None:
    """The selection that ``sql`` is, as `select` writes it; None for another query."""
    found = _SELECTION.fullmatch(sql)
    if found is None:
        return None
    columns = tuple(map(_unquoted, re.findall(_NAME, found["columns"]))) or None
    return Selection(_unquoted(found["table"]), columns, found["filter"] or "")


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name
