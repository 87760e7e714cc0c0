"""The table of the end-to-end tests: ``python -m tests.e2e.rows DIR`` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_ROWS = 2_000


def write(folder: Path) -> None:
    """Four Parquet files with the column ``id``, 0 to `NUM_ROWS`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, ids in enumerate(np.array_split(np.arange(NUM_ROWS), 4)):
        table = pa.table({"id": ids, "x": ids.astype(np.float32)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
