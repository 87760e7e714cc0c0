"""Length buckets: each row once, among rows of similar lengths, with equal sums on all ranks."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.order import order as ordering
from cache_client.views import length_buckets, shared_array
from cache_client.views import view as views_view


def view_of(lengths, bucket_rows, *, shuffle=True, seed=5):
    lengths = np.array(lengths, np.uint16)
    return length_buckets.LengthBucketsView(
        views_view.PlainView(len(lengths)),
        shared_array.SharedArray(lengths),
        bucket_rows,
        views_view.Shuffle(shuffle, None, seed),
    )


@given(
    lengths=st.lists(st.integers(0, 30), max_size=90),
    bucket_rows=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
    data=st.data(),
)
@settings(max_examples=60)
def test_slots_are_rows_and_buckets_are_runs_of_a_sorted_window(
    lengths, bucket_rows, shuffle, epoch, data
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_buckets, "WINDOW_BUCKETS", 3)
        view = view_of(lengths, bucket_rows, shuffle=shuffle)
        order = ordering.EpochOrder(len(lengths), shuffle=shuffle, seed=5, epoch=epoch)
        order = order.row_ids(np.arange(len(lengths))).tolist()
        assert view.num_slots(epoch) == len(lengths)
        rows = view.samples(np.arange(len(lengths)), epoch).row_ids.tolist()
        assert sorted(rows) == list(range(len(lengths)))
        for start in range(0, len(lengths), 3 * bucket_rows):
            window = order[start : start + 3 * bucket_rows]
            assert sorted(rows[start : start + 3 * bucket_rows]) == sorted(window)
            by_length = sorted(window, key=lambda row: lengths[row])
            buckets = {
                frozenset(by_length[at : at + bucket_rows])
                for at in range(0, len(window), bucket_rows)
            }
            at = start
            while at < start + len(window):
                found = [bucket for bucket in buckets if bucket == {*rows[at : at + len(bucket)]}]
                assert found
                at += len(found[0])
        some = np.array(data.draw(st.permutations(range(len(lengths))))[:20], np.int64)
        again = pickle.loads(pickle.dumps(view)).samples(some, epoch).row_ids
        assert again.tolist() == [rows[slot] for slot in some]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 16), (8, 32), (5, 20), (64, 4)])
def test_ranks_have_about_equal_sums_of_lengths_and_squares(world_size, batch_size):
    lengths = np.random.default_rng(0).lognormal(5, 1, 65_536).astype(np.uint16)
    plan = ordering.StepPlan(len(lengths), world_size, batch_size)
    order = ordering.EpochOrder(len(lengths), shuffle=True, seed=5)

    def worst_and_padding(rows_of):
        worst, padded = [0.0, 0.0], 0
        for step in range(0, plan.num_steps - 1, 9):
            sums, squares = [], []
            for rank in range(world_size):
                slots = plan.window(range(step, step + 1), rank)[0]
                found = lengths[rows_of(slots)].astype(np.int64)
                sums.append(int(found.sum()))
                squares.append(int((found**2).sum()))
                padded += int(found.max()) * len(found) - sums[-1]
            worst[0] += max(sums) / np.mean(sums) - 1
            worst[1] += max(squares) / np.mean(squares) - 1
        return (*(each / (plan.num_steps / 9) for each in worst), padded)

    view = view_of(lengths, 1024)
    sums, squares, padded = worst_and_padding(lambda slots: view.samples(slots, 0).row_ids)
    plain_sums, plain_squares, plain_padded = worst_and_padding(order.row_ids)
    assert sums < plain_sums / 5 and squares < plain_squares / 5, (sums, squares)
    assert padded < plain_padded / 10


def test_an_epoch_does_not_begin_with_its_shortest_rows():
    lengths = np.random.default_rng(0).integers(0, 1000, 4096)
    view = view_of(lengths, 64)
    firsts = [lengths[view.samples(np.arange(64), epoch).row_ids].mean() for epoch in range(8)]
    assert max(firsts) - min(firsts) > 300


def test_memory_is_the_lengths_and_four_windows():
    view = view_of([1] * 1000, 2)
    view.samples(np.arange(1000), 0)
    assert view.num_bytes <= 2 * 1000 + 4 * 8 * 128
