"""Parquet files of lake tables that hold the rows of their split as they are.

DataFusion reads such a file where it lies. Other files are read by the module of their table, and
their rows are written once more. Knows neither snapshots nor deletes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server.source import byte_ranges
from cache_server.source.pinned import PinnedTable, Split
from cache_server.tables import arrow_reader, footers, parquet
from cache_server.tables.column_sizes import row_bytes
from cache_server.tables.common_types import common_type, may_lose

_PIECE_BYTES = 8 * 1024 * 1024  # of one request
_REQUESTS = 4  # at once for one file


@dataclass(frozen=True)
class PlainFile:
    """A whole Parquet file whose rows are those of a split.

    Attributes:
        path: on this machine; None: elsewhere.
        open: opens it for random reads from several threads.
        footer: of the file.
        named: surrounds what reads it, and names it in errors.
        absent: values of columns that the file lacks, the same for all rows.
    """

    path: Path | None
    open: Callable[[], pa.NativeFile]
    footer: pq.FileMetaData
    named: Callable[[], AbstractContextManager[None]]
    absent: Mapping[str, pa.Scalar]

    def row_bytes(self, table: PinnedTable) -> int:
        """Decoded bytes of a row of the columns that the query reads."""
        return row_bytes(self.footer, table.read_schema.names)

    def local(self, table: PinnedTable, split: Split, target: Path) -> Path:
        """Its path, or ``target`` with the bytes that reading needs at their offsets.

        Raises:
            LoadError: it cannot be fetched; names it.
        """
        if self.path is not None:
            return self.path
        with self.named(), self.open() as source, target.open("wb") as sink:
            file = replace(split.file, size=source.size())  # which metadata may tell wrongly
            wanted = parquet.ranges(self.footer, replace(split, file=file), table.columns)

            def fetch(piece: byte_ranges.Range) -> None:
                start, stop = piece
                while start < stop:
                    data = source.read_at(stop - start, start)
                    if not data:
                        raise OSError(f"it ends at byte {start}")
                    start += os.pwrite(sink.fileno(), data, start)

            with ThreadPoolExecutor(_REQUESTS) as pool:
                list(pool.map(fetch, byte_ranges.requests(wanted, _PIECE_BYTES)))
        return target


def is_plain(
    footer: pq.FileMetaData, split: Split, wanted: pa.Schema, absent: Container[str]
) -> bool:
    """Whether DataFusion reads columns of a file by their names, with their values.

    Its row groups must also be as small as planned.

    Args:
        absent: columns of ``wanted`` that the file lacks.
    """
    columns = pa.schema([field for field in wanted if field.name not in absent])
    groups = parquet.largest_groups(footer, split, set(columns.names))
    if max(groups.values(), default=0) > split.group_bytes:
        return False
    (stored,) = parquet.schemas_of([footer])
    stored = arrow_reader.marked(stored, [footer])
    for field in columns:
        index = stored.get_field_index(field.name)
        if index < 0 or (found := stored.field(index)).metadata:
            return False
        if common_type(found.type, field.type) is None or may_lose(found.type, field.type):
            return False
    return True


def footer_of(open_file: Callable[[], pa.NativeFile]) -> pq.FileMetaData:
    """The checked footer of a file."""
    with open_file() as opened:
        return footers.of_file(opened)
