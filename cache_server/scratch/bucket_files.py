"""The bucket files of an order: written in large pieces, read whole, checked, and removed.

    <folder>/<bucket>    Arrow messages, each a stored batch of rows and their row ids, ascending

The lengths and checksums are in memory: no later process reads the files.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from cache_protocol.storage.layout import Layout, as_matrix, from_matrix, pool_matrix
from cache_protocol.storage.row_index import Ids
from cache_protocol.storage.shard_files import Selection
from cache_server.shards.disk import remove_file

_ROW = "row"  # the field of row ids; the last one


class DamagedBucketError(ValueError):
    """The bytes of a bucket file are not those that were written."""


def row_type(num_rows: int) -> pa.DataType:
    """The type of row ids: short ones, where rows have few bytes, are much of a file."""
    return pa.uint32() if num_rows <= 2**32 else pa.int64()


def grouped(
    batch: pa.RecordBatch, layout: Layout, rows: npt.NDArray[Any], places: Ids
) -> pa.RecordBatch:
    """Some rows of a stored batch, with their row ids; a copy.

    Args:
        rows: row ids of these rows, of `row_type`.
        places: of the rows in the batch.
    """
    arrays: list[pa.Array] = []
    for column, stored in zip(layout.columns, batch.columns, strict=True):
        if column.kind == "plain":
            arrays.append(stored.take(pa.array(places)))
            continue
        matrix = as_matrix(stored)
        found = pool_matrix(len(places), column.width, matrix.dtype)
        np.take(matrix, places, axis=0, out=found, mode="clip")
        arrays.append(from_matrix(found, column.field))
    ids = pa.array(rows)
    return pa.RecordBatch.from_arrays([*arrays, ids], schema=with_rows(layout.schema, ids.type))


def with_rows(schema: pa.Schema, kind: pa.DataType) -> pa.Schema:
    """The schema of a bucket file."""
    return schema.append(pa.field(_ROW, kind, nullable=False))


class Bucket:
    """The rows of a bucket in memory. Immutable.

    Args:
        batch: as it was written.
        layout: of the stored columns.
    """

    def __init__(self, batch: pa.RecordBatch, layout: Layout) -> None:
        self.num_bytes: int = batch.nbytes
        self._batch = batch
        self._rows: npt.NDArray[Any] = batch.column(batch.num_columns - 1).to_numpy()
        self._matrices = {
            index: as_matrix(batch.column(index))
            for index, column in enumerate(layout.columns)
            if column.kind != "plain"
        }

    def gather(self, row_ids: Ids, selection: Selection) -> pa.RecordBatch | None:
        """The rows with these ids, in this order, as a stored batch; None if one is not here."""
        wanted = row_ids.astype(self._rows.dtype)
        places = np.searchsorted(self._rows, wanted)
        if places.max() >= len(self._rows) or (self._rows[places] != wanted).any():
            return None
        arrays: list[pa.Array] = []
        for pick, (index, _) in enumerate(selection.picks):
            column = selection.layout.columns[pick]
            if column.kind == "plain":
                arrays.append(self._batch.column(index).take(pa.array(places)))
                continue
            if index is None:
                found = selection.no_nulls(len(places))
            else:
                matrix = self._matrices[index]
                found = pool_matrix(len(places), matrix.shape[1], matrix.dtype)
                np.take(matrix, places, axis=0, out=found, mode="clip")
            arrays.append(from_matrix(selection.narrow(pick, found), column.field))
        return pa.RecordBatch.from_arrays(arrays, schema=selection.layout.schema)


class BucketFiles:
    """The files of one order. One thread writes them; then any thread reads.

    Args:
        folder: of these files alone; exists.
        layout: of the stored columns.
        num_rows: of the version.
        num_buckets: of the order.
        buffer_bytes: of rows that are kept until they are written.
    """

    def __init__(
        self, folder: Path, layout: Layout, num_rows: int, num_buckets: int, buffer_bytes: int
    ) -> None:
        self._folder = folder
        self.layout = layout
        self._schema = with_rows(layout.schema, row_type(num_rows))
        self._buffer_bytes = buffer_bytes
        self._kept: dict[int, list[pa.RecordBatch]] = {}
        self._kept_bytes = 0
        self._digests = [xxhash.xxh3_128() for _ in range(num_buckets)]
        self._messages: list[list[int]] = [[] for _ in range(num_buckets)]
        self.rows = np.zeros(num_buckets, np.int64)
        self._lock = threading.Lock()
        self._sizes = np.zeros(num_buckets, np.int64)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return int(self._sizes.sum())

    def add(self, batch: pa.RecordBatch, counts: npt.NDArray[np.int64]) -> None:
        """Adds rows of `grouped`, those of each bucket after those of the one before.

        Args:
            counts: how many rows each bucket gets.

        Raises:
            OSError: they cannot be written.
        """
        ends = counts.cumsum()
        for bucket in np.flatnonzero(counts).tolist():
            count, end = int(counts[bucket]), int(ends[bucket])
            self._kept.setdefault(bucket, []).append(batch.slice(end - count, count))
        self.rows += counts
        self._kept_bytes += batch.nbytes
        if self._kept_bytes >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what is kept.

        Raises:
            OSError: it cannot be written.
        """
        for bucket, batches in self._kept.items():
            with self._path(bucket).open("ab") as file:
                for batch in batches:
                    message = batch.serialize()
                    self._digests[bucket].update(message)
                    self._messages[bucket].append(message.size)
                    file.write(message)
                file.flush()
                with self._lock:
                    self._sizes[bucket] = file.tell()
                # Begins to write, and drops what was written before: the page cache is for others.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._kept, self._kept_bytes = {}, 0

    def read(self, bucket: int, room: list[bytearray]) -> Bucket:
        """The rows of a bucket; its pages do not stay in the page cache.

        Args:
            room: memory of earlier calls, of one thread: fresh pages cost more than the copy.

        Raises:
            OSError: it cannot be read. DamagedBucketError: it is not as it was written.
        """
        size, messages = int(self._sizes[bucket]), self._messages[bucket]
        if not room or len(room[0]) < size:
            room[:] = [bytearray(size + size // 8)]
        view, at = memoryview(room[0])[:size], 0
        with self._path(bucket).open("rb", buffering=0) as file:
            while at < size and (count := file.readinto(view[at:])):
                at += count
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if at < size or xxhash.xxh3_128_digest(view) != self._digests[bucket].digest():
            raise DamagedBucketError(f"bucket {bucket} in {self._folder} has another checksum")
        # Several messages are copied when they are joined; a single one is not.
        data = pa.py_buffer(view if len(messages) > 1 else bytes(view))
        batches, at = [], 0
        for length in messages:
            batches.append(pa.ipc.read_record_batch(data.slice(at, length), self._schema))
            at += length
        joined = pa.Table.from_batches(batches, self._schema).combine_chunks().to_batches()
        if len(joined) != 1:
            raise DamagedBucketError(f"bucket {bucket} in {self._folder} is too large for Arrow")
        return Bucket(joined[0], self.layout)

    def remove(self, bucket: int) -> None:
        """Removes a file, whose rows are not needed any more."""
        remove_file(self._path(bucket))
        with self._lock:
            self._sizes[bucket] = 0

    def _path(self, bucket: int) -> Path:
        return self._folder / str(bucket)
