"""`fetch_ahead`: several results under way, handed out in the order they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cache_client.reading import fetch_ahead
from tests.interrupts import interrupt_conditions

WAIT_S = 30.0


def test_results_come_in_the_order_of_requests_whichever_is_ready_first() -> None:
    second_is_done = threading.Event()

    def fetch(request: int) -> int:
        if request == 0:
            assert second_is_done.wait(WAIT_S)
        if request == 1:
            second_is_done.set()
        return 10 * request

    assert [*fetch_ahead.fetch_ahead(fetch, range(20), depth=4, threads=2)] == [
        10 * n for n in range(20)
    ]


def test_no_more_than_the_depth_is_taken_ahead() -> None:
    taken: list[int] = []

    def requests() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = fetch_ahead.fetch_ahead(lambda request: request, requests(), depth=3, threads=2)
    for expected in range(50):
        assert next(results) == expected
        assert len(taken) <= expected + 1 + 3


def test_calls_run_at_the_same_time_but_no_more_than_the_threads() -> None:
    together = threading.Barrier(2)
    lock = threading.Lock()
    running: list[int] = []
    most = 0

    def fetch(request: int) -> int:
        nonlocal most
        with lock:
            running.append(request)
            most = max(most, len(running))
        if request < 2:
            together.wait(WAIT_S)  # broken, were they one after the other
        with lock:
            running.remove(request)
        return request

    assert [*fetch_ahead.fetch_ahead(fetch, range(30), depth=8, threads=2)] == [*range(30)]
    assert most == 2


def test_a_failure_is_raised_in_its_turn_after_the_results_before_it() -> None:
    def fetch(request: int) -> int:
        if request == 3:
            raise ZeroDivisionError("by request 3")
        return request

    results = fetch_ahead.fetch_ahead(fetch, range(10), depth=5, threads=2)

    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="by request 3"):
        next(results)
    assert [*results] == []


def test_closing_drops_requests_that_have_not_started_and_does_not_wait() -> None:
    go_on, begun = threading.Event(), []

    def fetch(request: int) -> int:
        begun.append(request)
        if request:
            assert go_on.wait(WAIT_S)
        return request

    results = fetch_ahead.fetch_ahead(fetch, range(50), depth=10, threads=2)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    go_on.set()

    assert len(begun) <= 3


def test_no_requests_are_no_results() -> None:
    assert [*fetch_ahead.fetch_ahead(lambda request: request, [], depth=3, threads=2)] == []


def test_an_interrupt_of_the_waiting_leaves_no_lock_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods of a condition are Python, so an interrupt may fall into them."""
    results = fetch_ahead.fetch_ahead(lambda request: request, range(2), depth=2, threads=2)
    assert next(results) == 0
    with monkeypatch.context() as patch:
        interrupt_conditions(patch)
        assert next(results) == 1


def test_what_is_asked_ahead_is_asked_and_answered_in_order_each_in_one_thread() -> None:
    asked: list[tuple[int, str]] = []
    answered: list[tuple[int, str]] = []
    second_is_asked = threading.Event()

    def ask(request: int) -> Callable[[], int]:
        asked.append((request, threading.current_thread().name))
        if request == 1:
            second_is_asked.set()

        def wait() -> int:
            assert second_is_asked.wait(WAIT_S)  # the next is asked before this one is answered
            answered.append((request, threading.current_thread().name))
            return 10 * request

        return wait

    assert [*fetch_ahead.ask_ahead(ask, range(20), depth=3)] == [10 * n for n in range(20)]
    for calls in (asked, answered):
        assert [request for request, _ in calls] == [*range(20)]
        assert len({thread for _, thread in calls}) == 1
    assert asked[0][1] != answered[0][1]


@pytest.mark.parametrize("where", ["asking", "answering"])
def test_a_failure_of_what_is_asked_ahead_is_raised_in_its_turn(where: str) -> None:
    def ask(request: int) -> Callable[[], int]:
        def wait() -> int:
            if (request, where) == (3, "answering"):
                raise ZeroDivisionError
            return request

        if (request, where) == (3, "asking"):
            raise ZeroDivisionError
        return wait

    results = fetch_ahead.ask_ahead(ask, range(10), depth=5)

    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert [*results] == []


def test_closing_leaves_what_is_asked_ahead_unanswered() -> None:
    go_on, begun = threading.Event(), []

    def ask(request: int) -> Callable[[], int]:
        def wait() -> int:
            begun.append(request)
            if request:
                assert go_on.wait(WAIT_S)
            return request

        return wait

    results = fetch_ahead.ask_ahead(ask, range(50), depth=10)
    assert next(results) == 0
    results.close()
    go_on.set()

    assert len(begun) <= 2


def test_a_request_that_cannot_be_waited_for_at_the_end_of_a_program_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            if self._thread_name_prefix == "cache-fetch":
                raise RuntimeError("cannot schedule new futures after shutdown")
            return super().submit(*args, **kwargs)

    monkeypatch.setattr("cache_client.reading.fetch_ahead.ThreadPoolExecutor", Ending)
    results = fetch_ahead.ask_ahead(lambda request: lambda: request, range(3), depth=2)
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(results)


def test_a_pass_that_a_fork_copied_leaves_the_pools_of_its_parent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[object] = []
    passes = [
        fetch_ahead.fetch_ahead(lambda request: request, range(10), depth=2, threads=1),
        fetch_ahead.ask_ahead(lambda request: lambda: request, range(10), depth=2),
    ]
    for results in passes:
        next(results)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", lambda pool, **_: ended.append(pool))
        patch.setattr("os.getpid", lambda: 0)  # their locks may be held by a thread of the parent
        for results in passes:
            results.close()
    assert ended == []


@pytest.mark.parametrize("late", [0, 1])
def test_a_result_that_is_late_is_told_once_and_still_comes(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    monkeypatch.setattr(fetch_ahead, "LATE_S", 0.001)
    is_told, told = threading.Event(), []

    def fetch(request: int) -> int:
        if request == late:
            assert is_told.wait(WAIT_S)
        return request

    def on_late() -> None:
        told.append(None)
        is_told.set()

    results = fetch_ahead.fetch_ahead(fetch, [0, 1], depth=1, threads=1, on_late=on_late)

    assert [*results] == [0, 1]
    assert told
