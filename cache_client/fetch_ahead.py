"""Several fetches on their way at once, handed out in the order they were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

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
    # Where results arrive. An interrupt while a future is waited for may leave its lock taken, and
    # the thread that is to say its result, which the program awaits when it ends, hangs there.
    pending: deque[SimpleQueue[_Outcome[_Result]]] = deque()
    source = iter(requests)
    pool = ThreadPoolExecutor(min(depth, threads), thread_name_prefix="cache-fetch")

    def begin(count: int) -> None:
        for request in islice(source, count):
            pending.append(SimpleQueue())
            pool.submit(_fetch, fetch, request, pending[-1])

    try:
        begin(depth)
        while pending:
            outcome = pending.popleft().get()
            try:
                if outcome.error is not None:
                    raise outcome.error
                begin(1)
                yield outcome.result  # type: ignore[misc]  # there is one where there is no error
            finally:
                del outcome  # what was raised holds this frame
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Outcome(NamedTuple, Generic[_Result]):
    """What came of a request: a result unless there is an error."""

    result: _Result | None = None
    error: BaseException | None = None


def _fetch(
    fetch: Callable[[_Request], _Result],
    request: _Request,
    outcome: SimpleQueue[_Outcome[_Result]],
) -> None:
    try:
        outcome.put(_Outcome(fetch(request)))
    except BaseException as error:  # raised where it is waited for
        outcome.put(_Outcome(error=error))
