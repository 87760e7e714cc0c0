"""Generated queries give the rows of other engines; `make soak-queries` compares more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trials.computed_columns import compare_columns
from benchmarks.trials.differential import compare
from benchmarks.trials.outcome import Outcome
from benchmarks.trials.zones import compare_zones

# Clocks that jump over a New Year, back and forth; that leave one out; that jump past midnight.
_ZONES = ["America/Lima", "Asia/Dhaka", "Pacific/Kiritimati", "America/St_Johns"]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    outcome = Outcome()
    compare(250, 29, outcome)
    return outcome


def test_generated_queries_keep_the_same_rows(outcome: Outcome) -> None:
    assert not outcome.disagreements, "\n".join(outcome.disagreements)


def test_most_generated_queries_are_not_refused(outcome: Outcome) -> None:
    assert outcome.counts["agree"] > 175
    assert outcome.counts["agree as a view"] > 150


def test_generated_columns_have_the_types_and_values_of_datafusion_alone(tmp_path: Path) -> None:
    outcome = Outcome()

    compare_columns(200, 2, tmp_path, outcome)

    assert not outcome.disagreements, "\n".join(outcome.disagreements)
    assert outcome.counts["agree"] > 170
    assert outcome.counts["agree as an expression"] > 130


def test_conditions_on_times_of_zones_keep_the_rows_that_python_keeps(tmp_path: Path) -> None:
    outcome = Outcome()

    compare_zones(_ZONES, 6, 3, tmp_path, outcome)

    assert not outcome.disagreements, "\n".join(outcome.disagreements)
    assert outcome.counts == {"agree": 96}
