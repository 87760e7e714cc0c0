"""Charts as SVG: what they show, and that they stay small."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.status import CacheStatus
from cache_server.web.charts import bar, grouped, heat_map, line_chart
from cache_server.web.page import page
from tests.node_statuses import STATUS


def job(num_ranks: int, **changes: object) -> pb.JobInfo:
    made = pb.JobInfo(
        name="train", dataset="trips", live=True, world_size=num_ranks, num_steps=100,
        verdict="rank 1 is slow: 40 ms a step in transform",
        ranks=[
            pb.RankInfo(rank=rank, wait_share=rank / num_ranks, wait_history=[0.1, 0.9])
            for rank in range(num_ranks)
        ],
        nodes=[pb.NodeShare(node_id=f"n{node}", rows_share=0.1) for node in range(30)],
        history=[pb.JobSample(age_s=240 - age, rows_per_s=age) for age in range(240)],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_line_goes_from_the_oldest_value_at_the_left_to_the_newest_at_the_right() -> None:
    svg = line_chart("rows/s", [("all", [(60.0, 0.0), (0.0, 2500.0)])], span_s=60)

    figure = ElementTree.fromstring(svg)
    (line,) = figure.iter("polyline")
    (x0, y0), (x1, y1) = (map(float, at.split(",")) for at in line.attrib["points"].split())
    assert x0 < x1
    assert y0 > y1
    assert "2.5k" in svg
    assert "60 s ago" in svg


@pytest.mark.parametrize("chart", [line_chart("x", [], span_s=0), heat_map("x", []), bar(2.0, "<")])
def test_charts_of_nothing_and_of_odd_values_are_well_formed(chart: str) -> None:
    ElementTree.fromstring(f"<div>{chart}</div>")


@pytest.mark.parametrize(("num_ranks", "rows"), [(1, 1), (8, 8), (64, 64), (1000, 63)])
def test_ranks_are_grouped_so_that_the_worst_of_each_group_is_seen(
    num_ranks: int, rows: int
) -> None:
    shares = [(rank, [0.0, float(rank == 713)]) for rank in range(num_ranks)]

    groups = grouped(shares)

    assert len(groups) == rows
    if num_ranks == 1000:
        assert [name for name, values in groups if values[-1]] == ["704-719"]


def test_the_page_shows_jobs_and_the_ranks_of_the_one_that_is_asked_for() -> None:
    cache = CacheStatus((), (), (job(8),), ())

    overview = page(replace(STATUS, cache=cache))
    asked = page(replace(STATUS, cache=replace(cache, job=(job(8),))), "train")

    assert '<a href="?job=train">train</a>' in overview
    assert "rank 1 is slow" in overview
    assert overview.count("<svg") >= 2
    assert "waits for data, by rank" not in page(replace(STATUS, cache=replace(cache, jobs=())))
    assert "waits for data, by rank" in asked
    assert "no reader of a job &lt;b&gt; has reported" in page(replace(STATUS, cache=cache), "<b>")


@pytest.mark.parametrize(
    ("changes", "is_red"),
    [
        ({"verdict": "compute bound: no rank waits more than 5%"}, False),
        ({"verdict": "ranks disagree: two processes are rank 0 of 1"}, True),
        ({"live": False, "verdict": "finished epoch 4", "end": pb.PASS_END_FINISHED}, False),
        ({"live": False, "verdict": "stopped at step 5", "end": pb.PASS_END_STOPPED}, False),
        ({"live": False, "verdict": "failed: rank 0 raised", "end": pb.PASS_END_FAILED}, True),
        ({"live": False, "verdict": "crashed or hangs", "end": pb.PASS_END_UNSPECIFIED}, True),
    ],
)
def test_a_verdict_is_red_where_someone_must_act(changes: dict[str, object], is_red: bool) -> None:
    shown = job(2, **changes)
    shown.num_ranks = 1

    html = page(replace(STATUS, cache=CacheStatus((), (), (shown,), (shown,))), "train")

    assert "1 of 2" in html
    for red in (f'<span class="bad">{shown.verdict}', f'<td class="bad">{shown.verdict}'):
        assert (red in html) is is_red


def test_the_page_has_no_script_and_asks_no_other_server() -> None:
    html = page(replace(STATUS, cache=CacheStatus((), (), (job(8),), (job(8),))), "train")

    assert not re.search(r"<script|src=|url\(|@import", html)
    assert "prefers-color-scheme: dark" in html


def test_names_are_escaped() -> None:
    odd = job(2, dataset="<img>", verdict="<script>")

    html = page(replace(STATUS, cache=CacheStatus((), (), (odd,), (odd,))), "train")

    assert "<img>" not in html
    assert "<script>" not in html


def test_a_page_of_1000_ranks_and_100_datasets_is_small_and_fast() -> None:
    datasets = tuple(pb.DatasetInfo(spec=pb.DatasetSpec(name=f"d{n}")) for n in range(100))
    big = job(1000)
    begun = time.process_time()

    html = page(replace(STATUS, cache=CacheStatus((), datasets, (big,), (big,))), "train")

    assert time.process_time() - begun < 1.0
    assert len(html) < 200_000
