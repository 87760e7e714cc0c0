"""Checks the offsets of stored strings and lists before they are followed. Pure.

Arrow trusts offsets: one that a flipped bit moved out of its column ends the process (SIGSEGV). So
those of the touched rows are compared with the bounds of the column, level by level:

    list<string>   offsets [0 2 3]         -> rows of the strings: in [0, number of strings]
                   offsets [0 4 9 11]      -> bytes of the text: in [0, bytes of the text]

An offset that moved within the bounds is not found here: checksums find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.storage.row_index import Ids

_Offsets = npt.NDArray[np.signedinteger[Any]]


class Level(NamedTuple):
    """The offsets of one level of a column: value i is ``[offsets[i], offsets[i + 1])``.

    Attributes:
        offsets: a view of the column; one more than values.
        limit: the largest offset that is allowed.
        inner: the levels of what the values are of: several for maps and lists of structs.
    """

    offsets: _Offsets
    limit: int
    inner: tuple[Level, ...] = ()


def levels_of(array: pa.Array) -> tuple[Level, ...]:
    """The outermost levels of a column that is no slice; none for numbers.

    Raises:
        ValueError: it has fewer offsets than values.
    """
    types, dtype = pa.types, array.type
    if types.is_struct(dtype):
        fields = map(array.field, range(dtype.num_fields))
        return tuple(level for field in fields for level in levels_of(field))
    if types.is_fixed_size_list(dtype):
        inner = levels_of(array.values)
        offsets = np.arange(len(array) + 1, dtype=np.int64) * dtype.list_size
        return (Level(offsets, len(array.values), inner),) if inner else ()
    is_map = types.is_map(dtype)
    is_list = is_map or types.is_list(dtype) or types.is_large_list(dtype)
    is_large = types.is_large_list(dtype)
    if not is_list:
        is_large = types.is_large_string(dtype) or types.is_large_binary(dtype)
        if not (is_large or types.is_string(dtype) or types.is_binary(dtype)):
            return ()
    kind = np.dtype(np.int64 if is_large else np.int32)
    buffers = array.buffers()
    has_rows = len(array) > 0  # else there may be no buffer
    offsets = np.frombuffer(buffers[1], kind, len(array) + 1) if has_rows else np.zeros(1, kind)
    if not is_list:
        return (Level(offsets, 0 if buffers[2] is None else buffers[2].size),)
    values = (array.keys, array.items) if is_map else (array.values,)
    inner = tuple(level for each in values for level in levels_of(each))
    return (Level(offsets, len(values[0]), inner),)


def run_is_sound(levels: Sequence[Level], start: int, stop: int) -> bool:
    """Whether the offsets of consecutive values ``[start, stop)`` stay within their bounds.

    A slice of a list column holds all inner values, so Arrow looks at the last of these, too.
    """
    return all(_run_is_sound(level, start, stop) for level in levels)


def _run_is_sound(level: Level, start: int, stop: int) -> bool:
    if not all(_ends_are_sound(each) for each in level.inner):
        return False
    if start == stop:
        return True
    run = level.offsets[start : stop + 1]
    start, stop = int(run[0]), int(run[-1])
    if start < 0 or stop > level.limit or not (run[1:] >= run[:-1]).all():
        return False
    return run_is_sound(level.inner, start, stop)


def _ends_are_sound(level: Level) -> bool:
    is_sound = 0 <= level.offsets[0] <= level.offsets[-1] <= level.limit
    return bool(is_sound) and all(map(_ends_are_sound, level.inner))


def rows_are_sound(levels: Sequence[Level], rows: Ids) -> bool:
    """Whether the offsets of these values, in any order, stay within their bounds."""
    for offsets, limit, inner in levels:
        starts, stops = np.take(offsets, rows), np.take(offsets[1:], rows)
        if not are_within(starts, stops, limit):
            return False
        if inner:
            lengths = stops - starts
            before = np.cumsum(lengths, dtype=np.int64) - lengths
            values = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
            if not rows_are_sound(inner, values):
                return False
    return True


def are_within(starts: _Offsets, stops: _Offsets, limit: int | _Offsets) -> bool:
    """Whether ``0 <= starts <= stops <= limit`` holds everywhere, by the sign of one number each.

    A negative offset makes the number negative. Differences of other offsets do not overflow.
    """
    signs = np.subtract(limit, stops, dtype=stops.dtype)
    signs |= stops - starts
    signs |= starts
    signs |= stops
    return not len(signs) or bool(signs.min() >= 0)
