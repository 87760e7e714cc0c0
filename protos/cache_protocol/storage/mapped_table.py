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
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cache_protocol.storage.layout import (
    Layout,
    Matrix,
    StoredColumn,
    fits_lists,
    from_equal_lists,
    from_matrix,
    pool_matrix,
)
from cache_protocol.storage.row_index import Grouped, Ids, Indices, group_rows
from cache_protocol.storage.shard_files import MappedShard, Selection, are_consecutive
from cache_protocol.storage.virtual_memory import AddressRange, MappedFile, huge_page_bytes

MAPS_PER_COLUMN = 2  # of each shard: its rows, and the gap before them
_MAX_ADDRESSES = 2**44  # of a column; a process has 2**47, for all columns


class MappedTable:
    """The mapped shards of one version. Any threads may gather while one attaches.

    Args:
        layout: of the stored batches.
        starts: first row id of each shard.
        num_rows: of each shard; 0 for shards that are never attached.
        only: indices of the stored columns to map; None for all.

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
    ) -> None:
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
        if shard.sealed.num_rows:
            for index, column in self._columns.items():
                column.attach(position, shard.file, shard.offset(index))
        self._shards[position] = shard

    def gather(self, row_ids: Ids, shard_of: Indices, selection: Selection) -> pa.RecordBatch:
        """Gathers rows as one stored batch.

        Numbers are copied, and lists of one length. Strings and other lists are views of the file
        if their rows are consecutive.

        Args:
            row_ids: in the order of the result.
            shard_of: position of the shard of each row; all must be attached.
        """
        plain = any(column.kind == "plain" for column in selection.layout.columns)
        by_shard = self._by_shard(row_ids, shard_of) if plain else None
        arrays: list[pa.Array] = []
        for pick, (index, _) in enumerate(selection.picks):
            wanted = selection.layout.columns[pick]
            if wanted.kind == "plain":
                assert by_shard is not None
                arrays.append(by_shard.gather(index))
                continue
            rows = self._columns[index].gather(row_ids, shard_of)
            arrays.append(from_matrix(selection.narrow(pick, rows), wanted.field))
        return pa.RecordBatch.from_arrays(arrays, schema=selection.layout.schema)

    def _by_shard(self, row_ids: Ids, shard_of: Indices) -> _RowsByShard:
        grouped = group_rows(row_ids, shard_of)
        parts = []
        for position, start, stop in grouped.runs():
            shard = self._shards[position]
            assert shard is not None
            rows = grouped.rows[start:stop] - self._starts[position]
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            parts.append((shard, run if are_consecutive(rows) else rows))
        return _RowsByShard(parts, grouped)


class _RowsByShard(NamedTuple):
    """The rows of a request for plain columns: gathered shard by shard, then reordered.

    Attributes:
        parts: shards, and rows in each of them; a slice if they are consecutive.
        grouped: the rows of the request, in the order of the parts.
    """

    parts: list[tuple[MappedShard, Ids | slice]]
    grouped: Grouped

    def gather(self, index: int) -> pa.Array:
        """The rows of one plain column."""
        if (lists := self._equal_lists(index)) is not None:
            return lists
        taken = [_taken(shard.batch.column(index), rows) for shard, rows in self.parts]
        joined = taken[0] if len(taken) == 1 else pa.concat_arrays(taken)
        inverse = self.grouped.inverse
        return joined if inverse is None else joined.take(pa.array(inverse))

    def _equal_lists(self, index: int) -> pa.Array | None:
        """A copy of the rows of a column whose lists all have one length; None for others.

        A list of Arrow takes several times as long.
        """
        matrices = [shard.equal_lists(index) for shard, _ in self.parts]
        num_rows, first = len(self.grouped.rows), matrices[0]
        dtype = self.parts[0][0].batch.column(index).type
        if first is None or not fits_lists(num_rows, first.shape[1], dtype):
            return None
        found = pool_matrix(num_rows, first.shape[1], first.dtype)
        order, start = self.grouped.order, 0
        for matrix, (_, rows) in zip(matrices, self.parts, strict=True):
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


def _taken(column: pa.Array, rows: Ids | slice) -> pa.Array:
    if isinstance(rows, slice):
        return column.slice(rows.start, rows.stop - rows.start)
    return column.take(pa.array(rows))


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
        page, row_bytes = self._page, self._row_bytes
        before = offset % page  # bytes of the first page before the rows
        first_page = self._first_pages[position]
        if self._lead is None or self._matrix is None:
            self._lead = (first_page * page + before) % row_bytes
            self._matrix = self._addresses.rows(self._lead, self._width, self._dtype)
        if (before - self._lead) % self._unit:
            raise ValueError(
                f"a column at byte {offset} cannot be mapped beside that of other shards"
            )
        # page * first_page + before = lead, modulo row_bytes
        modulus = row_bytes // self._unit
        wanted = (self._lead - before) // self._unit * pow(page // self._unit, -1, modulus)
        first_page += (wanted - first_page) % modulus
        start = first_page * page
        size = before + self._num_rows[position] * row_bytes
        self._addresses.map_file(start, file, offset - before, size)
        self._shift[position] = (start + before - self._lead) // row_bytes - self._starts[position]

    def gather(self, row_ids: Ids, shard_of: Indices) -> Matrix:
        """A copy of these rows."""
        assert self._matrix is not None
        if len(self._shift) == 1:
            rows = row_ids + self._shift[0]
        else:
            rows = np.take(self._shift, shard_of)
            rows += row_ids
        found = pool_matrix(len(rows), self._width, self._dtype)
        np.take(self._matrix, rows, axis=0, out=found, mode="clip")  # clip avoids a hidden copy
        return found
