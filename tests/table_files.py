"""Files of tables: written, found as a spec finds them, and read split by split."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_server.source.pinned import PinnedTable, SourceFile, Split
from cache_server.sql import loader
from cache_server.sql.local_tables import LocalFile
from cache_server.tables import local_files

ALL = "SELECT * FROM source"


def touch(path: Path, size: int = 1) -> str:
    """A file of so many bytes that are no table, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return str(path)


def table_of(num_rows: int, start: int = 0) -> pa.Table:
    row = np.arange(start, start + num_rows)
    text = pa.array([f"row {number}" for number in row], pa.string())
    return pa.table({"row": row, "half": row / 2, "text": text})


def table_spec(*given: str | Path, **options: Any) -> TableSpec:
    return DatasetSpec("t", given, **options).tables[0]


def find(*given: str | Path, format: str | None = None) -> tuple[str, tuple[SourceFile, ...]]:
    """The format and the files of a source."""
    return local_files.find_files(table_spec(*given, format=format))[:2]


def paths_of(*given: str | Path, format: str | None = None) -> list[str]:
    return [file.path for file in find(*given, format=format)[1]]


def pinned(path: Path) -> SourceFile:
    """One Parquet file, as it is now."""
    return find(path, format="parquet")[1][0]


def read(split: Split, format: str, schema: pa.Schema, sql: str = ALL) -> list[dict[str, Any]]:
    """The rows that a query gives of a split."""
    file, table = (
        LocalFile(Path(split.file.path), format, split),
        PinnedTable("source", format, schema),
    )
    return [row for b in loader.read_split(file, sql, table) for row in b.to_pylist()]
