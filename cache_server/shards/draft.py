"""A shard file that is being filled: rows are written straight to their places.

The schema and the number of rows give the place of each packed or matrix column in an Arrow IPC
file. So the file is made first, and a `ShardBuilder` writes rows to it. Then Arrow writes the rest
around them: the messages, the plain columns and the null bits, which the layout puts last. Rows are
written, not copied into a map: first touching a page of a map costs twice as much as writing it.

Which columns have nulls is known at the end, and the messages say it. So there is room for the
longest messages, and shorter ones are padded.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_protocol.storage.flat_columns import nodes
from cache_protocol.storage.layout import Layout, Matrix, from_matrix
from cache_server.shards.checksums import PieceDigests

_STEP_BYTES = 8 << 20
_PADDING_KEY, _PADDING_BYTES = b"cache.padding", 256
_MOST_TRIES = 4  # of a padding


class ShardDraft:
    """One file. Not thread-safe. A context manager, which closes the file and keeps it.

    Args:
        path: of an empty file.
        layout: of the batch.
        num_rows: of the batch, exactly; at least 1.
        grow: called with the bytes that the file is about to have, in steps, before rows are
            written. None: the room for all rows is taken now.

    Attributes:
        path: of the file.

    Raises:
        OSError: the file cannot be opened, or the disk is full.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        num_rows: int,
        grow: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self._grow = grow
        self._written = self._allowed = 0  # bytes of rows
        self._layout = layout
        self._num_rows = num_rows
        self._map: mmap.mmap | None = None
        self._digests = PieceDigests()
        self._file = path.open("r+b")
        try:
            self._offsets, self._end = _places(_longest(layout), num_rows, _PADDING_BYTES)
            if grow is not None:
                os.ftruncate(self._file.fileno(), self._end)  # takes no room
            else:  # a full disk shows at the beginning of a load
                os.posix_fallocate(self._file.fileno(), 0, self._end)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ShardDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, index: int, start: int, rows: Matrix) -> None:
        """Writes rows of one packed or matrix column, from row ``start`` on; C-contiguous."""
        if len(rows):
            self._written += rows.nbytes
            if self._grow is not None and self._written > self._allowed:
                self._allowed = min(-(-self._written // _STEP_BYTES) * _STEP_BYTES, self._end)
                self._grow(self._allowed)
            self._write_at(rows, self._offsets[index] + start * rows[0].nbytes)

    def read(self) -> dict[int, Matrix]:
        """Packed or matrix column -> what was written, ``[num_rows, width]``."""
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
        """Writes everything of ``batch`` that is not in the file yet.

        Args:
            batch: of the draft's layout. Columns of other memory are copied.
        """
        mapped = 0 if self._map is None else np.frombuffer(self._map, np.uint8).ctypes.data
        sink = _Sink(self._write_at, mapped)
        _write(sink, padded(batch))
        os.ftruncate(self._file.fileno(), sink.position)

    def digests(self) -> bytes:
        """The digests of the complete file; most of it was hashed while it was written."""
        return self._digests.joined(self._file.fileno())

    def _write_at(self, data: Any, at: int) -> None:
        """Writes all of a buffer; one call may write less."""
        self._digests.add(at, data)
        view = memoryview(data).cast("B")
        while view.nbytes:
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written


def _places(layout: Layout, num_rows: int, padding: int) -> tuple[dict[int, int], int]:
    """Where each packed or matrix column begins in the file, and where the last one ends."""
    columns = [
        from_matrix(_untouched(num_rows, column.width, column.dtype), column.field)
        if column.dtype is not None
        else pa.nulls(num_rows, column.field.type)
        for column in layout.columns
    ]
    sink = _Sink(None, 0)
    _write(sink, _with_padding(pa.RecordBatch.from_arrays(columns, schema=layout.schema), padding))
    places = {}
    end = 0
    for index, column in enumerate(layout.columns):
        if column.dtype is not None and column.kind != "nulls":
            values = columns[index].flatten().buffers()[1]
            places[index] = sink.places[values.address]
            end = places[index] + num_rows * column.width * column.dtype.itemsize
    return places, end


def _untouched(rows: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
    """An array of untouched pages, which cost nothing; only its addresses are used."""
    return np.frombuffer(mmap.mmap(-1, rows * width * dtype.itemsize), dtype).reshape(rows, width)


def padded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A stored batch whose messages are as long as those of the longest layout.

    Each packed or matrix column then has a place that does not depend on the nulls.
    """
    layout, num_rows = Layout.of_stored(batch.schema), batch.num_rows
    if not num_rows or all(column.dtype is None for column in layout.columns):
        return batch
    wanted, _ = _places(_longest(layout), num_rows, _PADDING_BYTES)
    padding = _PADDING_BYTES
    for _ in range(_MOST_TRIES):
        places, _ = _places(layout, num_rows, padding)
        missing = {wanted[index] - place for index, place in places.items()} or {0}
        if missing == {0}:
            return _with_padding(batch, padding)
        padding += min(missing)
    raise AssertionError(f"no padding of {layout.schema} gives {wanted}")


def _longest(layout: Layout) -> Layout:
    """The layout with every unit of null bits."""
    return layout.with_nulls([name for node in nodes(layout.tree) for name in node.null_units])


def _with_padding(batch: pa.RecordBatch, padding: int) -> pa.RecordBatch:
    metadata = {**(batch.schema.metadata or {}), _PADDING_KEY: b" " * padding}
    return batch.replace_schema_metadata(metadata)


def _write(sink: _Sink, batch: pa.RecordBatch) -> None:
    with pa.PythonFile(sink, "w") as file, shard_writer(file, batch.schema) as writer:
        writer.write_batch(batch)


def shard_writer(sink: pa.NativeFile, schema: pa.Schema) -> pa.ipc.RecordBatchFileWriter:
    """Writes a shard file; a column may have 2**31 numbers and more."""
    return pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True))


class _Sink:
    """The sink that Arrow writes a file to: skips buffers that are in their place already.

    Args:
        write: takes data and its position; None only finds where each buffer would go.
        start: address of the mapped file; 0 if it is not mapped.

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
            self.places[data.address] = self.position  # pyright: ignore
        if self._write is not None and not self._lies_here(data):
            self._write(data, self.position)
        self.position += len(data)
        return len(data)

    def _lies_here(self, data: pa.Buffer | bytes) -> bool:
        return (
            self._start > 0
            and isinstance(data, pa.Buffer)
            and data.address == self._start + self.position  # pyright: ignore
        )

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""

    def close(self) -> None:
        """Does nothing: the caller closes the file."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
