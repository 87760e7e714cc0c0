"""Rows of every kind of column, by id: as they are stored, and as they must come back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_protocol.storage.shard_files import MappedShard, SealedShard, Selection
from cache_server.shards.packing import ShardBuilder, logical_schema
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.version_key import VersionKey

KEY = VersionKey("table", "f1")
COLUMNS = ["a", "row", "text", "b", "image", "tags", "wide"]


def rows_of(ids: Sequence[int]) -> pa.RecordBatch:
    """The logical rows with these ids."""
    row = np.array(ids, np.int64)
    image = (row[:, None] * 3 + np.arange(3)) % 251
    return pa.RecordBatch.from_pydict(
        {
            "a": (row * 0.5).astype(np.float32),
            "row": row,
            "text": pa.array([None if n % 5 == 0 else f"row {n}" for n in ids], pa.string()),
            "b": (row * 2.0).astype(np.float32),
            "image": pa.FixedSizeListArray.from_arrays(pa.array(image.astype(np.uint8).ravel()), 3),
            "tags": pa.array([[n] * (n % 3) for n in ids], pa.list_(pa.int64())),
            "wide": -row,
        }
    )


LOGICAL = logical_schema(rows_of([0]).schema)
LAYOUT = ShardBuilder(LOGICAL).layout


def stored(ids: Sequence[int]) -> pa.RecordBatch:
    """The stored batch of these rows."""
    builder = ShardBuilder(LOGICAL)
    builder.append(rows_of(ids))
    return builder.finish()


def logical(batch: pa.RecordBatch, selection: Selection) -> list[dict[str, Any]]:
    batch.validate(full=True)
    rows: list[dict[str, Any]] = selection.layout.unpack(batch).to_pylist()
    return rows


def expected(ids: Sequence[int], columns: Sequence[str] = COLUMNS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = rows_of(ids).select(list(columns)).to_pylist()
    return rows


def mapped(directory: Path, index: int, ids: Sequence[int]) -> MappedShard:
    """A shard without a store around it."""
    path = directory / f"{index}.arrow"
    batch = stored(ids)
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return MappedShard(SealedShard(index, len(ids), path.stat().st_size, ""), path)


def gather(rows: ResidentRows, ids: Sequence[int], columns: Sequence[str] = ()) -> list[Any]:
    selection = Selection(LAYOUT, columns)
    (batch,) = rows.gather(np.array(ids, np.int64), selection)
    return logical(batch, selection)
