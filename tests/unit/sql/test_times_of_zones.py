"""Times of zones are compared as moments; a time without a zone does not meet one silently."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.errors import RequestError
from cache_server.sql.loader import run_whole
from cache_server.sql.queries import check_query
from cache_server.sql.row_queries import check_row_query, run_row_query
from tests.query_source import check, rows_of, whole

_ZONES = {
    "utc": "UTC",
    "york": "America/New_York",
    "berlin": "Europe/Berlin",
    "nepal": "Asia/Kathmandu",
    "west": "-05:00",
    "naive": None,
}
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Beside the hours that New York and Berlin leave out or show twice.
_MOMENTS = [
    int(datetime(*day, hour, tzinfo=UTC).timestamp())
    for day in [(2024, 3, 10), (2024, 3, 31), (2024, 10, 27), (2024, 11, 3)]
    for hour in (0, 1, 5, 6, 7)
]
_COLUMNS = [f"{name}_{unit}" for name in _ZONES for unit in _UNITS]


def _moments_of(column: str) -> list[int]:
    """The same moments in all columns, each in another order."""
    first = _COLUMNS.index(column)
    return [*_MOMENTS[first:], *_MOMENTS[:first]] if first < len(_MOMENTS) else _MOMENTS[::-1]


def _table() -> pa.Table:
    columns: dict[str, pa.Array] = {"row": pa.array(range(len(_MOMENTS)), pa.int64())}
    for column in _COLUMNS:
        name, unit = column.split("_")
        values = [moment * _UNITS[unit] for moment in _moments_of(column)]
        columns[column] = pa.array(values, pa.timestamp(unit, _ZONES[name]))
    columns["day"] = pa.array([moment // 86_400 for moment in _MOMENTS], pa.date32())
    return pa.table(columns)


TABLE = _table()
_OPERATORS: dict[str, Callable[[int, int, int], bool]] = {
    "{x} = {a}": lambda x, a, b: x == a,
    "{a} <> {x}": lambda x, a, b: x != a,
    "{x} < {a}": lambda x, a, b: x < a,
    "{x} >= {a}": lambda x, a, b: x >= a,
    "{x} IS NOT DISTINCT FROM {a}": lambda x, a, b: x == a,
    "{x} BETWEEN {a} AND {b}": lambda x, a, b: a <= x <= b,
    "{x} IN ({a}, {b})": lambda x, a, b: x in (a, b),
    "CASE {x} WHEN {a} THEN true WHEN {b} THEN true END": lambda x, a, b: x in (a, b),
    "nullif({a}, {x}) IS NULL": lambda x, a, b: a == x,
    "greatest({x}, {a}) = {a}": lambda x, a, b: a >= x,
    "array_has([{a}, {b}], {x})": lambda x, a, b: x in (a, b),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[int]]:
    """A condition -> the rows that a load keeps, which are those of a view."""
    path = tmp_path_factory.mktemp("zones") / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=3)  # so that bounds of row groups decide
    split = whole(path)

    def rows(condition: str) -> list[int]:
        sql = check(f"SELECT row FROM source WHERE {condition}", TABLE.schema).sql
        loaded = [row["row"] for row in rows_of(split, sql, TABLE.schema)]
        query = check_row_query("", (condition,), TABLE.schema)
        lots = TABLE.select(query.schema.names).to_batches()
        viewed = [row for piece in run_row_query(query, lots) for row in piece.to_pylist()]
        assert loaded == viewed, condition
        return loaded

    return rows


def _literal(rng: random.Random, moment: int) -> str:
    hours = rng.choice([-5, 0, 2])
    wall = datetime.fromtimestamp(moment, timezone(timedelta(hours=hours))).replace(tzinfo=None)
    offset = f"{'-' if hours < 0 else '+'}{abs(hours):02}:00"
    form = rng.choice(
        ["TIMESTAMPTZ '{} {}'", "to_timestamp('{}{}')", "CAST('{}{}' AS TIMESTAMPTZ)"]
    )
    return form.format(wall, offset)


def _drawn(rng: random.Random, columns: Sequence[str]) -> tuple[str, list[int]]:
    """A condition, and the rows that Python keeps."""
    template, keeps = rng.choice(list(_OPERATORS.items()))
    x, texts, values = rng.choice(columns), [], []
    for _ in range(2):
        if rng.random() < 0.5:
            texts.append(rng.choice(columns))
            values.append(_moments_of(texts[-1]))
        else:
            moment = rng.choice(_MOMENTS)
            texts.append(_literal(rng, moment))
            values.append([moment] * len(_MOMENTS))
    rows = enumerate(zip(_moments_of(x), *values, strict=True))
    return template.format(x=x, a=texts[0], b=texts[1]), [n for n, row in rows if keeps(*row)]


@pytest.mark.parametrize("names", [["utc", "york", "berlin", "nepal", "west"], ["utc", "naive"]])
def test_times_are_compared_as_moments(kept: Callable[[str], list[int]], names: list[str]) -> None:
    rng = random.Random(7)
    columns = [column for column in _COLUMNS if column.split("_")[0] in names]
    drawn = [_drawn(rng, columns) for _ in range(80)]

    found = [(sql, kept(sql), rows) for sql, rows in drawn]
    wrong = [f"{sql}: {got}, not {rows}" for sql, got, rows in found if got != rows]

    assert not wrong, "\n".join(wrong)


_MIXED = [
    *("york_us = naive_us", "naive_s <= berlin_ns", "york_s = TIMESTAMP '2024-03-10 01:00:00'"),
    *("west_ms BETWEEN utc_s AND naive_s", "nepal_ns IN (berlin_ns, naive_s)", "york_us > day"),
    *("york_us > DATE '2024-03-10'", "CASE york_us WHEN naive_us THEN true END"),
    *("nullif(york_us, naive_us) IS NULL", "coalesce(naive_us, york_us) = utc_us"),
    *("greatest(york_us, naive_us) = utc_us", "array_has([york_us], naive_us)"),
    *("york_us - naive_us > INTERVAL '1 hour'", "struct(york_us) = struct(naive_us)"),
    "york_us = naive_us AT TIME ZONE 'America/New_York' AND york_us > naive_us",
]


@pytest.mark.parametrize("condition", _MIXED)
def test_a_time_without_a_zone_does_not_meet_one_of_a_zone(condition: str) -> None:
    with pytest.raises(RequestError, match=r"(no|without a) time zone"):
        check(f"SELECT row FROM source WHERE {condition}", TABLE.schema)
    with pytest.raises(RequestError, match=r"where .*(no|without a) time zone.*: write"):
        check_row_query("", (condition,), TABLE.schema)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT york_us AS t FROM source UNION ALL SELECT naive_us FROM source",
        "SELECT row FROM source ORDER BY CASE WHEN row > 1 THEN york_us ELSE naive_us END",
        "SELECT source.row FROM source JOIN other ON source.york_us = other.naive_us",
        "SELECT source.row FROM source JOIN other ON source.york_us < other.naive_us",
        "SELECT row FROM source LEFT SEMI JOIN other ON source.york_us = other.naive_us",
        "SELECT row FROM source WHERE york_us IN (SELECT naive_us FROM other)",
        "SELECT row FROM source WHERE york_us > (SELECT max(naive_us) FROM other)",
        "SELECT row FROM source WHERE row > (SELECT max(row) FROM other WHERE york_us = naive_us)",
        "SELECT row FROM source s WHERE EXISTS "
        "(SELECT 1 FROM other o WHERE o.naive_us = s.york_us)",
    ],
)
def test_no_part_of_a_query_mixes_times_with_and_without_a_zone(sql: str) -> None:
    tables = {"source": TABLE.schema, **({"other": TABLE.schema} if "other" in sql else {})}

    with pytest.raises(RequestError, match=r"naive_us\)? has no time zone, and meets .*New_York"):
        check_query(sql, tables, allow_unordered=True)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("york_us = TIMESTAMP '2024-03-10 01:00:00' AT TIME ZONE 'America/New_York'", 6),
        ("york_us = '2024-03-10 01:00:00'", 6),
        ("to_local_time(york_us) = TIMESTAMP '2024-03-10 01:00:00'", 6),
        ("york_us = CAST(TIMESTAMP '2024-03-10 01:00:00' AS TIMESTAMPTZ)", 1),
        ("york_us = TIMESTAMPTZ '2024-03-10 01:00:00'", 1),
        ("CAST(york_us AS DATE) = DATE '2024-03-09' AND york_us > '2024-03-09 19:30:00'", 1),
        ("CAST(york_us AS TIMESTAMP) = TIMESTAMP '2024-03-10 01:00:00'", 1),
        ("naive_ns AT TIME ZONE 'Asia/Tokyo' = TIMESTAMPTZ '2024-03-09 16:00:00'", 1),
        ("naive_s AT TIME ZONE 'Asia/Tokyo' IN (TIMESTAMPTZ '2024-03-09 16:00:00')", 1),
        (
            "array_has([TIMESTAMPTZ '2024-03-09 16:00:00'], naive_ns AT TIME ZONE 'Asia/Tokyo')",
            1,
        ),
        ("utc_s = TIMESTAMP '2024-03-10 01:00:00'", 1),
        ("naive_s = '2024-03-10T03:00:00+02:00'", 1),
    ],
)
def test_what_is_meant_can_be_written(
    kept: Callable[[str], list[int]], condition: str, rows: int
) -> None:
    column = next(name for name in _COLUMNS if name in condition)
    moment = int(datetime(2024, 3, 10, rows, tzinfo=UTC).timestamp())

    assert kept(condition) == [_moments_of(column).index(moment)]


def test_explicit_casts_are_no_meeting() -> None:
    tables = {"source": TABLE.schema, "other": TABLE.schema}
    for sql in (
        "SELECT row FROM (SELECT row, naive_us AS n, york_us AS y FROM source) s "
        "WHERE s.n AT TIME ZONE 'Europe/Berlin' = s.y",
        "SELECT arrow_cast(naive_us, 'Timestamp(us, \"America/New_York\")') AS t FROM source",
        "SELECT struct(york_us, naive_us) AS t FROM source",
        "SELECT row FROM source WHERE CAST(york_us AS TIMESTAMP) = naive_us",
        "SELECT row FROM source WHERE york_us IN "
        "(SELECT naive_us AT TIME ZONE 'America/New_York' FROM other)",
        "SELECT source.row FROM source JOIN other ON source.york_us = other.berlin_ns",
    ):
        read = {name: schema for name, schema in tables.items() if name in sql}
        check_query(sql, read, allow_unordered=True)


def test_a_join_of_zones_and_a_timestamptz_column_are_moments(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.arrow" for name in ("source", "other")}
    for path in paths.values():
        with pa.ipc.new_file(path, TABLE.schema) as writer:
            writer.write_table(TABLE)
    sql = (
        "SELECT count(*) AS n, min(TIMESTAMPTZ '2024-01-01 00:00:00 -05:00') AS t "
        "FROM source s JOIN other o ON s.york_ms = o.nepal_us"
    )

    (batch,) = run_whole(sql, paths)

    assert batch.to_pylist() == [{"n": len(_MOMENTS), "t": datetime(2024, 1, 1, 5, tzinfo=UTC)}]
    assert batch.schema.field("t").type == pa.timestamp("ns", "UTC")
