"""Writes are all or nothing, whatever fails at whichever step; 20 schedules of `write_chaos`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.trials.write_chaos import ChaosCache, run_schedule


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChaosCache]:
    made = ChaosCache(tmp_path, monkeypatch)
    yield made
    made.close()


def test_each_write_is_wholly_there_or_wholly_absent_and_every_row_once(
    cache: ChaosCache,
) -> None:
    outcomes = Counter(run_schedule(cache, seed) for seed in range(20))

    assert outcomes["there"] >= 5 and outcomes["absent"] >= 2, outcomes
