"""Runs several fetches at once; returns results in the order of the requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from cache_client.grpc_guard.calls import Call

FETCH_THREADS = 2  # measured: more threads cost CPU time and bring no more rows per second

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


def fetch_ahead(
    fetch: Callable[[_Request], _Result],
    requests: Iterable[_Request],
    *,
    depth: int,
    threads: int,
    on_wait: Callable[[int, int], None] = lambda wait_ns, ready: None,
) -> Generator[_Result, None, None]:
    """``map(fetch, requests)``, at most ``depth`` requests ahead.

    Results and errors come in the order of the requests. Closing the iterator drops the requests
    that have not started.

    Args:
        depth: requests that run or whose results wait.
        threads: calls of ``fetch`` at the same time.
        on_wait: called with each result: how long it was waited for, in nanoseconds, and how many
            results were ready before.
    """
    pending: deque[Call[_Result]] = deque()
    source = iter(requests)
    pool = ThreadPoolExecutor(min(depth, threads), thread_name_prefix="cache-fetch")

    def start(count: int) -> None:
        for request in islice(source, count):
            pending.append(Call(fetch, request))
            pool.submit(pending[-1].run)

    try:
        start(depth)
        while pending:
            ready = sum(call.has_run for call in pending)
            asked_ns = time.perf_counter_ns()
            result = pending.popleft().wait()
            on_wait(time.perf_counter_ns() - asked_ns, ready)
            start(1)
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
