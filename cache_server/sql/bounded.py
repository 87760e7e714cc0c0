"""Finds what a query computes whose size its inputs do not bound, from its plan as written.

`repeat('x', n)` makes gigabytes of one row, and DataFusion computes it while it plans if its
arguments are constants. No memory limit of DataFusion counts that. So everything that is not known
here is unbounded: also each function that a new release brings.

Row expressions must be bounded. A query of a load that is not runs in a process apart, as do
expressions: see `sql_process`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain

import pyarrow as pa
from datafusion import DataFrame, Expr, LogicalPlan, SessionContext

from cache_server.source.pinned import no_rows
from cache_server.sql.bound_functions import is_bound
from cache_server.sql.lineage import expressions_of, operands, parts
from cache_server.sql.selection import selection_of
from cache_server.sql.session import frame_of, is_apart, open_session

MAX_WIDTH = 256  # values of a type of fixed size that a cast may make of one
MAX_SUMMED = 256  # arguments of all functions of `SUMMING` in a query
# Names as a plan has them, not their aliases. First those with a result of constant size.
_NUMBERS = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos"),
    *("cosh", "cot", "degrees", "exp", "factorial", "floor", "gcd", "isnan", "iszero", "lcm", "ln"),
    *("log", "log10", "log2", "nanvl", "pi", "power", "radians", "round", "signum", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)
_TIMES = (
    *("date_bin", "date_part", "date_trunc", "from_unixtime", "make_date", "make_time"),
    *("to_date", "to_local_time", "to_time", "to_timestamp", "to_timestamp_micros"),
    *("to_timestamp_millis", "to_timestamp_nanos", "to_timestamp_seconds", "to_unixtime"),
)
_OF_TEXT = (  # a number, a truth value, a character or a hash
    *("ascii", "bit_length", "character_length", "chr", "contains", "digest", "ends_with"),
    *("find_in_set", "levenshtein", "md5", "octet_length", "regexp_count", "regexp_instr"),
    *("regexp_like", "sha224", "sha256", "sha384", "sha512", "starts_with", "strpos", "to_hex"),
)
_OF_A_LIST = (  # a number or a truth value
    *("array_dims", "array_distance", "array_has", "array_has_all", "array_has_any"),
    *("array_length", "array_ndims", "array_position", "array_product", "array_sum", "array_avg"),
    *("cardinality", "cosine_distance", "empty", "inner_product", "union_tag"),
)
# One of its arguments, or a part of one.
_PARTS = (
    *("coalesce", "greatest", "least", "nullif", "nvl", "nvl2"),
    *("btrim", "left", "ltrim", "reverse", "right", "rtrim", "split_part", "substr"),
    *("substr_index", "decode", "get_field", "union_extract", "map_entries", "map_extract"),
    *("map_keys", "map_values", "array_any_value", "array_compact", "array_distinct"),
    *("array_element", "array_except", "array_intersect", "array_max", "array_min"),
    *("array_pop_back", "array_pop_front", "array_remove", "array_remove_all", "array_remove_n"),
    *("array_reverse", "array_slice", "array_sort", "flatten"),
)
# At most some times as long as an argument, and not longer again when it is applied twice: the
# characters of a text in another case or alphabet, the numbers of a list as other numbers, a time
# by a pattern, casts. `MAX_WIDTH` bounds what a cast names.
_SAME_NUMBER = (
    *("upper", "lower", "initcap", "translate", "to_char"),
    *("array_add", "array_normalize", "array_positions", "array_scale", "array_subtract"),
    *("arrow_cast", "arrow_try_cast", "cast_to_type", "try_cast_to_type"),
)
# As long as all arguments together.
SUMMING = (
    *("concat", "overlay", "named_struct", "struct", "map", "make_array"),
    *("array_append", "array_concat", "array_prepend", "array_union"),
)
BOUNDED = frozenset(chain(_NUMBERS, _TIMES, _OF_TEXT, _OF_A_LIST, _PARTS, _SAME_NUMBER, SUMMING))
# Installed functions have the limits of their own processes: see `function_runs`.
# Aggregates and window functions with one value of constant size, or one of their arguments.
AGGREGATES = frozenset(
    (
        *("any_value", "approx_distinct", "approx_median", "approx_percentile_cont"),
        *("approx_percentile_cont_with_weight", "avg", "bit_and", "bit_or", "bit_xor", "bool_and"),
        *("bool_or", "corr", "count", "covar", "covar_pop", "covar_samp", "first_value"),
        *("grouping", "last_value", "max", "mean", "median", "min", "nth_value"),
        *("percentile_cont", "quantile_cont", "regr_avgx", "regr_avgy", "regr_count"),
        *("regr_intercept", "regr_r2", "regr_slope", "regr_sxx", "regr_sxy", "regr_syy"),
        *("stddev", "stddev_pop", "stddev_samp", "sum", "var", "var_pop", "var_population"),
        *("var_samp", "var_sample"),
        *("cume_dist", "dense_rank", "lag", "lead", "ntile", "percent_rank", "rank"),
        "row_number",
    )
)
_OPERATORS = frozenset(
    (
        *("=", "!=", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"),
        *("+", "-", "*", "/", "%", "AND", "OR", "&", "|", "BIT_XOR", "<<", ">>"),
        *("~", "~*", "!~", "!~*", "~~", "~~*", "!~~", "!~~*", "||"),
    )
)
_KINDS = frozenset(  # of expressions; their operands are shown
    (
        *("Alias", "Column", "OuterReferenceColumn", "Literal", "Placeholder", "Not", "Negative"),
        *("IsNull", "IsNotNull", "IsTrue", "IsFalse", "IsUnknown", "IsNotTrue", "IsNotFalse"),
        *("IsNotUnknown", "Like", "RLike", "InList", "Between", "Case", "Cast", "TryCast"),
        *("BinaryExpr", "ScalarFunction"),
    )
)
_SUBQUERIES = {"Exists", "InSubquery", "ScalarSubquery"}
_NODES = {
    *("TableScan", "SubqueryAlias", "Subquery", "EmptyRelation", "Union", "Unnest"),
    *("Projection", "Filter", "Sort", "Join", "Values", "Limit"),
}
_SHOWN = {"Aggregate", "WindowExpr", "Distinct"}  # some of their expressions
_SLOW = {"regexp_count", "regexp_instr", "regexp_like", "levenshtein", "~", "~*", "!~", "!~*"}
_BOUNDED_CALLS = (BOUNDED - {*SUMMING}) | AGGREGATES | {"outer_ref", "__unnest_placeholder"}
_UNBOUNDED_WORDS = ("||", "FixedSize", "RecursiveQuery")
_TEXT = re.compile(r'Utf8(?:View)?\("[^"]*"\)')
_CALL = re.compile(r"\b([a-z]\w*)\(")  # literals and casts are displayed with a capital
_NO_TABLE_FUNCTION = re.compile(r"table function '?(\w+)", re.IGNORECASE)


def first_unbounded(plan: LogicalPlan, context: SessionContext) -> str:
    """Names something in a plan that is not known to be bounded; empty if all is.

    Args:
        plan: as written, not optimised.
        context: of the plan.
    """
    kinds = {part.variant_name() for node in _nodes(plan) for part in _parts(node)}
    if kinds & _SUBQUERIES and (found := _displayed(plan.display_indent())):
        return found
    summing = num_summed = 0
    for node in _nodes(plan):
        if found := _of_node(node, context):
            return found
        is_filter = node.to_variant().__class__.__name__ == "Filter"
        sums = [part for part in _parts(node) if _called(part) in (*SUMMING, "||")]
        summing += bool(sums) and not is_filter
        num_summed += sum(len(operands(part)) for part in sums)
        if summing > 1 or num_summed > MAX_SUMMED:
            return f"{_called(sums[0])} again and again"
    return ""


@lru_cache(256)
def _is_unbounded(sql: str, tables: tuple[tuple[str, pa.Schema], ...]) -> bool:
    selection = selection_of(sql)
    if selection is not None and not selection.filter:
        return False
    context = open_session(1, sql=sql)
    for name, schema in tables:
        context.register_record_batches(name, [[no_rows(schema)]])
    try:
        plan = frame_of(context, sql, tables[0][1].names).logical_plan()
    except BaseException as error:  # DataFusion raises bare Exception, or panics
        return not isinstance(error, Exception) or bool(_NO_TABLE_FUNCTION.search(str(error)))
    return bool(first_unbounded(plan, context)) or any(
        _called(part) in _SLOW and not _has_column(part)
        for node in _nodes(plan)
        for part in _parts(node)
    )


def is_unbounded(sql: str, tables: Mapping[str, pa.Schema]) -> bool:
    """Whether a query must be planned and run in a process apart; a wrong query need not.

    Besides what is not bounded, these are regular expressions of constants, which DataFusion
    computes while it plans. In such a process nothing is unbounded.
    """
    return not is_apart() and _is_unbounded(sql, tuple(tables.items()))


def _nodes(plan: LogicalPlan) -> Iterator[LogicalPlan]:
    yield plan
    for child in plan.inputs():
        yield from _nodes(child)


def _parts(plan: LogicalPlan) -> Iterator[Expr]:
    """The expressions of one node, also inside others; see `_SHOWN`."""
    node = plan.to_variant()
    for expression in [] if type(node).__name__ in _SHOWN else expressions_of(node):
        whole = expression if isinstance(expression, Expr) else Expr(expression)
        yield from parts(whole)


def _of_node(plan: LogicalPlan, context: SessionContext) -> str:
    node = plan.to_variant()
    kind = type(node).__name__
    if kind in _SHOWN:
        return _displayed(plan.display())
    if kind not in _NODES:
        return kind
    inputs = plan.inputs()
    rows = context.create_dataframe_from_logical_plan(inputs[0]) if len(inputs) == 1 else None
    return next(filter(None, (_of_part(part, rows) for part in _parts(plan))), "")


def _displayed(shown: str) -> str:
    """The same of a plan as text: for what the bindings do not show as objects."""
    shown = _TEXT.sub("", shown)
    called = _CALL.findall(shown)
    names = [name for name in called if name not in _BOUNDED_CALLS and not is_bound(name)]
    return next(iter([*names, *(word for word in _UNBOUNDED_WORDS if word in shown)]), "")


def _of_part(part: Expr, rows: DataFrame | None) -> str:
    kind, called = part.variant_name(), _called(part)
    if kind in _SUBQUERIES:
        return ""
    if kind not in _KINDS:
        return kind
    if kind == "ScalarFunction" and called not in BOUNDED and not is_bound(called):
        return called
    if kind == "BinaryExpr" and called not in _OPERATORS:
        return f"the operator {called}"
    if kind in ("Cast", "TryCast") or called.endswith(("_cast", "_to_type")):
        if rows is None:
            return "FixedSize" if "FixedSize" in part.canonical_name() else ""
        dtype = rows.select(part).schema().field(0).type
        return f"a cast to {dtype}" if _width(dtype) > MAX_WIDTH else ""
    return ""


def _called(part: Expr) -> str:
    """The function or the operator of an expression; empty for another one."""
    is_call = part.variant_name() in ("ScalarFunction", "BinaryExpr")
    return str(part.rex_call_operator()) if is_call else ""


def _has_column(expression: Expr) -> bool:
    return any(part.variant_name() == "Column" for part in parts(expression))


def _width(dtype: pa.DataType) -> int:
    """The most values, or bytes of a value, that types of fixed size hold in each other."""
    inside = [_width(dtype.field(number).type) for number in range(dtype.num_fields)]
    if pa.types.is_fixed_size_list(dtype):
        return int(dtype.list_size) * max(1, *inside)
    if pa.types.is_fixed_size_binary(dtype):
        return int(dtype.byte_width)
    return max(inside, default=1)
