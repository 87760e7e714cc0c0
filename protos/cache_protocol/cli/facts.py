"""Facts, each a name and a text, as lines for a prompt and as HTML for a notebook. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_FLOAT_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_FLOATS = re.compile(rf"\b({'|'.join(_FLOAT_NAMES)})\b")


def printable(text: str) -> str:
    """``text`` with control characters escaped as in Python, so that no terminal obeys them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(number: int, what: str) -> str:
    """A number with its noun, such as ``1 row`` and ``2,000 rows``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def type_name(dtype: object) -> str:
    """The name of an Arrow type, with floats named as in torch and numpy."""
    return _FLOATS.sub(lambda found: _FLOAT_NAMES[found[0]], str(dtype))


def facts_text(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A title, and one line for each fact."""
    shown = [(printable(name), printable(text)) for name, text in facts]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join([printable(title), *(f"  {name:<{width}}  {text}" for name, text in shown)])


def facts_html(
    title: str,
    facts: Iterable[tuple[str, str]],
    header: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
) -> str:
    """A title, a table of facts, and a further table. Every text is escaped.

    Args:
        header, rows: of the further table; without a header there is none.
    """
    parts = [f"<b>{_html(title)}</b>", _table(facts, "th")]
    if header:
        head = "".join(f"<th>{_html(name)}</th>" for name in header)
        parts.append(_table(rows, "td", f"<thead><tr>{head}</tr></thead>"))
    return f"<div>{''.join(parts)}</div>"


def _table(rows: Iterable[Sequence[str]], first: str, head: str = "") -> str:
    lines = []
    for row in rows:
        cells = [f"<{first}>{_html(text)}</{first}>" for text in row[:1]]
        cells += [f"<td>{_html(text)}</td>" for text in row[1:]]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"


def _html(text: str) -> str:
    return escape(printable(text))
