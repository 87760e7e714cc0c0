"""What a job waits for, judged from what its ranks did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cache_server.jobs import verdict as verdicts
from cache_server.jobs.ranks import NodeWindow, Ranks, RankWindow


def judge(windows: Sequence[RankWindow]) -> verdicts.Verdict:
    return verdicts.judge(Ranks(windows))


def rank(number: int = 0, **changes: object) -> RankWindow:
    """A rank that computes for 100 ms a step, and never waits."""
    window = RankWindow(number, 100, elapsed_s=10.0, waited_s=0.1, computed_s=9.9, rows=1000)
    return replace(window, **changes)  # type: ignore[arg-type]


def waiting(number: int = 0, **changes: object) -> RankWindow:
    """A rank that waits for data half of its time."""
    given: dict[str, object] = {"waited_s": 5.0, "computed_s": 5.0, "fetch_s": 5.0, **changes}
    return rank(number, **given)


def test_a_job_whose_ranks_hardly_wait_is_compute_bound() -> None:
    verdict = judge([rank(0), rank(1, waited_s=0.5, computed_s=9.5)])

    assert verdict.kind == "compute bound"
    assert "no rank waits more than 5%" in verdict.text


def test_a_job_without_a_batch_has_no_verdict() -> None:
    assert judge([]).kind == judge([rank(batches=0)]).kind == "unknown"


def test_the_rank_that_waits_much_more_for_data_than_the_others_is_slow() -> None:
    slow = rank(3, waited_s=8.0, computed_s=2.0, transform_s=7.5)

    verdict = judge([rank(0), rank(1), rank(2), slow])

    assert (verdict.kind, verdict.ranks) == ("slow rank", {3})
    assert verdict.text == "rank 3 is slow: 75 ms a step in transform"


def test_a_single_rank_that_waits_is_no_slow_rank() -> None:
    verdict = judge([waiting()])

    assert verdict.kind == "input bound"
    assert verdict.text == "input bound: each rank waits up to 50%: 50 ms a step for rows of nodes"


def test_waits_for_local_files_are_told_from_those_for_nodes() -> None:
    assert "rows of local files" in judge([waiting(local_rows=1000)]).text


@pytest.mark.parametrize(
    ("of_a", "of_b", "text"),
    [
        (NodeWindow(600, 1.0), NodeWindow(400, 1.0), "input bound: each rank"),
        (NodeWindow(710, 1.0), NodeWindow(290, 1.0), "input bound: node a serves 71% of the rows"),
        (
            NodeWindow(500, 0.5),
            NodeWindow(500, 4.5),
            "input bound: node b is slow: 90% of the waits are for it, and it serves 50% of",
        ),
    ],
)
def test_a_hot_and_a_slow_node_are_named(of_a: NodeWindow, of_b: NodeWindow, text: str) -> None:
    verdict = judge([waiting(number, nodes={"a": of_a, "b": of_b}) for number in range(2)])

    assert verdict.text.startswith(text)


def test_a_node_is_not_blamed_for_a_slow_transform() -> None:
    nodes = {"a": NodeWindow(500, 0.1), "b": NodeWindow(500, 0.9)}

    verdict = judge([waiting(n, fetch_s=1.0, transform_s=4.0, nodes=nodes) for n in range(2)])

    assert verdict.node is None
    assert "40 ms a step in transform" in verdict.text


def slow_ranks(num_ranks: int, waits: dict[int, float]) -> verdicts.Verdict:
    """The verdict on a job with slow ranks; each waits so many of 10 s."""
    return judge(
        [
            rank(each, waited_s=waits[each], computed_s=10 - waits[each], transform_s=waits[each])
            if each in waits
            else rank(each)
            for each in range(num_ranks)
        ]
    )


def test_two_slow_ranks_that_take_turns_are_one_verdict_that_holds() -> None:
    first, second = slow_ranks(16, {3: 8.0, 9: 7.0}), slow_ranks(16, {3: 7.0, 9: 8.0})

    assert first.text == second.text == "ranks 3, 9 are slow: up to 80 ms a step in transform"
    assert first.goes_on_as(second)
    assert first.goes_on_as(slow_ranks(16, {9: 8.0})), "one of them is still slow"
    assert not first.goes_on_as(slow_ranks(16, {4: 8.0})), "another one is"


def test_many_slow_ranks_are_counted_and_some_of_them_are_named() -> None:
    verdict = slow_ranks(1024, dict.fromkeys(range(192, 208), 8.0))

    assert verdict.text.startswith("ranks 192, 193, 194, 195 and 12 more are slow: up to")


def test_a_verdict_that_differs_in_numbers_only_goes_on() -> None:
    assert judge([waiting()]).goes_on_as(judge([waiting(waited_s=6.0)]))
    assert not judge([waiting()]).goes_on_as(judge([rank()]))
