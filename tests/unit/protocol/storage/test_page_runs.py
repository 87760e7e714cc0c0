"""`page_runs`: exactly the pages of some byte ranges, as few runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.storage.page_runs import page_runs

PAGE = 4096


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 20_000)), max_size=40),
    st.booleans(),
)
def test_runs_hold_every_range_and_are_apart(
    ranges: list[tuple[int, int]], same_length: bool
) -> None:
    starts = np.array([start for start, _ in ranges], np.int64)
    sizes = np.array([136 if same_length else size for _, size in ranges], np.int64)

    runs = page_runs(starts, 136 if same_length else starts + sizes)

    assert not (runs % PAGE).any() and (runs[:, 1] > 0).all()
    stops = runs.sum(axis=1)
    assert (runs[1:, 0] > stops[:-1]).all()
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        assert ((runs[:, 0] <= start) & (start + size <= stops)).any()


def test_neighbours_are_one_run_and_rows_far_apart_bring_a_page_each() -> None:
    assert page_runs(np.arange(0, 40 * PAGE, 128), 128).tolist() == [[0, 40 * PAGE]]
    far = page_runs(np.array([900, 5, 300]) * PAGE + 8, 136)
    assert far.tolist() == [[5 * PAGE, PAGE], [300 * PAGE, PAGE], [900 * PAGE, PAGE]]


def test_a_row_at_the_end_of_a_page_brings_the_next_one_too() -> None:
    assert page_runs(np.array([2 * PAGE - 10]), 136).tolist() == [[PAGE, 2 * PAGE]]
    assert page_runs(np.empty(0, np.int64), 136).shape == (0, 2)
