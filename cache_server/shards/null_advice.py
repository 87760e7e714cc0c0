"""SQL that replaces nulls and lists that cannot be stored. Pure.

In DataFusion's dialect. The column keeps the type that it has in the query.
"""

from __future__ import annotations

import pyarrow as pa

from cache_server.sql.quoting import identifier

_SPELT = {
    **{pa.float16(): "Float16", pa.float32(): "Float32", pa.float64(): "Float64"},
    **{pa.string(): "LargeUtf8", pa.large_string(): "LargeUtf8"},
    **{pa.binary(): "LargeBinary", pa.large_binary(): "LargeBinary"},
}


def null_problem(name: str, count: int, *, expression: str | None = None) -> str:
    """Says that nulls of a column are refused, and the SQL that replaces them.

    Args:
        expression: SQL that computes the column; default: the column of that name.
    """
    nulls = "1 null" if count == 1 else f"{count} nulls"
    column = identifier(name)
    return (
        f"column {name!r} holds {nulls}, and the spec has nulls: refuse: write "
        f"COALESCE({expression or column}, ...) AS {column} in the sql, filter those rows out, or "
        "set nulls: keep"
    )


def large_cast(field: pa.Field) -> str | None:
    """SQL that casts a column of strings or lists of numbers to 64-bit offsets."""
    spelt = _spelt(field.type)
    name = identifier(field.name)
    return None if spelt is None else f"arrow_cast({name}, '{spelt}') AS {name}"


def _spelt(dtype: pa.DataType) -> str | None:
    """The name of ``dtype`` in DataFusion."""
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        inner = _spelt(dtype.value_type)
        return inner and f"LargeList({inner})"
    if pa.types.is_integer(dtype):
        return str(dtype).replace("int", "Int").replace("u", "U")
    return _SPELT.get(dtype)
