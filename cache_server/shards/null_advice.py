"""SQL that replaces nulls and lists that cannot be stored. Pure.

In DataFusion's dialect. The column keeps the type that it has in the query.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from cache_protocol.errors import some_of
from cache_server.sql.quoting import identifier

_LONGEST_SQL = 120  # characters of an expression in a message
_SPELT = {
    **{pa.float16(): "Float16", pa.float32(): "Float32", pa.float64(): "Float64"},
    **{pa.string(): "LargeUtf8", pa.large_string(): "LargeUtf8"},
    **{pa.binary(): "LargeBinary", pa.large_binary(): "LargeBinary"},
}


def null_problem(
    name: str,
    count: int,
    *,
    where: str = "",
    others: Collection[str] = (),
    expression: str | None = None,
) -> str:
    """Says that nulls of a column are refused, where they are, and the SQL that replaces them.

    Args:
        where: see `null_places`.
        others: further columns with nulls that are refused.
        expression: SQL that computes the column; default: the column of that name.
    """
    nulls = "1 null" if count == 1 else f"{count} nulls"
    column = identifier(name)
    computed = expression or column
    if len(computed) > _LONGEST_SQL:
        computed = f"{computed[:_LONGEST_SQL]}..."
    also = f"; {some_of(map(repr, others))} too" if others else ""
    return (
        f"column {name!r} holds {nulls}, and the spec has nulls: refuse{where}{also}: write "
        f"COALESCE({computed}, ...) AS {column} in the sql, filter those rows out, or set "
        "nulls: keep"
    )


def null_place(path: str, row: int | None = None, group: int | None = None) -> str:
    """The place of a null: its file, and the row and row group as far as they are known."""
    where = path if row is None else f"{path}, row {row}"
    if group is None:
        return where
    return f"{where}, row group {group}" if row is None else f"{where} (row group {group})"


def null_places(first: str, files: Collection[str]) -> str:
    """Where nulls are: the first one, then the names of further files.

    Args:
        first: see `null_place`.
        files: all files with nulls, the first one first.
    """
    path, *further = files
    folder = path[: path.rfind("/") + 1]
    names = [each.removeprefix(folder) for each in further]
    more = f" and {len(names) - 3} more files" if len(names) > 3 else ""
    return f", in {first}" + (f", then in {', '.join(names[:3])}{more}" if names else "")


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
