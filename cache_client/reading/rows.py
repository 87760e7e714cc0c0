"""Rows in stored columns: answers of nodes and files -> the order of the window -> batches.

No I/O. Knows neither nodes nor tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cache_protocol.errors import ConfigError
from cache_protocol.storage.layout import (
    Layout,
    Matrix,
    as_matrix,
    equal_lists,
    fits_lists,
    from_equal_lists,
    from_matrix,
    pool_matrix,
)
from cache_protocol.storage.nested_values import retyped
from cache_protocol.storage.row_index import Indices


@dataclass(frozen=True)
class Rows:
    """Rows in stored columns; owns their memory.

    Attributes:
        layout: of the columns.
        matrices: stored column -> ``[rows, width]`` array, for packed and matrix columns.
        arrays: stored column -> Arrow array, for plain columns.
        num_rows: of each column.
    """

    layout: Layout
    matrices: dict[int, Matrix]
    arrays: dict[int, pa.Array]
    num_rows: int

    @classmethod
    def of_batch(cls, layout: Layout, batch: pa.RecordBatch) -> Rows:
        """The rows of a stored batch that has no other user; no copy."""
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
        """The rows as a batch of logical columns, whose buffers hold only these rows.

        Slices of plain columns are copied, because Arrow sends whole buffers to other processes.

        Raises:
            ConfigError: a column holds more than its type can: see `concat`.
        """
        stored = [
            pa.concat_arrays([self.arrays[index]])
            if column.kind == "plain"
            else from_matrix(np.ascontiguousarray(self.matrices[index]), column.field)
            for index, column in enumerate(self.layout.columns)
        ]
        try:
            return self.layout.unpack(pa.RecordBatch.from_arrays(stored, schema=self.layout.schema))
        except pa.ArrowInvalid:  # stored with 64-bit offsets, of a type with 32-bit ones
            for index, array in self.arrays.items():
                (name,) = self.layout.columns[index].names
                dtype = self.layout.flat[name].dtype
                try:
                    retyped(array, dtype)
                except pa.ArrowInvalid:
                    raise _too_long(name, dtype, [array]) from None
            raise


@dataclass(frozen=True)
class Answer:
    """The rows of a window from one node, or from the files of this machine.

    Attributes:
        positions: of the rows in the window, ascending; None if they are the whole window, in
            order.
        batches: stored batches, one after the other.
    """

    positions: Indices | None
    batches: Sequence[pa.RecordBatch]

    @property
    def first(self) -> int:
        """Position of the first row."""
        return 0 if self.positions is None else int(self.positions[0])

    @property
    def is_run(self) -> bool:
        """Whether it has positions, and they follow one another."""
        if self.positions is None or not len(self.positions):
            return False
        return int(self.positions[-1]) - self.first == len(self.positions) - 1


def in_order(layout: Layout, num_rows: int, answers: Sequence[Answer]) -> list[Rows]:
    """The rows of a window in its order.

    Args:
        num_rows: of the window.
        answers: with all of its rows.

    Returns:
        One piece; if each answer is a run of the window, one piece for each batch.
    """
    if len(answers) == 1 and answers[0].positions is None:
        return [Rows.of_batch(layout, batch) for batch in answers[0].batches]
    if answers and all(answer.is_run for answer in answers):
        runs = sorted(answers, key=lambda answer: answer.first)
        return [Rows.of_batch(layout, b) for run in runs for b in run.batches if b.num_rows]
    parts = list(_parts(answers))
    matrices: dict[int, Matrix] = {}
    arrays: dict[int, pa.Array] = {}
    for index, column in enumerate(layout.columns):
        columns = [batch.column(index) for _, batch in parts]
        places = [positions for positions, _ in parts]
        if column.kind == "plain":
            arrays[index] = _lists_in_order(columns, places, num_rows)
            if arrays[index] is None:
                inverse = np.empty(num_rows, np.intp)
                inverse[np.concatenate(places or [inverse])] = np.arange(num_rows)
                arrays[index] = concat(column.field, columns).take(pa.array(inverse))
            continue
        assert column.dtype is not None
        matrices[index] = pool_matrix(num_rows, column.width, column.dtype)
        _place(map(as_matrix, columns), places, matrices[index])
    return [Rows(layout, matrices, arrays, num_rows)]


def _parts(answers: Sequence[Answer]) -> Iterator[tuple[Indices, pa.RecordBatch]]:
    """Each batch that has rows, with their positions in the window."""
    for answer in answers:
        if answer.positions is None:
            raise ValueError("one answer has all rows of the window, but there are other answers")
        stop = 0
        for batch in answer.batches:
            start, stop = stop, stop + batch.num_rows
            if batch.num_rows:
                yield answer.positions[start:stop], batch


def _lists_in_order(
    columns: Sequence[pa.Array], places: Sequence[Indices], num_rows: int
) -> pa.Array | None:
    """Lists of one length in the order of the window; None for other columns."""
    parts = [equal_lists(column) for column in columns]
    widths = {0 if part is None else part.shape[1] for part in parts}
    width = max(widths, default=0)
    if len(widths) != 1 or not width or not fits_lists(num_rows, width, columns[0].type):
        return None
    matrices = [part for part in parts if part is not None]
    ordered = pool_matrix(num_rows, width, matrices[0].dtype)
    _place(matrices, places, ordered)
    return from_equal_lists(ordered, columns[0].type)


def _place(parts: Iterable[Matrix], places: Sequence[Indices], ordered: Matrix) -> None:
    """Copies the rows of each part to their places; the only copy of a row of several nodes."""
    row = np.dtype((np.void, ordered.shape[1] * ordered.itemsize))  # numpy copies one at once
    for part, positions in zip(parts, places, strict=True):
        ordered.view(row)[positions, 0] = part.view(row)[:, 0]


def join(pieces: Sequence[Rows]) -> Rows:
    """Joins one or more pieces."""
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
        raise _too_long(field.name, field.type, arrays) from None


def _too_long(name: str, dtype: pa.DataType, arrays: Sequence[pa.Array]) -> ConfigError:
    rows, size = sum(map(len, arrays)), sum(array.nbytes for array in arrays)
    return ConfigError(
        f"column {name!r} has {size:,} bytes in {rows:,} rows that are read together, "
        f"and a column of type {dtype} ends at 2 GiB: use a smaller batch_size, or cast "
        f"it in the sql to a type with 64-bit offsets, such as LargeUtf8 or LargeBinary"
    )


def cut(pieces: Iterable[Rows], sizes: Iterable[int]) -> Iterator[Rows]:
    """Cuts pieces into runs of these sizes; copies only runs that span pieces."""
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


class _WritableMemory:
    """Makes the memory of a received matrix writable, and keeps it alive.

    Arrow marks received memory as read-only. But a message has no other user, so its rows may be
    changed without a copy.
    """

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        address, _ = matrix.__array_interface__["data"]
        self.__array_interface__ = {**matrix.__array_interface__, "data": (address, False)}


def _writable(matrix: Matrix) -> Matrix:
    """A received matrix, writable; copied only if it is not aligned."""
    if not matrix.flags.aligned or not len(matrix):
        return matrix.copy()
    return np.asarray(_WritableMemory(matrix))
