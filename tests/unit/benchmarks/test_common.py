"""The statistics of benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.common import median_interval


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 0, 0, 0.0), (3, 0, 2, 0.75), (5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (20, 5, 14, 0.95861)],
)
def test_a_median_lies_between_two_values_with_a_known_confidence(
    count: int, low: int, high: int, confidence: float
) -> None:
    """The confidences are those of tables of the sign test."""
    assert median_interval([*range(count)][::-1]) == (
        low,
        high,
        pytest.approx(confidence, abs=1e-5),
    )
