"""Infers the columns of newline JSON from the first bytes of each file.

The order of lines and files decides only the order of columns. Arrow's parser infers most blocks.
Python infers what Arrow refuses, and finds the line that does not fit.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj

from cache_protocol.errors import LoadError
from cache_server.sql.formats.json_lines import (
    LineError,
    Number,
    blocks_of_lines,
    has_one_object_a_line,
    is_for_arrow,
    line_number,
    most_brackets,
    objects,
)
from cache_server.sql.formats.json_values import MisfitError, is_int64, misfit_reason

_MOST_BRACKETS = 500  # Arrow's inference ends the process at some 50,000 nested lists


def infer(
    path: Path,
    name: str,
    known: pa.Schema | None = None,
    *,
    given: Collection[str] = (),
    max_bytes: int | None = None,
) -> pa.Schema:
    """The columns of a file, and of those read before.

    Args:
        name: of the file, for messages.
        known: the columns of other files.
        given: columns whose types the spec gives. Their types here mean nothing.
        max_bytes: lines that begin after them are left out.

    Raises:
        LoadError: a line is not one object, or a value does not fit; names the file and the line.
        OSError: the file cannot be read.
    """
    schema = pa.schema([]) if known is None else known
    size = path.stat().st_size
    for offset, block in blocks_of_lines(path, 0, min(size, max_bytes or size)):
        try:
            found = _by_arrow(block)
            merged = None if found is None else _merged_schemas(schema, found, given)
            schema = _exactly(block, schema, given) if merged is None else merged
        except LineError as error:
            line = line_number(path, offset + error.offset)
            raise LoadError(f"cannot load {name}: {error.reason} (line {line})") from None
    return schema


def type_name(value: object) -> str:
    """The name of the type of a value, as in `types`; empty if it has none."""
    try:
        dtype = _widened(pa.null(), value)
    except MisfitError:
        return ""
    inner = dtype
    while pa.types.is_list(inner):
        inner = inner.value_type
    if pa.types.is_null(inner) or pa.types.is_nested(inner):
        return ""
    return str(dtype).replace("item: ", "").replace("double", "float64")


def _by_arrow(block: bytes) -> pa.Schema | None:
    """The columns of a block; None if Arrow may infer them wrongly."""
    if not is_for_arrow(block):
        return None
    if most_brackets(block) > _MOST_BRACKETS:
        return None
    try:
        pa.array([block], pa.string())  # refuses invalid UTF-8, which Arrow's reader lets through
        table = pj.read_json(
            pa.BufferReader(block), pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
        )
    except (pa.ArrowException, ValueError, OverflowError):  # its own, or a line of 2 GiB
        return None
    if not has_one_object_a_line(block, table.num_rows):
        return None
    return pa.schema([field.with_type(_without_times(field.type)) for field in table.schema])


def _without_times(dtype: pa.DataType) -> pa.DataType:
    """The type with strings for times: Arrow guesses them from strings."""
    if pa.types.is_timestamp(dtype):
        return pa.string()
    if pa.types.is_list(dtype):
        return pa.list_(_without_times(dtype.value_type))
    if pa.types.is_struct(dtype):
        return pa.struct([(field.name, _without_times(field.type)) for field in dtype])
    return dtype


def _merged_schemas(
    schema: pa.Schema, found: pa.Schema, given: Collection[str]
) -> pa.Schema | None:
    """Both schemas as one; None if types of a column differ."""
    types = dict(zip(schema.names, schema.types, strict=True))
    for field in found:
        merged = _merged(types.get(field.name, pa.null()), field.type)
        if merged is None and field.name not in given:
            return None
        types[field.name] = pa.null() if merged is None else merged
    return pa.schema(list(types.items()))


def _exactly(block: bytes, schema: pa.Schema, given: Collection[str]) -> pa.Schema:
    """Both the schema and the columns of a block, by Python's parser."""
    types = dict(zip(schema.names, schema.types, strict=True))
    for offset, row in objects(block):
        for name, value in row.items():
            dtype = types.setdefault(name, pa.null())
            try:
                types[name] = dtype if name in given else _widened(dtype, value)
            except MisfitError as error:
                misfit, wanted = error.args
                reason = misfit_reason(misfit, wanted, pa.field(name, dtype))
                raise LineError(reason, offset) from None
    return pa.schema(list(types.items()))


def _widened(dtype: pa.DataType, value: object) -> pa.DataType:
    """The type of a value and of the values before it."""
    if value is None:
        return dtype
    if isinstance(value, list):
        item = dtype.value_type if pa.types.is_list(dtype) else pa.null()
        for inner in value:
            item = _widened(item, inner)
        found = pa.list_(item)
    elif isinstance(value, dict):
        known = {f.name: f.type for f in dtype} if pa.types.is_struct(dtype) else {}
        found = pa.struct([(k, _widened(known.get(k, pa.null()), v)) for k, v in value.items()])
    elif isinstance(value, bool):
        found = pa.bool_()
    elif isinstance(value, str):
        found = pa.string()
    else:
        found = pa.int64() if isinstance(value, Number) and is_int64(value.text) else pa.float64()
    if (merged := _merged(dtype, found)) is None:
        raise MisfitError(value, dtype)
    return merged


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if there is none."""
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_list(one) and types.is_list(other):
        item = _merged(one.value_type, other.value_type)
        return None if item is None else pa.list_(item)
    if types.is_struct(one) and types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            inner = _merged(fields.get(field.name, pa.null()), field.type)
            if inner is None:
                return None
            fields[field.name] = inner
        return pa.struct(list(fields.items()))
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else None
