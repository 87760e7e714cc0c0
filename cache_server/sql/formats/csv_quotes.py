"""Refuses a CSV with an unclosed quote, such as a truncated file.

The rows after the quote would silently become one value. The dialect is that of `csv_sample`.
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
_QUOTED = re.compile(rb'"(?:(?<![^,\r\n]")|(?<=\A\xef\xbb\xbf"))(?:[^"]++|"")*+("?)')
_MAY_PRECEDE = np.zeros(256, np.bool_)  # a quote that begins a value, or a doubled one
_MAY_PRECEDE[list(b',\r\n"')] = True


def check_closed(path: Path, split: Split) -> None:
    """Checks the quotes of a file.

    Args:
        path: of the split's file on this machine.

    Raises:
        LoadError: naming the file and the byte of the unclosed quote.
        OSError: the file cannot be read.
    """
    if _closes_by_count(path):
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        opened = next((found.start() for found in _QUOTED.finditer(data) if not found[1]), None)
    if opened is not None:
        raise LoadError(
            f"cannot load {split}: the quotes that are opened in byte {opened} are never closed"
        )


def _closes_by_count(path: Path) -> bool:
    """Whether all quotes are closed, by counting them; fast, but False if it cannot tell.

    It cannot tell for a quote inside a value that does not begin with one.
    """
    is_open = False
    for before, block in _blocks(path):
        data = np.frombuffer(before + block, np.uint8)
        places = np.flatnonzero(data[1:] == ord('"'))
        if not _MAY_PRECEDE[data[places[int(is_open) :: 2]]].all():
            return False
        is_open ^= bool(len(places) % 2)
    return not is_open


def _blocks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Blocks of a file after its byte order mark, each with the byte before it."""
    before = b"\n"
    with path.open("rb") as file:
        block = file.read(_BLOCK_BYTES).removeprefix(_BOM)
        while block:
            yield before, block
            before, block = block[-1:], file.read(_BLOCK_BYTES)
