"""Refuses a CSV whose quotes readers take differently, or that are never closed.

A quote opens at the beginning of a value. Its end must be followed by a comma or a line end, else
DataFusion drops the quote and keeps the text. Where the spec gives an escape, a backslash in quotes
must stand before a quote or a backslash; outside quotes it is an ordinary character. The dialect is
that of `csv_sample`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cache_protocol.errors import LoadError
from cache_server.source.pinned import Split

_BLOCK_BYTES = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_OPENING = rb'"(?:(?<![^,\r\n]")|(?<=\A\xef\xbb\xbf"))'
_QUOTED = {
    "": re.compile(_OPENING + rb'(?:[^"]++|"")*+("?)'),
    "\\": re.compile(_OPENING + rb'(?:[^"\\]++|""|\\["\\])*+("?)'),
}
_UNCLEAR = re.compile(rb'\\[,"\\\r\n]')  # a backslash outside quotes
_LINE_END = re.compile(rb"\r\n?|\n")
_MOST_QUOTED = 100  # bytes of a value in a message
_MAY_PRECEDE = np.zeros(256, np.bool_)  # a quote that begins a value, or a doubled one
_MAY_PRECEDE[list(b',\r\n"')] = True
_MAY_FOLLOW = _MAY_PRECEDE  # a quote that ends a value, or a doubled one


def check_quotes(path: Path, split: Split, escape: str = "") -> None:
    """Checks the quotes of a file.

    Args:
        path: of the split's file on this machine.
        escape: a backslash, or nothing.

    Raises:
        LoadError: naming the file, the line and the value.
        OSError: the file cannot be read.
    """
    if _is_usual(path, escape):
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if (problem := find_problem(data, escape)) is not None:
            raise LoadError(f"cannot load {split}: {problem}")


def find_problem(data: bytes | mmap.mmap, escape: str = "", *, is_whole: bool = True) -> str | None:
    """The first quote or backslash that readers take differently; None if there is none.

    Args:
        data: a CSV, from its beginning.
        escape: a backslash, or nothing.
        is_whole: otherwise the data may end in quotes.
    """
    end = 0
    for found in _QUOTED[escape].finditer(data):
        if escape and (unclear := _UNCLEAR.search(data, end, found.start())):
            return _outside_quotes(data, unclear)
        end = found.end()
        if not found[1] or data[end : end + 1] not in (b"", b",", b"\r", b"\n"):
            return _in_quotes(data, found, escape, is_whole)
    if escape and (unclear := _UNCLEAR.search(data, end)):
        return _outside_quotes(data, unclear)
    return None


def _in_quotes(
    data: bytes | mmap.mmap, found: re.Match[bytes], escape: str, is_whole: bool
) -> str | None:
    """What is wrong with a value in quotes, or behind it."""
    start, end = found.span()
    line = f"in line {_line(data, start)}"
    if found[1]:
        value = _shown(data[start : end + 1])
        is_escaped = not escape and data[end - 2 : end - 1] == b"\\"
        advice = '; for quotes escaped by a backslash, set escape: "\\\\"' if is_escaped else ""
        return f"text follows the closing quote of {value} {line}: double it{advice}"
    if data[end : end + 1] == b"\\":
        return (
            f"{_shown(data[start : end + 2])} {line} has a backslash before another character than "
            "a quote or a backslash, which readers take differently: double the backslash"
        )
    return f"the quotes that are opened {line} are never closed" if is_whole else None


def _outside_quotes(data: bytes | mmap.mmap, found: re.Match[bytes]) -> str:
    return (
        f"a backslash outside quotes stands before {found[0][1:].decode()!r} in line "
        f"{_line(data, found.start())}, which readers take differently: put the value in quotes"
    )


def _line(data: bytes | mmap.mmap, place: int) -> int:
    return 1 + sum(1 for _ in _LINE_END.finditer(data, 0, place))


def _shown(value: bytes) -> str:
    text = value.decode(errors="replace")
    return text if len(value) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def _is_usual(path: Path, escape: str) -> bool:
    """Whether no quote is unclear, by counting them; fast, but False if it cannot tell.

    It cannot tell for a quote inside a value that does not begin with one.
    """
    is_open = False
    for before, block in _blocks(path):
        text = _without_escapes(block) if escape else block
        data = np.frombuffer(before + text + b"\n", np.uint8)
        quotes = np.flatnonzero(data == ord('"'))
        opening, closing = quotes[int(is_open) :: 2], quotes[1 - int(is_open) :: 2]
        if not (_MAY_PRECEDE[data[opening - 1]].all() and _MAY_FOLLOW[data[closing + 1]].all()):
            return False
        if escape and b"\\" in block and not _escapes_are_usual(data, quotes, block, is_open):
            return False
        is_open ^= bool(len(quotes) % 2)
    return not is_open


def _without_escapes(block: bytes) -> bytes:
    return block.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _escapes_are_usual(data: np.ndarray, quotes: np.ndarray, block: bytes, is_open: bool) -> bool:
    """Whether escapes stand in quotes, and other backslashes outside, before usual characters."""
    backslashes = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\\")) + 1
    are_inside = (np.searchsorted(quotes, backslashes) + is_open) % 2 == 1
    are_plain = data[backslashes] == ord("\\")
    follows = data[backslashes[are_plain] + 1]
    return bool((are_inside != are_plain).all()) and not _MAY_FOLLOW[follows].any()


def _blocks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Blocks of a file after its byte order mark, each with the byte before it.

    No block but the last ends with a quote or a backslash.
    """
    before = b"\n"
    with path.open("rb") as file:
        block = file.read(_BLOCK_BYTES).removeprefix(_BOM)
        while block:
            while block[-1:] in (b'"', b"\\") and (more := file.read(1)):
                block += more
            yield before, block
            before, block = block[-1:], file.read(_BLOCK_BYTES)
