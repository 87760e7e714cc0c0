"""Values that a node computes from the rows that it serves, for the views of jobs.

The rows of a condition are kept, because every rank of a job asks for them. They take the memory
that the shards leave free. Those of the principal with the most give way, the oldest first.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
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
MAX_WAITING = 256  # requests of a principal
MAX_WAIT_S = 30.0  # of a request, until it is its turn or another one has computed its rows
MAX_KEPT = 16_384  # conditions, each of one shard; they take about 1 KB each besides their rows
_LOT_BYTES = 16 * 1024 * 1024
_UNLIMITED_BYTES = 1024 * 1024 * 1024  # kept by a node without a memory limit

RowNumbers: TypeAlias = npt.NDArray[np.uint32]


class _Selection(NamedTuple):
    """Names the rows of one shard that fulfil some conditions."""

    version: VersionKey
    shard_start: int
    where: bytes  # digest


@dataclass(eq=False)
class _Kept:
    """Rows of a selection, and the principal who asked first."""

    owner: str
    rows: Future[RowNumbers] = field(default_factory=Future)
    num_bytes: int = 0


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
        self._waiting = Counter[str]()
        self._kept: dict[_Selection, _Kept] = {}
        # By owner; names are those of ``_kept``, the oldest first.
        self._names = defaultdict[str, OrderedDict[_Selection, None]](OrderedDict)
        self._num_bytes = Counter[str]()

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that are kept."""
        with self._lock:
            return self._num_bytes.total()

    def answer(
        self,
        rows: ResidentRows,
        start: int,
        stop: int,
        expression: str,
        where: tuple[str, ...],
        *,
        principal: str = "",
    ) -> tuple[pa.Schema, list[pa.Array]]:
        """The values of rows ``[start, stop)`` of one shard, or those that fulfil conditions.

        Args:
            expression, where: see `check_row_query`.
            principal: who asks.

        Returns:
            The schema of one column, and its values in pieces. Rows are counted from ``start``.

        Raises:
            RequestError: it cannot be computed; says why.
            InvalidRowsError, NotReadyError: as for `ResidentRows.lots`; or too many requests wait,
                or this one waited too long.
        """
        if not expression:
            return ROW_SCHEMA, [pa.array(self._selected(rows, start, stop, where, principal))]
        with self._turn(principal):
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
            while self._num_bytes.total() > max(0, most_bytes):
                self._drop_oldest(max(self._num_bytes, key=lambda owner: self._num_bytes[owner]))
            while len(self._kept) > MAX_KEPT:
                self._drop_oldest(max(self._names, key=lambda owner: len(self._names[owner])))

    def _drop_oldest(self, owner: str) -> None:
        self._drop(next(iter(self._names[owner])))

    def _drop(self, name: _Selection) -> None:
        """Needs the lock. Those who wait for it get it all the same."""
        kept = self._kept.pop(name)
        names = self._names[kept.owner]
        del names[name]
        self._num_bytes[kept.owner] -= kept.num_bytes
        if not names:
            del self._names[kept.owner], self._num_bytes[kept.owner]

    def _selected(
        self,
        rows: ResidentRows,
        start: int,
        stop: int,
        where: tuple[str, ...],
        principal: str,
    ) -> RowNumbers:
        """The rows that fulfil conditions; computed once for each shard."""
        first, last = rows.shard_range(start, stop)
        name = _Selection(rows.key, first, hashlib.sha256(repr(where).encode()).digest())
        with self._lock:
            found = self._kept.get(name)
            mine = found is None
            if found is None:
                found = self._kept[name] = _Kept(principal)
            self._names[found.owner][name] = None
            self._names[found.owner].move_to_end(name)
        if mine:
            try:
                with self._turn(principal):
                    query = check_row_query("", where, sql_schema(rows.layout.logical))
                    pieces = _computed(query, rows, first, last)
                    numbers = _joined([piece.to_numpy() for piece in pieces])
            except BaseException as error:
                with self._lock:
                    if self._kept.get(name) is found:
                        self._drop(name)
                found.rows.set_exception(error)
                raise
            with self._lock:
                found.rows.set_result(numbers)
                if self._kept.get(name) is found:
                    found.num_bytes = numbers.nbytes
                    self._num_bytes[found.owner] += numbers.nbytes
            self.trim()
        elif not found.rows.done():
            with self._waits(principal):
                if not wait([found.rows], MAX_WAIT_S).done:
                    raise _waited_in_vain()
        numbers = found.rows.result()
        if (first, last) == (start, stop):
            return numbers
        bounds = np.searchsorted(numbers, [start - first, stop - first])
        return numbers[bounds[0] : bounds[1]] - np.uint32(start - first)

    @contextmanager
    def _turn(self, principal: str) -> Iterator[None]:
        with self._waits(principal):
            if not self._turns.acquire(timeout=MAX_WAIT_S):
                raise _waited_in_vain()
            try:
                yield
            finally:
                self._turns.release()

    @contextmanager
    def _waits(self, principal: str) -> Iterator[None]:
        with self._lock:
            if self._waiting[principal] >= MAX_WAITING:
                raise NotReadyError(
                    f"{MAX_WAITING} other requests of {principal!r} wait for values of rows"
                )
            self._waiting[principal] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[principal] -= 1
                self._waiting = +self._waiting  # those that wait


def _waited_in_vain() -> NotReadyError:
    return NotReadyError(
        f"other requests for values of rows took longer than {MAX_WAIT_S:g} s: try again later"
    )


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
