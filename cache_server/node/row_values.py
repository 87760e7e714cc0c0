"""Values that a node computes from the rows that it serves, for the views of jobs.

A process apart computes them, with limits of memory and time: see `sql_process`.

The rows of a condition are kept, because every rank of a job asks for them. They take the memory
that the shards leave free. Those of the principal with the most give way, the oldest first.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.cli.output import size
from cache_protocol.errors import NodeUnavailableError, NotReadyError, RequestError, short
from cache_protocol.storage.column_stats import STATS_SCHEMA
from cache_protocol.storage.memory_budget import ExpressionMemory
from cache_protocol.storage.row_sets import among
from cache_server.node.desired import LoadPlan
from cache_server.node.loads.load_functions import NodeFunctions
from cache_server.node.turns import Turns
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.version_key import VersionKey
from cache_server.sql import sql_process
from cache_server.sql.column_stats import column_stats_batches
from cache_server.sql.plain_columns import plain_schema
from cache_server.sql.row_queries import (
    ROW_SCHEMA,
    RowQuery,
    check_row_query,
    row_query_batches,
)
from cache_server.sql.sql_frames import Request
from cache_server.sql.sql_process import LimitError, Limits, SqlProcess

MAX_VALUE_BYTES = 128 * 1024 * 1024  # of one answer
MAX_WAITING = 256  # requests of a principal
MAX_WAIT_S = 30.0  # of a request, until it is its turn or another one has computed its rows
MAX_TURN_S = 30.0  # of a computation
MAX_KEPT = 16_384  # conditions, each of one shard; they take about 1 KB each besides their rows
MAX_STATS = 256  # columns
_LOT_BYTES = 16 * 1024 * 1024
_CHECK_S = 0.1
_MOST_QUERIES = 64
_UNLIMITED_BYTES = 1024 * 1024 * 1024  # kept by a node without a memory limit

RowNumbers: TypeAlias = npt.NDArray[np.uint32]
_Text: TypeAlias = tuple[str, tuple[str, ...], pa.Schema]


class _GoneError(Exception):
    """The client is gone."""


@dataclass(frozen=True)
class Caller:
    """Who asks for values.

    Attributes:
        namespace, principal: whose turn it is.
        is_gone: answers whether the client ended its call.
    """

    namespace: str = ""
    principal: str = ""
    is_gone: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Raises an error when the client ended its call."""
        if self.is_gone():
            raise _GoneError


NOBODY = Caller()


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
        memory: how many computations run at the same time, and what each may take; others wait.
        functions: that expressions may call; None: no installed function.
        plan_of: the plan of a version, whose files they may name; None: it is not known.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int | None],
        memory: ExpressionMemory,
        functions: NodeFunctions | None = None,
        plan_of: Callable[[VersionKey], LoadPlan | None] = lambda key: None,
    ) -> None:
        self._plan_of = plan_of
        self._functions = functions
        self._free_bytes = free_bytes
        self._memory_bytes = memory.num_bytes
        self._turns = Turns(memory.at_once, memory.of_namespace)
        self._lock = threading.Lock()
        self._waiting = Counter[str]()
        self._kept: dict[_Selection, _Kept] = {}
        self._queries: dict[tuple[VersionKey, _Text], RowQuery] = {}  # the oldest first
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
        caller: Caller = NOBODY,
    ) -> tuple[pa.Schema, list[pa.Array]]:
        """The values of rows ``[start, stop)`` of one shard, or those that fulfil conditions.

        Args:
            expression, where: see `check_row_query`.
            caller: who asks.

        Returns:
            The schema of one column, and its values in pieces. Rows are counted from ``start``.

        Raises:
            RequestError: it cannot be computed; says why.
            InvalidRowsError, NotReadyError: as for `ResidentRows.lots`; or too many requests wait,
                or this one waited too long.
            NodeUnavailableError: the client is gone.
        """
        try:
            if not expression:
                return ROW_SCHEMA, [pa.array(self._selected(rows, start, stop, where, caller))]
            with self._turn(caller):
                schema, pieces = self._computed(expression, where, rows, start, stop, caller)
                return schema, _without_values(pieces, rows.places_erased(start, stop))
        except _GoneError:
            raise NodeUnavailableError("the client ended its call") from None

    def column_stats(
        self,
        rows: ResidentRows,
        start: int,
        stop: int,
        columns: tuple[str, ...],
        caller: Caller = NOBODY,
    ) -> tuple[pa.Schema, list[pa.Array]]:
        """The statistics of columns over rows ``[start, stop)`` of one shard.

        Returns:
            `STATS_SCHEMA`, and its values in pieces, in the order of ``columns``.

        Raises:
            RequestError, InvalidRowsError, NotReadyError, NodeUnavailableError: as `answer`; or
                there is no such column, or there are too many.
        """
        if len(columns) > MAX_STATS or len(set(columns)) < len(columns):
            raise RequestError(
                f"statistics are of at most {MAX_STATS} different columns at once, got "
                f"{len(columns)}"
            )
        limits = Limits(self._memory_bytes, MAX_TURN_S, caller.check)
        run = Request(
            column_stats_batches,
            (len(columns), start),
            memory_bytes=self._memory_bytes,
            takes_lots=True,
        )
        try:
            with self._turn(caller), sql_process.lease() as process:
                lots = rows.lots(start, stop, columns, _LOT_BYTES, with_erased=False)
                batches = process.run(run, limits, lots=lots)
                return STATS_SCHEMA, _bounded(batch.column(0) for batch in batches)
        except LimitError as error:
            raise RequestError(
                f"statistics of {len(columns)} columns {error}: ask for fewer columns at once"
            ) from None
        except _GoneError:
            raise NodeUnavailableError("the client ended its call") from None

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
        caller: Caller,
    ) -> RowNumbers:
        """The rows that fulfil conditions; computed once for each shard."""
        first, last = rows.shard_range(start, stop)
        name = _Selection(rows.key, first, hashlib.sha256(repr(where).encode()).digest())
        numbers = None
        while numbers is None:
            with self._lock:
                kept = self._kept.get(name)
                mine = kept is None
                if kept is None:
                    kept = self._kept[name] = _Kept(caller.principal)
                self._names[kept.owner][name] = None
                self._names[kept.owner].move_to_end(name)
            if mine:
                self._select(name, kept, where, rows, first, last, caller)
            numbers = self._waited_for(kept, caller)
        if (first, last) == (start, stop):
            return numbers
        bounds = np.searchsorted(numbers, [start - first, stop - first])
        return numbers[bounds[0] : bounds[1]] - np.uint32(start - first)

    def _select(
        self,
        name: _Selection,
        kept: _Kept,
        where: tuple[str, ...],
        rows: ResidentRows,
        first: int,
        last: int,
        caller: Caller,
    ) -> None:
        """Computes the rows of a selection, for all who wait for it."""
        try:
            with self._turn(caller):
                _, pieces = self._computed("", where, rows, first, last, caller)
                found = _joined([piece.to_numpy() for piece in pieces])
                numbers = found[~among(found.astype(np.int64), rows.places_erased(first, last))]
        except BaseException as error:
            with self._lock:
                if self._kept.get(name) is kept:
                    self._drop(name)
            kept.rows.set_exception(error)
            raise
        with self._lock:
            kept.rows.set_result(numbers)
            if self._kept.get(name) is kept:
                kept.num_bytes = numbers.nbytes
                self._num_bytes[kept.owner] += numbers.nbytes
        self.trim()

    def _waited_for(self, kept: _Kept, caller: Caller) -> RowNumbers | None:
        """The rows of a selection; None if the client for whom they were computed is gone."""
        if not kept.rows.done():
            with self._waits(caller.principal):
                deadline = time.monotonic() + MAX_WAIT_S
                while not wait([kept.rows], min(_CHECK_S, MAX_WAIT_S)).done:
                    caller.check()
                    if time.monotonic() > deadline:
                        raise _waited_in_vain()
        try:
            return kept.rows.result()
        except _GoneError:
            return None

    def _computed(
        self,
        expression: str,
        where: tuple[str, ...],
        rows: ResidentRows,
        start: int,
        stop: int,
        caller: Caller,
    ) -> tuple[pa.Schema, list[pa.Array]]:
        """The schema and the values of a query, from another process."""
        limits = Limits(self._memory_bytes, MAX_TURN_S, caller.check)
        schema = plain_schema(rows.layout.logical)
        plan = self._plan_of(rows.key)
        with sql_process.lease() as process:
            try:
                query = self._query(process, limits, (expression, where, schema), rows.key, plan)
                run = Request(
                    row_query_batches, (query,), memory_bytes=self._memory_bytes, takes_lots=True
                )
                lots = rows.lots(start, stop, query.schema.names, _LOT_BYTES)
                functions = None
                if self._functions is not None:
                    functions = self._functions.run_for_rows(plan, caller.check)
                batches = process.run(run, limits, lots=lots, functions=functions)
                return query.result, _bounded(batch.column(0) for batch in batches)
            except LimitError as error:
                text = " where ".join(filter(None, (expression, " AND ".join(where))))
                raise RequestError(
                    f"{short(repr(text))} {error}: ask for fewer rows at once, or compute it in "
                    "the `sql` of the load"
                ) from None

    def _query(
        self,
        process: SqlProcess,
        limits: Limits,
        text: _Text,
        version: VersionKey,
        plan: LoadPlan | None,
    ) -> RowQuery:
        """A checked query; every shard asks for the same."""
        with self._lock:
            if (known := self._queries.get((version, text))) is not None:
                return known
        if self._functions is not None:
            bound = self._functions.bound_expressions(*text, plan)
        else:
            bound = text[:2]
        check = Request(check_row_query, (*bound, text[2]), memory_bytes=self._memory_bytes)
        query: RowQuery = sql_process.value_of(process.run(check, limits))
        with self._lock:
            while len(self._queries) >= _MOST_QUERIES:
                del self._queries[next(iter(self._queries))]
            self._queries[version, text] = query
        return query

    @contextmanager
    def _turn(self, caller: Caller) -> Iterator[None]:
        with self._waits(caller.principal), ExitStack() as turn:
            try:
                turn.enter_context(
                    self._turns.turn(caller.namespace, caller.principal, caller.check, MAX_WAIT_S)
                )
            except TimeoutError:
                raise _waited_in_vain() from None
            yield

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


def _bounded(pieces: Iterator[pa.Array]) -> list[pa.Array]:
    within, num_bytes = [], 0
    for piece in pieces:
        num_bytes += piece.nbytes
        if num_bytes > MAX_VALUE_BYTES:
            raise RequestError(
                f"the values of one answer take more than {size(MAX_VALUE_BYTES)}: ask for fewer "
                "rows at once"
            )
        within.append(piece)
    return within


def _without_values(pieces: list[pa.Array], places: npt.NDArray[np.int64]) -> list[pa.Array]:
    """The values, null at these places: their rows were forgotten."""
    start, found = 0, []
    for piece in pieces if len(places) else ():
        mask = np.zeros(len(piece), np.bool_)
        mask[places[(places >= start) & (places < start + len(piece))] - start] = True
        found.append(pc.if_else(pa.array(mask), pa.scalar(None, piece.type), piece))
        start += len(piece)
    return found or pieces


def _joined(pieces: list[RowNumbers]) -> RowNumbers:
    numbers = np.concatenate([np.empty(0, np.uint32), *pieces])
    numbers.flags.writeable = False
    return numbers
