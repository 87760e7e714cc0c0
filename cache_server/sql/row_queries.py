"""SQL of single rows, over rows in memory: values of an expression, or rows of a condition.

An expression that needs other rows, or another table, is refused by name. The checks are those of
the SQL of a load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from cache_protocol.datasets.dataset_spec import TABLE
from cache_protocol.errors import CacheError, RequestError, short
from cache_server.source.pinned import no_rows
from cache_server.sql.bound_functions import as_written
from cache_server.sql.bounded import first_unbounded
from cache_server.sql.ignored_sql import are_paired, bare
from cache_server.sql.planned_types import other_types
from cache_server.sql.queries import check_query
from cache_server.sql.quoting import identifier, shown
from cache_server.sql.session import (
    TABLE_FUNCTIONS,
    check_values,
    folds_to_nothing,
    frame_of,
    mode_of,
    named_columns,
    open_session,
    read_only,
    reason_of,
    reraise_exit,
)
from cache_server.sql.sql_size import size_of

# Characters of an expression and its conditions together.
MAX_TEXT_LENGTH = 4096
# DataFusion plans n of these in a time of n * n; each sum or product is checked by a plan that
# contains all before it. Numbers and texts, as those of a list, are cheap.
MAX_SIGNS, MAX_OTHERS, MAX_NAMES = 32, 128, 256
BATCH_ROWS = 32_768  # intermediate columns fit into the processor's caches
_MESSAGE_BYTES = 1 << 20
VALUE, ROW = "value", "row"
ROW_SCHEMA = pa.schema([pa.field(ROW, pa.uint32())])
_WITHOUT_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


@dataclass(frozen=True)
class RowQuery:
    """A checked expression, conditions, or both.

    Attributes:
        sql: over one table.
        schema: of the columns that it reads.
        row_name: of the further column with the numbers of rows; empty if it is not read.
        result: schema of its one result column.
        text: of the user, for messages.
    """

    sql: str
    schema: pa.Schema
    row_name: str
    result: pa.Schema
    text: str


@lru_cache(64)  # every shard asks
def check_row_query(expression: str, where: tuple[str, ...], schema: pa.Schema) -> RowQuery:
    """Plans an expression and conditions over rows of a schema.

    Args:
        expression: of the values; empty for the numbers of the rows.
        where: conditions that a row must fulfil.

    Raises:
        RequestError: one of them is no expression of single rows; says why.
    """
    if not expression and not where:
        raise RequestError("an expression or a condition is needed, got neither")
    _check_size(expression, where)
    read: set[str] = set()
    dtype = pa.uint32()
    for condition in where:
        found, columns = _checked("where", condition, schema)
        if not pa.types.is_boolean(found):
            raise RequestError(
                f"where {short(repr(condition))} must be true or false, but it is of {found}"
            )
        read |= columns
    if expression:
        dtype, columns = _checked("expression", expression, schema)
        read |= columns
    row_name = "" if expression else f"{''.join(schema.names)}_{ROW}"
    value = f"({expression})" if expression else identifier(row_name)
    kept = f" WHERE {' AND '.join(f'({condition})' for condition in where)}" if where else ""
    return RowQuery(
        f"SELECT {value} AS {VALUE if expression else ROW} FROM {TABLE}{kept}",
        pa.schema([field for field in schema if field.name in read]),
        row_name,
        pa.schema([pa.field(VALUE if expression else ROW, dtype)]),
        as_written(" where ".join(filter(None, (expression, " AND ".join(where))))),
    )


def run_row_query(query: RowQuery, lots: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
    """The results for some lots of rows, in order; each lot is planned anew.

    Args:
        lots: of the schema of the query, in the order of their rows.

    Raises:
        RequestError: a row has no value, or DataFusion would compute it wrongly; says why.
    """
    start, schema = 0, query.schema
    if query.row_name:
        schema = schema.append(pa.field(query.row_name, pa.uint32(), nullable=False))
    try:
        mode = mode_of(query.sql, {TABLE: schema})
        for lot in lots:
            columns = lot.columns
            if query.row_name:
                rows = np.arange(start, start + lot.num_rows, dtype=np.uint32)
                columns = [*columns, pa.array(rows)]
            start += lot.num_rows
            named = pa.RecordBatch.from_arrays(columns, schema=schema)
            slices = [named.slice(at, BATCH_ROWS) for at in range(0, lot.num_rows, BATCH_ROWS)]
            context = open_session(1, BATCH_ROWS, mode=mode, sql=query.sql)
            context.register_record_batches(TABLE, [slices])
            frame = frame_of(context, query.sql, schema.names)
            if folds_to_nothing(frame):
                return
            check_values(context, frame)
            for batch in frame.execute_stream():
                values = batch.to_pyarrow()
                if problem := other_types(values.schema, query.result):
                    raise RequestError(f"{short(repr(query.text))}: {problem}")
                column, dtype = values.column(0), query.result.field(0).type
                # A cast of pyarrow 26 to the type that a list of nulls has would damage it.
                yield column if column.type.equals(dtype) else column.cast(dtype)
    except (CacheError, MemoryError):
        raise
    except BaseException as error:  # DataFusion raises bare Exception, or panics
        reraise_exit(error)
        reason = short(reason_of(error), 300)
        raise RequestError(f"{short(repr(query.text))}: {reason}") from None


def row_query_batches(query: RowQuery, lots: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Like `run_row_query`, in batches of the schema of the result, of a megabyte or more."""
    waiting: list[pa.Array] = []
    for piece in run_row_query(query, lots):
        waiting.append(piece)
        if sum(array.nbytes for array in waiting) >= _MESSAGE_BYTES:
            yield _batch_of(waiting, query.result)
            waiting = []
    yield _batch_of(waiting, query.result)


def _batch_of(pieces: list[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    column = pa.concat_arrays([pa.array([], schema.field(0).type), *pieces])
    return pa.RecordBatch.from_arrays([column], schema=schema)


def _check_size(expression: str, where: tuple[str, ...]) -> None:
    """Refuses what would take long to plan, or would end the process by its depth."""
    given = " and ".join(["expression"] * bool(expression) + ["where"] * bool(where))
    expression, where = as_written(expression), tuple(map(as_written, where))
    num_characters = len(expression) + sum(map(len, where))
    text = " AND ".join(filter(None, (expression, *where)))
    size = size_of(text if num_characters <= MAX_TEXT_LENGTH else "")
    for what, limit, number in (
        ("characters", MAX_TEXT_LENGTH, num_characters),
        ("of + - *", MAX_SIGNS, size.signs),
        ("other operators", MAX_OTHERS, size.others),
        ("names", MAX_NAMES, size.names),
    ):
        if number > limit:
            raise RequestError(
                f"{given} must have at most {limit} {what} in all, got {number}: "
                f"{short(repr(text))}"
            )


def _checked(kind: str, text: str, schema: pa.Schema) -> tuple[pa.DataType, set[str]]:
    """The type of an expression of single rows, and the columns that it names."""
    if not are_paired(bare(text)):
        raise RequestError(f"{kind} {short(repr(text))} has a parenthesis without its partner")
    sql, named = f"SELECT ({text}) AS {VALUE} FROM {TABLE}", f"{kind} {shown(text)}"
    if found := _unbounded(sql, schema):
        raise RequestError(
            f"{named} must not use {found}: its result can be much longer than its arguments. "
            "Compute it in the `sql` of the load"
        )
    try:
        query = check_query(sql, {TABLE: schema}, allow_unordered=True)
    except RequestError as error:
        reason = str(error).removeprefix(f"sql {shown(sql)}: ")
        raise RequestError(f"{named}: {short(reason, 300)}") from None
    if query.joins or not query.keeps_every_row:
        what = "a query" if query.joins else query.why_whole or "unnest"
        raise RequestError(f"{named} must be computed from one row alone, got {what}")
    if query.schema.names != [VALUE]:
        raise RequestError(f"{named} must be one value a row, got {len(query.schema)} values")
    dtype = query.schema.field(0).type
    if _has_dictionary(dtype):  # Flight would not send it
        raise RequestError(f"{named} must be values, but it is of {dtype}: leave that cast out")
    columns = named_columns(sql, schema) | set(query.columns[TABLE])
    return _WITHOUT_VIEWS.get(dtype, dtype), columns


def _unbounded(sql: str, schema: pa.Schema) -> str:
    """What a query computes without a bound, by its plan as written; empty if it has no plan."""
    context = open_session(1, sql=sql)
    context.register_record_batches(TABLE, [[no_rows(schema)]])
    for name in TABLE_FUNCTIONS:
        context.deregister_udtf(name)
    try:
        plan = context.sql_with_options(sql, read_only()).logical_plan()
    except BaseException as error:  # `check_query` reports it
        reraise_exit(error)
        return next((n for n in TABLE_FUNCTIONS if f"table function '{n}'" in str(error)), "")
    return first_unbounded(plan, context)


def _has_dictionary(dtype: pa.DataType) -> bool:
    return pa.types.is_dictionary(dtype) or any(
        _has_dictionary(dtype.field(number).type) for number in range(dtype.num_fields)
    )
