"""A table with a column of each kind that queries tell apart, as a file that is read by splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import SessionConfig, SessionContext

from cache_server.source.pinned import PinnedTable, SourceFile, Split
from cache_server.sql.loader import read_split
from cache_server.sql.local_tables import LocalFile
from cache_server.sql.queries import Query, check_query

SCHEMA = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.float32()),
        ("Mixed", pa.int32()),
        ("text", pa.string()),
        ("tags", pa.list_(pa.int32())),
    ]
)


def table_of(num_rows: int = 100) -> pa.Table:
    row = np.arange(num_rows)
    return pa.table(
        {
            "a": row,
            "b": (row / 2).astype(np.float32),
            "Mixed": (row * 10).astype(np.int32),
            "text": [f"row {number}" for number in row],
            "tags": pa.array([[int(n)] * (n % 3) for n in row], pa.list_(pa.int32())),
        },
        schema=SCHEMA,
    )


def whole(path: Path) -> Split:
    stat = path.stat()
    return Split(SourceFile(str(path), stat.st_size, stat.st_mtime_ns), 0, 1, None, 0)


def local(split: Split, format: str = "parquet") -> LocalFile:
    return LocalFile(Path(split.file.path), format, split)


def check(sql: str, schema: pa.Schema = SCHEMA) -> Query:
    return check_query(sql, {"source": schema})


def write_parquet(path: Path, table: pa.Table | None = None) -> Split:
    pq.write_table(table_of() if table is None else table, path)
    return whole(path)


def rows_of(split: Split, sql: str, schema: pa.Schema = SCHEMA) -> list[dict[str, Any]]:
    batches = read_split(local(split), sql, PinnedTable("source", "parquet", schema))
    return [row for batch in batches for row in batch.to_pylist()]


def all_at_once(table: pa.Table, sql: str) -> list[dict[str, Any]]:
    context = SessionContext(SessionConfig().with_target_partitions(1))
    context.register_record_batches("source", [table.to_batches()])
    return [row for batch in context.sql(sql).collect() for row in batch.to_pylist()]
