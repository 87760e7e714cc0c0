"""Reads Parquet and Arrow columns with Arrow that DataFusion reads wrongly or not at all.

A file that Arrow wrote gives the Arrow type of each column. Where that is a dictionary, DataFusion
expects strings or plain numbers: it panics on booleans and 96-bit timestamps, and fails or panics
on values of a fixed number of bytes, such as decimals. It also rounds 96-bit timestamps with a time
zone towards 1970; Arrow rounds all of them down. It gives no shapes to tensors, and reads the
columns of Arrow files by their position, without a cast.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cache_protocol.errors import LoadError
from cache_server.source.pinned import BY_ARROW, PinnedTable, Split, with_mark
from cache_server.sql.formats.trailing_data import batches_of, check_end, open_arrow
from cache_server.tables import footers, lake
from cache_server.tables.column_sizes import column_of
from cache_server.tables.parquet import ARROW_SCHEMA, groups_of

# DataFusion makes no dictionaries of these physical types.
_NOT_ENCODED = ("BOOLEAN", "INT96", "FIXED_LEN_BYTE_ARRAY")


def marked(schema: pa.Schema, footers: Sequence[pq.FileMetaData]) -> pa.Schema:
    """``schema`` with `BY_ARROW` on the columns that only Arrow reads correctly in some file.

    Args:
        footers: of all files of the table.
    """
    found: set[str] = set()
    last: tuple[pq.ParquetSchema, bytes] | None = None
    for footer in footers:
        stored, arrow = footer.schema, (footer.metadata or {}).get(ARROW_SCHEMA)
        if arrow is None or (last is not None and arrow == last[1] and stored.equals(last[0])):
            continue
        last = stored, arrow
        found |= _columns_for_arrow(stored, arrow)
    return pa.schema(
        [with_mark(field, BY_ARROW) if field.name in found else field for field in schema]
    )


def _columns_for_arrow(stored: pq.ParquetSchema, arrow: bytes) -> set[str]:
    """The columns of one file that need Arrow, also those with several leaves that may need it.

    Args:
        arrow: the schema that Arrow wrote into the file.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(arrow)))
    types = {field.name: str(field.type) for field in schema}
    found = set()
    for index in range(len(stored)):
        leaf = stored.column(index)
        if (name := column_of(leaf.path, types)) is None:
            continue
        is_encoded = "dictionary<" in types[name] and leaf.physical_type in _NOT_ENCODED
        if is_encoded or (leaf.physical_type == "INT96" and "tz=" in types[name]):
            found.add(name)
    return found


def read(path: Path, split: Split, table: PinnedTable) -> Iterator[pa.RecordBatch]:
    """The rows of a split, in order, with the columns that the query reads.

    Args:
        path: of the split's file on this machine.

    Raises:
        LoadError: it cannot be read; names the split.
    """
    if table.format == "arrow":
        yield from _of_arrow_file(path, split, table)
        return
    schema = table.read_schema
    try:
        footer = footers.of_path(path)
        with pq.ParquetFile(path, metadata=footer, coerce_int96_timestamp_unit="us") as file:
            names = set(file.schema_arrow.names)
            absent = {f.name: pa.scalar(None, f.type) for f in schema if f.name not in names}
            constants = {**absent, **table.partition_of(split)}
            read = [name for name in schema.names if name not in constants]
            for batch in lake.parquet_batches(file, read, groups_of(file.metadata, split)):
                yield from lake.conform(batch, schema, constants)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise LoadError(f"cannot load {split}: {error}") from None


def _of_arrow_file(path: Path, split: Split, table: PinnedTable) -> Iterator[pa.RecordBatch]:
    schema = table.read_schema
    try:
        check_end(path, split)
        with pa.OSFile(str(path)) as file:
            reader = open_arrow(file)
            names = set(reader.schema.names)
            absent = {f.name: pa.scalar(None, f.type) for f in schema if f.name not in names}
            constants = {**absent, **table.partition_of(split)}
            for batch in batches_of(reader):
                batch.validate(full=True)
                yield from lake.conform(batch, schema, constants)
    except (pa.ArrowException, OSError) as error:
        raise LoadError(f"cannot load {split}: {error}") from None
