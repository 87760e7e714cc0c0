"""The types of a query's result: as DataFusion plans them, and whether its rows have them.

Only the analysed plan knows the types. A data frame knows those of the query as written, in which
``CASE WHEN f IS NULL THEN 0 ELSE f END`` has the type of 0, and a UNION that of its first query.
"""

from __future__ import annotations

import pyarrow as pa
from datafusion import LogicalPlan, SessionContext

from cache_protocol.errors import some_of
from cache_protocol.storage.nested_values import plain_type
from cache_server.sql.plain_columns import with_short_offsets


def planned_schema(context: SessionContext, plan: LogicalPlan) -> pa.Schema:
    """The schema of the rows that a query gives.

    Args:
        context: of the plan.
        plan: optimised, so the types of its expressions are coerced.
    """
    schema: pa.Schema = context.create_dataframe_from_logical_plan(plan).schema()
    return schema


def other_types(arriving: pa.Schema, planned: pa.Schema) -> str:
    """Why rows are not of the planned types; empty if they are. Pure.

    Encodings do not count: dictionaries, views, offsets of 64 bits, the names of list items.

    Args:
        arriving: has the columns of ``planned``, in any order.
    """
    problems = [
        f"column {field.name!r} comes as {came}, but the query was planned with {field.type}: "
        "cast it in the sql to the type that you want"
        for field in planned
        for came in [arriving.field(field.name).type]
        if not is_alike(came, field.type)
    ]
    return some_of(problems, "; ") if problems else ""


def is_alike(dtype: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types have the same values, maybe encoded in different ways."""
    one, two = (with_short_offsets(plain_type(kind)) for kind in (dtype, other))
    return bool(one.equals(two))
