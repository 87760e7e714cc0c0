"""The SQL of computed columns, as messages show it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cache_server.sql.queries import check_query, computed_columns

TABLES = {
    "source": pa.schema([("a", pa.int64()), ("b", pa.int64()), ("Odd, name", pa.int64())]),
    "other": pa.schema([("a", pa.int64()), ("c", pa.string())]),
}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT * FROM source", {}),
        ("SELECT *, a / b AS ratio FROM source", {"ratio": "(a / b)"}),
        ("SELECT a AS x, b FROM source", {"x": "a"}),
        ('SELECT 1 AS "x, FROM (", "Odd, name" * 2 AS y FROM source',
         {"x, FROM (": "1", "y": '("Odd, name" * 2)'}),
        ("SELECT DISTINCT a % 2 AS odd FROM source ORDER BY odd", {"odd": "(a % 2)"}),
        ("WITH t AS (SELECT a / b AS r FROM source) SELECT r + 1 AS x FROM t", {"x": "(t.r + 1)"}),
        ("SELECT s.a + o.a AS x FROM source s JOIN other o ON s.b = o.a", {"x": "(s.a + o.a)"}),
        ("SELECT CASE WHEN c = 'a, FROM b' THEN 1 END AS x FROM other",
         {"x": "CASE WHEN (c = 'a, FROM b') THEN 1 END"}),
        ("SELECT sum(a) AS n, b FROM source GROUP BY b ORDER BY b", {"n": "sum(a)"}),
        ("SELECT a AS x FROM source UNION ALL SELECT b FROM source", {}),
    ],
)  # fmt: skip
def test_each_computed_column_has_its_expression(sql: str, expected: dict[str, str]) -> None:
    tables = {name: schema for name, schema in TABLES.items() if name in sql}
    found = computed_columns(sql, tables)
    assert found == expected
    if found and "JOIN" not in sql and "WITH" not in sql:  # it can stand in the query's place
        rewritten = ", ".join(found.values())
        (table,) = tables
        check_query(f"SELECT {rewritten} FROM {table}", tables, allow_unordered=True)
