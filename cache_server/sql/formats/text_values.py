"""Strings of CSV and JSON as values of a type that a spec gives. Pure.

A value is read exactly or refused; a float is the nearest one. Arrow casts whole columns. It reads
hexadecimal integers, turns large numbers into infinity, and refuses some forms that DataFusion
reads in an inferred column. Such columns are read again here, one value at a time.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from decimal import Decimal
from math import isfinite

import pyarrow as pa
import pyarrow.compute as pc

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_NOT_FINITE_TEXT = f"(?i)^{_NOT_FINITE.pattern}$"  # for Arrow
_X = re.compile(rb"[xX]")
_TRUTH = {"true": True, "false": False}
_TIME = re.compile(
    r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})"
    r"(?:[Tt ]([0-9]{2})(?::?([0-9]{2})(?::?([0-9]{2})(?:\.([0-9]*))?)?)?"
    r"\s?(?P<offset>[Zz]|UTC|([+-])([0-9]{2}):?([0-9]{2})?)?)?"
)
_EPOCH = datetime(1970, 1, 1)
_DAY = "1970-01-01T"  # in front of a time of day
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}  # after the decimal point
_PLAIN_NAME = re.compile(r"\w+")


class MisfitError(Exception):
    """A string is not a value of the type.

    Attributes:
        index: of the string in its array.
        text: the string.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.index, self.text = index, text


def wider_type(text: str, dtype: pa.DataType) -> str:
    """The name of a type that holds a value and those of an inferred type, for messages."""
    if pa.types.is_integer(dtype) and is_value(text, pa.float64()) and not _is_large(text):
        return "float64"
    if pa.types.is_date(dtype) or pa.types.is_timestamp(dtype):
        for unit in ("us", "ns"):
            if is_value(text, pa.timestamp(unit)):
                return f"timestamp[{unit}]"
    return "string"


def _is_large(text: str) -> bool:
    """Whether a number is beyond int64."""
    return abs(float(text)) >= 2**63


def remedy(column: str, dtype: str) -> str:
    """What to write in a spec so that a column is read as a type, for messages."""
    name, value = (
        text if _PLAIN_NAME.fullmatch(text) else json.dumps(text) for text in (column, dtype)
    )
    return f"set types: {{{name}: {value}}}"


def read_column(texts: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Strings as an array of ``dtype``; nulls stay nulls.

    Args:
        texts: of type string.
        dtype: one that `cache_protocol.datasets.column_types` knows, not a list.

    Raises:
        MisfitError: for the first string that is not a value of the type.
    """
    if texts.type == dtype:
        return texts
    try:
        return _cast(texts, dtype)
    except pa.ArrowException:  # or it may have read a value wrongly
        pass
    values = []
    for index, text in enumerate(texts.to_pylist()):
        try:
            values.append(None if text is None else read_value(text, dtype))
        except (ValueError, ArithmeticError):
            raise MisfitError(index, text) from None  # pyright: ignore[reportArgumentType]
    return pa.array(values, dtype)


def read_value(text: str, dtype: pa.DataType) -> object:
    """One string as a value from which `pyarrow.array` makes one of ``dtype``.

    Raises:
        ValueError, ArithmeticError: it is not a value of the type.
    """
    types = pa.types
    if types.is_string(dtype) or types.is_large_string(dtype):
        return text
    if types.is_boolean(dtype):
        if (truth := _TRUTH.get(text.lower())) is None:
            raise ValueError
        return truth
    if types.is_temporal(dtype):
        return _since_1970(text, dtype)
    number = Decimal(text) if _NUMBER.fullmatch(text) else None
    if types.is_integer(dtype):
        return _integer(number, dtype)
    if number is None and not (types.is_floating(dtype) and _NOT_FINITE.fullmatch(text)):
        raise ValueError
    value = pa.scalar(text).cast(dtype).as_py()
    if number is not None and not isfinite(value):
        raise OverflowError
    return value


def is_value(text: str, dtype: pa.DataType) -> bool:
    """Whether a string is a value of the type."""
    try:
        read_value(text, dtype)
    except (ValueError, ArithmeticError):
        return False
    return True


def all_finite(values: pa.Array) -> bool:
    """Whether an array of floats has neither NaN nor infinity."""
    return pc.all(pc.is_finite(values)).as_py() is not False


def _cast(texts: pa.Array, dtype: pa.DataType) -> pa.Array:
    """The same by Arrow; also raises an `ArrowException` if its result may be wrong."""
    types = pa.types
    if types.is_boolean(dtype):
        lower = pc.utf8_lower(texts)
        if not pc.all(pc.is_in(lower, pa.array([*_TRUTH, None]))).as_py():
            raise pa.ArrowInvalid("not a truth value")
        return pc.equal(lower, "true")
    if types.is_integer(dtype) and _has_hexadecimal(texts):
        raise pa.ArrowInvalid("hexadecimal")
    if types.is_time(dtype):
        times = pc.binary_join_element_wise(_DAY, texts, "").cast(pa.timestamp(dtype.unit))
        return times.cast(pa.int64()).cast(_count_type(dtype)).cast(dtype)
    if types.is_timestamp(dtype) and dtype.tz in (None, "UTC"):
        return _timestamps(texts, dtype)
    values = texts.cast(dtype)
    if types.is_floating(dtype) and not all_finite(values):
        others = texts.filter(pc.invert(pc.is_finite(values)))
        if not pc.all(pc.match_substring_regex(others, _NOT_FINITE_TEXT)).as_py():
            raise pa.ArrowInvalid("infinity of a number")
    return values


def _has_hexadecimal(texts: pa.Array) -> bool:
    """Whether a string may be a hexadecimal number; looks at the bytes of all of them first."""
    data = texts.buffers()[2]
    if data is None or not _X.search(data):
        return False
    return bool(pc.any(pc.match_substring_regex(texts, "[xX]")).as_py())


def _timestamps(texts: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Times without an offset, or times that all have one: Arrow takes no mixture."""
    try:
        return texts.cast(pa.timestamp(dtype.unit)).cast(dtype)
    except pa.ArrowInvalid:
        return texts.cast(pa.timestamp(dtype.unit, "UTC")).cast(dtype)


def _count_type(dtype: pa.DataType) -> pa.DataType:
    return pa.int32() if dtype.bit_width == 32 else pa.int64()


def _integer(number: Decimal | None, dtype: pa.DataType) -> int:
    signed = pa.types.is_signed_integer(dtype)
    least = -(2 ** (dtype.bit_width - 1)) if signed else 0
    # The range first: an integer of a huge exponent does not fit in memory.
    if number is None or not least <= number < least + 2**dtype.bit_width or number != int(number):
        raise ValueError
    return int(number)


def _since_1970(text: str, dtype: pa.DataType) -> int:
    """Days, or units of the type, since 1970 or since midnight.

    Without an offset a time is UTC. A type with another zone needs the offset.
    """
    types = pa.types
    is_time = types.is_time(dtype)
    found = _TIME.fullmatch(f"{_DAY}{text}" if is_time else text)
    if found is None:
        raise ValueError
    *fields, fraction, offset, sign, hours, minutes = found.groups()
    zone = getattr(dtype, "tz", None)
    if offset is not None if is_time else offset is None and zone not in (None, "UTC"):
        raise ValueError
    moment = datetime(*(int(number or 0) for number in fields))  # type: ignore[arg-type]
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    if sign:
        ahead = int(hours) * 3600 + int(minutes or 0) * 60
        seconds += ahead if sign == "-" else -ahead
    unit = "ms" if types.is_date64(dtype) else getattr(dtype, "unit", "s")
    digits, fraction = _DIGITS[unit], fraction or ""
    if fraction[digits:].strip("0"):
        raise ValueError
    per_second = int(10**digits)
    count = seconds * per_second + int(fraction[:digits].ljust(digits, "0") or 0)
    if types.is_date(dtype):
        days, rest = divmod(count, 86_400 * per_second)
        if rest:
            raise ValueError
        return days if types.is_date32(dtype) else count
    if not -(2**63) <= count < 2**63:
        raise ValueError
    return count
