from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.storage.row_index import RowIndex, RowRuns, group_rows, row_starts

_SIZES = st.lists(
    st.one_of(st.integers(1, 12), st.integers(1, 5_000), st.just(1_000)), min_size=1, max_size=40
)


@settings(max_examples=200)
@given(sizes=_SIZES, first=st.integers(0, 3_000), data=st.data())
def test_the_run_of_a_row_is_found_whatever_the_sizes_of_runs(
    sizes: list[int], first: int, data: st.DataObject
) -> None:
    starts = first + np.cumsum([0, *sizes[:-1]])
    stop = first + sum(sizes)
    edges = np.concatenate([starts, starts[1:] - 1, [0, stop - 1]])
    rows = np.append(edges, np.array(data.draw(st.lists(st.integers(0, stop - 1))), np.int64))

    found = RowIndex(starts, stop).find(rows)

    assert found.tolist() == (np.searchsorted(starts, rows, side="right") - 1).tolist()


def test_runs_of_very_different_sizes_are_searched_for() -> None:
    starts = np.array([0, 1, 2, 10**9])
    index = RowIndex(starts, 10**9 + 1)
    assert index.find(np.array([0, 1, 2, 3, 10**9 - 1, 10**9])).tolist() == [0, 1, 2, 2, 2, 3]


def test_rows_before_the_first_run_have_no_run() -> None:
    assert RowIndex(np.array([40, 50]), 60).find(np.array([0, 39, 40, 59])).tolist() == [
        *(-1, -1, 0, 1)
    ]


@settings(max_examples=200)
@given(
    shard_of=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    scale=st.sampled_from([1, 20, 3_000, 10**7]),
)
def test_grouped_rows_come_back_into_their_order(shard_of: list[int], scale: int) -> None:
    shards = np.array(shard_of) * scale
    short = shards.astype(np.min_scalar_type(-max(1, int(shards.max()))))
    rows = np.arange(len(shards)) * 7

    grouped = group_rows(rows, short)

    assert (np.diff(grouped.group_of) >= 0).all()
    back = slice(None) if grouped.inverse is None else grouped.inverse
    assert grouped.rows[back].tolist() == rows.tolist()
    assert grouped.group_of[back].tolist() == shards.tolist()
    runs = list(grouped.runs())
    assert [shard for shard, _, _ in runs] == sorted(set(shards.tolist()))
    assert runs[0][1] == 0 and runs[-1][2] == len(rows)
    for shard, start, stop in runs:
        assert set(grouped.group_of[start:stop].tolist()) == {shard}


def test_rows_of_one_shard_keep_their_order() -> None:
    rows = np.array([3, 1, 2])
    grouped = group_rows(rows, np.zeros(3, np.int8))
    assert grouped.inverse is None and grouped.rows is rows
    assert list(grouped.runs()) == [(0, 0, 3)]


def test_more_shards_than_sixteen_bits_are_grouped_nearly() -> None:
    shards = np.random.default_rng(0).integers(0, 200_000, 5_000).astype(np.int32)
    grouped = group_rows(np.arange(5_000), shards)
    assert (np.diff(grouped.group_of) > -8).all()  # neighbours may change places
    assert grouped.inverse is not None
    assert (grouped.group_of[grouped.inverse] == shards).all()


@pytest.mark.parametrize(
    ("rows", "starts"), [([], (0,)), ([5], (0, 5)), ([3, 0, 2], (0, 3, 3, 5)), ([0], (0, 0))]
)
def test_row_starts_are_the_rows_before_each_shard_and_the_total(
    rows: list[int], starts: tuple[int, ...]
) -> None:
    assert row_starts(rows) == starts


@settings(max_examples=100)
@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 9), st.integers(1, 60))
def test_runs_are_found_in_their_rows_and_go_on_after_whole_runs(
    start: int, length: int, gap: int, num_rows: int
) -> None:
    runs = RowRuns(start, length, length + gap)
    all_rows = np.concatenate([np.arange(*run) for run in runs.within(start + 1300)])
    found = RowRuns.of(all_rows[:num_rows])
    assert found == (runs if num_rows > length else RowRuns(start))
    after = found.after(num_rows)
    if num_rows > length and num_rows % length:
        assert after is None
    elif num_rows > length:
        assert after == RowRuns.of(all_rows[num_rows:1100])
    else:
        assert after == RowRuns(start + num_rows)


@pytest.mark.parametrize(
    "rows", [[3, 2, 1], [1, 1, 2], [0, 1, 3, 5, 6], [0, 1, 4, 5, 9, 10], [0, 2, 3], [4, 5, 2, 3]]
)
def test_other_rows_are_no_runs(rows: list[int]) -> None:
    assert RowRuns.of(np.array(rows)) is None
