"""Weights that training sets: reports of ranks -> the weights of rows, pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_client.views.set_weights import Report, Sealed, SetWeights, reduced

ROWS = 8
EVERY = range(2**62)


def report(
    rank: int,
    said: list[tuple[int, float]],
    *,
    epoch: int = 1,
    world_size: int = 2,
    start: str = "",
) -> Report:
    rows, weights = (
        np.array([pair[at] for pair in said], kind) for at, kind in ((0, int), (1, float))
    )
    return Report(epoch, start, rank, world_size, rows, weights)


def begun(epochs: range = EVERY) -> SetWeights:
    return SetWeights(np.ones(ROWS), np.arange(ROWS), epochs)


def test_the_last_reports_before_all_ranks_have_reported_seal_an_epoch() -> None:
    found = begun()
    assert found.take(report(0, [(0, 5.0)])) is None
    assert found.missing(report(0, [])) == "1"
    assert found.take(report(0, [(0, 7.0), (3, 0.0)])) is None
    sealed = found.take(report(1, [(0, 1.0)]))
    assert sealed is not None
    assert sealed == found.last
    assert sealed.epoch == 1
    assert found.kept[-1][1].tolist() == [4.0, 1, 1, 0, 1, 1, 1, 1]

    for late in (0, 1):
        assert found.take(report(late, [(1, 9.0)])) is None
    assert found.last == sealed
    assert found.kept[-1][1].tolist() == [4.0, 1, 1, 0, 1, 1, 1, 1]


def test_rows_that_are_not_reported_keep_the_weight_of_the_epoch_before() -> None:
    found = begun()
    first = found.take(report(0, [(2, 3.0)], world_size=1))
    second = found.take(report(0, [(5, 0.0)], epoch=4, world_size=1))
    assert [each[0] for each in found.kept] == [first, second]
    assert found.kept[0][1].tolist() == [1, 1, 3.0, 1, 1, 1, 1, 1]
    assert found.kept[1][1].tolist() == [1, 1, 3.0, 1, 1, 0, 1, 1]
    assert found.take(report(0, [(6, 2.0)], epoch=3, world_size=1)) is None  # 4 knew nothing of it


def test_reports_of_other_starts_and_world_sizes_are_no_set() -> None:
    found = begun()
    assert found.take(report(0, [(0, 2.0)], start="RESTART_COUNT=0")) is None
    assert found.take(report(1, [(1, 2.0)], start="RESTART_COUNT=1")) is None
    assert found.take(report(2, [(2, 2.0)], world_size=3)) is None
    assert found.missing(report(0, [], start="RESTART_COUNT=1")) == "0"
    assert found.take(report(0, [(3, 2.0)], start="RESTART_COUNT=1")) is not None
    assert found.kept[-1][1].tolist() == [1, 2.0, 1, 2.0, 1, 1, 1, 1]


def test_a_set_that_leaves_no_weight_does_not_count() -> None:
    found = begun()
    none = [(row, 0.0) for row in range(ROWS)]
    assert found.take(report(0, none, world_size=1)) is None
    assert (found.refused, found.last) == (1, None)
    sealed = found.take(report(0, none[1:], world_size=1))
    assert sealed is not None
    assert found.kept[-1][1].tolist() == [1.0] + 7 * [0]


def test_only_the_weights_that_are_asked_for_are_kept_and_the_digest_is_of_all() -> None:
    whole, part = begun(), begun(range(5, 8))
    for epoch in (1, 4, 6, 9):
        for found in (whole, part):
            found.take(report(0, [(epoch % ROWS, 2.0)], epoch=epoch, world_size=1))
    assert whole.last == part.last
    assert [each.epoch for each, _ in whole.kept] == [1, 4, 6, 9]
    assert [each.epoch for each, _ in part.kept] == [4, 6]
    assert part.kept[1][1].tolist() == whole.kept[2][1].tolist()

    other = begun()
    for epoch in (1, 6, 9):
        other.take(report(0, [(epoch % ROWS, 2.0)], epoch=epoch, world_size=1))
    assert isinstance(other.last, Sealed)
    assert other.last != whole.last


@given(
    st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.floats(0, 1e200), st.integers(0, 2)), max_size=30
    ),
    st.randoms(),
)
def test_the_mean_of_reports_is_the_same_for_any_ranks_and_order(
    said: list[tuple[int, float, int]], random: object
) -> None:
    ranks = [[(row, weight) for row, weight, rank in said if rank == own] for own in range(3)]
    rows, weights = reduced([report(own, each, world_size=3) for own, each in enumerate(ranks)])
    mixed = [(row, weight) for row, weight, _ in said]
    random.shuffle(mixed)  # type: ignore[attr-defined]
    alone = reduced([report(0, mixed, world_size=1)])
    assert rows.tolist() == alone[0].tolist() == sorted({row for row, _, _ in said})
    assert weights.tolist() == alone[1].tolist()
    for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        own = [each for number, each, _ in said if number == row]
        if len(set(own)) == 1:
            assert weight == own[0]
        else:
            assert weight == pytest.approx(sum(own) / len(own), rel=1e-9, abs=1e-320)
