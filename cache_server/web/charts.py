"""Small charts as SVG. Pure: numbers in, text out. They need no script and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 460, 110
_LEFT, _BOTTOM = 48, 16  # for the scales
_CELL, _MAX_ROWS = 12, 64  # of a heat map
_LEVELS = 5


def line_chart(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    span_s: float,
    most: float | None = None,
    percent: bool = False,
) -> str:
    """Values over time, the newest at the right edge.

    Args:
        series: names, and pairs of age in seconds and value.
        span_s: age at the left edge.
        most: value at the top; None: the largest.
        percent: values are shares.
    """
    top = most or max((value for _, points in series for _, value in points), default=0.0) or 1.0
    span_s = max(span_s, 1.0)

    def at(age_s: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT) * (1 - min(age_s, span_s) / span_s)
        y = 4 + (_HEIGHT - _BOTTOM - 4) * (1 - min(value, top) / top)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f'<polyline class="line{number}" points="{" ".join(at(*point) for point in points)}">'
        f"<title>{escape(name)}</title></polyline>"
        for number, (name, points) in enumerate(series)
    )
    legend = "".join(
        f'<span class="key{number}">{escape(name)}</span>'
        for number, (name, _) in enumerate(series)
    )
    base = _HEIGHT - _BOTTOM
    scale = (
        f'<path class="grid" d="M{_LEFT},4H{_WIDTH}M{_LEFT},{base}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 4}" y="12" class="end">{_value(top, percent=percent)}</text>'
        f'<text x="{_LEFT - 4}" y="{base}" class="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 2}">{_age(span_s)} ago</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 2}" class="end">now</text>'
    )
    return (
        f"<figure><figcaption>{escape(title)} {legend}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{scale}{lines}</svg></figure>"
    )


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Shares over time as colours: a row for each name, the newest at the right edge.

    Args:
        rows: at most `_MAX_ROWS`; shares in [0, 1], the oldest first.
    """
    columns = max((len(shares) for _, shares in rows), default=0)
    if not columns:
        return ""
    width = max(1, (_WIDTH - _LEFT) // columns)
    cells = []
    for number, (name, shares) in enumerate(rows[:_MAX_ROWS]):
        y = number * _CELL
        cells.append(f'<text x="{_LEFT - 4}" y="{y + _CELL - 2}" class="end">{escape(name)}</text>')
        first = columns - len(shares)
        for level, start, stop in _runs([_level(share) for share in shares]):
            most = max(shares[start:stop])
            cells.append(
                f'<rect class="heat{level}" x="{_LEFT + (first + start) * width}" y="{y}" '
                f'width="{(stop - start) * width}" height="{_CELL - 1}">'
                f"<title>{escape(name)}: {most:.0%}</title></rect>"
            )
    height = _CELL * len(rows[:_MAX_ROWS])
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_LEFT + columns * width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(cells)}</svg></figure>'
    )


def bar(share: float, text: str = "") -> str:
    """A share as a bar with a text."""
    part = 100 * min(1.0, max(0.0, share))
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{part:.0f}%"><rect class="all" width="100" height="10"/>'
        f'<rect class="part" width="{part:.1f}" height="10"/></svg> {escape(text)}'
    )


def grouped(
    rows: Sequence[tuple[int, Sequence[float]]], most: int = _MAX_ROWS
) -> list[tuple[str, list[float]]]:
    """Rows by rank, in at most ``most`` groups of neighbours; each shows its largest shares."""
    size = -(-len(rows) // most) if rows else 1
    groups = []
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        first, last = group[0][0], group[-1][0]
        length = max(len(shares) for _, shares in group)
        padded = [[0.0] * (length - len(shares)) + list(shares) for _, shares in group]
        name = str(first) if first == last else f"{first}-{last}"
        groups.append((name, [max(column) for column in zip(*padded, strict=True)]))
    return groups


def _level(share: float) -> int:
    return min(_LEVELS - 1, int(share * _LEVELS))


def _runs(levels: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of equal levels: level, start, stop."""
    runs: list[tuple[int, int, int]] = []
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
