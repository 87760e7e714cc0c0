"""The bucket of each row: by the position at which an epoch has it first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_client.views.buckets import EpochBuckets
from cache_client.views.rows_view import RowsView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import PlainView, Shuffle, SlotView


def numbers(buckets: EpochBuckets, num_rows: int, num_buckets: int) -> list[int]:
    """Asked for in two parts."""
    parts = (range(num_rows // 2), range(num_rows // 2, num_rows))
    data = b"".join(buckets.numbers(part, num_buckets) for part in parts)
    return np.frombuffer(data, "<u2").tolist()


def view_of(rows: list[int]) -> RowsView:
    found = SharedArray(np.array(rows, np.uint32))
    return RowsView("some", found, np.zeros(1, np.int64), np.zeros(1, np.int64))


@given(
    num_rows=st.integers(1, 400),
    num_buckets=st.integers(1, 50),
    seed=st.integers(0, 9),
    block=st.none() | st.integers(1, 20),
    start=st.integers(0, 400),
    skipped=st.booleans(),
    rows=st.none() | st.lists(st.integers(0, 399), min_size=1, max_size=300),
)
def test_rows_are_in_the_bucket_of_their_first_position(
    num_rows: int,
    num_buckets: int,
    seed: int,
    block: int | None,
    start: int,
    skipped: bool,
    rows: list[int] | None,
) -> None:
    view: SlotView = PlainView(num_rows)
    if rows is not None and (own := [row for row in rows if row < num_rows]):
        view = view_of(own)
    size = view.num_slots(1)
    runs = ((size // 3, size // 2),) if skipped and size // 3 < size // 2 else ()
    order = Shuffle(True, block, seed).order(view, 1, runs)
    start = min(start, order.num_left - 1) if order.num_left else 0
    buckets = EpochBuckets(view, order, num_rows, start, "x")
    found = numbers(buckets, num_rows, num_buckets)

    whole = replace(order, skipped=())
    first = int(order.in_epoch(np.array([start]))[0]) if start else 0
    positions: dict[int, int] = {}
    for position in range(size):
        (row,) = view.samples(whole.row_ids(np.array([position])), 1).row_ids.tolist()
        if position >= first:
            positions.setdefault(row, position)
    assert found == [
        positions[row] * num_buckets // size + 1 if row in positions else 0
        for row in range(num_rows)
    ]


def test_names_are_those_of_orders() -> None:
    view = PlainView(100)

    def name(epoch: int, seed: int, start: int = 0, of: str = "one") -> str:
        order = Shuffle(True, seed=seed).order(view, epoch)
        return EpochBuckets(view, order, 100, start, of).name

    assert name(0, 1) == name(0, 1, start=50)
    assert len({name(0, 1), name(1, 1), name(0, 2), name(0, 1, of="other")}) == 4
