"""Requests for room that travel with heartbeats."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cache_server.node.links.room_requests import RoomAnswer, RoomRequests
from tests.waiting import wait_until

WAIT_S = 30.0


def asked(
    requests: RoomRequests, pool: ThreadPoolExecutor, *sizes: int
) -> list[Future[RoomAnswer]]:
    """Asks from other threads, one after the other."""
    answers = []
    for number, size in enumerate(sizes, 1):
        answers.append(pool.submit(requests.ask, f"d{size}", size, lambda: False))
        wait_until(lambda: len(requests.take()) == number, WAIT_S, "the request waits")  # noqa: B023
    return answers


def test_each_request_gets_its_answer_once_it_was_acted_on() -> None:
    woken = threading.Semaphore(0)
    requests = RoomRequests(woken.release)
    with ThreadPoolExecutor(2) as pool:
        one, two = asked(requests, pool, 10, 20)
        assert [(lack.dataset, lack.num_bytes) for lack in requests.take()] == [
            ("d10", 10),
            ("d20", 20),
        ]
        assert not one.done() and not two.done() and woken.acquire(timeout=WAIT_S)

        requests.answer(["", "all are pinned"])

        assert (one.result(WAIT_S), two.result(WAIT_S)) == (
            RoomAnswer(""),
            RoomAnswer("all are pinned"),
        )
    assert requests.take() == []


def test_what_was_asked_after_the_heartbeat_waits_for_the_next_one() -> None:
    requests = RoomRequests(lambda: None)
    with ThreadPoolExecutor(2) as pool:
        (one,) = asked(requests, pool, 10)
        sent = requests.take()
        two = pool.submit(requests.ask, "d20", 20, lambda: False)
        requests.answer([""])
        assert not one.result(WAIT_S).why_not and len(sent) == 1
        wait_until(lambda: len(requests.take()) == 1, WAIT_S, "the other one waits")
        requests.answer(["no"], may_come=True)
        assert two.result(WAIT_S) == RoomAnswer("no", may_come=True)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_request_ends_with_its_load_or_says_that_the_coordinator_is_too_old(
    is_over: bool,
) -> None:
    requests = RoomRequests(lambda: None)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(requests.ask, "d", 1, lambda: is_over)
        if not is_over:
            wait_until(requests.take, WAIT_S, "the request waits")
            requests.answer([])
        assert ("does not answer" if is_over else "update it") in asking.result(WAIT_S).why_not
    assert requests.take() == []
