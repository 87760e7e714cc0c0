"""The first records of a CSV, rewritten without quotes. Pure.

DataFusion infers the types of a CSV from chunks that object_store cuts at line ends, also inside
quotes (arrow-rs-object-store#650). Without quotes each chunk holds whole records. Characters that
need quotes become underscores. No number, truth value, date or time has either, so the inferred
types stay the same.

The dialect is DataFusion's default: commas; double quotes that count only at the beginning of a
value and are doubled inside; any line end; blank lines are skipped. With an escape, a backslash in
quotes makes a quote or a backslash an ordinary character.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cache_server.source.pinned import check_names

MOST_RECORDS = 1001  # the names and 1000 rows, as DataFusion's default

_INNER = {"": r'(?:[^"]++|"")*+', "\\": r'(?:[^"\\]++|""|\\.)*+'}  # of a value in quotes
_QUOTED = {  # a value, and its end if that is there
    escape: re.compile(rf'(?<![^,])"({inner})("?)', re.DOTALL) for escape, inner in _INNER.items()
}
_QUOTED_ON = {  # the rest of a value from the line before
    escape: re.compile(rf'{inner}("?)', re.DOTALL) for escape, inner in _INNER.items()
}
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$")
_ESCAPED = re.compile(r'\\(["\\])')
_BOM = "\xef\xbb\xbf"
_OUTSIDE = str.maketrans(dict.fromkeys('"\\', "_"))
_INSIDE = str.maketrans(dict.fromkeys('"\\,\r\n', "_"))


@dataclass(frozen=True)
class CsvSample:
    """The beginning of a CSV.

    Attributes:
        names: of the columns.
        records: one a line, the file's bytes as Latin-1; the first one has column numbers in place
            of the names.
    """

    names: tuple[str, ...]
    records: tuple[str, ...]


def read_sample(lines: Iterable[str], *, is_whole: bool = True, escape: str = "") -> CsvSample:
    """Reads up to `MOST_RECORDS` records.

    Of a long value in quotes only the first line is kept, to limit memory.

    Args:
        lines: of the file's bytes as Latin-1, with their ends, cut after any kind of line end.
        is_whole: otherwise the lines may end inside a record, which is left out.
        escape: a backslash, or nothing.

    Raises:
        ValueError: with the reason: names are missing, repeated or not UTF-8; or quotes are not
            closed.
    """
    header: list[str] = []  # the lines of the first record
    records: list[str] = []
    record = ""
    is_open, opened, num_records = False, 0, 0
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not is_open and not line.strip("\r\n"):
            continue
        if not num_records:
            header.append(line)
        was_open = is_open
        text, is_open = _without_quotes(line, is_open, escape)
        record += text
        if is_open:
            opened = number if text or not was_open else opened
            continue
        num_records += 1
        record = record.strip("\r\n")
        if num_records > 1 and record:  # a single null would be a blank line
            records.append(f"{record}\n")
        record = ""
        if num_records == MOST_RECORDS:
            break
    if is_open and is_whole:
        raise ValueError(f"the quotes that are opened in line {opened} are never closed")
    if not num_records:
        raise ValueError("it does not name its columns")
    names = _names(header, escape)
    numbers = ",".join(map(str, range(len(names))))
    return CsvSample(names, (f"{numbers}\n", *records))


def _without_quotes(line: str, is_open: bool, escape: str) -> tuple[str, bool]:
    """The kept part of a line, and whether its last value continues in the next line."""
    if is_open:
        rest = _QUOTED_ON[escape].match(line)
        if rest is None or not rest[1]:
            return "", True
        line = line[rest.end() :]
    if '"' not in line:
        return line.translate(_OUTSIDE) if "\\" in line else line, False
    is_open = False

    def unquoted(value: re.Match[str]) -> str:
        nonlocal is_open
        is_open = not value[2]
        return value[1].translate(_INSIDE)

    return _QUOTED[escape].sub(unquoted, line).translate(_OUTSIDE), is_open


def _names(header: Iterable[str], escape: str) -> tuple[str, ...]:
    if escape:  # as doubled quotes
        text = _QUOTED[escape].sub(
            lambda value: _ESCAPED.sub(lambda found: found[1].replace('"', '""'), value[0]),
            "".join(header),
        )
        header = _LINES.findall(text)
    try:
        names = next(csv.reader([line.encode("latin-1").decode() for line in header]))
    except UnicodeDecodeError as error:
        raise ValueError(f"the names of its columns are not UTF-8: {error.reason}") from None
    except csv.Error as error:
        raise ValueError(f"the names of its columns cannot be read: {error}") from None
    check_names(names)
    return tuple(names)
