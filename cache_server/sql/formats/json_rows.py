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
from cache_server.source.pinned import Split

_BLOCK_BYTES = 1024 * 1024
_MOST_QUOTED = 100  # characters of a value in a message
# Where a row would be null, Arrow reads beyond its memory (apache/arrow#47409). In doubt, as of a
# text with such characters, Python reads. Two patterns, because each is looked for by its first
# character, five times as fast as both in one.
_NULL_ROWS = re.compile(rb"\n[\s\xef\xbb\xbf]*null"), re.compile(rb"}[\s\xef\xbb\xbf]*null")
_SPACE = re.compile(r"[ \t\r\n]*")
# Characters such as a tab are read as they stand, and of one key twice the last counts, as ever.
_DECODER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal, strict=False)


class _MisfitError(Exception):
    """A value is not of the type of its column."""


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
    try:
        pa.array([block], pa.string())  # refuses what is no UTF-8, which Arrow's reader passes on
        table = pj.read_json(
            pa.BufferReader(block),
            pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        table.validate()  # refuses lists of nothing but nulls, of which some come broken
    except (pa.ArrowException, ValueError, OverflowError):  # its own, or of a line of 2 GiB
        return None
    return _batch([column.combine_chunks() for column in table.columns], schema, table.num_rows)


def _exactly(block: bytes, schema: pa.Schema, split: Split, offset: int) -> pa.RecordBatch:
    """The same by Python's parser, seven times slower."""
    fields = list(zip(schema.names, schema.types, strict=True))
    rows: list[list[object]] = []
    text, place = "", 0  # in characters
    try:
        text = block.decode()
        while (place := _SPACE.match(text, place).end()) < len(text):  # type: ignore[union-attr]
            row, end = _DECODER.raw_decode(text, place)
            if not isinstance(row, dict):
                raise _MisfitError(f"a line is of one object, not {_quoted(row)}")
            rows.append([_fitting(row.get(name), dtype, name) for name, dtype in fields])
            place = end
    except UnicodeDecodeError as error:
        reason, before = "it is no UTF-8", block[: error.start]
    except json.JSONDecodeError as error:
        reason = f"it is no JSON with an object a line: {error.msg}"
        before = text[: error.pos].encode()
    except ArithmeticError:  # of more digits than Python counts
        reason, before = "an exponent is too long", text[:place].encode()
    except (_MisfitError, RecursionError) as error:
        reason, before = str(error), text[:place].encode()
    else:
        arrays = [
            pa.array([row[index] for row in rows], dtype) for index, (_, dtype) in enumerate(fields)
        ]
        return _batch(arrays, schema, len(rows))
    raise LoadError(f"cannot load {split}: {reason} (byte {offset + len(before)})")


def _fitting(value: object, dtype: pa.DataType, column: str) -> object:
    """A value of JSON as one that Arrow takes for ``dtype``; raises a `_MisfitError`."""
    types = pa.types
    if value is None:
        return None
    if isinstance(value, list) and types.is_list(dtype):
        return [_fitting(item, dtype.value_type, column) for item in value]
    if isinstance(value, dict) and types.is_struct(dtype):
        return {field.name: _fitting(value.get(field.name), field.type, column) for field in dtype}
    if isinstance(value, Decimal) and types.is_integer(dtype):
        return _integer(value, column)
    if isinstance(value, Decimal | float) and types.is_floating(dtype):
        number = float(value)
        # What is a float already is NaN or an infinity; a number beyond all floats is none.
        if isinstance(value, float) or math.isfinite(number):
            return number
    if isinstance(value, bool) and types.is_boolean(dtype):
        return value
    if is_text(value) and types.is_string(dtype):
        return value
    raise _MisfitError(
        f"column {column!r} holds {_quoted(value)}, but it is of {dtype} by the first rows of the "
        "table"
    )


def _integer(value: Decimal, column: str) -> int:
    if not -(2**63) <= value < 2**63:
        why = "of integers of 64 bits by the first rows of the table"
    elif value != int(value):
        why = (
            "of integers by the first rows of the table; write the first number with a fraction, "
            "too, such as 1.0"
        )
    else:
        return int(value)
    raise _MisfitError(f"column {column!r} holds {_quoted(value)}, but it is {why}")


def _quoted(value: object) -> str:
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=float)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def _batch(columns: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    if not columns:  # then only this keeps their number
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
