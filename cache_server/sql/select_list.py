"""Select lists: result columns of a query -> their SQL, for messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cache_server.sql.ignored_sql import bare
from cache_server.sql.quoting import identifier

_SELECT = re.compile(r"SELECT (DISTINCT )?")
_SEVERAL = re.compile(r"\b(UNION|EXCEPT|INTERSECT)\b")
_BOUNDARY = re.compile(r"[()]|,| FROM ")


def column_expressions(sql: str, names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    """Result column -> its expression in SQL; columns that are only selected are left out.

    Empty for a query with several lists of columns, such as a UNION.

    Args:
        sql: a query as DataFusion's unparser writes it.
        names: of the result columns.
        tables: that the query reads; the name of a single one is left out.
    """
    text = bare(sql)
    select = _SELECT.match(text)
    if select is None or _SEVERAL.search(text):
        return {}
    ranges = list(_items(text, select.end()))
    if len(ranges) != len(names):
        return {}
    found = {}
    for name, (start, stop) in zip(names, ranges, strict=True):
        expression = sql[start:stop].strip()
        for alias in (name, identifier(name)):
            expression = expression.removesuffix(f" AS {alias}")
        if len(tables) == 1:
            table = re.escape(tables[0])
            expression = re.sub(rf"(?<![\w.\"'])(\"{table}\"|{table})\.", "", expression)
        if expression not in (name, identifier(name)):
            found[name] = expression
    return found


def _items(text: str, start: int) -> Iterator[tuple[int, int]]:
    """The ranges of the items of a list that ends at FROM or at the end."""
    depth = 0
    for boundary in _BOUNDARY.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(boundary[0], 0)
        if depth == 0 and boundary[0] not in "()":
            yield start, boundary.start()
            start = boundary.end()
            if boundary[0] == " FROM ":
                return
    yield start, len(text)
