"""Generated queries give the rows that DuckDB gives; `make soak-queries` compares more."""

from __future__ import annotations

import pytest

from benchmarks.trials.differential import Outcome, compare


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return compare(250, seed=29)


def test_generated_queries_keep_the_same_rows(outcome: Outcome) -> None:
    assert not outcome.disagreements, "\n".join(outcome.disagreements)


def test_most_generated_queries_are_not_refused(outcome: Outcome) -> None:
    assert outcome.counts["agree"] > 175
