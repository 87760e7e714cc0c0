"""A mixture against a reference that goes through the run slot by slot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, combinations, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.order import order as ordering
from cache_client.order import permutation
from cache_client.views import mixing, mixture_view, patterns, rows_view, sampling, shared_array
from cache_client.views import view as views_view
from cache_protocol.errors import ConfigError

Weights = tuple[int, ...]
weights = (
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any).map(patterns.whole_weights)
)


def run_of(changes: dict[int, Weights]) -> Iterator[tuple[int, int]]:
    """Source and number of each slot: earliest deadline first, among those that are not ahead."""
    total = [0] * len(changes[0])
    slot = 0
    while True:
        if slot in changes:
            w, begin, given = changes[slot], slot, [0] * len(total)
        size, at = sum(w), slot - begin
        allowed = [s for s in range(len(w)) if w[s] and given[s] * size < (at + 1) * w[s]]
        chosen = min(allowed, key=lambda s: (-(-(given[s] + 1) * size // w[s]), s))
        yield chosen, total[chosen]
        given[chosen] += 1
        total[chosen] += 1
        slot += 1


def epochs_of(
    rows: Sequence[int], changes: dict[int, Weights], stop: mixing.Stop | int, epochs: int
) -> list[list[tuple[int, int]]]:
    run, found = run_of(changes), []
    counts = [0] * len(rows)
    for epoch in range(1, epochs + 1):
        slots: list[tuple[int, int]] = []
        while True:
            done = [count >= epoch * n for count, n in zip(counts, rows, strict=True)]
            ends = len(slots) == stop if isinstance(stop, int) else (
                any(done) if stop == "first_exhausted" else all(done)
            )  # fmt: skip
            if ends:
                break
            slots.append(next(run))
            counts[slots[-1][0]] += 1
        found.append(slots)
    return found


def located(
    found: mixing.Mixing, epoch: int, slots: permutation.Int64Array | None = None
) -> list[tuple[int, int]]:
    slots = np.arange(found.num_slots(epoch)) if slots is None else slots
    sources, rows = found.locate(slots, epoch)
    return list(zip(sources.tolist(), rows.tolist(), strict=True))


@given(weights, st.data())
def test_every_prefix_has_each_share_to_less_than_a_row_and_every_batch_to_less_than_two(
    w: Weights, data: st.DataObject
) -> None:
    pattern = patterns.TablePattern(w)
    slots = np.arange(2 * pattern.size + 7)
    sources, rows = pattern.locate(slots)
    assert list(zip(sources.tolist(), rows.tolist(), strict=True)) == list(
        islice(run_of({0: w}), len(slots))
    )
    for source, weight in enumerate(w):
        counts = np.concatenate([[0], np.cumsum(sources == source)])
        errors = counts * pattern.size - np.arange(len(counts)) * weight
        assert (abs(errors) < pattern.size).all()
        batch = data.draw(st.integers(1, len(slots)))
        of_batches = np.diff(counts[::batch])
        assert (abs(of_batches * pattern.size - batch * weight) < 2 * pattern.size).all()
        prefix = data.draw(st.integers(0, len(slots)))
        assert pattern.counts(prefix)[source] == counts[prefix]
    assert sum(pattern.counts(10**15)) == 10**15


schedules = st.integers(1, 4).flatmap(
    lambda k: st.tuples(
        st.tuples(*[st.integers(1, 60)] * k),
        st.dictionaries(
            st.integers(1, 150), st.tuples(*[st.integers(0, 9)] * k).filter(any), max_size=3
        ),
        st.tuples(*[st.integers(1, 9)] * k),
        st.tuples(*[st.integers(1, 9)] * k),
    )
)
draws = st.sampled_from(["stratified", "random"])
stops = st.sampled_from(["first_exhausted", "all_exhausted", 1, 37])


@given(schedules, stops, st.integers(0, 2**31))
@settings(max_examples=50)
def test_each_slot_of_each_epoch_is_that_of_the_reference_also_alone_and_in_any_order(
    schedule: tuple[Weights, dict[int, Weights], Weights, Weights],
    stop: mixing.Stop | int,
    seed: int,
) -> None:
    rows, middle, first, last = schedule
    changes = {0: first, **middle, 160: last}
    found = mixing.mixing(rows, sorted(changes.items()), stop=stop)
    expected = epochs_of(rows, changes, stop, 4)
    shuffled = np.random.default_rng(seed)
    for epoch, slots in enumerate(expected):
        assert found.num_slots(epoch) == len(slots)
        some = shuffled.permutation(len(slots))
        assert located(found, epoch, some) == [slots[slot] for slot in some]
        counts = found.counts(found.epoch_start(epoch + 1))
        assert sum(counts) == found.epoch_start(epoch + 1) == sum(map(len, expected[: epoch + 1]))


@given(st.integers(0, 3 * mixing.BLOCK_SLOTS), st.integers(0, 2**40), stops)
@settings(max_examples=15)
def test_a_random_draw_gives_the_same_rows_in_each_block_in_another_order(
    offset: int, seed: int, stop: mixing.Stop | int
) -> None:
    rows = (9_000 + offset, 4_500)
    even = mixing.mixing(rows, [(0, (5, 2)), (7_000, (1, 1))], stop=stop)
    drawn = replace(even, draw="random", seed=seed)
    for epoch in (0, 1):
        start, size = even.epoch_start(epoch), even.num_slots(epoch)
        begins = [0, *([7_000 - start] if start < 7_000 < start + size else []), size]
        one, two = located(even, epoch), located(drawn, epoch)
        for begin, end in pairwise(begins):
            for at in range(begin, end, mixing.BLOCK_SLOTS):
                block = slice(at, min(at + mixing.BLOCK_SLOTS, end))
                assert sorted(one[block]) == sorted(two[block])
        assert (one == two) == (size < 3) or size < 20
    again = replace(even, draw="random", seed=seed + 1)
    assert even.num_slots(0) < 100 or located(again, 0) != located(drawn, 0)


@given(schedules, stops, draws, st.data())
@settings(max_examples=50)
def test_a_change_on_the_way_loses_and_repeats_no_row_and_leaves_what_was_before(
    schedule: tuple[Weights, dict[int, Weights], Weights, Weights],
    stop: mixing.Stop | int,
    draw: str,
    data: st.DataObject,
) -> None:
    rows, _, first, last = schedule
    scale = 1 if draw == "stratified" else 150  # several blocks
    rows = tuple(n * scale for n in rows)
    stop = stop * scale if isinstance(stop, int) else stop
    before = replace(mixing.mixing(rows, [(0, first)], stop=stop, seed=3), draw=draw)
    epoch = data.draw(st.integers(0, 2))
    consumed = data.draw(st.integers(0, before.num_slots(epoch)))
    at = before.change_slot(before.epoch_start(epoch) + consumed, epoch)
    assert at == before.epoch_start(epoch) + consumed or draw == "random"
    later = {0: last, at + 20: first}
    after = before.resumed(at, mixing.mixing(rows, sorted(later.items()), stop=stop))
    kept = at - before.epoch_start(epoch)
    old, new = located(before, epoch), located(after, epoch)
    assert old[:kept] == new[:kept]
    assert after.counts(at) == before.counts(at)
    read = [slot for e in range(epoch) for slot in located(before, e)] + new
    for source in range(len(rows)):
        numbers = sorted(row for s, row in read if s == source)
        assert numbers == list(range(len(numbers)))
    shares = [Fraction(w, sum(last)) for w in last]
    if draw == "stratified":
        for source, share in enumerate(shares):
            counts = list(accumulate(s == source for s, _ in new[kept : kept + 20]))
            assert all(abs(n - i * share) < 1 for i, n in enumerate(counts, 1))


@given(st.integers(1, 200), stops, st.sampled_from([(5, 2, 1), (10**9, 10**7, 1)]))
@settings(max_examples=8)
def test_a_random_draw_leaves_the_order_of_each_source_alone(
    small: int, stop: mixing.Stop | int, weights: Weights
) -> None:
    rows = (9_000, small, 1)
    found = mixing.mixing(rows, [(0, weights), (5_000, (1, 1, 1))], stop=stop, draw="random")
    next_row = [0] * len(rows)
    for epoch in range(2 if isinstance(stop, str) else 300):
        if found.num_slots(epoch) > 200_000:
            return  # a source that comes once in 10**9 slots
        for source, row in located(found, epoch):
            assert row == next_row[source]
            next_row[source] += 1


def test_sources_of_one_size_are_shuffled_apart_also_where_they_are_one_dataset() -> None:
    names = [("x", "same"), ("y", "same"), ("z", "other")]
    shuffle = views_view.Shuffle(True)
    labels, w = np.arange(60) % 3, np.arange(60)
    classes, starts = (shared_array.SharedArray(each) for each in sampling.class_table(labels))
    table = shared_array.SharedArray(sampling.weight_table(w, replacement=True)[0])
    plain = views_view.PlainView(60)
    kinds: list[views_view.SlotView] = [
        plain,
        sampling.EpochRowsView(plain, 50, shuffle),
        sampling.BalancedView(plain, classes, starts, "label", 60, shuffle),
        sampling.WeightedView(plain, table, "w", True, 60, 0),
        sampling.EpochRowsView(rows_view.rows_in_order("ids", np.arange(60), 60), 50, shuffle),
    ]
    for kind in kinds:
        found = mixing.mixing([kind.num_slots(0)] * 3, [(0, (1, 1, 1))], stop="all_exhausted")
        sources = tuple(
            mixture_view.MixedSource(name, print_, 60, kind, shuffle) for name, print_ in names
        )
        view = mixture_view.MixtureView(sources, found)
        samples = view.samples(np.arange(found.num_slots(0)), 0)
        passes = [samples.row_ids[samples.sources == s] - 60 * s for s in range(3)]
        for one, other in combinations(passes, 2):
            assert np.mean(one == other) < 0.2
        renamed = (replace(sources[0], name="other"), *sources[1:])
        other_view = mixture_view.MixtureView(renamed, found)
        row_ids = other_view.samples(np.arange(found.num_slots(0)), 0).row_ids
        assert np.mean((row_ids == samples.row_ids)[samples.sources == 0]) < 0.2
        kept = samples.sources != 0
        assert (row_ids == samples.row_ids)[kept].all()


def view_of(found: mixing.Mixing, *, shuffle: bool = True) -> mixture_view.MixtureView:
    sources = [
        mixture_view.MixedSource(
            f"source {s}",
            f"print {s}",
            n,
            views_view.PlainView(n),
            views_view.Shuffle(shuffle, seed=s),
        )
        for s, n in enumerate(found.rows)
    ]
    return mixture_view.MixtureView(tuple(sources), found)


def rows_of(
    view: mixture_view.MixtureView, found: mixing.Mixing, epoch: int
) -> list[tuple[int, int]]:
    """The reference: source and row id, each pass in its own plain order."""
    seeds = [source.keyed(place).shuffle.seed for place, source in enumerate(view.sources)]
    rows = []
    for source, row in located(found, epoch):
        of_pass, slot = divmod(row, found.rows[source])
        order = ordering.EpochOrder(
            found.rows[source], shuffle=True, seed=seeds[source], epoch=of_pass
        )
        rows.append((source, int(order.row_ids(np.array([slot]))[0])))
    return rows


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), draws)
@settings(max_examples=40)
def test_any_division_over_ranks_and_steps_reads_the_same_rows(
    world_size: int, batch_size: int, epoch: int, draw: str
) -> None:
    found = replace(mixing.mixing((50, 17, 8), [(0, (4, 2, 1))], stop="all_exhausted"), draw=draw)
    view = view_of(found)
    expected = rows_of(view, found, epoch)
    plan = ordering.StepPlan(view.num_slots(epoch), world_size, batch_size)
    read: dict[int, tuple[int, int]] = {}
    for rank in range(world_size):
        positions, _ = plan.window(range(plan.num_steps), rank)
        samples = view.samples(positions, epoch)
        assert samples.sources is not None
        firsts = np.array(view.first_rows)[samples.sources]
        for slot, source, row in zip(
            positions, samples.sources.tolist(), (samples.row_ids - firsts).tolist(), strict=True
        ):
            read[int(slot)] = (source, row)
    assert [read[slot] for slot in range(len(expected))] == expected


@dataclass(frozen=True)
class Pairs:
    """Slot i has rows 2i and 2i + 1."""

    num_rows: int
    identity: str = "pairs"
    num_bytes: int = 0
    orders_rows: bool = False
    epochs: views_view.Epochs = "same rows"
    rows_per_slot: float = 2.0

    def num_slots(self, epoch: int) -> int:
        return self.num_rows // 2

    def samples(self, slots: permutation.Int64Array, epoch: int) -> views_view.Samples:
        row_ids = (2 * slots[:, None] + np.arange(2)).reshape(-1)
        return views_view.Samples(row_ids, np.full(len(slots), 2), slots % 3)


def test_samples_of_several_rows_keep_the_order_of_the_slots() -> None:
    found = mixing.mixing((5, 4), [(0, (2, 1))], stop="all_exhausted")
    sources = [
        mixture_view.MixedSource(n, n, 2 * k, Pairs(2 * k), views_view.NO_SHUFFLE)
        for n, k in (("a", 5), ("b", 4))
    ]
    view = mixture_view.MixtureView(tuple(sources), found)
    slots = np.arange(found.num_slots(0))
    samples = view.samples(slots, 0)
    assert samples.lengths is not None and samples.skipped is not None
    assert samples.lengths.tolist() == [2] * len(slots)
    expected = [
        (10 * s + 2 * (r % n) + i)
        for s, r in located(found, 0)
        for n in [(5, 4)[s]]
        for i in (0, 1)
    ]
    assert samples.row_ids.tolist() == expected
    assert samples.skipped.tolist() == [r % (5, 4)[s] % 3 for s, r in located(found, 0)]


@pytest.mark.parametrize(
    "bad", [[0, 0.0], [-1, 2], [float("nan")], [float("inf"), 1], ["1"], [True]]
)
def test_bad_weights_are_quoted(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weights? must"):
        patterns.whole_weights(bad)


def test_an_epoch_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="source 1 has weight 0"):
        mixing.mixing((5, 5), [(0, (1, 0))], stop="all_exhausted")
    assert mixing.mixing((5, 5), [(0, (1, 0))], stop="first_exhausted").num_slots(0) == 5
    assert (
        mixing.mixing((5, 5), [(0, (1, 0)), (99, (1, 1))], stop="all_exhausted").num_slots(0) == 109
    )
    with pytest.raises(ConfigError, match="more than 2"):
        mixing.mixing((5, 5), [(0, (1, 1))], stop="first_exhausted").num_slots(2**62)


def test_a_state_comes_back_from_json_and_a_bad_one_is_quoted() -> None:
    found = mixing.mixing((5, 5), [(0, (2, 1)), (12, (1, 1))], stop=30)
    state = mixing.MixtureState(((0, (2, 1)), (3, (1, 1))), 7, 30, found.changes)
    written = json.loads(json.dumps(state.to_dict()))
    assert mixing.MixtureState.from_dict(written, 2) == state
    bad = [
        {**written, "changes": []},
        {**written, "changes": [[0, [1], [0]]]},
        {**written, "changes": [[3, [1, 1], [2, 1]]]},
        {**written, "changes": [[0, [1, 1], [2, 1]]]},
        {**written, "changes": [[0, [0, 0], [0, 0]]]},
        {**written, "plan": 5},
        {**written, "steps": 0},
        {"plan": []},
        None,
    ]
    for each in bad:
        with pytest.raises(ValueError, match="mixture"):
            mixing.MixtureState.from_dict(each, 2)


def test_the_identity_has_the_sources_and_not_the_weights() -> None:
    view = view_of(mixing.mixing((5, 5), [(0, (2, 1))], stop="first_exhausted"))
    other = replace(view, mixing=mixing.mixing((5, 5), [(0, (1, 1))], stop="first_exhausted"))
    assert view.identity == other.identity
    assert replace(view, mixing=replace(view.mixing, draw="random")).identity != view.identity
    finished = replace(view.mixing, stop="all_exhausted")
    assert replace(view, mixing=finished).identity != view.identity
    assert replace(view, sources=view.sources[::-1]).identity != view.identity
