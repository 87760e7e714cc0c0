"""Runs several fetches at once; returns results in the order of the requests."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from cache_client.flight.calls import Call

FETCH_THREADS = 2  # measured: more threads cost CPU time and bring no more rows per second
LATE_S = 5.0

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


def fetch_ahead(
    fetch: Callable[[_Request], _Result],
    requests: Iterable[_Request],
    *,
    depth: int,
    threads: int,
    on_wait: Callable[[int, int], None] = lambda wait_ns, ready: None,
    on_late: Callable[[], None] = lambda: None,
) -> Generator[_Result, None, None]:
    """``map(fetch, requests)``, at most ``depth`` requests ahead.

    Results and errors come in the order of the requests. Closing the iterator drops the requests
    that have not started.

    Args:
        depth: requests that run or whose results wait.
        threads: calls of ``fetch`` at the same time.
        on_wait: called with each result: how long it was waited for, in nanoseconds, and how many
            results were ready before.
        on_late: called once for each result that is waited for longer than `LATE_S`.
    """
    process = os.getpid()
    pending: deque[Call[_Result]] = deque()
    source = iter(requests)
    pool = ThreadPoolExecutor(min(depth, threads), thread_name_prefix="cache-fetch")

    def start(count: int) -> None:
        for request in islice(source, count):
            pending.append(Call(fetch, request))
            pool.submit(pending[-1].run)

    try:
        yield from _in_turn(pending, start, depth, on_wait, on_late)
    finally:
        _shut_down(process, pool)


def ask_ahead(
    ask: Callable[[_Request], Callable[[], _Result]],
    requests: Iterable[_Request],
    *,
    depth: int,
    on_wait: Callable[[int, int], None] = lambda wait_ns, ready: None,
    on_late: Callable[[], None] = lambda: None,
) -> Generator[_Result, None, None]:
    """As `fetch_ahead`, for requests that are asked in one thread and answered in another.

    Both threads keep the order of the requests, so that one stream may carry several of them.

    Args:
        ask: returns what waits for the result.
        requests, depth, on_wait, on_late: as for `fetch_ahead`.
    """
    process = os.getpid()
    pending: deque[Call[_Result]] = deque()
    source = iter(requests)
    asking = ThreadPoolExecutor(1, thread_name_prefix="cache-ask")
    waiting = ThreadPoolExecutor(1, thread_name_prefix="cache-fetch")

    def run(asked: Call[Callable[[], _Result]], answered: Call[_Result]) -> None:
        asked.run()
        try:
            waiting.submit(answered.run)
        except RuntimeError as error:  # closed meanwhile, or the program ends
            answered.fail(error)

    def start(count: int) -> None:
        for request in islice(source, count):
            asked = Call(ask, request)
            pending.append(Call(_answer, asked))
            asking.submit(run, asked, pending[-1])

    try:
        yield from _in_turn(pending, start, depth, on_wait, on_late)
    finally:
        _shut_down(process, asking, waiting)


def _answer(asked: Call[Callable[[], _Result]]) -> _Result:
    return asked.wait()()


def _in_turn(
    pending: deque[Call[_Result]],
    start: Callable[[int], None],
    depth: int,
    on_wait: Callable[[int, int], None],
    on_late: Callable[[], None],
) -> Iterator[_Result]:
    start(depth)
    while pending:
        ready = sum(call.has_run for call in pending)
        asked_ns = time.perf_counter_ns()
        result = pending.popleft().wait(LATE_S, on_late)
        on_wait(time.perf_counter_ns() - asked_ns, ready)
        start(1)
        yield result


def _shut_down(process: int, *pools: ThreadPoolExecutor) -> None:
    """Ends the pools of a process. In a child of a fork it does nothing: locks may be held."""
    if os.getpid() == process:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
