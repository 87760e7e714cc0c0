"""Files of this machine as tables of a DataFusion session."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from datafusion import CsvReadOptions, DataFrame, ExecutionPlan, SessionContext, col, lit, udf

from cache_protocol.errors import LoadError
from cache_server.source.pinned import UNDER_NULLS, PinnedTable, Split
from cache_server.sql.formats.batch_rows import (
    DEFAULT_BATCH_ROWS,
    arrow_row_bytes,
    batch_rows,
    csv_row_bytes,
)
from cache_server.sql.plain_columns import is_nested, plain_column, type_in_sql
from cache_server.sql.quoting import identifier
from cache_server.sql.selection import selection_of
from cache_server.sql.session import open_session

FILE = "__file"  # a file whose table has further or other columns


@dataclass(frozen=True)
class LocalFile:
    """Rows of a table in a file of this machine.

    Attributes:
        path, format: what to read.
        split: which part of the file, and its name for messages.
        is_staged: an Arrow stream of the rows of the split, with only the columns that are read.
        row_bytes: decoded bytes of a row of the columns that are read; 0: unknown.
        absent: values of columns that a file of a lake table lacks, the same for all rows.
    """

    path: Path
    format: str
    split: Split
    is_staged: bool = False
    row_bytes: int = 0
    absent: Mapping[str, pa.Scalar] | None = None

    def constants_of(self, table: PinnedTable) -> dict[str, pa.Scalar]:
        """The columns of a table that are not in the file, each with one value for all rows."""
        return {} if self.is_staged else {**table.partition_of(self.split), **(self.absent or {})}


def rows_of_batch(file: LocalFile) -> int:
    """Rows of a batch, by the columns that are read and those that are kept."""
    split, row_bytes = file.split, file.row_bytes
    if file.format == "csv":
        row_bytes = csv_row_bytes(file.path)
    elif file.format == "arrow":
        row_bytes = arrow_row_bytes(file.path)
    if split.num_rows:
        row_bytes = max(row_bytes, split.estimated_bytes // split.num_rows)
    return batch_rows(row_bytes) if row_bytes else DEFAULT_BATCH_ROWS


def register_table(
    context: SessionContext, file: LocalFile, table: PinnedTable, sql: str, *, skips: bool
) -> None:
    """Registers a split of ``table``, with the columns in its path and plain columns."""
    constants = file.constants_of(table)
    altered = {
        field.name
        for field in table.read_schema
        if (is_nested(field.type) if file.is_staged else UNDER_NULLS in (field.metadata or {}))
        and field.name not in constants
    }
    name = FILE if constants or altered else table.name
    schema = None if file.is_staged else stored_columns(table, constants)
    if file.format == "parquet" and selection_of(sql) is not None:  # read by name
        read = stored_and_read(file, table)
        schema = read if read.names else schema
    register_file(context, name, file.path, file.format, schema, skips=skips, escape=table.escape)
    if constants or altered:
        register_view(context, table, constants, altered)


def select_read(
    file: LocalFile, table: PinnedTable, schema: pa.Schema, names: Sequence[str]
) -> DataFrame:
    """Some columns of all rows of a file.

    Args:
        schema: of the file.
        names: of at least one column.
    """
    context = open_session(1, rows_of_batch(file))
    register_file(context, FILE, file.path, file.format, schema, escape=table.escape)
    frame = context.sql(f"SELECT {', '.join(map(identifier, names))} FROM {FILE}")
    if reads_nothing(frame.execution_plan()):
        raise FileNotFoundError
    return frame


def stored_and_read(file: LocalFile, table: PinnedTable) -> pa.Schema:
    """The columns that the query reads and the file has."""
    constants = file.constants_of(table)
    return pa.schema([field for field in table.read_schema if field.name not in constants])


def register_view(
    context: SessionContext,
    table: PinnedTable,
    constants: Mapping[str, pa.Scalar],
    altered: Collection[str] = (),
) -> None:
    """Registers ``table`` as the file with further columns.

    Args:
        constants: columns with one value for all rows.
        altered: columns that become a `plain_column`.
    """
    frame = context.table(FILE)
    for name, value in constants.items():
        frame = frame.with_column(name, lit(value))
    if altered:  # it would read fields below the function, and then mixes up column names
        context.sql("SET datafusion.optimizer.enable_leaf_expression_pushdown = false").collect()
    for name in altered:
        dtype = frame.schema().field(name).type
        to_plain = partial(plain_column, dtype=type_in_sql(dtype))
        plain = udf(to_plain, [dtype], type_in_sql(dtype), "immutable", name="plain")
        frame = frame.with_column(name, plain(col(identifier(name))))
    context.register_view(table.name, frame)


def stored_columns(table: PinnedTable, constants: Mapping[str, pa.Scalar]) -> pa.Schema:
    """The columns of a table without the constant ones."""
    return pa.schema([field for field in table.schema if field.name not in constants])


def register_file(
    context: SessionContext,
    name: str,
    path: Path,
    format: str,
    schema: pa.Schema | None,
    *,
    skips: bool = True,
    escape: str = "",
) -> None:
    """Registers a file, or a folder of files, as a table.

    Args:
        skips: parts of Parquet that cannot pass a filter, by statistics.
        escape: of CSV.
    """
    # DataFusion reads a path with a bracket or a star as a glob, and a URI as one file.
    uri, suffix = path.absolute().as_uri(), path.suffix
    if path.is_dir():
        uri, suffix = f"{uri}/", f".{format}"
    if format == "parquet":
        if not skips:
            context.sql("SET datafusion.execution.parquet.enable_page_index = false").collect()
        context.register_parquet(
            name, uri, parquet_pruning=skips, schema=schema, file_extension=suffix
        )
    elif format == "arrow":
        context.register_arrow(name, uri, schema=schema, file_extension=suffix)
    elif format == "csv":
        options = CsvReadOptions(schema=schema, file_extension=suffix, escape=escape or None)
        context.register_csv(name, uri, options=options)
    elif format == "json":
        context.register_json(name, uri, schema=schema, file_extension=suffix)
    else:
        raise LoadError(f"no reader for format {format!r}")


def reads_nothing(plan: ExecutionPlan) -> bool:
    """Whether DataFusion found no file; with a given schema it reports no error."""
    while children := plan.children():
        plan = children[0]
    return plan.display().startswith("EmptyExec")
