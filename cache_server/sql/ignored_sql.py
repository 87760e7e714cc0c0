"""Rejects SQL that DataFusion parses but ignores, or takes for something else.

DataFusion shows its plan, not its syntax tree, and sqlglot reads some of these clauses as aliases
(docs/decisions/0018). So regular expressions find where a clause may be, and the plan of a changed
query decides: a word that is only a name can be quoted without changing the plan, and nonsense in
a place that DataFusion reads cannot be planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from cache_server.sql.quoting import identifier

PlanOf = Callable[[str], str]

_CLAUSE = re.compile(
    r"\b(TABLESAMPLE|SAMPLE|PARTITION(?!\s+BY\b)|PREWHERE|CONNECT\s+BY"
    r"|WITH\s+(ROLLUP|CUBE|TOTALS|ORDINALITY)|SIMILAR\s+TO)\b|\*\s*ILIKE\b",
    re.IGNORECASE,
)
_INSTEAD = {"SIMILAR TO": ": it would be taken for ~; write ~, of a regular expression, or LIKE"}
# CHAR means CHAR(1), and FLOAT(25) is a double in the standard.
_TYPE = re.compile(
    r"\b(VARCHAR|CHAR|STRING)\s*(?P<length>\(\s*\d[\d\s\w]*\))|\b(?P<char>CHAR)\b"
    r"|\bFLOAT\s*(?P<precision>\(\s*(2[5-9]|[3-9]\d|\d{3,}|\d+\s*,\s*\d+)\s*\))",
    re.IGNORECASE,
)
_MODIFIER = re.compile(
    r"\(\s*(?P<DISTINCT>DISTINCT)\b|\b(?P<FILTER>FILTER)\s*\(|\b(?P<OVER>OVER)\s*(\(|\w+|\"+)",
    re.IGNORECASE,
)
_NONSENSE = {  # a function that does not exist
    "DISTINCT": " FILTER (WHERE no_such_function())",
    "FILTER": " FILTER (WHERE no_such_function())",
    "OVER": " OVER (ORDER BY no_such_function())",
}
_IGNORES_DISTINCT = re.compile(  # though its plan shows it
    r"lag|lead|nth_value|approx_percentile_cont(_with_weight)?|corr|covar(_pop|_samp)?|regr_\w+"
)
_LONGEST_NAME = 100  # of a function, with the spaces after it
_QUOTED = re.compile(
    r"\bE'([^'\\]|\\.|'')*'|'[^']*'|\"[^\"]*\"|`[^`]*`|(?<!\w)\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"
    r"|(?P<comment>--[^\n]*|/\*.*?\*/)",
    re.DOTALL | re.IGNORECASE,
)


def find(sql: str, text: str, plan_of: PlanOf) -> str:
    """What is wrong with a query that can be planned; empty if nothing is.

    Args:
        text: the query as `bare` leaves it.
        plan_of: the plan of a query as written; empty if it cannot be planned.
    """
    plan_of = cache(plan_of)
    checks = (_ignored_clause, _ignored_modifier, _ignored_parameters, _ignored_type)
    return next(filter(None, (check(sql, text, plan_of) for check in checks)), "")


def bare(sql: str) -> str:
    """The query with quoted strings and comments blanked, of the same length.

    Comments become spaces, so that words stay apart; quoted strings become quotation marks.
    """
    return _QUOTED.sub(lambda found: (" " if found["comment"] else '"') * len(found[0]), sql)


def _ignored_clause(sql: str, text: str, plan_of: PlanOf) -> str:
    for found in _CLAUSE.finditer(text):
        if plan_of(_as_name(sql, found)) != plan_of(sql):
            clause = " ".join(found[0].split())
            return f"{clause} is not supported{_INSTEAD.get(clause.upper(), '')}"
    return ""


def _as_name(sql: str, found: re.Match[str]) -> str:
    """The query with the last word of a match as a quoted name."""
    word = re.split(r"\W", found[0])[-1]
    return sql[: found.end() - len(word)] + identifier(word.lower()) + sql[found.end() :]


def _ignored_modifier(sql: str, text: str, plan_of: PlanOf) -> str:
    """DISTINCT, FILTER or OVER of a call: nonsense in its place has a plan if it is ignored."""
    partners = parentheses(text)
    for found in _MODIFIER.finditer(text):
        kind, word = next((kind, word) for kind, word in found.groupdict().items() if word)
        opening = text.find("(", found.start(), found.end())
        end = partners.get(opening, found.end() - 1) + 1
        start = end if kind == "DISTINCT" else found.start()
        if kind == "DISTINCT" and _IGNORES_DISTINCT.fullmatch(name := _called(text, opening)):
            return f"{word} is not supported with {name}, which would ignore it"
        if plan_of(sql[:start] + _NONSENSE[kind] + sql[end:]):
            return f"{word} is not supported with a function of single rows"
    return ""


def _ignored_parameters(sql: str, text: str, plan_of: PlanOf) -> str:
    """The first of two pairs of parentheses of a call, as in ``f(1)(x)``."""
    for closing, opening in parentheses(text).items():
        if opening > closing or not text[closing + 1 :].lstrip().startswith("("):
            continue
        if plan_of(f"{sql[: opening + 1]}no_such_function(){sql[closing:]}"):
            ignored = f"{_called(text, opening)}{sql[opening : closing + 1]}"
            return f"{ignored} before other arguments is not supported"
    return ""


def _ignored_type(sql: str, text: str, plan_of: PlanOf) -> str:
    """The length or precision of a type: the plan is the same without it if it is ignored."""
    for found in _TYPE.finditer(text):
        kind = next(kind for kind, part in found.groupdict().items() if part)
        start, end = found.span(kind)
        without = sql[:start] + ("VARCHAR" if kind == "char" else "") + sql[end:]
        if plan_of(without) != plan_of(sql):
            continue
        if kind == "char" and plan_of(_as_name(sql, found)) == plan_of(sql):
            continue  # a name that is not used
        said = " ".join(found[0].split())
        if kind == "precision":
            return f"{said} is not supported: it would be a float32; write DOUBLE"
        return f"{said} is not supported: its length would be ignored; write left(text, n)"
    return ""


def are_paired(text: str) -> bool:
    """Whether each parenthesis of a text that `bare` made has its partner."""
    partners = parentheses(text)
    return len(partners) == text.count("(") + text.count(")")


def parentheses(text: str) -> dict[int, int]:
    """The position of each parenthesis -> that of its partner."""
    partners: dict[int, int] = {}
    opened = []
    for position, letter in enumerate(text):
        if letter == "(":
            opened.append(position)
        elif letter == ")" and opened:
            partner = opened.pop()
            partners.update({position: partner, partner: position})
    return partners


def _called(text: str, arguments: int) -> str:
    """The name of the function whose arguments begin there; empty if there is no plain name."""
    before = text[max(0, arguments - _LONGEST_NAME) : arguments].rstrip()
    return re.split(r"\W", before)[-1].lower()
