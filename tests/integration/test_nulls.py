"""Nulls are kept: they are counted in every report of a dataset, or refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, DatasetSpec, LoadError
from cache_client.cli import display
from cache_client.control import forecast as control_forecast
from cache_server import LocalCluster


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files, with 3 nulls of ``x``, 1 of ``d``, none of ``y``, and NaN, which is no null."""
    folder = tmp_path / "source"
    folder.mkdir()
    for index, x in enumerate([[1.0, None, None], [float("nan"), None, 2.0]]):
        columns = {"x": x, "y": [1.0, 2.0, 3.0], "n": [1, 2, 3]}
        decimals = pa.array([1, None if index else 2, 3]).cast(pa.decimal128(21, 2))
        table = pa.table({**columns, "d": decimals})
        pq.write_table(table, folder / f"{index}.parquet")
    return folder


def test_plan_load_and_describe_count_the_nulls(
    client: CacheClient, dataset_name: str, source: Path
) -> None:
    spec = DatasetSpec(dataset_name, source, replicas=2, target_shard_bytes=1)

    forecast = client.plan(spec)
    loaded, described = client.load(spec), client.describe(dataset_name)

    assert {**forecast.nulls, "d": 1} == loaded.nulls == described.nulls == {"x": 3, "d": 1}
    assert "x 3" in dict(control_forecast.forecast_facts(forecast))["nulls"]
    with display.console.capture() as shown:
        display.show_dataset(described, as_json=False)
    assert "x 3" in shown.get()


def test_the_counts_follow_a_rename_and_a_filter(
    client: CacheClient, dataset_name: str, source: Path
) -> None:
    spec = DatasetSpec(dataset_name, source, sql="SELECT x AS a, n FROM source WHERE n > 1")

    assert client.plan(spec).nulls == {"a": 3}  # before the filter
    assert client.load(spec).nulls == {"a": 2 + 1}


def test_a_whole_query_counts_the_nulls_of_its_result(
    client: CacheClient, dataset_name: str, source: Path
) -> None:
    spec = DatasetSpec(dataset_name, source, sql="SELECT x FROM source ORDER BY n, x LIMIT 5")

    assert client.plan(spec).nulls == {}
    assert client.load(spec).nulls == {"x": 2}


def test_nulls_are_refused_on_demand(client: CacheClient, dataset_name: str, source: Path) -> None:
    client.load(DatasetSpec(dataset_name, source))

    with pytest.raises(LoadError, match="column 'x' holds 2 nulls, and the spec has nulls: refuse"):
        client.load(DatasetSpec(dataset_name, source / "0.parquet", nulls="refuse"))
    refused = DatasetSpec(dataset_name, source, sql="SELECT COALESCE(x, 0) AS x FROM source")
    again = DatasetSpec(dataset_name, source, sql=refused.sql, nulls="refuse")
    assert client.load(again).nulls == {}


def test_the_counts_survive_a_restart_of_the_cache(source: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with LocalCluster(nodes=1, cache_dir=tmp_path / "cache") as cluster:
            client = CacheClient(cluster.endpoint)
            assert client.load(DatasetSpec("kept", source)).nulls == {"x": 3, "d": 1}
