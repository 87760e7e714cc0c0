"""Pauses between attempts, and that none of them takes a number from the program's `random`."""

import random
import socket

import pytest
from tenacity import RetryCallState, Retrying

from cache_client.reading import shard_maps
from cache_protocol.errors import NodeUnavailableError
from cache_protocol.wire.channels import backoff, rest_s


def after(attempt: int) -> RetryCallState:
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = attempt
    return state


def test_each_pause_may_be_twice_as_long_up_to_the_longest() -> None:
    pause_s = backoff(0.5, 3.0)
    for attempt, limit in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (5_000, 3.0)):
        pauses = [pause_s(after(attempt)) for _ in range(200)]
        assert 0.0 <= min(pauses) < limit / 2 < max(pauses) <= limit


def test_pauses_leave_the_random_numbers_of_the_program_alone() -> None:
    before = random.getstate()
    backoff(0.5, 3.0)(after(1))
    assert random.getstate() == before


def test_a_program_that_is_seeded_pauses_by_chance_all_the_same() -> None:
    pauses = set()
    for _ in range(20):
        random.seed(7)
        pauses.add(backoff(0.5, 3.0)(after(1)))
    assert len(pauses) > 1


def test_waiting_for_a_cache_leaves_the_random_numbers_of_the_program_alone() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no server listens
        before = random.getstate()
        with pytest.raises(NodeUnavailableError):
            shard_maps.wait_for_shard_map(
                f"grpc://127.0.0.1:{closed.getsockname()[1]}", "t", [], deadline_s=1.0
            )
    assert random.getstate() == before


@pytest.mark.parametrize(("took_s", "rest"), [(0.001, 0.0), (0.01, 0.04), (0.1, 0.4), (10.0, 1.0)])
def test_repeated_work_takes_at_most_a_fifth_of_the_time_unless_it_is_short(
    took_s: float, rest: float
) -> None:
    assert rest_s(took_s) == pytest.approx(rest)
