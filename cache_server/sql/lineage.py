"""Lineage: result columns -> the table columns they come from. Pure.

- *Passed on*: a column that the query only renames, also through subqueries, joins and GROUP BY.
  Its values and its type are those of the table.
- *Of a known size*: a column is also as large as that of a table if the query casts it to a type of
  the same kind, or takes a field of a struct.

A computed column, such as that of a string function, has no lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa

SourceColumn = tuple[str, str]  # a table and its column; a field of a struct has dots
# Qualifier and name in a plan -> a source column; None for a column without one.
_Columns = dict[tuple[str, str], SourceColumn | None]

_PASSES_COLUMNS = {
    *("Filter", "Sort", "Limit", "Distinct", "Join", "Unnest", "Subquery", "WindowExpr"),
}


def column_lineage(
    plan: Any, result: pa.Schema, tables: Mapping[str, pa.Schema]
) -> dict[str, SourceColumn]:
    """Result column -> the column that tells its size; computed columns are left out.

    Args:
        plan: the optimised logical plan, in which `arrow_cast` is an ordinary cast.
        tables: that the query may read.
    """
    types = {field.name: field.type for field in result}
    return {
        name: source
        for (_, name), source in _columns(plan, tables, is_exact=False).items()
        if source and name in types and _alike(types[name], _type_of(source, tables))
    }


def passed_on(
    plan: Any, result: pa.Schema, tables: Mapping[str, pa.Schema]
) -> dict[str, SourceColumn]:
    """Result column -> the table column that the query passes on as it is.

    A join may add nulls to it. A field of a struct is computed. A cast to the same type computes a
    column, too.

    Args:
        plan: the logical plan as written: the optimiser removes casts to the same type.
        result: schema of the result, to check the types.
        tables: that the query may read.
    """
    found: dict[str, set[SourceColumn | None]] = {}
    for (_, name), source in _columns(plan, tables, is_exact=True).items():
        found.setdefault(name, set()).add(source)
    return {
        field.name: source
        for field in result
        for source in found.get(field.name, {None})
        if source
        and len(found[field.name]) == 1
        and field.type.equals(tables[source[0]].field(source[1]).type)
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


def expressions_of(node: Any) -> list[Any]:
    """The expressions of one node of a plan that the bindings of DataFusion show."""
    kind = type(node).__name__
    if kind == "Projection":
        return list(node.projections())
    if kind == "Filter":
        return [node.predicate()]
    if kind == "Aggregate":
        return [*node.group_by_exprs(), *node.aggregate_exprs()]
    if kind == "Sort":
        return [order.expr() for order in node.sort_exprs()]
    if kind == "Join":
        return [*chain.from_iterable(node.on()), *filter(None, [node.filter()])]
    if kind == "Values":
        return list(chain.from_iterable(node.values()))
    if kind == "Limit":
        return [count for count in (node.skip(), node.fetch()) if count is not None]
    return []


def _columns(plan: Any, tables: Mapping[str, pa.Schema], *, is_exact: bool) -> _Columns:
    """The columns of a plan with their sources.

    Args:
        is_exact: casts and fields of structs have no source.
    """
    node = plan.to_variant()
    kind = type(node).__name__
    if kind == "TableScan":
        name = str(node.table_name())
        return (
            {(name, column): (name, column) for column in tables[name].names}
            if name in tables
            else {}
        )
    inputs = [_columns(child, tables, is_exact=is_exact).items() for child in plan.inputs()]
    below = _merged(chain.from_iterable(inputs))
    if kind == "Projection":
        return _projected(node.projections(), below, is_exact=is_exact)
    if kind == "Aggregate":  # also a set of groups, which adds nulls, has no source
        return _projected(node.group_by_exprs(), below, is_exact=is_exact)
    if kind == "SubqueryAlias":
        return _merged(((str(node.alias()), name), source) for (_, name), source in below.items())
    passes = kind in _PASSES_COLUMNS and not plan.display().startswith("DistinctOn")
    return below if passes else {}


def _merged(columns: Iterable[tuple[tuple[str, str], SourceColumn | None]]) -> _Columns:
    """The columns by name; one that has two sources has none."""
    merged: _Columns = {}
    for key, source in columns:
        merged[key] = source if merged.get(key, source) == source else None
    return merged


def _projected(expressions: list[Any], below: _Columns, *, is_exact: bool) -> _Columns:
    columns: _Columns = {}
    for expression in expressions:
        source = _source(expression, below, is_exact=is_exact)
        node = variant(expression)
        if type(node).__name__ == "Column":
            columns[str(node.relation() or ""), str(node.name())] = source
        else:
            name = node.alias() if type(node).__name__ == "Alias" else expression.schema_name()
            columns["", str(name)] = source
    return columns


def _source(expression: Any, below: _Columns, *, is_exact: bool) -> SourceColumn | None:
    node = variant(expression)
    kind = type(node).__name__
    if kind == "Alias" or (kind in ("Cast", "TryCast") and not is_exact):
        return _source(node.expr(), below, is_exact=is_exact)
    if kind == "Column":
        name, relation = str(node.name()), str(node.relation() or "")
        if relation or (relation, name) in below:
            return below.get((relation, name))
        return next((source for (_, known), source in below.items() if known == name), None)
    if node is None and expression.rex_call_operator() == "get_field" and not is_exact:
        structure, *fields = expression.rex_call_operands()
        source = _source(structure, below, is_exact=is_exact)
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
