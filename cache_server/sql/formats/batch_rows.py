"""How many rows a batch has, by the bytes of the columns that are read.

Several batches are in memory at once, and a string column of a batch has at most 2 GiB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pyarrow.parquet as pq

# Up to four times DataFusion's default, because packing takes the interpreter lock once a batch.
MOST_BATCH_ROWS, DEFAULT_BATCH_ROWS, _FEWEST_BATCH_ROWS = 32_768, 8_192, 1_024
BATCH_BYTES = 4 * 1024 * 1024
_MOST_BATCH_BYTES = 16 * 1024 * 1024  # of a batch of the fewest rows
_SAMPLE_BYTES = 256 * 1024
_LENGTH_BYTES = 4  # before each string of a page
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


def batch_rows(row_bytes: int) -> int:
    """Rows of a batch; only very long rows make it smaller than usual."""
    row_bytes = max(1, row_bytes)
    fewest = min(_FEWEST_BATCH_ROWS, _MOST_BATCH_BYTES // row_bytes)
    return max(1, fewest, min(MOST_BATCH_ROWS, BATCH_BYTES // row_bytes))


def parquet_row_bytes(
    footer: pq.FileMetaData, names: Collection[str], groups: Iterable[int] | None = None
) -> int:
    """Decoded bytes of a row of these columns, in the row group with the longest rows.

    Args:
        groups: their numbers; None: all.
    """
    leaves = [
        leaf
        for leaf in range(footer.num_columns)
        if any(_is_in(footer.schema.column(leaf).path, name) for name in names)
    ]
    longest = 0
    for index in range(footer.num_row_groups) if groups is None else groups:
        group = footer.row_group(index)
        size = sum(
            _leaf_bytes(group.column(leaf), footer.schema.column(leaf).length) for leaf in leaves
        )
        longest = max(longest, size // max(1, group.num_rows))
    return longest


def csv_row_bytes(path: Path) -> int:
    """Bytes of a line at the beginning of a file."""
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
    return len(head) // max(1, head.count(b"\n"))


def text_bytes(
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


def _leaf_bytes(chunk: pq.ColumnChunkMetaData, length: int) -> int:
    width = _WIDTHS.get(chunk.physical_type)
    values = int(chunk.num_values)
    return values * width if width else text_bytes(chunk, values, None, length)


def _is_in(path: str, name: str) -> bool:
    """Whether a leaf is the column ``name`` or inside it."""
    return path == name or path.startswith(f"{name}.")
