"""Measures SQL before DataFusion plans it. Pure.

DataFusion plans by recursion: a chain of some thousand operators ends the process, and a chain of n
operators takes a time of up to n * n * n. Its parser bounds only the depth of parentheses.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from cache_server.sql.ignored_sql import bare

_TOKEN = re.compile(
    r"(?P<value>\d[\w.]*(?:(?<=e)[-+]\d+)?)"
    r"|(?P<item>\[)|(?P<open>[({]|\bCASE\b)|(?P<close>[)}\]]|\bEND\b)"
    r"|(?P<part>[,;]|\b(?:WHEN|THEN|ELSE)\b)"
    r"|(?P<query>\b(?:SELECT|JOIN)\b)"
    r"|(?P<sign>[-+*])"
    r"|(?P<joint>\b(?:AND|OR|XOR|UNION|EXCEPT|INTERSECT)\b)"
    r"|(?P<other>[/%&|^#~<>=!@:]+"
    r"|\b(?:NOT|IS|IN|I?LIKE|RLIKE|SIMILAR|BETWEEN|DIV|COLLATE|ZONE)\b)"
    r"|(?P<name>\"+|[^\W\d]\w*)",
    re.IGNORECASE,
)
_NUMBER_SIGN = re.compile(r"(?:^|[(\[,=<>])\s*[-+](?=\s*[\d.])")


class SqlSize(NamedTuple):
    """Counts of what takes time or depth.

    Attributes:
        signs: ``+``, ``-`` and ``*``; not the sign of a number in a list.
        others: other operators.
        names: of columns and functions, also keywords.
        queries: SELECT and JOIN.
        chain: at least the operators that stand inside each other.
    """

    signs: int
    others: int
    names: int
    queries: int
    chain: int


@dataclass
class _Group:
    """What stands between parentheses, so far.

    Attributes:
        operators, inner: since the last AND, OR or comma: operators, and the longest chain inside
            parentheses.
        joints, longest: since the last comma: AND and OR, and the longest chain between them.
        chain: the longest of its parts.
    """

    operators: int = 0
    inner: int = 0
    joints: int = 0
    longest: int = 0
    chain: int = 0

    def end_side(self) -> None:
        self.longest = max(self.longest, self.operators + self.inner)
        self.operators = self.inner = 0

    def end_part(self) -> int:
        self.end_side()
        self.chain = max(self.chain, self.joints + self.longest)
        self.joints = self.longest = 0
        return self.chain

    def add(self, inside: _Group) -> None:
        self.inner = max(self.inner, inside.end_part())


def size_of(sql: str) -> SqlSize:
    """The size of a query or an expression; takes a time in proportion to its length."""
    text = _NUMBER_SIGN.sub(lambda found: found[0][:-1] + " ", bare(sql))
    counts = Counter[str]()
    groups = [_Group()]
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup)
        if kind == "name" and sql[found.start()] in "'$":
            kind = "value"  # a text
        counts[kind] += 1
        if kind in ("sign", "other", "item"):
            groups[-1].operators += 1
        if kind == "joint":
            groups[-1].joints += 1
            groups[-1].end_side()
        if kind in ("open", "item"):
            groups.append(_Group())
        elif kind == "part":
            groups[-1].end_part()
        elif kind == "close" and len(groups) > 1:
            groups[-2].add(groups.pop())
    while len(groups) > 1:  # SQL that no parser takes
        groups[-2].add(groups.pop())
    return SqlSize(
        counts["sign"],
        counts["other"] + counts["joint"] + counts["item"],
        counts["name"],
        counts["query"],
        groups[0].end_part(),
    )
