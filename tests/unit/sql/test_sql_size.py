"""SQL that DataFusion would plan for minutes, or not survive, is refused before."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cache_protocol.errors import RequestError
from cache_server.sql.queries import MAX_CHAIN, MAX_QUERIES, check_query
from cache_server.sql.sql_size import size_of

TABLES = {"source": pa.schema([("x", pa.int64()), ("s", pa.string())])}


@pytest.mark.parametrize(
    ("sql", "signs", "others", "names"),
    [
        ("x - 1 * y", 2, 0, 2),
        ("x IN (-1, - 2, +3)", 0, 1, 1),
        ("x > -1 AND x < -.5", 0, 3, 2),
        ("1e-5 * x", 1, 0, 1),
        ("- - x", 2, 0, 1),
        ("a[1][2]::int", 0, 3, 2),
        ("s || 'a + b' || $$x + y$$", 0, 2, 1),
        ('"a + b" + f(x)', 1, 0, 3),
        ("x /* + + */ -- + \n + 1", 1, 0, 1),
        ("x IS NOT NULL OR s NOT LIKE 'a'", 0, 5, 3),
    ],
)
def test_operators_and_names_are_counted(sql: str, signs: int, others: int, names: int) -> None:
    size = size_of(sql)

    assert (size.signs, size.others, size.names) == (signs, others, names)


@pytest.mark.parametrize(
    ("sql", "chain"),
    [
        ("a + b + c", 2),
        ("a + b, c + d, e", 1),
        ("f(a + b, c * d * e) + g(1)", 3),
        ("((a + b) + c) + (d)", 3),
        ("CASE WHEN a = 1 THEN b WHEN a = 2 OR a = 3 THEN c END + 1", 3),
        ("a = 1 OR b + c = 2 AND (d = 1 OR d > 3) OR e", 5),
        ("((a + b", 1),
        ("a + b)) + c", 2),
        ("x" + "[1]" * 5, 5),
    ],
)
def test_operators_inside_each_other_are_counted(sql: str, chain: int) -> None:
    assert size_of(sql).chain == chain


MANY = {  # each ended the process, or took minutes, or ended by a RecursionError
    "AND": " AND ".join(["x > 1"] * 20_000),
    "OR": " OR ".join(["x = 1"] * 1000),
    "+": "+".join(["x"] * 1000) + " > 0",
    "||": "||".join(["s"] * 1000) + " = 'a'",
    "casts": "x" + "::int" * 1000 + " > 0",
    "IS NULL": "x" + " IS NULL" * 1000,
    "subscripts": "[x]" + "[1]" * 1000 + " > 0",
    "nested": "(" * 30 + ("x" + "+x" * 30 + ")") * 30 + " > 0",
}


@pytest.mark.parametrize("case", MANY)
def test_a_load_with_a_long_chain_of_operators_is_refused_with_limit_and_value(case: str) -> None:
    sql = f"SELECT * FROM source WHERE {MANY[case]}"
    with pytest.raises(RequestError, match=f"at most {MAX_CHAIN} operators in a chain, got"):
        check_query(sql, TABLES)


@pytest.mark.parametrize(
    "sql",
    [
        " UNION ALL ".join(["SELECT * FROM source"] * 200),
        "SELECT s0.x FROM source s0"
        + "".join(f" JOIN source s{n} ON s{n}.x = s0.x" for n in range(1, 200)),
        "WITH "
        + ", ".join(f"c{n + 1} AS (SELECT * FROM c{n})" for n in range(200)).replace("c0", "source")
        + " SELECT * FROM c200",
    ],
    ids=["UNION", "JOIN", "WITH"],
)
def test_a_load_of_many_queries_is_refused_with_limit_and_value(sql: str) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_QUERIES} SELECT and JOIN, got 20"):
        check_query(sql, TABLES, allow_unordered=True)


def test_a_load_may_have_many_columns_and_long_lists() -> None:
    either = " OR ".join(f"x = {n}" for n in range(200))
    columns = ", ".join(f"x * {n} + 1 AS c{n}" for n in range(300))
    listed = ", ".join(map(str, range(-1000, 1000)))
    sql = f"SELECT {columns} FROM source WHERE x IN ({listed}) OR ({either})"

    assert len(check_query(sql, TABLES).schema) == 300
