"""SQL that DataFusion parses and then ignores, so that other rows would come of it than are meant.

Also what it takes to mean something else than everybody does.

The text says where such a clause may stand, and DataFusion whether it is one: by the plan of the
query with that place changed. A word that is but a name may be quoted and nothing changes; of a
modifier that is heeded nonsense cannot be planned. Knows DataFusion by one function only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from cache_server.sql.quoting import identifier

PlanOf = Callable[[str], str]

# DataFusion parses these and does nothing about them.
_IGNORED = re.compile(
    r"\b(TABLESAMPLE|SAMPLE|PARTITION(?!\s+BY\b)|PREWHERE|CONNECT\s+BY"
    r"|WITH\s+(ROLLUP|CUBE|TOTALS|ORDINALITY)|SIMILAR\s+TO)\b|\*\s*ILIKE\b",
    re.IGNORECASE,
)
_INSTEAD = {"SIMILAR TO": ": it would be taken for ~; write ~, of a regular expression, or LIKE"}
# And what is said of a type. CHAR means CHAR(1), and FLOAT(25) is a double in the standard.
_OF_A_TYPE = re.compile(
    r"\b(?P<text>VARCHAR|CHAR|STRING)\s*(?P<length>\(\s*\d[\d\s\w]*\))|\b(?P<char>CHAR)\b"
    r"|\bFLOAT\s*(?P<precision>\(\s*(2[5-9]|[3-9]\d|\d{3,}|\d+\s*,\s*\d+)\s*\))",
    re.IGNORECASE,
)
# And these, where the function is neither an aggregate nor one of a window.
_OF_A_CALL = re.compile(
    r"\(\s*(?P<DISTINCT>DISTINCT)\b|\b(?P<FILTER>FILTER)\s*\(|\b(?P<OVER>OVER)\s*(\(|\w+|\"+)",
    re.IGNORECASE,
)
_NONSENSE = {  # of a function that does not exist: no plan, unless it is ignored
    "DISTINCT": " FILTER (WHERE no_such_function())",
    "FILTER": " FILTER (WHERE no_such_function())",
    "OVER": " OVER (ORDER BY no_such_function())",
}
# Some of which pass over DISTINCT all the same, though their plan shows it.
_PASSES_OVER_DISTINCT = re.compile(
    r"lag|lead|nth_value|approx_percentile_cont(_with_weight)?|corr|covar(_pop|_samp)?|regr_\w+"
)
_LONGEST_NAME = 100  # of a function, and the spaces behind it
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
    return (
        _ignored(sql, text, plan_of)
        or _ignored_of_a_call(sql, text, plan_of)
        or _ignored_parameters(sql, text, plan_of)
        or _ignored_of_a_type(sql, text, plan_of)
    )


def bare(sql: str) -> str:
    """The query, as long as it is, without what stands in quotes and comments.

    Comments become spaces, so that words stay apart; what is quoted becomes quotation marks.
    """
    return _QUOTED.sub(lambda found: (" " if found["comment"] else '"') * len(found[0]), sql)


def _ignored(sql: str, text: str, plan_of: PlanOf) -> str:
    """What is wrong with a clause that DataFusion ignores; empty if there is none.

    A word that is but a name may be quoted and nothing changes: so names are told from clauses.

    Args:
        text: the query as `bare` leaves it.
    """
    clauses = list(_IGNORED.finditer(text))
    if not clauses:
        return ""
    plan = plan_of(sql)
    if plan_of(_with_names(sql, clauses)) == plan:
        return ""
    for found in clauses:
        if plan_of(_with_names(sql, [found])) != plan:
            clause = " ".join(found[0].split())
            return f"{clause} is not supported{_INSTEAD.get(clause.upper(), '')}"
    return ""


def _with_names(sql: str, clauses: Sequence[re.Match[str]]) -> str:
    """The query with the last words of these clauses as quoted names."""
    for found in reversed(clauses):
        word = re.split(r"\W", found[0])[-1]
        end = found.end()
        sql = sql[: end - len(word)] + identifier(word.lower()) + sql[end:]
    return sql


def _ignored_of_a_call(sql: str, text: str, plan_of: PlanOf) -> str:
    """The same of what is said of a call: nonsense in its place has a plan only if it is ignored.

    Args:
        text: the query as `bare` leaves it.
    """
    partners = _parentheses(text)
    heeded = set()  # whether it is depends on the function alone
    for found in _OF_A_CALL.finditer(text):
        kind, word = next((kind, word) for kind, word in found.groupdict().items() if word)
        opening = text.find("(", found.start(), found.end())
        end = partners.get(opening, found.end() - 1) + 1
        start = end if kind == "DISTINCT" else found.start()
        before = text[: found.start()].rstrip()
        arguments = opening if kind == "DISTINCT" else partners.get(len(before) - 1, 0)
        name = _called(text, arguments)
        if kind == "DISTINCT" and _PASSES_OVER_DISTINCT.fullmatch(name):
            return f"{word} is not supported with {name}, which would ignore it"
        call = kind, name or start
        if call not in heeded and plan_of(sql[:start] + _NONSENSE[kind] + sql[end:]):
            return f"{word} is not supported with a function of single rows"
        heeded.add(call)
    return ""


def _ignored_parameters(sql: str, text: str, plan_of: PlanOf) -> str:
    """The same of the first parentheses of two behind a function, as of ``f(1)(x)``.

    Args:
        text: the query as `bare` leaves it.
    """
    for closing, opening in _parentheses(text).items():
        if opening > closing or not text[closing + 1 :].lstrip().startswith("("):
            continue
        if plan_of(f"{sql[: opening + 1]}no_such_function(){sql[closing:]}"):
            ignored = f"{_called(text, opening)}{sql[opening : closing + 1]}"
            return f"{ignored} before other arguments is not supported"
    return ""


def _ignored_of_a_type(sql: str, text: str, plan_of: PlanOf) -> str:
    """The same of the length of a type: without it the plan is the same only if it is ignored.

    Args:
        text: the query as `bare` leaves it.
    """
    for found in _OF_A_TYPE.finditer(text):
        kind = "precision" if found["precision"] else "char" if found["char"] else "length"
        start, end = found.span(kind)
        without = sql[:start] + ("VARCHAR" if kind == "char" else "") + sql[end:]
        if plan_of(without) != plan_of(sql):
            continue
        if kind == "char" and plan_of(_with_names(sql, [found])) == plan_of(sql):
            continue  # a name that is not used
        said = " ".join(found[0].split())
        if kind == "precision":
            return f"{said} is not supported: it would be a float32; write DOUBLE"
        return f"{said} is not supported: its length would be ignored; write left(text, n)"
    return ""


def _parentheses(text: str) -> dict[int, int]:
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
    """The name of the function whose arguments begin there; empty if no plain name stands there."""
    before = text[max(0, arguments - _LONGEST_NAME) : arguments].rstrip()
    name = re.split(r"\W", before)[-1].lower()
    return "" if name in ("filter", "group") else name
