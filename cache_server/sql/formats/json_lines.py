"""Lines of newline JSON. Each line is blank or one object, wherever it stands.

A line ends with a newline; a carriage return is a space. So no line depends on another. Python's
parser decides what JSON is: it takes NaN, Infinity and control characters in strings, and the last
of two equal keys counts. Arrow's parser is faster. `is_for_arrow` and `has_one_object_a_line` tell
where it reads the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np

_BLOCK_BYTES = 1024 * 1024
_SPACE = " \t\r"
_BEFORE_NULL = np.frombuffer(b" \t\r\xefn", np.uint8)
_MOST_QUOTED = 100  # characters of a value in a message
# What Arrow's parser reads otherwise. At a row that is null it reads beyond its memory
# (apache/arrow#47409). Two patterns are five times as fast as one: each has a fixed first
# character.
_NULL_ROWS = re.compile(rb"\n[\s\xef\xbb\xbf]*null"), re.compile(rb"}[\s\xef\xbb\xbf]*null")
_NO_NUMBERS = re.compile(rb"[:,\[\s-]Inf\s*[,\]}]|-NaN\s*[,\]}]")


class Number(Decimal):
    """A number, and how it is written."""

    text: str

    def __new__(cls, text: str) -> Number:
        """Keeps the text."""
        number = super().__new__(cls, text)
        number.text = text
        return number


class LineError(Exception):
    """A line is not one object, or does not fit the table.

    Attributes:
        reason: for people.
        offset: of the line in its block, in bytes.
    """

    def __init__(self, reason: str, offset: int = 0) -> None:
        super().__init__(reason, offset)
        self.reason, self.offset = reason, offset


_DECODER = json.JSONDecoder(parse_int=Number, parse_float=Number, strict=False)


def blocks_of_lines(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of lines that begin in a byte range of a file, and where each block begins.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if start:  # a line that began earlier belongs to the range before
            file.seek(start - 1)
            file.readline()
        while (offset := file.tell()) < stop:
            block = file.read(min(_BLOCK_BYTES, stop - offset))
            if not block:
                return
            yield offset, block if block.endswith(b"\n") else block + file.readline()


def line_number(path: Path, offset: int) -> int:
    """The line of a file that begins at a byte, from 1."""
    number = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(_BLOCK_BYTES, offset))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def objects(block: bytes) -> Iterator[tuple[int, dict[str, object]]]:
    """The object of each line, and where the line begins.

    Raises:
        LineError: a line is something else.
    """
    offset = 0
    for line in block.split(b"\n"):
        try:
            if (row := _object(line)) is not None:
                yield offset, row
        except LineError as error:
            raise LineError(error.reason, offset) from None
        offset += len(line) + 1


def is_for_arrow(block: bytes) -> bool:
    """Whether Arrow's parser refuses the block or reads it as Python's does."""
    data = np.frombuffer(block, np.uint8)
    may_have_null = _num_lines(data) is None or bool(np.isin(_after(data, "}"), _BEFORE_NULL).any())
    if may_have_null and any(pattern.search(b"\n" + block) for pattern in _NULL_ROWS):
        return False
    may_have_others = (_after(data, "I") == ord("n")).any() or (_after(data, "-") == ord("N")).any()
    return not (may_have_others and _NO_NUMBERS.search(block))


def has_one_object_a_line(block: bytes, num_objects: int) -> bool:
    """Whether each line of a block is blank or one object.

    If each line begins and ends an object, none reaches over a line end: a comma would stand there.

    Args:
        block: objects one after another, as Arrow's parser read them.
    """
    if (num_lines := _num_lines(np.frombuffer(block, np.uint8))) is not None:
        return num_lines == num_objects
    lines = [line for line in map(_stripped, block.split(b"\n")) if line]
    are_whole = all(line[:1] == b"{" and line[-1:] == b"}" for line in lines)
    return are_whole and len(lines) == num_objects


def most_brackets(block: bytes) -> int:
    """The most ``[`` and ``{`` in a line, which is at least its depth."""
    data = np.frombuffer(block, np.uint8)
    before = np.cumsum((data == ord("[")) | (data == ord("{")))
    ends = before[np.flatnonzero(data == ord("\n"))]
    return int(np.diff(ends, prepend=0, append=before[-1]).max())


def _num_lines(data: np.ndarray) -> int | None:
    """The number of lines if each begins with ``{`` and ends with ``}``, the usual case."""
    ends = np.flatnonzero(data == ord("\n"))
    if not len(ends) or data[0] != ord("{") or ends[-1] != len(data) - 1:
        return None
    usual = (data[ends - 1] == ord("}")).all() and (data[ends[:-1] + 1] == ord("{")).all()
    return len(ends) if usual else None


def _after(data: np.ndarray, character: str) -> np.ndarray:
    """The byte after each such character."""
    following: np.ndarray = data[1:][data[:-1] == ord(character)]
    return following


def quoted(value: object) -> str:
    """A value in a message."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=float)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def _stripped(line: bytes) -> bytes:
    return line.strip(_SPACE.encode())


def _object(line: bytes) -> dict[str, object] | None:
    """The object of a line; None for a blank line."""
    try:
        text = line.decode().strip(_SPACE)
        if not text:
            return None
        row, end = _DECODER.raw_decode(text)
    except UnicodeDecodeError:
        raise LineError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise LineError(f"it is not JSON with one object a line: {error.msg}") from None
    except ArithmeticError:  # more digits than Python handles
        raise LineError("an exponent is too long") from None
    except RecursionError as error:
        raise LineError(str(error)) from None
    if not isinstance(row, dict):
        raise LineError(f"a line must be one object, got {quoted(row)}")
    if end < len(text):
        raise LineError(f"a line must be one object, got more behind it: {quoted(text[end:])}")
    return row
