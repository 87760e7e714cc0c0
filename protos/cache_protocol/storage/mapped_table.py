"""Maps shard files side by side, so that all of their rows are one matrix a column.

One call for each stored column then gathers random rows of any shards, in the requested order:
without grouping by shard, without a second copy to reorder, without a Python call for each shard.

    files       |hdr| 2 000 rows |    |hdr| 1 500 rows |    |hdr| 2 000 rows |
    addresses   [ 2 000 rows | gap | 1 500 rows | gap | 2 000 rows ]     one range for each column

A file can be mapped only at multiples of the page size, and the rows of a matrix must be at
multiples of the row size. So a gap before each file satisfies both; it has fewer pages than a row
has bytes. A gap takes addresses, but no memory. The order of columns in
`cache_protocol.storage.layout` guarantees that such a gap exists.

Pages are huge ones if a shard is large enough for one, else normal ones.
"""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from cache_protocol.storage.disk_reads import DiskReads
from cache_protocol.storage.layout import (
    Layout,
    Matrix,
    StoredColumn,
    fits_lists,
    from_equal_lists,
    from_matrix,
    pool_matrix,
)
from cache_protocol.storage.null_bits import BitMatrix
from cache_protocol.storage.offsets import are_within
from cache_protocol.storage.page_runs import page_runs
from cache_protocol.storage.row_index import Grouped, Ids, Indices
from cache_protocol.storage.shard_files import MappedShard, Selection, are_consecutive
from cache_protocol.storage.virtual_memory import (
    AddressRange,
    MappedFile,
    bring,
    bytes_from_disk,
    huge_page_bytes,
)

MAPS_PER_COLUMN = 2  # of each shard: its rows, and the gap before them
_FEW_ROWS = 64  # to look at how they came would take longer than to take them
_MAX_ADDRESSES = 2**44  # of a column; a process has 2**47, for all columns


class MappedTable:
    """The mapped shards of one version. Any threads may gather while one attaches.

    Args:
        layout: of the stored batches.
        starts: first row id of each shard.
        num_rows: of each shard; 0 for shards that are never attached.
        only: indices of the stored columns to map; None for all.
        disk: how rows come from the disk of the files; None: they are in memory.

    Raises:
        OSError: the process does not have enough addresses.
    """

    def __init__(
        self,
        layout: Layout,
        starts: Ids,
        num_rows: Sequence[int],
        *,
        only: Collection[int] | None = None,
        disk: DiskReads | None = None,
    ) -> None:
        self._layout = layout
        self._disk = disk
        self._starts = starts
        self._shards: list[MappedShard | None] = [None] * len(starts)
        self._columns = {
            index: _MappedColumn(column, starts, num_rows)
            for index, column in enumerate(layout.columns)
            if column.kind != "plain" and (only is None or index in only)
        }

    def attach(self, position: int, shard: MappedShard) -> None:
        """Maps the rows of a shard.

        Args:
            position: of the shard in ``starts``.

        Raises:
            OSError: this process has too many maps.
            ValueError: a column has an unexpected offset in the file.
        """
        for index, column in self._columns.items() if shard.sealed.num_rows else ():
            nulls = self._layout.nulls
            if index != self._layout.null_index or shard.layout.nulls.units == nulls.units:
                column.attach(position, shard.file, shard.offset(index))
            else:
                column.attach_copy(position, shard.null_bits(nulls, slice(None)))
        self._shards[position] = shard

    def parts(
        self, row_ids: Ids, shard_of: Indices, selection: Selection, most: int
    ) -> Iterator[pa.RecordBatch]:
        """Gathers rows as stored batches of at most ``most`` rows, as `gather`.

        Random rows that come from a disk are fewer at once, so that each batch takes a fraction of
        a second.
        """
        at, disk = 0, None if self._is_run(row_ids) else self._disk
        while at < len(row_ids):
            stop = at + (most if disk is None else disk.rows_at_once(most))
            yield self.gather(row_ids[at:stop], shard_of[at:stop], selection)
            at = stop

    def gather(self, row_ids: Ids, shard_of: Indices, selection: Selection) -> pa.RecordBatch:
        """Gathers rows as one stored batch.

        Numbers are copied, and lists of one length. Strings and other lists are views of the file
        if their rows are consecutive.

        Args:
            row_ids: in the order of the result.
            shard_of: position of the shard of each row; all must be attached.

        Raises:
            DamagedShardError: an offset of a string or list lies outside of its column.
        """
        disk = self._disk
        if (
            disk is None
            or self._is_run(row_ids)
            or not (disk.is_exact or len(row_ids) >= _FEW_ROWS)
        ):
            return self._gather(row_ids, shard_of, selection)
        begun, before = time.monotonic(), bytes_from_disk()
        if disk.is_exact and disk.is_cold:
            self._bring(row_ids, shard_of, selection)
        batch = self._gather(row_ids, shard_of, selection)
        disk.note(len(row_ids), bytes_from_disk() - before, time.monotonic() - begun)
        return batch

    def _is_run(self, row_ids: Ids) -> bool:
        """Whether rows come by the maps of the shards, which keep the read-ahead of the kernel."""
        return (
            self._disk is not None
            and self._disk.is_exact
            and len(row_ids) >= _FEW_ROWS
            and are_consecutive(row_ids)
        )

    def _run(self, index: int, row_ids: Ids, shard_of: Indices) -> Matrix:
        """A copy of consecutive rows of a packed or matrix column."""
        first, stop = int(row_ids[0]), int(row_ids[-1]) + 1
        parts = [
            shard.matrices[index][max(0, first - start) : stop - start]
            for position in range(int(shard_of[0]), int(shard_of[-1]) + 1)
            if (shard := self._shards[position]) is not None
            for start in [int(self._starts[position])]
        ]
        found = pool_matrix(len(row_ids), parts[0].shape[1], parts[0].dtype)
        np.concatenate(parts, out=found)
        return found

    def _bring(self, row_ids: Ids, shard_of: Indices, selection: Selection) -> None:
        """Asks for the pages of some rows together."""
        for index, _ in selection.picks:
            if index is not None and (column := self._columns.get(index)) is not None:
                bring(column.pages(row_ids, shard_of))

    def _gather(self, row_ids: Ids, shard_of: Indices, selection: Selection) -> pa.RecordBatch:
        plain = any(column.kind == "plain" for column in selection.layout.columns)
        by_shard = self._by_shard(row_ids, shard_of) if plain else None
        is_run = self._is_run(row_ids)
        arrays: list[pa.Array] = []
        for pick, (index, _) in enumerate(selection.picks):
            wanted = selection.layout.columns[pick]
            if wanted.kind == "plain":
                assert by_shard is not None and index is not None
                arrays.append(by_shard.gather(index))
                continue
            if index is None:
                rows = selection.no_nulls(len(row_ids))
            elif is_run and wanted.kind != "nulls":
                rows = self._run(index, row_ids, shard_of)
            else:
                rows = self._columns[index].gather(row_ids, shard_of)
            arrays.append(from_matrix(selection.narrow(pick, rows), wanted.field))
        return pa.RecordBatch.from_arrays(arrays, schema=selection.layout.schema)

    def _by_shard(self, row_ids: Ids, shard_of: Indices) -> _RowsByShard:
        grouped = _in_order_of_storage(row_ids, shard_of)
        parts = []
        for position, start, stop in grouped.runs():
            shard = self._shards[position]
            assert shard is not None
            rows = grouped.rows[start:stop] - self._starts[position]
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            parts.append((shard, run if are_consecutive(rows) else rows))
        return _RowsByShard(parts, grouped)


def _in_order_of_storage(row_ids: Ids, shard_of: Indices) -> Grouped:
    """Groups rows by shard, ascending in each.

    So offsets and values are read in the order of memory. This saves more time than sorting costs.
    """
    if bool((row_ids[1:] >= row_ids[:-1]).all()):
        return Grouped(row_ids, shard_of, None)
    order = np.argsort(row_ids)
    return Grouped(np.take(row_ids, order), np.take(shard_of, order), order)


class _RowsByShard:
    """The rows of a request for plain columns: gathered shard by shard, then reordered.

    Args:
        parts: shards, and rows in each of them; a slice if they are consecutive.
        grouped: the rows of the request, in the order of the parts.
    """

    def __init__(self, parts: list[tuple[MappedShard, Ids | slice]], grouped: Grouped) -> None:
        self._parts, self._grouped = parts, grouped
        # As Arrow takes them, made once for all columns.
        self._rows: list[pa.Array | slice] = []
        self._inverse: pa.Array | None = None

    def gather(self, index: int) -> pa.Array:
        """The rows of one plain column."""
        if (lists := self._equal_lists(index)) is not None:
            return lists
        self._check_offsets(index)
        if not self._rows:
            self._rows = [r if isinstance(r, slice) else pa.array(r) for _, r in self._parts]
            inverse = self._grouped.inverse
            self._inverse = None if inverse is None else pa.array(inverse)
        taken = [
            _taken(shard.batch.column(index), rows)
            for (shard, _), rows in zip(self._parts, self._rows, strict=True)
        ]
        joined = taken[0] if len(taken) == 1 else pa.concat_arrays(taken)
        return joined if self._inverse is None else joined.take(self._inverse)

    def _check_offsets(self, index: int) -> None:
        """Checks the offsets of these rows, before Arrow follows them.

        Those of strings are checked together, because each call costs more than a row.

        Raises:
            DamagedShardError: one lies outside of its column.
        """
        if all(isinstance(rows, slice) for _, rows in self._parts):
            for shard, rows in self._parts:
                shard.check_rows(index, rows)
            return
        levels = [level for shard, _ in self._parts for level in shard.levels(index)]
        if not levels:
            return
        outer = levels[0].offsets.dtype
        num_rows = len(self._grouped.rows)
        starts, stops, limits = (np.empty(num_rows, outer) for _ in range(3))
        start = 0
        for (_, rows), (offsets, limit, _) in zip(self._parts, levels, strict=True):
            stop = start + (rows.stop - rows.start if isinstance(rows, slice) else len(rows))
            if isinstance(rows, slice):
                starts[start:stop] = offsets[rows]
                stops[start:stop] = offsets[rows.start + 1 : rows.stop + 1]
            else:  # the method, because the function takes longer for few rows
                offsets.take(rows, 0, starts[start:stop], "clip")
                offsets[1:].take(rows, 0, stops[start:stop], "clip")
            limits[start:stop] = limit
            start = stop
        if levels[0].inner or not are_within(starts, stops, limits):
            for shard, rows in self._parts:
                shard.check_rows(index, rows)

    def _equal_lists(self, index: int) -> pa.Array | None:
        """A copy of the rows of a column whose lists all have one length; None for others.

        A list of Arrow takes several times as long.
        """
        matrices = [shard.equal_lists(index) for shard, _ in self._parts]
        num_rows, first = len(self._grouped.rows), matrices[0]
        dtype = self._parts[0][0].batch.column(index).type
        if first is None or not fits_lists(num_rows, first.shape[1], dtype):
            return None
        found = pool_matrix(num_rows, first.shape[1], first.dtype)
        order, start = self._grouped.order, 0
        for matrix, (_, rows) in zip(matrices, self._parts, strict=True):
            if matrix is None or matrix.shape[1] != first.shape[1]:
                return None
            stop = start + (rows.stop - rows.start if isinstance(rows, slice) else len(rows))
            if isinstance(rows, slice):
                found[slice(start, stop) if order is None else order[start:stop]] = matrix[rows]
            elif order is None:
                np.take(matrix, rows, axis=0, out=found[start:stop], mode="clip")
            else:
                part = pool_matrix(len(rows), matrix.shape[1], matrix.dtype)
                found[order[start:stop]] = np.take(matrix, rows, axis=0, out=part, mode="clip")
            start = stop
        return from_equal_lists(found, dtype)


def _taken(column: pa.Array, rows: pa.Array | slice) -> pa.Array:
    if isinstance(rows, slice):
        return column.slice(rows.start, rows.stop - rows.start)
    return column.take(rows)


class _MappedColumn:
    """One packed or matrix column of all shards."""

    def __init__(self, column: StoredColumn, starts: Ids, num_rows: Sequence[int]) -> None:
        assert column.dtype is not None
        self._dtype, self._width = column.dtype, column.width
        self._starts, self._num_rows = starts, num_rows
        self._row_bytes = column.width * column.dtype.itemsize
        self._page = huge_page_bytes()
        first_pages = self._first_free_pages()
        has_huge = max(num_rows, default=0) * self._row_bytes >= self._page
        if not has_huge or first_pages[-1] * self._page > _MAX_ADDRESSES:
            self._page = mmap.PAGESIZE
            first_pages = self._first_free_pages()
        self._unit = math.gcd(self._page, self._row_bytes)
        self._first_pages = first_pages[:-1]
        self._addresses = AddressRange(first_pages[-1] * self._page)
        self._lead: int | None = None  # bytes before the first row; set by the first shard
        self._matrix: Matrix | None = None
        self._shift = np.zeros(len(num_rows), np.int64)  # row id -> row of the matrix
        self._num_attached = self._num_exact = 0  # shards, and those read without read-ahead

    def _first_free_pages(self) -> list[int]:
        """The first page that each shard may use, and the end of the last one."""
        gap_pages = self._row_bytes // math.gcd(self._page, self._row_bytes)
        pages = [
            gap_pages + 1 + math.ceil(rows * self._row_bytes / self._page) if rows else 0
            for rows in self._num_rows
        ]
        return list(itertools.accumulate(pages, initial=0))

    def attach(self, position: int, file: MappedFile, offset: int) -> None:
        """Maps the rows of a shard, which start at byte ``offset`` of the file."""
        before = offset % self._page  # bytes of the first page before the rows
        start, size = self._room(position, before)
        self._addresses.map_file(start, file, offset - before, size)

    def attach_copy(self, position: int, rows: BitMatrix | None) -> None:
        """Puts a copy of the rows of a shard into memory; None: zeros, which take no memory."""
        start, size = self._room(position, 0)
        self._addresses.map_memory(start, size, None if rows is None else rows.reshape(-1))

    def _room(self, position: int, before: int) -> tuple[int, int]:
        """Where to map the rows of a shard, and how many bytes.

        Args:
            before: bytes of the first page before the rows.
        """
        page, row_bytes = self._page, self._row_bytes
        first_page = self._first_pages[position]
        if self._lead is None or self._matrix is None:
            self._lead = (first_page * page + before) % row_bytes
            self._matrix = self._addresses.rows(self._lead, self._width, self._dtype)
        if (before - self._lead) % self._unit:
            raise ValueError(
                f"a column at byte {before} of a page cannot be mapped beside that of other shards"
            )
        # page * first_page + before = lead, modulo row_bytes
        modulus = row_bytes // self._unit
        wanted = (self._lead - before) // self._unit * pow(page // self._unit, -1, modulus)
        first_page += (wanted - first_page) % modulus
        start = first_page * page
        self._shift[position] = (start + before - self._lead) // row_bytes - self._starts[position]
        self._num_attached += 1
        return start, before + self._num_rows[position] * row_bytes

    def pages(self, row_ids: Ids, shard_of: Indices) -> Ids:
        """Where these rows are, see `page_runs`; from then on pages are read without others."""
        assert self._matrix is not None
        if self._num_exact < self._num_attached:
            self._num_exact = self._num_attached
            self._addresses.without_read_ahead()
        first = int(self._matrix.ctypes.data)
        starts = self._places(row_ids, shard_of) * self._row_bytes + first
        return page_runs(starts, self._row_bytes, mmap.PAGESIZE)

    def _places(self, row_ids: Ids, shard_of: Indices) -> Ids:
        """The rows of the matrix."""
        if len(self._shift) == 1:
            only: Ids = row_ids + self._shift[0]
            return only
        rows: Ids = np.take(self._shift, shard_of)
        rows += row_ids
        return rows

    def gather(self, row_ids: Ids, shard_of: Indices) -> Matrix:
        """A copy of these rows."""
        assert self._matrix is not None
        rows = self._places(row_ids, shard_of)
        found = pool_matrix(len(rows), self._width, self._dtype)
        np.take(self._matrix, rows, axis=0, out=found, mode="clip")  # clip avoids a hidden copy
        return found
