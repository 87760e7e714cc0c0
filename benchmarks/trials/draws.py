"""Are draws and shuffles as random as theory says? Chi-square of rows, and of pairs of rows.

    python -m benchmarks.trials.draws [--epochs 10000] [--seed 0]

The suite looks at hundreds of epochs; `make soak-draws` at 10,000. Each line has a p-value: the
chance that true randomness is farther from theory. Ends with 1 if one is not between 0.001 and
0.999, or a share of a mixture is off by one part in 10,000. A bad p-value of one seed may be
chance, those of several seeds are not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from cache_client.order.order import EpochOrder
from cache_client.views.length_buckets import LengthBucketsView
from cache_client.views.mixing import Mixing, mixing
from cache_client.views.mixture_view import MixedSource, MixtureView
from cache_client.views.patterns import pattern_of, whole_weights
from cache_client.views.sampling import (
    BalancedView,
    EpochRowsView,
    WeightedView,
    class_table,
    weight_table,
)
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import PlainView, Shuffle, SlotView

LEAST_P, MOST_P = 0.001, 0.999
MOST_SHARE_ERROR = 1e-4
WEIGHTS = {
    "equal": [1.0] * 8,
    "1 to 7": [1.0, 2, 3, 4, 5, 6, 7],
    "1 to 100": [1.0, 1, 1, 10, 10, 100, 0],
    "tiny": [1e-12, 1, 1, 1, 2],
}
MIXTURES: list[list[float]] = [
    [1, 1],
    [0.7, 0.3],
    [1000, 10**9],
    [1, 10**9],
    [1e-9, 1 / 3, 2 / 3],
    [0.1 + 0.2, 0.7],
    [1e-9, 2e-9, 3e-6, 1, 0.123456789],
    [1 / n for n in range(1, 60)],
    np.exp(np.random.default_rng(0).normal(0, 3, 200)).tolist(),
]

Outcome = Hashable
Theory = Mapping[Any, float]
Features = Callable[[Any], Sequence[Hashable]]


@dataclass(frozen=True)
class Trial:
    """What is drawn once in each epoch.

    Attributes:
        draw: epoch -> outcome.
        theory: outcome -> its probability; all that can be.
        features: name -> what is counted in an outcome, such as its rows.
    """

    name: str
    draw: Callable[[int], Outcome]
    theory: Theory
    features: Mapping[str, Features]


def main() -> None:
    """Tries all, and prints the p-values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    bad = 0
    for name, p in p_values(arguments.epochs, arguments.seed):
        is_bad = not LEAST_P < p < MOST_P
        bad += is_bad
        print(f"{p:8.4f}  {name}{'  <- bad' if is_bad else ''}", flush=True)
    for weights, error in share_errors():
        is_bad = error >= MOST_SHARE_ERROR
        bad += is_bad
        print(
            f"{error:8.1e}  largest error of a share, {len(weights)} sources from {weights[0]:.3g}"
        )
    sys.exit(bool(bad))


def p_values(epochs: int, seed: int) -> Iterator[tuple[str, float]]:
    """The name and the p-value of each feature of each trial."""
    for trial in trials(seed):
        counts = Counter(trial.draw(epoch) for epoch in range(epochs))
        for name, features in trial.features.items():
            yield f"{trial.name}: {name}", p_value(counts, trial.theory, features)


def p_value(counts: Counter[Outcome], theory: Theory, features: Features) -> float:
    """How likely counts of features are at least as far from theory as these.

    The counts are near to a normal distribution, whose means and covariances follow from theory.
    So their squared distance is near to a chi-square distribution.

    Raises:
        ValueError: an outcome cannot be, by theory.
    """
    if strange := set(counts) - set(theory):
        raise ValueError(f"by theory, this cannot be drawn: {strange.pop()}")
    outcomes = list(theory)
    names = sorted({name for outcome in outcomes for name in features(outcome)}, key=repr)
    place = {name: at for at, name in enumerate(names)}
    matrix = np.zeros((len(names), len(outcomes)))
    for at, outcome in enumerate(outcomes):
        for name in features(outcome):
            matrix[place[name], at] += 1
    probability = np.array([theory[outcome] for outcome in outcomes])
    epochs = counts.total()
    mean = matrix @ probability
    off = matrix @ np.array([counts[outcome] for outcome in outcomes]) - epochs * mean
    if (matrix.sum(axis=0) == 1).all():  # Pearson's: the form below, without its covariances
        distance, freedom = float((off**2 / mean).sum()) / epochs, len(names) - 1
    else:
        covariance = (matrix * probability) @ matrix.T - np.outer(mean, mean)
        values, vectors = np.linalg.eigh(covariance)
        kept = values > 1e-9 * values.max()
        distance = float((((vectors.T @ off)[kept] ** 2) / values[kept]).sum()) / epochs
        freedom = int(np.count_nonzero(kept))
    halves = torch.tensor([freedom / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def share_errors() -> Iterator[tuple[list[float], float]]:
    """The largest relative error of a share of each mixture, in a run of 2**60 slots."""
    for weights in MIXTURES:
        exact = [Fraction(repr(float(weight))) for weight in weights]
        counts = pattern_of(whole_weights(weights)).counts(2**60)
        yield (
            weights,
            max(
                float(abs(count / (2**60 * weight / sum(exact)) - 1))
                for weight, count in zip(exact, counts, strict=True)
            ),
        )


def trials(seed: int) -> Iterator[Trial]:
    """All trials."""
    yield from _once(seed)
    yield from _with_replacement(seed)
    yield from _shuffles(seed)
    yield from _mixtures(seed)


# -- weights ---------------------------------------------------------------------------------------


def _once(seed: int) -> Iterator[Trial]:
    """Without replacement: which rows an epoch has, and in which order."""
    features: dict[str, Features] = {"rows": tuple, "pairs of rows": _pairs}
    for name, weights in WEIGHTS.items():
        for count in (2, 3):
            view = _weighted(weights, False, count, seed)

            def draw(epoch: int, view: SlotView = view) -> Outcome:
                return frozenset(_rows(view, Shuffle(True, None, seed), epoch))

            theory = successive_theory(weights, count)
            yield Trial(f"{count} rows once, weights {name}", draw, theory, features)
    view = _weighted([1.0] * 5, False, 3, seed)
    orders = _even(itertools.permutations(range(5), 3))
    yield Trial(
        "3 rows once, in order",
        lambda epoch: tuple(_rows(view, Shuffle(True, None, seed), epoch)),
        orders,
        {"row of each slot": _places, "orders": lambda order: [order]},
    )


def _with_replacement(seed: int) -> Iterator[Trial]:
    for name, weights in WEIGHTS.items():
        view = _weighted(weights, True, 2, seed)
        shares = np.array(weights) / sum(weights)
        theory = {
            (one, other): float(shares[one] * shares[other])
            for one, other in itertools.product(range(len(weights)), repeat=2)
            if shares[one] * shares[other] > 1e-9
        }
        yield Trial(
            f"2 draws, weights {name}",
            lambda epoch, view=view: tuple(_rows(view, Shuffle(False), epoch)),  # type: ignore[misc]
            theory,
            {"rows": tuple, "pairs of rows": lambda pair: [pair]},
        )


def successive_theory(weights: Sequence[float], count: int) -> dict[Outcome, float]:
    """The probability of each set of rows that are drawn one after the other, none twice."""
    found: dict[frozenset[int], float] = {frozenset(): 1.0}
    for _ in range(count):
        longer: dict[frozenset[int], float] = {}
        for drawn, probability in found.items():
            left = {row: w for row, w in enumerate(weights) if w and row not in drawn}
            for row, weight in left.items():
                after = drawn | {row}
                chance = probability * weight / sum(left.values())
                longer[after] = longer.get(after, 0.0) + chance
        found = longer
    return {drawn: probability for drawn, probability in found.items() if probability > 1e-9}


# -- shuffles --------------------------------------------------------------------------------------


def _shuffles(seed: int) -> Iterator[Trial]:
    shuffle = Shuffle(True, None, seed)
    classes, starts = (SharedArray(each) for each in class_table(np.arange(6) % 2))
    lengths = SharedArray(np.zeros(5, np.uint8))
    plain = PlainView(5)
    views: dict[str, tuple[SlotView, Shuffle]] = {
        "shuffle": (plain, shuffle),
        "shuffle in blocks": (plain, Shuffle(True, 2, seed)),
        "epoch_rows of a pass": (EpochRowsView(plain, 5, shuffle), shuffle),
        "length buckets": (LengthBucketsView(plain, lengths, 5, shuffle), shuffle),
    }
    for name, (view, how) in views.items():
        yield Trial(
            f"{name}, 5 rows",
            lambda epoch, view=view, how=how: tuple(_rows(view, how, epoch)),  # type: ignore[misc]
            _even(itertools.permutations(range(5))),
            {
                "row of each place": _places,
                "pairs of rows of two places": _pairs_of_places,
                "orders": lambda order: [order],
            },
        )
    for size in (2, 3, 30, 257, 1000):
        yield Trial(
            f"shuffle, first rows of {size}",
            lambda epoch, size=size: tuple(  # type: ignore[misc]
                int(row) * 20 // size if size > 30 else int(row)
                for row in EpochOrder(size, shuffle=True, seed=seed, epoch=epoch).row_ids(
                    np.arange(2)
                )
            ),
            _first_two(size),
            {"pairs of rows": lambda pair: [pair], **({"rows": tuple} if size > 2 else {})},
        )
    balanced = BalancedView(PlainView(6), classes, starts, "label", 6, shuffle)
    by_class = [
        order
        for order in itertools.permutations(range(6))
        if all(order[at] % 2 != order[at + 1] % 2 for at in (0, 2, 4))
    ]
    yield Trial(
        "two classes of 3 rows",
        lambda epoch: tuple(_rows(balanced, shuffle, epoch)),
        _even(by_class),
        {"row of each place": _places, "pairs of rows of two places": _pairs_of_places},
    )


def _first_two(size: int) -> dict[Outcome, float]:
    """The first two rows of a shuffle, or the twentieths that have them."""
    if size <= 30:
        return _even(itertools.permutations(range(size), 2))
    sizes = Counter(row * 20 // size for row in range(size))
    return {
        (one, other): sizes[one] * (sizes[other] - (one == other)) / (size * (size - 1))
        for one, other in itertools.product(sizes, repeat=2)
    }


# -- mixtures --------------------------------------------------------------------------------------


def _mixtures(seed: int) -> Iterator[Trial]:
    shuffle = Shuffle(True, None, seed)
    sources = tuple(MixedSource(name, "print", 4, PlainView(4), shuffle) for name in "xy")
    view = MixtureView(sources, _mixing((4, 4), (1, 1), seed))
    orders = list(itertools.permutations(range(4)))

    def draw(epoch: int) -> Outcome:
        rows = np.array(_rows(view, Shuffle(False), epoch))
        return (*rows[rows < 4].tolist(),), (*(rows[rows >= 4] - 4).tolist(),)

    yield Trial(
        "mixture of one dataset twice",
        draw,
        _even(itertools.product(orders, orders)),
        {
            "row of each place": lambda both: [
                (source, *each) for source in (0, 1) for each in enumerate(both[source])
            ],
            "rows side by side": lambda both: list(zip(*both, strict=True)),
            "rows of two places": lambda both: list(itertools.product(*map(enumerate, both))),
        },
    )
    drawn = _mixing((4, 2), (2, 1), seed)
    yield Trial(
        "random draw of 6 slots",
        lambda epoch: tuple(drawn.locate(np.arange(6), epoch)[0].tolist()),
        _even({*itertools.permutations((0, 0, 0, 0, 1, 1))}),
        {
            "source of each slot": _places,
            "sources of two slots": _pairs_of_places,
            "orders": lambda order: [order],
        },
    )
    sizes = _mixing((3000, 1500), (2, 1), seed)
    block = np.array([0, 1, 2048, 4094])
    yield Trial(
        "random draw of a block",
        lambda epoch: tuple(sizes.locate(block, epoch)[0].tolist()),
        {
            order: _without_replacement(order, 2731, 1365)
            for order in itertools.product((0, 1), repeat=4)
        },
        {"source of each slot": _places, "sources of two slots": _pairs_of_places},
    )


def _without_replacement(order: Sequence[int], *left: int) -> float:
    """The probability of an order of sources that have these numbers of slots left."""
    slots, chance = list(left), 1.0
    for source in order:
        chance *= slots[source] / sum(slots)
        slots[source] -= 1
    return chance


def _mixing(rows: tuple[int, ...], weights: tuple[int, ...], seed: int) -> Mixing:
    return mixing(rows, [(0, weights)], stop="all_exhausted", draw="random", seed=seed)


# -- what trials have in common --------------------------------------------------------------------


def _rows(view: SlotView, shuffle: Shuffle, epoch: int) -> list[int]:
    """The rows of an epoch, as a job reads them."""
    slots = shuffle.order(view, epoch).row_ids(np.arange(view.num_slots(epoch)))
    found: list[int] = view.samples(slots, epoch).row_ids.tolist()
    return found


def _weighted(weights: list[float], replacement: bool, rows: int, seed: int) -> WeightedView:
    table, *_ = weight_table(np.array(weights), replacement=replacement)
    plain = PlainView(len(weights))
    return WeightedView(plain, SharedArray(table), "w", replacement, rows, seed)


def _even(outcomes: Any) -> dict[Outcome, float]:
    found = list(outcomes)
    return dict.fromkeys(found, 1 / len(found))


def _places(order: Sequence[Hashable]) -> list[Hashable]:
    return list(enumerate(order))


def _pairs(rows: Sequence[int]) -> list[Hashable]:
    return list(itertools.combinations(sorted(rows), 2))


def _pairs_of_places(order: Sequence[Hashable]) -> list[Hashable]:
    return list(itertools.combinations(enumerate(order), 2))


if __name__ == "__main__":
    main()
