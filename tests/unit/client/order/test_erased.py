"""Rows that were erased, in numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cache_client.order import erased, states
from cache_client.views import shared_array

SHARE = shared_array.SharedArray


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_are_left_are_found_by_place_and_by_row(seed: int) -> None:
    draw = random.Random(seed)
    start = draw.randint(0, 50)
    rows = range(start, start + draw.randint(0, 60))
    out = sorted(draw.sample(rows, draw.randint(0, len(rows))))
    rest = erased.Rest(rows, SHARE(np.array(out, np.int64)), SHARE)

    left = [row for row in rows if row not in out]
    assert rest.listed().tolist() == left
    which, places = rest.find(np.arange(start + 80))
    assert which.tolist() == left
    assert places.tolist() == [*range(len(left))]
    some = np.array(draw.sample(range(len(left)), len(left) // 3), np.int64)
    assert rest.take(some).tolist() == [left[place] for place in some]


@pytest.mark.parametrize("count", [1, 7, 8, 1000])
def test_what_a_condition_said_is_noted_in_a_bit_a_row(count: int) -> None:
    held = np.random.default_rng(count).random(count) < 0.5
    for bits in (held, np.zeros(count, bool), np.ones(count, bool)):
        text = erased.noted(bits)
        assert erased.bits_of(text, count).tolist() == bits.tolist()
        assert len(text) <= max(4, 5 * -(-count // 8) // 4 + 4)
    for wrong in ("", "%%%", erased.noted(np.arange(count + 9) % 2 > 0)):
        with pytest.raises(ValueError, match="bad bits of"):
            erased.bits_of(wrong, count)


def test_a_state_has_the_act_and_the_notes_but_no_ids() -> None:
    state = states.OrderState(
        dataset="rows", fingerprint="1", seed=0, epoch=0, shuffle=True, shuffle_block_size=None,
        rows_consumed=3, erased=7, notes={"abc": {9: "all"}}, replayed="shorter",
        amended=(states.AmendedPart(0, 0, 50, ""), states.AmendedPart(0, 3, 60, "", 7)),
    )  # fmt: skip
    written = state.to_dict()

    assert written["amended"]["parts"] == [[0, 0, 50, 0], [0, 3, 60, 0, 7]]
    assert written["notes"] == {"abc": [[9, "all"]]}
    read = states.read_state(written)
    assert (read, read.notes) == (state, state.notes)
    for wrong in ({"erased": -1}, {"notes": 7}, {"notes": {"a": 1}}, {"replayed": "longer"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            states.read_state({**written, **wrong})
