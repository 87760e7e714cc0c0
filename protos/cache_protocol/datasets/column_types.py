"""The Arrow types that a spec may give to columns of CSV and JSON, by name.

Not in `dataset_spec`, so that only specs with types import pyarrow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.datasets.secret_settings import shown
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import some_of

TYPE_NAMES = (
    "bool, int8 to int64, uint8 to uint64, float32, float64, decimal32(p, s) to "
    "decimal256(p, s), date32, date64, time32[s|ms], time64[us|ns], timestamp[s|ms|us|ns], "
    "timestamp[us, tz=UTC], string, large_string, and in JSON list<type>"
)
_DECIMAL = re.compile(r"decimal(32|64|128|256)\(\s*(\d{1,2})\s*(?:,\s*(-?\d{1,2})\s*)?\)")
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns),\s*tz=([\w/+:-]+)\]")
_OFFSET = re.compile(r"[+-]([01]\d|2[0-3]):[0-5]\d")
_LIST = re.compile(r"list<(?:item:\s*)?(.+)>")


def parse_type(name: object) -> pa.DataType:
    """The Arrow type of a name, such as ``decimal128(10, 2)`` or ``timestamp[us, tz=UTC]``.

    Args:
        name: or an Arrow type.

    Raises:
        ValueError: no such type, or text cannot be read as it; quotes the name.
    """
    text = str(name).strip() if isinstance(name, str | pa.DataType) else ""
    with suppress(ValueError, pa.ArrowException):
        dtype = _parsed(text)
        if _is_readable(dtype):
            return dtype
    raise ValueError(f"no type {shown(name)}; types: {TYPE_NAMES}")


def parse_types(types: object, problems: list[str]) -> dict[str, str]:
    """Column -> type, by Arrow's own name of each type.

    Args:
        types: column -> name of a type, as given.
        problems: bad entries are added.
    """
    if not isinstance(types, Mapping):
        problems.append(f"types must be a mapping of columns to types, got {shown(types)}")
        return {}
    known, unknown = {}, []
    for column, name in types.items():
        if not is_text(column) or not column:
            problems.append(f"types must name columns, got {shown(column)}")
            continue
        try:
            known[column] = str(parse_type(name))
        except ValueError:
            unknown.append(f"{shown(name)} for {shown(column)}")
    if unknown:
        problems.append(
            f"types must be among {TYPE_NAMES}, got {some_of(unknown)}; in YAML, quote a type "
            "that has a comma or a bracket"
        )
    return known


def _parsed(text: str) -> pa.DataType:
    if found := _DECIMAL.fullmatch(text):
        make = getattr(pa, f"decimal{found[1]}")
        return make(int(found[2]), int(found[3] or 0))
    if found := _ZONED.fullmatch(text):
        dtype = pa.timestamp(found[1], found[2])
        if not _OFFSET.fullmatch(found[2]):  # older pyarrow computes with named zones only
            pc.year(pa.scalar(0, dtype))  # raises for an unknown time zone
        return dtype
    if found := _LIST.fullmatch(text):
        return pa.list_(_parsed(found[1].strip()))
    return pa.type_for_alias(text)


def _is_readable(dtype: pa.DataType) -> bool:
    """Whether strings are read as the type exactly: not float16, which Arrow rounds twice."""
    types = pa.types
    if types.is_list(dtype):
        return _is_readable(dtype.value_type)
    kinds = (
        *(types.is_integer, types.is_float32, types.is_float64, types.is_decimal),
        *(types.is_boolean, types.is_date, types.is_time, types.is_timestamp),
        *(types.is_string, types.is_large_string),
    )
    return any(is_kind(dtype) for is_kind in kinds)
