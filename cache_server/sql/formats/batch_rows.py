"""How many rows a batch has, by the bytes of the columns that are read.

Several batches are in memory at once, and a string column of a batch has at most 2 GiB.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

# Up to four times DataFusion's default, because packing takes the interpreter lock once a batch.
MOST_BATCH_ROWS, DEFAULT_BATCH_ROWS, _FEWEST_BATCH_ROWS = 32_768, 8_192, 1_024
BATCH_BYTES = 4 * 1024 * 1024
_MOST_BATCH_BYTES = 16 * 1024 * 1024  # of a batch of the fewest rows
_SAMPLE_BYTES = 1024 * 1024


def batch_rows(row_bytes: int) -> int:
    """Rows of a batch; only very long rows make it smaller than usual."""
    row_bytes = max(1, row_bytes)
    fewest = min(_FEWEST_BATCH_ROWS, _MOST_BATCH_BYTES // row_bytes)
    return max(1, fewest, min(MOST_BATCH_ROWS, BATCH_BYTES // row_bytes))


def csv_row_bytes(path: Path) -> int:
    """Bytes of a line at the beginning of a file."""
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
    return len(head) // max(1, head.count(b"\n"))


def arrow_row_bytes(path: Path) -> int:
    """Bytes of a row in the first batch of an Arrow file or stream."""
    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_file(file)
            batch = reader.get_batch(0) if reader.num_record_batches else None
        except pa.ArrowInvalid:
            file.seek(0)
            batch = next(iter(pa.ipc.open_stream(file)), None)
        if batch is None or not batch.num_rows:
            return 0
        return int(batch.get_total_buffer_size() // batch.num_rows)
