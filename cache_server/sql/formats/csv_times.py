"""Refuses times of a CSV that DataFusion would cut or change. Pure.

The first rows decide the unit of a column. arrow-csv silently reads a later time in a column of
dates as its date, 2024-1-1x as a date, a time with more digits as one with fewer, and a second :60
as :59 or as the next minute. So such columns are also read as strings, and checked.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.errors import LoadError
from cache_server.source.pinned import Split
from cache_server.sql.formats.text_values import remedy, wider_type

_MORE_THAN_A_DATE = r"[Tt ]\d|\D$"
_MIDNIGHT = r"[Tt ]00:00(:00(\.0*)?)?Z?$"
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}  # after the decimal point
_LEAP_SECOND = r"[Tt ]\d\d:?\d\d:?60"


def times_as_texts(schema: pa.Schema) -> pa.Schema:
    """The same columns, with strings for dates and times."""
    return pa.schema(
        [field.with_type(pa.string()) if _is_time(field.type) else field for field in schema]
    )


def check_times(texts: pa.RecordBatch, schema: pa.Schema, split: Split) -> None:
    """Checks columns of `times_as_texts`.

    Args:
        schema: of the table.

    Raises:
        LoadError: naming the file, the column and the value that would be changed.
    """
    for name, values in zip(texts.schema.names, texts.columns, strict=True):
        dtype = schema.field(name).type
        cut = values.filter(_is_cut(values, dtype))
        if len(cut):
            raise LoadError(
                f"cannot load {split}: column {name!r} holds {cut[0].as_py()!r}, but it is of "
                f"{dtype} by the first rows of the table, which cannot hold all of that: "
                f"{remedy(name, wider_type(cut[0].as_py(), dtype))}"
            )
        leaps = values.filter(pc.match_substring_regex(values, _LEAP_SECOND))
        if len(leaps):
            raise LoadError(
                f"cannot load {split}: column {name!r} holds {leaps[0].as_py()!r}, a leap second, "
                f"which {dtype} cannot hold: {remedy(name, 'string')}, or write the second before "
                "or after it"
            )


def _is_time(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_date32(dtype) or pa.types.is_timestamp(dtype))


def _is_cut(texts: pa.Array, dtype: pa.DataType) -> pa.Array:
    if pa.types.is_date32(dtype):
        has_more = pc.match_substring_regex(texts, _MORE_THAN_A_DATE)
        return pc.and_not(has_more, pc.match_substring_regex(texts, _MIDNIGHT))
    return pc.match_substring_regex(texts, rf"\.\d{{{_DIGITS[dtype.unit]}}}\d*[1-9]")
