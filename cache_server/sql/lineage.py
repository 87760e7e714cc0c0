"""Lineage: result columns -> the table columns they come from, which tell their size. Pure.

A column has a source column if the query renames it, casts it to a type of the same kind, or takes
a field of a struct, also through subqueries and joins. A computed column, such as that of a string
function, has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

SourceColumn = tuple[str, str]  # a table and its column; a field of a struct has dots
_Columns = dict[tuple[str, str], SourceColumn]  # qualifier and name in a plan

_PASSES_COLUMNS = {"Filter", "Sort", "Limit", "Distinct", "Join", "Unnest", "Subquery"}


def column_lineage(
    plan: Any, result: pa.Schema, tables: Mapping[str, pa.Schema]
) -> dict[str, SourceColumn]:
    """Result column -> its source column; computed columns are left out.

    Args:
        plan: the optimised logical plan, in which `arrow_cast` is an ordinary cast.
        tables: that the query may read.
    """
    found = {name: source for (_, name), source in _columns(plan, tables).items()}
    types = {field.name: field.type for field in result}
    return {
        name: source
        for name, source in found.items()
        if name in types and _alike(types[name], _type_of(source, tables))
    }


def variant(expression: Any) -> Any:
    """The kind of an expression; None if the bindings of DataFusion do not show it."""
    try:
        return expression.to_variant()
    except ValueError:
        return None


def parts(expression: Any) -> Iterator[Any]:
    """An expression and the expressions inside it, without those of subqueries."""
    waiting = [expression]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += reversed(operands(part))


def operands(expression: Any) -> list[Any]:
    """The expressions directly inside an expression."""
    if expression.variant_name() in ("Column", "Literal"):
        return []
    try:
        return list(expression.rex_call_operands())
    except Exception:  # DataFusion's bindings do not show what is inside, as of EXISTS
        return []


def _columns(plan: Any, tables: Mapping[str, pa.Schema]) -> _Columns:
    node = plan.to_variant()
    kind = type(node).__name__
    if kind == "TableScan":
        name = str(node.table_name())
        return (
            {(name, column): (name, column) for column in tables[name].names}
            if name in tables
            else {}
        )
    below: _Columns = {}
    for child in plan.inputs():
        below |= _columns(child, tables)
    if kind == "Projection":
        return _projected(node.projections(), below)
    if kind == "SubqueryAlias":
        return {(str(node.alias()), name): source for (_, name), source in below.items()}
    return below if kind in _PASSES_COLUMNS else {}


def _projected(expressions: list[Any], below: _Columns) -> _Columns:
    columns = {}
    for expression in expressions:
        source = _source(expression, below)
        node = variant(expression)
        if source is None:
            continue
        if type(node).__name__ == "Column":
            columns[str(node.relation() or ""), str(node.name())] = source
        else:
            name = node.alias() if type(node).__name__ == "Alias" else expression.schema_name()
            columns["", str(name)] = source
    return columns


def _source(expression: Any, below: _Columns) -> SourceColumn | None:
    node = variant(expression)
    kind = type(node).__name__
    if kind in ("Alias", "Cast", "TryCast"):
        return _source(node.expr(), below)
    if kind == "Column":
        name = str(node.name())
        if (relation := node.relation()) is not None:
            return below.get((str(relation), name))
        return next((source for (_, known), source in below.items() if known == name), None)
    if node is None and expression.rex_call_operator() == "get_field":
        structure, *fields = expression.rex_call_operands()
        source = _source(structure, below)
        names = [str(field.python_value()) for field in fields]
        return source and (source[0], ".".join((source[1], *names)))
    return None


def _type_of(source: SourceColumn, tables: Mapping[str, pa.Schema]) -> pa.DataType | None:
    """The type of a source column; None if it is not a field of a struct, such as a map's value."""
    table, path = source
    schema = tables[table]
    if schema.get_field_index(path) >= 0:
        return schema.field(path).type
    name = next(name for name in schema.names if path.startswith(f"{name}."))
    dtype = schema.field(name).type
    for part in path[len(name) + 1 :].split("."):
        if not pa.types.is_struct(dtype) or dtype.get_field_index(part) < 0:
            return None
        dtype = dtype.field(part).type
    return dtype


def _alike(dtype: pa.DataType, other: pa.DataType | None) -> bool:
    """Whether both hold strings or neither does: a number as a string is longer."""
    return other is not None and _holds_texts(dtype) == _holds_texts(other)


def _holds_texts(dtype: pa.DataType) -> bool:
    """Whether the values, also inside lists, vary in width."""
    while hasattr(dtype, "value_type"):  # of a list or a dictionary
        dtype = dtype.value_type
    return not pa.types.is_primitive(dtype) and not pa.types.is_decimal(dtype)
