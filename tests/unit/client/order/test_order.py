"""The order of an epoch: bijections, steps, workers, state. Nothing here needs a node or torch."""

import hashlib
import itertools
import json
import math
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.order import order as ordering
from cache_client.order import permutation as order_permutation
from cache_client.order import states

examples = settings(max_examples=100)

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
plans = st.builds(
    ordering.StepPlan,
    num_rows=st.integers(0, 400),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 40),
    drop_last=st.booleans(),
)


def all_rows(order: ordering.EpochOrder) -> list[int]:
    return [int(row) for row in order.row_ids(np.arange(order.num_rows))]


def split_step(plan: ordering.StepPlan, step: int) -> tuple[list[int], list[int]]:
    """The positions of a step in rank order: those ranks own, and those that are repeated."""
    start = plan.rows_consumed + step * plan.rows_per_step
    rows = min(plan.rows_per_step, plan.num_rows - start)
    owned: list[int] = []
    repeated: list[int] = []
    for rank in range(plan.world_size):
        share = rows * (rank + 1) // plan.world_size - rows * rank // plan.world_size
        (owned if share else repeated).extend(plan.positions(step, rank))
    return owned, repeated


# -- Permutation ----------------------------------------------------------------------------------


def test_permutation_is_a_bijection_for_every_size_up_to_300() -> None:
    for size in range(1, 301):
        positions = np.arange(size)
        permutation = order_permutation.Permutation(size, seed=size, epoch=3)
        images = permutation.apply(positions)
        assert np.array_equal(np.sort(images), positions), size
        assert np.array_equal(permutation.invert(images), positions), size


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 100_003, 2**20 + 1])
def test_permutation_is_a_bijection_for_large_sizes(size: int) -> None:
    images = order_permutation.Permutation(size, seed=1, epoch=0).apply(np.arange(size))
    assert images.min() == 0
    assert images.max() == size - 1
    assert np.bincount(images).max() == 1


@examples
@given(st.data(), st.integers(1, 62), seeds, epochs, st.integers(0, 5))
def test_invert_undoes_apply_and_images_stay_in_range(
    data: st.DataObject, bits: int, seed: int, epoch: int, stream: int
) -> None:
    size = data.draw(st.integers(2 ** (bits - 1), 2**bits))
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=50)), np.int64)
    tweaks = data.draw(st.none() | st.just(positions % 3))
    permutation = order_permutation.Permutation(size, seed=seed, epoch=epoch, stream=stream)
    images = permutation.apply(positions, tweaks)
    assert ((images >= 0) & (images < size)).all()
    assert images.dtype == np.int64
    assert np.array_equal(permutation.invert(images, tweaks), positions)
    assert np.array_equal(
        permutation.apply(permutation.invert(positions, tweaks), tweaks), positions
    )


def test_permutation_agrees_with_its_definition_in_plain_integers() -> None:
    """The same network, one value at a time, as the docstring of `Permutation` has it."""

    def scalar_apply(size: int, seed: int, epoch: int, stream: int, value: int) -> int:
        rounds = 16 if size < 256 else 8
        text = f"order format=1 seed={seed} epoch={epoch} stream={stream}".encode()
        digest = hashlib.blake2b(text, digest_size=4 * rounds).digest()
        low_bits = max(1, (size - 1).bit_length() // 2)
        modulus = math.ceil(size / 2**low_bits)

        def mix(half: int, number: int) -> int:
            key = int.from_bytes(digest[4 * number : 4 * number + 4], "little")
            mixed = (half ^ key) * 0x7FEB352D % 2**32
            mixed ^= mixed >> 15
            return mixed * 0x846CA68B % 2**32

        while True:
            high, low = value >> low_bits, value % 2**low_bits
            for number in range(rounds):
                if number % 2 == 0:
                    high = (high + (mix(low, number) * modulus >> 32)) % modulus
                else:
                    low ^= mix(high, number) >> (32 - low_bits)
            value = high << low_bits | low
            if value < size:
                return value

    for size in (1, 2, 3, 5, 10, 17, 100, 255, 256, 257, 1000, 4097, 2**20 + 1, 2**31 - 1, 2**40):
        positions = np.unique(np.linspace(0, size - 1, 40).astype(np.int64))
        images = order_permutation.Permutation(size, seed=-9, epoch=size % 7, stream=2).apply(
            positions
        )
        assert images.tolist() == [
            scalar_apply(size, -9, size % 7, 2, position) for position in positions.tolist()
        ], size


def test_an_empty_permutation_maps_no_positions() -> None:
    permutation = order_permutation.Permutation(0, seed=0, epoch=0)
    assert permutation.size == 0
    assert permutation.apply(np.array([], np.int64)).shape == (0,)


def test_apply_leaves_its_input_alone_and_returns_a_new_array() -> None:
    positions = np.arange(1000)
    order_permutation.Permutation(1000, seed=0, epoch=0).apply(positions)
    assert np.array_equal(positions, np.arange(1000))
    identity = ordering.EpochOrder(1000, shuffle=False).row_ids(positions)
    assert not np.shares_memory(identity, positions)


def test_apply_takes_read_only_strided_and_narrow_integer_arrays() -> None:
    permutation = order_permutation.Permutation(1000, seed=0, epoch=0)
    expected = permutation.apply(np.arange(1000))
    read_only = np.arange(1000)
    read_only.flags.writeable = False
    assert np.array_equal(permutation.apply(read_only), expected)
    assert np.array_equal(permutation.apply(np.arange(999, -1, -1)[::-1]), expected)
    assert np.array_equal(permutation.apply(np.arange(1000, dtype=np.uint16)), expected)
    big_endian = np.arange(1000, dtype=">i8")
    assert np.array_equal(permutation.apply(big_endian), expected)


def test_each_tweak_selects_its_own_bijection() -> None:
    size, tweaks = 37, 200
    positions = np.tile(np.arange(size), tweaks)
    numbers = np.repeat(np.arange(tweaks), size)
    images = (
        order_permutation.Permutation(size, seed=4, epoch=0)
        .apply(positions, numbers)
        .reshape(tweaks, size)
    )
    assert (np.sort(images, axis=1) == np.arange(size)).all()
    assert len({tuple(row) for row in images.tolist()}) == tweaks


def test_one_permutation_serves_many_threads() -> None:
    permutation = order_permutation.Permutation(2**20 + 1, seed=0, epoch=0)
    chunks = np.array_split(np.arange(2**20 + 1), 40)
    expected = permutation.apply(np.arange(2**20 + 1))
    with ThreadPoolExecutor(8) as pool:
        found = np.concatenate(list(pool.map(permutation.apply, chunks)))
    assert np.array_equal(found, expected)


# -- Golden values --------------------------------------------------------------------------------
# These must never change by accident: a job that resumes would train on some rows twice and on
# others never. A deliberate change of the order needs a new ALGORITHM_VERSION, and new values here.


@pytest.mark.parametrize(
    ("num_rows", "seed", "epoch", "first", "last"),
    [
        (1, 0, 0, [0], 0),
        (2, 0, 0, [1, 0], 0),
        (10, 0, 0, [2, 1, 7, 9, 3, 0, 8, 6, 4, 5], 5),
        (10, 0, 1, [6, 9, 8, 4, 7, 3, 0, 2, 1, 5], 5),
        (10, 1, 0, [1, 3, 0, 7, 8, 2, 6, 4, 9, 5], 5),
        (255, 1, 0, [128, 74, 116, 169, 251, 177], 49),
        (256, 1, 0, [13, 10, 122, 23, 228, 178], 78),
        (1000, 42, 0, [792, 562, 157, 617, 477, 583], 855),
        (4_000_000, 0, 0, [1273928, 952590, 2002347, 1131625], 2096629),
        (2**20 + 1, 0, 1, [622747, 812528, 61592, 364959], 555425),
        (2**40, 123, 4, [635718578595, 650806275971, 212856355234], 776080876572),
        (2**62, -5, 6, [1243359814476720014, 3616550057730225840], 4591464061510451736),
    ],
)
def test_shuffled_order_is_pinned(
    num_rows: int, seed: int, epoch: int, first: list[int], last: int
) -> None:
    assert order_permutation.ALGORITHM_VERSION == 1
    order = ordering.EpochOrder(num_rows, shuffle=True, seed=seed, epoch=epoch)
    assert order.row_ids(np.arange(len(first))).tolist() == first
    assert order.row_ids(np.array([num_rows - 1])).tolist() == [last]


@pytest.mark.parametrize(
    ("num_rows", "block_size", "seed", "epoch", "first", "last"),
    [
        (10, 3, 0, 0, [4, 0, 8, 3, 5, 2, 7, 9, 1, 6], 6),
        (10, 1, 0, 0, [0, 4, 1, 3, 5, 9, 8, 6, 7, 2], 2),
        (10, 100, 0, 0, [8, 3, 2, 7, 9, 5, 1, 6, 4, 0], 0),
        (1000, 7, 42, 1, [5, 222, 469, 205, 787, 554], 405),
        (4_000_000, 256, 0, 0, [715407, 2807329, 2933875, 498204], 1837122),
        (100_003, 1000, 3, 2, [21217, 49595, 7288, 3312], 24879),
        (2**40, 4096, 1, 1, [56253031241, 252179366393, 252179368983], 11019621083),
        (2**62, 3, 1, 1, [4046227371407332238, 2441918243655017416], 271740846859376983),
    ],
)
def test_block_shuffled_order_is_pinned(
    num_rows: int, block_size: int, seed: int, epoch: int, first: list[int], last: int
) -> None:
    assert order_permutation.ALGORITHM_VERSION == 1
    order = ordering.EpochOrder(
        num_rows, shuffle=True, shuffle_block_size=block_size, seed=seed, epoch=epoch
    )
    assert order.row_ids(np.arange(len(first))).tolist() == first
    assert order.row_ids(np.array([num_rows - 1])).tolist() == [last]


# -- EpochOrder -----------------------------------------------------------------------------------

orders = st.integers(0, 3000).flatmap(
    lambda num_rows: st.one_of(
        st.builds(ordering.EpochOrder, st.just(num_rows), shuffle=st.just(False)),
        st.builds(
            ordering.EpochOrder,
            st.just(num_rows),
            shuffle=st.just(True),
            shuffle_block_size=st.none() | st.integers(1, 100) | st.integers(1, num_rows + 5),
            seed=seeds,
            epoch=epochs,
        ),
    )
)


@examples
@given(orders)
def test_every_row_comes_exactly_once_in_an_epoch(order: ordering.EpochOrder) -> None:
    assert sorted(all_rows(order)) == list(range(order.num_rows))


@examples
@given(orders, st.data())
def test_a_row_id_depends_on_its_position_alone(
    order: ordering.EpochOrder, data: st.DataObject
) -> None:
    rows = np.array(all_rows(order), np.int64)
    shuffled = np.array(data.draw(st.permutations(range(min(order.num_rows, 60)))), np.int64)
    spread = shuffled * max(1, order.num_rows // 60)
    assert np.array_equal(order.row_ids(spread), rows[spread])
    cuts = sorted(data.draw(st.lists(st.integers(0, order.num_rows), max_size=5)))
    pieces = [
        order.row_ids(np.arange(start, stop))
        for start, stop in itertools.pairwise([0, *cuts, order.num_rows])
    ]
    assert np.array_equal(np.concatenate(pieces), rows)


@pytest.mark.parametrize("block_size", [None, 64, 100_003])
def test_calls_of_any_length_give_the_same_order(block_size: int | None) -> None:
    order = ordering.EpochOrder(
        100_003, shuffle=True, shuffle_block_size=block_size, seed=2, epoch=9
    )
    whole = order.row_ids(np.arange(100_003))
    for length in (1000, 16_384, 16_385):
        starts = range(0, 100_003, length)
        pieces = [order.row_ids(np.arange(a, min(a + length, 100_003))) for a in starts]
        assert np.array_equal(np.concatenate(pieces), whole)


def test_the_order_without_shuffle_is_the_source_order() -> None:
    assert all_rows(ordering.EpochOrder(100, shuffle=False, seed=3, epoch=8)) == list(range(100))


@pytest.mark.unversioned
def test_seeds_and_epochs_give_different_orders() -> None:
    for block_size in (None, 7):
        found = {
            tuple(
                all_rows(
                    ordering.EpochOrder(
                        200, shuffle=True, shuffle_block_size=block_size, seed=seed, epoch=epoch
                    )
                )
            )
            for seed in range(-10, 10)
            for epoch in range(20)
        }
        assert len(found) == 400


@examples
@given(st.integers(1, 3000), st.integers(1, 60), seeds, epochs)
def test_block_shuffle_mixes_only_rows_of_blocks_in_one_window(
    num_rows: int, block_size: int, seed: int, epoch: int
) -> None:
    """Cut the order where the windows must end: each piece is made of whole blocks, 32 at most."""
    order = ordering.EpochOrder(
        num_rows, shuffle=True, shuffle_block_size=block_size, seed=seed, epoch=epoch
    )
    rows = np.array(all_rows(order))
    start, seen = 0, 0
    num_blocks = -(-num_rows // block_size)
    while start < num_rows:
        slots = min(ordering.SHUFFLE_WINDOW_BLOCKS, num_blocks - seen)
        stop = min(start + slots * block_size, num_rows)
        blocks = np.unique(rows[start:stop] // block_size)
        if len(blocks) != slots:  # the window holds the short block, so it ends earlier
            stop -= num_blocks * block_size - num_rows
            blocks = np.unique(rows[start:stop] // block_size)
        assert len(blocks) == slots
        members = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
        assert np.array_equal(np.sort(rows[start:stop]), members[members < num_rows])
        start, seen = stop, seen + slots
    assert seen == num_blocks


def test_block_shuffle_leaves_no_block_in_one_piece() -> None:
    rows = np.array(
        all_rows(ordering.EpochOrder(64_000, shuffle=True, shuffle_block_size=100, seed=0))
    )
    blocks = rows.reshape(-1, 3200) // 100
    for window in blocks:
        early = np.bincount(window[:1600] - window.min())
        assert early[early > 0].max() < 80


def test_each_run_of_one_window_reads_from_at_most_two_windows_of_blocks() -> None:
    num_rows, block_size = 1_000_003, 1000
    order = ordering.EpochOrder(num_rows, shuffle=True, shuffle_block_size=block_size, seed=5)
    length = ordering.SHUFFLE_WINDOW_BLOCKS * block_size
    for start in range(0, num_rows, length // 2):
        rows = order.row_ids(np.arange(start, min(start + length, num_rows)))
        assert len(np.unique(rows // block_size)) <= 2 * ordering.SHUFFLE_WINDOW_BLOCKS


@pytest.mark.parametrize("block_size", [1, 3, 2**61, 2**61 + 1, 2**62, 2**90])
def test_block_shuffle_stays_in_range_at_the_largest_sizes(block_size: int) -> None:
    order = ordering.EpochOrder(2**62, shuffle=True, shuffle_block_size=block_size, seed=1)
    ends = np.concatenate([np.arange(2000), 2**62 - 1 - np.arange(2000)])
    rows = order.row_ids(ends)
    assert len(np.unique(rows)) == 4000
    assert rows.min() >= 0
    assert rows.max() < 2**62


def test_an_order_survives_pickling_and_compares_by_its_arguments() -> None:
    for order in (
        ordering.EpochOrder(1000, shuffle=False),
        ordering.EpochOrder(1000, shuffle=True, seed=1, epoch=2),
        ordering.EpochOrder(1000, shuffle=True, shuffle_block_size=7, seed=1, epoch=2),
    ):
        copy = pickle.loads(pickle.dumps(order))
        assert copy == order
        assert hash(copy) == hash(order)
        assert all_rows(copy) == all_rows(order)
    assert ordering.EpochOrder(10, shuffle=True, seed=1) != ordering.EpochOrder(
        10, shuffle=True, seed=2
    )
    with pytest.raises(FrozenInstanceError):
        order.seed = 5  # type: ignore[misc]


# -- Statistics -----------------------------------------------------------------------------------
# Fixed keys, so the outcome never varies; the bounds are those of a fair shuffle at 6 sigma or so.


def chi_square_sigmas(counts: np.ndarray) -> float:
    """How far counts that should be equal are from chance, in standard deviations."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2).sum() / expected)
    degrees = counts.size - 1
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.unversioned
@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_every_arrangement_of_a_few_rows_is_equally_likely_over_the_seeds(size: int) -> None:
    codes = {code: index for index, code in enumerate(itertools.permutations(range(size)))}
    counts = np.zeros(len(codes))
    for seed in range(4000):
        images = order_permutation.Permutation(size, seed=seed, epoch=0).apply(np.arange(size))
        counts[codes[tuple(images.tolist())]] += 1
    assert abs(chi_square_sigmas(counts)) < 6


@pytest.mark.unversioned
@pytest.mark.parametrize("size", [7, 16, 17, 33, 100, 255, 256, 1000])
def test_every_row_is_equally_likely_at_every_position_over_the_keys(size: int) -> None:
    keys = 400_000 // size
    tweaks = np.repeat(np.arange(keys), size)
    permutation = order_permutation.Permutation(size, seed=11, epoch=0)
    images = permutation.apply(np.tile(np.arange(size), keys), tweaks).reshape(keys, size)
    for position in (0, 1, size // 2, size - 1):
        assert abs(chi_square_sigmas(np.bincount(images[:, position], minlength=size))) < 6
    distances = ((images[:, 1:] - images[:, :-1]) % size).ravel()
    assert abs(chi_square_sigmas(np.bincount(distances, minlength=size)[1:])) < 6
    fixed_points = (images == np.arange(size)).sum() / keys
    assert abs(fixed_points - 1) < 6 / math.sqrt(keys)


@pytest.mark.unversioned
@pytest.mark.parametrize("size", [65_536, 100_003, 2**20 + 1, 2**33 + 1])
def test_neighbours_in_the_order_are_unrelated_rows(size: int) -> None:
    count = min(size, 200_000)
    for epoch in range(3):
        rows = (
            order_permutation.Permutation(size, seed=1, epoch=epoch).apply(np.arange(count)) / size
        )
        assert abs(rows.mean() - 0.5) < 6 / math.sqrt(12 * count)
        for lag in (1, 2, 64, 256, 1024):
            correlation = np.corrcoef(rows[lag:], rows[:-lag])[0, 1]
            assert abs(correlation) < 6 / math.sqrt(count - lag)
        cells = (rows[1:] * 16).astype(int) * 16 + (rows[:-1] * 16).astype(int)
        assert chi_square_sigmas(np.bincount(cells, minlength=256)) < 6


def test_rows_move_a_third_of_the_dataset_on_average() -> None:
    size = 100_003
    positions = np.arange(size)
    for seed in range(5):
        rows = order_permutation.Permutation(size, seed=seed, epoch=0).apply(positions)
        assert abs(np.abs(rows - positions).mean() / size - 1 / 3) < 0.005


def test_two_epochs_share_no_more_than_chance() -> None:
    size = 100_003
    positions = np.arange(size)
    first, second = (
        order_permutation.Permutation(size, seed=0, epoch=epoch).apply(positions)
        for epoch in (0, 1)
    )
    assert (first == second).sum() < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / math.sqrt(size)


# -- StepPlan -------------------------------------------------------------------------------------


def test_full_and_short_steps_divide_as_documented() -> None:
    plan = ordering.StepPlan(11, world_size=2, batch_size=3)
    assert plan.num_steps == 2
    assert [plan.positions(0, rank) for rank in (0, 1)] == [range(0, 3), range(3, 6)]
    assert [plan.positions(1, rank) for rank in (0, 1)] == [range(6, 8), range(8, 11)]


def test_ranks_without_a_row_in_the_last_step_repeat_one_of_it() -> None:
    plan = ordering.StepPlan(10, world_size=4, batch_size=2)
    assert [list(plan.positions(1, rank)) for rank in range(4)] == [[8], [8], [8], [9]]
    plan = ordering.StepPlan(9, world_size=4, batch_size=2)
    assert [list(plan.positions(1, rank)) for rank in range(4)] == [[8], [8], [8], [8]]


@examples
@given(plans, st.data())
def test_a_window_is_the_positions_of_its_steps_joined(
    plan: ordering.StepPlan, data: st.DataObject
) -> None:
    ends = st.integers(0, plan.num_steps)
    steps = range(plan.num_steps)[data.draw(ends) : data.draw(ends) : data.draw(st.integers(1, 4))]
    rank = data.draw(st.integers(0, plan.world_size - 1))

    joined, sizes = plan.window(steps, rank)

    runs = [plan.positions(step, rank) for step in steps]
    assert joined.tolist() == [*itertools.chain(*runs)]
    assert joined.dtype == np.int64
    assert sizes == [len(run) for run in runs]


@examples
@given(plans)
def test_every_rank_has_a_batch_of_at_most_batch_size_in_every_step(
    plan: ordering.StepPlan,
) -> None:
    for step in range(plan.num_steps):
        start = step * plan.rows_per_step
        full = start + plan.rows_per_step <= plan.num_rows
        for rank in range(plan.world_size):
            positions = plan.positions(step, rank)
            assert 1 <= len(positions) <= plan.batch_size
            if full:
                first = start + rank * plan.batch_size
                assert positions == range(first, first + plan.batch_size)


@examples
@given(plans)
def test_every_position_is_taken_once_but_for_ranks_without_a_row(
    plan: ordering.StepPlan,
) -> None:
    steps = [split_step(plan, step) for step in range(plan.num_steps)]
    short = 0 if plan.drop_last else plan.num_rows % plan.rows_per_step
    whole = plan.num_rows // plan.rows_per_step * plan.rows_per_step
    assert [p for owned, _ in steps for p in owned] == list(range(whole + short))
    assert not any(repeated for _, repeated in steps[:-1])
    if steps:
        owned, repeated = steps[-1]
        assert set(repeated) <= set(owned)
        assert len(repeated) == max(0, plan.world_size - short if short else 0)


@pytest.mark.parametrize("world_size", range(1, 12))
def test_a_rank_without_a_row_takes_position_rank_mod_rows_of_the_step(world_size: int) -> None:
    for rows in range(1, world_size):
        plan = ordering.StepPlan(100 + rows, world_size, 3, rows_consumed=100)
        for rank in range(world_size):
            own = range(rows * rank // world_size, rows * (rank + 1) // world_size)
            expected = list(own) or [rank % rows]
            assert [p - 100 for p in plan.positions(0, rank)] == expected


@examples
@given(plans, st.booleans(), st.none() | st.integers(1, 20), seeds, epochs)
def test_batches_over_steps_and_ranks_concatenate_to_the_epoch_order(
    plan: ordering.StepPlan, shuffle: bool, block_size: int | None, seed: int, epoch: int
) -> None:
    order = ordering.EpochOrder(
        plan.num_rows,
        shuffle=shuffle,
        shuffle_block_size=block_size if shuffle else None,
        seed=seed,
        epoch=epoch,
    )
    rows: list[int] = []
    for step in range(plan.num_steps):
        owned, _ = split_step(plan, step)
        rows += order.row_ids(np.array(owned, np.int64)).tolist()
        assert len(rows) == min((step + 1) * plan.rows_per_step, plan.num_rows)
    assert rows == all_rows(order)[: len(rows)]
    assert plan.drop_last or len(rows) == plan.num_rows


@examples
@given(plans)
def test_the_number_of_steps_is_the_quotient_rounded_as_drop_last_says(
    plan: ordering.StepPlan,
) -> None:
    exact = plan.num_rows / plan.rows_per_step
    assert plan.num_steps == (math.floor(exact) if plan.drop_last else math.ceil(exact))


@pytest.mark.parametrize("batch_size", [10**8, 2**32, sys.maxsize])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_step_longer_than_the_epoch_takes_no_extra_memory(
    batch_size: int, num_workers: int
) -> None:
    plan = ordering.StepPlan(2003, world_size=2, batch_size=batch_size)
    tracemalloc.start()
    try:
        joined, sizes = plan.window(ordering.worker_steps(plan.num_steps, 0, num_workers), 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert joined.tolist() == list(range(1001, 2003)) and joined.dtype == np.int64
    assert sizes == [1002]
    assert peak < 1_000_000


@pytest.mark.parametrize("consumed", [0, 37])
@pytest.mark.parametrize(
    ("num_rows", "world_size", "batch_size"), [(100, 3, 7), (38, 4, 5), (40, 1, 6)]
)
def test_padded_steps_are_full_and_their_first_rows_are_the_order_itself(
    num_rows: int, world_size: int, batch_size: int, consumed: int
) -> None:
    plan = ordering.StepPlan(num_rows, world_size, batch_size, pad=True, rows_consumed=consumed)
    steps = range(plan.num_steps)
    joined = [plan.window(steps, rank)[0].reshape(-1, batch_size) for rank in range(world_size)]
    real, gathered = [], []
    for step in steps:
        for rank in range(world_size):
            batch = joined[rank][step].tolist()
            padded = plan.num_padded(step, rank)
            assert plan.window(range(step, step + 1), rank)[0].tolist() == batch
            assert list(plan.positions(step, rank)) == batch[: batch_size - padded]
            real += batch[: batch_size - padded]
            gathered += batch
    assert real == list(range(consumed, num_rows))
    # The repeated rows come last, over all ranks: `[:remainder]` of a gathered step drops them.
    assert gathered[: len(real)] == real and all(0 <= row < num_rows for row in gathered)
    assert plan.rows_consumed_after(plan.num_steps) == num_rows


def test_an_empty_dataset_has_no_steps() -> None:
    assert ordering.StepPlan(0, world_size=4, batch_size=8).num_steps == 0
    assert ordering.StepPlan(5, world_size=4, batch_size=8, rows_consumed=5).num_steps == 0


@examples
@given(st.data(), st.integers(0, 500), st.integers(0, 5))
def test_resuming_with_other_ranks_batches_and_workers_loses_and_repeats_nothing(
    data: st.DataObject, num_rows: int, changes: int
) -> None:
    """Run a few steps, take the state, go on with another job shape; again; then finish."""
    order = ordering.EpochOrder(num_rows, shuffle=True, seed=7)
    state = states.OrderState(
        dataset="d",
        fingerprint="f",
        seed=7,
        epoch=0,
        shuffle=True,
        shuffle_block_size=None,
        rows_consumed=0,
    )
    seen: list[int] = []
    for stage in range(changes + 1):
        plan = ordering.StepPlan(
            num_rows,
            data.draw(st.integers(1, 8)),
            data.draw(st.integers(1, 20)),
            rows_consumed=state.rows_consumed,
        )
        workers = data.draw(st.integers(1, 4))
        last = stage == changes
        stop = plan.num_steps if last else data.draw(st.integers(0, plan.num_steps))
        for step in in_round_robin(plan.num_steps, workers)[:stop]:
            owned, _ = split_step(plan, step)
            seen += order.row_ids(np.array(owned, np.int64)).tolist()
        restored = states.OrderState.from_dict(json.loads(json.dumps(state.to_dict())))
        state = replace(restored, rows_consumed=plan.rows_consumed_after(stop))
        if state.rows_consumed == num_rows:
            break
    assert seen == all_rows(order)
    assert (state.epoch, state.rows_consumed) == (0, num_rows)


# -- Workers --------------------------------------------------------------------------------------


def in_round_robin(num_steps: int, num_workers: int) -> list[int]:
    """The order in which a DataLoader hands out what its workers yield."""
    queues = [
        list(ordering.worker_steps(num_steps, worker, num_workers)) for worker in range(num_workers)
    ]
    return [step for turn in itertools.zip_longest(*queues) for step in turn if step is not None]


@examples
@given(st.integers(0, 200), st.integers(1, 12))
def test_round_robin_over_workers_gives_the_steps_in_order(
    num_steps: int, num_workers: int
) -> None:
    assert in_round_robin(num_steps, num_workers) == list(range(num_steps))


def test_a_worker_yields_every_nth_step() -> None:
    assert list(ordering.worker_steps(10, worker=1, num_workers=3)) == [1, 4, 7]
    assert list(ordering.worker_steps(2, worker=5, num_workers=8)) == []


def test_windows_hold_all_steps_of_a_worker_in_order() -> None:
    assert [[*window] for window in ordering.step_windows(range(1, 10, 3), 2)] == [[1, 4], [7]]
    assert [*ordering.step_windows(range(0), 2)] == []


def test_an_epoch_of_many_rows_begins_at_once() -> None:
    plan = ordering.StepPlan(10**12, world_size=1, batch_size=1)
    assert next(ordering.step_windows(ordering.worker_steps(plan.num_steps, 0, 1), 8)) == range(8)


# -- State ----------------------------------------------------------------------------------------

STATE = {
    "format": 1,
    "dataset": "lineitem",
    "fingerprint": "9f2c",
    "seed": 7,
    "epoch": 3,
    "shuffle": True,
    "shuffle_block_size": None,
    "rows_consumed": 4096,
}


def test_a_state_is_a_dict_of_the_documented_keys() -> None:
    state = states.OrderState(
        dataset="lineitem",
        fingerprint="9f2c",
        seed=7,
        epoch=3,
        shuffle=True,
        shuffle_block_size=None,
        rows_consumed=4096,
    )
    assert state.to_dict() == STATE
    assert states.OrderState.from_dict(STATE) == state
    assert states.OrderState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"format": "1"}, "format must be 1, got '1'"),
        ({"format": True}, "format must be an integer, got True"),
        ({"format": 2, "later": 5}, "format must be 1, got 2"),
        ({"later": 5, "also": 6}, "unknown keys: 'also', 'later'"),
        ({"dataset": ""}, "dataset must be a non-empty string, got ''"),
        ({"fingerprint": 9}, "fingerprint must be a non-empty string, got 9"),
        ({"seed": "7"}, "seed must be an integer, got '7'"),
        ({"seed": 7.0}, "seed must be an integer, got 7.0"),
        ({"epoch": -1}, "epoch must be at least 0, got -1"),
        ({"epoch": None}, "epoch must be an integer, got None"),
        ({"epoch": 2**63}, "epoch must be at most 9223372036854775807, got 9223372036854775808"),
        ({"shuffle": 1}, "shuffle must be True or False, got 1"),
        ({"shuffle_block_size": 0}, "shuffle_block_size must be at least 1, got 0"),
        ({"shuffle_block_size": "big"}, "shuffle_block_size must be an integer, got 'big'"),
        ({"shuffle": False, "shuffle_block_size": 8}, "got 8 with shuffle=False"),
        ({"rows_consumed": -4}, "rows_consumed must be at least 0, got -4"),
        ({"rows_consumed": True}, "rows_consumed must be an integer, got True"),
    ],
)
def test_a_bad_state_is_refused_with_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        states.OrderState.from_dict(STATE | change)
    assert message in str(caught.value)


def test_a_state_with_missing_keys_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="lacks keys: 'seed', 'epoch'"):
        states.OrderState.from_dict({k: v for k, v in STATE.items() if k not in ("seed", "epoch")})
    with pytest.raises(ValueError, match="lacks keys: 'format'"):
        states.OrderState.from_dict({k: v for k, v in STATE.items() if k != "format"})


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state must be a dict, got \[1\]"):
        states.OrderState.from_dict([1])  # type: ignore[arg-type]


def test_after_the_last_step_all_rows_are_consumed() -> None:
    plan = ordering.StepPlan(10, world_size=2, batch_size=2)
    assert [plan.rows_consumed_after(steps) for steps in range(4)] == [0, 4, 8, 10]


def test_with_drop_last_the_last_full_step_consumes_the_rest() -> None:
    plan = ordering.StepPlan(10, world_size=2, batch_size=2, drop_last=True)
    assert [plan.rows_consumed_after(steps) for steps in range(3)] == [0, 4, 10]


def test_a_plan_without_steps_leaves_nothing() -> None:
    assert ordering.StepPlan(0, 1, 1).rows_consumed_after(0) == 0
    assert ordering.StepPlan(10, 4, 4, drop_last=True).rows_consumed_after(0) == 10


def test_consumed_rows_count_on_from_where_the_plan_starts() -> None:
    plan = ordering.StepPlan(100, world_size=2, batch_size=5, rows_consumed=37)
    assert plan.rows_consumed_after(0) == 37
    assert plan.rows_consumed_after(3) == 67


# -- Wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: order_permutation.Permutation(-1, seed=0, epoch=0),
            "size must be at least 0, got -1",
        ),
        (
            lambda: order_permutation.Permutation(2**62 + 1, seed=0, epoch=0),
            f"at most {2**62}, got {2**62 + 1}",
        ),
        (
            lambda: order_permutation.Permutation(5, seed="a", epoch=0),
            "seed must be an integer, got 'a'",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=-3),
            "epoch must be at least 0, got -3",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0, stream=-2),
            "stream must be at least 0, got -2",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0).apply(np.array([1, 5])),
            "positions must be in [0, 5), got 5",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0).apply(np.array([1, -7])),
            "positions must be in [0, 5), got -7",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0).apply(
                np.array([2**64 - 1], np.uint64)
            ),
            f"positions must be in [0, 5), got {2**64 - 1}",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0).apply(np.array([1.0])),
            "positions must be a 1-D array of integers, got shape (1,), float64",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0).apply(np.array([[1]])),
            "positions must be a 1-D array of integers, got shape (1, 1), int64",
        ),
        (
            lambda: order_permutation.Permutation(5, seed=0, epoch=0).apply(
                np.array([1]), np.array([1, 2])
            ),
            "tweaks must have the shape of the positions (1,), got (2,)",
        ),
        (lambda: ordering.EpochOrder(-2, shuffle=True), "num_rows must be at least 0, got -2"),
        (
            lambda: ordering.EpochOrder(2.5, shuffle=True),
            "num_rows must be an integer, got 2.5",
        ),
        (
            lambda: ordering.EpochOrder(5, shuffle="yes"),
            "shuffle must be True or False, got 'yes'",
        ),
        (
            lambda: ordering.EpochOrder(5, shuffle=True, shuffle_block_size=0),
            "shuffle_block_size must be at least 1, got 0",
        ),
        (
            lambda: ordering.EpochOrder(5, shuffle=False, shuffle_block_size=4),
            "shuffle_block_size needs shuffle=True, got 4 with shuffle=False",
        ),
        (
            lambda: ordering.EpochOrder(5, shuffle=True, epoch=-1),
            "epoch must be at least 0, got -1",
        ),
        (
            lambda: ordering.EpochOrder(5, shuffle=False).row_ids(np.array([9])),
            "positions must be in [0, 5), got 9",
        ),
        (
            lambda: ordering.EpochOrder(5, shuffle=True, shuffle_block_size=2).row_ids(
                np.array([-1])
            ),
            "positions must be in [0, 5), got -1",
        ),
        (lambda: ordering.StepPlan(-1, 1, 1), "num_rows must be at least 0, got -1"),
        (lambda: ordering.StepPlan(5, 0, 1), "world_size must be at least 1, got 0"),
        (lambda: ordering.StepPlan(5, 1, 0), "batch_size must be at least 1, got 0"),
        (lambda: ordering.StepPlan(5, 1, True), "batch_size must be an integer, got True"),
        (
            lambda: ordering.StepPlan(5, 1, 1, drop_last=1),
            "drop_last must be True or False, got 1",
        ),
        (
            lambda: ordering.StepPlan(5, 1, 1, rows_consumed=-1),
            "rows_consumed must be at least 0, got -1",
        ),
        (
            lambda: ordering.StepPlan(5, 1, 1, rows_consumed=6),
            "rows_consumed must be at most num_rows=5, got 6",
        ),
        (lambda: ordering.StepPlan(5, 2, 1).positions(3, 0), "step must be in [0, 3), got 3"),
        (lambda: ordering.StepPlan(5, 2, 1).positions(-1, 0), "step must be in [0, 3), got -1"),
        (lambda: ordering.StepPlan(5, 2, 1).positions(0, 2), "rank must be in [0, 2), got 2"),
        (lambda: ordering.StepPlan(5, 2, 1).positions(0, -1), "rank must be in [0, 2), got -1"),
        (
            lambda: ordering.StepPlan(5, 2, 1).rows_consumed_after(4),
            "steps must be in [0, 3], got 4",
        ),
        (lambda: ordering.worker_steps(-1, 0, 1), "num_steps must be at least 0, got -1"),
        (lambda: ordering.worker_steps(5, 0, 0), "num_workers must be at least 1, got 0"),
        (lambda: ordering.worker_steps(5, 2, 2), "worker must be in [0, 2), got 2"),
        (lambda: ordering.worker_steps(5, -1, 2), "worker must be in [0, 2), got -1"),
    ],
)
def test_a_wrong_argument_is_quoted(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


# -- skipped steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_skipped_runs_are_left_out_and_the_rest_keeps_its_order(shuffle: bool) -> None:
    whole = ordering.EpochOrder(100, shuffle=shuffle, seed=3)
    rest = ordering.EpochOrder(100, shuffle=shuffle, seed=3, skipped=((0, 10), (30, 35), (90, 100)))

    positions = [*range(10, 30), *range(35, 90)]
    assert rest.num_left == len(positions)
    assert rest.in_epoch(np.arange(75)).tolist() == positions
    assert (rest.row_ids(np.arange(75)) == whole.row_ids(np.array(positions))).all()
    with pytest.raises(ValueError, match="positions must be in"):
        rest.row_ids(np.array([75]))


@pytest.mark.parametrize("runs", [((5, 5),), ((0, 10), (5, 20)), ((90, 101),), ((20, 30), (0, 5))])
def test_skipped_runs_that_cannot_be_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="ascending runs"):
        ordering.EpochOrder(100, shuffle=False, skipped=runs)


def test_steps_become_joined_runs_of_positions() -> None:
    plan = ordering.StepPlan(95, 2, 5)

    assert ordering.runs_of_steps([4, 0, 3, 9, 4], plan) == ((0, 10), (30, 50), (90, 95))
    with pytest.raises(ValueError, match="at most 9"):
        ordering.runs_of_steps([10], plan)
