"""Numbers of a query that are compared with decimals are exactly those that are written."""

from __future__ import annotations

import random
from decimal import Decimal

import pyarrow as pa
import pytest

from cache_protocol.errors import RequestError
from cache_server.source.pinned import Split
from tests.query_source import check, rows_of, write_parquet

PRICES = [Decimal(cents) / 100 for cents in range(-9_000, 9_001)]
TABLE = pa.table(
    {
        "price": pa.array(PRICES, pa.decimal128(9, 2)),
        "near": pa.array([float(price) for price in PRICES], pa.float64()),
    }
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_parquet(tmp_path_factory.mktemp("decimals") / "t.parquet", TABLE)


def kept(file: Split, condition: str) -> list[float]:
    sql = f"SELECT price FROM source WHERE {condition}"
    return [float(row["price"]) for row in rows_of(file, sql, TABLE.schema)]


@pytest.mark.parametrize(
    "condition",
    [
        *("price = {0}", "price >= {0} AND price <= {0}", "price BETWEEN {0} AND {0}"),
        *(
            "price IN ({0}, 100.5, 200.5, 300.5)",
            "{0} = price",
            "CASE price WHEN {0} THEN true END",
        ),
        "nullif(price, {0}) IS NULL",
    ],
)
def test_every_decimal_equals_itself(file: Split, condition: str) -> None:
    some = [Decimal("-8.28"), *random.Random(0).sample(PRICES, 3)]
    for price in some:
        assert kept(file, condition.format(price)) == [float(price)]


def test_doubles_beside_decimals_stay_doubles(file: Split) -> None:
    for number in ("8.28", "35.3"):
        assert kept(file, f"near = {number}") == [float(number)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT price FROM source WHERE price = -8.28 AND near = 0.07",
        "SELECT price FROM source WHERE price = -8.28 AND near < 1e300",
        "SELECT near * 2 + 0.1 AS x, CAST(2 AS BIGINT) * 0.5 AS y FROM source WHERE price = -8.28",
    ],
)
def test_a_number_that_would_be_rounded_is_refused_with_the_remedy(sql: str) -> None:
    with pytest.raises(RequestError, match=r"write CAST\('8.28' AS DECIMAL\(3, 2\)\)|'-8.28'"):
        check(sql, TABLE.schema)


def test_the_remedy_gives_the_row(file: Split) -> None:
    condition = "price = CAST('-8.28' AS DECIMAL(3, 2)) AND near = -8.28"
    assert kept(file, condition) == [-8.28]
