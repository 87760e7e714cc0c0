"""A DataFusion session that gives the rows of a query as it is written, and its plans."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from operator import attrgetter
from typing import Any

import pyarrow as pa
from datafusion import (
    DataFrame,
    LogicalPlan,
    RuntimeEnvBuilder,
    SessionConfig,
    SessionContext,
    SQLOptions,
    udf,
)

from cache_protocol.datasets.dataset_spec import TABLE
from cache_protocol.errors import RequestError, some_of, without_middle
from cache_server.source.pinned import no_rows
from cache_server.sql import exactness
from cache_server.sql.bound_functions import as_written, bound_function, bound_names
from cache_server.sql.exactness import Mode
from cache_server.sql.formats.batch_rows import DEFAULT_BATCH_ROWS
from cache_server.sql.function_runs import Calls, current_run
from cache_server.sql.implicit_zones import zone_problem
from cache_server.sql.lineage import parts, variant
from cache_server.sql.planned_types import planned_schema
from cache_server.sql.quoting import identifier, shown
from cache_server.sql.selection import Selection, selection_of

PLAIN = Mode()
_OF_A_SAMPLE = re.compile(r"^Error when processing CSV file .*?sample\.csv caused by ")
_SIGNATURES = re.compile(r" to the signature OneOf\(.*\)(?= failed\.)")
# An error of this package that a function raised inside DataFusion.
_RAISED = re.compile(r"value: (?:Load|Request)Error\(('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\)")
_CANDIDATES = re.compile(r"(Candidate functions: )(.*)$")
_VALID_FIELDS = re.compile(r"(Valid fields are )(.*)\.(?= |$)")
# Functions whose results differ between nodes or loads.
_VOLATILE = ("random", "uuid", "now", "current_date", "current_time", "today")
# Functions about the file that is read, which may be a copy.
_OF_THE_FILE = ("file_row_index", "input_file_name")
# Their arguments are computed when a query is parsed, see `bounded`.
TABLE_FUNCTIONS = ("generate_series", "range")
# A time of a query is no time, or two, in the zone of the column that it is compared with.
_NO_LOCAL_TIME = re.compile(r"Cannot cast timezone to different|error computing timezone offset")
# Settings for plans that are only looked at.
_OPTIMISE_NOTHING = "max_passes = 0"
_JOIN_SUBQUERIES = "enable_physical_uncorrelated_scalar_subquery = false"
_is_apart = False


def run_apart() -> None:
    """Says that this process runs only what others asked it to: it may end at any time."""
    global _is_apart
    _is_apart = True


def is_apart() -> bool:
    """Whether `run_apart` was called."""
    return _is_apart


def open_session(
    parts: int,
    batch_rows: int = DEFAULT_BATCH_ROWS,
    *,
    mode: Mode = PLAIN,
    runtime: RuntimeEnvBuilder | None = None,
    sql: str = "",
) -> SessionContext:
    """A session that cuts a file into ``parts`` and keeps the order of rows.

    Args:
        sql: what it will run, for the bound functions in it.
        mode: how it plans; see `mode_of`.
        runtime: memory and files for large queries; None: no limit.
    """
    config = (
        SessionConfig()
        .with_target_partitions(parts)
        .with_repartition_file_scans(True)
        .with_repartition_file_min_size(1)
        .with_batch_size(batch_rows)
        .set("datafusion.optimizer.enable_round_robin_repartition", "false")
        .set("datafusion.execution.enable_file_stream_work_stealing", "false")
        .set("datafusion.execution.collect_statistics", "false")
        # As in `tables.parquet`; the default changes far dates in files of Spark.
        .set("datafusion.execution.parquet.coerce_int96", "us")
        # A staged file may lack them.
        .set("datafusion.execution.parquet.bloom_filter_on_read", "false")
        .set("datafusion.sql_parser.parse_float_as_decimal", str(mode.decimal_numbers).lower())
        # Without it TIMESTAMPTZ and to_timestamp give times without a zone.
        .set("datafusion.execution.time_zone", "UTC")
    )
    context = SessionContext(config, runtime)
    for name in (*_VOLATILE, *_OF_THE_FILE):
        context.deregister_udf(name)
    for name in () if _is_apart else TABLE_FUNCTIONS:
        context.deregister_udtf(name)
    for rule in exactness.SIMPLIFYING_RULES if mode.unsimplified else ():
        context.remove_optimizer_rule(rule)
    for name in bound_names(sql):
        bound = bound_function(name)
        calls = Calls(name, current_run())
        context.register_udf(
            udf(calls, list(bound.columns.values()), bound.result, "immutable", name)
        )
    return context


def mode_of(sql: str, tables: Mapping[str, pa.Schema]) -> Mode:
    """The mode in which DataFusion plans a query as it is written.

    Raises:
        RequestError: there is none; says what to write.
        Exception: of DataFusion; it cannot be planned.
    """
    return _mode_of(sql, tuple(tables.items()))


@lru_cache(64)
def _mode_of(sql: str, tables: tuple[tuple[str, pa.Schema], ...]) -> Mode:
    selection = selection_of(sql)
    if selection is not None and not selection.filter:
        return Mode()
    names = tables[0][1].names[:1] if selection else tables[0][1].names

    def frame_in(mode: Mode, setting: str) -> tuple[SessionContext, DataFrame]:
        context = open_session(1, mode=mode, sql=sql)
        context.sql(f"SET datafusion.optimizer.{setting}")
        for name, schema in tables:
            context.register_record_batches(name, [[no_rows(schema)]])
        return context, frame_of(context, sql, names)

    def planned(mode: Mode) -> tuple[SessionContext, LogicalPlan]:
        context, frame = frame_in(mode, _JOIN_SUBQUERIES)
        return context, frame.optimized_logical_plan()

    mode = Mode(unsimplified=True)
    context, plan = planned(mode)
    _, frame = frame_in(mode, _OPTIMISE_NOTHING)
    plans = frame.logical_plan(), frame.optimized_logical_plan(), plan
    if problem := zone_problem(*plans, context, [schema for _, schema in tables]):
        raise RequestError(f"sql {shown(sql)}: {problem}")
    if number := exactness.rounded_number(plan, context):
        mode = Mode(unsimplified=True, decimal_numbers=True)
        rounded = RequestError(
            f"sql {shown(sql)}: DataFusion rounds {number}, which is compared with decimals: write "
            f"{_as_decimal(number)} instead"
        )
        schema = planned_schema(context, plan)
        try:
            context, plan = planned(mode)
        except Exception:  # DataFusion raises bare Exception; no decimal is 1e300
            raise rounded from None
        if planned_schema(context, plan) != schema or exactness.casts_doubles(plan, context):
            raise rounded
    if not exactness.simplifies_wrongly(plan, context):
        return replace(mode, unsimplified=False)
    if problem := exactness.unsimplified_problem(plan, context):
        raise RequestError(f"sql {shown(sql)}: {problem}")
    return mode


def _as_decimal(number: str) -> str:
    """SQL of a decimal that is exactly a number."""
    _, digits, exponent = Decimal(number).as_tuple()
    scale = max(0, -int(exponent))
    return f"CAST('{number}' AS DECIMAL({max(len(digits), scale)}, {scale}))"


def check_values(context: SessionContext, frame: DataFrame, part: int | None = None) -> None:
    """Refuses rows for which DataFusion computes an expression of a query wrongly.

    Args:
        part: to check; None for all.

    Raises:
        ValueError: naming the expression.
    """
    # It would name its columns as those of ``frame``, which has its optimiser already.
    context.remove_optimizer_rule("common_sub_expression_eliminate")
    found = exactness.wrong_values(frame.optimized_logical_plan(), context)
    for rows, group in itertools.groupby(found, attrgetter("rows")):
        watches = list(group)
        conditions = [watch.condition.alias(str(at)) for at, watch in enumerate(watches)]
        plan = rows.select(*conditions).execution_plan()
        for number in range(plan.partition_count) if part is None else [part]:
            for batch in context.execute(plan, number):
                for watch, is_wrong in zip(watches, batch.to_pyarrow().columns, strict=True):
                    if is_wrong.true_count:
                        raise ValueError(watch.problem)


def selected(context: SessionContext, selection: Selection) -> DataFrame:
    """A planned selection, with all columns of its table.

    Raises:
        Exception: of DataFusion; its filter is not a condition.
    """
    frame = context.table(selection.table)
    return frame.filter(selection.filter) if selection.filter else frame


def frame_of(context: SessionContext, sql: str, read: Sequence[str]) -> DataFrame:
    """A planned query; a selection may give more columns than it names.

    Args:
        read: the columns that it needs of its table.
    """
    selection = selection_of(sql)
    if selection is None:
        return context.sql_with_options(sql, read_only())
    try:
        frame = selected(context, selection)
    except Exception:  # DataFusion raises bare Exception; the filter is a part of other SQL
        return context.sql_with_options(sql, read_only())
    return frame.select(*map(identifier, read)) if len(read) < len(frame.schema()) else frame


def named_columns(sql: str, schema: pa.Schema) -> set[str]:
    """The columns that the results of a query over `TABLE` name, also those optimised away."""
    context = open_session(1, sql=sql)
    context.register_record_batches(TABLE, [[no_rows(schema)]])
    results = context.sql(sql).logical_plan().to_variant().projections()
    names = (part for result in results for part in parts(result))
    return {variant(part).name() for part in names if part.variant_name() == "Column"}


def named(batches: Iterator[pa.RecordBatch], sql: str) -> Iterator[pa.RecordBatch]:
    """The same batches; of a selection, the columns that it names."""
    selection = selection_of(sql)
    names = list(selection.columns) if selection is not None and selection.columns else None
    for batch in batches:
        yield batch if names is None else batch.select(names)


def read_only() -> SQLOptions:
    """Options that allow only queries."""
    return SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)


def folds_to_nothing(frame: DataFrame) -> bool:
    """Whether no row can be in the result."""
    return has_node(frame.optimized_logical_plan(), "EmptyRelation")


def has_node(plan: LogicalPlan, kind: str) -> bool:
    """Whether a plan has a node of a kind."""
    return next(walk(plan, kind), None) is not None


def walk(plan: LogicalPlan, kind: str = "") -> Iterator[Any]:
    """The nodes of a logical plan, maybe of one kind, without those of subqueries."""
    node = plan.to_variant()
    if not kind or type(node).__name__ == kind:
        yield node
    for child in plan.inputs():
        yield from walk(child, kind)


def reason_of(error: BaseException) -> str:
    """The message of DataFusion, on one line, with what to do where it does not tell."""
    text = str(error).removeprefix("DataFusion error: ")
    if raised := _RAISED.search(text):
        return str(ast.literal_eval(raised[1]))
    text = as_written(text)
    text = text.partition("\nThis issue was likely caused by a bug in DataFusion")[0]
    text = _OF_A_SAMPLE.sub("", " ".join(text.split()))
    text = _VALID_FIELDS.sub(lambda found: f"{found[1]}{some_of(found[2].split(', '))}.", text)
    text = _SIGNATURES.sub("", text)
    text = _CANDIDATES.sub(lambda found: f"{found[1]}{some_of(found[2].split(') '), ') ')}", text)
    text = without_middle(text)
    if _NO_LOCAL_TIME.search(text):
        text += (
            " (the clocks of a zone show a time never or twice: write it as a text with its "
            "offset, as '2024-10-27T02:30:00+01:00')"
        )
    return text


def reraise_exit(error: BaseException) -> None:
    """Raises the error again unless it is an exception or a panic of a library in Rust."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
