"""DataFusion: checks a query, and reads one split with it. The only importer of datafusion.

Rows must come out in source order every time, and a split must read its own rows only. Hence the
session settings: as many partitions as the file has parts, cut by byte ranges and executed one at
a time; no round-robin repartition, which reorders rows; no work stealing between partitions, which
lets the first one read them all; no statistics, by which a file of few rows is not cut at all.

A query is row-wise when every node of its logical plan handles a row without regard to the others.
Only such a query may run split by split; anything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datafusion import ExecutionPlan, SessionConfig, SessionContext, SQLOptions

from cache_server.planning import SourceFile, Split
from protos.errors import LoadError, RequestError

TABLE = "source"

# Rows of a batch: up to four times DataFusion's default, because packing a block costs Python and
# the interpreter lock once; fewer of wide rows, because several batches are under way at once.
_MOST_BATCH_ROWS, _DEFAULT_BATCH_ROWS, _FEWEST_BATCH_ROWS = 32_768, 8_192, 1_024
_BATCH_BYTES = 4 * 1024 * 1024

_ROW_WISE = {"Projection", "Filter", "TableScan", "SubqueryAlias", "Unnest", "EmptyRelation"}
_NAMES = {  # where the plan's word is not the user's
    "WindowExpr": "a window function",
    "Limit": "LIMIT",
    "Sort": "ORDER BY",
    "Aggregate": "an aggregate",
    "Distinct": "DISTINCT",
    "Join": "a join or a subquery",
    "Union": "UNION",
}
# DataFusion parses these and does nothing about them; ORDER BY, in a subquery only.
_IGNORED = re.compile(r"\b(TABLESAMPLE|PREWHERE|CONNECT\s+BY|ORDER\s+BY)\b", re.IGNORECASE)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
# Each of these answers differently on every node or at every load.
_VOLATILE = ("random", "uuid", "now", "current_date", "current_time", "today")


@dataclass(frozen=True)
class CheckedQuery:
    """A row-wise query.

    Attributes:
        sql: over the table ``source``.
        schema: of its result, as DataFusion gives it.
        keeps_every_row: neither filters nor unnests, so the rows can be counted beforehand.
        only_drops_rows: does not unnest, so the rows before the query are an upper bound.
    """

    sql: str
    schema: pa.Schema
    keeps_every_row: bool
    only_drops_rows: bool


def query_text(sql: str, columns: tuple[str, ...] | None, filter: str | None) -> str:
    """The SQL of a spec: ``sql`` as it is, or the query that columns and filter stand for."""
    if sql:
        return sql
    names = ", ".join(_quoted(name) for name in columns) if columns else "*"
    where = f" WHERE ({filter})" if filter else ""
    return f"SELECT {names} FROM {TABLE}{where}"


def check_query(sql: str, source_schema: pa.Schema) -> CheckedQuery:
    """Plans ``sql`` against an empty table of ``source_schema``.

    Raises:
        RequestError: when the SQL is wrong, names an unknown column, is not read-only, reads
            something else than ``source``, or is not row-wise; says which.
    """
    context = _context(1)
    context.register_record_batches(TABLE, [[pa.RecordBatch.from_pylist([], source_schema)]])
    try:
        frame = context.sql_with_options(sql, _read_only())
        written, optimised = frame.logical_plan(), frame.optimized_logical_plan()
        schema = frame.schema()
        frame.execution_plan()  # which tells what else cannot run, such as a placeholder
    except Exception as error:  # DataFusion raises bare ValueError and Exception
        raise RequestError(f"sql {sql!r}: {_reason(error)}") from None
    nodes = list(_walk(written)) + list(_walk(optimised))
    for node in nodes:
        name = type(node).__name__
        if name not in _ROW_WISE:
            raise RequestError(
                f"sql {sql!r}: {_NAMES.get(name, name)} has one answer for the whole table, and "
                "this cache runs a query on each split: only projection, filter and unnest of one "
                "source are supported"
            )
    if _has_subquery(written):
        raise RequestError(f"sql {sql!r}: a subquery has one answer for the whole table")
    if ignored := _IGNORED.search(_QUOTED.sub("", sql)):
        raise RequestError(f"sql {sql!r}: {ignored[0]} is not supported")
    tables = [str(n.table_name()) for n in _walk(written) if type(n).__name__ == "TableScan"]
    if tables != [TABLE]:
        raise RequestError(f"sql {sql!r} must read the table {TABLE!r} once, it reads {tables!r}")
    kinds = {type(node).__name__ for node in nodes}
    exact = kinds <= {"Projection", "TableScan", "SubqueryAlias"}
    return CheckedQuery(sql, schema, exact, "Unnest" not in kinds)


def infer_schema(file: SourceFile, format: str) -> pa.Schema:
    """The schema of the table that ``file`` makes; of CSV and JSON, by its first 1000 rows.

    Raises:
        LoadError: naming the file when it cannot be read.
    """
    context = _context(1)
    try:
        _register(context, file, format, None)
        return context.table(TABLE).schema()
    except Exception as error:  # DataFusion raises bare Exception
        raise LoadError(f"cannot read {file.path} as {format}: {_reason(error)}") from None


def read_split(
    split: Split, sql: str, format: str, source_schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The result rows of one split, in source order.

    Raises:
        LoadError: naming file, split and reason.
    """
    try:
        context = _context(split.parts, _batch_rows(split))
        _register(context, split.file, format, source_schema)
        frame = context.sql_with_options(sql, _read_only())
        if "EmptyRelation" in {type(n).__name__ for n in _walk(frame.optimized_logical_plan())}:
            return  # no row can pass the filter
        plan = frame.execution_plan()
        if _reads_nothing(plan):
            raise LoadError(f"cannot load {split}: the file is gone")
        if plan.partition_count == split.parts:
            for batch in context.execute(plan, split.part):
                yield batch.to_pyarrow()
            return
    except LoadError:
        raise
    except Exception as error:  # DataFusion raises bare Exception
        raise LoadError(f"cannot load {split}: {_reason(error)}") from None
    raise LoadError(
        f"cannot load {split}: DataFusion cut the file into {plan.partition_count} parts "
        f"instead of {split.parts}"
    )


def _batch_rows(split: Split) -> int:
    if not split.num_rows:
        return _DEFAULT_BATCH_ROWS
    row_bytes = max(1, split.estimated_bytes // split.num_rows)
    return max(_FEWEST_BATCH_ROWS, min(_MOST_BATCH_ROWS, _BATCH_BYTES // row_bytes))


def _context(parts: int, batch_rows: int = _DEFAULT_BATCH_ROWS) -> SessionContext:
    config = (
        SessionConfig()
        .with_target_partitions(parts)
        .with_repartition_file_scans(True)
        .with_repartition_file_min_size(1)
        .with_batch_size(batch_rows)
        .set("datafusion.optimizer.enable_round_robin_repartition", "false")
        .set("datafusion.execution.enable_file_stream_work_stealing", "false")
        .set("datafusion.execution.collect_statistics", "false")
    )
    context = SessionContext(config)
    for name in _VOLATILE:
        context.deregister_udf(name)
    return context


def _read_only() -> SQLOptions:
    return SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)


def _register(
    context: SessionContext, file: SourceFile, format: str, schema: pa.Schema | None
) -> None:
    # DataFusion takes a path with a bracket or a star for a glob, and a URI for one file.
    uri, suffix = Path(file.path).as_uri(), Path(file.path).suffix
    if format == "parquet":
        context.register_parquet(TABLE, uri, schema=schema, file_extension=suffix)
    elif format == "arrow":
        context.register_arrow(TABLE, uri, schema=schema, file_extension=suffix)
    elif format == "csv":
        context.register_csv(TABLE, uri, schema=schema, file_extension=suffix)
    elif format == "json":
        context.register_json(TABLE, uri, schema=schema, file_extension=suffix)
    else:
        raise LoadError(f"no reader for format {format!r}")


def _reads_nothing(plan: ExecutionPlan) -> bool:
    """Whether DataFusion found no file, which is no error to it once the schema is given."""
    while children := plan.children():
        plan = children[0]
    return plan.display().startswith("EmptyExec")


def _walk(plan: Any) -> Iterator[Any]:
    yield plan.to_variant()
    for child in plan.inputs():
        yield from _walk(child)


def _has_subquery(plan: Any) -> bool:
    """Subqueries stand inside expressions, where `_walk` does not see them; the tree shows them."""
    return any(line.strip() == "Subquery:" for line in plan.display_indent().splitlines())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _reason(error: Exception) -> str:
    text = str(error).removeprefix("DataFusion error: ")
    return text.partition("\nThis issue was likely caused by a bug in DataFusion")[0].strip()
