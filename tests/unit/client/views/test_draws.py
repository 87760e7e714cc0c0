"""Draws and shuffles are as random as theory says: a little of `benchmarks.trials.draws`."""

from collections import Counter
from itertools import combinations

from benchmarks.trials import draws


def test_draws_and_shuffles_are_as_random_as_theory_says() -> None:
    found = dict(draws.p_values(epochs=150, seed=0))
    assert len(found) > 50
    bad = {name: p for name, p in found.items() if not draws.LEAST_P < p < draws.MOST_P}
    assert not bad


def test_shares_of_mixtures_are_exact_to_one_part_in_10_000() -> None:
    assert max(error for _, error in draws.share_errors()) < draws.MOST_SHARE_ERROR / 1000


def test_a_draw_that_is_not_random_is_found() -> None:
    sets = [frozenset(pair) for pair in combinations(range(6), 2)]
    theory = dict.fromkeys(sets, 1 / len(sets))
    features = {"rows": tuple, "pairs": lambda rows: [rows]}
    halves = Counter({frozenset((0, 1)): 50, frozenset((2, 3)): 50, frozenset((4, 5)): 50})
    too_even = Counter(dict.fromkeys(sets, 10))
    assert draws.p_value(halves, theory, features["rows"]) > draws.MOST_P
    assert draws.p_value(halves, theory, features["pairs"]) < draws.LEAST_P
    assert draws.p_value(too_even, theory, features["pairs"]) > draws.MOST_P


def test_theory_of_rows_drawn_one_after_the_other() -> None:
    found = draws.successive_theory([1, 2, 1, 0], 2)
    # 0 then 1, or 1 then 0, and so on
    assert found == {
        frozenset((0, 1)): 1 / 4 * 2 / 3 + 2 / 4 * 1 / 2,
        frozenset((1, 2)): 1 / 4 * 2 / 3 + 2 / 4 * 1 / 2,
        frozenset((0, 2)): 2 * (1 / 4 * 1 / 3),
    }
