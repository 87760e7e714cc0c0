"""Made-up jobs whose epochs are amended, whose rows are erased, and that are killed anywhere."""

from __future__ import annotations

from collections import Counter

from benchmarks.trials import epochs


def test_each_row_comes_as_often_as_it_is_due_whatever_happens() -> None:
    did = sum((epochs.run(seed) for seed in range(6)), Counter[str]())
    wanted = ("amended", "append", "erase", "view", "states seen", "states of mixtures seen")
    assert min(did[each] for each in wanted) > 5, did
