"""What DataFusion computes wrongly is mended, or refused where the rows show it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from datafusion import SessionContext

from cache_protocol.errors import LoadError, RequestError
from cache_server.source.pinned import PinnedTable
from cache_server.sql.loader import read_split, run_whole
from cache_server.sql.queries import query_text
from tests.query_source import check, local, rows_of, write_parquet

Kept = Callable[[str], list[int]]  # a filter -> the rows that it keeps

_TIMES = [datetime(1994, 1, 1), datetime(2024, 12, 31, 23, 59, 59, 999_000), datetime(1950, 5, 5)]
_FAR = [*_TIMES[:2], datetime(3000, 5, 5)]
TABLE = pa.table(
    {
        "row": [0, 1, 2, 3],
        "ns": pa.array([*_TIMES, None], pa.timestamp("ns")),
        "zoned": pa.array([*_TIMES, None], pa.timestamp("ns", "Europe/Berlin")),
        "t_s": pa.array([*_TIMES, None]).cast(pa.timestamp("s"), safe=False),
        "t_ms": pa.array([*_TIMES, None], pa.timestamp("ms")),
        "us": pa.array([*_TIMES, None], pa.timestamp("us")),
        "far": pa.array([*_FAR, None], pa.timestamp("ms")),
        "x": [-0.0, 0.0, 5.0, None],
        "f": pa.array([-0.0, 0.0, 5.0, None], pa.float32()),
        "plain": [1.0, 0.0, 5.0, None],
        "nan": [float("nan"), 1.0, 2.0, None],
        "inf": [float("inf"), 1.0, 2.0, None],
        "large": pa.array([2_000_000_000, 2_000_000_000, 1, None], pa.int32()),
        "small": pa.array([1, 2, 3, None], pa.int32()),
        "least": pa.array([-(2**31), 1, 2, None], pa.int32()),
        "byte": pa.array([200, 200, 1, None], pa.uint8()),
        "path": ["C:temp", "C:\\temp", "", None],
        "wide": pa.array([2**62, 1, 2, None]),
    }
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    split = write_parquet(tmp_path_factory.mktemp("exact") / "a.parquet", TABLE)

    def rows(filter: str) -> list[int]:
        sql = check(query_text("", ("row",), filter), TABLE.schema).sql
        return [row["row"] for row in rows_of(split, sql, TABLE.schema)]

    return rows


@pytest.mark.parametrize(
    ("filter", "rows"),
    [
        ("EXTRACT(YEAR FROM ns) < 9999", [0, 1, 2]),
        ("EXTRACT(YEAR FROM ns) <= 2262", [0, 1, 2]),
        ("EXTRACT(YEAR FROM ns) BETWEEN 1900 AND 2999", [0, 1, 2]),
        ("EXTRACT(YEAR FROM ns) <> 9999", [0, 1, 2]),
        ("EXTRACT(YEAR FROM ns) NOT IN (1994, 9999)", [1, 2]),
        ("date_part('year', ns) >= 1000", [0, 1, 2]),
        ("CASE WHEN date_part('year', ns) >= 1000 THEN true ELSE false END", [0, 1, 2]),
        ("EXTRACT(YEAR FROM zoned) < 9999", [0, 1, 2]),
        ("EXTRACT(YEAR FROM zoned) = 1994", [0]),
        ("EXTRACT(YEAR FROM ns) = 1994", [0]),
    ],
)
def test_years_that_nanoseconds_cannot_hold_are_compared(
    kept: Kept, filter: str, rows: list[int]
) -> None:
    assert kept(filter) == rows


@pytest.mark.parametrize(
    ("filter", "rows"),
    [
        ("t_ms < '2024-12-31 23:59:59.999999'", [0, 1, 2]),
        ("t_ms >= '2024-12-31 23:59:59.999999'", []),
        ("t_ms <= '2024-12-31 23:59:59.999'", [0, 1, 2]),
        ("t_ms IN ('2024-12-31 23:59:59.999999', '1994-01-01')", [0]),
        ("t_ms BETWEEN '1994-01-01 00:00:00.0001' AND '2100-01-01'", [1]),
        ("t_s < TIMESTAMP '2024-12-31 23:59:59.5'", [0, 1, 2]),
        ("us = '1994-01-01 00:00:00.000000001'", []),
        ("far < '2024-12-31 23:59:59.999'", [0]),
        ("CAST(CAST(t_ms AS TIMESTAMP) AS DATE) = '1994-01-01'", [0]),
        ("CAST(t_ms AS VARCHAR) LIKE '1994%'", [0]),
    ],
)
def test_a_time_of_a_finer_unit_than_its_column_is_not_cut(
    kept: Kept, filter: str, rows: list[int]
) -> None:
    assert kept(filter) == rows


@pytest.mark.parametrize(
    ("filter", "rows"),
    [
        ("small NOT IN (1) OR small NOT IN (2, 3)", [0, 1, 2]),
        ("NOT (small IN (1, 2) AND small IN (3))", [0, 1, 2]),
        ("NOT (small IN (1, 2) AND small NOT IN (1, 2))", [0, 1, 2]),
        ("small IN (1, 2) AND small NOT IN (1, NULL)", []),
        ("(small IN (1, 2) AND small NOT IN (1, NULL)) IS NULL", [1, 3]),
        ("NOT ((small = 1 OR small = 2) AND (3 = small OR small = 4))", [0, 1, 2]),
        ("(row < 9 AND small NOT IN (1, 4)) OR (row < 9 AND small NOT IN (2, 3))", [0, 1, 2]),
        ("NOT ((small IN (1, 2)) = true AND (small IN (3)) = true)", [0, 1, 2]),
        ("CAST(small AS BIGINT) NOT IN (1, 4) OR small NOT IN (2, 3)", [0, 1, 2]),
    ],
)
def test_two_lists_for_one_value_keep_their_nulls(kept: Kept, filter: str, rows: list[int]) -> None:
    assert kept(filter) == rows


@pytest.mark.parametrize(
    ("filter", "rows"),
    [
        (r"path ~ 'C:\\temp'", [1]),
        (r"path !~* '^c:[\\]TEMP$'", [0, 2]),
        (r"regexp_like(path, '^C:\\')", [1]),
        ("NOT (path ~ '.*')", []),
        ("regexp_like(path, '.*') IS NULL", [3]),
        (r"path ~ '^C:\w' AND coalesce(small, 0) > 0", [0]),
    ],
)
def test_a_regular_expression_is_not_read_as_a_pattern_of_like(
    kept: Kept, filter: str, rows: list[int]
) -> None:
    assert kept(filter) == rows


@pytest.mark.parametrize(
    "wrongly_simplified", ["EXTRACT(YEAR FROM ns) < 9999", "(row IN (1, 2) OR row NOT IN (1, 3))"]
)
def test_a_query_that_can_run_neither_way_is_refused_before_the_load(
    kept: Kept, wrongly_simplified: str
) -> None:
    with pytest.raises(RequestError, match=r"write CASE WHEN \.\.\. IS NULL instead of coalesce"):
        kept(f"{wrongly_simplified} AND coalesce(small, 0) > 0")


@pytest.mark.parametrize(
    ("filter", "problem"),
    [
        *(
            (filter, r"takes -0.0 and 0.0 as different: write .* \+ 0.0 instead of")
            for filter in (
                "x IN (0.0, 1.0, 2.0, 3.0)",
                "x NOT IN (0.0, 1.0, 2.0, 3.0)",
                "f IN (0.0, 1.0)",
                "x IN (plain * 0.0, 7, 8, 9)",
                "CASE x WHEN 0 THEN true ELSE false END",
                "nullif(x, 0) IS NULL",
            )
        ),
        ("large * large > 0", r"source.large \* source.large has values that int32 cannot hold"),
        ("large + large > 0", "int32 cannot hold: write CAST"),
        ("byte + byte > 144", "uint8 cannot hold"),
        ("byte - byte * byte > 0", "uint8 cannot hold"),
        ("wide * 4 > 0", "int64 cannot hold"),
        ("-least < 0", "int32 cannot hold"),
        ("wide < 9223372036854775807 + 1", r"9223372036854775807 \+ 1 has values that int64"),
        ("date_bin(INTERVAL '1 day', far) IS NOT NULL", "date_bin of source.far gives NULL"),
        ("greatest(-nan, 1.5) = -nan", "takes a NaN with a minus sign"),
        ("-nan < 0", "takes a NaN with a minus sign"),
        ("inf * (inf - inf) > 1", "takes a NaN with a minus sign"),
    ],
)
def test_a_load_that_meets_a_wrong_value_fails_with_its_expression(
    kept: Kept, filter: str, problem: str
) -> None:
    with pytest.raises(LoadError, match=rf"cannot load .*a\.parquet: .*{problem}"):
        kept(filter)


@pytest.mark.parametrize(
    ("filter", "rows"),
    [
        ("plain IN (0.0, 1.0, 2.0, 3.0)", [0, 1]),
        ("x + 0.0 IN (0.0, 1.0, 2.0, 3.0)", [0, 1]),
        ("x IN (5.0, 1.0, 2.0, 3.0)", [2]),
        ("CASE plain WHEN 0 THEN true ELSE false END", [1]),
        ("x = 0 AND x IN (0.0)", [0, 1]),
        ("small * small > 1", [1, 2]),
        ("CAST(large AS DOUBLE) * large > 1", [0, 1]),
        ("CAST(large AS DECIMAL(38, 0)) * large > 1", [0, 1]),
        ("byte * 2 > 255 AND wide + 1 > 0 AND -small < 0", [0, 1]),
        ("date_bin(INTERVAL '1 day', us) = '1994-01-01'", [0]),
        ("nanvl(inf - inf, CAST('NaN' AS DOUBLE)) > 1", [0]),
        ("coalesce(small, 0) < 3 AND (small = 2 OR small IN (1, 3)) AND row IN (0, 1)", [0, 1]),
        ("coalesce(small, 0) > 1 AND small <> 1 AND small NOT IN (3, 4)", [1]),
        (
            "coalesce(small, 0) < 9 AND "
            "CASE WHEN small IN (1, 2) THEN 'a' WHEN small IN (3) THEN 'b' END = 'a'",
            [0, 1],
        ),
        ("coalesce(small, 0) > 1000 * 1000 - 999999", [1, 2]),
        ("row = row OR large = large", [0, 1, 2, 3]),  # the optimiser drops the columns
    ],
)
def test_harmless_rows_and_the_advised_sql_load(kept: Kept, filter: str, rows: list[int]) -> None:
    assert kept(filter) == rows


def test_the_expressions_of_a_whole_query_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "source.arrow"
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE)

    with pytest.raises(LoadError, match="int32 cannot hold"):
        list(run_whole("SELECT sum(large * large) AS s FROM source", {"source": path}))
    (batch,) = run_whole("SELECT sum(small * small) AS s FROM source", {"source": path})
    assert batch.to_pydict() == {"s": [14]}


@pytest.mark.parametrize("filter", [None, "c7 > 1", "c7 > 1 AND c8 < c9"])
@pytest.mark.parametrize("columns", [None, tuple(f"c{n}" for n in range(199, 0, -1))])
def test_a_wide_selection_is_planned_without_naming_its_columns_in_sql(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    filter: str | None,
    columns: tuple[str, ...] | None,
) -> None:
    table = pa.table({f"c{n}": [0, n + 1] for n in range(200)})
    split = write_parquet(tmp_path / "a.parquet", table)
    planned: list[str] = []
    plan = SessionContext.sql_with_options
    monkeypatch.setattr(
        SessionContext,
        "sql_with_options",
        lambda self, sql, *rest: planned.append(sql) or plan(self, sql, *rest),
    )

    query = check(query_text("", columns, filter), table.schema)
    read = PinnedTable("source", "parquet", table.schema, columns=query.columns["source"])
    rows = [row for batch in read_split(local(split), query.sql, read) for row in batch.to_pylist()]

    names = list(columns or table.column_names)
    expected = table.select(names).slice(0 if filter is None else 1).to_pylist()
    assert rows == expected and query.schema.names == names
    assert all(len(sql) < 100 and "*" not in sql for sql in planned)


_ZONED = pa.table(
    {
        "row": range(3),
        "lima": pa.array(
            [757_382_400_000, 757_400_400_000, 638_942_401_000], pa.timestamp("ms", "America/Lima")
        ),
        "t": pa.array([79_200_000, 133_200_000, 90_000_000], pa.timestamp("ms")),
    }
)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("EXTRACT(YEAR FROM lima) = 1994", [1]),
        ("EXTRACT(YEAR FROM lima) < 1994", [0, 2]),
        ("EXTRACT(YEAR FROM lima) IN (1993, 1995)", [0]),
        ("EXTRACT(YEAR FROM lima) BETWEEN 990 + 1000 AND 1993", [0, 2]),
        ("EXTRACT(YEAR FROM lima) = EXTRACT(YEAR FROM lima)", [0, 1, 2]),
        ("CAST(t AS TIME) > TIME '22:30:00'", []),
        ("CAST(t AS TIME) < TIME '13:30:00'", [1, 2]),
        ("arrow_cast(t, 'Time32(Second)') = arrow_cast('01:00:00', 'Time32(Second)')", [2]),
    ],
)
def test_clocks_that_jump_or_begin_anew_lose_no_row(
    tmp_path: Path, condition: str, rows: list[int]
) -> None:
    split = write_parquet(tmp_path / "a.parquet", _ZONED)
    sql = check(f"SELECT row FROM source WHERE {condition}", _ZONED.schema).sql

    assert [row["row"] for row in rows_of(split, sql, _ZONED.schema)] == rows


@pytest.mark.parametrize(
    "condition",
    [
        *("EXTRACT(YEAR FROM lima) = 2000", "EXTRACT(MONTH FROM lima) = 1"),
        *("EXTRACT(YEAR FROM lima) = row", "EXTRACT(YEAR FROM t) = 1994"),
    ],
)
def test_other_years_and_parts_may_stand_beside_coalesce(condition: str) -> None:
    check(f"SELECT row FROM source WHERE {condition} AND coalesce(row, 0) > 1", _ZONED.schema)


def test_a_year_that_begins_as_clocks_jump_is_named_beside_coalesce() -> None:
    sql = "SELECT row FROM source WHERE EXTRACT(YEAR FROM lima) = 1994 AND coalesce(row, 0) > 1"

    with pytest.raises(RequestError, match=r"coalesce cannot be combined .* clocks of a zone jump"):
        check(sql, _ZONED.schema)


@pytest.mark.parametrize("time", ["TIMESTAMP '1994-01-01 00:30:00'", "'1990-03-31 23:00:01'"])
def test_a_local_time_that_comes_never_or_twice_is_named(time: str) -> None:
    with pytest.raises(RequestError, match=r"never or twice: write it as a text with its offset"):
        check(f"SELECT row FROM source WHERE lima = {time}", _ZONED.schema)


def test_a_text_with_an_offset_tells_two_equal_local_times_apart(tmp_path: Path) -> None:
    times = pa.table(
        {
            "row": range(2),
            "lima": pa.array(
                [638_938_801_000, 638_942_401_000], pa.timestamp("ms", "America/Lima")
            ),
        }
    )
    split = write_parquet(tmp_path / "a.parquet", times)
    sql = "SELECT row FROM source WHERE lima = '1990-03-31T23:00:01-05:00'"

    assert rows_of(split, check(sql, times.schema).sql, times.schema) == [{"row": 1}]
