"""Groups and windows are those of a loop over the rows."""

import datetime

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.views import groups as views_groups
from cache_client.views import shared_array


def reference(row_ids, keys, times, window):
    groups = {}
    for place, (row, key, time) in enumerate(zip(row_ids, keys, times, strict=True)):
        groups.setdefault(key, []).append((time is None, time or 0, place, row))
    rows = [[row for *_, row in sorted(group)] for group in groups.values()]
    if window is None:
        return rows
    length, stride = window
    return [
        group[at : at + length]
        for group in rows
        for at in range(0, len(group) - length + 1, stride)
    ]


def view_of(row_ids, offsets, window):
    ends = (
        None
        if window is None
        else shared_array.SharedArray(views_groups.window_ends(offsets, window))
    )
    return views_groups.GroupsView(
        shared_array.SharedArray(row_ids),
        shared_array.SharedArray(offsets),
        "sessions",
        window,
        ends,
    )


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from(["a", "b", "c", None]),
            st.one_of(st.none(), st.integers(1, 5)),
        ),
        max_size=40,
    ),
    window=st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 4))),
    data=st.data(),
)
@settings(max_examples=40)
def test_samples_are_those_of_a_loop_over_the_rows(rows, window, data):
    row_ids = np.array([row for row, _, _ in rows], np.int64)
    keys, times = [key for _, key, _ in rows], [time for *_, time in rows]
    expected = reference(row_ids.tolist(), keys, times, window)
    found, offsets = views_groups.group_table(
        row_ids, pa.array(keys, pa.string()), pa.array(times, pa.int64())
    )
    view = view_of(found, offsets, window)
    assert view.num_slots(0) == len(expected)
    slots = data.draw(st.permutations(range(len(expected))))
    samples = view.samples(np.array(slots, np.int64), 0)
    found = np.split(samples.row_ids, np.cumsum(samples.lengths)[:-1]) if slots else []
    assert [rows.tolist() for rows in found] == [expected[slot] for slot in slots]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]), st.sampled_from([None, 0.5, 2.0]), st.booleans()
        ),
        max_size=20,
    )
)
def test_rows_have_one_joint_key_where_all_columns_agree(rows):
    columns = [pa.array([row[at] for row in rows]) for at in range(3)]
    keys = views_groups.joint_key(columns).to_pylist()
    assert views_groups.joint_key(columns[:1]) is columns[0]
    for key, row in zip(keys, rows, strict=True):
        assert [other == key for other in keys] == [other == row for other in rows]


def test_times_may_be_timestamps_or_left_out():
    days = [datetime.datetime(2026, 1, day) for day in (3, 1, 2)]
    rows, keys = np.array([10, 11, 12]), pa.array([7, 7, 7])
    assert views_groups.group_table(rows, keys, pa.array(days))[0].tolist() == [11, 12, 10]
    assert views_groups.group_table(rows, keys, None)[0].tolist() == [10, 11, 12]


def test_the_table_takes_4_bytes_a_row_and_8_a_group():
    keys = pa.array(np.repeat(np.arange(100), 10))
    row_ids, offsets = views_groups.group_table(np.arange(1000), keys, None)
    groups, windows = (view_of(row_ids, offsets, window) for window in (None, (4, 2)))
    assert groups.num_bytes == 4 * 1000 + 8 * 101
    assert windows.num_bytes == groups.num_bytes + 8 * 100
    assert not any(
        isinstance(each, np.ndarray) for each in vars(windows).values()
    )  # all are shared
    assert views_groups.group_table(np.array([2**31]), pa.array([1]), None)[0].dtype == np.int64
