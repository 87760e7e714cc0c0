"""Sorted sets of row numbers as bytes. Pure.

The first number, then the differences to the number before, less one, each as a LEB128 number:
seven bits a byte, the lowest first, and a high bit if more follow. So runs take a byte a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cache_protocol.errors import InvalidRowsError

RowIds = npt.NDArray[np.int64]
_MOST_BYTES = 9  # of a number below 2**63


def encode_rows(rows: RowIds) -> bytes:
    """The bytes of row numbers, which must ascend and be at least 0."""
    if not len(rows):
        return b""
    gaps = np.diff(rows, prepend=np.int64(-1)).astype(np.uint64) - np.uint64(1)
    columns = [(gaps >> np.uint64(7 * each)) for each in range(_MOST_BYTES)]
    used = np.column_stack([columns[0] >= 0, *(column > 0 for column in columns[1:])])
    low = np.column_stack(columns).astype(np.uint8) & np.uint8(0x7F)
    low[:, :-1] |= np.where(used[:, 1:], np.uint8(0x80), np.uint8(0))
    return low[used].tobytes()


def decode_rows(data: bytes) -> RowIds:
    """The row numbers of bytes.

    Raises:
        InvalidRowsError: they are not those of a row set.
    """
    if not data:
        return np.empty(0, np.int64)
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise InvalidRowsError(f"a row set of {len(data)} bytes ends within a number")
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() >= _MOST_BYTES:
        raise InvalidRowsError(f"a row set of {len(data)} bytes has a number of more than 63 bits")
    place = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
    parts = (octets & np.uint8(0x7F)).astype(np.uint64) << (place * 7).astype(np.uint64)
    rows: RowIds = np.cumsum(np.add.reduceat(parts, starts).astype(np.int64) + 1) - 1
    if (np.diff(rows) <= 0).any() or rows[0] < 0:
        raise InvalidRowsError(f"a row set of {len(data)} bytes has numbers of more than 63 bits")
    return rows


def union(one: bytes, other: bytes) -> bytes:
    """The row set of the rows of two row sets."""
    if not one or not other or one == other:
        return one or other
    return encode_rows(np.union1d(decode_rows(one), decode_rows(other)))


def among(rows: npt.NDArray[np.integer[Any]], sorted_rows: RowIds) -> npt.NDArray[np.bool_]:
    """Whether each of some rows, in any order, is among ascending ones."""
    if not len(sorted_rows):
        return np.zeros(len(rows), np.bool_)
    at = np.searchsorted(sorted_rows, rows)
    return np.asarray(sorted_rows[np.minimum(at, len(sorted_rows) - 1)] == rows)
