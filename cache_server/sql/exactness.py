"""Finds expressions that DataFusion computes wrongly, in a plan and in its rows.

Two kinds (docs/decisions/0019):

- *Wrongly planned*: the optimiser replaces a condition by one that keeps other rows, or rounds a
  number that is compared with decimals. The plan tells, so such a query runs in another `Mode`: see
  `simplifies_wrongly` and `rounded_number`.
- *Wrong for some values*: integers wrap, ``date_bin`` gives NULL, IN, CASE and nullif take -0.0
  and 0.0 as different, and a computed NaN with a minus sign is less than every number. Only the
  rows tell, so a load looks for such rows: see `wrong_values`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pyarrow as pa
from datafusion import DataFrame, Expr, LogicalPlan, SessionContext, functions, lit

from cache_protocol.storage.type_rules import is_utc
from cache_server.sql.lineage import expressions_of, operands, parts, variant

# Optimiser rules without which comparisons are left as they are written.
SIMPLIFYING_RULES = ("simplify_expressions", "common_sub_expression_eliminate")
# Functions that DataFusion cannot run without these rules, and what to write instead.
_NEED_RULES = {
    "coalesce": "CASE WHEN ... IS NULL",
    "ifnull": "CASE WHEN ... IS NULL",
    "nvl": "CASE WHEN ... IS NULL",
    "nvl2": "CASE WHEN ... IS NULL",
    "arrow_cast": "CAST",
}
_COMPARISONS = {"=", "!=", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"}
_MATCHES = {"~", "~*", "!~", "!~*"}
_LARGEST = {"greatest", "least"}
_UNITS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_LAST_YEAR = 262_142  # of DataFusion's dates, before and after 0; others are compared as numbers
_ARITHMETIC = {"+", "-", "*"}
_LITERAL = re.compile(r"\b(?:U?Int|Float)\d+\(([^()]*)\)")  # as DataFusion shows a number


@dataclass(frozen=True)
class Mode:
    """How a session plans a query.

    Attributes:
        unsimplified: without `SIMPLIFYING_RULES`.
        decimal_numbers: a number with a point is a decimal, not a double.
    """

    unsimplified: bool = False
    decimal_numbers: bool = False


@dataclass(frozen=True)
class Watch:
    """A condition on the rows before an expression, for which its value is wrong.

    Attributes:
        rows: the rows that the expression reads.
        condition: true in rows with a wrong value.
        problem: what to tell the user.
    """

    rows: DataFrame
    condition: Expr
    problem: str


def simplifies_wrongly(plan: LogicalPlan, context: SessionContext) -> bool:
    """Whether the optimiser would replace a condition by one that keeps other rows.

    - Years are compared as timestamps. That fails for years that a timestamp[ns] cannot hold, and
      where the clocks of a zone jump over the midnight before a January 1: it comes never or twice.
    - A timestamp with a finer unit than the column's is cut to that unit.
    - The cast of AT TIME ZONE is taken from the column and turned around on the constant, as if it
      kept the number: ``t AT TIME ZONE 'Asia/Tokyo' > TIMESTAMPTZ '...'``.
    - Two lists for one value become one: ``x NOT IN (1) OR x NOT IN (2)`` is true, also for NULL.
    - A regular expression of one text becomes LIKE, in which a backslash means something else;
      ``~ '.*'`` is never NULL.
    - Arithmetic of constants that wraps becomes a number, which `wrong_values` cannot find.

    Args:
        plan: optimised without `SIMPLIFYING_RULES`.
        context: of the plan.
    """
    for rows, expression in _expressions(plan, context):
        if _operator(expression) in _MATCHES or _function(expression) == "regexp_like":
            patterns = [str(_constant(side)) for side in operands(expression)[1:]]
            if any(pattern == ".*" or r"\\" in pattern for pattern in patterns):
                return True
        if _is_constant(expression) and _wraps(expression, rows) is not None:
            return True
        sides = _compared(expression)
        if _function(expression) == "array_has":  # becomes IN
            sides = operands(expression)
        for side in sides:
            *_, inner = _uncast(side)
            if inner.variant_name() == "Literal":  # there may be thousands in a list
                continue
            if _adds_zone(side, rows):
                return True
            others = [other for other in sides if other is not side]
            if _is_beyond(side, others, rows, context) or _is_cut(side, others, rows, context):
                return True
    for rows, expression in _written(plan, context):
        lists = list(_lists(expression, rows))
        if len(lists) > len(set(lists)):
            return True
    return False


def rounded_number(plan: LogicalPlan, context: SessionContext) -> str:
    """A number that is compared with decimals and not exactly the one that is written; or "".

    ``price >= 8.28`` of decimals compares with 8.279999999999999: a double of the query becomes a
    decimal by a multiplication of doubles.

    Args:
        plan: optimised without `SIMPLIFYING_RULES`.
        context: of the plan.
    """
    for rows, expression in _expressions(plan, context):
        for sides in (_compared(expression), *map(list, _equated(expression))):
            if not any(pa.types.is_decimal(_type(side, rows)) for side in sides):
                continue
            for side in sides:
                if number := _rounded(side, rows, context):
                    return number
    return ""


def casts_doubles(plan: LogicalPlan, context: SessionContext) -> bool:
    """Whether a comparison turns doubles of rows into decimals, which rounds them."""
    return any(
        pa.types.is_decimal(types[0]) and pa.types.is_floating(types[-1])
        for rows, expression in _expressions(plan, context)
        for sides in (_compared(expression), *_equated(expression))
        for side in sides
        for types in [[_type(part, rows) for part in _uncast(side)]]
    )


def unsimplified_problem(plan: LogicalPlan, context: SessionContext) -> str:
    """Why a query cannot run without `SIMPLIFYING_RULES`; empty if it can."""
    for _, expression in _expressions(plan, context):
        if (name := _function(expression)) in _NEED_RULES:
            return (
                f"{name} cannot be combined with a year before 1678 or after 2261, with a year "
                "that begins or ends while the clocks of a zone jump, with a time of a finer unit "
                "than its column, with a comparison of AT TIME ZONE, with two lists of IN for one "
                r"value, or with a regular expression that is .* or contains \\: write "
                f"{_NEED_RULES[name]} instead of {name}, or another condition"
            )
    return ""


def wrong_values(plan: LogicalPlan, context: SessionContext) -> Iterator[Watch]:
    """The conditions on rows for which an expression of the plan is wrong.

    Args:
        plan: as it runs.
        context: of the plan.
    """
    for rows, expression in _expressions(plan, context):
        text = _LITERAL.sub(r"\1", expression.canonical_name())
        if (condition := _wraps(expression, rows)) is not None:
            yield Watch(
                rows,
                condition,
                f"{text} has values that {_type(expression, rows)} cannot hold: "
                "write CAST(... AS DOUBLE) or CAST(... AS DECIMAL(38, 0)) of its parts",
            )
        if _function(expression) == "date_bin":
            time = expression.rex_call_operands()[1]
            yield Watch(
                rows,
                expression.is_null() & time.is_not_null(),
                f"date_bin of {time.canonical_name()} gives NULL, because DataFusion computes it "
                "in nanoseconds, which end in the year 2262: write date_trunc, or filter those "
                "rows out in a subquery",
            )
        if computed := [side for side in _compared(expression) if _may_be_nan(side, rows)]:
            value = computed[0].canonical_name()
            # With + 0.0: the bounds of a row group, which leave out NaN, cannot skip it.
            yield Watch(
                rows,
                reduce(or_, (side + lit(0.0) < lit(-math.inf) for side in computed)),
                f"{text} takes a NaN with a minus sign as less than every number: write "
                f"nanvl({value}, CAST('NaN' AS DOUBLE)) instead of {value}",
            )
        if pairs := [pair for pair in _equated(expression) if _may_be_zeros(*pair, rows)]:
            value = pairs[0][0].canonical_name()
            yield Watch(
                rows,
                reduce(or_, (_zeros_differ(*pair) for pair in pairs)),
                f"{text} takes -0.0 and 0.0 as different: write {value} + 0.0 instead of {value}",
            )


def _expressions(plan: LogicalPlan, context: SessionContext) -> Iterator[tuple[DataFrame, Expr]]:
    """Every expression of a plan, also inside others, with the rows that it reads."""
    for rows, expression in _written(plan, context):
        for part in parts(expression):
            yield rows, part


def _written(plan: LogicalPlan, context: SessionContext) -> Iterator[tuple[DataFrame, Expr]]:
    """Every whole expression of a plan, with the rows that it reads."""
    inputs = plan.inputs()
    if len(inputs) == 1:
        rows = context.create_dataframe_from_logical_plan(inputs[0])
        for expression in expressions_of(plan.to_variant()):
            yield rows, expression if isinstance(expression, Expr) else Expr(expression)
    for child in inputs:
        yield from _written(child, context)


def _function(expression: Expr) -> str:
    """The name of a function of single rows; empty for another expression."""
    is_call = expression.variant_name() == "ScalarFunction"
    return str(expression.rex_call_operator()) if is_call else ""


def _compared(expression: Expr) -> list[Expr]:
    """The sides of a comparison; none of another expression."""
    node = variant(expression)
    kind = type(node).__name__
    is_operator = kind == "BinaryExpr" and node.op() in _COMPARISONS
    if is_operator or kind in ("InList", "Between") or _function(expression) in _LARGEST:
        return list(expression.rex_call_operands())
    return []


def _uncast(expression: Expr) -> Iterator[Expr]:
    """An expression, and what is inside its casts."""
    yield expression
    while expression.variant_name() in ("Cast", "TryCast"):
        expression = expression.rex_call_operands()[0]
        yield expression


def _constant(expression: Expr) -> object:
    """The value of a literal, without its casts; None of another expression."""
    *_, inner = _uncast(expression)
    value = inner.python_value() if inner.variant_name() == "Literal" else None
    return value.as_py() if isinstance(value, pa.Scalar) else value  # pyright: ignore


def _is_constant(expression: Expr) -> bool:
    waiting = [expression]
    while waiting:
        part = waiting.pop()  # of ``a + b + c`` the c: it is next to the root
        if part.variant_name() == "Column":
            return False
        waiting += operands(part)
    return True


def _lists(
    expression: Expr, rows: DataFrame, negated: bool = False, condition: tuple[int, ...] = ()
) -> Iterator[tuple[object, str]]:
    """The value of each list of IN, with the condition in which the optimiser may merge lists.

    A chain is one list, because it is merged rightly: ``x = 1 OR x IN (2, 3)``, and its negation
    ``x <> 1 AND x NOT IN (2, 3)``.

    Args:
        negated: an odd number of NOT is around the expression.
        condition: that the expression is a part of.
    """
    if expression.variant_name() == "Not":
        yield from _lists(operands(expression)[0], rows, not negated, condition)
        return
    is_or = _is_or(expression, negated)
    if is_or is None:
        if expression.variant_name() == "InList":
            yield condition, _looked_up(expression)[0]
            return
        is_apart = expression.variant_name() == "Case" and not pa.types.is_boolean(
            _type(expression, rows)
        )
        for number, part in enumerate(operands(expression)):
            yield from _lists(part, rows, condition=(*condition, number) if is_apart else condition)
        return
    chained: dict[str, list[Expr]] = {}
    for term, is_negated in _terms(expression, negated, is_or):
        value, is_in = _looked_up(term)
        if value and (is_in != is_negated) == is_or:
            chained.setdefault(value, []).append(term)
            if term.variant_name() == "InList":
                continue
        yield from _lists(term, rows, is_negated, condition)
    for value, terms in chained.items():
        if len(terms) > 1 or terms[0].variant_name() == "InList":
            yield condition, value


def _is_or(expression: Expr, negated: bool) -> bool | None:
    """Whether an expression, maybe negated, is an OR; an AND gives False, others None."""
    operator = _operator(expression)
    return (operator == "OR") != negated if operator in ("AND", "OR") else None


def _terms(expression: Expr, negated: bool, is_or: bool) -> Iterator[tuple[Expr, bool]]:
    """The terms of a chain of OR, or else of AND, and whether each is negated."""
    is_not = expression.variant_name() == "Not"
    if is_not or _is_or(expression, negated) == is_or:
        for part in operands(expression):
            yield from _terms(part, negated != is_not, is_or)
    else:
        yield expression, negated


def _looked_up(expression: Expr) -> tuple[str, bool]:
    """The value that is compared with constants or a list; whether it must be among them."""
    node = variant(expression)
    if type(node).__name__ == "InList":
        sides, is_in = operands(expression)[:1], not node.negated()
    elif (operator := _operator(expression)) in ("=", "!="):
        sides = [side for side in operands(expression) if not _is_constant(side)]
        is_in = operator == "="
    else:
        return "", False
    *_, value = _uncast(sides[0]) if len(sides) == 1 else [None]
    return (value.canonical_name() if value is not None else ""), is_in


def _is_beyond(
    side: Expr, others: Sequence[Expr], rows: DataFrame, context: SessionContext
) -> bool:
    """Whether a year is compared that begins or ends at no time, or at two, in the column's type.

    DataFusion casts the beginnings of years as here. So it tells which of them fail.
    """
    *_, call = _uncast(side)
    if _function(call) != "date_part":
        return False
    part, time = call.rex_call_operands()
    name, dtype = _constant(part), _type(time, rows)
    if isinstance(name, str) and not name.strip("' ").lower().startswith("y"):
        return False
    if not pa.types.is_timestamp(dtype) or (dtype.unit != "ns" and dtype.tz in (None, "UTC")):
        return False
    others = [other for other in others if not _is_column(other)]  # is compared as a number
    if not all(map(_is_constant, others)):
        return True
    years = _values_of([other.cast(pa.int64()) for other in others], context)
    if years is None:
        return True
    known = {year for year in years if year is not None and abs(year) < _LAST_YEAR}
    starts = [_start_of(year) for first in known for year in (first, first + 1)]
    values = _values_of([lit(start).cast(dtype).cast(pa.int64()) for start in starts], context)
    return values is None or None in values


def _is_column(expression: Expr) -> bool:
    *_, inner = _uncast(expression)
    return bool(inner.variant_name() == "Column")


def _start_of(year: int) -> pa.Scalar:
    """The beginning of a year, without a zone."""
    start = np.datetime64(year - 1970, "Y").astype("datetime64[s]")
    return pa.scalar(int(start.astype(np.int64)), pa.timestamp("s"))


def _values_of(expressions: Sequence[Expr], context: SessionContext) -> list[Any] | None:
    """The values of constants; None if one of them has none."""
    if not expressions:
        return []
    named = [expression.alias(str(number)) for number, expression in enumerate(expressions)]
    try:
        (row,) = context.sql("SELECT 1").select(*named).to_pylist()
    except Exception:  # DataFusion raises bare Exception
        return None
    return list(row.values())


def _is_cut(side: Expr, others: Sequence[Expr], rows: DataFrame, context: SessionContext) -> bool:
    """Whether one of ``others`` is a time that the unit of a timestamp in ``side`` cannot hold."""
    types = [_type(part, rows) for part in _uncast(side)]
    units = [_UNITS_PER_S[dtype.unit] for dtype in types if pa.types.is_timestamp(dtype)]
    if not pa.types.is_timestamp(types[0]) or min(units) == units[0]:
        return False
    constants = [other for other in others if _is_constant(other)]
    values = _values_of([side.cast(types[0]).cast(pa.int64()) for side in constants], context)
    step = units[0] // min(units)
    return any(value is not None and value % step for value in values or [])


def _adds_zone(side: Expr, rows: DataFrame) -> bool:
    """Whether a cast adds a zone that is not UTC to a time."""
    while side.variant_name() in ("Cast", "TryCast") or _function(side) == "arrow_cast":
        zone = getattr(_type(side, rows), "tz", None)
        side = operands(side)[0]
        inner = _type(side, rows)
        has_none = pa.types.is_date(inner) or (pa.types.is_timestamp(inner) and not inner.tz)
        if zone and not is_utc(zone) and has_none:
            return True
    return False


def _rounded(side: Expr, rows: DataFrame, context: SessionContext) -> str:
    """The number that a constant is in the query, where it becomes another decimal; else ""."""
    *_, inner = _uncast(side)
    if not _is_constant(inner) or not pa.types.is_floating(_type(inner, rows)):
        return ""
    values = _values_of([inner, side], context)
    if values is None:  # the query fails by it, too
        return ""
    double, compared = values
    if not isinstance(compared, Decimal) or compared == Decimal(repr(double)):
        return ""
    return repr(double)


def _wraps(expression: Expr, rows: DataFrame) -> Expr | None:
    """The condition that integer arithmetic left the range of its type; None if it cannot."""
    operator = _operator(expression)
    if operator not in _ARITHMETIC:
        return None
    dtype = _type(expression, rows)
    if not pa.types.is_integer(dtype):
        return None
    low, high = _range(dtype)
    bounds = _bounds(expression, rows)
    if bounds is not None and low <= bounds[0] and bounds[1] <= high:
        return None
    # A wrapped value is off by a multiple of 2**bits, a float only by its rounding.
    values = [part.cast(pa.float64()) for part in expression.rex_call_operands()]
    exact = _computed(operator, *(lit(0.0), *values)[-2:])
    return functions.abs(exact - expression.cast(pa.float64())) > lit(float(high - low) / 2)


def _operator(expression: Expr) -> str:
    """The operator between two parts, or before one; empty for another expression."""
    kind = expression.variant_name()
    if kind == "BinaryExpr":
        return str(variant(expression).op())
    return "-" if kind == "Negative" else ""


def _computed(operator: str, left: Any, right: Any) -> Any:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def _bounds(expression: Expr, rows: DataFrame) -> tuple[int, int] | None:
    """The least and the greatest value that an integer expression can have; None if unknown."""
    kind = expression.variant_name()
    if kind == "Literal":
        value = _constant(expression)
        return (value, value) if isinstance(value, int) else None
    parts = list(expression.rex_call_operands()) if kind != "Column" else []
    inside = [_bounds(part, rows) for part in parts]
    operator = _operator(expression)
    if operator in _ARITHMETIC:
        first, second = ((0, 0), *inside)[-2:]
        if first is None or second is None:
            return None
        ends = [_computed(operator, left, right) for left in first for right in second]
        return min(ends), max(ends)
    dtype = _type(expression, rows)
    if not pa.types.is_integer(dtype):
        return None
    if kind == "Cast" and inside[0] is not None:
        return inside[0]  # a cast never changes an integer
    return _range(dtype)


def _range(dtype: pa.DataType) -> tuple[int, int]:
    bits = dtype.bit_width
    is_signed = pa.types.is_signed_integer(dtype)
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)


def _equated(expression: Expr) -> list[tuple[Expr, Expr]]:
    """The values that an expression compares by their bits."""
    kind = expression.variant_name()
    if kind == "InList":
        value, *others = expression.rex_call_operands()
    elif kind == "Case" and variant(expression).expr() is not None:
        whens = [part for part in expression.rex_call_operands() if _compared(part)]
        return [(left, right) for when in whens for left, right in [when.rex_call_operands()]]
    elif _function(expression) == "nullif":
        value, *others = expression.rex_call_operands()
    else:
        return []
    return [(value, other) for other in others]


def _may_be_zeros(value: Expr, other: Expr, rows: DataFrame) -> bool:
    if _constant(other) not in (None, 0):
        return False
    return bool(pa.types.is_floating(_type(value, rows)))


def _may_be_nan(side: Expr, rows: DataFrame) -> bool:
    """Whether arithmetic may give a NaN, whose sign depends on the processor.

    A column without a table is computed by another node of the plan.
    """
    is_computed = any(
        _operator(part) in {*_ARITHMETIC, "/", "%"}
        or (part.variant_name() == "Column" and variant(part).relation() is None)
        for part in parts(side)
    )
    return is_computed and bool(pa.types.is_floating(_type(side, rows)))


def _zeros_differ(left: Expr, right: Expr) -> Expr:
    """The condition that one is 0.0 and the other -0.0.

    With abs: for ``left = 0.0`` the optimiser would put 0.0 in the place of ``left``.
    """
    zero, one = lit(0.0), lit(1.0)
    are_zeros = (functions.abs(left) == zero) & (functions.abs(right) == zero)
    return are_zeros & ((one / left) != (one / right))


def _type(expression: Expr, rows: DataFrame) -> pa.DataType:
    """The type of an expression over some rows."""
    dtype: pa.DataType = rows.select(expression).schema().field(0).type
    return dtype
