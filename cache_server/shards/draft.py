"""A shard file whose rows are written to their places as they come: packed columns, once.

The place of each packed or matrix column in an Arrow IPC file follows from the schema and the
number of rows, so the file is made first, and a `ShardBuilder` writes rows to it. Arrow then writes
the rest of the file around them: the messages and the plain columns, which the layout puts last.
Rows are written, not filled into a map: a page that a map touches first costs twice what writing
it costs. Knows neither the manifest nor what becomes of the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_protocol.storage.layout import Layout, Matrix, from_matrix
from cache_server.shards.checksums import PieceDigests


class ShardDraft:
    """One file. One thread at a time; a context manager, which closes but keeps it.

    Args:
        path: of an empty file.
        layout: of the batch to come.
        num_rows: of the batch to come, exactly; at least 1.

    Attributes:
        path: of the file.

    Raises:
        OSError: the file cannot be opened, or there is no room for it.
    """

    def __init__(self, path: Path, layout: Layout, num_rows: int) -> None:
        self.path = path
        self._layout = layout
        self._num_rows = num_rows
        self._map: mmap.mmap | None = None
        self._digests = PieceDigests()
        self._file = path.open("r+b")
        try:
            self._offsets, self._end = _places(layout, num_rows)
            # Room is taken now, so that it is not missed in the middle of a load.
            os.posix_fallocate(self._file.fileno(), 0, self._end)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ShardDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, index: int, start: int, rows: Matrix) -> None:
        """Keeps rows of one packed or matrix column, from row ``start`` on; C-contiguous."""
        if len(rows):
            self._write_at(rows, self._offsets[index] + start * rows[0].nbytes)

    def read(self) -> dict[int, Matrix]:
        """Stored column -> ``[num_rows, width]`` array of what was written; not for plain ones."""
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), self._end)
        matrices = {}
        for index, offset in self._offsets.items():
            column = self._layout.columns[index]
            assert column.dtype is not None
            values = np.frombuffer(self._map, column.dtype, self._num_rows * column.width, offset)
            matrices[index] = values.reshape(self._num_rows, column.width)
        return matrices

    def complete(self, batch: pa.RecordBatch) -> None:
        """Writes all of ``batch`` that does not lie in its place in the file already.

        Args:
            batch: of the draft's layout. Columns that are not the draft's are copied.
        """
        mapped = 0 if self._map is None else np.frombuffer(self._map, np.uint8).ctypes.data
        sink = _Sink(self._write_at, mapped)
        _write(sink, batch)
        os.ftruncate(self._file.fileno(), sink.position)

    def checksum(self) -> str:
        """Of the file, once it is complete; most of it was hashed when it was written."""
        return self._digests.checksum(self._file.fileno())

    def _write_at(self, data: Any, at: int) -> None:
        """All of a buffer, which one call need not write."""
        self._digests.add(at, data)
        view = memoryview(data).cast("B")
        while view.nbytes:
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written


def _places(layout: Layout, num_rows: int) -> tuple[dict[int, int], int]:
    """Where each packed or matrix column begins in the file, and where the last one ends."""
    columns = [
        from_matrix(_untouched(num_rows, column.width, column.dtype), column.field)
        if column.dtype is not None
        else pa.nulls(num_rows, column.field.type)
        for column in layout.columns
    ]
    sink = _Sink(None, 0)
    _write(sink, pa.RecordBatch.from_arrays(columns, schema=layout.schema))
    places = {}
    end = 0
    for index, column in enumerate(layout.columns):
        if column.dtype is not None:
            values = columns[index].flatten().buffers()[1]
            places[index] = sink.places[values.address]
            end = places[index] + num_rows * column.width * column.dtype.itemsize
    return places, end


def _untouched(rows: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
    """An array to look at from outside only: its pages are never touched and cost nothing."""
    return np.frombuffer(mmap.mmap(-1, rows * width * dtype.itemsize), dtype).reshape(rows, width)


def _write(sink: _Sink, batch: pa.RecordBatch) -> None:
    with pa.PythonFile(sink, "w") as file, shard_writer(file, batch.schema) as writer:
        writer.write_batch(batch)


def shard_writer(sink: pa.NativeFile, schema: pa.Schema) -> pa.ipc.RecordBatchFileWriter:
    """Writes a shard file, in which a column may have 2**31 numbers and more."""
    return pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True))


class _Sink:
    """What Arrow writes a file to: leaves out the buffers that lie in their place already.

    Args:
        write: takes data and where it goes; None to see where each buffer would go.
        start: address at which the file is mapped; 0 where it is not.

    Attributes:
        position: in the file.
        places: address of each buffer -> its position.
    """

    closed = False

    def __init__(self, write: Callable[[Any, int], None] | None, start: int) -> None:
        self._write = write
        self._start = start
        self.position = 0
        self.places: dict[int, int] = {}

    def write(self, data: pa.Buffer | bytes) -> int:
        if isinstance(data, pa.Buffer):
            self.places[data.address] = self.position
        if self._write is not None and not self._lies_here(data):
            self._write(data, self.position)
        self.position += len(data)
        return len(data)

    def _lies_here(self, data: pa.Buffer | bytes) -> bool:
        return (
            self._start > 0
            and isinstance(data, pa.Buffer)
            and data.address == self._start + self.position
        )

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """The file is not ours to close."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
