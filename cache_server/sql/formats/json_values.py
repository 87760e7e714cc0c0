"""Values of newline JSON as values of a column.

Nothing is coerced: a number with a fraction does not fit integers, a number in quotes is a string.
"""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa

from cache_protocol.datasets.values import is_text
from cache_server.source.pinned import GIVEN
from cache_server.sql.formats.json_lines import LineError, Number, quoted
from cache_server.sql.formats.text_values import read_value, remedy, wider_type


class MisfitError(Exception):
    """A value is not of the type of its column.

    Args:
        value: that of the column, or one inside it.
        dtype: the type it should have.
    """


def is_int64(text: str) -> bool:
    """Whether a number is written as an integer of 64 bits."""
    return text.lstrip("-").isdigit() and len(text) <= 20 and -(2**63) <= int(text) < 2**63


def fitting(value: object, field: pa.Field) -> object:
    """A value of JSON as one that Arrow accepts for a column.

    Raises:
        LineError: it does not fit; says what to do.
    """
    is_given = GIVEN in (field.metadata or {})
    try:
        return (_given if is_given else _inferred)(value, field.type)
    except MisfitError as error:
        misfit, dtype = error.args
    if is_given:
        holds = f"column {field.name!r} holds {quoted(misfit)}, but"
        raise LineError(f"{holds} its type in the spec is {field.type}")
    raise LineError(misfit_reason(misfit, dtype, field))


def misfit_reason(misfit: object, dtype: pa.DataType, field: pa.Field) -> str:
    """Why a value does not fit an inferred column, and what to do.

    Args:
        misfit: the value, or one inside it.
        dtype: the type that ``misfit`` should have.
        field: the column.
    """
    what = str(dtype)
    if pa.types.is_integer(dtype) and isinstance(misfit, Decimal):
        what = "integers" if -(2**63) <= misfit < 2**63 else "integers of 64 bits"
    wider = _wider(misfit, dtype, field.type)
    advice = f": {remedy(field.name, wider)}" if wider else ""
    return (
        f"column {field.name!r} holds {quoted(misfit)}, but it is of {what} by the first rows of "
        f"the table{advice}"
    )


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
    raise MisfitError(value, dtype)


def _text_of(value: object) -> str | None:
    """A string, or a number or truth value as it is written; None for anything else."""
    if isinstance(value, Number):
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
    raise MisfitError(value, dtype)
