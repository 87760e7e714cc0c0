"""Pieces of the page: a view in the address, tables, escaped texts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any
from urllib.parse import parse_qs, urlencode

NUMBERS = {"rows", "shards", "size", "served", "sealed", "loading", "failed", "count", "rank"} | {
    *("a step", "transform", "fetch", "rows/s", "step", "share of rows", "share of waits"),
}
"""Columns of numbers; the other columns hold words."""


class Alert(str):
    """Shown in red."""


class Html(str):
    """Shown as it is: its maker has escaped it."""


@dataclass(frozen=True)
class View:
    """What a person asked to see. It is in the address, so it lasts when the page loads anew.

    Attributes:
        job: whose ranks to show.
        ranks: first and last of those to show; None: all.
        shown: names of the folds that are open.
        paused: the page does not load anew.
    """

    job: str = ""
    ranks: tuple[int, int] | None = None
    shown: frozenset[str] = frozenset()
    paused: bool = False

    @classmethod
    def of(cls, query: str) -> View:
        """The view of the query of an address; what it does not know it leaves out."""
        given = parse_qs(query)
        first, _, last = given.get("ranks", [""])[-1].partition("-")
        is_range = all(
            each.isascii() and each.isdigit() and len(each) < 10 for each in (first, last)
        )
        return cls(
            given.get("job", [""])[-1],
            (int(first), int(last)) if is_range else None,
            frozenset(given.get("show", ())),
            "pause" in given,
        )

    @property
    def query(self) -> str:
        """For a link to this view; with its question mark."""
        pairs = [("job", self.job)] if self.job else []
        pairs += [("ranks", f"{self.ranks[0]}-{self.ranks[1]}")] if self.ranks else []
        pairs += [("show", name) for name in sorted(self.shown)]
        pairs += [("pause", "1")] if self.paused else []
        return f"?{urlencode(pairs)}"

    def link(self, text: str, attributes: str = "", **changes: Any) -> Html:
        """A link to this view with changes."""
        to = escape(replace(self, **changes).query)
        return Html(f'<a href="{to}"{attributes}>{escape(text)}</a>')

    def fold(self, name: str, text: str) -> Html:
        """A link that opens or closes a fold."""
        is_open = name in self.shown
        return self.link(
            f"{'Hide' if is_open else 'Show'} {text}",
            f' aria-expanded="{str(is_open).lower()}"',
            shown=self.shown ^ {name},
        )


def section(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    level: int = 2,
    of: str = "",
) -> str:
    """A table with its heading.

    Args:
        level: of the heading.
        of: what the title is of, if the page may have several.
    """
    lines = ["".join(map(_cell, header, row)) for row in rows]
    heading = f"<h{level}>{escape(title)}</h{level}>"
    if not lines:
        return f"<section>{heading}<p>none</p></section>"
    names = "".join(_cell(name, name, "th", ' scope="col"') for name in header)
    label = escape(f"{title} {of}".strip())
    # It scrolls where it is too wide, also by keys.
    return (
        f'<section>{heading}<div class="table" role="region" tabindex="0" '
        f'aria-label="{label}">'
        f"<table><thead><tr>{names}</tr></thead>"
        f"<tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table></div></section>"
    )


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values."""
    lines = (f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return f"<dl>{''.join(lines)}</dl>"


def text(value: object) -> str:
    """A value, escaped."""
    if isinstance(value, Html):
        return value
    shown = escape(str(value))
    return f'<span class="bad">{shown}</span>' if isinstance(value, Alert) else shown


def _cell(column: str, value: object, tag: str = "td", attributes: str = "") -> str:
    kind = ' class="number"' if column in NUMBERS else ""
    return f"<{tag}{attributes}{kind}>{text(value)}</{tag}>"
