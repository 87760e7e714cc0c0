"""Finds Parquet row groups that DataFusion would skip, though rows in them pass a filter.

- In DataFusion NaN is above every number, but Parquet statistics leave NaN out. For ``x <> 0`` and
  ``x > 1`` it would skip a row group of 0 and NaN.
- Old writers kept all bounds in signed order. In it non-ASCII strings come first, and unsigned
  integers from 2**31 or 2**63 on. DataFusion trusts these bounds for every type, so the bytes of
  the footer are looked at, as it does.
- It casts the bounds as the filter casts the column, although not every cast keeps an order: the
  times of a day begin anew each day, and clocks that are put back reach some days twice. A cast
  that adds a zone is turned around on the constant, as if it kept the number.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa

from cache_server.sql.formats.footer_bytes import has_old_bounds

_OUT_OF_ORDER = re.compile(r"\bAS (Time(32|64)|Boolean)\b")  # casts that keep no order
_TO_DATE = re.compile(r"\bAS Date(32|64)\b")
_TO_ZONE = re.compile(r'\bAS Timestamp\(\w+, "')
_END_BYTES = 8  # the length of the footer, and PAR1


def skips_wrongly(plan: str, path: Path, schema: pa.Schema) -> bool:
    """Whether a plan skips row groups by wrong bounds.

    Args:
        plan: as DataFusion shows it; it calls the bounds of a column ``name_min`` and ``name_max``.
        path: of the file that it reads, or a folder of such files.
        schema: the columns that are read.
    """
    before = [plan[: found.start()] for found in re.finditer("_(min|max)@", plan)]
    used = [field for field in schema if any(text.endswith(field.name) for text in before)]
    if any(_is_of_floats(field.type) for field in used):
        return True
    if used and _OUT_OF_ORDER.search(plan):
        return True
    if any(getattr(field.type, "tz", None) for field in used) and _TO_DATE.search(plan):
        return True
    if any(_has_no_zone(field.type) for field in used) and _TO_ZONE.search(plan):
        return True
    unsigned = {field.name for field in used if not _is_signed(field.type)}
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return bool(unsigned) and any(has_old_bounds(_tail(path), unsigned) for path in paths)


def _tail(path: Path) -> bytes:
    """The footer of a file, with its length and the mark at the end."""
    with path.open("rb") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-_END_BYTES - length, os.SEEK_END)
        return file.read()


def _is_of_floats(dtype: pa.DataType) -> bool:
    values = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    return bool(pa.types.is_floating(values))


def _has_no_zone(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_date(dtype) or (pa.types.is_timestamp(dtype) and not dtype.tz))


def _is_signed(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(dtype) and not pa.types.is_unsigned_integer(dtype))
