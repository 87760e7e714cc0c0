"""The types of a query's result: as DataFusion plans them, and whether its rows have them.

Only the analysed plan knows the types. A data frame knows those of the query as written, in which
``CASE WHEN f IS NULL THEN 0 ELSE f END`` has the type of 0, and a UNION that of its first query.
"""

from __future__ import annotations

import pyarrow as pa
from datafusion import LogicalPlan, SessionContext

from cache_protocol.errors import some_of
from cache_server.sql.plain_columns import with_fields


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
    return bool(_decoded(dtype).equals(_decoded(other)))


def _decoded(dtype: pa.DataType) -> pa.DataType:
    """The one type of all encodings of some values."""
    types = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        return _decoded(dtype.storage_type)
    if types.is_dictionary(dtype) or types.is_run_end_encoded(dtype):
        return _decoded(dtype.value_type)
    if types.is_large_string(dtype) or types.is_string_view(dtype):
        return pa.string()
    if types.is_large_binary(dtype) or types.is_binary_view(dtype):
        return pa.binary()
    if types.is_struct(dtype):
        return with_fields(dtype, _decoded_field)
    if types.is_map(dtype):
        return pa.map_(_decoded(dtype.key_type), _decoded(dtype.item_type))
    if types.is_fixed_size_list(dtype):
        return pa.list_(_decoded(dtype.value_type), dtype.list_size)
    if types.is_list(dtype) or types.is_large_list(dtype):
        return pa.list_(_decoded(dtype.value_type))
    return dtype


def _decoded_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _decoded(field.type))
