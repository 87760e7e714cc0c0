"""Newline JSON whose numbers DataFusion would cut to integers.

The first rows say which columns hold integers. arrow-json reads a later 1.5 there as 1, and says
nothing. So where a number of a file may have a fraction, such columns are read as floats, too, and
a value that is no integer is refused. It also reads an integer that 64 bits do not hold as the
float next to it, if they hold that one: so from -2^63 - 1 to -2^63 - 1024 there would be -2^63.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_server.pinned import Split
from cache_server.texts.json_escapes import blocks_of_lines
from protos.errors import LoadError

_LEAST = -(2**63)
_LEAST_BEGINS = str(_LEAST)[:-4].encode()  # as every number does that is read as it
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(b".eE")] = True


def integers_as_floats(schema: pa.Schema) -> pa.Schema:
    """The columns that hold integers, at any depth, with floats in their place."""
    fields = [pa.field(field.name, _with_floats(field.type)) for field in schema]
    return pa.schema([new for new, old in zip(fields, schema, strict=True) if new.type != old.type])


def may_have_fractions(path: Path, split: Split) -> bool:
    """Whether a digit is followed by a point or an exponent anywhere in the lines of a split.

    Raises:
        OSError: the file cannot be read.
    """
    return any(_has_mark(block) for _, block in blocks_of_lines(path, split))


def check_integers(rows: pa.RecordBatch, schema: pa.Schema, split: Split) -> None:
    """Looks through rows of `integers_as_floats`.

    Args:
        schema: of the table.

    Raises:
        LoadError: naming the file, the column and the value that is no integer.
    """
    for name, values in zip(rows.schema.names, rows.columns, strict=True):
        for value in _fractions(values, schema.field(name).type):
            raise LoadError(
                f"cannot load {split}: column {name!r} holds {value}, but it is of integers by the "
                "first rows of the table; write the first number with a fraction, too, such as 1.0"
            )


def check_least(path: Path, schema: pa.Schema, split: Split) -> None:
    """Looks through the lines of a split for integers below those of 64 bits, but read as one.

    Args:
        path: of the split's file on this machine.
        schema: the columns that are read.

    Raises:
        LoadError: naming the file, the column and the value.
        OSError: the file cannot be read.
    """
    for _, block in blocks_of_lines(path, split):
        if _LEAST_BEGINS not in block:
            continue
        for line in block.splitlines():
            if _LEAST_BEGINS in line:
                _check_least(line, schema, split)


def _check_least(line: bytes, schema: pa.Schema, split: Split) -> None:
    try:
        row = json.loads(line, parse_float=Decimal)
    except ValueError:
        return  # the reader says what is wrong with it
    for field in schema if isinstance(row, dict) else ():
        for value in _numbers(row.get(field.name), field.type):
            if _LEAST - 1024 <= value < _LEAST:
                raise LoadError(
                    f"cannot load {split}: column {field.name!r} holds {value}, but it is of "
                    f"integers, which do not go below {_LEAST}"
                )


def _numbers(value: object, dtype: pa.DataType) -> Iterator[int | Decimal]:
    """What of a value of JSON is read as integers."""
    if pa.types.is_integer(dtype):
        if isinstance(value, int | Decimal):
            yield value
    elif pa.types.is_list(dtype) and isinstance(value, list):
        for item in value:
            yield from _numbers(item, dtype.value_type)
    elif pa.types.is_struct(dtype) and isinstance(value, dict):
        for field in dtype:
            yield from _numbers(value.get(field.name), field.type)


def _has_mark(block: bytes) -> bool:
    data = np.frombuffer(block, np.uint8)
    is_digit = data[:-1] - np.uint8(ord("0")) < 10
    return bool((is_digit & _IS_MARK[data[1:]]).any())


def _with_floats(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(dtype):
        return pa.float64()
    if pa.types.is_list(dtype):
        return pa.list_(dtype.value_field.with_type(_with_floats(dtype.value_type)))
    if pa.types.is_struct(dtype):
        return pa.struct([field.with_type(_with_floats(field.type)) for field in dtype])
    return dtype


def _fractions(values: pa.Array, dtype: pa.DataType) -> Iterable[float]:
    """What of the values stands for integers of ``dtype`` and is none."""
    if pa.types.is_integer(dtype):
        found: list[float] = values.filter(pc.not_equal(values, pc.trunc(values))).to_pylist()
        return found
    if pa.types.is_list(dtype):
        return _fractions(values.flatten(), dtype.value_type)
    if pa.types.is_struct(dtype):
        fields = zip(values.flatten(), dtype, strict=True)
        return [value for child, field in fields for value in _fractions(child, field.type)]
    return []
