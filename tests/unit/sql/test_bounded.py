"""Which functions are bounded; the lists of DataFusion itself are the table."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pyarrow as pa
import pytest
from datafusion import SessionConfig, SessionContext

from cache_protocol.errors import CacheError, RequestError
from cache_server.sql import bounded, sql_process
from cache_server.sql.bounded import AGGREGATES, BOUNDED, SUMMING, first_unbounded, is_unbounded
from cache_server.sql.row_queries import check_row_query, row_query_batches
from cache_server.sql.session import TABLE_FUNCTIONS, open_session
from cache_server.sql.sql_frames import Request
from cache_server.sql.sql_process import LimitError, Limits, value_of

ROWS = pa.RecordBatch.from_pydict(
    {
        "text": ["ß" * 500, "%c" * 250],
        "n": pa.array([7, 2_000_000_000], pa.int64()),
        "x": pa.array([0.5, 1e300], pa.float64()),
        "tags": [[1] * 300, [2]],
        "words": [["a"] * 300, ["b"]],
        "day": pa.array([0, 20_000], pa.date32()),
        "at": pa.array([0, 10**15], pa.timestamp("us")),
        "pair": [{"a": 1, "b": "x"}] * 2,
    }
)
ARGUMENTS = (*ROWS.schema.names, "'day'", "2000000000", "'x'")
TABLES = {"source": ROWS.schema, "other": ROWS.schema}


@cache
def routines() -> dict[str, set[str]]:
    """The names that DataFusion lists, by kind; functions also under their aliases."""
    context = SessionContext(SessionConfig().with_information_schema(True))
    listed = context.sql("SELECT routine_name, function_type FROM information_schema.routines")
    found: dict[str, set[str]] = {}
    for routine in listed.to_pylist():
        found.setdefault(routine["function_type"], set()).add(routine["routine_name"])
    return found


@cache
def canonical(name: str) -> str:
    """The name of a function in a plan."""
    return str(SessionContext().udf(name).name)


@cache
def calls(name: str, most: int) -> list[str]:
    """Some calls of a function that can be planned."""
    context = open_session(1)
    context.register_record_batches("source", [[ROWS]])

    def can_plan(call: str) -> bool:
        try:
            context.sql(f"SELECT {call} FROM source").logical_plan()
        except BaseException:  # DataFusion raises bare Exception, or panics
            return False
        return True

    def every() -> Iterator[str]:
        draw = random.Random(0)
        yield f"{name}()"
        yield from (f"{name}({given})" for given in ARGUMENTS)
        for arity in (2, 3):
            every = list(itertools.product(ARGUMENTS, repeat=arity))
            sample = sorted(draw.sample(every, 100), key=lambda given: "2000000000" not in given)
            yield from (f"{name}({', '.join(given)})" for given in sample)
        yield from (f"{name}(tags, n, n)", f"{name}(tags, n, n, n)")

    return list(itertools.islice(filter(can_plan, every()), most))


def test_every_name_of_the_lists_is_a_function_of_this_datafusion() -> None:
    listed = routines()
    assert {canonical(name) for name in listed["SCALAR"]} >= BOUNDED
    assert listed["AGGREGATE"] | listed["WINDOW"] >= AGGREGATES
    assert listed["TABLE"] == set(TABLE_FUNCTIONS)
    assert set().union(*listed.values()) == {n.lower() for n in set().union(*listed.values())}


def test_every_function_outside_the_list_is_refused_by_name() -> None:
    missing = {canonical(name) for name in routines()["SCALAR"]} - BOUNDED
    tried = {name: calls(name, 1) for name in sorted(missing)}
    without_calls = {name for name, found in tried.items() if not found}
    # These are taken away for other reasons, or take other arguments.
    assert without_calls <= {
        *("now", "current_date", "current_time", "random", "uuid", "file_row_index"),
        *("input_file_name", "arrow_field", "arrow_metadata", "with_metadata"),
    }
    for name, (call,) in ((n, c) for n, c in tried.items() if c):
        with pytest.raises(RequestError, match=f"must not use {name}: .*`sql` of the load"):
            check_row_query(call, (), ROWS.schema)
        assert is_unbounded(f"SELECT {call} AS c FROM source", {"source": ROWS.schema})


def test_no_function_of_the_list_gives_more_than_some_times_its_arguments() -> None:
    limits = Limits(512 << 20, 20)
    most = ROWS.nbytes * 40
    ran = 0
    for name in sorted(BOUNDED):
        for call in calls(name, 2):
            with sql_process.lease() as process:
                try:
                    check = Request(check_row_query, (call, (), ROWS.schema), {}, 512 << 20)
                    query = value_of(process.run(check, limits))
                    lots = [ROWS.select(query.schema.names)]
                    run = Request(row_query_batches, (query,), {}, 512 << 20, takes_lots=True)
                    batches = list(process.run(run, limits, lots=lots))
                except CacheError:  # values that the function refuses
                    continue
                except LimitError as error:
                    pytest.fail(f"{call} {error}")
            assert sum(batch.nbytes for batch in batches) < most, call
            ran += 1
    assert ran > 120


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT upper(text) || 'x', n + 1, CAST(n AS TEXT) FROM source WHERE text LIKE 'a%'", ""),
        ("SELECT CASE WHEN n > 1 THEN text END, tags[1], n IN (1, 2) FROM source", ""),
        ("SELECT count(*), max(text), avg(n) FROM source GROUP BY lower(text)", ""),
        ("SELECT row_number() OVER (ORDER BY n), lag(text) OVER (ORDER BY n) FROM source", ""),
        ("SELECT n FROM source WHERE n IN (SELECT n FROM other WHERE n > 1)", ""),
        ("SELECT s.n FROM source s JOIN other o ON s.n = o.n AND lower(o.text) = s.text", ""),
        ("SELECT unnest(tags) FROM source", ""),
        ("SELECT DISTINCT n FROM source UNION ALL SELECT n FROM other", ""),
        ("SELECT CAST([n, n, n] AS BIGINT[3]) FROM source", ""),
        ("SELECT n FROM source LIMIT 3", ""),
        ("SELECT text AS length FROM (SELECT rpad(text, 9) AS text FROM source)", "rpad"),
        ("SELECT text || text AS text FROM (SELECT text || text AS text FROM source)", "again"),
        ("SELECT concat(text, text) FROM (SELECT [text] || [text] AS text FROM source)", "again"),
        (f"SELECT concat({', '.join(['text'] * 300)}) FROM source", "again"),
        ("SELECT CAST([n] AS BIGINT[1000000000]) FROM source", "fixed_size_list"),
        ("SELECT TRY_CAST([n] AS BIGINT[1000000000]) FROM source", "fixed_size_list"),
        ("SELECT arrow_cast([[n]], 'List(FixedSizeList(999, Int64))') FROM source", "fixed_size"),
        ("SELECT arrow_cast(text, 'FixedSizeBinary(2147483647)') FROM source", "fixed_size_binary"),
        ("SELECT count(*) FROM source GROUP BY repeat(text, 9)", "repeat"),
        ("SELECT string_agg(text, ',') FROM source", "string_agg"),
        ("SELECT sum(n) FILTER (WHERE length(repeat(text, 9)) > 1) FROM source", "repeat"),
        ("SELECT max(n ORDER BY repeat(text, 9)) FROM source", "repeat"),
        ("SELECT array_agg(n) OVER () FROM source", "array_agg"),
        ("SELECT rank() OVER (ORDER BY repeat(text, 9)) FROM source", "repeat"),
        ("SELECT n FROM source ORDER BY repeat(text, 9)", "repeat"),
        ("SELECT n FROM source LIMIT length(repeat('x', 9))", "repeat"),
        ("SELECT DISTINCT ON (repeat(text, 9)) n FROM source", "repeat"),
        ("SELECT s.n FROM source s JOIN other o ON s.n = length(repeat(o.text, 9))", "repeat"),
        ("SELECT n FROM source WHERE n IN (SELECT length(lpad(text, 9)) FROM other)", "lpad"),
        ("SELECT (SELECT max(lpad(text, 9)) FROM other) FROM source", "lpad"),
        ("SELECT n FROM source WHERE EXISTS (SELECT 1 FROM other ORDER BY lpad(text, 9))", "lpad"),
        ("SELECT n FROM source WHERE n = ANY (SELECT n FROM other)", "SetComparison"),
        ("VALUES (repeat('x', 9))", "repeat"),
        (
            "WITH RECURSIVE r AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM r) SELECT a FROM r",
            "RecursiveQuery",
        ),
    ],
)
def test_the_plan_as_written_says_what_is_unbounded(sql: str, found: str) -> None:
    context = open_session(1)
    for name in TABLES:
        context.register_record_batches(name, [[ROWS]])

    named = first_unbounded(context.sql(sql).logical_plan(), context)

    assert bool(named) == bool(found) and found in named
    assert is_unbounded(sql, TABLES) == bool(found)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT * FROM source", False),
        ("SELECT n FROM source WHERE n > 3", False),
        ("SELECT nope FROM source", False),
        ("SELECT n FROM source WHERE text ~ 'a+'", False),
        ("SELECT n FROM source WHERE 'aaa' ~ '(a{0,100}){0,100}'", True),
        ("SELECT levenshtein('a', 'b') FROM source", True),
        ("SELECT n, value FROM source, range(3)", True),
        ("SELECT n FROM source, generate_series(length(repeat('x', 2000000000)))", True),
    ],
)
def test_what_is_computed_while_it_is_planned_runs_apart(sql: str, expected: bool) -> None:
    assert is_unbounded(sql, {"source": ROWS.schema}) == expected


def test_the_groups_of_the_list_have_no_function_twice() -> None:
    groups = [
        bounded._NUMBERS, bounded._TIMES, bounded._OF_TEXT, bounded._OF_A_LIST, bounded._PARTS,
        bounded._SAME_NUMBER, SUMMING,
    ]  # fmt: skip
    assert sum(map(len, groups)) == len(BOUNDED)
