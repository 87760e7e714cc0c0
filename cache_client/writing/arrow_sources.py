"""Data in memory, of many libraries -> Arrow record batches, without a copy of the whole.

Each library converts its own data, by ``__arrow_c_stream__`` where it has that. Knows no cache.
Imports none of the libraries: it recognises their objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from cache_client.writing.arrow_columns import (
    NOT_CONVERTED,
    arrow_column,
    not_a_column,
    polars_problem,
    require_one_kind,
)
from cache_protocol.errors import ConfigError, SchemaError, some_of
from cache_protocol.storage.lossless import WRITE_ADVICE, conform_batch
from cache_protocol.storage.type_rules import repeated_names

_BATCH_ROWS = 65_536  # of a conversion
KINDS = (
    "a pyarrow Table, RecordBatch or RecordBatchReader, a pandas or Polars frame, a DuckDB "
    "relation, a dict of NumPy arrays or tensors, a Hugging Face dataset, a generator of these, or "
    "an object with __arrow_c_stream__"
)
_LATER = "the first rows gave the types: give those the same ones"
_BY_FEATURES = (
    "give the dataset its types: from_generator(..., features=datasets.Features({...})), or "
    "dataset.cast(features)"
)
# What the storage of these does not say, so it would not come back.
_MEANT = ("pandas.interval", "pandas.period")
_OF_ARROW = "arrow."  # extension types that every node knows
_DUCKDB_LOSES = {
    "bignum": "its digits",
    "bit": "its bits",
    "time with time zone": "its zone",
    "uhugeint": "large values",
    "union": "its tags",
    "variant": "its types",
}


@dataclass(frozen=True)
class ArrowSource:
    """Rows to read once.

    Attributes:
        batches: in row order, all of ``schema``.
        num_rows: None: unknown.
        is_resident: the batches are views of memory that lasts, so to keep them costs nothing.
        advice: how to give values another type in the library that they come from.
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    num_rows: int | None = None
    is_resident: bool = False
    advice: str = WRITE_ADVICE


def arrow_source(data: Any) -> ArrowSource:
    """The rows of an object; of extension types that Arrow does not define, the values.

    Raises:
        ConfigError: it is no table; names what is taken.
        SchemaError: names the column that has no Arrow type, its type and what to do. The batches
            raise it, too, with the row of the value.
    """
    found = exported(data)
    schema = pa.schema([field.with_type(_known_type(field.type)) for field in found.schema])
    return replace(
        found,
        schema=schema,
        batches=conformed(found.batches, schema, advice=found.advice),
        is_resident=found.is_resident and schema.equals(found.schema),
    )


def conformed(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, advice: str = WRITE_ADVICE
) -> Iterator[pa.RecordBatch]:
    """The batches with the columns of ``schema``.

    Raises:
        SchemaError: see `conform_batch`.
    """
    row = 0
    for batch in batches:
        yield conform_batch(batch, schema, first_row=row, advice=advice)
        row += batch.num_rows


def exported(data: Any) -> ArrowSource:
    """The rows of an object as its library gives them to Arrow; batches may have other types.

    Raises:
        As `arrow_source`.
    """
    found = _found(data)
    if found is None:
        raise ConfigError(f"data must be {KINDS}, got a {type(data).__name__}")
    if repeated := repeated_names(found.schema.names):
        raise SchemaError(
            f"columns cannot share a name: {some_of(map(repr, repeated))}: give each another one"
        )
    return found


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
    if kind == "polars" and hasattr(data, "collect_schema"):
        return _of_polars(data)
    if kind in ("duckdb", "_duckdb") and hasattr(data, "types"):
        return _of_duckdb(data)
    if kind == "datasets" and hasattr(data, "with_format"):
        return _of_hugging_face(data)
    if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
        return _of_export(data)
    if isinstance(data, Iterator):
        return _of_parts(map(exported, data))
    return None


def _of_export(data: Any) -> ArrowSource | None:
    """The batches that an object exports; None: it is one column, or one value."""
    try:
        if not hasattr(data, "__arrow_c_stream__"):
            return _found(pa.record_batch(data))
        reader = pa.RecordBatchReader.from_stream(data)
    except pa.ArrowInvalid:
        return None
    return ArrowSource(reader.schema, iter(reader))


def _of_parts(
    parts: Iterator[ArrowSource], schema: pa.Schema | None = None, advice: str = _LATER
) -> ArrowSource:
    """The rows of parts, with the schema of the first one if none is given."""
    first = next(parts, None) if schema is None else None
    if first is not None:
        parts, schema = itertools.chain([first], parts), first.schema
    if schema is None:
        raise SchemaError(f"data has neither rows nor a schema: {advice}")
    batches = (batch for part in parts for batch in part.batches)
    return ArrowSource(schema, batches, advice=advice)


def _of_arrays(arrays: Mapping[Any, Any]) -> ArrowSource:
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name, values in arrays.items():
        if not isinstance(name, str) or not name:
            raise SchemaError(f"a column needs a name, got {name!r}: give a text as the key")
        columns[name] = arrow_column(name, values)
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) != 1:
        raise ConfigError(f"data must have columns of one length, got {rows}")
    table = pa.table(columns)
    return ArrowSource(table.schema, iter(table.to_batches()), table.num_rows, is_resident=True)


def _of_pandas(frame: Any) -> ArrowSource:
    """The columns of a frame, and the levels of its index that have a name."""
    named = [name for name in frame.index.names if name is not None]
    if both := [name for name in named if name in frame.columns or named.count(name) > 1]:
        raise SchemaError(
            f"a level of the index has the name of another column, {both[0]!r}: rename it with "
            "frame.rename_axis, or drop it with frame.reset_index(drop=True)"
        )
    if named:
        frame = frame.reset_index(named)
    if others := [name for name in frame.columns if not isinstance(name, str) or not name]:
        raise SchemaError(
            f"column {others[0]!r} has a name that is no text: set frame.columns = "
            "['_'.join(map(str, name)) for name in frame.columns]"
            if isinstance(others[0], tuple)
            else f"column {others[0]!r} has a name that is no text: set frame.columns = "
            "[str(name) for name in frame.columns]"
        )
    if repeated := repeated_names(list(frame.columns)):
        raise SchemaError(
            f"columns cannot share a name: {repeated[0]!r}: give each another one in frame.columns"
        )
    schema = pa.schema([_pandas_field(name, frame[name]) for name in frame.columns])
    batches = (
        pa.RecordBatch.from_pandas(
            frame.iloc[start : start + _BATCH_ROWS], schema=schema, preserve_index=False
        )
        for start in range(0, len(frame), _BATCH_ROWS)
    )
    return ArrowSource(schema, batches, len(frame))


def _pandas_field(name: str, series: Any) -> pa.Field:
    try:
        if series.dtype == object:
            require_one_kind(series[series.notna()].tolist())
        return pa.Schema.from_pandas(series.to_frame(), preserve_index=False).field(0)
    except NOT_CONVERTED as error:
        raise not_a_column(name, series, error) from None


def _of_polars(frame: Any) -> ArrowSource:
    """A frame in place, or the batches of a lazy one."""
    types = frame.collect_schema()
    for name, dtype in types.items():
        if problem := polars_problem(dtype):
            raise SchemaError(f"column {name!r} is {dtype} in Polars: {problem}")
    if hasattr(frame, "collect_batches"):
        empty = pa.RecordBatchReader.from_stream(frame.clear().collect())
        frames = frame.collect_batches()
        return _of_parts((exported(each) for each in frames), empty.schema)
    reader = pa.RecordBatchReader.from_stream(frame)
    return ArrowSource(reader.schema, iter(reader), len(frame), is_resident=True)


def _of_duckdb(relation: Any) -> ArrowSource:
    large = []
    for name, dtype in zip(relation.columns, relation.types, strict=True):
        inside = {each.id for each in _duckdb_types(dtype)}
        if lost := [lost for kind, lost in _DUCKDB_LOSES.items() if kind in inside]:
            raise SchemaError(
                f"column {name!r} is {dtype} in DuckDB, which loses {lost[0]} in Arrow: write "
                f'CAST("{name}" AS VARCHAR) or another type in its query'
            )
        if "hugeint" in inside:
            large.append(name)
    reader = pa.RecordBatchReader.from_stream(relation)
    return ArrowSource(reader.schema, _with_38_digits(reader, large) if large else iter(reader))


def _duckdb_types(dtype: Any) -> Iterator[Any]:
    yield dtype
    if dtype.id in ("list", "array", "struct", "map"):
        for _, child in dtype.children:
            if hasattr(child, "id"):
                yield from _duckdb_types(child)


def _with_38_digits(
    batches: Iterable[pa.RecordBatch], names: Iterable[str]
) -> Iterator[pa.RecordBatch]:
    """DuckDB gives a HUGEINT as decimal128(38, 0), also one with a digit more."""
    for batch in batches:
        for name in names:
            try:
                batch.column(name).validate(full=True)
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"column {name!r} is HUGEINT in DuckDB, and {error}: write "
                    f'CAST("{name}" AS VARCHAR) in its query'
                ) from None
        yield batch


def _of_hugging_face(dataset: Any) -> ArrowSource:
    if isinstance(dataset, Mapping):
        raise ConfigError(f"write one split of the dataset, such as data[{next(iter(dataset))!r}]")
    known = None if dataset.features is None else dataset.features.arrow_schema.remove_metadata()
    parts = _arrow_tables(dataset)
    source = _of_parts(map(exported, parts), known, _BY_FEATURES)
    rows = len(dataset) if hasattr(dataset, "__len__") else None
    schema = source.schema.remove_metadata()
    return replace(source, schema=schema, num_rows=rows)


def _arrow_tables(dataset: Any) -> Iterator[pa.Table]:
    try:
        yield from dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    except pa.ArrowInvalid as error:  # columns get other types later
        reason = " ".join(str(error).split())
        raise SchemaError(
            f"the rows of the dataset have no types: {reason}: {_BY_FEATURES}"
        ) from None


def _known_type(dtype: pa.DataType) -> pa.DataType:
    """The type with the storage of extension types that Arrow does not define."""
    kinds = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        is_kept = dtype.extension_name in _MEANT or dtype.extension_name.startswith(_OF_ARROW)
        return dtype if is_kept else _known_type(dtype.storage_type)
    if kinds.is_dictionary(dtype):
        return pa.dictionary(dtype.index_type, _known_type(dtype.value_type), dtype.ordered)
    if kinds.is_fixed_size_list(dtype):
        return pa.list_(_known_field(dtype.value_field), dtype.list_size)
    if kinds.is_list(dtype):
        return pa.list_(_known_field(dtype.value_field))
    if kinds.is_large_list(dtype):
        return pa.large_list(_known_field(dtype.value_field))
    if kinds.is_struct(dtype):
        return pa.struct([_known_field(field) for field in dtype])
    if kinds.is_map(dtype):
        return pa.map_(_known_field(dtype.key_field), _known_field(dtype.item_field))
    return dtype


def _known_field(field: pa.Field) -> pa.Field:
    return field.with_type(_known_type(field.type))


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
