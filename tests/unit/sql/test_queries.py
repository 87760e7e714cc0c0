from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from datafusion import SessionConfig, SessionContext

from cache_protocol.errors import RequestError
from cache_server.sql.queries import check_query, query_text
from tests.query_source import SCHEMA, all_at_once, check, rows_of, table_of, write_parquet


def refusal(sql: str) -> str:
    with pytest.raises(RequestError) as caught:
        check(sql, SCHEMA)
    assert repr(sql) in str(caught.value)
    return str(caught.value)


# -- queries that run split by split ---------------------------------------------------------------

EVERY_ROW = {
    "SELECT * FROM source": SCHEMA.names,
    'SELECT "Mixed", a FROM source': ["Mixed", "a"],
    "SELECT a AS x, b * 2 + 1 AS y FROM source": ["x", "y"],
    "SELECT CAST(a AS REAL) AS x FROM source": ["x"],
    "SELECT CASE WHEN a > 5 THEN 1 ELSE 0 END AS x FROM source": ["x"],
    "SELECT COALESCE(a, 0) AS a FROM source": ["a"],
    "SELECT tags[1] AS first, upper(text) AS text FROM source": ["first", "text"],
    "SELECT 1 AS one FROM source": ["one"],
    "SELECT * EXCLUDE (tags) FROM source": ["a", "b", "Mixed", "text"],
    "SELECT x FROM (SELECT a AS x FROM source) q": ["x"],
    "WITH q AS (SELECT a FROM source) SELECT a FROM q": ["a"],
    "SELECT s.a FROM source AS s": ["a"],
    "SELECT x FROM source AS s(x, b, c, d, e)": ["x"],
    "select a from SOURCE": ["a"],
}
SOME_ROWS = {
    "SELECT a FROM source WHERE b > 1.5 AND text LIKE 'row%'": ["a"],
    "SELECT a FROM source WHERE a IN (1, 2, 3)": ["a"],
    "SELECT a FROM source WHERE a BETWEEN 3 AND 5 OR a IS NULL": ["a"],
    "SELECT a FROM (SELECT a FROM source WHERE b > 1) q": ["a"],
    "SELECT a FROM source WHERE false": ["a"],
    "SELECT a FROM source WHERE a > 5 AND a < 3": ["a"],
    "SELECT a FROM source WHERE true": ["a"],
}
ANY_ROWS = {
    "SELECT a, unnest(tags) AS tag FROM source": ["a", "tag"],
    "SELECT unnest(tags) AS tag FROM source WHERE a > 1": ["tag"],
    "SELECT tag + 1 AS tag FROM (SELECT unnest(tags) AS tag FROM source) q": ["tag"],
}


@pytest.mark.parametrize(("sql", "names"), EVERY_ROW.items())
def test_a_query_without_a_filter_keeps_every_row(sql: str, names: list[str]) -> None:
    query = check(sql, SCHEMA)

    assert query.schema.names == names
    assert (query.keeps_every_row, query.only_drops_rows) == (True, True)


@pytest.mark.parametrize(("sql", "names"), SOME_ROWS.items())
def test_a_query_with_a_filter_only_drops_rows(sql: str, names: list[str]) -> None:
    query = check(sql, SCHEMA)

    assert query.schema.names == names
    assert (query.keeps_every_row, query.only_drops_rows) == (False, True)


@pytest.mark.parametrize(("sql", "names"), ANY_ROWS.items())
def test_an_unnest_may_make_any_number_of_rows(sql: str, names: list[str]) -> None:
    query = check(sql, SCHEMA)

    assert query.schema.names == names
    assert (query.keeps_every_row, query.only_drops_rows) == (False, False)


@pytest.mark.parametrize("sql", [*EVERY_ROW, *SOME_ROWS, *ANY_ROWS])
def test_what_was_checked_is_what_a_split_gives(tmp_path: Path, sql: str) -> None:
    table = table_of()
    split = write_parquet(tmp_path / "a.parquet", table)
    query = check(sql, SCHEMA)

    rows = rows_of(split, query.sql)

    assert all(list(row) == query.schema.names for row in rows)
    assert rows == all_at_once(table, sql)
    if query.keeps_every_row:
        assert len(rows) == len(table)
    if query.only_drops_rows:
        assert len(rows) <= len(table)


def test_the_schema_is_that_of_the_result() -> None:
    query = check(
        "SELECT CAST(a AS SMALLINT) AS s, b / 2 AS half, a > 1 AS more, 'x' AS x FROM source",
        SCHEMA,
    )

    assert [str(dtype) for dtype in query.schema.types][:3] == ["int16", "float", "bool"]
    assert "string" in str(query.schema.field("x").type)


# -- queries with one answer for the whole table ---------------------------------------------------


WHOLE = [
    ("SELECT sum(a) FROM source", "an aggregate", True),
    ("SELECT count(*) FROM source", "an aggregate", True),
    ("SELECT a FROM source GROUP BY a", "an aggregate", False),
    ("SELECT max(a) AS m FROM source HAVING max(a) > 1", "an aggregate", True),
    ("SELECT s FROM (SELECT sum(a) AS s FROM source) q", "an aggregate", True),
    ("SELECT a FROM source ORDER BY a", "ORDER BY", True),
    ("SELECT a FROM source ORDER BY b LIMIT 3", "LIMIT", True),
    ("SELECT a FROM source LIMIT 3", "LIMIT", False),
    ("SELECT a FROM source LIMIT 3 OFFSET 2", "LIMIT", False),
    ("SELECT a FROM source OFFSET 2", "LIMIT", False),
    ("SELECT a FROM (SELECT a FROM source LIMIT 3) q", "LIMIT", False),
    ("SELECT DISTINCT a FROM source", "DISTINCT", False),
    ("SELECT DISTINCT ON (a) a, b FROM source", "DISTINCT", False),
    ("SELECT x.a FROM source x JOIN source y ON x.a = y.a", "read twice", False),
    ("SELECT x.a FROM source x, source y", "read twice", False),
    ("SELECT row_number() OVER () FROM source", "a window function", False),
    ("SELECT sum(a) OVER (PARTITION BY b) FROM source", "a window function", False),
    ("SELECT a FROM source QUALIFY row_number() OVER () > 1", "a window function", False),
    ("SELECT a FROM source UNION ALL SELECT a FROM source", "UNION", False),
    ("SELECT a FROM source UNION SELECT a FROM source ORDER BY a", "ORDER BY", True),
    ("SELECT a FROM source INTERSECT SELECT a FROM source", "", False),
    ("SELECT a FROM source EXCEPT SELECT a FROM source", "", False),
    ("SELECT a FROM source WHERE a IN (SELECT a FROM source)", "read twice", False),
    ("SELECT a FROM source WHERE a > (SELECT avg(a) FROM source)", "read twice", False),
    ("SELECT (SELECT max(a) FROM source) AS m FROM source", "read twice", False),
    (
        "WITH RECURSIVE r AS (SELECT a FROM source UNION ALL SELECT a + 1 FROM r WHERE a < 9) "
        "SELECT a FROM r",
        "RecursiveQuery",
        False,
    ),
]


@pytest.mark.parametrize(("sql", "why", "ordered"), WHOLE)
def test_what_has_one_answer_for_the_whole_table_runs_whole(
    sql: str, why: str, ordered: bool
) -> None:
    query = check_query(sql, {"source": SCHEMA}, allow_unordered=True)

    assert not query.drivers and why in query.why_whole
    assert query.ordered == ordered
    assert not query.keeps_every_row and not query.only_drops_rows


@pytest.mark.parametrize("sql", [sql for sql, _, ordered in WHOLE if not ordered])
def test_a_whole_query_without_an_order_is_refused_with_both_ways_out(sql: str) -> None:
    refused = refusal(sql)

    assert "ORDER BY" in refused and "allow_unordered: true" in refused


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        ("SELECT a FROM (SELECT a FROM source ORDER BY b) q", "ORDER BY"),
        ("EXPLAIN SELECT a FROM source", "Explain"),
        ("DESCRIBE source", "must read the table"),
        ("VALUES (1)", "must read the table"),
        ("SELECT a FROM source TABLESAMPLE BERNOULLI (50)", "TABLESAMPLE is not supported"),
        ("SELECT a FROM source tablesample (3 rows)", "tablesample is not supported"),
        ("SELECT a FROM source PREWHERE a > 1", "PREWHERE is not supported"),
        ("SELECT a FROM source CONNECT BY PRIOR a = b", "CONNECT BY is not supported"),
        ("SELECT a FROM source SAMPLE (10)", "SAMPLE is not supported"),
        ("SELECT a FROM source AS s sample 0.5", "sample is not supported"),
        ('SELECT a FROM "source"/**/SAMPLE/**/(10)', "SAMPLE is not supported"),
        ("SELECT a FROM source PARTITION (p0)", "PARTITION is not supported"),
        ("SELECT * FROM (SELECT a FROM source PARTITION (a)) q", "PARTITION is not supported"),
        ("SELECT * ILIKE 'n%' FROM source", "* ILIKE is not supported"),
        ("SELECT s.*ilike 'n%' FROM source s", "*ilike is not supported"),
        ("SELECT a FROM source WITH ORDINALITY", "WITH ORDINALITY is not supported"),
        ("SELECT text FROM source GROUP BY text WITH ROLLUP", "WITH ROLLUP is not supported"),
        ("SELECT text FROM source GROUP BY text WITH\n  CUBE", "WITH CUBE is not supported"),
        ("SELECT text FROM source GROUP BY ALL WITH TOTALS", "WITH TOTALS is not supported"),
        ("SELECT text FROM source GROUP BY text WITH/**/totals", "WITH totals is not supported"),
        ("SELECT $$ it's $$ AS t FROM source SAMPLE (1) -- '", "SAMPLE is not supported"),
        ("SELECT E'it\\'s' AS t FROM source SAMPLE (1) -- '", "SAMPLE is not supported"),
    ],
)
def test_what_is_no_query_or_would_be_ignored_is_refused_by_name(sql: str, name: str) -> None:
    assert name in refusal(sql)


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("SELECT abs(a) FILTER (WHERE a > 0) AS x FROM source", "FILTER"),
        ("SELECT abs(a) filter (WHERE text = ')') AS x FROM source", "filter"),
        ("SELECT abs(a) OVER () AS x FROM source", "OVER"),
        ("SELECT abs(a) OVER w AS x FROM source WINDOW w AS (ORDER BY a)", "OVER"),
        ('SELECT abs(a) OVER "w" AS x FROM source WINDOW "w" AS (ORDER BY a)', "OVER"),
        ("SELECT coalesce(DISTINCT b, 1) AS x FROM source", "DISTINCT"),
        ('SELECT "abs"( DISTINCT (a)) + 1 AS x FROM source', "DISTINCT"),
        ("SELECT unnest(DISTINCT tags) AS tag FROM source", "DISTINCT"),
        ("SELECT a FROM source WHERE abs(DISTINCT a) > 1", "DISTINCT"),
        ("SELECT sum(abs(DISTINCT a)) FILTER (WHERE a > 1) AS x FROM source", "DISTINCT"),
    ],
)
def test_what_is_said_of_a_function_that_ignores_it_is_refused_by_name(sql: str, word: str) -> None:
    assert f"{word} is not supported with a function of single rows" in refusal(sql)


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("lag(DISTINCT a) OVER (ORDER BY a)", "lag"),
        ("LEAD( DISTINCT a, 2) IGNORE NULLS OVER (ORDER BY a)", "lead"),
        ("nth_value(DISTINCT a, 2)", "nth_value"),
        ("approx_percentile_cont(DISTINCT b, 0.5)", "approx_percentile_cont"),
        ("regr_count(DISTINCT a, b)", "regr_count"),
    ],
)
def test_distinct_of_a_function_that_passes_over_it_is_refused_by_name(
    expression: str, name: str
) -> None:
    expected = f"DISTINCT is not supported with {name}, which would ignore it"
    assert expected in refusal(f"SELECT {expression} AS x FROM source")


@pytest.mark.parametrize(
    ("expression", "ignored"),
    [
        ("abs(1)(a)", "abs(1)"),
        ("abs('(') /* of */ (a)", "abs('(')"),
        ("sum(a + (1))(a)", "sum(a + (1))"),
        ("round(2, (3))(b)", "round(2, (3))"),
    ],
)
def test_arguments_before_the_arguments_are_refused(expression: str, ignored: str) -> None:
    expected = f"{ignored} before other arguments is not supported"
    assert expected in refusal(f"SELECT 1 + {expression} AS x FROM source")


@pytest.mark.parametrize(
    ("expression", "name", "instead"),
    [
        ("text SIMILAR TO 'n%'", "SIMILAR TO", "LIKE"),
        ("text NOT similar\n to 'n%'", "similar to", "~"),
        ("CAST(text AS VARCHAR(2))", "VARCHAR(2)", "left(text, n)"),
        ("TRY_CAST(text AS varchar (2))", "varchar (2)", "left(text, n)"),
        ("text::VARCHAR(2 CHARACTERS)", "VARCHAR(2 CHARACTERS)", "left(text, n)"),
        ("CAST(['x'] AS VARCHAR(2)[])", "VARCHAR(2)", "left(text, n)"),
        ("text::char(9)", "char(9)", "left(text, n)"),
        ("text::CHAR", "CHAR", "left(text, n)"),
        ("CAST(text AS char)", "char", "left(text, n)"),
        ("CAST(text AS STRING(2))", "STRING(2)", "left(text, n)"),
        ("CAST(b AS FLOAT(53))", "FLOAT(53)", "DOUBLE"),
        ("b::FLOAT(5, 2)", "FLOAT(5, 2)", "DOUBLE"),
    ],
)
def test_what_would_mean_something_else_is_refused_with_what_to_write(
    expression: str, name: str, instead: str
) -> None:
    for sql in (f"SELECT {expression} AS x FROM source", f"SELECT a, {expression} FROM source"):
        refused = refusal(sql)

        assert f"{name} is not supported: " in refused and instead in refused


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT CAST(a AS NUMERIC(5, 2)) AS x, CAST(a AS DECIMAL(4)) AS y FROM source",
        "SELECT CAST(a AS VARCHAR) AS x, a::STRING AS y, CAST(a AS TEXT) AS z FROM source",
        "SELECT CAST(a AS FLOAT) AS x, a::FLOAT(24) AS y, a::DOUBLE AS z FROM source",
        "SELECT CAST(a AS TIMESTAMP(3)) AS x, CAST(a AS BIGINT(20)) AS y FROM source",
        "SELECT char.char AS string, char FROM (SELECT a AS char FROM source) char",
        "WITH char AS (SELECT a FROM source) SELECT a FROM source",
        "SELECT similar to FROM (SELECT a AS similar FROM source) q",
        "SELECT 'x SIMILAR TO y' AS x, 'CAST(a AS VARCHAR(2))' AS y FROM source -- ::CHAR",
    ],
)
def test_supported_types_and_names_that_look_like_types_are_harmless(sql: str) -> None:
    check_query(sql, {"source": WORDS}, allow_unordered=True)


DIM = pa.schema([("a", pa.int64()), ("name", pa.string())])


@pytest.mark.parametrize(
    ("sql", "drivers"),
    [
        ("SELECT s.b, d.name FROM source s JOIN dim d ON s.a = d.a", {"source", "dim"}),
        ("SELECT s.b, d.name FROM source s LEFT JOIN dim d ON s.a = d.a", {"source"}),
        ("SELECT s.b, d.name FROM source s RIGHT JOIN dim d ON s.a = d.a", {"dim"}),
        ("SELECT s.b FROM source s FULL JOIN dim d ON s.a = d.a", set()),
        ("SELECT b FROM source WHERE a IN (SELECT a FROM dim)", {"source"}),
        ("SELECT b FROM source WHERE a NOT IN (SELECT a FROM dim)", {"source"}),
        ("SELECT b, (SELECT max(name) FROM dim) AS m FROM source", {"source"}),
        (
            "SELECT s.b, q.n FROM source s JOIN (SELECT a, count(*) AS n FROM dim GROUP BY a) q "
            "ON s.a = q.a",
            {"source"},
        ),
        ("SELECT count(*) AS n FROM source s JOIN dim d ON s.a = d.a", set()),
        ("SELECT a FROM source UNION ALL SELECT a FROM dim", set()),
    ],
)
def test_a_join_may_be_split_on_the_side_whose_rows_it_handles_one_by_one(
    sql: str, drivers: set[str]
) -> None:
    tables = {"source": SCHEMA, "dim": DIM}

    query = check_query(sql, tables, allow_unordered=True)

    assert query.drivers == drivers
    assert bool(query.why_whole) == (not drivers)


@pytest.mark.parametrize(
    ("sql", "drivers"),
    [
        ("SELECT a, value FROM source CROSS JOIN generate_series(1, 3)", {"source"}),
        ("SELECT g.value FROM range(1, 3) g JOIN source ON a = value", {"source"}),
        ("SELECT x.value FROM range(1, 3) x, range(1, 3) y, source", {"source"}),
        ("SELECT a FROM source WHERE a IN (SELECT value FROM generate_series(1, 3))", {"source"}),
        ("SELECT a FROM source, (VALUES (1), (2)) v (x)", {"source"}),
        ("SELECT g.value FROM generate_series(1, 3) g LEFT JOIN source ON a = value", set()),
    ],
)
def test_a_function_that_makes_rows_is_no_table_to_split(sql: str, drivers: set[str]) -> None:
    query = check_query(sql, {"source": SCHEMA}, allow_unordered=True)

    assert query.drivers == drivers
    assert set(query.columns) == {"source"}


def test_the_columns_that_a_query_reads_are_known() -> None:
    tables = {"source": SCHEMA, "dim": DIM}
    sql = "SELECT s.b FROM source s JOIN dim d ON s.a = d.a WHERE s.text > 'x'"

    assert check_query(sql, tables, allow_unordered=True).columns == {
        "source": ("a", "b", "text"),
        "dim": ("a",),
    }
    assert check("SELECT 1 AS one FROM source").columns == {"source": ("a",)}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a FROM source WHERE text = 'TABLESAMPLE'",
        'SELECT a AS "tablesample" FROM source',
        "SELECT a FROM source -- no TABLESAMPLE",
        "SELECT a /* no\nTABLESAMPLE */ FROM source",
        "SELECT a AS tablesamples FROM source",
        "SELECT a FROM source WHERE text <> 'SAMPLE (10)' -- PARTITION (p0) WITH ROLLUP",
        "SELECT $$SAMPLE (10)$$ AS x FROM source",
        "SELECT E'it\\'s SAMPLE (10)' AS x FROM source",
        "SELECT a AS `SAMPLE` FROM source",
        "SELECT a /* a /* comment */ SAMPLE (10) */ FROM source",
        "SELECT 'abs(DISTINCT a) FILTER (WHERE a > 1)' AS x FROM source /* OVER () */",
    ],
)
def test_a_forbidden_word_in_quotes_and_comments_is_harmless(sql: str) -> None:
    assert len(check(sql, SCHEMA).schema) == 1


WORDS = pa.schema([(name, pa.int64()) for name in ("a", "sample", "partition", "over", "filter")])


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sample, partition FROM source WHERE sample > 1 AND source.Partition < 5",
        "SELECT a AS sample, a AS partition, a AS tablesample, a AS prewhere FROM source",
        "SELECT a sample, a partition FROM source",
        "SELECT sample.a FROM source AS sample (a, b, c, d, e)",
        "SELECT a FROM source AS partition (a, b, c, d, e)",
        "WITH sample (x) AS (SELECT a FROM source) SELECT x FROM sample",
        "WITH totals AS (SELECT a FROM source), partition AS (SELECT * FROM totals) "
        "SELECT a FROM partition",
        "WITH rollup AS (SELECT a FROM source) SELECT a FROM rollup",
        "WITH cube AS (SELECT a FROM source) SELECT a FROM cube",
        "WITH ordinality AS (SELECT a FROM source) SELECT a FROM ordinality",
        "SELECT a * \"sample\" AS x FROM source WHERE CAST(a AS TEXT) ILIKE 'n%'",
        "SELECT CAST(2 * \"sample\" AS TEXT) ILIKE 'n%' AS x FROM source",
        "SELECT a, sum(a) OVER (PARTITION BY sample) AS x FROM source",
        "SELECT sum(a) OVER (partition\n/* of */ by partition, sample) AS x FROM source",
        "SELECT row_number() OVER w AS x FROM source WINDOW w AS (PARTITION BY partition)",
        "SELECT sum(a) FILTER (WHERE a > 1) OVER () AS x, lag(a) OVER (ORDER BY a) AS y "
        "FROM source",
        "SELECT count(DISTINCT a) FILTER (WHERE sample > 1) AS x FROM source",
        "SELECT count( DISTINCT a) + sum(DISTINCT (a)) AS x FROM source",
        "SELECT array_agg(DISTINCT a ORDER BY a) FILTER (WHERE true) AS x FROM source",
        "SELECT sample FROM source GROUP BY ROLLUP (sample)",
        "SELECT sample FROM source GROUP BY CUBE (sample)",
        "SELECT DISTINCT (a) FROM source",
        "SELECT DISTINCT ON (a) a, sample FROM source ORDER BY a, sample",
        "SELECT DISTINCT ON (a) (sample) FROM source ORDER BY a",
        "WITH s AS (SELECT a FROM source) (SELECT a FROM s)",
        "WITH unused AS (SELECT count(DISTINCT a) FILTER (WHERE a > 1) FROM source) "
        "SELECT a FROM source",
        "SELECT filter, (a) over FROM source WHERE abs(over) > abs(filter)",
        "SELECT (over) FROM source",
    ],
)
def test_a_word_that_is_a_name_or_is_not_ignored_is_harmless(sql: str) -> None:
    check_query(sql, {"source": WORDS}, allow_unordered=True)


def test_no_aggregate_and_no_window_function_loses_what_is_said_of_it() -> None:
    context = SessionContext(SessionConfig().with_information_schema(True))
    routines = context.sql("SELECT * FROM information_schema.routines").to_pylist()
    kinds = {(row["routine_name"], row["function_type"]) for row in routines}
    said = {
        "AGGREGATE": ["{}(DISTINCT a)", "{}(a) FILTER (WHERE a > 1)", "{}(a) OVER ()"],
        "WINDOW": ["{}() OVER (ORDER BY a)", "{}(a) OVER (ORDER BY a)"],
    }
    assert {("sum", "AGGREGATE"), ("row_number", "WINDOW")} <= kinds

    for name, kind in kinds:
        for call in said.get(kind, ()):
            sql = f"SELECT {call.format(name)} AS x FROM source"
            try:
                check_query(sql, {"source": WORDS}, allow_unordered=True)
            except RequestError as error:  # of its arguments
                assert "is not supported with" not in str(error)


def test_distinct_counts_in_every_accepted_call() -> None:
    """Of any version of DataFusion: the names of those that pass over it may be others."""
    context = SessionContext(SessionConfig().with_information_schema(True))
    routines = context.sql("SELECT * FROM information_schema.routines").to_pylist()
    pairs = [(5.0, 1.0), (5.0, 1.0), (5.0, 1.0), (6.0, 4.0), (9.0, 2.0)]
    table = pa.table({"x": [x for x, _ in pairs], "y": [y for _, y in pairs]})
    context.from_arrow(table, "source")
    of_an_order = {"any_value", "array_agg", "first_value", "last_value", "string_agg"}

    def answer(sql: str) -> object:
        """None where there is no such call, or it is refused."""
        try:
            check_query(sql, {"source": table.schema}, allow_unordered=True)
            (column,) = context.sql(sql).to_pydict().values()
        except Exception:  # DataFusion raises bare Exceptions
            return None
        return column[0]

    seen = set()
    for name in {row["routine_name"] for row in routines if row["function_type"] == "AGGREGATE"}:
        if name in of_an_order:
            continue
        for arguments in ("x", "x, y", "x, 2", "x, 0.5"):
            once = answer(f"SELECT {name}({arguments}) FROM (SELECT DISTINCT * FROM source) q")
            for over in ("", " OVER ()"):
                found = answer(f"SELECT {name}(DISTINCT {arguments}){over} FROM source")
                if once is not None and found is not None:
                    assert found == pytest.approx(once), (name, arguments, over)
                    seen.add(name)
    assert {"sum", "count", "median"} <= seen


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE t AS SELECT * FROM source",
        "CREATE VIEW v AS SELECT * FROM source",
        "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/etc/passwd'",
        "DROP TABLE source",
        "SELECT a INTO t FROM source",
        "INSERT INTO source SELECT * FROM source",
        "DELETE FROM source",
        "UPDATE source SET a = 1",
        "TRUNCATE source",
        "SET datafusion.execution.batch_size = 1",
        "PREPARE p AS SELECT * FROM source",
        "BEGIN",
    ],
)
def test_a_query_that_does_not_only_read_is_refused(sql: str) -> None:
    assert "not supported" in refusal(sql) or "Unsupported" in refusal(sql)


@pytest.mark.parametrize("query", ["source", "(SELECT a FROM source)"])
def test_copy_is_refused_and_writes_nothing(tmp_path: Path, query: str) -> None:
    target = tmp_path / "out.parquet"

    assert "COPY" in refusal(f"COPY {query} TO '{target}'")
    assert not target.exists()


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELEC a FROM source", "SELEC"),
        ("SELECT a FROM source WHERE", "Expected"),
        ("", "No SQL statements"),
        ("SELECT a FROM source; SELECT a FROM source", "single SQL statement"),
        ("SELECT nope FROM source", "nope"),
        ("SELECT a FROM source WHERE nope > 1", "nope"),
        ("SELECT mixed FROM source", 'source."Mixed"'),
        ("SELECT a FROM nope", "no table 'nope'; tables: source"),
        ('SELECT a FROM source JOIN "It\'s" ON true', 'no table "It\'s"; tables: source'),
        ("SELECT a FROM elsewhere.nope", "elsewhere.nope"),
        ("SELECT nope(a) FROM source", "nope"),
        ("SELECT a FROM source WHERE a = $1", "$1"),
        ("SELECT a FROM source WHERE a = $value", "$value"),
        ("SELECT a FROM source WHERE text + 1 > tags", "sql"),
        ("SELECT 1", "must read the table 'source'; it reads none"),
        ("SELECT a AS x, b AS x FROM source", "x"),
    ],
)
def test_a_query_that_cannot_be_planned_is_refused_with_the_reason(sql: str, reason: str) -> None:
    assert reason in refusal(sql)


# -- nothing but the source ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        "'{path}'",
        '"{path}"',
        "'file://{path}'",
        "read_parquet('{path}')",
        "parquet_metadata('{path}')",
        "read_csv('/etc/passwd')",
        "'/etc/passwd'",
        "information_schema.tables",
        "information_schema.df_settings",
        "datafusion.public.other",
        "generate_series(1, 3)",
        "range(1, 3)",
    ],
)
def test_no_other_table_or_file_can_be_read(tmp_path: Path, table: str) -> None:
    path = tmp_path / "secret.parquet"
    write_parquet(path)

    refusal(f"SELECT * FROM {table.format(path=path)}")


def test_every_function_that_answers_differently_each_time_is_gone() -> None:
    context = SessionContext(SessionConfig().with_information_schema(True))
    routines = context.sql("SELECT * FROM information_schema.routines").to_pylist()
    volatile = {
        row["routine_name"]
        for row in routines
        if row["function_type"] == "SCALAR" and not row["is_deterministic"]
    }
    assert {"random", "now", "uuid", "current_date"} <= volatile

    for name in volatile:
        assert name in refusal(f"SELECT {name}() AS x FROM source")
        assert name in refusal(f"SELECT a FROM source WHERE {name}() IS NOT NULL")


@pytest.mark.parametrize("word", ["current_date", "current_timestamp", "current_time"])
def test_the_clock_words_of_sql_are_gone_too(word: str) -> None:
    assert word in refusal(f"SELECT {word} AS x FROM source")


# -- the shortcuts ---------------------------------------------------------------------------------


def shortcut(columns: Sequence[str] | None = None, filter: str | None = None) -> str:
    return query_text("", tuple(columns) if columns else None, filter)


def test_sql_is_taken_as_it_is() -> None:
    assert query_text("SELECT a FROM source", None, None) == "SELECT a FROM source"


def test_without_any_shortcut_everything_is_read() -> None:
    assert check(shortcut(), SCHEMA).schema.names == SCHEMA.names


def test_columns_are_kept_in_the_given_order() -> None:
    query = check(shortcut(["text", "a"]), SCHEMA)

    assert query.schema.names == ["text", "a"]
    assert query.keeps_every_row


@pytest.mark.parametrize(
    "name",
    ["Mixed", "UPPER", "sp ace", 'quo"te', "it's", "dot.ted", "select", "ünï", "1st", "a;b", "--"],
)
def test_columns_are_names_and_not_sql(tmp_path: Path, name: str) -> None:
    table = pa.table({"a": [1, 2], name: [3, 4], name.lower() + "_": [5, 6]})
    split = write_parquet(tmp_path / "a.parquet", table)

    query = check(shortcut([name]), table.schema)

    assert query.schema.names == [name]
    assert rows_of(split, query.sql, table.schema) == [{name: 3}, {name: 4}]


def test_names_that_differ_by_case_only_are_different_columns(tmp_path: Path) -> None:
    table = pa.table({"a": [1], "A": [2]})
    split = write_parquet(tmp_path / "a.parquet", table)

    sql = check(shortcut(["A", "a"], 'a = 1 AND "A" = 2'), table.schema).sql

    assert rows_of(split, sql, table.schema) == [{"A": 2, "a": 1}]


@pytest.mark.parametrize("name", ["nope", "mixed", "A", 'a" FROM source --', "*", "a, b", "a AS x"])
def test_an_unknown_column_is_refused(name: str) -> None:
    assert "No field named" in refusal(shortcut([name]))


def test_a_filter_keeps_the_rows_it_says(tmp_path: Path) -> None:
    split = write_parquet(tmp_path / "a.parquet")

    query = check(shortcut(["a"], "a < 3 OR \"Mixed\" = 990 OR text = 'row 7'"), SCHEMA)

    assert [row["a"] for row in rows_of(split, query.sql)] == [0, 1, 2, 7, 99]
    assert not query.keeps_every_row


@pytest.mark.parametrize(
    "filter",
    [
        "a > 1) ORDER BY (a",
        "a > 1) LIMIT (1",
        "a > 1) UNION SELECT * FROM source WHERE (a < 1",
        "a > 1); DROP TABLE source; SELECT (1",
        "a > 1; DELETE FROM source",
        "a IN (SELECT a FROM source)",
        "EXISTS (SELECT * FROM '/etc/passwd')",
        "sum(a) > 1",
        "row_number() OVER () > 1",
        "random() < 0.5",
        "a",
        "a >",
        "a > 1 --",
        "nope = 1",
    ],
)
def test_a_filter_that_is_more_than_a_condition_is_refused(filter: str) -> None:
    with pytest.raises(RequestError):
        check_query(shortcut(["a"], filter), {"source": SCHEMA}, is_shortcut=True)


def test_a_filter_cannot_reach_beyond_the_source(tmp_path: Path) -> None:
    split = write_parquet(tmp_path / "a.parquet")

    query = check(shortcut(["a"], "a < 3) OR (a = 5"), SCHEMA)

    assert [row["a"] for row in rows_of(split, query.sql)] == [0, 1, 2, 5]
    assert query.schema.names == ["a"]


@pytest.mark.parametrize(
    ("where", "conditions"),
    [
        ("a > 3 AND text = 'x'", [("a", ">", 3), ("text", "=", "x")]),
        ("a BETWEEN 2 AND 5", [("a", ">=", 2), ("a", "<=", 5)]),
        ("3 < a", [("a", ">", 3)]),
        ("a = 3 OR text = 'x'", []),
        ("a + 1 > 3", []),
        ("b < 2", []),  # of floats: NaN is larger than any number here
        ("a > 3 AND (b < 1 OR text = 'x')", [("a", ">", 3)]),
        ("abs(a) < 3 AND upper(text) = 'X' AND a < 9", [("a", "<", 9)]),
        ("a IN (1, 2) AND text LIKE 'x%' AND text IS NOT NULL AND NOT a = 3", []),
        ("CASE WHEN a > 1 THEN true ELSE false END AND a < 9", [("a", "<", 9)]),
    ],
)
def test_the_comparisons_that_every_kept_row_fulfils_are_known(
    where: str, conditions: list[tuple[str, str, object]]
) -> None:
    found = check(f"SELECT b FROM source WHERE {where}").conditions

    assert [(c.column, c.operator, c.value) for c in found] == conditions


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (pa.timestamp("ns"), "'1970-01-01T00:00:00.000000001'"),
        (
            pa.timestamp("us"),
            "arrow_cast(arrow_cast(9223372036854775807, 'Int64'), 'Timestamp(us)')",
        ),
        (pa.time64("ns"), "arrow_cast(arrow_cast(1, 'Int64'), 'Time64(ns)')"),
        (pa.duration("ns"), "arrow_cast(arrow_cast(1, 'Int64'), 'Duration(ns)')"),
        (pa.date32(), "arrow_cast(arrow_cast(2000000000, 'Int32'), 'Date32')"),
    ],
)
def test_a_comparison_with_a_time_that_python_cannot_hold_is_no_condition(
    dtype: pa.DataType, value: str
) -> None:
    schema = pa.schema({"at": dtype, "a": pa.int64()})

    found = check(f"SELECT a FROM source WHERE at > {value} AND a < 9", schema).conditions

    assert [(c.column, c.operator, c.value) for c in found] == [("a", "<", 9)]


def test_the_condition_on_a_renamed_column_is_that_of_the_table() -> None:
    sql = "SELECT x FROM (SELECT a AS x, text FROM source) q WHERE x > 5 AND text = 'y'"

    found = check(sql).conditions

    assert [(c.column, c.operator, c.value) for c in found] == [("a", ">", 5), ("text", "=", "y")]
