from __future__ import annotations

import threading

from cache_client.reading import background_task
from tests.waiting import wait_until

WAIT_S = 30.0


def test_one_run_is_under_way_at_a_time() -> None:
    let_end = threading.Event()
    runs: list[tuple[int, str]] = []

    def run(number: int) -> None:
        runs.append((number, threading.current_thread().name))
        assert let_end.wait(WAIT_S)

    task = background_task.BackgroundTask("this-task", run)
    task.start(0)
    task.start(1)  # the first has not ended
    let_end.set()

    def has_run_again() -> bool:
        task.start(2)
        return len(runs) == 2

    wait_until(has_run_again, WAIT_S, "another run")
    assert runs == [(0, "this-task"), (2, "this-task")]


def test_a_run_that_raises_does_not_keep_the_next_one_from_starting() -> None:
    ended = threading.Event()
    raised: list[BaseException | None] = []

    def run(fails: bool) -> None:
        if fails:
            raise ZeroDivisionError
        ended.set()

    hook, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_value)
    try:
        task = background_task.BackgroundTask("this-task", run)
        task.start(True)
        wait_until(lambda: raised, WAIT_S, "the error")

        def starts() -> bool:
            task.start(False)
            return ended.wait(0.01)

        wait_until(starts, WAIT_S, "another run")
    finally:
        threading.excepthook = hook
