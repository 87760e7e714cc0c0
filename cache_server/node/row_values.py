"""Values that a node computes from the rows that it serves, for the views of jobs.

The rows of a condition are kept, because every rank of a job asks for them. They take the memory
that the shards leave free, and those that were not asked for longest give way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.cli.sizes import size
from cache_protocol.errors import NotReadyError, RequestError
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.sql_types import sql_schema
from cache_server.shards.version_key import VersionKey
from cache_server.sql.row_queries import ROW_SCHEMA, RowQuery, check_row_query, run_row_query

MAX_VALUE_BYTES = 128 * 1024 * 1024  # of one answer
MAX_WAITING = 256  # requests
MAX_KEPT = 65_536  # conditions, each of one shard
_LOT_BYTES = 16 * 1024 * 1024
_UNLIMITED_BYTES = 1024 * 1024 * 1024  # kept by a node without a memory limit

RowNumbers: TypeAlias = npt.NDArray[np.uint32]


class _Selection(NamedTuple):
    """Names the rows of one shard that fulfil some conditions."""

    version: VersionKey
    shard_start: int
    where: tuple[str, ...]


class RowValues:
    """Computes values of rows; keeps the rows of conditions. Thread-safe.

    Args:
        free_bytes: answers the memory that the shards leave; None: no limit.
        at_once: computations that run at the same time; others wait.
    """

    def __init__(self, free_bytes: Callable[[], int | None], at_once: int) -> None:
        self._free_bytes = free_bytes
        self._turns = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._waiting = 0
        self._kept: OrderedDict[_Selection, Future[RowNumbers]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that are kept."""
        with self._lock:
            return self._num_bytes

    def answer(
        self, rows: ResidentRows, start: int, stop: int, expression: str, where: tuple[str, ...]
    ) -> tuple[pa.Schema, list[pa.Array]]:
        """The values of rows ``[start, stop)`` of one shard, or those that fulfil conditions.

        Args:
            expression, where: see `check_row_query`.

        Returns:
            The schema of one column, and its values in pieces. Rows are counted from ``start``.

        Raises:
            RequestError: it cannot be computed; says why.
            InvalidRowsError, NotReadyError: as for `ResidentRows.lots`; or too many requests wait.
        """
        if not expression:
            return ROW_SCHEMA, [pa.array(self._selected(rows, start, stop, where))]
        with self._turn():
            query = check_row_query(expression, where, sql_schema(rows.layout.logical))
            return query.result, list(_bounded(_computed(query, rows, start, stop)))

    def forget(self, version: VersionKey) -> None:
        """Frees what is kept of a version."""
        with self._lock:
            for name in [name for name in self._kept if name.version == version]:
                self._drop(name)

    def trim(self) -> None:
        """Frees what the shards leave no memory for."""
        free = self._free_bytes()
        most_bytes = _UNLIMITED_BYTES if free is None else free
        with self._lock:
            while self._kept and (self._num_bytes > most_bytes or len(self._kept) > MAX_KEPT):
                self._drop(next(iter(self._kept)))

    def _drop(self, name: _Selection) -> None:
        """Needs the lock. Those who wait for it get it all the same."""
        found = self._kept.pop(name)
        self._num_bytes -= found.result().nbytes if found.done() else 0

    def _selected(
        self, rows: ResidentRows, start: int, stop: int, where: tuple[str, ...]
    ) -> RowNumbers:
        """The rows that fulfil conditions; computed once for each shard."""
        first, last = rows.shard_range(start, stop)
        name = _Selection(rows.key, first, where)
        with self._lock:
            found = self._kept.get(name)
            mine = found is None
            if found is None:
                found = self._kept[name] = Future()
            self._kept.move_to_end(name)
        if mine:
            try:
                with self._turn():
                    query = check_row_query("", where, sql_schema(rows.layout.logical))
                    pieces = _computed(query, rows, first, last)
                    numbers = _joined([piece.to_numpy() for piece in pieces])
            except BaseException as error:
                with self._lock:
                    if self._kept.get(name) is found:
                        del self._kept[name]
                found.set_exception(error)
                raise
            with self._lock:
                found.set_result(numbers)
                if self._kept.get(name) is found:
                    self._num_bytes += numbers.nbytes
            self.trim()
        numbers = found.result()
        if (first, last) == (start, stop):
            return numbers
        bounds = np.searchsorted(numbers, [start - first, stop - first])
        return numbers[bounds[0] : bounds[1]] - np.uint32(start - first)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise NotReadyError(f"{MAX_WAITING} other requests wait for values of rows")
            self._waiting += 1
        try:
            with self._turns:
                yield
        finally:
            with self._lock:
                self._waiting -= 1


def _computed(query: RowQuery, rows: ResidentRows, start: int, stop: int) -> Iterator[pa.Array]:
    return run_row_query(query, rows.lots(start, stop, query.schema.names, _LOT_BYTES))


def _bounded(pieces: Iterator[pa.Array]) -> Iterator[pa.Array]:
    num_bytes = 0
    for piece in pieces:
        num_bytes += piece.nbytes
        if num_bytes > MAX_VALUE_BYTES:
            raise RequestError(
                f"the values of one answer take more than {size(MAX_VALUE_BYTES)}: ask for fewer "
                "rows at once"
            )
        yield piece


def _joined(pieces: list[RowNumbers]) -> RowNumbers:
    numbers = np.concatenate([np.empty(0, np.uint32), *pieces])
    numbers.flags.writeable = False
    return numbers
