"""Reads newline JSON. Values are never coerced to the type of their column.

The first rows of a table decide the types, unless the spec gives them. DataFusion's reader changes
later values: 1.5 among integers becomes 1, 9007199254740993.0 the integer below it, and some
escapes other characters. Arrow's reader refuses such numbers and reads all escapes. Python reads
again, exactly, what Arrow refuses: it takes 2.0 as an integer, and quotes values that do not fit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj

from cache_protocol.errors import LoadError
from cache_protocol.spec.values import is_text
from cache_server.source.pinned import GIVEN, Split
from cache_server.sql.formats.text_values import (
    MisfitError,
    all_finite,
    read_column,
    read_value,
    remedy,
    wider_type,
)

_BLOCK_BYTES = 1024 * 1024
_MOST_QUOTED = 100  # characters of a value in a message
# At a row that is null, Arrow reads beyond its memory (apache/arrow#47409), so Python reads blocks
# that may have one. Two patterns are five times as fast as one: each has a fixed first character.
_NULL_ROWS = re.compile(rb"\n[\s\xef\xbb\xbf]*null"), re.compile(rb"}[\s\xef\xbb\xbf]*null")
_SPACE = re.compile(r"[ \t\r\n]*")


class _Number(Decimal):
    """A number, and how it is written."""

    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


# Control characters such as a tab are read, and the last of two equal keys counts.
_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, strict=False)


class _RowError(Exception):
    """A row does not fit the table."""


class _MisfitError(Exception):
    """A value is not of the type of its column.

    Args:
        value: that of the column, or one inside it.
        dtype: the type it should have.
    """


def read(path: Path, split: Split, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a split, in order, some at a time.

    Args:
        path: of the split's file on this machine.
        schema: of the columns to read. A column that a row lacks is null; other keys are skipped.

    Raises:
        LoadError: naming the file, and the value that does not fit or the byte of invalid JSON.
        OSError: the file cannot be read.
    """
    for offset, block in blocks_of_lines(path, split):
        rows = _by_arrow(block, schema)
        yield _exactly(block, schema, split, offset) if rows is None else rows


def blocks_of_lines(path: Path, split: Split) -> Iterator[tuple[int, bytes]]:
    """Blocks of lines that begin in the byte range of a split, and where each block begins.

    Raises:
        OSError: the file cannot be read.
    """
    part_bytes = math.ceil(split.file.size / split.parts)
    start = part_bytes * split.part
    stop = min(start + part_bytes, split.file.size)
    with path.open("rb") as file:
        if start:  # a line that began earlier belongs to the previous split
            file.seek(start - 1)
            file.readline()
        while (offset := file.tell()) < stop:
            block = file.read(min(_BLOCK_BYTES, stop - offset))
            yield offset, block if block.endswith(b"\n") else block + file.readline()


def _by_arrow(block: bytes, schema: pa.Schema) -> pa.RecordBatch | None:
    """The rows of a block; None if Arrow refuses a value or may read it wrongly."""
    if b"null" in block and any(pattern.search(b"\n" + block) for pattern in _NULL_ROWS):
        return None
    as_read = pa.schema([field.with_type(_read_type(field)) for field in schema])
    try:
        pa.array([block], pa.string())  # refuses invalid UTF-8, which Arrow's reader lets through
        table = pj.read_json(
            pa.BufferReader(block),
            pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            pj.ParseOptions(explicit_schema=as_read, unexpected_field_behavior="ignore"),
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


def _exactly(block: bytes, schema: pa.Schema, split: Split, offset: int) -> pa.RecordBatch:
    """The rows of a block, by Python's parser: exact, and seven times slower."""
    columns: list[list[object]] = [[] for _ in schema]
    text, place, num_rows = "", 0, 0  # place: in characters
    try:
        text = block.decode()
        while (place := _SPACE.match(text, place).end()) < len(text):  # type: ignore[union-attr]
            row, end = _DECODER.raw_decode(text, place)
            if not isinstance(row, dict):
                raise _RowError(f"a line must be one object, got {_quoted(row)}")
            for field, values in zip(schema, columns, strict=True):
                values.append(_value(row.get(field.name), field))
            place, num_rows = end, num_rows + 1
    except UnicodeDecodeError as error:
        reason, before = "it is not UTF-8", block[: error.start]
    except json.JSONDecodeError as error:
        reason = f"it is not JSON with one object a line: {error.msg}"
        before = text[: error.pos].encode()
    except ArithmeticError:  # more digits than Python handles
        reason, before = "an exponent is too long", text[:place].encode()
    except (_RowError, RecursionError) as error:
        reason, before = str(error), text[:place].encode()
    else:
        arrays = [
            pa.array(values, dtype) for values, dtype in zip(columns, schema.types, strict=True)
        ]
        return _batch(arrays, schema, num_rows)
    raise LoadError(f"cannot load {split}: {reason} (byte {offset + len(before)})")


def _value(value: object, field: pa.Field) -> object:
    """A value of JSON as one that Arrow accepts for a column.

    Raises:
        _RowError: it does not fit; says what to do.
    """
    is_given = GIVEN in (field.metadata or {})
    try:
        return (_given if is_given else _inferred)(value, field.type)
    except _MisfitError as error:
        misfit, dtype = error.args
    holds = f"column {field.name!r} holds {_quoted(misfit)}, but"
    if is_given:
        raise _RowError(f"{holds} its type in the spec is {field.type}")
    what = str(dtype)
    if pa.types.is_integer(dtype) and isinstance(misfit, Decimal):
        what = "integers" if -(2**63) <= misfit < 2**63 else "integers of 64 bits"
    wider = _wider(misfit, dtype, field.type)
    advice = f": {remedy(field.name, wider)}" if wider else ""
    raise _RowError(f"{holds} it is of {what} by the first rows of the table{advice}")


def _wider(misfit: object, dtype: pa.DataType, column: pa.DataType) -> str:
    """The name of a type that also holds a value, for a column; empty if there is none."""
    if isinstance(misfit, list | dict) or pa.types.is_nested(dtype):
        return ""
    is_number = isinstance(misfit, Decimal | float)
    wider = wider_type(str(misfit), dtype) if is_number else "string"
    while pa.types.is_list(column):
        column, wider = column.value_type, f"list<{wider}>"
    return "" if pa.types.is_nested(column) else wider


def _given(value: object, dtype: pa.DataType) -> object:
    """A value for a column of a given type; numbers and truth values are read as text."""
    if value is None:
        return None
    if isinstance(value, list) and pa.types.is_list(dtype):
        return [_given(item, dtype.value_type) for item in value]
    text = _text_of(value)
    try:
        if text is not None and not pa.types.is_list(dtype):
            return read_value(text, dtype)
    except (ValueError, ArithmeticError):
        pass
    raise _MisfitError(value, dtype)


def _text_of(value: object) -> str | None:
    """A string, or a number or truth value as it is written; None for anything else."""
    if isinstance(value, _Number):
        return value.text
    if isinstance(value, bool | float):  # a float is NaN or an infinity
        return str(value).lower()
    return value if is_text(value) else None


def _inferred(value: object, dtype: pa.DataType) -> object:
    """A value for a column of an inferred type."""
    types = pa.types
    if value is None:
        return None
    if isinstance(value, list) and types.is_list(dtype):
        return [_inferred(item, dtype.value_type) for item in value]
    if isinstance(value, dict) and types.is_struct(dtype):
        return {field.name: _inferred(value.get(field.name), field.type) for field in dtype}
    if isinstance(value, Decimal) and types.is_integer(dtype):
        if -(2**63) <= value < 2**63 and value == int(value):
            return int(value)
    elif isinstance(value, Decimal | float) and types.is_floating(dtype):
        number = float(value)
        # A float here is NaN or an infinity. A Decimal may be too large for a float.
        if isinstance(value, float) or math.isfinite(number):
            return number
    elif (isinstance(value, bool) and types.is_boolean(dtype)) or (
        is_text(value) and types.is_string(dtype)
    ):
        return value
    raise _MisfitError(value, dtype)


def _quoted(value: object) -> str:
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=float)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def _batch(columns: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    if not columns:  # a struct array keeps the number of rows
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
