"""Amended epochs, in numbers: against counts in plain Python."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from cache_client.order import order, segments
from cache_client.views import shared_array

SEEDS = range(60)
SHARE = shared_array.SharedArray


def any_due(draw: random.Random, num_rows: int) -> segments.Due:
    """All rows, some rows, or rows that repeat."""
    kind = draw.random()
    if kind < 0.4:
        return range(num_rows)
    if kind < 0.8 or not num_rows:
        chosen = draw.sample(range(num_rows), draw.randint(0, num_rows))
    else:
        chosen = draw.choices(range(num_rows), k=draw.randint(0, 2 * num_rows))
    return np.array(sorted(chosen), np.int64)


def stream(due: segments.Due, draw: random.Random, shuffle: bool) -> segments.Stream:
    block = draw.choice([None, None, 3]) if shuffle else None
    own = order.EpochOrder(
        len(due), shuffle=shuffle, shuffle_block_size=block, seed=draw.randint(0, 99)
    )
    rows = due if isinstance(due, range) else shared_array.SharedArray(due)
    return segments.Stream(rows, own, SHARE)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_row_comes_as_often_as_it_is_due_after_any_amendments(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(segments, "MOST_MOVED", draw.choice([0, 20, 2**17]))
    shuffle, num_rows = draw.random() < 0.8, draw.randint(0, 60)
    due, given = any_due(draw, num_rows), Counter[int]()
    first = stream(due, draw, shuffle)
    key = segments.key_of(first.order)
    now = segments.segment(0, [first], key)
    for _ in range(draw.randint(1, 20)):
        rest = now.row_ids(np.arange(now.num_left))
        which, positions = now.find(np.unique(rest))
        assert sorted(positions.tolist()) == [*range(now.num_left)]
        assert (rest[positions] == np.unique(rest)[which]).all()

        count = draw.choice([0, len(rest), draw.randint(0, len(rest))])
        assert now.row_ids(np.arange(count)).tolist() == rest[:count].tolist()
        given.update(rest[:count].tolist())
        num_rows += draw.choice([0, draw.randint(0, 20)])
        wanted = any_due(draw, num_rows)
        made = segments.change(now.streams_at(count), due, wanted)
        streams = [*made.streams, *([stream(made.new, draw, shuffle)] if len(made.new) else ())]
        due, now = wanted, segments.segment(now.at + count, streams, key)

        left = Counter(np.asarray(due).tolist()) - given
        assert Counter(now.row_ids(np.arange(now.num_left)).tolist()) == left


@pytest.mark.parametrize("seed", range(20))
def test_a_merge_spreads_the_shorter_run_and_keeps_the_order_of_both(seed: int) -> None:
    draw = random.Random(seed)
    many = draw.randint(1, 300)
    few = draw.randint(1, many)
    merge = segments.Merge(0, 1, many, few, draw.getrandbits(64))

    is_few, items = merge.split(np.arange(len(merge)))

    assert items[is_few].tolist() == [*range(few)]
    assert items[~is_few].tolist() == [*range(many)]
    assert (merge.join(items[is_few], right=True) == np.flatnonzero(is_few)).all()
    assert (merge.join(items[~is_few], right=False) == np.flatnonzero(~is_few)).all()
    half = int(is_few[: len(merge) // 2].sum())
    assert abs(half - few * (len(merge) // 2) / len(merge)) <= 1


def test_new_rows_are_spread_over_what_is_left_of_the_old_ones() -> None:
    old = segments.Stream(range(90_000), order.EpochOrder(90_000, shuffle=True), SHARE)
    new = segments.Stream(range(90_000, 100_000), order.EpochOrder(10_000, shuffle=True), SHARE)
    mixed = segments.segment(0, [old.after(50_000), new], "a job")

    is_new = mixed.row_ids(np.arange(50_000)) >= 90_000

    of_tenths = is_new.reshape(10, -1).sum(axis=1)
    assert of_tenths.min() >= 999
    gaps = np.diff(np.flatnonzero(is_new))
    assert 1 <= gaps.min() < gaps.max() < 10, "places in the strata are random"


def test_an_epoch_that_is_too_long_for_64_bits_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"8,589,934,592 rows, 4,294,967,296 of them new"):
        segments.Merge(0, 1, 2**32, 2**32, 7)


def test_twenty_amendments_of_a_virtual_table_keep_few_streams() -> None:
    due = range(10**8)
    first = segments.Stream(due, order.EpochOrder(len(due), shuffle=True), SHARE)
    now = segments.segment(0, [first], "a job")
    for at in range(20):
        wanted = range(due.stop + 5_000)
        made = segments.change(now.streams_at(3_000_000), due, wanted)
        new = stream(made.new, random.Random(at), shuffle=True)
        now = segments.segment(now.at + 3_000_000, [*made.streams, new], "a job")
        due = wanted

    assert len([each for each in now.streams if each.num_left]) == 2
    assert now.num_left == 10**8 + 20 * 5_000 - 20 * 3_000_000
    rows = now.row_ids(np.arange(100_000))
    assert len(np.unique(rows)) == 100_000
