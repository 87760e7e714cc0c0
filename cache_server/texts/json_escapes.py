"""Newline JSON whose escapes DataFusion would read as other characters.

A character beyond U+FFFF is escaped as two surrogates. arrow-json joins them with an "or" in place
of a sum: of those with the bit 0x40 in the first one, as in d842, it makes another character and
says nothing. These are the characters of the even planes: U+20000 to U+2FFFF, U+40000 and so on.
Such a file is refused before it is read.

The bytes are looked through in blocks of whole lines: neither an escape nor a run of backslashes
goes past the end of one. Knows neither tables nor queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache_server.pinned import Split
from protos.errors import LoadError

_BLOCK_BYTES = 256 * 1024  # fits a processor's caches, with what is computed of it
_ESCAPE_BYTES = 6


def _is_one_of(characters: bytes) -> npt.NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(characters)] = True
    return table


_SECOND_DIGIT, _THIRD_DIGIT = _is_one_of(b"89abAB"), _is_one_of(b"4567cdefCDEF")  # behind a d


def check_escapes(path: Path, split: Split) -> None:
    """Looks through the lines that begin in the byte range of a split.

    Args:
        path: of the split's file on this machine.

    Raises:
        LoadError: naming the file, the place and the escape.
        OSError: the file cannot be read.
    """
    for offset, block in blocks_of_lines(path, split):
        if (place := _find(block)) is not None:
            escape = block[place : place + _ESCAPE_BYTES].decode("ascii", "replace")
            raise LoadError(
                f"cannot load {split}: byte {offset + place} begins the escape {escape}, which "
                "would be read as another character; write such characters as UTF-8 "
                "(in Python: json.dumps(..., ensure_ascii=False))"
            )


def blocks_of_lines(path: Path, split: Split) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the byte range of a split, some at a time, and where each lot begins.

    Raises:
        OSError: the file cannot be read.
    """
    part_bytes = math.ceil(split.file.size / split.parts)
    start = part_bytes * split.part
    stop = min(start + part_bytes, split.file.size)
    with open(path, "rb") as file:
        if start:  # a line that begins before belongs to the split before
            file.seek(start - 1)
            file.readline()
        while (offset := file.tell()) < stop:
            yield offset, file.read(min(_BLOCK_BYTES, stop - offset)) + file.readline()


def _find(block: bytes) -> int | None:
    """Where the first such surrogate is escaped."""
    if b"\\" not in block:  # many times faster than what follows
        return None
    data = np.frombuffer(block, np.uint8)
    is_begun = data[: 1 - _ESCAPE_BYTES] == ord("\\")
    is_begun &= data[1 : 2 - _ESCAPE_BYTES] == ord("u")
    is_begun &= data[2 : 3 - _ESCAPE_BYTES] | 0x20 == ord("d")  # or D
    places = np.flatnonzero(is_begun)
    places = places[_SECOND_DIGIT[data[places + 3]] & _THIRD_DIGIT[data[places + 4]]]
    for place in places.tolist():
        first = place  # of a run of backslashes
        while first and block[first - 1] == ord("\\"):
            first -= 1
        if (place - first) % 2 == 0:  # else its own backslash is escaped
            return int(place)
    return None
