"""Small charts as SVG. Pure: numbers in, text out. They need no script and no other file.

Points are pairs of age in seconds and value, the oldest first. Where nothing was reported, nothing
is drawn. Labels are HTML beside the SVG, which is stretched: they keep their size at any width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from statistics import median_low

Points = Sequence[tuple[float, float]]
MOST_ROWS = 64  # of a heat map
_WIDTH, _HEIGHT = 1000, 100
_COLUMNS = 120  # of a heat map
_LEVELS = 5
_MIN_GAP_S, _GAP = 15.0, 3.0  # a longer pause, and this many times the usual one, is a gap
_ALL_LABELLED = 24  # rows of a heat map; of more rows, each fourth has a label


def line_chart(
    title: str,
    series: Sequence[tuple[str, Points]],
    *,
    span_s: float,
    most: float | None = None,
    percent: bool = False,
) -> str:
    """Values over time, the newest at the right edge.

    Args:
        series: names and points.
        span_s: age at the left edge.
        most: value at the top; None: the largest.
        percent: values are shares.
    """
    top = most or max((value for _, points in series for _, value in points), default=0.0) or 1.0
    span_s = max(span_s, 1.0)
    lines, keys, said = [], [], []
    for number, (name, points) in enumerate(series):
        path = "".join(_line(stretch, span_s, top) for stretch in stretches(points))
        lines.append(f'<path class="line{number}" d="{path}"/>')
        now = _value(points[-1][1], percent=percent) if points else "none"
        keys.append(f'<span class="key{number}">{escape(name)} {now}</span>')
        said.append(f"{name}: last {now}")
    label = (
        f"{title} over {_age(span_s)}, at most {_value(top, percent=percent)}; {'; '.join(said)}"
    )
    return (
        f'<figure><figcaption>{escape(title)} {" ".join(keys)}</figcaption><div class="plot">'
        f'<div class="y" aria-hidden="true"><span>{_value(top, percent=percent)}</span>'
        f'<span>0</span></div><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}"><path class="grid" '
        f'd="M0,0H{_WIDTH}M0,{_HEIGHT // 2}H{_WIDTH}M0,{_HEIGHT}H{_WIDTH}"/>{"".join(lines)}</svg>'
        f"{_ages(span_s)}</div></figure>"
    )


def heat_map(
    title: str,
    label: str,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    span_s: float,
) -> str:
    """Shares over time as colours: a row for each name, the newest at the right edge.

    Args:
        label: says in words what is to see.
        rows: at most `MOST_ROWS`; shares in [0, 1] from `columns`.
        span_s: age at the left edge.
    """
    rows = rows[:MOST_ROWS]
    if not rows:
        return ""
    cells: list[list[str]] = [[] for _ in range(_LEVELS)]
    for row, (_, shares) in enumerate(rows):
        for level, start, stop in _runs([_level(share) for share in shares]):
            if level is not None:
                cells[level].append(f"M{start},{row + 0.05:g}h{stop - start}v.9h{start - stop}z")
    paths = "".join(
        f'<path class="heat{level}" d="{"".join(parts)}"/>' for level, parts in enumerate(cells)
    )
    each = 1 if len(rows) <= _ALL_LABELLED else 4
    names = "".join(
        f"<span>{escape(name) if row % each == 0 else ''}</span>"
        for row, (name, _) in enumerate(rows)
    )
    kind = "" if each == 1 else " dense"
    return (
        f'<figure class="wide"><figcaption>{escape(title)} {_legend()}</figcaption>'
        f'<div class="plot heat{kind}" style="--rows: {len(rows)}">'
        f'<div class="y" aria-hidden="true">{names}</div>'
        f'<svg viewBox="0 0 {_COLUMNS} {len(rows)}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{paths}</svg>{_ages(span_s)}</div></figure>'
    )


def bar(share: float, text: str = "") -> str:
    """A share as a bar with a text, which says the same."""
    part = 100 * min(1.0, max(0.0, share))
    after = f"\N{NO-BREAK SPACE}{escape(text)}" if text else ""
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="all" width="100" height="10"/>'
        f'<rect class="part" width="{part:.1f}" height="10"/></svg>{after}'
    )


def stretches(points: Points) -> Iterator[Points]:
    """Points between gaps."""
    gap_s, start = _gap_s(points), 0
    for index, (before, point) in enumerate(pairwise(points), 1):
        if before[0] - point[0] > gap_s:
            yield points[start:index]
            start = index
    if points:
        yield points[start:]


def columns(points: Points, span_s: float) -> list[float | None]:
    """The largest value in each of equal parts of the time; None: nothing was reported."""
    found: list[float | None] = [None] * _COLUMNS
    gap_s, span_s = _gap_s(points), max(span_s, 1.0)

    def place(age_s: float) -> int:
        return int(_COLUMNS * (span_s - min(age_s, span_s)) / span_s)

    until = [*(age_s for age_s, _ in points[1:]), 0.0]  # a value holds until the next one
    for (age_s, value), until_s in zip(points, until, strict=False):
        first = min(place(age_s), _COLUMNS - 1)
        stop = place(until_s) if age_s - until_s <= gap_s else first
        for column in range(first, max(first + 1, stop)):
            known = found[column]
            found[column] = value if known is None else max(known, value)
    return found


def grouped(
    rows: Sequence[tuple[int, Sequence[float | None]]], most: int = MOST_ROWS
) -> list[tuple[str, list[float | None]]]:
    """Rows by rank, in at most ``most`` groups of neighbours; each shows its largest shares."""
    size = -(-len(rows) // most) if rows else 1
    groups = []
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        first, last = group[0][0], group[-1][0]
        name = str(first) if first == last else f"{first}-{last}"
        together = zip(*(shares for _, shares in group), strict=True)
        known = ([share for share in column if share is not None] for column in together)
        groups.append((name, [max(column, default=None) for column in known]))
    return groups


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 7200:
        return _age(seconds)
    return f"{seconds / 3600:.1f} h"


def _gap_s(points: Points) -> float:
    steps = [before[0] - point[0] for before, point in pairwise(points)]
    return max(_MIN_GAP_S, _GAP * median_low(steps)) if steps else _MIN_GAP_S


def _line(stretch: Points, span_s: float, top: float) -> str:
    places = [
        f"{_WIDTH * (1 - min(age_s, span_s) / span_s):.0f},"
        f"{_HEIGHT * (1 - min(value, top) / top):.1f}"
        for age_s, value in stretch
    ]
    return f"M{'L'.join(places)}{'h1' if len(places) == 1 else ''}"  # one alone is a dot


def _ages(span_s: float) -> str:
    return (
        f'<div class="x" aria-hidden="true"><span>{_age(span_s)} ago</span>'
        f"<span>{_age(span_s / 2)} ago</span><span>now</span></div>"
    )


def _legend() -> str:
    steps = (
        f'<span><i class="heat{level}"></i>{100 * level // _LEVELS}'
        f"-{100 * (level + 1) // _LEVELS}%</span>"
        for level in range(_LEVELS)
    )
    return f'<span class="legend">{"".join(steps)}<span><i></i>no report</span></span>'


def _level(share: float | None) -> int | None:
    return None if share is None else min(_LEVELS - 1, int(share * _LEVELS))


def _runs(levels: Sequence[int | None]) -> list[tuple[int | None, int, int]]:
    """Runs of equal levels: level, start, stop."""
    runs: list[tuple[int | None, int, int]] = []
    for index, level in enumerate(levels):
        if runs and runs[-1][0] == level:
            runs[-1] = (level, runs[-1][1], index + 1)
        else:
            runs.append((level, index, index + 1))
    return runs


def _value(value: float, *, percent: bool) -> str:
    if percent:
        return f"{value:.0%}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
