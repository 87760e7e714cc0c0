"""Rows in stored columns: what a node or a file brought, put in order, and cut into batches.

Pure, but for the memory. It knows neither nodes nor tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.errors import ConfigError
from cache_protocol.storage.layout import Layout, Matrix, as_matrix, from_matrix, pool_matrix
from cache_protocol.storage.row_index import Indices

_MOST_SCRATCH = 64  # times what is asked for


@dataclass(frozen=True)
class Rows:
    """Rows in stored columns, in memory of their own.

    Attributes:
        layout: of the columns.
        matrices: stored column -> ``[rows, width]`` array, for packed and matrix columns.
        arrays: stored column -> Arrow array, for plain columns.
        num_rows: of each of them.
    """

    layout: Layout
    matrices: dict[int, Matrix]
    arrays: dict[int, pa.Array]
    num_rows: int

    @classmethod
    def of_batch(cls, layout: Layout, batch: pa.RecordBatch) -> Rows:
        """The rows of a stored batch that nobody else holds; no copy."""
        matrices, arrays = {}, {}
        for index, column in enumerate(layout.columns):
            if column.kind == "plain":
                arrays[index] = batch.column(index)
            else:
                matrices[index] = _writable(as_matrix(batch.column(index)))
        return cls(layout, matrices, arrays, batch.num_rows)

    def slice(self, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)``, without a copy."""
        return Rows(
            self.layout,
            {index: matrix[start:stop] for index, matrix in self.matrices.items()},
            {index: array.slice(start, stop - start) for index, array in self.arrays.items()},
            stop - start,
        )

    def to_batch(self) -> pa.RecordBatch:
        """The rows as a batch of logical columns, whose buffers hold these rows alone.

        What is sent to another process is whole buffers. So slices of plain columns are copied.
        """
        stored = [
            pa.concat_arrays([self.arrays[index]])
            if column.kind == "plain"
            else from_matrix(np.ascontiguousarray(self.matrices[index]), column.field)
            for index, column in enumerate(self.layout.columns)
        ]
        return self.layout.unpack(pa.RecordBatch.from_arrays(stored, schema=self.layout.schema))


@dataclass(frozen=True)
class Answer:
    """What one node, or the files of this machine, brought of a window.

    Attributes:
        positions: where the rows belong in the window; None when they are all of it, in order.
        batches: stored, one after the other.
    """

    positions: Indices | None
    batches: Sequence[pa.RecordBatch]


def in_order(layout: Layout, num_rows: int, answers: Sequence[Answer]) -> list[Rows]:
    """The rows of a window in its order: a piece a batch where they came so, else one piece.

    Args:
        num_rows: of the window.
        answers: with all of its rows.
    """
    if len(answers) == 1 and answers[0].positions is None:
        return [Rows.of_batch(layout, batch) for batch in answers[0].batches]
    batches = [batch for answer in answers for batch in answer.batches]
    inverse = _inverse(num_rows, answers)
    matrices: dict[int, Matrix] = {}
    arrays: dict[int, pa.Array] = {}
    for index, column in enumerate(layout.columns):
        columns = [batch.column(index) for batch in batches]
        if column.kind == "plain":
            joined = concat(column.field, columns)
            arrays[index] = joined.take(pa.array(inverse))
            continue
        assert column.dtype is not None
        # To copy the answers together first is cheaper than to write each row to its place.
        found = _scratch_matrix(num_rows, column.width, column.dtype)
        if columns:
            np.concatenate([as_matrix(array) for array in columns], out=found)
        ordered = pool_matrix(num_rows, column.width, column.dtype)
        np.take(found, inverse, axis=0, out=ordered, mode="clip")
        matrices[index] = ordered
    return [Rows(layout, matrices, arrays, num_rows)]


def _inverse(num_rows: int, answers: Sequence[Answer]) -> npt.NDArray[np.intp]:
    """Where in the joined answers each row of the window stands."""
    inverse = np.empty(num_rows, np.intp)
    at = 0
    for answer in answers:
        if answer.positions is None:
            raise ValueError("an answer with all rows of a window stands beside another one")
        stop = at + len(answer.positions)
        inverse[answer.positions] = np.arange(at, stop)
        at = stop
    return inverse


_scratches = threading.local()


def _scratch_matrix(rows: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
    """An uninitialised array that lives until this thread asks for the next one.

    Fresh memory would cost as much as filling it.
    """
    size = rows * width * dtype.itemsize
    block: npt.NDArray[np.uint8] | None = getattr(_scratches, "block", None)
    if block is None or not size <= len(block) <= _MOST_SCRATCH * max(1, size):
        block = _scratches.block = np.empty(size, np.uint8)
    return block[:size].view(dtype).reshape(rows, width)


def join(pieces: Sequence[Rows]) -> Rows:
    """The rows of all pieces, of which there is at least one, one after the other."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    return Rows(
        first.layout,
        {
            index: np.concatenate([piece.matrices[index] for piece in pieces])
            for index in first.matrices
        },
        {
            index: concat(first.layout.columns[index].field, [p.arrays[index] for p in pieces])
            for index in first.arrays
        },
        sum(piece.num_rows for piece in pieces),
    )


def concat(field: pa.Field, arrays: Sequence[pa.Array]) -> pa.Array:
    """Plain columns one after the other.

    Raises:
        ConfigError: they hold more than the 2 GiB that 32-bit offsets of Arrow reach; names the
            column, the rows and the remedy.
    """
    try:
        return pa.concat_arrays(arrays or [pa.array([], field.type)])
    except pa.ArrowInvalid as error:
        if "overflow" not in str(error):
            raise
        rows, size = sum(map(len, arrays)), sum(array.nbytes for array in arrays)
        raise ConfigError(
            f"column {field.name!r} has {size:,} bytes in {rows:,} rows that are read together, "
            f"and a column of type {field.type} ends at 2 GiB: use a smaller batch_size, or cast "
            f"it in the sql to a type with 64-bit offsets, such as LargeUtf8 or LargeBinary"
        ) from None


def cut(pieces: Iterable[Rows], sizes: Iterable[int]) -> Iterator[Rows]:
    """The rows of all pieces in runs of these sizes; a copy only where a run spans pieces."""
    source = iter(pieces)
    piece, at = next(source), 0
    for size in sizes:
        if size <= piece.num_rows - at:  # nearly always
            yield piece.slice(at, at + size)
            at += size
            continue
        parts: list[Rows] = []
        missing = size
        while missing > piece.num_rows - at:
            parts.append(piece.slice(at, piece.num_rows))
            missing -= piece.num_rows - at
            piece, at = next(source), 0
        parts.append(piece.slice(at, at + missing))
        at += missing
        yield join([part for part in parts if part.num_rows] or parts[:1])


class _Message:
    """Offers the memory of a received matrix for writing, and keeps it alive.

    Arrow marks what it receives as read-only. But a message is memory of its own that nobody else
    holds, so whoever gets the rows may change them, and no copy is needed for that.
    """

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        address, _ = matrix.__array_interface__["data"]
        self.__array_interface__ = {**matrix.__array_interface__, "data": (address, False)}


def _writable(matrix: Matrix) -> Matrix:
    """``matrix``, which came in a message, for writing; copied only where it lies unaligned."""
    if not matrix.flags.aligned or not len(matrix):
        return matrix.copy()
    return np.asarray(_Message(matrix))
