"""Finds Parquet row groups that DataFusion would skip, though rows in them pass a filter.

- In DataFusion NaN is above every number, but Parquet statistics leave NaN out. For ``x <> 0`` and
  ``x > 1`` it would skip a row group of 0 and NaN.
- Old writers kept all bounds in signed order. In it non-ASCII strings come first, and unsigned
  integers from 2**31 or 2**63 on. DataFusion trusts these bounds; Arrow does so only for types with
  that order, as the format says.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


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
    unsigned = {field.name for field in used if not _is_signed(field.type)}
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return bool(unsigned) and any(_lacks_bounds(pq.read_metadata(path), unsigned) for path in paths)


def _is_of_floats(dtype: pa.DataType) -> bool:
    values = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    return bool(pa.types.is_floating(values))


def _is_signed(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(dtype) and not pa.types.is_unsigned_integer(dtype))


def _lacks_bounds(footer: pq.FileMetaData, names: Collection[str]) -> bool:
    """Whether a row group has values of one of these columns, without bounds that Arrow trusts."""
    for index in range(footer.num_columns):
        if footer.schema.column(index).path not in names:
            continue
        for group in range(footer.num_row_groups):
            statistics = footer.row_group(group).column(index).statistics
            if statistics is not None and statistics.num_values and not statistics.has_min_max:
                return True
    return False
