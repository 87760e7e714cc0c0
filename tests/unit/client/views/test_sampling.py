"""Weights, classes and epoch lengths: each slot by random access, exactly as a short loop says."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from cache_client.order import order as ordering
from cache_client.order import permutation
from cache_client.views import sampling, shared_array, successive
from cache_client.views import view as views_view


def rows(view, epoch=0):
    """All rows of an epoch, in the order of the slots."""
    return view.samples(np.arange(view.num_slots(epoch)), epoch).row_ids.tolist()


def in_pieces(view, epoch, size, rng):
    """The same, from slots in another order and a few at a time."""
    slots = rng.permutation(view.num_slots(epoch))
    found = np.empty(len(slots), np.int64)
    for start in range(0, len(slots), size):
        piece = slots[start : start + size]
        found[piece] = view.samples(piece, epoch).row_ids
    return found.tolist()


def balanced(labels, epoch_rows, shuffle, name="label"):
    slots, starts = sampling.class_table(labels)
    view = views_view.PlainView(len(labels))
    return sampling.BalancedView(
        view,
        shared_array.SharedArray(slots),
        shared_array.SharedArray(starts),
        name,
        epoch_rows,
        shuffle,
    )


def weighted(weights, replacement, epoch_rows, seed, name="w"):
    table, even, _ = sampling.weight_table(weights, replacement=replacement)
    chosen = epoch_rows or (len(weights) if replacement else even)
    return sampling.WeightedView(
        views_view.PlainView(len(weights)),
        shared_array.SharedArray(table),
        name,
        replacement,
        chosen,
        seed,
    )


# -- epochs of another length ----------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "epoch_rows"), [(1, 4), (2, 3), (7, 20), (64, 5), (257, 300)])
@pytest.mark.parametrize(
    "shuffle",
    [views_view.Shuffle(False), views_view.Shuffle(True, None, 3), views_view.Shuffle(True, 4, 3)],
)
def test_epochs_of_another_length_are_the_passes_cut_anew(num_rows, epoch_rows, shuffle):
    view = sampling.EpochRowsView(views_view.PlainView(num_rows), epoch_rows, shuffle)
    epochs = [rows(view, epoch) for epoch in range(4)]
    joined = [row for epoch in epochs for row in epoch]
    assert all(len(epoch) == epoch_rows for epoch in epochs)
    for number, start in enumerate(range(0, len(joined), num_rows)):
        order = shuffle.order(views_view.PlainView(num_rows), number)
        expected = order.row_ids(np.arange(num_rows)).tolist()
        assert joined[start : start + num_rows] == expected[: len(joined) - start]
    assert in_pieces(view, 2, 7, np.random.default_rng(0)) == epochs[2]


def test_an_epoch_as_long_as_the_table_is_the_plain_one():
    view = sampling.EpochRowsView(views_view.PlainView(100), 100, views_view.Shuffle(True, None, 5))
    plain = ordering.EpochOrder(100, shuffle=True, seed=5, epoch=3)
    assert rows(view, 3) == plain.row_ids(np.arange(100)).tolist()


# -- classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_each_class_comes_once_in_each_run_and_takes_all_its_rows_before_one_again(seed):
    rng = np.random.default_rng(seed)
    num_classes = int(rng.integers(1, 12))
    labels = np.concatenate([np.arange(num_classes), rng.integers(0, num_classes, 60)])
    rng.shuffle(labels)
    shuffle = views_view.Shuffle(bool(seed % 2), None, seed)
    epoch_rows = int(rng.integers(num_classes, 200))
    view = balanced(labels, epoch_rows, shuffle)

    epochs = [rows(view, epoch) for epoch in range(5)]
    assert {len(epoch) for epoch in epochs} == {epoch_rows - epoch_rows % num_classes}
    joined = [row for epoch in epochs for row in epoch]
    for start in range(0, len(joined), num_classes):
        run = labels[joined[start : start + num_classes]]
        assert sorted(run.tolist()) == list(range(num_classes))
    for label in range(num_classes):
        of_class = [row for row in joined if labels[row] == label]
        size = int((labels == label).sum())
        for start in range(0, len(of_class), size):
            one_pass = of_class[start : start + size]
            assert len(set(one_pass)) == len(one_pass)
    assert in_pieces(view, 3, 9, rng) == epochs[3]


@pytest.mark.parametrize("epoch", [2**62, 2**62 - 1])
def test_an_epoch_of_any_number_can_be_read(epoch):
    views = [
        sampling.EpochRowsView(views_view.PlainView(10), 7, views_view.Shuffle(True)),
        balanced(np.arange(10) % 3, 9, views_view.Shuffle(True)),
        weighted(np.ones(10), True, None, 0),
        weighted(np.ones(10), False, None, 0),
    ]
    for view in views:
        assert set(rows(view, epoch)) <= set(range(10))


def test_every_rank_gets_every_class_where_a_batch_has_one_row():
    labels = np.arange(64) % 2
    view = balanced(labels, 64, views_view.Shuffle(True, None, 1))
    plan, all_rows = ordering.StepPlan(64, 2, 1), rows(view)
    for rank in range(2):
        taken = [labels[all_rows[plan.positions(step, rank).start]] for step in range(32)]
        assert set(taken) == {0, 1}


def test_classes_without_a_row_make_an_empty_epoch():
    view = balanced(np.empty(0, np.int64), 10, views_view.Shuffle(True))
    assert view.num_slots(0) == 0
    assert rows(view) == []


def test_epochs_differ_and_depend_on_the_seed():
    labels = np.arange(60) % 3
    views = [balanced(labels, 60, views_view.Shuffle(True, None, s)) for s in (1, 2)]
    assert rows(views[0], 0) != rows(views[0], 1)
    assert rows(views[0], 0) != rows(views[1], 0)


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_without_replacement_an_epoch_takes_no_row_twice_and_no_row_of_weight_0(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 400))
    weights = rng.random(size) if seed % 2 else rng.integers(0, 9, size).astype(float)
    weights[rng.random(size) < 0.2] = 0.0
    weights[rng.integers(size)] = 1.0
    view = weighted(weights.copy(), False, None, seed)
    for epoch in range(4):
        taken = rows(view, epoch)
        assert len(set(taken)) == len(taken) == view.num_slots(epoch) >= 1
        assert weights[taken].all()
        assert in_pieces(view, epoch, 7, rng) == taken


@pytest.mark.parametrize("weight", [1.0, 0.1, 1 / 3, 1e-300, 1e300])
def test_equal_weights_without_replacement_give_every_row_once(weight):
    view = weighted(np.full(1000, weight), False, None, 0)
    assert sorted(rows(view, 7)) == list(range(1000))


def test_an_epoch_without_replacement_may_have_each_row_of_a_weight():
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    assert sampling.weight_table(weights, replacement=False)[1:] == (8 // 5, 3)
    assert rows(weighted(weights, False, 3, 0), 4) == [0, 2, 3]


def test_draws_depend_on_slot_epoch_and_seed_alone():
    weights = np.array([3.0, 0.0, 1.0, 4.0])
    views = [weighted(weights.copy(), True, 100, s) for s in (1, 1, 2)]
    taken = rows(views[0], 2)
    assert taken == rows(views[1], 2) == in_pieces(views[0], 2, 13, np.random.default_rng(0))
    assert set(taken) == {0, 2, 3}
    assert taken != rows(views[0], 3)
    assert taken != rows(views[2], 2)


def test_a_view_says_what_memory_its_tables_take():
    size = 100_000
    assert weighted(np.ones(size), True, None, 0).num_bytes == 8 * size
    labels = np.zeros(size, np.int32)
    assert balanced(labels, size, views_view.Shuffle(True)).num_bytes == 4 * size + 16


@pytest.mark.parametrize("size", [1000, 200_000])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 1.0])
def test_the_rows_drawn_are_those_whose_clocks_ring_first(size, share):
    """By the logarithm of numpy, and one sort of all times."""
    weights = np.random.default_rng(size).integers(0, 50, size)
    count = int(np.count_nonzero(weights) * share)
    found = successive.successive_sample(weights, count, 2**63 + 5)
    words = permutation.splitmix64(np.arange(1, size + 1, dtype=np.uint64), 2**63 + 5)
    with np.errstate(divide="ignore"):
        times = -np.log1p(-words.astype(float) * 2.0**-64) / weights
    assert found.tolist() == np.sort(np.argsort(times)[:count]).tolist()
    assert found.dtype == np.uint32


@pytest.mark.parametrize("period", [2, 64, 1000])
def test_rows_are_drawn_exactly_where_a_part_of_them_is_not_like_the_whole(period, monkeypatch):
    weights = np.where(np.arange(200_000) % period, 1, 10**12)
    expected = successive.successive_sample(weights, 70_000, 1)
    monkeypatch.setattr(successive, "_probe", lambda *_: (1e-30, 2e-30))
    assert successive.successive_sample(weights, 70_000, 1).tolist() == expected.tolist()


def test_times_are_exponential_to_their_smallest_words():
    words = np.concatenate([1 << np.arange(64, dtype=np.uint64), [np.uint64(2**64 - 1)]])
    expected = -np.log1p(-np.minimum(words.astype(float) * 2.0**-64, 1 - 2.0**-53))
    assert np.allclose(successive.exponential(words), expected, rtol=1e-11, atol=0)
    assert successive.exponential(np.zeros(1, np.uint64))[0] > 0


@pytest.mark.parametrize(
    "weights",
    [
        np.array([2**63 - 1, 2**62, 2**53 + 1, 1]),
        np.array([2**64 - 1, 2**63, 2**53 + 1, 1], np.uint64),
        np.array([2**53 + 1, 2**53 + 2, 1, 0]),
        np.array([127, 100, 1, 0], np.int8),
        np.array([1e300, 1e299, 1e292, 0.0]),
        np.array([1.0, 1e-9, 3e-9, 1e-300]),
        np.array([5e-324, 1e-323, 0.0, 1e-320]),
        np.array([10.0**9, 1000.0, 0.5, 0.25]),
    ],
    ids=str,
)
def test_shares_of_weights_of_any_size_are_kept(weights):
    sums, _, positive = sampling.weight_table(weights, replacement=True)
    whole, *_ = sampling.weight_table(weights, replacement=False)
    assert (np.diff(sums, prepend=0) == whole).all() and (whole >= 0).all()
    assert ((whole > 0) == (weights > 0)).all() and positive == np.count_nonzero(weights)
    exact = [Fraction(each) for each in weights.tolist()]
    total = int(sums[-1])
    for each, given in zip(whole.tolist(), exact, strict=True):
        share = given / sum(exact)
        assert abs(Fraction(each, total) - share) <= share / 10**6 + Fraction(1, 2**58)


def test_points_below_a_bound_are_the_high_halves_of_products():
    words = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64, endpoint=False)
    words[:2] = 0, 2**64 - 1
    for bound in (1, 7, 2**32 - 1, 2**32, 2**61 + 12345, 2**63 - 1):
        expected = [int(word) * bound >> 64 for word in words]
        assert sampling._below(words, bound).tolist() == expected


def test_a_copy_in_another_process_draws_the_same_rows_anew():
    view = weighted(np.arange(1000.0), False, 100, 3)
    taken = [rows(view, epoch) for epoch in range(4)]
    assert view.num_bytes == 8 * 1000 + 2 * 4 * 100  # two epochs are kept
    copy = pickle.loads(pickle.dumps(view))
    assert copy.num_bytes == 8 * 1000
    assert [rows(copy, epoch) for epoch in (3, 0)] == [taken[3], taken[0]]
    assert len({*map(tuple, taken)}) == 4
