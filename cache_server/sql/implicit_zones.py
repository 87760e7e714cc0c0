"""Finds times without a zone that meet times of a zone, which DataFusion converts silently.

``zoned = naive`` takes ``naive`` as the time that clocks of the zone show; ``zoned > day`` and
``zoned - naive`` take it as UTC. In the SQL standard, the zone of the session counts. So the query
must say what it means. With UTC, all are one.

The plan before and after its coercion tells which casts the query does not have itself. A text is
no time without a zone: it takes the type that it is compared with.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from datafusion import DataFrame, Expr, LogicalPlan, SessionContext

from cache_protocol.errors import short
from cache_protocol.storage.type_rules import is_utc
from cache_server.sql.lineage import expressions_of, operands, parts, variant

# A literal, as DataFusion shows it.
_LITERAL = re.compile(r'CAST\(Utf8(?:View)?\("([^"]*)"\) AS (Timestamp|Date)\w*(?:\(\w+\))?\)')
_OF_A_SUBQUERY = re.compile(r"\b__correlated_sq_\d+\.")


@dataclass(frozen=True)
class _Meeting:
    """Two times, only one with a zone.

    Attributes:
        zone: that the one has.
        is_to_zone: the other one becomes a time of that zone.
        target: the type that the cast gives, as DataFusion shows it; empty if there is no cast.
        text: what is cast.
    """

    zone: str
    is_to_zone: bool
    target: str
    text: str = field(compare=False)


def zone_problem(
    written: LogicalPlan,
    coerced: LogicalPlan,
    optimised: LogicalPlan,
    context: SessionContext,
    tables: Iterable[pa.Schema],
) -> str:
    """Which time without a zone meets one of a zone in a query, and what to write; empty if none.

    Args:
        coerced: not optimised, so its casts are those of ``written`` and of the coercion.
        optimised: with joins for subqueries, inside which the bindings of DataFusion do not look.
        context: of the plans.
        tables: that the query reads.
    """
    has_zone = any(zone for schema in tables for dtype in schema.types for zone in _zones(dtype))
    if not has_zone and "Timestamp(" not in coerced.display_indent():
        return ""
    of_query = Counter(_meetings(written, context))
    for meeting in _meetings(coerced, context):
        of_query[meeting] -= 1
        if of_query[meeting] < 0 or not meeting.target:
            return _problem(meeting)
    text = written.display_indent()
    if "Subquery:" in text:
        for meeting in _meetings(optimised, context):
            if meeting not in of_query and f" AS {meeting.target})" not in text:
                return _problem(meeting)
    return ""


def _problem(meeting: _Meeting) -> str:
    text = _LITERAL.sub(lambda found: f"{found[2].upper()} '{found[1]}'", meeting.text)
    text = short(_OF_A_SUBQUERY.sub("", text), 80)
    if meeting.is_to_zone:
        return (
            f"{text} has no time zone, and meets a time of {meeting.zone}: write {text} AT TIME "
            f"ZONE '{meeting.zone}' if clocks there show it, or CAST({text} AS TIMESTAMPTZ) if it "
            "is of UTC"
        )
    return (
        f"{text} is of {meeting.zone}, and meets a date or a time without a time zone: write "
        f"CAST({text} AS DATE) or to_local_time({text}) for what clocks there show, or CAST the "
        "other side AS TIMESTAMPTZ if it is of UTC"
    )


def _meetings(plan: LogicalPlan, context: SessionContext) -> Iterator[_Meeting]:
    inputs = plan.inputs()
    rows = [context.create_dataframe_from_logical_plan(child) for child in inputs]
    if len(inputs) == 2:
        rows.append(context.create_dataframe_from_logical_plan(plan))  # has columns of both
    for expression in expressions_of(plan.to_variant()):
        whole = expression if isinstance(expression, Expr) else Expr(expression)
        for part in parts(whole):
            if part.variant_name() in ("Cast", "TryCast"):
                yield from _of_cast(part, rows)
            elif part.variant_name() == "BinaryExpr" and variant(part).op() == "-":  # is not cast
                yield from _of_sides(part, rows)
    for child in inputs:
        yield from _meetings(child, context)


def _of_cast(cast: Expr, rows: Sequence[DataFrame]) -> Iterator[_Meeting]:
    (inner,) = operands(cast)
    if inner.variant_name() == "Literal":  # a text; there may be thousands in a list
        return
    target = cast.canonical_name().rpartition(" AS ")[2].removesuffix(")")
    for zone, is_to_zone in _differing(inner, cast, rows):
        yield _Meeting(zone, is_to_zone, target, inner.canonical_name())


def _of_sides(expression: Expr, rows: Sequence[DataFrame]) -> Iterator[_Meeting]:
    left, right = operands(expression)
    for zone, is_right in _differing(left, right, rows):
        yield _Meeting(zone, is_right, "", (left if is_right else right).canonical_name())


def _differing(left: Expr, right: Expr, rows: Sequence[DataFrame]) -> Iterator[tuple[str, bool]]:
    """The zones but UTC that one of two expressions has; whether it is the right one."""
    for zones in zip(*(_zones(_type(side, rows)) for side in (left, right)), strict=False):
        zone = "".join(zone or "" for zone in zones)
        if None not in zones and "" in zones and zone and not is_utc(zone):
            yield zone, bool(zones[1])


def _zones(dtype: pa.DataType | None) -> list[str | None]:
    """The zone of each part of a type: empty for a time without one, None for another value."""
    if dtype is None:
        return []
    if dtype.num_fields:
        return [zone for at in range(dtype.num_fields) for zone in _zones(dtype.field(at).type)]
    if pa.types.is_timestamp(dtype):
        return [dtype.tz or ""]
    return ["" if pa.types.is_date(dtype) else None]


def _type(expression: Expr, rows: Sequence[DataFrame]) -> pa.DataType | None:
    """The type of an expression over the first of some rows that have its columns."""
    for frame in rows:
        try:
            return frame.select(expression).schema().field(0).type
        except Exception:  # DataFusion raises bare Exception; it is of other rows
            continue
    return None
