"""What the page of a cache says of jobs."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.status import CacheStatus
from cache_server.web.html import View
from cache_server.web.page import page
from tests.made_up_jobs import ENDED, NODES, ended, job
from tests.node_statuses import STATUS


def html(*jobs: pb.JobInfo, asked: tuple[pb.JobInfo, ...] = (), query: str = "") -> str:
    """The page of a coordinator with these jobs."""
    cache = CacheStatus(NODES, (), jobs, asked)
    return page(replace(STATUS, cache=cache), View.of(query))


def words(text: str) -> str:
    """Without tags and style."""
    body = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


@pytest.mark.parametrize(
    ("size", "ranks", "title"),
    [
        (1, "1 of 1", "Ranks"),
        (16, "16 of 16", "Ranks"),
        (1024, "1,024 of 1,024", "The 16 of 1,024"),
    ],
)
def test_a_running_job_shows_verdict_and_progress_before_everything_else_of_it(
    size: int, ranks: str, title: str
) -> None:
    made = job(size)
    shown = words(html(made, asked=(made,)))

    parts = [
        "Running jobs", "train", "compute bound: no rank waits more than 7%", "for 5 min",
        "epoch 3, step 4,210 of 9,800 (43%)", f"ranks {ranks}", "rows/s", "no report", title,
        "Datasets", "Nodes node state", "This node",
    ]  # fmt: skip
    places = [shown.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    "verdict",
    [
        "ranks disagree: two processes are rank 0 of 8",
        "rank 3 is slow: 53 ms a step in transform",
        "ranks 3, 9 are slow: up to 53 ms a step in transform",
        "input bound: each rank waits up to 40%: 35 ms a step in transform",
        "input bound: node a1 serves 71% of the rows",
    ],
)
def test_a_running_job_that_waits_is_red(verdict: str) -> None:
    assert f'<p class="verdict bad">{verdict}' in html(job(16, verdict=verdict))


def test_a_verdict_calls_a_node_by_its_name() -> None:
    verdict = f"input bound: node {NODES[1].id} is slow: 90% of the waits are for it"

    assert f"node lineitem-cache-1 ({NODES[1].id}) is slow" in html(job(4, verdict=verdict))


def test_a_job_without_some_of_its_ranks_says_so_in_red() -> None:
    assert '<span class="bad">7 of 8</span>' in html(job(8, num_ranks=7))


def test_only_the_ranks_that_were_asked_for_are_shown() -> None:
    made = job(1024, range(192, 208))
    whole = html(made, asked=(made,))
    part = html(made, asked=(made,), query="job=train&ranks=192-255")

    assert 'href="?job=train&amp;ranks=192-255">192-255</a>' in whole
    assert ">192-207</span>" in whole, "16 ranks are a row"
    assert "waits for data, by rank 192 to 255" in part
    assert "The 16 of ranks 192 to 255 that wait most" in part
    assert ">196</span>" in part, "a rank is a row"


def test_jobs_that_failed_or_fell_silent_are_shown_and_the_other_ended_ones_are_folded() -> None:
    shown = words(html(job(1), *ENDED))

    assert "crashed or hangs: rank 3 was last heard of" in shown
    assert "failed: rank 0 raised an error" in shown
    assert "finished epoch" not in shown and "stopped at" not in shown
    assert "Show all 33 ended jobs" in shown
    assert "30 finished, 1 crashed or hang, 1 stopped, 1 failed" in shown
    assert shown.index("Running jobs") < shown.index("Ended jobs") < shown.index("Datasets")


def test_an_open_fold_shows_the_newest_ended_jobs_and_stays_open() -> None:
    opened = html(*ENDED, query="show=ended")

    assert 'aria-expanded="true">Hide all 33 ended jobs' in opened
    assert opened.count("<li>") == 20 + 1  # and a lost node
    assert "stopped at step 5 of 100 of epoch 0" in opened
    assert 'href="?job=sweep-1&amp;show=ended"' in opened, "a link keeps it open"


@pytest.mark.parametrize(
    ("end", "verdict", "is_red"),
    [
        (pb.PASS_END_FINISHED, "finished epoch 4", False),
        (pb.PASS_END_STOPPED, "stopped at step 5", False),
        (pb.PASS_END_FAILED, "failed: rank 0 raised an error", True),
        (pb.PASS_END_UNSPECIFIED, "crashed or hangs", True),
    ],
)
def test_an_ended_job_is_red_where_someone_must_act(
    end: pb.PassEnd.ValueType, verdict: str, is_red: bool
) -> None:
    over = ended("over", end, verdict)
    asked = html(over, asked=(over,), query="job=over")

    assert ('<span class="bad">' + verdict in html(over, query="show=ended")) is is_red
    assert (f'<p class="verdict bad">{verdict}' in asked) is is_red


def test_a_job_that_has_not_reported_is_named() -> None:
    assert "no reader of a job &lt;b&gt; has reported" in html(query="job=<b>")
    assert "No training job reads from this cache now." in html()


@pytest.mark.parametrize(
    "query", ["ranks=9-", "ranks=a-b", "ranks=\u0661-\u0662", "ranks=-1-3", "ranks=", ""]
)
def test_an_odd_range_of_ranks_means_all(query: str) -> None:
    assert View.of(query).ranks is None


def test_a_view_is_the_same_after_its_link() -> None:
    view = View("a b&c", (3, 9), frozenset({"ended", "errors"}), paused=True)

    assert View.of(view.query[1:]) == view


def test_the_page_has_no_script_and_asks_no_other_server() -> None:
    made = job(8)
    shown = html(made, *ENDED, asked=(made,))

    assert not re.search(r"<script|src=|url\(|@import|http-equiv", shown)
    assert "prefers-color-scheme: dark" in shown


def test_names_are_escaped() -> None:
    odd: dict[str, Any] = {
        "dataset": "<img>",
        "verdict": "<script>",
        "name": '"><b>',
        "view": "<i>",
    }
    made = job(2, **odd)

    shown = html(made, asked=(made,), query='job="><b>')

    assert not re.search(r"<img|<script|<b>|<i>", shown.replace("<i></i>", ""))


def test_a_page_of_1024_ranks_and_100_datasets_is_small_and_fast() -> None:
    datasets = tuple(pb.DatasetInfo(spec=pb.DatasetSpec(name=f"d{n}")) for n in range(100))
    big = job(1024, range(0, 1024, 3))
    begun = time.process_time()

    shown = page(replace(STATUS, cache=CacheStatus(NODES, datasets, (big,), (big,))))

    assert time.process_time() - begun < 1.0
    assert len(shown) < 200_000
