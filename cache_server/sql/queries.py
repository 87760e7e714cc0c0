"""How a query runs, and which columns it reads. Reads no rows.

A query runs *split by split* if its result over a table is the results over the pieces of that
table, in order: projection, filter and unnest, also joined with tables that every node reads whole.
Any other query (aggregate, sort, limit, distinct, window, union, a table joined with itself) runs
*whole*, on one node. DataFusion's logical plan decides, as written and as optimised. The text
matters only for clauses that DataFusion ignores, see `ignored_sql`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import partial
from typing import Any

import pyarrow as pa
from datafusion import DataFrame, SessionContext
from datafusion.unparser import Dialect, Unparser

from cache_protocol.datasets.dataset_spec import TABLE
from cache_protocol.errors import RequestError, some_of
from cache_server.source.pinned import Condition, no_rows
from cache_server.sql import ignored_sql, sql_process
from cache_server.sql.bound_functions import as_written, bound_names
from cache_server.sql.bounded import is_unbounded
from cache_server.sql.exactness import Mode
from cache_server.sql.lineage import SourceColumn, column_lineage, parts, passed_on, variant
from cache_server.sql.planned_types import planned_schema
from cache_server.sql.quoting import identifier, shown
from cache_server.sql.select_list import column_expressions
from cache_server.sql.selection import Selection, select, selection_of
from cache_server.sql.session import (
    PLAIN,
    mode_of,
    open_session,
    read_only,
    reason_of,
    selected,
    walk,
)
from cache_server.sql.sql_size import size_of

# DataFusion plans so many within seconds, and without a crash by their depth.
MAX_CHAIN, MAX_QUERIES = 300, 100
_ROW_WISE = {"Projection", "Filter", "TableScan", "SubqueryAlias", "Unnest", "EmptyRelation"}
_KEEPS_ROWS = {"Projection", "TableScan", "SubqueryAlias"}
_NO_QUERIES = {"Explain", "DescribeTable", "Analyze", "ShowTables"}
_ORDER_SURVIVES = {"Projection", "Filter", "SubqueryAlias", "Limit"}
_NAMES = {  # plan node -> the user's word
    "WindowExpr": "a window function",
    "Limit": "LIMIT",
    "Sort": "ORDER BY",
    "Aggregate": "an aggregate",
    "Distinct": "DISTINCT",
    "Join": "a join or a subquery",
    "Union": "UNION",
}
# DataFusion ignores it in a subquery.
_ORDER_BY = re.compile(r"\bORDER\s+BY\b", re.IGNORECASE)
# DataFusion's message names its catalogue and schema, which users do not know.
_NO_TABLE = re.compile(r"table 'datafusion\.public\.(.+)' not found")
# The sides of a join that may be read split by split while the other side is read whole.
_JOIN_SIDES = {
    "INNER": (True, True),
    "LEFT": (True, False),
    "LEFTSEMI": (True, False),
    "LEFTANTI": (True, False),
    "LEFTMARK": (True, False),
    "RIGHT": (False, True),
    "RIGHTSEMI": (False, True),
    "RIGHTANTI": (False, True),
    "RIGHTMARK": (False, True),
}


@dataclass(frozen=True)
class Query:
    """A query that can be run, and how.

    Attributes:
        sql: over the tables of the spec.
        schema: of its result; see `cache_server.sql.planned_types`.
        columns: for each table that it reads, which columns, in the order of the table.
        drivers: tables that may be read split by split, one of them at a time, while the others are
            read whole; empty if the query must run whole.
        why_whole: the reason why it runs whole; empty if ``drivers`` is not.
        ordered: its result has a defined order: that of its one table, ORDER BY, or one row.
        keeps_every_row: neither filters nor unnests, so the rows can be counted beforehand.
        only_drops_rows: neither unnests nor joins, so the rows before it are an upper bound.
        joins: reads several tables or subqueries, so the rows of one table come in any order.
        conditions: on the rows of its one table; a row that it keeps fulfils them all.
        lineage: result column -> the table column that tells its size; see `column_lineage`.
        passed_on: result column -> the table column that it is; see `cache_server.sql.lineage`.
    """

    sql: str
    schema: pa.Schema
    columns: Mapping[str, tuple[str, ...]]
    drivers: frozenset[str]
    why_whole: str
    ordered: bool
    keeps_every_row: bool
    only_drops_rows: bool
    joins: bool
    conditions: tuple[Condition, ...] = ()
    lineage: Mapping[str, SourceColumn] = field(default_factory=dict)
    passed_on: Mapping[str, SourceColumn] = field(default_factory=dict)


def query_text(sql: str, columns: tuple[str, ...] | None, filter: str | None) -> str:
    """The SQL of a spec: ``sql`` as it is, or the query that columns and filter stand for."""
    return sql or select(columns, TABLE, filter)


def check_query(
    sql: str,
    tables: Mapping[str, pa.Schema],
    *,
    allow_unordered: bool = False,
    is_shortcut: bool = False,
) -> Query:
    """Plans ``sql`` against empty tables of these schemas.

    A selection is planned with one column: see `cache_server.sql.selection`.

    Args:
        allow_unordered: accept a result without a defined order.
        is_shortcut: it was made of columns and a filter, so it must be row-wise.

    Raises:
        RequestError: the SQL is wrong or too long, names an unknown column or table, is not
            read-only, leaves a table unread, or has no defined order and needs one; says which.
    """
    _check_size(sql)
    if is_unbounded(sql, tables):
        query: Query = sql_process.call(
            check_query,
            sql,
            dict(tables),
            allow_unordered=allow_unordered,
            is_shortcut=is_shortcut,
            failure=partial(_not_planned, sql),
        )
        return query
    context = _session(tables, sql)
    selection = _selection(sql, context, tables)
    planned = sql if selection is None else _narrow(selection, tables)
    frame = _plan(planned, sql, context, tables)
    if (mode := _mode_of(planned, sql, tables)) != Mode():
        context = _session(tables, sql, mode)
        frame = _plan(planned, sql, context, tables)
    written, optimised = frame.logical_plan(), frame.optimized_logical_plan()
    text = ignored_sql.bare(planned)
    if ignored := ignored_sql.find(planned, text, lambda other: _shown(other, context)):
        raise RequestError(f"sql {shown(sql)}: {ignored}")
    scans = _scans(written)
    if unread := sorted(set(tables) - set(scans)):
        raise RequestError(
            f"sql {shown(sql)} must read the table {unread[0]!r}; it reads "
            f"{some_of(map(repr, sorted(set(scans))))}"
        )
    kinds = {type(node).__name__ for plan in (written, optimised) for node in walk(plan)}
    if forbidden := kinds & _NO_QUERIES:
        raise RequestError(f"sql {shown(sql)}: {forbidden.pop()} is not supported")
    # Other scans are of functions such as generate_series, which every node calls.
    drivers, why = _drivers(written, optimised, [name for name in scans if name in tables])
    joins = "Join" in kinds or _has_subquery(optimised)
    if is_shortcut and (joins or not drivers):
        raise RequestError(
            f"sql {shown(sql)}: filter must be a condition on each row, without queries"
        )
    if drivers and not joins:
        if _ORDER_BY.search(text):
            raise RequestError(
                f"sql {shown(sql)}: ORDER BY in a subquery orders nothing; write it at the end"
            )
        ordered = True
    else:
        ordered = _is_ordered(written)
    if not ordered and not allow_unordered:
        what = why or "a join"
        raise RequestError(
            f"sql {shown(sql)}: the rows of {what} have no defined order, and a row id must always "
            "mean the same row: end it with an ORDER BY that leaves no ties, or set "
            "allow_unordered: true"
        )
    schema = planned_schema(context, optimised)
    if unnamed := [name for name in schema.names if bound_names(name)]:
        raise RequestError(
            f"sql {shown(sql)}: name the result of {as_written(unnamed[0])}, as in "
            f"{as_written(unnamed[0]).partition('(')[0]}(...) AS tokens"
        )
    query = Query(
        sql,
        schema,
        _columns_read(optimised, tables),
        drivers,
        why,
        ordered,
        bool(drivers) and not joins and kinds <= _KEEPS_ROWS,
        bool(drivers) and not joins and "Unnest" not in kinds,
        joins,
        _conditions(optimised) if drivers and not joins else (),
        column_lineage(optimised, schema, tables),
        passed_on(written, schema, tables),
    )
    return query if selection is None else _with_columns(query, selection, tables, written)


def _not_planned(sql: str, reason: str) -> RequestError:
    return RequestError(
        f"sql {shown(sql)} {reason} while it was planned: write less of it as constants"
    )


def _check_size(sql: str) -> None:
    size = size_of(sql)
    for what, limit, number in (
        ("SELECT and JOIN", MAX_QUERIES, size.queries),
        ("operators in a chain", MAX_CHAIN, size.chain),
    ):
        if number > limit:
            raise RequestError(
                f"sql must have at most {limit} {what}, got {number}: {sql[:200]!r}..."
            )


def computed_columns(sql: str, tables: Mapping[str, pa.Schema]) -> dict[str, str]:
    """The columns that a query computes -> their SQL; see `cache_server.sql.select_list`."""
    if selection_of(sql) is not None:
        return {}
    if is_unbounded(sql, tables):
        columns: dict[str, str] = sql_process.call(
            computed_columns, sql, dict(tables), failure=partial(_not_planned, sql)
        )
        return columns
    frame = _plan(sql, sql, _session(tables, sql), tables)
    plan = frame.logical_plan()
    try:
        written = Unparser(Dialect.default()).plan_to_sql(plan)
    except Exception:  # DataFusion raises bare Exception; not every plan has SQL
        return {}
    return column_expressions(as_written(written), frame.schema().names, _scans(plan))


def type_of_expression(expression: str, tables: Mapping[str, pa.Schema]) -> pa.DataType:
    """The type of an expression of columns of one table, as coerced.

    Raises:
        RequestError: no table has its columns, or tables give it different types.
    """
    found: dict[pa.DataType, str] = {}
    reason = ""
    for name in tables:
        sql = f"SELECT ({expression}) AS value FROM {identifier(name)}"
        context = _session(tables, sql)
        try:
            frame = _plan(sql, sql, context, tables)
        except RequestError as error:
            reason = str(error).partition(": ")[2]
            continue
        found[planned_schema(context, frame.optimized_logical_plan()).field(0).type] = name
    if len(found) != 1:
        why = f"has the types {some_of(map(str, found))}" if found else f"has no type: {reason}"
        raise RequestError(
            f"the argument {shown(expression)} of a function must be made of the columns of one "
            f"table of the load; it {why}"
        )
    return next(iter(found))


def reads_any_column(sql: str, tables: Mapping[str, pa.Schema], table: str) -> bool:
    """Whether a query that can be run would read a further column of a table, as ``*`` does."""
    further = pa.field(f"{''.join(tables[table].names)}_", pa.int64())
    wider = {**tables, table: tables[table].append(further)}
    return further.name in check_query(sql, wider, allow_unordered=True).columns[table]


def _session(tables: Mapping[str, pa.Schema], sql: str, mode: Mode = PLAIN) -> SessionContext:
    """A session with empty tables."""
    context: SessionContext = open_session(1, mode=mode, sql=sql)
    for name, schema in tables.items():
        batch = no_rows(schema)
        context.register_record_batches(name, [[batch]])
    return context


def _selection(
    sql: str, context: SessionContext, tables: Mapping[str, pa.Schema]
) -> Selection | None:
    """The selection that ``sql`` is; None if it is another query, or cannot be planned as one."""
    found = selection_of(sql)
    if found is None or {found.table} != set(tables):
        return None
    if not set(found.columns or ()) <= set(tables[found.table].names):
        return None  # DataFusion's error names the known columns
    try:
        selected(context, found)
    except Exception:  # DataFusion raises bare Exception; as SQL it gives a better error
        return None
    return found


def _mode_of(planned: str, sql: str, tables: Mapping[str, pa.Schema]) -> Mode:
    try:
        return mode_of(planned, tables)
    except RequestError:
        raise
    except Exception as error:  # DataFusion raises bare ValueError and Exception
        raise RequestError(f"sql {shown(sql)}: {reason_of(error)}") from None


def _narrow(selection: Selection, tables: Mapping[str, pa.Schema]) -> str:
    """The same selection of one column."""
    names = selection.columns or tables[selection.table].names
    return select(tuple(names[:1]), identifier(selection.table), selection.filter)


def _with_columns(
    query: Query, selection: Selection, tables: Mapping[str, pa.Schema], written: Any
) -> Query:
    """The query of a selection, from that of its `_narrow` one and from its plan."""
    table, schema = selection.table, tables[selection.table]
    names = selection.columns or tuple(schema.names)
    sources = {name: (table, name) for name in names}
    read = {*names, *query.columns[table]}
    for node in walk(written, "Filter"):  # also what is optimised away: the filter must be planned
        read |= {variant(p).name() for p in parts(node.predicate()) if p.variant_name() == "Column"}
    return replace(
        query,
        schema=pa.schema([schema.field(name) for name in names]),
        columns={table: tuple(name for name in schema.names if name in read)},
        lineage=sources,
        passed_on=sources,
    )


def _plan(planned: str, sql: str, context: SessionContext, tables: Collection[str]) -> DataFrame:
    try:
        frame = context.sql_with_options(planned, read_only())
        frame.optimized_logical_plan()
        frame.execution_plan()  # refuses what cannot run, such as a placeholder
    except Exception as error:  # DataFusion raises bare ValueError and Exception
        reason = reason_of(error)
        if missing := _NO_TABLE.search(reason):
            reason = f"no table {missing[1]!r}; tables: {some_of(sorted(tables), like=missing[1])}"
        raise RequestError(f"sql {shown(sql)}: {reason}") from None
    return frame


def _shown(sql: str, context: SessionContext) -> str:
    """The plan of a query as written; empty if it cannot be planned."""
    try:
        return str(context.sql_with_options(sql, read_only()).logical_plan().display_indent())
    except Exception:  # DataFusion raises bare ValueError and Exception
        return ""


def _drivers(written: Any, optimised: Any, scans: list[str]) -> tuple[frozenset[str], str]:
    """The tables that may be read split by split; if there are none, the reason."""
    single = {name for name in scans if scans.count(name) == 1}
    plans = (written, optimised)
    drivers = {name for name in single if all(_is_by_split(plan, name) for plan in plans)}
    if drivers:
        return frozenset(drivers), ""
    kinds = [type(node).__name__ for plan in plans for node in walk(plan)]
    for kind in kinds:
        if kind not in _ROW_WISE and kind != "Join":
            return frozenset(), _NAMES.get(kind, kind)
    if repeated := sorted(set(scans) - single):
        return frozenset(), f"a table that is read twice ({', '.join(repeated)})"
    return frozenset(), "a join"


def _is_by_split(plan: Any, table: str) -> bool:
    """Whether the plan's result is its results over the pieces of ``table``, in order.

    Every node reads the other tables whole, so any part of the plan over them alone is right, also
    a subquery. A table that only a subquery reads is never split.
    """
    node = plan.to_variant()
    kind, inputs = type(node).__name__, plan.inputs()
    if kind == "TableScan":
        return bool(node.table_name() == table)
    if kind == "EmptyRelation":
        return True  # no row can pass the filter
    if kind == "Join":
        left, right = (table in _scans(side) for side in inputs)
        may_left, may_right = _JOIN_SIDES.get(str(node.join_type()).upper(), (False, False))
        if left and right:
            return False
        if left:
            return may_left and _is_by_split(inputs[0], table)
        return right and may_right and _is_by_split(inputs[1], table)
    return kind in _ROW_WISE and len(inputs) == 1 and _is_by_split(inputs[0], table)


def _is_ordered(plan: Any) -> bool:
    node = plan.to_variant()
    kind = type(node).__name__
    if kind == "Sort":
        return True
    if kind == "Aggregate":
        return not node.group_by_exprs()  # one row
    inputs = plan.inputs()
    return kind in _ORDER_SURVIVES and len(inputs) == 1 and _is_ordered(inputs[0])


def _columns_read(plan: Any, tables: Mapping[str, pa.Schema]) -> dict[str, tuple[str, ...]]:
    """Table -> the columns that its scans read; one column where only rows are counted."""
    read: dict[str, set[str]] = {name: set() for name in tables}
    for node in walk(plan, "TableScan"):
        name, projection = str(node.table_name()), node.projection()
        if name not in tables:  # of a recursive query, which names itself
            continue
        schema = tables[name]
        read[name] |= set(schema.names) if projection is None else {str(c) for _, c in projection}
    if _has_subquery(plan):  # its scans stand inside expressions
        return {name: tuple(schema.names) for name, schema in tables.items()}
    return {
        name: tuple(column for column in schema.names if column in read[name])
        or tuple(schema.names[:1])
        for name, schema in tables.items()
    }


def _conditions(plan: Any) -> tuple[Condition, ...]:
    """The simple comparisons, joined by AND, right above the scan of a table.

    Without floats: only here is NaN larger than any number.
    """
    node, inputs = plan.to_variant(), plan.inputs()
    if type(node).__name__ == "Filter" and type(inputs[0].to_variant()).__name__ == "TableScan":
        return tuple(_comparisons(node.predicate()))
    return _conditions(inputs[0]) if len(inputs) == 1 else ()


def _comparisons(predicate: Any) -> Iterator[Condition]:
    node = variant(predicate)
    if type(node).__name__ != "BinaryExpr":
        return
    left, right = predicate.rex_call_operands()
    if node.op() == "AND":
        yield from _comparisons(left)
        yield from _comparisons(right)
        return
    column, literal = variant(left), variant(right)
    if type(column).__name__ == "Column" and type(literal).__name__ == "Literal":
        value = right.python_value()
        try:
            value = value.as_py() if isinstance(value, pa.Scalar) else value
        except (ValueError, OverflowError):  # of nanoseconds, or after the year 9999
            return
        is_plain = isinstance(value, int | str | date) and not isinstance(value, bool | datetime)
        if is_plain and node.op() in ("=", "<", "<=", ">", ">="):
            yield Condition(column.name(), node.op(), value)


def _scans(plan: Any) -> list[str]:
    """The tables that a plan scans, once for each scan.

    `walk` does not see subqueries inside expressions; the displayed plan shows them.
    """
    shown = (line.strip() for line in plan.display_indent().splitlines())
    return [line.split()[1] for line in shown if line.startswith("TableScan: ")]


def _has_subquery(plan: Any) -> bool:
    return any(line.strip() == "Subquery:" for line in plan.display_indent().splitlines())
