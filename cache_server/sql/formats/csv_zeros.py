"""Finds numbers of a CSV with leading zeros, such as postal codes, which a number loses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BLOCK_BYTES = 1024 * 1024
_LONGEST = 64  # bytes of a number that may be cut by the end of a block
_BEGINS = np.zeros(256, np.bool_)
_BEGINS[list(b',\r\n"')] = True
_DIGITS = np.zeros(256, np.bool_)
_DIGITS[list(b"0123456789")] = True
_WHOLE = re.compile(rb'[,\r\n"]0[0-9]+[,\r\n"]')


def may_have_zeros(path: Path) -> bool:
    """Whether any value of a file is of digits and begins with a zero; fast.

    Raises:
        OSError: the file cannot be read.
    """
    before = b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            text = before + block
            data = np.frombuffer(text, np.uint8)
            zeros = _BEGINS[data[:-2]] & (data[1:-1] == ord("0")) & _DIGITS[data[2:]]
            if zeros.any() and _WHOLE.search(text, int(zeros.argmax())):
                return True
            before = text[-_LONGEST:]
    return _WHOLE.search(before + b"\n") is not None


def is_number(dtype: pa.DataType) -> bool:
    """Whether DataFusion infers the type from numbers."""
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype))


def has_zeros(texts: pa.Array) -> bool:
    """Whether any string is of digits and begins with a zero."""
    return bool(pc.any(pc.match_substring_regex(texts, "^0[0-9]+$")).as_py())
