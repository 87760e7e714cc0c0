"""Stored bytes of the strings and lists of a Parquet file, from its footer. Pure.

The footer gives the number of values and, for strings, their bytes: exactly if the writer kept size
statistics, else about. The type alone tells the size of fixed-width columns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server.sql.formats.footer_bytes import unencoded_bytes

# The place of a stored column: a column of the file, with dots for a field of a struct; or, of a
# column that the file lacks, its bytes a row.
Place = str | int

_LENGTH_BYTES = 4  # before each string of a page
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


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
    leaves: dict[str | None, list[int]] = {}
    for leaf, path in enumerate(leaf_paths(footer)):
        leaves.setdefault(column_of(path, wanted), []).append(leaf)
    lengths = [footer.schema.column(leaf).length for leaf in range(footer.num_columns)]

    def size(field: pa.Field, place: Place, index: int) -> int:
        rows: int = groups[index].num_rows
        if isinstance(place, int):
            return rows * place
        if place not in leaves:
            return rows * value_bytes(field, None)
        return sum(
            _leaf_bytes(
                field.type, groups[index].column(leaf), rows, unencoded[index][leaf], lengths[leaf]
            )
            for leaf in leaves[place]
        )

    unencoded = unencoded_bytes(footer)
    return [[size(*column, index) for column in columns] for index in range(len(groups))]


def row_bytes(
    footer: pq.FileMetaData, names: Container[str], groups: Iterable[int] | None = None
) -> int:
    """Decoded bytes of a row of some columns, in the row group where it has most.

    Args:
        groups: their numbers; None: all.
    """
    paths = leaf_paths(footer)
    leaves = [i for i, path in enumerate(paths) if column_of(path, names) is not None]
    unencoded: list[list[int | None]] = []

    def size(index: int, leaf: int) -> int:
        chunk = footer.row_group(index).column(leaf)
        values = int(chunk.num_values)
        if width := _WIDTHS.get(chunk.physical_type):
            return values * width
        if chunk.dictionary_page_offset is not None and not unencoded:
            unencoded.extend(unencoded_bytes(footer))
        known = unencoded[index][leaf] if unencoded else None
        return _text_bytes(chunk, values, known, footer.schema.column(leaf).length)

    return max(
        (
            sum(size(index, leaf) for leaf in leaves) // max(1, footer.row_group(index).num_rows)
            for index in (range(footer.num_row_groups) if groups is None else groups)
        ),
        default=0,
    )


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
    """Stored bytes of the column of type ``dtype`` in ``chunk``: see `_text_bytes`."""
    lists, values = 0, int(chunk.num_values)
    if pa.types.is_nested(dtype):
        lists = rows * _offset_bytes(dtype)
        values -= _count_nulls(chunk)  # lists without values count as values
    while pa.types.is_nested(dtype):
        if not hasattr(dtype, "value_type"):  # a struct or a map, of which this leaf is a part
            width = _WIDTHS.get(chunk.physical_type)
            return lists + (
                values * width if width else _text_bytes(chunk, values, unencoded, length)
            )
        dtype = dtype.value_type
    if pa.types.is_primitive(dtype):
        return lists + values * int(dtype.bit_width) // 8
    texts = _text_bytes(chunk, values, unencoded, length)
    return lists + texts + values * _offset_bytes(dtype)


def _count_nulls(chunk: pq.ColumnChunkMetaData) -> int:
    statistics = chunk.statistics
    known = statistics is not None and statistics.has_null_count
    return int(statistics.null_count) if known else 0  # pyright: ignore


def _offset_bytes(dtype: pa.DataType) -> int:
    types = pa.types
    is_large = (
        types.is_large_string(dtype) or types.is_large_binary(dtype) or types.is_large_list(dtype)
    )
    return 8 if is_large else 4


def _text_bytes(
    chunk: pq.ColumnChunkMetaData, values: int, unencoded: int | None, length: int
) -> int:
    """Bytes of the strings of a column chunk, without offsets.

    Args:
        values: number of them, without lists that are null.
        unencoded: bytes in the footer's size statistics; None without them.
        length: of each string, if all have the same.
    """
    if unencoded is not None:
        return unencoded
    if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return values * length
    encoded = max(0, int(chunk.total_uncompressed_size) - values * _LENGTH_BYTES)
    statistics = chunk.statistics
    if chunk.dictionary_page_offset is None or statistics is None or not statistics.has_min_max:
        return encoded
    ends = [len(end) for end in (statistics.min, statistics.max) if isinstance(end, str | bytes)]
    return max(encoded, values * sum(ends) // len(ends)) if ends else encoded
