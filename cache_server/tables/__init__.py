"""Pins, cuts and reads tables: one module for each kind. `pin` and `read` choose the module.

A module with a further library is imported at the first table of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import cast

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import FILE_SUFFIXES, TableSpec
from cache_protocol.datasets.secret_settings import CATALOG_PREFIX
from cache_protocol.errors import RequestError, missing_package
from cache_server.source.pinned import Pin, PinnedTable, Split
from cache_server.tables import files, plain_files

FILE_FORMATS = frozenset(FILE_SUFFIXES.values())
_POSTGRES = ("postgresql://", "postgres://")


@dataclass(frozen=True)
class _Kind:
    """The module of a format, and the extra of this distribution that it needs."""

    module: str
    extra: str


_KINDS = {
    "iceberg": _Kind("cache_server.tables.iceberg", "iceberg"),
    "delta": _Kind("cache_server.tables.delta", "delta"),
    "postgres": _Kind("cache_server.tables.postgres", "postgres"),
}


def format_of(table: TableSpec) -> str | None:
    """The format that is given or that the source tells; None: the names of files tell it."""
    if table.format is not None:
        return table.format
    if all(source.startswith(_POSTGRES) for source in table.source):
        return "postgres"
    if any(key.startswith(CATALOG_PREFIX) for key in (*table.options, *table.secrets)):
        return "iceberg"
    if all(source.endswith(".metadata.json") for source in table.source):
        return "iceberg"
    return None


def pin(table: TableSpec) -> tuple[str, Pin]:
    """The format of a table, and what it holds now.

    Raises:
        LoadError: it cannot be read; names it. RequestError: it can never be read as requested.
    """
    format = format_of(table)
    if format in _KINDS:
        is_default = (table.missing_columns, table.schema) == ("refuse", "same")
        if not is_default or table.ignore or table.types or table.escape:
            raise RequestError(
                f"table {table.name!r}: missing_columns, schema, ignore, types and escape are for "
                f"files, not for {format}"
            )
        return format, cast(Pin, _module(format).pin(table))
    if table.snapshot is not None:
        raise RequestError(
            f"table {table.name!r}: snapshot {table.snapshot!r} is for iceberg and delta tables"
        )
    return files.pin(table)


def read(table: PinnedTable, split: Split, secrets: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The rows of a split of a table that DataFusion does not read.

    Returns:
        batches of ``table.read_schema``, in row order.

    Raises:
        LoadError: naming the table, the split and the reason.
    """
    return cast(Iterator[pa.RecordBatch], _module(table.format).read(table, split, secrets))


def plain_file(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> plain_files.PlainFile | None:
    """The Parquet file that holds the rows of such a split as they are, if there is one.

    Raises:
        as `read`.
    """
    find = getattr(_module(table.format), "plain_file", None)
    return None if find is None else cast(plain_files.PlainFile | None, find(table, split, secrets))


def _module(format: str) -> ModuleType:
    kind = _KINDS[format]
    try:
        return import_module(kind.module)
    except ModuleNotFoundError as error:
        message = missing_package(error, f"format {format}", kind.extra)
        raise RequestError(f"{message} on every node") from None
