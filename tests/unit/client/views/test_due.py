"""What epochs owe, compared with all slots of views; and the words for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.trials import audits
from cache_client.order.due import Due, Share, Shown
from cache_client.views import packing
from cache_client.views.due import due_of
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import PlainView, Shuffle


def test_each_of_some_made_up_epochs_has_a_true_verdict_and_its_rows() -> None:
    counts = audits.run(200, seed=0)
    assert sum(n for what, n in counts.items() if what.startswith("fault: ")) == 200
    assert counts["verdict: proven"] > 50 and counts["verdict: wrong"] > 50


@pytest.mark.parametrize("cut", [True, False])
def test_the_tokens_of_each_document_are_in_one_sequence_each(cut: bool) -> None:
    lengths = SharedArray(np.array([3, 0, 9, 1, 4], np.uint16))
    found = packing.PackingView(PlainView(5), lengths, 4, cut, Shuffle(True, None, 1), "n")
    assert due_of(found, 0, 5) == Due(unit="sequence", rows=5, of=5)
    assert found.num_tokens(0) == 17


def test_a_view_without_a_description_is_refused_by_name() -> None:
    class Other:
        pass

    other: Any = Other()
    with pytest.raises(TypeError, match="what Other owes is not known"):
        due_of(other, 0, 1)


@pytest.mark.parametrize(
    ("due", "shown", "text"),
    [
        (Due(rows=40, of=40), {"slots": 40, "given": 40}, "each of 40 rows once"),
        (
            Due(rows=40, of=40),
            {"slots": 40, "given": 36, "dropped": 4},
            "each of 36 rows of 40 once; 4 left out by drop_last",
        ),
        (
            Due(rows=9, of=40),
            {"slots": 9, "given": 8, "dropped": 1},
            "each of 8 rows of 40 once; 1 left out by drop_last; 31 not due in this epoch",
        ),
        (
            Due(unit="draw", rows=40, of=40, least=0, most=None),
            {"slots": 40, "given": 40},
            "each of 40 draws once; each of 40 rows any number of times",
        ),
        (
            Due(unit="draw", rows=40, of=40, least=0),
            {"slots": 20, "given": 20},
            "each of 20 rows of 40 once; 20 not due in this epoch",
        ),
        (
            Due(unit="sample", rows=2, of=40, least=1, most=3),
            {"slots": 4, "given": 4},
            "each of 4 samples once; each of 2 rows of 40 1 to 3 times",
        ),
        (
            Due(unit="sample", rows=40, of=40, least=2, most=3),
            {"slots": 100, "given": 96, "dropped": 4},
            "each of 96 samples of 100 once; 4 left out by drop_last; each of 40 rows at most "
            "3 times",
        ),
        (
            Due(unit="sequence", rows=40, of=40),
            {"slots": 15, "given": 15, "again": 1},
            "each of 15 sequences once; 1 given again to fill the last step; the tokens of each "
            "of 40 rows once",
        ),
        (
            Due(unit="window", rows=1, of=2, least=0, most=2),
            {"slots": 30, "given": 20, "skipped": 10},
            "each of 20 windows of 30 once; 10 left out by skip_steps; each of 1 row of 2 at most "
            "2 times",
        ),
        (
            Due(unit="sample", rows=6, of=6, least=0, most=None, shares=(
                Share("a", 4, Due(rows=2, of=2, least=2, most=2)), Share("b", 0, Due(rows=4)),
            )),
            {"slots": 4, "given": 4},
            "each of 4 samples once; 4 of 'a': each of 2 rows 2 times",
        ),
        (Due(), {"slots": 40, "given": 8}, "each of 8 rows of 40 once; 32 not shown yet"),
        (Due(), {"slots": 40, "given": 40}, "each of 40 rows once"),
        (
            Due(rows=3, of=3),
            {"slots": 3, "given": 0, "dropped": 3},
            "none of 3 rows was given; 3 left out by drop_last",
        ),
    ],
)  # fmt: skip
def test_a_verdict_states_exactly_what_was_shown(
    due: Due, shown: dict[str, int], text: str
) -> None:
    assert Shown(**shown).stated(due) == text


@pytest.mark.parametrize("bad", [{"unit": "x"}, {"rows": -1}, {"other": 1}, {"shares": [1]}])
def test_what_is_due_is_checked_when_it_is_read(bad: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Due.from_dict(bad)
