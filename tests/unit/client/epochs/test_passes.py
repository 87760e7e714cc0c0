"""Which of several passes a state tells of."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cache_client.epochs import passes as epochs_passes
from cache_client.order import order, states
from cache_protocol.errors import ConfigError, StaleVersionError


class Reading:
    """A pass over 100 rows in steps of 10, and the iterator that reads it."""

    def __init__(self, passes: epochs_passes.Passes, *, rows_consumed: int = 0) -> None:
        self.passes, self.this = passes, epochs_passes.Pass()
        self.this.epoch = 0
        self.this.plan = order.StepPlan(100, 1, 10, rows_consumed=rows_consumed)
        self.this.order = order.EpochOrder(100, shuffle=False)
        self.iterator: Iterator[int] | None = self._batches()
        self.this.iterator = weakref.ref(self.iterator)
        passes.begin(self.this)

    def _batches(self) -> Iterator[int]:
        yield from self.this.steps

    def take(self, batches: int) -> Reading:
        for _ in range(batches):
            self.passes.hand_out(self.this)
        return self

    def to_the_end(self) -> Reading:
        self.take(len(self.this.steps) - self.this.handed_out)
        self.this.ended = True
        return self

    def drop(self) -> None:
        self.iterator = None


def position(passes: epochs_passes.Passes) -> tuple[int, int] | None:
    this = passes.current()
    return None if this is None else this.position


def test_after_the_last_batch_nothing_is_left_and_after_the_end_comes_the_next_epoch() -> None:
    passes = epochs_passes.Passes()
    assert position(passes) is None
    training = Reading(passes, rows_consumed=80).take(2)
    assert position(passes) == (0, 100)
    training.to_the_end()
    assert position(passes) == (1, 0)


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("batches", [1, 8])
def test_a_look_leaves_the_state_alone(dropped: bool, batches: int) -> None:
    passes = epochs_passes.Passes()
    training = Reading(passes).take(8)
    look = Reading(passes).take(batches)
    if dropped:
        look.drop()
    assert position(passes) == (0, 80)
    training.take(1)
    assert position(passes) == (0, 90)


def test_a_whole_pass_in_the_middle_of_another_leaves_the_state_alone() -> None:
    passes = epochs_passes.Passes()
    training = Reading(passes).take(3)
    Reading(passes).to_the_end()
    assert position(passes) == (0, 30)
    training.take(1)
    assert position(passes) == (0, 40)


def test_an_iterator_that_is_kept_and_not_read_on_does_not_hold_the_state() -> None:
    passes = epochs_passes.Passes()
    Reading.kept = Reading(passes).take(1)  # type: ignore[attr-defined]
    training = Reading(passes).take(4)
    assert position(passes) == (0, 40)
    training.to_the_end()
    with pytest.raises(ConfigError, match="two iterators of this dataset were read"):
        passes.current()
    training = Reading(passes).take(2)
    assert position(passes) == (0, 20)
    passes.give_way()
    del Reading.kept  # type: ignore[attr-defined]


def test_an_iterator_that_was_never_read_does_not_hold_the_state() -> None:
    passes = epochs_passes.Passes()
    unread = Reading(passes)
    training = Reading(passes).take(4)
    assert position(passes) == (0, 40)
    training.to_the_end()
    assert position(passes) == (1, 0)
    assert unread.iterator is not None


def test_a_pass_that_replaces_one_given_up_takes_over_from_its_start() -> None:
    passes = epochs_passes.Passes()
    given_up = Reading(passes).take(8)
    training = Reading(passes)  # as `steps = iter(dataset)` over a name that holds another
    assert position(passes) == (0, 80)
    given_up.drop()
    assert position(passes) == (0, 0)
    training.take(3)
    assert position(passes) == (0, 30)


def test_a_look_that_is_kept_does_not_take_over_from_a_pass_that_is_given_up() -> None:
    passes = epochs_passes.Passes()
    training = Reading(passes).take(8)
    look = Reading(passes).take(1)
    training.drop()
    assert position(passes) == (0, 80)
    assert look.iterator is not None


def test_after_an_epoch_is_set_again_the_next_pass_takes_over() -> None:
    passes = epochs_passes.Passes()
    look = Reading(passes).take(5)
    passes.give_way()
    assert position(passes) == (0, 50)
    training = Reading(passes).take(1)
    assert position(passes) == (0, 10)
    training.to_the_end()
    assert position(passes) == (1, 0)
    passes.give_way()
    assert position(passes) is None
    assert look.iterator is not None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"dataset": "other"},
            "^the state is of another dataset: .* 'other' with fingerprint v1-a",
        ),
        (
            {"view": '{"where":"a > 1"}'},
            "^the state reads other rows: where is 'a > 1' in the state",
        ),
        (
            {"view": '{"changes":[],"source a":{"seed":1}}'},
            "other rows: source a is {'seed': 1} in the state and not given here: the state is of",
        ),
        ({"fingerprint": "v2-a"}, "another version, the dataset was loaded again since: .*v2-a"),
        ({"view": "View(where='a')"}, "^the state reads other rows: .*, View"),
        ({}, "^the state reads other rows: the state is of dataset"),
    ],
)
def test_a_refused_state_says_first_what_differs(changes: dict[str, str], text: str) -> None:
    here = states.OrderState(
        dataset="t", fingerprint="v1-b", seed=0, epoch=0, shuffle=True, shuffle_block_size=None,
        rows_consumed=0,
    )  # fmt: skip
    saved = replace(here, **{"fingerprint": "v1-a", **changes})
    with pytest.raises(StaleVersionError, match=text):
        epochs_passes.checked_state(
            saved.to_dict(),
            expected_of=lambda _: here,
            num_rows=lambda _: 9,
            rows_per_step=1,
            num_workers=0,
        )
