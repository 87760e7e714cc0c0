"""Reads newline JSON. Values are never coerced to the type of their column.

The first rows of a table decide the types, see `json_types`, unless the spec gives them. Arrow's
parser reads most blocks. Python reads again, exactly, what Arrow refuses: it takes 2.0 as an
integer, and quotes values that do not fit. Both read the same lines, see `json_lines`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj

from cache_protocol.errors import LoadError
from cache_server.source.pinned import GIVEN, Split
from cache_server.sql.formats import json_types
from cache_server.sql.formats.json_lines import (
    LineError,
    blocks_of_lines,
    has_one_object_a_line,
    is_for_arrow,
    line_number,
    objects,
)
from cache_server.sql.formats.json_values import fitting
from cache_server.sql.formats.text_values import MisfitError, all_finite, read_column, remedy


def read(
    path: Path, split: Split, schema: pa.Schema, *, is_every_key: bool = False
) -> Iterator[pa.RecordBatch]:
    """The rows of a split, in order, some at a time.

    Args:
        path: of the split's file on this machine.
        schema: of the columns to read. A column that a row lacks is null.
        is_every_key: refuse a row with another key; otherwise other keys are skipped.

    Raises:
        LoadError: naming the file, the line, and the value that does not fit or the invalid JSON.
        OSError: the file cannot be read.
    """
    part_bytes = math.ceil(split.file.size / split.parts)
    start = part_bytes * split.part
    for offset, block in blocks_of_lines(path, start, min(start + part_bytes, split.file.size)):
        try:
            rows = _by_arrow(block, schema, is_every_key)
            yield _exactly(block, schema, is_every_key) if rows is None else rows
        except LineError as error:
            line = line_number(path, offset + error.offset)
            raise LoadError(f"cannot load {split}: {error.reason} (line {line})") from None


def _by_arrow(block: bytes, schema: pa.Schema, is_every_key: bool) -> pa.RecordBatch | None:
    """The rows of a block; None if Arrow refuses a value or may read it wrongly."""
    if not is_for_arrow(block):
        return None
    as_read = pa.schema([field.with_type(_read_type(field)) for field in schema])
    unexpected = "error" if is_every_key else "ignore"
    try:
        pa.array([block], pa.string())  # refuses invalid UTF-8, which Arrow's reader lets through
        table = pj.read_json(
            pa.BufferReader(block),
            pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            pj.ParseOptions(explicit_schema=as_read, unexpected_field_behavior=unexpected),
        )
        table.validate()  # refuses lists of only nulls, some of which are broken
        columns = [
            _as_given(column.combine_chunks(), field)
            for column, field in zip(table.columns, schema, strict=True)
        ]
    except (
        pa.ArrowException,
        ValueError,
        OverflowError,
        MisfitError,
    ):  # its own, or a line of 2 GiB
        return None
    if not has_one_object_a_line(block, table.num_rows):
        return None
    return _batch(columns, schema, table.num_rows)


def _read_type(field: pa.Field) -> pa.DataType:
    """The type to read a column as: Arrow reads dates and times of day only from numbers."""
    is_text = GIVEN in (field.metadata or {}) and pa.types.is_temporal(field.type)
    return pa.string() if is_text else field.type


def _as_given(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column as the type of its field; raises if Arrow may have read a value wrongly."""
    if column.type != field.type:
        return read_column(column, field.type)
    values = column
    while pa.types.is_list(values.type):
        values = values.flatten()
    is_given = GIVEN in (field.metadata or {})
    if is_given and pa.types.is_floating(values.type) and not all_finite(values):
        raise pa.ArrowInvalid("infinity of a number")
    return column


def _exactly(block: bytes, schema: pa.Schema, is_every_key: bool) -> pa.RecordBatch:
    """The rows of a block, by Python's parser: exact, and seven times slower."""
    columns: list[list[object]] = [[] for _ in schema]
    names, num_rows = frozenset(schema.names), 0
    for offset, row in objects(block):
        try:
            if is_every_key and not names.issuperset(row):
                raise _unknown_key(row, names)
            for field, values in zip(schema, columns, strict=True):
                values.append(fitting(row.get(field.name), field))
        except LineError as error:
            raise LineError(error.reason, offset) from None
        num_rows += 1
    arrays = [pa.array(values, dtype) for values, dtype in zip(columns, schema.types, strict=True)]
    return _batch(arrays, schema, num_rows)


def _unknown_key(row: dict[str, object], names: frozenset[str]) -> LineError:
    name, value = next((name, value) for name, value in row.items() if name not in names)
    dtype = json_types.type_name(value)
    ways = f"{remedy(name, dtype)}, or name" if dtype else "name"
    return LineError(
        f"the key {name!r} is not in the first rows of the table, so it makes no column: {ways} "
        "the columns to keep"
    )


def _batch(columns: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    if not columns:  # a struct array keeps the number of rows
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
