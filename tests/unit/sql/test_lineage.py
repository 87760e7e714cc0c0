"""Which column of a table each column of a result stands for."""

import pyarrow as pa
import pytest

from cache_server.sql.queries import check_query

_PERSON = pa.struct([("name", pa.string()), ("home", pa.struct([("town", pa.string())]))])
SCHEMA = pa.schema(
    {
        "n": pa.int64(),
        "text": pa.string(),
        "numbers": pa.list_(pa.float32()),
        "words": pa.list_(pa.string()),
        "colour": pa.dictionary(pa.int8(), pa.string()),
        "options": pa.map_(pa.string(), pa.string()),
        "person": _PERSON,
    }
)


def lineage_of(sql: str) -> dict[str, str]:
    query = check_query(sql, {"source": SCHEMA})
    assert {table for table, _ in query.lineage.values()} <= {"source"}
    return {name: path for name, (_, path) in query.lineage.items()}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT text, n FROM source", {"text": "text", "n": "n"}),
        ("SELECT text AS a, text AS b FROM source", {"a": "text", "b": "text"}),
        ("SELECT words AS text, text AS words FROM source", {"text": "words", "words": "text"}),
        ("SELECT CAST(n AS FLOAT) AS f FROM source", {"f": "n"}),
        ("SELECT arrow_cast(text, 'LargeUtf8') AS t FROM source", {"t": "text"}),
        ("SELECT CAST(numbers AS DOUBLE[]) AS d FROM source", {"d": "numbers"}),
        ("SELECT CAST(colour AS VARCHAR) AS c FROM source WHERE n > 3", {"c": "colour"}),
        ("SELECT p.name AS a FROM (SELECT person AS p FROM source)", {"a": "person.name"}),
        ("SELECT person['home']['town'] AS a FROM source", {"a": "person.home.town"}),
        ("WITH q AS (SELECT text AS a FROM source) SELECT a AS b FROM q", {"b": "text"}),
        ("SELECT unnest(numbers) AS x, text AS t FROM source", {"t": "text"}),
        ("SELECT text AS t FROM source ORDER BY n LIMIT 3", {"t": "text"}),
    ],
)
def test_a_column_that_is_passed_on_stands_for_one_of_the_table(
    sql: str, expected: dict[str, str]
) -> None:
    assert lineage_of(sql) == expected


@pytest.mark.parametrize(
    "made",
    [
        "upper(text)",
        "text || 'x'",
        "CAST(n AS VARCHAR)",
        "CASE WHEN n > 1 THEN text ELSE 'small' END",
        "options['key']",
        "words[1]",
        "'a constant'",
    ],
)
def test_what_a_query_makes_stands_for_no_column(made: str) -> None:
    assert lineage_of(f"SELECT {made} AS text, n FROM source") == {"n": "n"}


def test_columns_of_joined_tables_stand_for_those_of_their_own_table() -> None:
    tables = {"big": SCHEMA, "small": SCHEMA}
    sql = "SELECT s.text AS a, b.text AS c FROM big b JOIN small s ON b.n = s.n"

    query = check_query(sql, tables, allow_unordered=True)

    assert query.lineage == {"a": ("small", "text"), "c": ("big", "text")}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT text AS a, n, text AS b FROM source", {"a": "text", "n": "n", "b": "text"}),
        ("SELECT words AS text, text AS words FROM source", {"text": "words", "words": "text"}),
        ("SELECT * FROM source WHERE n > 3 ORDER BY n LIMIT 3", {n: n for n in SCHEMA.names}),
        ("WITH q AS (SELECT text AS a FROM source) SELECT a AS b FROM q", {"b": "text"}),
        ("SELECT q.b FROM (SELECT text AS a FROM source) AS q(b)", {"b": "text"}),
        ("SELECT z FROM (SELECT upper(text) AS n, n AS z FROM source) AS q", {"z": "n"}),
        ("SELECT q.n FROM (SELECT n + 1 AS n, n AS m FROM source) AS q", {}),
        ("SELECT unnest(numbers) AS numbers, text FROM source", {"text": "text"}),
        ("SELECT text, count(*) AS n FROM source GROUP BY text", {"text": "text"}),
        ("SELECT n AS m, n + 1 AS n FROM source GROUP BY n, n + 1", {"m": "n"}),
        ("SELECT text FROM source GROUP BY ROLLUP (text)", {}),
        ("SELECT DISTINCT text, n FROM source", {"text": "text", "n": "n"}),
        ("SELECT DISTINCT ON (n) n, upper(text) AS text FROM source ORDER BY n", {}),
        ("SELECT text AS t, sum(n) OVER (ORDER BY n) AS n FROM source", {"t": "text"}),
        ("SELECT text FROM source UNION ALL SELECT text FROM source", {}),
        ("SELECT first_value(text) AS text FROM source", {}),
        ("SELECT CAST(n AS BIGINT) AS n, CAST(text AS VARCHAR) AS text FROM source", {}),
        ("SELECT arrow_cast(text, 'Utf8') AS text FROM source", {}),
        ("SELECT person['name'] AS text FROM source", {}),
        ("SELECT CASE WHEN n > 1 THEN text ELSE text END AS text FROM source", {}),
        ("SELECT coalesce(text, 'x') AS text, -n AS n FROM source", {}),
    ],
)
def test_a_column_is_passed_on_only_as_it_is(sql: str, expected: dict[str, str]) -> None:
    query = check_query(sql, {"source": SCHEMA}, allow_unordered=True)

    assert dict(query.passed_on) == {name: ("source", path) for name, path in expected.items()}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (
            "SELECT s.text AS a, b.text, b.n + 1 AS n FROM big b LEFT JOIN small s ON b.n = s.n",
            {"a": ("small", "text"), "text": ("big", "text")},
        ),
        (
            "SELECT n, b.text FROM big b JOIN small s USING (n)",
            {"n": ("big", "n"), "text": ("big", "text")},
        ),
        ("SELECT text FROM big WHERE n IN (SELECT n FROM small)", {"text": ("big", "text")}),
        (
            "SELECT x.text AS a, y.text AS b FROM big x, (SELECT upper(text) AS text FROM small) y",
            {"a": ("big", "text")},
        ),
        ("SELECT (SELECT max(text) FROM small) AS text, n FROM big", {"n": ("big", "n")}),
        ("SELECT text FROM big EXCEPT SELECT text FROM small", {}),
    ],
)
def test_columns_of_joined_tables_are_passed_on_from_their_own_table(
    sql: str, expected: dict[str, tuple[str, str]]
) -> None:
    query = check_query(sql, {"big": SCHEMA, "small": SCHEMA}, allow_unordered=True)

    assert query.passed_on == expected


def test_a_selection_passes_on_all_its_columns() -> None:
    query = check_query("SELECT text, n FROM source WHERE n > 1", {"source": SCHEMA})

    assert query.passed_on == {"text": ("source", "text"), "n": ("source", "n")}
