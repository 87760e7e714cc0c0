"""`Pace`: the size of the next request follows the time of the ones before."""

from __future__ import annotations

import pytest

from cache_protocol.storage.pace import Pace

TARGET_S = 0.5


def after(pace: Pace, rows_per_s: float, most: int, times: int) -> int:
    for _ in range(times):
        size = pace.size(most)
        pace.note(size, size / rows_per_s)
    return pace.size(most)


def test_in_memory_all_requests_but_the_first_are_as_large_as_they_may_be() -> None:
    pace = Pace(4, TARGET_S)
    assert pace.size(120) == 4
    assert after(pace, 10_000, 120, times=1) == 120


@pytest.mark.parametrize("rate", [1.0, 30.0, 100.0])
def test_from_a_slow_disk_each_request_takes_about_the_time_that_is_wanted(rate: float) -> None:
    size = after(Pace(4, TARGET_S), rate, 120, times=3)
    assert size == max(1, int(rate * TARGET_S))


def test_the_first_request_that_takes_long_makes_the_next_one_small() -> None:
    pace = Pace(4, TARGET_S)
    after(pace, 10_000, 120, times=2)
    pace.note(120, 60.0)
    assert pace.size(120) == 1


def test_a_short_last_request_changes_nothing() -> None:
    pace = Pace(4, TARGET_S)
    after(pace, 10_000, 120, times=2)
    pace.note(1, 0.001)
    assert pace.size(120) == 120
