"""SQL that replaces nulls and lists that cannot be stored. Pure.

In DataFusion's dialect. The column keeps the type that it has in the query.
"""

from __future__ import annotations

import pyarrow as pa

from cache_server.sql.quoting import identifier

_UNIT_NAMES = {"s": "Second", "ms": "Millisecond", "us": "Microsecond", "ns": "Nanosecond"}
_SPELT = {
    **{pa.float16(): "Float16", pa.float32(): "Float32", pa.float64(): "Float64"},
    **{pa.string(): "{}Utf8", pa.large_string(): "LargeUtf8"},
    **{pa.binary(): "{}Binary", pa.large_binary(): "LargeBinary"},
}
_ZEROS = {
    "int64": "0",
    "bool": "false",
    "date32": "DATE '1970-01-01'",
    "date64": "DATE '1970-01-01'",
    **{f"int{bits}": f"arrow_cast(0, 'Int{bits}')" for bits in (8, 16, 32)},
    **{f"uint{bits}": f"arrow_cast(0, 'UInt{bits}')" for bits in (8, 16, 32, 64)},
}


def null_problem(
    field: pa.Field, count: int, *, encoded: bool, expression: str | None = None
) -> str:
    """Says what is wrong, and the SQL that corrects it.

    Args:
        encoded: the column comes as a dictionary.
        expression: SQL that computes the column; default: the column of that name.
    """
    nulls, them = ("null", "it") if count == 1 else ("nulls", "them")
    problem = (
        f"column {field.name!r} holds {count} {nulls}, and {field.type} has no value for {them}"
    )
    name = identifier(field.name)
    value = name if expression is None else expression
    if pa.types.is_nested(field.type):
        cast = sql_cast(field, large=False, expression=expression)
        return (
            f"{problem}: filter those rows out, or make it a list of any length"
            f"{f', with {cast} in the sql' if cast else ''}"
        )
    zero = _zero(field)
    if encoded and zero == "false":  # DataFusion has no dictionaries of these
        value = f"arrow_cast({value}, 'Boolean')"
    elif encoded and "'Duration(" in zero:
        value = zero.replace("(0,", f"({value},")
    coalesce = f"COALESCE({value}, {zero}) AS {name}"
    return f"{problem}: write {coalesce} in the sql, or filter those rows out"


def float_null_problem(name: str, count: int, *, expression: str | None = None) -> str:
    """Says that a spec refuses the nulls of a column of floats, and the SQL that replaces them.

    Args:
        expression: as for `null_problem`.
    """
    nulls = "1 null" if count == 1 else f"{count} nulls"
    column = identifier(name)
    return (
        f"column {name!r} holds {nulls}, and the spec has nulls: refuse: write "
        f"COALESCE({expression or column}, 0) AS {column} in the sql, filter those rows out, or "
        "set nulls: nan"
    )


def sql_cast(field: pa.Field, *, large: bool, expression: str | None = None) -> str | None:
    """SQL that casts a stored column to lists of any length, or to 64-bit offsets.

    Args:
        expression: as for `null_problem`.
    """
    spelt = _spelt(field.type, "Large" if large else "")
    if spelt is None or b"cache.unit" in (field.metadata or {}):  # the cast would lose it
        return None
    name = identifier(field.name)
    return f"arrow_cast({expression or name}, '{spelt}') AS {name}"


def _spelt(dtype: pa.DataType, prefix: str) -> str | None:
    """The name of ``dtype`` in DataFusion."""
    if pa.types.is_nested(dtype):
        inner = _spelt(dtype.value_type, prefix)
        return inner and f"{prefix}List({inner})"
    if pa.types.is_integer(dtype):
        return str(dtype).replace("int", "Int").replace("u", "U")
    return _SPELT.get(dtype, "").format(prefix) or None


def _zero(field: pa.Field) -> str:
    """SQL for a zero of the type that the column has in the query, so that COALESCE keeps it."""
    metadata = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    source = metadata.get("cache.source_type", str(field.type)).partition("[")[0]
    if source in _ZEROS:
        return _ZEROS[source]
    unit = _UNIT_NAMES[metadata["cache.unit"]]
    if source == "timestamp":
        zone = metadata.get("cache.timezone")
        zone = f'Some("{zone}")' if zone else "None"
        return f"arrow_cast(0, 'Timestamp({unit}, {zone})')"
    if source == "duration":
        return f"arrow_cast(0, 'Duration({unit})')"
    return f"arrow_cast('00:00:00', '{source.title()}({unit})')"
