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
    """

    offsets: _Offsets
    limit: int


def levels_of(array: pa.Array) -> tuple[Level, ...]:
    """The levels of a column that is no slice, outermost first; none for numbers.

    Raises:
        ValueError: it has fewer offsets than values.
    """
    types, dtype = pa.types, array.type
    is_list = types.is_list(dtype) or types.is_large_list(dtype)
    is_large = types.is_large_list(dtype)
    if not is_list:
        is_large = types.is_large_string(dtype) or types.is_large_binary(dtype)
        if not (is_large or types.is_string(dtype) or types.is_binary(dtype)):
            return ()
    kind = np.dtype(np.int64 if is_large else np.int32)
    buffers = array.buffers()
    has_rows = len(array) > 0  # else there may be no buffer
    offsets = np.frombuffer(buffers[1], kind, len(array) + 1) if has_rows else np.zeros(1, kind)
    if is_list:
        return Level(offsets, len(array.values)), *levels_of(array.values)
    return (Level(offsets, 0 if buffers[2] is None else buffers[2].size),)


def run_is_sound(levels: Sequence[Level], start: int, stop: int) -> bool:
    """Whether the offsets of consecutive values ``[start, stop)`` stay within their bounds.

    A slice of a list column holds all inner values, so Arrow looks at the last of these, too.
    """
    if not all(0 <= offsets[0] <= offsets[-1] <= limit for offsets, limit in levels[1:]):
        return False
    for offsets, limit in levels:
        if start == stop:
            break
        run = offsets[start : stop + 1]
        start, stop = int(run[0]), int(run[-1])
        if start < 0 or stop > limit or not (run[1:] >= run[:-1]).all():
            return False
    return True


def rows_are_sound(levels: Sequence[Level], rows: Ids) -> bool:
    """Whether the offsets of these values, in any order, stay within their bounds."""
    for depth, (offsets, limit) in enumerate(levels, start=1):
        starts, stops = np.take(offsets, rows), np.take(offsets[1:], rows)
        if not are_within(starts, stops, limit):
            return False
        if depth < len(levels):
            lengths = stops - starts
            before = np.cumsum(lengths, dtype=np.int64) - lengths
            rows = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return True


def are_within(starts: _Offsets, stops: _Offsets, limit: int | _Offsets) -> bool:
    """Whether ``0 <= starts <= stops <= limit`` holds everywhere, by the sign of one number each.

    A negative offset makes the number negative. Otherwise no difference overflows.
    """
    signs = np.subtract(limit, stops, dtype=stops.dtype)
    signs |= stops - starts
    signs |= starts
    signs |= stops
    return not len(signs) or bool(signs.min() >= 0)
