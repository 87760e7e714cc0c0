"""Charts as SVG: what they show, and what they do not draw."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from cache_server.web.charts import bar, columns, grouped, heat_map, line_chart, stretches


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each stroke of the first line."""
    (path,) = [e for e in ElementTree.fromstring(svg).iter("path") if e.get("class") == "line0"]
    return [
        [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", stroke)]
        for stroke in path.attrib["d"].split("M")[1:]
    ]


def test_a_line_goes_from_the_oldest_value_at_the_left_to_the_newest_at_the_right() -> None:
    svg = line_chart("rows/s", [("all", [(60.0, 0.0), (50.0, 10.0), (0.0, 2500.0)])], span_s=60)

    assert lines(svg)[0][0] == (0, 100)
    assert lines(svg)[-1][-1] == (1000, 0)
    assert "60 s ago" in svg
    assert 'aria-label="rows/s over 60 s, at most 2.5k; all: last 2.5k"' in svg


def test_a_time_without_reports_is_a_gap_and_not_a_slope() -> None:
    """One report each 5 s, and none for 65 s."""
    points = [(float(age), 100.0) for age in (90, 85, 80, 15, 10, 5)]

    assert [[age for age, _ in part] for part in stretches(points)] == [[90, 85, 80], [15, 10, 5]]
    assert [len(stroke) for stroke in lines(line_chart("x", [("a", points)], span_s=90))] == [3, 3]


@pytest.mark.parametrize("step_s", [2, 10, 40])
def test_reports_that_come_seldom_but_evenly_have_no_gap(step_s: int) -> None:
    points = [(float(age), 1.0) for age in range(20 * step_s, 0, -step_s)]

    assert len(list(stretches(points))) == 1


def test_a_single_value_between_gaps_is_a_dot() -> None:
    points = [(100.0, 1.0), (98.0, 1.0), (60.0, 1.0), (4.0, 1.0), (2.0, 1.0)]

    assert "h1" in line_chart("x", [("a", points)], span_s=100)


def test_the_columns_of_a_heat_map_keep_the_worst_value_and_are_empty_in_a_gap() -> None:
    found = columns([(120.0, 0.1), (115.0, 0.9), (110.0, 0.2), (20.0, 0.3), (15.0, 0.4)], 120.0)

    assert (found[0], found[5], found[10]) == (0.1, 0.9, 0.2)
    assert found[20:100] == [None] * 80
    assert (found[100], found[-1]) == (0.3, 0.4), "the last value holds until now"
    worst = columns([(float(age), age == 3000) for age in range(3600, 0, -5)], 3600.0)
    assert [place for place, share in enumerate(worst) if share] == [20]


def test_a_heat_map_has_a_legend_and_says_what_no_report_is() -> None:
    svg = heat_map("waits", "waits; now most rank 1", [("0", [0.1]), ("1", [None])], span_s=60)

    legend = re.sub("<[^>]+>", " ", svg)
    assert all(f"{low}-{low + 20}%" in legend for low in range(0, 100, 20))
    assert "no report" in legend
    assert 'aria-label="waits; now most rank 1"' in svg


@pytest.mark.parametrize(
    "chart",
    [line_chart("x", [], span_s=0), heat_map("x", "", [("<", [2.0, -1.0])], span_s=0), bar(2, "<")],
)
def test_charts_of_nothing_and_of_odd_values_are_well_formed(chart: str) -> None:
    ElementTree.fromstring(f"<div>{chart}</div>")


@pytest.mark.parametrize(("num_ranks", "rows"), [(1, 1), (8, 8), (64, 64), (1000, 63)])
def test_ranks_are_grouped_so_that_the_worst_of_each_group_is_seen(
    num_ranks: int, rows: int
) -> None:
    shares: Sequence[tuple[int, list[float | None]]] = [
        (rank, [None, float(rank == 713)]) for rank in range(num_ranks)
    ]

    groups = grouped(shares)

    assert len(groups) == rows
    assert all(values[0] is None for _, values in groups)
    if num_ranks == 1000:
        assert [name for name, values in groups if values[-1]] == ["704-719"]
