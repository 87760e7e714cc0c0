"""Data in memory, of many libraries -> Arrow record batches, without a copy of the whole.

Knows no cache. Imports none of the libraries: it recognises their objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cache_protocol.errors import ConfigError

_BATCH_ROWS = 65_536  # of a conversion
KINDS = (
    "a pyarrow Table, RecordBatch or RecordBatchReader, a pandas or Polars frame, a DuckDB "
    "relation, a dict of NumPy arrays or tensors, a Hugging Face dataset, or an object with "
    "__arrow_c_stream__"
)


@dataclass(frozen=True)
class ArrowSource:
    """Rows to read once.

    Attributes:
        batches: in row order; plain columns, without dictionaries and extension types.
        num_rows: None: unknown.
        is_resident: the batches are views of memory that lasts, so to keep them costs nothing.
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    num_rows: int | None = None
    is_resident: bool = False


def arrow_source(data: Any) -> ArrowSource:
    """The rows of an object.

    Raises:
        ConfigError: it is no table; names what is taken, or the column that is wrong.
    """
    found = _found(data)
    if found is None:
        raise ConfigError(f"data must be {KINDS}, got a {type(data).__name__}")
    schema = pa.schema([field.with_type(_plain_type(field.type)) for field in found.schema])
    if schema.equals(found.schema):
        return found
    batches = (plain_batch(batch, schema) for batch in found.batches)
    return ArrowSource(schema, batches, found.num_rows)


def plain_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of ``schema`` of a batch, with its types.

    Raises:
        pa.ArrowInvalid, KeyError: a column cannot be cast without a loss, or is missing.
    """
    if batch.schema.equals(schema):
        return batch
    columns = [_plain_array(batch.column(f.name)).cast(f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _found(data: Any) -> ArrowSource | None:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return ArrowSource(data.schema, iter(data.to_batches()), data.num_rows, is_resident=True)
    if isinstance(data, pa.RecordBatchReader):
        return ArrowSource(data.schema, iter(data))
    if isinstance(data, Mapping):
        return _of_arrays(data)
    kind = type(data).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(data, "iloc") and hasattr(data, "columns"):
        return _of_pandas(data)
    if kind == "polars" and hasattr(data, "collect_batches"):
        return _of_batches(
            pa.RecordBatchReader.from_stream(frame) for frame in data.collect_batches()
        )
    if kind == "datasets" and hasattr(data, "with_format"):
        return _of_hugging_face(data)
    if hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
        rows = len(data) if kind == "polars" else None
        return ArrowSource(reader.schema, iter(reader), rows, is_resident=kind == "polars")
    if hasattr(data, "__arrow_c_array__"):
        return _found(pa.record_batch(data))
    return None


def _of_batches(readers: Iterator[pa.RecordBatchReader]) -> ArrowSource:
    """The batches of readers with one schema, that of the first."""
    first = next(readers, None)
    if first is None:
        raise ConfigError("data has neither rows nor a schema")
    batches = (batch for reader in itertools.chain([first], readers) for batch in reader)
    return ArrowSource(first.schema, batches)


def _of_arrays(arrays: Mapping[Any, Any]) -> ArrowSource:
    columns: dict[str, pa.Array] = {}
    for name, values in arrays.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a column needs a name, got {name!r}")
        try:
            columns[name] = _array_of(values)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ConfigError(f"column {name!r} cannot be an Arrow column: {error}") from None
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) != 1:
        raise ConfigError(f"data must have columns of one length, got {rows}")
    batch = pa.RecordBatch.from_pydict(columns)
    return ArrowSource(batch.schema, iter([batch]), batch.num_rows, is_resident=True)


def _array_of(values: Any) -> pa.Array:
    """An Arrow column of an array or tensor ``[rows, ...]``; no copy of contiguous numbers."""
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    if hasattr(values, "detach"):  # a tensor of torch
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.ndim == 0:
        raise ValueError("it has no rows")
    if array.ndim == 1:
        return pa.array(array)
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _of_pandas(frame: Any) -> ArrowSource:
    """The columns of a frame, and the levels of its index that have a name."""
    named = [name for name in frame.index.names if name is not None]
    if named:
        frame = frame.reset_index(named)
    try:
        schema = pa.Schema.from_pandas(frame, preserve_index=False).remove_metadata()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(f"the frame cannot be an Arrow table: {error}") from None
    batches = (
        pa.RecordBatch.from_pandas(
            frame.iloc[start : start + _BATCH_ROWS], schema=schema, preserve_index=False
        )
        for start in range(0, len(frame), _BATCH_ROWS)
    )
    return ArrowSource(schema, batches, len(frame))


def _of_hugging_face(dataset: Any) -> ArrowSource:
    if isinstance(dataset, Mapping):
        raise ConfigError(f"write one split of the dataset, such as data[{next(iter(dataset))!r}]")
    tables = dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    readers: Iterable[pa.RecordBatchReader] = (table.to_reader() for table in tables)
    source = _of_batches(iter(readers))
    rows = len(dataset) if hasattr(dataset, "__len__") else None
    return ArrowSource(source.schema.remove_metadata(), source.batches, rows)


def _plain_type(dtype: pa.DataType) -> pa.DataType:
    """The type of the values of dictionaries, and of the storage of extension types."""
    if isinstance(dtype, pa.BaseExtensionType):
        return _plain_type(dtype.storage_type)
    if pa.types.is_dictionary(dtype):
        return _plain_type(dtype.value_type)
    return dtype


def _plain_array(array: pa.Array) -> pa.Array:
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain_array(array.storage)
    if pa.types.is_dictionary(array.type):
        return _plain_array(array.dictionary_decode())
    return array


def slices(
    batches: Iterable[pa.RecordBatch],
    stored_bytes: Callable[[pa.RecordBatch], int],
    target_bytes: int,
) -> Iterator[list[pa.RecordBatch]]:
    """The batches in groups of about ``target_bytes``; each group has whole rows.

    Where all rows have the same size, groups depend on the rows alone, not on the batches.

    Args:
        stored_bytes: bytes of a batch once it is stored.
    """
    group: list[pa.RecordBatch] = []
    left = float(target_bytes)
    for batch in batches:
        start = 0
        row_bytes = max(1.0, stored_bytes(batch) / max(1, batch.num_rows))
        while start < batch.num_rows:
            rows = int(left // row_bytes)
            if rows < 1 and group:
                yield group
                group, left = [], float(target_bytes)
                continue
            piece = batch.slice(start, max(1, rows))
            group.append(piece)
            start += piece.num_rows
            left -= piece.num_rows * row_bytes
    if group:
        yield group
