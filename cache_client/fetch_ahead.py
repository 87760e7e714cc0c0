"""Several fetches on their way at once, handed out in the order they were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from cache_client.grpc_guard.calls import Call

FETCH_THREADS = 2  # more cost processor time and bring no rows

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


def fetch_ahead(
    fetch: Callable[[_Request], _Result], requests: Iterable[_Request], *, depth: int, threads: int
) -> Generator[_Result, None, None]:
    """``map(fetch, requests)`` with at most ``depth`` results under way or waiting.

    Results come in the order of the requests; a failure is raised in its turn. Closing the
    iterator drops what was not begun.

    Args:
        threads: calls at the same time.
    """
    pending: deque[Call[_Result]] = deque()
    source = iter(requests)
    pool = ThreadPoolExecutor(min(depth, threads), thread_name_prefix="cache-fetch")

    def begin(count: int) -> None:
        for request in islice(source, count):
            pending.append(Call(fetch, request))
            pool.submit(pending[-1].make)

    try:
        begin(depth)
        while pending:
            result = pending.popleft().wait()
            begin(1)
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
