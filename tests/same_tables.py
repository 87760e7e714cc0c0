"""Whether two tables have the same types and values, whatever the encoding of dictionaries."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cache_protocol.storage.nested_values import plain_type, retyped
from cache_server.sql.plain_columns import with_wide_codes


def values_of(table: pa.Table) -> pa.Table:
    """The same values without dictionaries, whose order of values is free."""
    columns = [pa.concat_arrays(column.chunks) for column in table.columns]
    return pa.table(
        [retyped(column, plain_type(column.type)) for column in columns], table.column_names
    )


def check(found: pa.Table, wanted: pa.Table) -> None:
    types = [with_wide_codes(dtype) for dtype in wanted.schema.types]
    assert found.schema.names == wanted.schema.names
    assert found.schema.types == types
    assert values_of(found).equals(values_of(wanted))


def values_in(table: pa.Table, order: Any) -> pa.Table:
    """The rows in an order; Arrow cannot take those of all types."""
    rows = [table.slice(int(row), 1) for row in order]
    columns = zip(*(values_of(row).columns for row in rows), strict=True)
    whole = [
        pa.concat_arrays([chunk for part in column for chunk in part.chunks]) for column in columns
    ]
    return pa.table(
        [retyped(column, dtype) for column, dtype in zip(whole, table.schema.types, strict=True)],
        schema=table.schema,
    )
