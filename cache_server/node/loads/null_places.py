"""In which files and rows the nulls are that a load refuses. Looks only when there are some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_protocol.errors import RequestError
from cache_server.shards.null_advice import null_place, null_places
from cache_server.shards.packing import ShardBuilder
from cache_server.source.pinned import PinnedTable, Split
from cache_server.sql import loader, queries
from cache_server.sql.local_tables import LocalFile
from cache_server.tables import footers, parquet


@dataclass(frozen=True, eq=False)
class RowSource:
    """Rows that a query gives of some splits, one after the other. ``str`` names the splits.

    Attributes:
        files: where the rows of each split are, while they are read; empty: unknown.
        table: the only one that the query reads; None: it reads several.
    """

    splits: Sequence[Split]
    files: Sequence[LocalFile] = ()
    sql: str = ""
    table: PinnedTable | None = None

    def __str__(self) -> str:
        first, last = self.splits[0], self.splits[-1]
        return str(first) if len(self.splits) == 1 else f"{first} to {last}"

    def splits_of(self, rows: NDArray[np.int64]) -> list[int]:
        """The indices of the splits that have these rows of the result, in order.

        Args:
            rows: ``[n]``, ascending.
        """
        if len(self.splits) == 1:
            return [0]
        found = np.searchsorted(self._starts, np.unique(rows), side="right") - 1
        return [int(index) for index in np.unique(found)]

    def place(self, row: int) -> str:
        """The file of a row of the result, and its row group and row as far as they are known."""
        (index,) = self.splits_of(np.array([row]))
        split, row = self.splits[index], row - int(self._starts[index])
        if not self._keeps_rows:
            return str(split)
        if self.files[index].format == "parquet":
            group, of_file = _row_of_file(self.files[index], row)
            if group is not None:
                return null_place(split.file.path, of_file, group)
        return null_place(str(split), row)

    @cached_property
    def _keeps_rows(self) -> bool:
        """Whether the query gives one row for each row of a file."""
        if not (self.files and self.table):
            return False
        try:
            tables = {self.table.name: self.table.schema}
            return queries.check_query(self.sql, tables, allow_unordered=True).keeps_every_row
        except RequestError:
            return False

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first row of each split in the result."""
        counts = [
            split.num_rows if self._keeps_rows and split.num_rows is not None else self._count(file)
            for split, file in zip(self.splits[:-1], self.files, strict=False)
        ]
        return np.cumsum([0, *counts])

    def _count(self, file: LocalFile) -> int:
        assert self.table is not None
        return sum(batch.num_rows for batch in loader.read_split(file, self.sql, self.table))


class NullPlaces:
    """Where the nulls are of the first column that a builder refuses."""

    def __init__(self) -> None:
        self._column = ""
        self._first = ""
        self._files: dict[str, None] = {}

    def note(self, builder: ShardBuilder, source: RowSource, start: int) -> None:
        """Notes the nulls of the batch that was appended last.

        Args:
            source: of the batch.
            start: the number of its first row among those of the source.
        """
        if not builder.refused_rows:
            return
        self._column = self._column or next(iter(builder.refused))
        rows = builder.refused_rows.get(self._column)
        if rows is None:
            return
        if not self._first:
            self._first = source.place(start + int(rows[0]))
        self._files |= {
            source.splits[index].file.path: None for index in source.splits_of(start + rows)
        }

    def __str__(self) -> str:
        return null_places(self._first, list(self._files)) if self._first else ""


def _row_of_file(file: LocalFile, row: int) -> tuple[int | None, int]:
    """Row group and row in a Parquet file of a row of a split; None if its footer tells less."""
    with suppress(OSError, pa.ArrowException):
        footer = footers.of_path(file.path)
        groups = parquet.groups_of(footer, file.split)
        sizes = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
        if sum(sizes[index] for index in groups) == file.split.num_rows:
            for index in groups:
                if row < sizes[index]:
                    return index, sum(sizes[:index]) + row
                row -= sizes[index]
    return None, row
