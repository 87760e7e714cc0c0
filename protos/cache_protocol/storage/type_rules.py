"""Which Arrow types the values of another type become without a loss. Pure.

The rule is the table in `docs/sources/lossless.md`. A verdict is "always" where the new type holds
each value of the old one. A NaN stays a NaN; its payload may change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

import pyarrow as pa

MANTISSA_BITS = {16: 11, 32: 24, 64: 53}
DAY_NS = 86_400 * 10**9
_UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_UTC = frozenset({"UTC", "Etc/UTC", "Z", "+00:00", "+00"})


class Verdict(IntEnum):
    """Whether values of a type become another one: of parts, the least holds."""

    NEVER = 0
    IF_EXACT = 1
    ALWAYS = 2


def can_become(old: pa.DataType, new: pa.DataType) -> Verdict:
    """Whether values of ``old`` become ``new`` without a loss, by the types alone."""
    if old.equals(new):
        return Verdict.ALWAYS
    kinds = pa.types
    if kinds.is_null(old):
        has_nulls = not kinds.is_union(new) and not kinds.is_run_end_encoded(new)
        return Verdict.ALWAYS if has_nulls else Verdict.NEVER
    if is_extension(new):
        return Verdict.NEVER
    if is_extension(old):  # a bool8 is no number
        is_bool = old.extension_name == "arrow.bool8"
        return Verdict.NEVER if is_bool else can_become(old.storage_type, new)
    if kinds.is_dictionary(old):
        return min(can_become(old.value_type, new), _as_encoded(new))
    if kinds.is_dictionary(new):
        return min(can_become(old, new.value_type), Verdict.IF_EXACT)
    for judge in (_numbers, _times, _texts, _lists, _fields):
        verdict = judge(old, new)
        if verdict is not None:
            return verdict
    return Verdict.NEVER


def field_can_become(old: pa.Field, new: pa.Field) -> Verdict:
    """As `can_become`, also for the nulls of a column."""
    verdict = can_become(old.type, new.type)
    return min(verdict, Verdict.IF_EXACT) if old.nullable and not new.nullable else verdict


def _numbers(old: pa.DataType, new: pa.DataType) -> Verdict | None:
    kinds = pa.types
    if kinds.is_integer(old):
        low, high = bounds(old)
        if kinds.is_integer(new):
            return _always_if(bounds(new)[0] <= low and high <= bounds(new)[1])
        if kinds.is_floating(new):
            return _always_if(high.bit_length() <= MANTISSA_BITS[new.bit_width])
        if kinds.is_decimal(new):
            digits = max(len(str(high)), len(str(-low)))
            return _always_if(new.scale >= 0 and new.precision - new.scale >= digits)
    if kinds.is_floating(old) and kinds.is_floating(new):
        return _always_if(old.bit_width <= new.bit_width)
    if kinds.is_decimal(old):
        whole = old.precision - old.scale
        if kinds.is_decimal(new):
            return _always_if(old.scale <= new.scale and whole <= new.precision - new.scale)
        if kinds.is_integer(new) and old.scale <= 0:
            low, high = bounds(new)
            return _always_if(low < 0 and 10**whole - 1 <= high)
    return None


def _times(old: pa.DataType, new: pa.DataType) -> Verdict | None:
    old_ns, new_ns = unit_ns(old), unit_ns(new)
    if old_ns is None or new_ns is None:
        return None
    kinds = pa.types
    is_midnight = kinds.is_date(old) and kinds.is_timestamp(new) and new.tz is None
    if not is_midnight and _time_kind(old) != _time_kind(new):
        return Verdict.NEVER
    largest = DAY_NS // old_ns if kinds.is_time(old) else largest_count(old)
    return _always_if(old_ns % new_ns == 0 and largest * (old_ns // new_ns) <= largest_count(new))


def _texts(old: pa.DataType, new: pa.DataType) -> Verdict | None:
    kind = text_kind(old)
    if kind is None or kind != text_kind(new):
        return None
    kinds = pa.types
    if kinds.is_fixed_size_binary(old) and kinds.is_fixed_size_binary(new):
        return Verdict.NEVER  # of other widths
    return _always_if(
        kinds.is_large_string(new)
        or kinds.is_large_binary(new)
        or (is_view(new) and (kinds.is_string(old) or kinds.is_binary(old)))
    )


def _lists(old: pa.DataType, new: pa.DataType) -> Verdict | None:
    if not is_any_list(old) or not is_any_list(new):
        return None
    kinds = pa.types
    verdict = field_can_become(old.value_field, new.value_field)
    if kinds.is_fixed_size_list(new):
        if kinds.is_fixed_size_list(old) and old.list_size != new.list_size:
            return Verdict.NEVER
        holds_all = bool(kinds.is_fixed_size_list(old))
    else:
        is_short = kinds.is_list(old) or kinds.is_list_view(old)
        holds_all = is_short or kinds.is_large_list(new) or kinds.is_large_list_view(new)
    return min(verdict, _always_if(holds_all))


def _fields(old: pa.DataType, new: pa.DataType) -> Verdict | None:
    """Of structs and maps."""
    kinds = pa.types
    if kinds.is_struct(old) and kinds.is_struct(new):
        names = [field.name for field in old]
        if sorted(names) != sorted(field.name for field in new) or repeated_names(names):
            return Verdict.NEVER
        return min(
            (field_can_become(old.field(field.name), field) for field in new),
            default=Verdict.ALWAYS,
        )
    if kinds.is_map(old) and kinds.is_map(new):
        if new.keys_sorted and not old.keys_sorted:
            return Verdict.NEVER
        items = field_can_become(old.item_field, new.item_field)
        return min(can_become(old.key_type, new.key_type), items)
    return None


def _as_encoded(new: pa.DataType) -> Verdict:
    """Codes of another dictionary may have no room."""
    return Verdict.IF_EXACT if pa.types.is_dictionary(new) else Verdict.ALWAYS


def _always_if(holds_all: bool) -> Verdict:
    return Verdict.ALWAYS if holds_all else Verdict.IF_EXACT


def bounds(integer: pa.DataType) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    if pa.types.is_unsigned_integer(integer):
        return 0, 2**integer.bit_width - 1
    return -(2 ** (integer.bit_width - 1)), 2 ** (integer.bit_width - 1) - 1


def largest_count(time: pa.DataType) -> int:
    """One more than the largest count of units that a time type has room for."""
    return int(2 ** (time.bit_width - 1))


def unit_ns(dtype: pa.DataType) -> int | None:
    """Nanoseconds of one unit of a date, a time, a timestamp or a duration; None: of others."""
    kinds = pa.types
    if kinds.is_date32(dtype):
        return DAY_NS
    if kinds.is_date64(dtype):
        return 10**6
    is_time = kinds.is_time(dtype) or kinds.is_timestamp(dtype) or kinds.is_duration(dtype)
    return _UNITS_NS[dtype.unit] if is_time else None


def _time_kind(dtype: pa.DataType) -> tuple[str, str | None]:
    kinds = pa.types
    if kinds.is_timestamp(dtype):
        return "timestamp", "UTC" if is_utc(dtype.tz) else dtype.tz
    if kinds.is_duration(dtype):
        return "duration", None
    return "date" if kinds.is_date(dtype) else "time", None


def is_utc(zone: str | None) -> bool:
    """Whether a time zone is UTC, by any of its names."""
    return zone in _UTC


def text_kind(dtype: pa.DataType) -> str | None:
    """Whether a type is ``text`` or ``bytes``, with any offsets; None: neither."""
    kinds = pa.types
    if kinds.is_string(dtype) or kinds.is_large_string(dtype) or kinds.is_string_view(dtype):
        return "text"
    is_binary = kinds.is_binary(dtype) or kinds.is_large_binary(dtype)
    if is_binary or kinds.is_binary_view(dtype) or kinds.is_fixed_size_binary(dtype):
        return "bytes"
    return None


def is_view(dtype: pa.DataType) -> bool:
    """Whether a type is string_view or binary_view."""
    return bool(pa.types.is_string_view(dtype) or pa.types.is_binary_view(dtype))


def is_any_list(dtype: pa.DataType) -> bool:
    """Whether a type is a list, of any form."""
    kinds = pa.types
    is_list = kinds.is_list(dtype) or kinds.is_large_list(dtype) or kinds.is_fixed_size_list(dtype)
    return bool(is_list or kinds.is_list_view(dtype) or kinds.is_large_list_view(dtype))


def is_extension(dtype: pa.DataType) -> bool:
    """Whether a type is an extension type, also one that pyarrow knows."""
    return isinstance(dtype, pa.BaseExtensionType)


def may_expand(dtype: pa.DataType) -> bool:
    """Whether a few bytes may hold any number of values: nulls without a type, views of lists."""
    kinds = pa.types
    if kinds.is_null(dtype) or kinds.is_list_view(dtype) or kinds.is_large_list_view(dtype):
        return True
    if kinds.is_dictionary(dtype):
        return may_expand(dtype.value_type)
    if is_extension(dtype):
        return may_expand(dtype.storage_type)
    return any(may_expand(dtype.field(place).type) for place in range(dtype.num_fields))


def repeated_names(names: Sequence[str]) -> list[str]:
    """The names that come more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)
