"""Query results -> stored columns: the type mapping, the null policy and the packing.

Only this module says which Arrow type becomes which storage type:

    from                         stored as            field metadata
    int8..int64, uint8..uint64   the same
    float16, float32, float64    the same             nulls become NaN
    decimal32..decimal256        the nearest float64  cache.source_type; nulls become NaN
    bool                         uint8                cache.source_type
    date32 / date64              int32 days / int64 ms
    time32 / time64              int32 / int64        cache.unit
    timestamp, duration          int64                cache.unit, cache.timezone
    string_view, binary_view     string, binary
    dictionary<K, V>             as V                 (the values, not the codes)
    fixed_size_list of numbers   the same, 2-D and deeper
    other fixed_size_list, list  list                 nulls stay nulls
    string, binary               the same             nulls stay nulls
    fixed_size_binary            binary               cache.source_type; nulls stay nulls

- The values of a list are stored as the table says, nulls included. The list's field has their
  metadata.
- Other types (struct, map, union, interval, null) are refused by name.
- A null in a fixed-width column that is not a float fails the load; the error gives the column, the
  count and the COALESCE to write. So does a null in place of a fixed-size list.
- A shard is one record batch, so a column with 32-bit offsets (string, binary, list) has at most
  2 GiB of values, or 2**31 values, a shard. The large types have no such limit: see
  `with_large_offsets`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import Layout, Matrix, StoredColumn, from_matrix, list_shape
from cache_protocol.storage.decimals import nearest_floats, of_strings
from cache_server.shards.null_advice import float_null_problem, null_problem, sql_cast

_INITIAL_ROWS, _INITIAL_BYTES = 65_536, 64 << 20  # whichever is less
_PADDING_BYTES = 320


def storage_schema(schema: pa.Schema) -> pa.Schema:
    """The logical schema that a query result of ``schema`` is stored with.

    Raises:
        RequestError: naming every column that cannot be stored, or repeated names; or there is no
            column.
    """
    names = schema.names
    if not names:
        raise RequestError("the query yields no columns")
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise RequestError(f"the query yields several columns named {', '.join(repeated)}")
    problems, fields = [], []
    for field in schema:
        stored = storage_type(field.type)
        if stored is None:
            problems.append(f"{field.name}: {field.type}")
            continue
        metadata = _metadata(field.type, stored)
        nullable = not (_is_fixed_width(stored))
        fields.append(pa.field(field.name, stored, nullable=nullable, metadata=metadata))
    if problems:
        raise RequestError(
            "columns of these types cannot be stored; select their fields or cast them in the "
            f"sql: {', '.join(problems)}"
        )
    return pa.schema(fields)


def storage_type(dtype: pa.DataType) -> pa.DataType | None:
    """What ``dtype`` is stored as; None when it cannot be stored."""
    types = pa.types
    if types.is_dictionary(dtype):
        return storage_type(dtype.value_type)
    if types.is_integer(dtype) or types.is_floating(dtype):
        return dtype
    if types.is_decimal(dtype):
        return pa.float64()
    if types.is_boolean(dtype):
        return pa.uint8()
    if types.is_date32(dtype) or types.is_time32(dtype):
        return pa.int32()
    if (
        types.is_date64(dtype)
        or types.is_time64(dtype)
        or types.is_timestamp(dtype)
        or types.is_duration(dtype)
    ):
        return pa.int64()
    if dtype == pa.string_view():
        return pa.string()
    if dtype == pa.binary_view():
        return pa.binary()
    if types.is_string(dtype) or types.is_binary(dtype):
        return dtype
    if types.is_large_string(dtype) or types.is_large_binary(dtype):
        return dtype
    if types.is_fixed_size_binary(dtype):
        return pa.binary()
    if types.is_fixed_size_list(dtype):
        inner = storage_type(dtype.value_type)
        if inner is None or dtype.list_size == 0:
            return None
        if _is_fixed_width(inner):
            return pa.list_(pa.field("item", inner, nullable=False), dtype.list_size)
        return pa.list_(inner)
    if types.is_list(dtype) or types.is_large_list(dtype):
        inner = storage_type(dtype.value_type)
        if inner is None:
            return None
        inner = _with_nulls(inner)
        return pa.list_(inner) if types.is_list(dtype) else pa.large_list(inner)
    return None


def with_large_offsets(schema: pa.Schema) -> pa.Schema:
    """A storage schema with 64-bit offsets, for shards of more than 2 GiB."""
    return pa.schema([field.with_type(_large(field.type)) for field in schema])


def _large(dtype: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string(dtype):
        return pa.large_string()
    if types.is_binary(dtype):
        return pa.large_binary()
    if types.is_list(dtype) or types.is_large_list(dtype):
        return pa.large_list(_large(dtype.value_type))
    return dtype


def _with_nulls(dtype: pa.DataType) -> pa.DataType:
    """The type of fixed-size lists inside a list, where nulls are not checked."""
    if not pa.types.is_fixed_size_list(dtype):
        return dtype
    return pa.list_(_with_nulls(dtype.value_type), dtype.list_size)


def _is_fixed_width(dtype: pa.DataType) -> bool:
    _, leaf = list_shape(dtype)
    return bool(pa.types.is_integer(leaf) or pa.types.is_floating(leaf))


def _metadata(dtype: pa.DataType, stored: pa.DataType) -> dict[str, str] | None:
    dtype, stored = _values(dtype), _values(stored)
    metadata: dict[str, str] = {}
    if not stored.equals(dtype):
        metadata["cache.source_type"] = str(dtype)
    if pa.types.is_date32(dtype):
        metadata["cache.unit"] = "D"
    elif pa.types.is_date64(dtype):
        metadata["cache.unit"] = "ms"
    elif hasattr(dtype, "unit"):
        metadata["cache.unit"] = dtype.unit
    if getattr(dtype, "tz", None):
        metadata["cache.timezone"] = dtype.tz
    return metadata or None


def _values(dtype: pa.DataType) -> pa.DataType:
    """The type of the values inside lists and dictionaries."""
    while pa.types.is_nested(dtype) or pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    return dtype


class RowFile(Protocol):
    """Stores packed rows outside the builder's memory."""

    def write(self, index: int, start: int, rows: Matrix) -> None:
        """Stores rows of one stored column, from row ``start`` on."""

    def read(self) -> dict[int, Matrix]:
        """Stored column -> its rows."""


class ShardBuilder:
    """Collects the batches of one shard into packed columns. Not thread-safe.

    Args:
        logical: from `storage_schema`.
        expected_rows: an upper bound of the rows, if known. Memory is allocated for them at once
            (untouched pages cost nothing); without it the memory doubles as needed.
        file: has room for ``expected_rows`` and stores the packed rows. If more rows come, the
            builder stores them in memory.
        refuse_nulls: refuse nulls of floats, which become NaN otherwise.

    Attributes:
        nans: column of floats -> nulls that became NaN.
    """

    def __init__(
        self,
        logical: pa.Schema,
        expected_rows: int | None = None,
        file: RowFile | None = None,
        *,
        refuse_nulls: bool = False,
    ) -> None:
        self.layout = Layout(logical)
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
        self._nulls: dict[str, int] = {}
        self.nans: dict[str, int] = {}
        self._refuse_nulls = refuse_nulls
        self._arriving: pa.Schema | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes collected so far, as they will be stored."""
        return self.num_rows * self.layout.fixed_row_bytes + self._plain_bytes

    def append(self, batch: pa.RecordBatch) -> None:
        """Adds the rows of ``batch``, whose columns are those of the logical schema by name.

        Raises:
            LoadError: naming a column whose values cannot be stored as its type says.
        """
        if self._arriving is None or not batch.schema.equals(self._arriving):
            self._check_units(batch.schema)
            self._arriving = batch.schema
        start, stop = self.num_rows, self.num_rows + batch.num_rows
        if stop > self._capacity:
            self._grow(stop)
        for index, column in enumerate(self.layout.columns):
            if column.kind == "plain":
                array = _cast(column.names[0], batch[column.names[0]], column.field.type)
                self._plain_bytes += array.nbytes
                self._chunks[index].append(array)
            else:
                self._keep(index, column, batch, start, stop)
        self.num_rows = stop

    def finish(self, expressions: Callable[[], Mapping[str, str]] = dict) -> pa.RecordBatch:
        """The stored record batch of the shard; ends the builder.

        Args:
            expressions: gives the SQL of computed columns, by name; called for an error only.

        Raises:
            LoadError: naming each column with nulls that it refuses, and their count.
        """
        refused = self.nans if self._refuse_nulls else {}
        if (self._nulls or refused) and self._arriving is not None:
            computed = expressions()
            problems = [
                float_null_problem(name, count, expression=computed.get(name))
                for name, count in refused.items()
            ]
            for name, count in self._nulls.items():
                encoded = pa.types.is_dictionary(self._arriving.field(name).type)
                field = self.layout.logical.field(name)
                problems.append(
                    null_problem(field, count, encoded=encoded, expression=computed.get(name))
                )
            raise LoadError("; ".join(problems))
        arrays = []
        matrices = self._matrices if self._file is None else self._file.read()
        for index, column in enumerate(self.layout.columns):
            if column.kind == "plain":
                chunks = self._chunks.pop(index)
                arrays.append(_concatenate(chunks, column))
            else:
                arrays.append(from_matrix(matrices[index][: self.num_rows], column.field))
        return pa.RecordBatch.from_arrays(arrays, schema=self.layout.schema)

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
        self, index: int, column: StoredColumn, batch: pa.RecordBatch, start: int, stop: int
    ) -> None:
        if self._file is None:
            self._fill(self._matrices[index][start:stop], column, batch)
            return
        assert column.dtype is not None
        rows = self._spare_block(index, stop - start, column.width, column.dtype)
        self._fill(rows, column, batch)
        self._file.write(index, start, rows)

    def _spare_block(
        self, key: object, height: int, width: int, dtype: np.dtype[np.generic]
    ) -> Matrix:
        """A ``[height, width]`` block of reused memory: fresh pages cost more than packing."""
        block = self._spare.get(key)
        if block is None or block.size < height * width:
            block = self._spare[key] = np.empty(height * width, dtype)
        return block[: height * width].reshape(height, width)

    def _fill(self, target: Matrix, column: StoredColumn, batch: pa.RecordBatch) -> None:
        if column.kind == "matrix":
            self._fill_lists(target, column.names[0], batch[column.names[0]])
            return
        stored = column.field.type.value_type
        # One transposing copy of a block is faster than a strided copy of each column. The columns
        # of the block must not be a power of two apart, or they share the same few cache lines.
        rows, dtype = batch.num_rows, target.dtype
        height = rows + _PADDING_BYTES // dtype.itemsize
        block = self._spare_block(dtype, column.width, height, dtype)
        for values, name in zip(block, column.names, strict=True):
            values[:rows] = self._numbers(name, _cast(name, batch[name], stored))
        target[:] = block[:, :rows].T

    def _numbers(self, name: str, array: pa.Array) -> Matrix:
        if array.null_count:
            if pa.types.is_floating(array.type):
                self.nans[name] = self.nans.get(name, 0) + array.null_count
                array = array.fill_null(float("nan"))
            else:
                self._count_nulls(name, array)
                array = array.fill_null(0)
        values: Matrix = array.to_numpy(zero_copy_only=True)
        return values

    def _fill_lists(self, target: Matrix, name: str, array: pa.Array) -> None:
        dtype = self.layout.logical.field(name).type
        while pa.types.is_fixed_size_list(dtype):
            if pa.types.is_dictionary(array.type):
                array = _cast(name, array, dtype)
            if array.null_count:  # no values for them in flatten(); finish() refuses the shard
                self._count_nulls(name, array)
                return
            array, dtype = array.flatten(), dtype.value_type
        target[:] = self._numbers(name, _cast(name, array, dtype)).reshape(target.shape)

    def _check_units(self, schema: pa.Schema) -> None:
        for field in self.layout.logical:
            unit = _unit(_metadata(schema.field(field.name).type, field.type))
            known = _unit(field.metadata)
            if unit not in (None, known):  # None: stored values already
                raise LoadError(
                    f"column {field.name!r} comes as {schema.field(field.name).type}, but its "
                    f"values are kept {f'in {known}' if known else 'without a unit'}: cast it in "
                    "the sql"
                )

    def _count_nulls(self, name: str, array: pa.Array) -> None:
        self._nulls[name] = self._nulls.get(name, 0) + array.null_count


def _concatenate(chunks: list[pa.Array], column: StoredColumn) -> pa.Array:
    if not chunks:
        return pa.array([], column.field.type)
    try:
        return pa.concat_arrays(chunks)
    except pa.ArrowInvalid as error:  # offsets of 32 bits
        cast = sql_cast(column.field, large=True)
        raise LoadError(
            f"column {column.names[0]!r} of type {column.field.type} does not fit in one shard "
            f"({error}): choose a smaller target_shard_bytes"
            f"{f', or write {cast} in the sql' if cast else ''}"
        ) from None


def _cast(name: str, array: pa.Array, target: pa.DataType) -> pa.Array:
    """``array`` as its storage type; the same array when it has that type already."""
    if array.type.equals(target):
        return array
    try:
        if pa.types.is_dictionary(array.type):  # each value is cast once
            values = _cast(name, array.dictionary, target)
            if pa.types.is_nested(target):  # take() of pyarrow 26 counts the offset of a slice of
                values = pa.concat_arrays([values, values.slice(0, 0)])  # nested lists twice
            return values.take(array.indices)
        if pa.types.is_decimal(array.type) and target == pa.float64():
            return nearest_floats(array)
        if pa.types.is_decimal(_values(array.type)):
            array = pc.cast(array, of_strings(target))
        return pc.cast(array, target)
    except pa.ArrowException as error:
        raise LoadError(f"column {name!r} cannot be stored as {target}: {error}") from None


def _unit(metadata: Mapping[Any, Any] | None) -> str | None:
    known = metadata or {}
    unit = known.get("cache.unit", known.get(b"cache.unit"))
    return unit.decode() if isinstance(unit, bytes) else unit
