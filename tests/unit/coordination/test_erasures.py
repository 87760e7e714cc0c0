"""Erasures of a version, against sets in plain Python."""

from __future__ import annotations

import numpy as np

from cache_protocol.storage.row_sets import decode_rows, encode_rows
from cache_server.coordination.erasures import Erasures

STARTS = (0, 10, 10, 25, 40)


def test_places_follow_from_the_rows_of_all_acts() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        erasures, known = Erasures(), set[int]()
        for number in range(1, 5):
            rows = np.unique(random.integers(0, 40, random.integers(0, 10)))
            erasures = erasures.with_act(number, rows, STARTS)
            known |= set(rows.tolist())
        assert set(erasures.rows().tolist()) == known
        assert erasures.num_rows == len(known)
        placed = {
            STARTS[index] + place
            for index, places in erasures.places.items()
            for place in decode_rows(places).tolist()
        }
        assert placed == known
        assert Erasures(erasures.acts, STARTS) == erasures


def test_what_a_load_left_out_becomes_one_act() -> None:
    erasures = Erasures()
    erasures.note(3, encode_rows(np.array([0, 4])))
    made = erasures.with_noted(7, STARTS)
    assert [(act.number, decode_rows(act.rows).tolist()) for act in made.acts] == [(7, [25, 29])]
    assert made.with_noted(8, STARTS) is made
    assert not made.has(3, encode_rows(np.array([0])))
    assert made.has(3, encode_rows(np.array([0, 4, 5])))
