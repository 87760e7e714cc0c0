"""Rows of a version that a node holds: gathered by id or sliced, from mapped shards.

Only reads, from an immutable snapshot; `store` owns the files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Protocol

import numpy as np
import pyarrow as pa

from cache_protocol.errors import (
    ErasedRowsError,
    InvalidRowsError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    some_of,
)
from cache_protocol.storage.disk_reads import DiskReads
from cache_protocol.storage.layout import Layout, from_matrix
from cache_protocol.storage.mapped_table import MappedTable
from cache_protocol.storage.row_index import Ids, Indices, RowIndex, RowRuns
from cache_protocol.storage.row_sets import among, decode_rows
from cache_protocol.storage.shard_files import (
    DamagedShardError,
    MappedShard,
    Selection,
    are_consecutive,
    empty_batch,
)
from cache_server.shards.version_key import VersionKey
from cache_server.sql.plain_columns import plain_column, plain_schema

_MOST_TIMES = 4  # as long as wanted a message may be
_MOST_SIZED = 64  # shards whose values are measured for a mean
_FEW_RUNS = 8  # in a message: fewer are sent alone
_MOST_COPIED = 1 << 20  # rows of runs, for their row ids take memory, too
_ROWS_PER_SHARD = 64  # of plain columns, gathered at once; a message may have fewer


class Prepared(Protocol):
    """Rows that were laid out in the order in which they are asked for."""

    def gather(
        self,
        row_ids: Ids,
        selection: Selection,
        from_shards: Callable[[Ids], pa.RecordBatch],
    ) -> pa.RecordBatch:
        """The rows with these ids, in this order; ``from_shards`` gathers those that it lacks."""


def _check_text(name: str, array: pa.Array) -> None:
    """Checks that the strings of a column are UTF-8.

    Raises:
        RequestError: one is not.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise RequestError(
            f"column {name!r} holds no valid UTF-8 ({error}): store it as binary; "
            "if its source is valid, its shard is damaged and is made again when it is "
            "scrubbed"
        ) from None


def runs_of_rows(
    columns: Sequence[pa.Array], num_rows: int, fixed_row_bytes: int, run_bytes: int
) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of rows of about ``run_bytes``, by the true sizes of their values. Pure.

    Args:
        columns: those whose values vary in size, each of ``num_rows`` rows.
        fixed_row_bytes: of the other columns.
    """
    size = num_rows * fixed_row_bytes + sum(column.nbytes for column in columns)
    step = max(1, num_rows * run_bytes // max(1, size))
    if step == 1 or size <= _MOST_TIMES * run_bytes:
        yield from ((at, min(at + step, num_rows)) for at in range(0, num_rows, step))
        return
    for at in range(0, num_rows, step):  # rows may be longer here than elsewhere
        parts = [column.slice(at, step) for column in columns]
        rows = min(step, num_rows - at)
        for first, last in runs_of_rows(parts, rows, fixed_row_bytes, run_bytes):
            yield at + first, at + last


def _plain_picks(selection: Selection) -> list[int]:
    """The stored indices of the plain columns of a selection."""
    picked = zip(selection.layout.columns, selection.picks, strict=True)
    return [index for column, (index, _) in picked if column.kind == "plain" and index is not None]


class ResidentRows:
    """The rows of one version that this node serves: an immutable, thread-safe snapshot.

    Args:
        key: for messages.
        layout: of the stored batches, without null bits.
        num_rows: of the whole version.
        shards: each with its first row id.
        on_damage: called with a shard whose offsets of strings or lists lie outside of their
            columns. Nothing is read by them.
    """

    def __init__(
        self,
        key: VersionKey,
        layout: Layout,
        num_rows: int,
        shards: Mapping[int, MappedShard],
        on_damage: Callable[[MappedShard], object] = lambda shard: None,
    ) -> None:
        self.key = key
        names = {name for shard in shards.values() for name in shard.layout.nulls.units}
        self.layout = layout.with_nulls(names)
        self.num_rows = num_rows
        ordered = sorted((start, s) for start, s in shards.items() if s.sealed.num_rows)
        self._shards = [shard for _, shard in ordered]
        self._starts = np.array([start for start, _ in ordered], np.int64)
        self._stops = self._starts + np.array([s.sealed.num_rows for s in self._shards], np.int64)
        self._index = RowIndex(self._starts, num_rows)
        self._whole = int((self._stops - self._starts).sum()) == num_rows
        self._lock = threading.Lock()
        self._mapped_table: MappedTable | None = None
        self._on_damage = on_damage
        self._num_readers, self._is_old = 0, False
        places = [
            decode_rows(shard.erased) + start
            for start, shard in zip(self._starts.tolist(), self._shards, strict=True)
            if shard.sealed.erased
        ]
        self.erased: Ids = np.concatenate([*places, np.empty(0, np.int64)])  # ascending

    def make_old(self) -> None:
        """Ends reads, each after its current message: rows are about to be erased."""
        with self._lock:
            self._is_old = True

    @property
    def is_read(self) -> bool:
        """Whether a read has not ended."""
        with self._lock:
            return self._num_readers > 0

    def _held(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, while the files are not overwritten.

        Raises:
            NotReadyError: rows of the version are being erased.
        """
        with self._lock:
            self._num_readers += 1
        try:
            self._check_current()
            for batch in batches:
                yield batch
                self._check_current()
        finally:
            with self._lock:
                self._num_readers -= 1

    def _check_current(self) -> None:
        if self._is_old:
            raise NotReadyError(f"rows of {self.key.dataset!r} are being erased on this node")

    def check_erased(self, start: int, stop: int) -> None:
        """Raises ErasedRowsError if one of the rows ``[start, stop)`` was forgotten."""
        if len(rows := self.places_erased(start, stop)):
            raise self._erased_error(rows + start)

    def _erased_error(self, rows: Ids) -> ErasedRowsError:
        return ErasedRowsError(
            f"row {some_of(rows[:100].tolist())} of {self.key.dataset!r} was forgotten: read the "
            "erased rows of the version again, and leave them out"
        )

    def places_erased(self, start: int, stop: int) -> Ids:
        """The forgotten rows of ``[start, stop)``, counted from its start."""
        first, last = np.searchsorted(self.erased, [start, stop])
        return self.erased[first:last] - start

    def _without_erased(self, batch: pa.RecordBatch, start: int) -> pa.RecordBatch:
        """The rows of a batch, which begins at a row, that were not forgotten."""
        places = self.places_erased(start, start + batch.num_rows)
        if not len(places):
            return batch
        kept = np.ones(batch.num_rows, np.bool_)
        kept[places] = False
        return batch.filter(pa.array(kept))

    def gather(
        self,
        row_ids: Ids,
        selection: Selection,
        rows_per_message: int = 0,
        order: Prepared | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows with these ids, in this order, as stored batches of the selection.

        Consecutive ids are slices of the mapped files. Other rows are copied.

        Args:
            rows_per_message: the most rows of a batch, fewer from a disk; 0: one batch has all.
            order: has some of the rows in buckets.

        Raises:
            InvalidRowsError: for an id outside the dataset; before the first batch.
            NotReadyError: for an id of a shard that this node does not hold; likewise. Or a shard
                was found to be damaged.
            NodeUnavailableError: the shards cannot be mapped.
            ErasedRowsError: one of the rows was forgotten.
        """
        yield from self._held(self._gather(row_ids, selection, rows_per_message, order))

    def _gather(
        self, row_ids: Ids, selection: Selection, rows_per_message: int, order: Prepared | None
    ) -> Iterator[pa.RecordBatch]:
        if not len(row_ids):
            yield empty_batch(selection.layout)
            return
        if (erased := among(row_ids, self.erased)).any():
            raise self._erased_error(row_ids[erased])
        low, high = int(row_ids.min()), int(row_ids.max())
        self._check_bounds(low, high)
        first = self._shard_at(low)
        step, one_shard = rows_per_message or len(row_ids), high < self._stops[first]
        if are_consecutive(row_ids) and (one_shard or rows_per_message):
            self.check_range(low, high + 1)
            yield from self.slices(low, high + 1, step, selection)
            return
        shard_of = self._locate(row_ids)
        table = self._side_by_side()
        if order is not None:
            yield from self._in_order(row_ids, selection, step, order)
            return
        block = step
        if any(column.kind == "plain" for column in selection.layout.columns):
            # Each shard costs some calls: gather enough rows at once for several of each shard.
            block = -(-max(step, _ROWS_PER_SHARD * len(self._shards)) // step) * step
        with self._damage_reported():
            if not rows_per_message:
                yield table.gather(row_ids, shard_of, selection)
                return
            for batch in table.parts(row_ids, shard_of, selection, block):
                for start in range(0, batch.num_rows, step):
                    yield batch.slice(start, step)

    def _in_order(
        self, row_ids: Ids, selection: Selection, step: int, order: Prepared
    ) -> Iterator[pa.RecordBatch]:
        """Rows that are here: from the buckets of an order, or from the shards."""

        def from_shards(ids: Ids) -> pa.RecordBatch:
            with self._damage_reported():
                return self._side_by_side().gather(ids, self._locate(ids), selection)

        for at in range(0, len(row_ids), step):
            yield order.gather(row_ids[at : at + step], selection, from_shards)

    def mean_row_bytes(self, selection: Selection) -> int:
        """About the bytes of a row of the selection: the mean over some shards that are here.

        Raises:
            NotReadyError: a shard is damaged.
        """
        plain = _plain_picks(selection)
        fixed = selection.layout.fixed_row_bytes
        shards = self._shards[:: -(-len(self._shards) // _MOST_SIZED) or 1]
        if not plain or not shards:
            return fixed
        with self._damage_reported():
            size = sum(shard.plain_bytes(index) for shard in shards for index in plain)
        return int(fixed + -(-size // sum(shard.sealed.num_rows for shard in shards)))

    def check_range(self, start: int, stop: int) -> None:
        """Raises unless rows ``[start, stop)`` exist (InvalidRowsError) and are here (NotReady)."""
        if not 0 <= start <= stop <= self.num_rows:
            raise InvalidRowsError(
                f"rows [{start}, {stop}) are outside dataset {self.key.dataset!r}, "
                f"which has rows [0, {self.num_rows})"
            )
        at = start
        while at < stop:
            at = int(self._stops[self._shard_at(at)])

    def shard_range(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of the one shard that holds rows ``[start, stop)``.

        Raises:
            InvalidRowsError: there are no such rows, or they are of several shards.
            NotReadyError: this node does not hold them.
        """
        self.check_range(start, stop)
        shard = self._shard_at(start) if start < stop else -1
        if shard < 0 or stop > self._stops[shard]:
            raise InvalidRowsError(f"rows [{start}, {stop}) are not rows of one shard")
        return int(self._starts[shard]), int(self._stops[shard])

    def slices(
        self, start: int, stop: int, max_rows: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``[start, stop)`` as stored batches of at most ``max_rows``; check the range first.

        Whole columns are views of the mapped files. Every ``max_rows``-th row begins a batch.
        """
        at = start
        while at < stop:
            shard = self._shard_at(at)
            offset = at - int(self._starts[shard])
            rows = min(max_rows - (at - start) % max_rows, stop - at, int(self._stops[shard]) - at)
            yield self._slice(self._shards[shard], offset, rows, selection)
            at += rows

    def runs(
        self, runs: RowRuns, stop: int, max_rows: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        """Rows of runs before ``stop`` as stored batches, as `slices`; short runs are copied.

        So each message has several of them.
        """
        yield from self._held(self._runs(runs, stop, max_rows, selection))

    def _runs(
        self, runs: RowRuns, stop: int, max_rows: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        together = min(max_rows, _MOST_COPIED) // runs.length if runs.length else 0
        if together < _FEW_RUNS:
            for first, last in runs.within(stop):
                self.check_erased(first, last)
                yield from self.slices(first, last, max_rows, selection)
            return
        found = runs.within(stop)
        while some := list(islice(found, together)):
            row_ids = np.concatenate([np.arange(first, last) for first, last in some])
            yield from self.gather(row_ids, selection)

    def messages(
        self, start: int, stop: int, message_bytes: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        """Like `slices`, in batches of about ``message_bytes``; a longer row is one batch.

        Rows that were forgotten are left out.
        """
        yield from self._held(self._messages(start, stop, message_bytes, selection))

    def _messages(
        self, start: int, stop: int, message_bytes: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        plain = _plain_picks(selection)
        fixed = selection.layout.fixed_row_bytes
        at = start
        while at < stop:
            shard = self._shard_at(at)
            offset = at - int(self._starts[shard])
            rows = min(stop, int(self._stops[shard])) - at
            columns = [self._plain(self._shards[shard], i, offset, rows) for i in plain]
            for first, last in runs_of_rows(columns, rows, fixed, message_bytes):
                made = self._slice(self._shards[shard], offset + first, last - first, selection)
                yield self._without_erased(made, at + first)
            at += rows

    def lots(
        self,
        start: int,
        stop: int,
        columns: Sequence[str],
        lot_bytes: int,
        *,
        with_erased: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Logical columns of rows ``[start, stop)`` of one shard, as SQL sees them, in order.

        A column that is stored alone is a view of the mapped file.

        Args:
            lot_bytes: about the most of one batch.
            with_erased: rows that were forgotten, too, as zeros: the caller leaves them out.

        Raises:
            InvalidRowsError, NotReadyError: as for `shard_range`. NotReadyError also if the shard
                is damaged.
            RequestError: a string is no UTF-8, which DataFusion trusts.
        """
        yield from self._held(self._lots(start, stop, columns, lot_bytes, with_erased))

    def _lots(
        self, start: int, stop: int, columns: Sequence[str], lot_bytes: int, with_erased: bool
    ) -> Iterator[pa.RecordBatch]:
        first, _ = self.shard_range(start, stop)
        stored = self._shards[self._shard_at(start)]
        selection = Selection(self.layout, columns)
        schema = plain_schema(selection.layout.logical)
        as_sql = Layout(schema, selection.layout.nulls.units)  # stored alike
        plain = [
            self._plain(stored, index, start - first, stop - start)
            for index in _plain_picks(selection)
        ]
        fixed = selection.layout.fixed_row_bytes
        for low, high in runs_of_rows(plain, stop - start, fixed, lot_bytes):
            rows = self._slice(stored, start - first + low, high - low, selection)
            logical = as_sql.unpack(rows)
            arrays = []
            for array, field in zip(logical.columns, schema, strict=True):
                if not pa.types.is_primitive(array.type):
                    _check_text(field.name, array)
                arrays.append(plain_column(array, field.type))
            made = pa.RecordBatch.from_arrays(arrays, schema=schema)
            yield made if with_erased else self._without_erased(made, start + low)

    def _plain(self, shard: MappedShard, index: int, offset: int, rows: int) -> pa.Array:
        """Consecutive rows of a column that is stored alone, whose offsets may be followed.

        Raises:
            NotReadyError: the shard is damaged.
        """
        with self._damage_reported():
            shard.check_run(index, offset, offset + rows)
        return shard.batch.column(index).slice(offset, rows)

    @contextmanager
    def _damage_reported(self) -> Iterator[None]:
        """Reports a damaged shard, and asks readers to come back or to go to a replica.

        Raises:
            NotReadyError: the shard is damaged.
        """
        try:
            yield
        except DamagedShardError as error:
            self._on_damage(error.shard)
            raise NotReadyError(
                f"shard {error.shard.sealed.index} of {self.key.dataset!r} is made again: {error}"
            ) from None

    def _check_bounds(self, low: int, high: int) -> None:
        if low < 0 or high >= self.num_rows:
            bad = low if low < 0 else high
            raise InvalidRowsError(
                f"row id {bad} is outside dataset {self.key.dataset!r}, "
                f"which has rows [0, {self.num_rows})"
            )

    def shard_of(self, row: int) -> MappedShard:
        """The shard with a row."""
        return self._shards[self._shard_at(row)]

    def first_of_shard(self, row: int) -> int:
        """The first row of the shard with a row."""
        return int(self._starts[self._shard_at(row)])

    @property
    def num_held(self) -> int:
        """Rows that are here."""
        return int((self._stops - self._starts).sum())

    @property
    def num_bytes(self) -> int:
        """Of the files of these shards."""
        return sum(shard.sealed.num_bytes for shard in self._shards)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The rows that are here, as ascending runs."""
        runs: list[tuple[int, int]] = []
        for start, stop in zip(self._starts.tolist(), self._stops.tolist(), strict=True):
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return runs

    def stored(
        self, start: int, stop: int, max_rows: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        """Rows as `slices`, also those that were forgotten, as zeros."""
        yield from self._held(self.slices(start, stop, max_rows, selection))

    def _shard_at(self, row: int) -> int:
        """Index of the shard with this row."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        if shard < 0 or row >= self._stops[shard]:
            raise NotReadyError(f"row {row} of {self.key.dataset!r} is not on this node")
        return shard

    def _locate(self, row_ids: Ids) -> Indices:
        """Index of the shard of each row; the smallest id must be here."""
        shard_of = self._index.find(row_ids)
        if not self._whole:
            missing = row_ids >= self._stops[shard_of]
            if missing.any():
                self._shard_at(int(row_ids[np.argmax(missing)]))
        return shard_of

    def _side_by_side(self) -> MappedTable:
        """The shards as one table, mapped at the first gather: most snapshots need none."""
        with self._lock:
            if self._mapped_table is None:
                sizes = [shard.sealed.num_rows for shard in self._shards]
                try:
                    disk = DiskReads.of_files(self._shards[0].path, self.num_bytes, sum(sizes))
                    table = MappedTable(self.layout, self._starts, sizes, disk=disk)
                    for position, shard in enumerate(self._shards):
                        table.attach(position, shard)
                except OSError as error:
                    raise NodeUnavailableError(
                        f"cannot map {len(sizes)} shards of {self.key.dataset!r}: "
                        f"{error.strerror}; the system allows too few maps (vm.max_map_count) or "
                        "addresses (ulimit -v)"
                    ) from None
                self._mapped_table = table
            return self._mapped_table

    def _slice(
        self, shard: MappedShard, offset: int, rows: int, selection: Selection
    ) -> pa.RecordBatch:
        arrays: list[pa.Array] = []
        for pick, (index, positions) in enumerate(selection.picks):
            column = selection.layout.columns[pick]
            if column.kind == "nulls":
                bits = shard.null_bits(selection.layout.nulls, slice(offset, offset + rows))
                found = selection.no_nulls(rows) if bits is None else np.ascontiguousarray(bits)
                arrays.append(from_matrix(found, column.field))
                continue
            assert index is not None
            if positions is None:
                arrays.append(self._plain(shard, index, offset, rows))
            else:
                part = shard.matrices[index][offset : offset + rows]
                arrays.append(from_matrix(selection.narrow(pick, part), column.field))
        return pa.RecordBatch.from_arrays(arrays, schema=selection.layout.schema)
