"""Patterns: shares of the first slots, each slot alone, and weights as whole numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.views import patterns

TINY = [
    [1000, 10**9],
    [1, 10**9],
    [0.3, 10**9],
    [1e-9, 1 / 3, 2 / 3],
    [1e-9, 2e-9, 1.0, 0.7],
    [0.1 + 0.2, 0.7],
    np.exp(np.random.default_rng(1).normal(0, 3, 200)).tolist(),
    [1 / n for n in range(1, 100)],
    [10.0**-n for n in range(10)],
    [0, 1e-9, 0, 1],
]


@pytest.mark.parametrize("weights", TINY, ids=lambda weights: f"{weights[0]:.2g}-{len(weights)}")
@pytest.mark.parametrize("slots", [10**15, 2**61])
def test_shares_are_those_of_the_weights_to_one_part_in_10_000(
    weights: list[float], slots: int
) -> None:
    exact = [Fraction(repr(float(weight))) for weight in weights]
    counts = patterns.pattern_of(patterns.whole_weights(weights)).counts(slots)
    assert sum(counts) == slots
    for weight, count in zip(exact, counts, strict=True):
        due = slots * weight / sum(exact)
        assert abs(count - due) <= due / 10**8 + 2


def test_a_source_of_one_row_in_a_million_comes_exactly_so_often() -> None:
    whole = patterns.whole_weights([1000, 10**9])
    assert whole == (1, 10**6)
    pattern = patterns.pattern_of(whole)
    for rounds in (1, 5, 10**9):
        assert pattern.counts(rounds * (10**6 + 1)) == (rounds, rounds * 10**6)
    first, second = (pattern.slots_until(0, rows) for rows in (1, 2))
    assert first is not None and second is not None and second - first == 10**6 + 1


def test_decimal_weights_are_exact_and_those_above_0_stay_above_0() -> None:
    assert patterns.whole_weights([0.7, 0.3]) == (7, 3)
    assert patterns.whole_weights([np.float64(0.25), 0, 1]) == (1, 0, 4)
    assert patterns.whole_weights([1 / 3, 2 / 3]) == (1, 2)
    assert patterns.whole_weights([np.float32(0.7), 0.3]) == (7, 3)
    assert patterns.whole_weights([2**53 + 1, np.int64(2**53 + 2)]) == (2**53 + 1, 2**53 + 2)
    for weights in ([1e-300, 1], [1e300, 1], [10**30, 1], [1e-300, 1e-9, 1]):
        whole = patterns.whole_weights(weights)
        assert sum(whole) <= patterns.MAX_SUM and all(whole)
        counts = patterns.pattern_of(whole).counts(10**12)
        assert sum(counts) == 10**12 and min(counts) <= 1


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(lambda w: np.count_nonzero(w) > 1)
)
@settings(max_examples=20)
def test_a_tree_has_each_share_of_every_prefix_to_less_than_two_rows(
    weights: list[int],
) -> None:
    pattern, size = patterns.TreePattern(tuple(weights)), sum(weights)
    slots = np.arange(2 * size + 3)
    sources, rows = pattern.locate(slots)
    most = Fraction(1, 2) if np.count_nonzero(weights) == 2 else Fraction(17, 10)
    for source, weight in enumerate(weights):
        counts = np.concatenate([[0], np.cumsum(sources == source)])
        errors = abs(counts * size - np.arange(len(counts)) * weight)
        assert Fraction(int(errors.max()), size) <= most
        own = np.flatnonzero(sources == source)
        assert rows[own].tolist() == list(range(len(own)))
        assert [pattern.counts(int(slot))[source] for slot in slots] == counts[:-1].tolist()
        for first, count in ((0, len(slots)), (3, size), (size, 0)):
            expected = own[(own >= first) & (own < first + count)] - first
            assert pattern.slots_of(source, first, count).tolist() == expected.tolist()
        until = [pattern.slots_until(source, n + 1) for n in range(len(own))]
        assert until == (own + 1).tolist()
        assert weight or pattern.slots_until(source, 1) is None


@pytest.mark.parametrize("weights", TINY, ids=lambda weights: f"{weights[0]:.2g}-{len(weights)}")
@pytest.mark.parametrize("first", [0, 10**9 - 50, 2**40 + 7, 2**62 - 200])
def test_any_slot_of_a_long_run_is_computed_alone(weights: list[float], first: int) -> None:
    pattern = patterns.pattern_of(patterns.whole_weights(weights))
    slots = np.arange(first, first + 100)
    sources, rows = pattern.locate(slots)
    some = np.random.default_rng(0).permutation(100)
    again = pattern.locate(slots[some])
    assert again[0].tolist() == sources[some].tolist()
    assert again[1].tolist() == rows[some].tolist()
    before = pattern.counts(first)
    for source in np.unique(sources).tolist():
        own = np.flatnonzero(sources == source)
        assert pattern.slots_of(source, first, 100).tolist() == own.tolist()
        assert rows[own].tolist() == list(range(before[source], before[source] + len(own)))
        assert pattern.slots_until(source, before[source] + 1) == first + own[0] + 1
    for one, next_ in pairwise(range(0, 100, 9)):
        assert sum(pattern.counts(first + next_)) - sum(pattern.counts(first + one)) == 9
