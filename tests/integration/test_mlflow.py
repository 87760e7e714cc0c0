"""What a job reads, as a run of MLflow keeps it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    ConfigError,
    Connection,
    DatasetSpec,
    View,
)
from cache_server import LocalCluster

TABLE = pa.table(
    {
        "id": pa.array(range(40), pa.int64()),
        "price": pa.array([1.5] * 40, pa.float32()),
        "tags": pa.array([["a", "b"]] * 40, pa.list_(pa.string())),
    }
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    source = tmp_path_factory.mktemp("source") / "a.parquet"
    pq.write_table(TABLE, source)
    with LocalCluster(nodes=1) as running:
        CacheClient(running.endpoint).load(DatasetSpec("houses", source))
        yield running


@pytest.mark.frameworks
def test_a_run_keeps_the_version_the_view_and_the_schema(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    cache, view = Connection(cluster.endpoint), View(where="id < 10")
    dataset = CacheIterableDataset("houses", cache=cache, view=view, batch_size=8, seed=3)
    with mlflow.start_run() as run:
        mlflow.log_input(dataset.mlflow_dataset(), context="training")
    (logged,) = mlflow.get_run(run.info.run_id).inputs.dataset_inputs
    assert (logged.dataset.name, logged.tags[0].value) == ("houses", "training")
    whole = CacheIterableDataset("houses", cache=cache, batch_size=8).mlflow_dataset()
    assert whole.digest == CacheClient(cluster.endpoint).describe("houses").fingerprint
    assert whole.digest != logged.dataset.digest == dataset.mlflow_dataset().digest
    assert json.loads(logged.dataset.profile)["num_rows"] == 40
    columns = json.loads(logged.dataset.schema)["mlflow_colspec"]
    assert [(each["name"], each["type"]) for each in columns] == [
        ("id", "long"),
        ("price", "float"),
        ("tags", "array"),
    ]
    source = json.loads(logged.dataset.source)
    assert (source["seed"], source["versions"][0]["dataset"]) == (3, "houses")
    assert "id < 10" in source["view"] and source["fingerprint"] == dataset.fingerprint
    rows = type(dataset.mlflow_dataset().source).from_dict(source).load().read_all()
    assert rows["id"].to_pylist() == list(range(40))


def test_without_mlflow_the_package_is_named(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CacheIterableDataset("houses", cache=Connection(cluster.endpoint), batch_size=8)
    monkeypatch.delitem(sys.modules, "cache_client.training.mlflow_dataset", raising=False)
    for package in ("mlflow", "mlflow.data.dataset"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install mlflow-skinny"):
        dataset.mlflow_dataset()
