"""The rows of newline JSON. No value is made to fit its column: it is refused by name.

The first rows of a table say which types its columns have. DataFusion's reader makes later values
fit: 1.5 among integers becomes 1, and 9007199254740993.0 the integer below it; of the escapes of
some characters it makes others. Arrow's reader refuses such numbers and reads all escapes. What it
refuses is read again by Python, exactly: 2.0 is an integer, and what does not fit is quoted.

Knows neither tables nor queries.
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
# Where a row would be null, Arrow reads beyond its memory (apache/arrow#47409). In doubt, as of a
# text with such characters, Python reads. Two patterns, because each is looked for by its first
# character, five times as fast as both in one.
_NULL_ROWS = re.compile(rb"\n[\s\xef\xbb\xbf]*null"), re.compile(rb"}[\s\xef\xbb\xbf]*null")
_SPACE = re.compile(r"[ \t\r\n]*")


class _Number(Decimal):
    """A number, and how it is written."""

    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


# Characters such as a tab are read as they stand, and of one key twice the last counts, as ever.
_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, strict=False)


class _RowError(Exception):
    """A row is not one of the table."""


class _MisfitError(Exception):
    """A value is not of the type of its column.

    Args:
        value: maybe within that of a column.
        dtype: what it should be.
    """


def read(path: Path, split: Split, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a split, in their order, some at a time.

    Args:
        path: of the split's file on this machine.
        schema: of the columns to read; one that a row lacks is null, others are passed over.

    Raises:
        LoadError: naming the file, and the value that does not fit or the byte that is no JSON.
        OSError: the file cannot be read.
    """
    for offset, block in blocks_of_lines(path, split):
        rows = _by_arrow(block, schema)
        yield _exactly(block, schema, split, offset) if rows is None else rows


def blocks_of_lines(path: Path, split: Split) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the byte range of a split, some at a time, and where each lot begins.

    Raises:
        OSError: the file cannot be read.
    """
    part_bytes = math.ceil(split.file.size / split.parts)
    start = part_bytes * split.part
    stop = min(start + part_bytes, split.file.size)
    with path.open("rb") as file:
        if start:  # a line that begins before belongs to the split before
            file.seek(start - 1)
            file.readline()
        while (offset := file.tell()) < stop:
            block = file.read(min(_BLOCK_BYTES, stop - offset))
            yield offset, block if block.endswith(b"\n") else block + file.readline()


def _by_arrow(block: bytes, schema: pa.Schema) -> pa.RecordBatch | None:
    """The rows of a block; None where Arrow refuses a value, or would read it wrongly."""
    if b"null" in block and any(pattern.search(b"\n" + block) for pattern in _NULL_ROWS):
        return None
    as_read = pa.schema([field.with_type(_read_type(field)) for field in schema])
    try:
        pa.array([block], pa.string())  # refuses what is no UTF-8, which Arrow's reader passes on
        table = pj.read_json(
            pa.BufferReader(block),
            pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            pj.ParseOptions(explicit_schema=as_read, unexpected_field_behavior="ignore"),
        )
        table.validate()  # refuses lists of nothing but nulls, of which some come broken
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
    """The type that Arrow's reader is given: it reads times of day and dates from numbers only."""
    is_text = GIVEN in (field.metadata or {}) and pa.types.is_temporal(field.type)
    return pa.string() if is_text else field.type


def _as_given(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column as the type of its field; raises where Arrow may have read a value wrongly."""
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
    """The same by Python's parser, seven times slower."""
    columns: list[list[object]] = [[] for _ in schema]
    text, place, num_rows = "", 0, 0  # the place in characters
    try:
        text = block.decode()
        while (place := _SPACE.match(text, place).end()) < len(text):  # type: ignore[union-attr]
            row, end = _DECODER.raw_decode(text, place)
            if not isinstance(row, dict):
                raise _RowError(f"a line is of one object, not {_quoted(row)}")
            for field, values in zip(schema, columns, strict=True):
                values.append(_value(row.get(field.name), field))
            place, num_rows = end, num_rows + 1
    except UnicodeDecodeError as error:
        reason, before = "it is no UTF-8", block[: error.start]
    except json.JSONDecodeError as error:
        reason = f"it is no JSON with an object a line: {error.msg}"
        before = text[: error.pos].encode()
    except ArithmeticError:  # of more digits than Python counts
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
    """A value of JSON as one that Arrow takes for a column.

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
    """A type for a column that also holds a value, as a spec names it; empty if there is none."""
    if isinstance(misfit, list | dict) or pa.types.is_nested(dtype):
        return ""
    is_number = isinstance(misfit, Decimal | float)
    wider = wider_type(str(misfit), dtype) if is_number else "string"
    while pa.types.is_list(column):
        column, wider = column.value_type, f"list<{wider}>"
    return "" if pa.types.is_nested(column) else wider


def _given(value: object, dtype: pa.DataType) -> object:
    """A value for a column whose type the spec gives: a number or a truth value as its text."""
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
    """A string as it is, a number as it is written; None for what is neither, nor a truth value."""
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
        # What is a float already is NaN or an infinity; a number beyond all floats is none.
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
    if not columns:  # then only this keeps their number
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
