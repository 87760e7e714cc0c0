from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_server.node.turns import Turns
from tests.waiting import wait_until

WAIT_S = 60.0


def nothing() -> None:
    pass


class Requests:
    """Requests that note when they had their turn, and end when they are told to."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.begun = turns, list[str]()
        self._may_end = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(20)

    def ask(self, namespace: str, principal: str) -> None:
        before = self.num_waiting()
        self._pool.submit(self._compute, namespace, principal)
        wait_until(lambda: self.num_waiting() + len(self.begun) > before, WAIT_S, "the request")

    def num_waiting(self) -> int:
        waiting = self.turns._waiting
        return sum(len(r) for p in list(waiting.values()) for r in list(p.values()))

    def end_one(self) -> None:
        self._may_end.release()

    def _compute(self, namespace: str, principal: str) -> None:
        with self.turns.turn(namespace, principal, nothing, WAIT_S):
            self.begun.append(principal)
            assert self._may_end.acquire(timeout=WAIT_S)


def test_turns_go_around_namespaces_then_principals() -> None:
    requests = Requests(Turns(1, 1))
    requests.ask("a", "a1")
    wait_until(lambda: requests.begun == ["a1"], WAIT_S, "the first turn")
    asked = ["a1", "a1", "a1", "a2", "b1", "b1", "c1"]
    for number, principal in enumerate(asked, 1):
        requests.ask(principal[0], principal)
        wait_until(lambda number=number: requests.num_waiting() == number, WAIT_S, "a queue")  # type: ignore[misc]

    for number in range(2, len(asked) + 2):
        requests.end_one()
        wait_until(lambda number=number: len(requests.begun) == number, WAIT_S, "a turn")  # type: ignore[misc]
    requests.end_one()

    assert requests.begun == ["a1", "a1", "b1", "c1", "a2", "b1", "a1", "a1"]


def test_a_namespace_leaves_turns_for_another_one() -> None:
    requests = Requests(Turns(3, 2))
    for _ in range(6):
        requests.ask("a", "a1")
    wait_until(lambda: len(requests.begun) == 2, WAIT_S, "two turns of the first")

    requests.ask("b", "b1")

    wait_until(lambda: requests.begun == ["a1", "a1", "b1"], WAIT_S, "the turn of the other")
    for _ in range(7):
        requests.end_one()
    wait_until(lambda: len(requests.begun) == 7, WAIT_S, "all turns")


def test_a_request_that_waits_too_long_or_in_vain_leaves_the_queue() -> None:
    turns = Turns(1, 1)

    def gone() -> None:
        raise ConnectionError

    failures: list[tuple[Callable[[], None], float, type[Exception]]] = [
        (nothing, 0.01, TimeoutError),
        (gone, WAIT_S, ConnectionError),
    ]
    with turns.turn("a", "a1", nothing, WAIT_S):
        for check, timeout_s, error in failures:
            with pytest.raises(error), turns.turn("b", "b1", check, timeout_s):
                pass
    assert not turns._waiting
    with turns.turn("a", "a1", nothing, 0):
        pass
