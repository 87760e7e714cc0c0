"""Rows of logical columns -> the stored columns of a shard.

How a column is stored says `cache_protocol.storage.flat_columns`. A shard is one record batch, so a
column with 32-bit offsets (string, binary, list) has at most 2 GiB of values, or 2**31 values, a
shard. Large offsets have no such limit: see `layout.with_large_offsets`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.flat_columns import FlatColumn, FlatValues, take_apart
from cache_protocol.storage.layout import Layout, Matrix, StoredColumn, from_matrix
from cache_protocol.storage.nested_values import plain_type, retyped
from cache_protocol.storage.null_bits import BitMatrix, NullBits
from cache_server.shards.null_advice import large_cast, null_problem
from cache_server.sql.plain_columns import with_wide_codes

_INITIAL_ROWS, _INITIAL_BYTES = 65_536, 64 << 20  # whichever is less
_PADDING_BYTES = 320


def logical_schema(schema: pa.Schema) -> pa.Schema:
    """The logical schema of rows that arrive with ``schema``: the same, with wider codes.

    Raises:
        RequestError: naming every column that cannot be stored, or repeated names; or there is no
            column.
    """
    if not schema.names:
        raise RequestError("there are no columns")
    logical = pa.schema(
        [field.with_type(with_wide_codes(field.type)).with_metadata(None) for field in schema]
    )
    Layout(logical)
    return logical


class RowFile(Protocol):
    """Stores packed rows outside the builder's memory."""

    def write(self, index: int, start: int, rows: Matrix) -> None:
        """Stores rows of one stored column, from row ``start`` on."""

    def read(self) -> dict[int, Matrix]:
        """Stored column -> its rows."""


class ShardBuilder:
    """Collects the batches of one shard into packed columns. Not thread-safe.

    Args:
        logical: may be a described schema.
        expected_rows: an upper bound of the rows, if known. Memory is allocated for them at once
            (untouched pages cost nothing); without it the memory doubles as needed.
        file: has room for ``expected_rows`` and stores the packed rows. If more rows come, the
            builder stores them in memory.
        refuse_nulls: refuse rows with a null.

    Attributes:
        layout: of the numbers and plain columns, without null bits.
        nulls: unit -> its nulls, see `flat_columns`.
        refused: column -> its nulls that are refused.
        refused_rows: the same column -> which rows of the latest batch have them.
    """

    def __init__(
        self,
        logical: pa.Schema,
        expected_rows: int | None = None,
        file: RowFile | None = None,
        *,
        refuse_nulls: bool = False,
    ) -> None:
        self.layout = Layout(logical, ())
        self.num_rows = 0
        if expected_rows is None:
            row_bytes = max(1, self.layout.fixed_row_bytes)
            expected_rows = min(_INITIAL_ROWS, _INITIAL_BYTES // row_bytes)
        self._capacity = expected_rows
        self._file = file
        self._matrices = self._room() if file is None else {}
        self._spare: dict[object, Matrix] = {}
        self._chunks: dict[int, list[pa.Array]] = {
            index: [] for index, c in enumerate(self.layout.columns) if c.kind == "plain"
        }
        self._plain_bytes = 0
        self.nulls = Counter[str]()
        self._null_bits: list[tuple[int, NullBits, BitMatrix]] = []  # by the first row of a batch
        self.refused = Counter[str]()
        self.refused_rows: dict[str, NDArray[np.int64]] = {}
        self._refuse_nulls = refuse_nulls
        self._refused_arrow = [  # not in a struct: there, a null struct has nulls of its fields
            column.name
            for column in self.layout.tree
            if isinstance(column, FlatColumn)
            and column.kind == "arrow"
            and self._is_refused(column.name)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes collected so far, as they will be stored."""
        return self.num_rows * self.layout.fixed_row_bytes + self._plain_bytes

    def append(self, batch: pa.RecordBatch) -> None:
        """Adds the rows of ``batch``, whose columns are those of the logical schema by name.

        Raises:
            LoadError: naming a column whose values are not of its type.
        """
        arrays = batch.select(self.layout.logical.names).columns
        columns = list(map(_conformed, self.layout.logical, arrays))
        flat = take_apart(self.layout.tree, columns)
        self._note_refused(flat)
        start, stop = self.num_rows, self.num_rows + batch.num_rows
        if stop > self._capacity:
            self._grow(stop)
        for index, column in enumerate(self.layout.columns):
            if column.kind == "plain":
                array = retyped(flat.values[column.names[0]], column.field.type)
                self._plain_bytes += array.nbytes
                self._chunks[index].append(array)
            else:
                self._keep(index, column, flat, start, stop)
        if flat.nulls:
            bits = NullBits(self.layout.tree, flat.nulls)
            self._null_bits.append((start, bits, bits.pack(flat.nulls, batch.num_rows)))
            self.nulls.update({name: int(mask.sum()) for name, mask in flat.nulls.items()})
        self.num_rows = stop

    def finish(
        self, expressions: Callable[[], Mapping[str, str]] = dict, where: str = ""
    ) -> pa.RecordBatch:
        """The stored record batch of the shard; ends the builder.

        Args:
            expressions: gives the SQL of computed columns, by name; called for an error only.
            where: the nulls of the first refused column are; see `null_advice.null_places`.

        Raises:
            LoadError: naming a column with nulls that it refuses, their count, and the others.
        """
        if self.refused:
            (name, count), *others = self.refused.items()
            raise LoadError(
                null_problem(
                    name,
                    count,
                    where=where,
                    others=[other for other, _ in others],
                    expression=expressions().get(name),
                )
            )
        layout = self.layout.with_nulls(self.nulls)
        arrays = []
        matrices = self._matrices if self._file is None else self._file.read()
        for index, column in enumerate(layout.columns):
            if column.kind == "plain":
                arrays.append(_concatenate(self._chunks.pop(index), column))
            elif column.kind == "nulls":
                arrays.append(from_matrix(self._joined_bits(layout.nulls), column.field))
            else:
                arrays.append(from_matrix(matrices[index][: self.num_rows], column.field))
        return pa.RecordBatch.from_arrays(arrays, schema=layout.schema)

    def _note_refused(self, flat: FlatValues) -> None:
        """Counts the nulls that are refused."""
        self.refused_rows = {}
        masks: dict[str, NDArray[np.bool_]] = {
            name: mask for name, mask in flat.nulls.items() if self._is_refused(name)
        }
        for name in self._refused_arrow:
            values = flat.values[name]
            assert not isinstance(values, np.ndarray)  # it is an Arrow column
            if values.null_count:
                is_null = values.is_null().to_numpy(zero_copy_only=False)
                masks[name] = is_null[:, np.newaxis]
        for name, mask in masks.items():
            self.refused[name] += int(mask.sum())
            self.refused_rows[name] = np.flatnonzero(mask.any(axis=1))

    def _is_refused(self, name: str) -> bool:
        """Whether a null is refused in a unit of null bits, or in an Arrow column."""
        column = self.layout.flat.get(name)
        return self._refuse_nulls or not (column is None or column.nullable)

    def _joined_bits(self, nulls: NullBits) -> BitMatrix:
        joined = np.zeros((self.num_rows, nulls.width), np.uint8)
        for start, bits, packed in self._null_bits:
            joined[start : start + len(packed)] = nulls.of(bits, packed)
        return joined

    def _room(self) -> dict[int, Matrix]:
        return {
            index: np.empty((self._capacity, column.width), column.dtype)
            for index, column in enumerate(self.layout.columns)
            if column.dtype is not None
        }

    def _grow(self, rows: int) -> None:
        self._capacity = max(rows, 2 * self._capacity)
        filled = self._matrices if self._file is None else self._file.read()
        self._file, self._matrices = None, self._room()
        for index, matrix in filled.items():
            self._matrices[index][: self.num_rows] = matrix[: self.num_rows]

    def _keep(
        self, index: int, column: StoredColumn, flat: FlatValues, start: int, stop: int
    ) -> None:
        if self._file is None:
            self._fill(self._matrices[index][start:stop], column, flat)
            return
        assert column.dtype is not None
        rows = self._spare_block(index, stop - start, column.width, column.dtype)
        self._fill(rows, column, flat)
        self._file.write(index, start, rows)

    def _spare_block(
        self, key: object, height: int, width: int, dtype: np.dtype[np.generic]
    ) -> Matrix:
        """A ``[height, width]`` block of reused memory: fresh pages cost more than packing."""
        block = self._spare.get(key)
        if block is None or block.size < height * width:
            block = self._spare[key] = np.empty(height * width, dtype)
        return block[: height * width].reshape(height, width)

    def _fill(self, target: Matrix, column: StoredColumn, flat: FlatValues) -> None:
        if column.kind == "matrix":
            target[:] = flat.values[column.names[0]]
            return
        # One transposing copy of a block is faster than a strided copy of each column. The columns
        # of the block must not be a power of two apart, or they share the same few cache lines.
        rows, dtype = len(target), target.dtype
        height = rows + _PADDING_BYTES // dtype.itemsize
        block = self._spare_block(dtype, column.width, height, dtype)
        for values, name in zip(block, column.names, strict=True):
            values[:rows] = flat.values[name]
        target[:] = block[:, :rows].T


def _concatenate(chunks: list[pa.Array], column: StoredColumn) -> pa.Array:
    if not chunks:
        return pa.array([], column.field.type)
    try:
        return pa.concat_arrays(chunks)
    except pa.ArrowInvalid as error:  # offsets of 32 bits
        cast = large_cast(column.field)
        raise LoadError(
            f"column {column.names[0]!r} of type {column.field.type} does not fit in one shard "
            f"({error}): choose a smaller target_shard_bytes"
            f"{f', or give it 64-bit offsets, as SQL does by {cast}' if cast else ''}"
        ) from None


def _conformed(field: pa.Field, array: pa.Array) -> pa.Array:
    """``array`` with the values of a column; of the same type, or of one that is stored alike."""
    if array.type.equals(field.type):
        return array
    wanted, given = plain_type(field.type), plain_type(array.type)
    try:
        plain = retyped(array, given)
        return plain if given.equals(wanted) else pc.cast(plain, wanted)
    except pa.ArrowException as error:
        raise LoadError(
            f"column {field.name!r} comes as {array.type}, not as {field.type}: {error}"
        ) from None
