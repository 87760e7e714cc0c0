"""``cachectl stats`` over real nodes."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cache_client import CacheClient, DatasetSpec, __main__
from cache_server import LocalCluster

ROWS, FILES = 9_000, 3
NUMBERS = np.random.default_rng(3).permutation(ROWS)
START = dt.datetime(2026, 1, 1)


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("stats")
    rows = pa.table(
        {
            "number": NUMBERS,
            "price": pa.array(
                [None if n % 10 == 3 else np.nan if n == 5 else n / 4 for n in NUMBERS.tolist()],
                pa.float32(),
            ),
            "city": pa.array([["Oslo", "Bergen", None][n % 3] for n in NUMBERS.tolist()]),
            "kind": pa.array([f"k{n % 5}" for n in NUMBERS.tolist()]).dictionary_encode(),
            "at": pa.array([START + dt.timedelta(minutes=int(n)) for n in NUMBERS]),
            "ns": pa.array(NUMBERS + 10**18 + 1, pa.timestamp("ns")),
            "took": pa.array(NUMBERS, pa.duration("us")),
            "old": pa.array(NUMBERS % 2 == 0),
            "tags": pa.array([[n, n] for n in NUMBERS.tolist()]),
            "place": pa.array([{"zip": n} for n in NUMBERS.tolist()]),
        }
    )
    for index in range(FILES):
        part = rows.slice(index * ROWS // FILES, ROWS // FILES)
        pq.write_table(part, folder / f"{index}.parquet")
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("summed", folder, target_shard_bytes=1))
    assert client.describe("summed").num_shards == FILES
    yield "summed"
    client.drop("summed")


def run(cluster: LocalCluster, *arguments: str) -> str:
    result = CliRunner().invoke(
        __main__.app, ["stats", *arguments, "--endpoint", cluster.endpoint], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


def test_stats_sum_up_each_column_over_all_shards(table: str, cluster: LocalCluster) -> None:
    found = json.loads(run(cluster, table, "--json"))
    number, price = found["number"], found["price"]
    assert (number["count"], number["nulls"], number["min"], number["max"]) == (ROWS, 0, 0, 8999)
    assert number["mean"] == 4499.5 and number["distinct_exact"] is False
    assert abs(number["distinct"] / ROWS - 1) < 0.09
    assert abs(float(number["quantiles"]["0.5"]) / ROWS - 0.5) < 0.044
    assert (price["nulls"], price["nans"], price["count"]) == (900, 1, 8100)
    kept = [n / 4 for n in range(ROWS) if n % 10 != 3 and n != 5]
    assert price["mean"] == pytest.approx(np.mean(kept)) and price["max"] == 8999 / 4
    city = found["city"]
    assert (city["min"], city["max"], city["distinct"]) == ("Bergen", "Oslo", 2)
    assert city["distinct_exact"] and city["nulls"] == ROWS // 3 and not city["quantiles"]
    assert found["kind"]["distinct"] == 5
    assert found["at"]["min"] == "2026-01-01 00:00:00.000000"
    assert found["ns"]["min"].endswith(".000000001") and found["took"]["max"] == "8999 us"
    assert found["old"]["mean"] == 0.5 and found["old"]["min"] is False
    assert found["tags"] | {"type": ""} == {
        **{"type": "", "count": ROWS, "nulls": 0, "nans": 0, "min": None, "max": None},
        **{"mean": None, "quantiles": {}, "quantiles_exact": False},
        **{"distinct": None, "distinct_exact": True},
    }
    assert json.loads(run(cluster, table, "--json")) == found


def test_stats_for_people_say_what_is_estimated(table: str, cluster: LocalCluster) -> None:
    shown = run(cluster, table)
    assert "9,000 rows" in shown and "~ distinct: estimated" in shown
    assert "uniform sample of 2,048 rows" in shown and "NaN" in shown
    exact = run(cluster, table, "city", "old")
    assert "estimated" not in exact and "sample" not in exact and "price" not in exact


def test_an_unknown_column_is_quoted(table: str, cluster: LocalCluster) -> None:
    arguments = ["stats", table, "towm", "--endpoint", cluster.endpoint]
    result = CliRunner().invoke(__main__.app, arguments)
    assert "'towm'" in str(result.exception) and "number, price" in str(result.exception)
