"""Runs installed functions for queries: which processes compute a batch, and what a failure names.

A query calls a bound function in the thread that runs it. `running` says who computes it there: a
node by its `FunctionWorkers`; a process apart by the node that it works for. Where that is not
said, as while a query is planned, a call is an error, and DataFusion leaves it as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Protocol

import pyarrow as pa

from cache_protocol.errors import LoadError, NodeUnavailableError, short
from cache_server.sql.bound_functions import bound_function
from cache_server.sql.function_worker import MOST_MADE, compute
from cache_server.sql.sql_frames import Request
from cache_server.sql.sql_process import LimitError, Limits, Pool, SqlProcess

_SLICE_ROWS, _SLICE_BYTES = 1024, 4 << 20  # of arguments, that a process gets at once
_SLICE_S = 60.0
_SEARCH_S = 10.0  # for a part of a slice that failed, while the row is looked for
_MOST_TRIES = 12  # of that search
_MOST_TEXTS = 8  # files that are kept

Texts = Callable[[str], Mapping[str, str]]
"""The name of a bound function -> the texts of its files."""


class Run(Protocol):
    """Computes the values of a bound function for a batch of its arguments."""

    def __call__(self, name: str, batch: pa.RecordBatch) -> pa.Array:
        """Raises a CacheError that names the function and the row."""


_RUN: ContextVar[Run | None] = ContextVar("function_run", default=None)


@contextmanager
def running(run: Run | None) -> Iterator[None]:
    """Within it, queries that this thread opens compute functions by ``run``."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def current_run() -> Run | None:
    """Who computes functions for queries of this thread."""
    return _RUN.get()


class FunctionWorkers:
    """Processes that compute functions for all queries of a node. Thread-safe.

    Args:
        count: processes at the same time.
        memory_bytes: of address space that each may take.
        slice_s: the longest that a process may work on one slice.
    """

    def __init__(self, count: int, memory_bytes: int, slice_s: float = _SLICE_S) -> None:
        self.count = count
        self._limits = Limits(memory_bytes, slice_s)
        self._search_s = min(slice_s, _SEARCH_S)
        self._processes = Pool(most_idle=count, spare=0)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="function")
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends the processes, also those that compute."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def run(
        self,
        name: str,
        batch: pa.RecordBatch,
        texts: Texts,
        check: Callable[[], None] = lambda: None,
        first_row: int = 0,
    ) -> pa.Array:
        """The values of a bound function for a batch of its arguments, in order.

        Args:
            texts: of the files that the function names.
            check: raises an error when the values are no longer needed.
            first_row: number of the first row, for messages.

        Raises:
            LoadError: names the function, the row and its first argument.
        """
        gone = threading.Event()
        waits: list[Future[pa.Array]] = []
        for start, length in _slices(batch, self.count):
            rows = batch.slice(start, length)
            work = partial(self._slice, name, rows, texts, gone, first_row + start)
            waits.append(self._threads.submit(work))
        try:
            while wait(waits, 0.1).not_done:
                check()
            values = [each.result() for each in waits]
        except BaseException:
            gone.set()
            for each in waits:
                each.cancel()
            raise
        return pa.concat_arrays(values) if len(values) != 1 else values[0]

    def _slice(
        self, name: str, rows: pa.RecordBatch, texts: Texts, gone: threading.Event, first_row: int
    ) -> pa.Array:
        function = bound_function(name).function
        try:
            found = self._tried(name, rows, texts, gone)
            if isinstance(found, pa.Array):
                return found
            row, length, reason = self._culprit(name, rows, texts, gone, found)
        except _UnmadeError as error:
            reason = short(str(error), 200)
            raise LoadError(f"function {function} {reason}, before it got a row") from None
        where = f"row {first_row + row}"
        if length > 1:
            where = f"rows {first_row + row} to {first_row + row + length - 1}, together"
        value = short(repr(rows.column(0)[row].as_py()), 80) if length == 1 else ""
        raise LoadError(
            f"function {function} {short(reason, 200)}: {where} of those that it got"
            f"{', ' * bool(value)}{value}"
        )

    def _culprit(
        self, name: str, rows: pa.RecordBatch, texts: Texts, gone: threading.Event, reason: str
    ) -> tuple[int, int, str]:
        """The first row that fails alone, or the shortest part that was found; and why."""
        start, length = 0, rows.num_rows
        is_sure = True  # that this part fails
        for _ in range(_MOST_TRIES):
            if length == 1 and is_sure:
                break
            half = max(1, length // 2)
            tried = rows.slice(start, half)
            found = self._tried(name, tried, texts, gone, self._search_s)
            if isinstance(found, str):
                length, reason, is_sure = half, found, True
            elif length == 1:  # only with rows before it
                return 0, rows.num_rows, reason
            else:
                start, length, is_sure = start + half, length - half, False
        return start, length, reason

    def _tried(
        self,
        name: str,
        rows: pa.RecordBatch,
        texts: Texts,
        gone: threading.Event,
        time_s: float | None = None,
    ) -> pa.Array | str:
        """The values of some rows; or why they have none, a verb and its object."""

        def check() -> None:
            if gone.is_set():
                raise _GoneError
            if self._closed.is_set():
                raise NodeUnavailableError("this node stops, and computes no functions")

        limits = Limits(self._limits.memory_bytes, time_s or self._limits.time_s, check)
        try:
            with self._processes.lease() as process:
                return _computed(process, limits, name, rows, texts)
        except LimitError as error:
            return str(error)
        except LoadError as error:
            return str(error)


class _GoneError(Exception):
    """The values are no longer needed."""


class _UnmadeError(Exception):
    """The function could not be made; the message is a verb and its object."""


def _computed(
    process: SqlProcess, limits: Limits, name: str, rows: pa.RecordBatch, texts: Texts
) -> pa.Array:
    if name not in process.known:  # the time of a slice does not count what is imported and made
        files = texts(name)
        try:
            _make(process, limits, name, rows, files)
        except (LimitError, LoadError) as error:
            raise _UnmadeError(str(error)) from None
    (batch,) = process.run(_request(name, None, limits), limits, lots=[rows])
    return batch.column(0)


def _make(
    process: SqlProcess,
    limits: Limits,
    name: str,
    rows: pa.RecordBatch,
    files: Mapping[str, str],
) -> None:
    """Lets a process make a function, by a batch without rows."""
    clear = len(process.known) >= MOST_MADE
    if clear:
        process.known.clear()
    request = _request(name, files, limits, clear=clear)
    list(process.run(request, replace(limits, time_s=_SLICE_S), lots=[rows.slice(0, 0)]))
    process.known.add(name)


def _request(
    name: str, files: Mapping[str, str] | None, limits: Limits, *, clear: bool = False
) -> Request:
    return Request(
        compute,
        (name, files),
        {"clear": clear},
        limits.memory_bytes,
        takes_lots=True,
        may_grow=True,
    )


def _slices(batch: pa.RecordBatch, count: int) -> list[tuple[int, int]]:
    """Start and length of parts of a batch, so that ``count`` processes have some."""
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    even = -(-batch.num_rows // count)
    step = max(1, min(_SLICE_ROWS, even, _SLICE_BYTES // row_bytes))
    starts = range(0, max(1, batch.num_rows), step)
    return [(start, min(step, batch.num_rows - start)) for start in starts]


class FileTexts:
    """The texts of files that functions name, by digest; the last ones are kept. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, str] = OrderedDict()

    def get(self, sha256: str, read: Callable[[], str]) -> str:
        """The text of a digest; ``read`` reads it when it is not kept."""
        with self._lock:
            if (text := self._texts.get(sha256)) is not None:
                self._texts.move_to_end(sha256)
                return text
            text = self._texts[sha256] = read()
            while len(self._texts) > _MOST_TEXTS:
                self._texts.popitem(last=False)
            return text


class Calls:
    """A bound function as DataFusion calls it in one query.

    Args:
        name: of the bound function.
        run: what computes it; None: a call is an error.
    """

    def __init__(self, name: str, run: Run | None) -> None:
        self._names = list(bound_function(name).columns)
        self._name, self._run = name, run

    def __call__(self, *columns: pa.Array) -> pa.Array:
        """The values for a batch of arguments."""
        if self._run is None:
            raise RuntimeError("functions are not computed while a query is planned")
        return self._run(self._name, pa.RecordBatch.from_arrays(list(columns), self._names))
