import random
from collections.abc import Iterator
from datetime import date

import duckdb
import pyarrow as pa
import pytest

from cache_protocol.errors import RequestError
from cache_server.sql.row_queries import (
    MAX_NAMES,
    MAX_OTHERS,
    MAX_SIGNS,
    MAX_TEXT_LENGTH,
    check_row_query,
    run_row_query,
)

ROWS = pa.RecordBatch.from_pydict(
    {
        "n": pa.array(range(10), pa.int64()),
        "price": pa.array([0.5 * n for n in range(10)], pa.float32()),
        "city": ["Oslo", None] * 5,
        "day": pa.array(range(10), pa.date32()),
        "tags": [[n] * (n % 3) for n in range(10)],
        "is_new": [n % 2 == 0 for n in range(10)],
    }
)


def run(expression: str, *where: str, lot: int = 4) -> list[object]:
    query = check_row_query(expression, where, ROWS.schema)
    rows = ROWS.select(query.schema.names)
    lots: Iterator[pa.RecordBatch] = (rows.slice(at, lot) for at in range(0, 10, lot))
    pieces = list(run_row_query(query, lots))
    assert {piece.type for piece in pieces} <= {query.result.field(0).type}
    return [value for piece in pieces for value in piece.to_pylist()]


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("n * 2", [2 * n for n in range(10)]),
        ("array_length(tags)", [n % 3 or None for n in range(10)]),
        ("city", ["Oslo", None] * 5),
        (
            "CASE WHEN price > 2 THEN 'dear' ELSE left(city, 1) END",
            ["O", None] * 2 + ["O"] + ["dear"] * 5,
        ),
        ("day", [date(1970, 1, 1 + n) for n in range(10)]),
        ("1", [1] * 10),
        ("left(md5(city), 2)", ["f4", None] * 5),
        ("n * n + n * n + n * n", [3 * n * n for n in range(10)]),  # a part that is shared
    ],
)
def test_an_expression_has_one_value_a_row_in_their_order(
    expression: str, values: list[object]
) -> None:
    assert [v or None for v in run(expression)] == [v or None for v in values]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("price > 1 AND city = 'Oslo'", [4, 6, 8]),
        ("city IS NULL", [1, 3, 5, 7, 9]),
        ("NOT city = 'Oslo'", []),
        ("is_new", [0, 2, 4, 6, 8]),
        ("day >= '1970-01-08'", [7, 8, 9]),
        ("n = 1 OR 9 = n", [1, 9]),
        ("1 = 1", list(range(10))),
        ("1 = 2", []),
        ("price = NULL OR n = 2", [2]),  # the optimiser drops the price
        (" OR ".join(f"n = {n}" for n in range(60)), list(range(10))),
    ],
)
def test_a_condition_gives_the_numbers_of_its_rows_over_all_lots(
    where: str, rows: list[int]
) -> None:
    assert run("", where) == rows == run("n", where) == run("", where, lot=10)


def test_a_row_must_fulfil_all_conditions() -> None:
    assert run("", "n = 1 OR n = 2", "n = 2 OR n = 3") == [2]


def test_an_expression_is_only_computed_for_the_rows_of_its_condition() -> None:
    assert run("12 / n", "n > 7") == [1, 1]


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("sum(price) > 1", "an aggregate"),
        ("count(*) > 1", "an aggregate"),
        ("row_number() OVER () > 1", "a window function"),
        ("n > (SELECT max(n) FROM source)", "a query"),
        ("n IN (SELECT 1)", "InSubquery"),
        ("n IN (SELECT n FROM other)", "no table 'other'"),
        ("unnest(tags) = 1", "unnest"),
        ("random() > 0.5", "'random'"),
        ("now() > day", "'now'"),
        ("nope > 1", "nope"),
        ("n > ", "Expected"),
        ("n > 1), (n > 2", "parenthesis without its partner"),
        ("n > 1, n > 2", "tuples"),
        ("n > 1) OR (n > 2", "parenthesis without its partner"),
        ("n > 1; DROP TABLE source", "Expected"),
        ("n > 1) FROM source WHERE (n > 2", "parenthesis"),
        ("n > $1", "$1"),
        ("price > 1 AND (city SIMILAR TO 'a')", "SIMILAR TO"),
        ("n = 1 OR" * MAX_TEXT_LENGTH, f"{MAX_TEXT_LENGTH} characters"),
        ("(" * 500 + "n" + ")" * 500, "RecursionLimit"),
    ],
)
@pytest.mark.parametrize("kind", ["expression", "where"])
def test_what_is_not_computed_from_one_row_is_refused_by_name(
    kind: str, expression: str, named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_row_query(
            "" if kind == "where" else expression, (expression,) * (kind == "where"), ROWS.schema
        )

    assert str(caught.value).startswith(kind) and named in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("expression", "where", "named"),
    [
        ("", ("n > 0",) * 20_000, f"where must have at most {MAX_TEXT_LENGTH} characters in all"),
        (
            "n",
            ("n>0",) * 65,
            f"expression and where must have at most {MAX_OTHERS} other operators",
        ),
        ("n" + "+n" * 33, (), f"expression must have at most {MAX_SIGNS} of + - * in all, got 33"),
        ("- " * 17 + "n", ("- " * 17 + "n > 0",), f"at most {MAX_SIGNS} of + - *"),
        ("n" + "::int" * 200, (), f"at most {MAX_OTHERS} other operators in all, got 200"),
        ("n" + " IS NULL" * 200, (), f"at most {MAX_OTHERS} other operators in all, got 200"),
        ("price IN (" + "n, " * 300 + "n)", (), f"at most {MAX_NAMES} names in all, got 302"),
        ('price IN ("n' + '", "n' * 300 + '")', (), f"at most {MAX_NAMES} names"),
    ],
)
def test_what_would_take_long_to_plan_is_refused_with_limit_and_value(
    expression: str, where: tuple[str, ...], named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_row_query(expression, where, ROWS.schema)

    assert named in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("n" + "+n" * MAX_SIGNS, MAX_SIGNS + 1),
        ("n IN (" + ", ".join(str(-n) for n in range(-1, 500)) + ")", True),
        ("city IN (" + ", ".join(f"'a+b-c {n}'" for n in range(250)) + ")", None),
        ("CASE " + " ".join(f"WHEN n = {n} THEN {n}" for n in range(100)) + " END", 1),
    ],
)
def test_long_expressions_within_the_limits_are_computed(expression: str, value: object) -> None:
    assert run(expression, lot=10)[1] == value


@pytest.mark.parametrize(
    "expression",
    [
        "arrow_cast(city, 'Dictionary(Int32, Utf8)')",
        "[arrow_cast(city, 'Dictionary(Int32, Utf8)')]",
        "named_struct('a', arrow_cast(city, 'Dictionary(Int32, Utf8)'))",
    ],
)
def test_dictionaries_are_refused_because_flight_would_not_send_them(expression: str) -> None:
    with pytest.raises(RequestError, match=r"dictionary.* leave that cast out"):
        check_row_query(expression, (), ROWS.schema)


@pytest.mark.parametrize("where", ["n", "city", "NULL"])
def test_a_condition_is_true_or_false(where: str) -> None:
    with pytest.raises(RequestError, match="must be true or false"):
        check_row_query("", (where,), ROWS.schema)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("12 / n", "Divide by zero"),
        ("CAST(city AS INT)", "Cannot cast string 'Oslo'"),
        ("(n + 9223372036854775000) * 2", "cannot hold"),
    ],
)
def test_a_row_without_a_right_value_is_an_error_that_quotes_the_expression(
    expression: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        run(expression)

    assert expression in str(caught.value)


def test_conditions_with_lists_keep_the_rows_that_duckdb_keeps() -> None:
    draw = random.Random(0)

    def condition(depth: int) -> str:
        if depth == 0:
            column = draw.choice("xxxxy")
            values = draw.choices(["1", "2", "3", "4", "NULL", "y"], [4, 4, 4, 4, 1, 1], k=4)
            if draw.random() < 0.4:
                return f"{column} {draw.choice(['=', '<>'])} {values[0]}"
            listed = ", ".join(values[: draw.randint(1, 4)])
            return f"{column} {draw.choice(['', 'NOT '])}IN ({listed})"
        joined = ["({}) AND ({})", "({}) OR ({})"]
        form = draw.choice(3 * joined + ["NOT ({})", "({}) IS NULL", "CASE WHEN {} THEN {} END"])
        return form.format(*(condition(depth - 1) for _ in range(form.count("{}"))))

    rows = pa.table(
        {"x": pa.array([None, 0, 1, 2, 3, 4], pa.int32()), "y": pa.array([1, 1, None, 2, 3, 3])}
    )
    conditions = [condition(draw.choice([2, 3])) for _ in range(80)]
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        kept = connection.execute(f"SELECT {', '.join(conditions)} FROM rows").fetchall()

    for text, is_kept in zip(conditions, zip(*kept, strict=True), strict=True):
        query = check_row_query("", (text,), rows.schema)
        pieces = run_row_query(query, rows.select(query.schema.names).to_batches())
        found = [number for piece in pieces for number in piece.to_pylist()]
        assert found == [number for number, value in enumerate(is_kept) if value], text
