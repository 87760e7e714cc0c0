"""Stored bytes of the strings and lists of a Parquet file, from its footer. Pure.

The footer gives the number of values and, for strings, their bytes: exactly if the writer kept size
statistics, else about. The type alone tells the size of fixed-width columns.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server.sql.formats.batch_rows import text_bytes
from cache_server.tables.size_statistics import unencoded_bytes

# The place of a stored column: a column of the file, with dots for a field of a struct; or, of a
# column that the file lacks, its bytes a row.
Place = str | int


def plain_bytes(
    footer: pq.FileMetaData, columns: Sequence[tuple[pa.Field, Place]]
) -> list[list[int]]:
    """Stored bytes of columns of strings or lists, for each row group.

    Args:
        columns: as stored, each with its place. A column that the file lacks is null.
    """
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    if not columns:
        return [[] for _ in groups]
    wanted = {place for _, place in columns if isinstance(place, str)}
    leaves = {column_of(path, wanted): leaf for leaf, path in enumerate(leaf_paths(footer))}
    lengths = [footer.schema.column(leaf).length for leaf in range(footer.num_columns)]

    def size(field: pa.Field, place: Place, index: int) -> int:
        rows: int = groups[index].num_rows
        if isinstance(place, int):
            return rows * place
        if (leaf := leaves.get(place)) is None:
            return rows * value_bytes(field, None)
        chunk = groups[index].column(leaf)
        return _leaf_bytes(field.type, chunk, rows, unencoded[index][leaf], lengths[leaf])

    unencoded = unencoded_bytes(footer)
    return [[size(*column, index) for column in columns] for index in range(len(groups))]


def value_bytes(field: pa.Field, text: str | None) -> int:
    """Bytes a row of a stored column with one value for all rows."""
    return len((text or "").encode()) + _offset_bytes(field.type)


def leaf_paths(footer: pq.FileMetaData) -> list[str]:
    """The path of each leaf column: names with dots between them."""
    return [footer.schema.column(i).path for i in range(footer.num_columns)]


def column_of(path: str, names: Container[str]) -> str | None:
    """The column that a leaf belongs to; names of columns may also have dots."""
    while path not in names:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return None
    return path


def _leaf_bytes(
    dtype: pa.DataType, chunk: pq.ColumnChunkMetaData, rows: int, unencoded: int | None, length: int
) -> int:
    """Stored bytes of the column of type ``dtype`` in ``chunk``: see `text_bytes`."""
    lists, values = 0, int(chunk.num_values)
    if pa.types.is_nested(dtype):
        lists = rows * _offset_bytes(dtype)
        values -= _count_nulls(chunk)  # lists without values count as values
    while pa.types.is_nested(dtype):
        dtype = dtype.value_type
    if pa.types.is_primitive(dtype):
        return lists + values * int(dtype.bit_width) // 8
    texts = text_bytes(chunk, values, unencoded, length)
    return lists + texts + values * _offset_bytes(dtype)


def _count_nulls(chunk: pq.ColumnChunkMetaData) -> int:
    statistics = chunk.statistics
    known = statistics is not None and statistics.has_null_count
    return int(statistics.null_count) if known else 0


def _offset_bytes(dtype: pa.DataType) -> int:
    types = pa.types
    is_large = (
        types.is_large_string(dtype) or types.is_large_binary(dtype) or types.is_large_list(dtype)
    )
    return 8 if is_large else 4
