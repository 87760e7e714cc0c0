"""The script of the TorchTune runtime that writes a cached dataset to Parquet, on a real cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests.dataset_export import run_export, start_export


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster) -> pa.Table:
    """The rows of the cache, in several shards on two nodes."""
    folder = tmp_path_factory.mktemp("source")
    code, _, errors = run_export(cluster.endpoint, folder / "out")
    assert code == 1
    assert "the cache must hold one dataset, it holds 0" in errors
    rows = pa.table(
        {
            "instruction": [f"do {number}" for number in range(5000)],
            "output": [f"{number} is done" for number in range(5000)],
        }
    )
    pq.write_table(rows, folder / "alpaca.parquet", row_group_size=500)
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("alpaca", str(folder / "alpaca.parquet"), target_shard_bytes="64KiB"))
    assert client.describe("alpaca").num_shards > 1
    return rows


def test_the_rows_of_the_only_dataset_are_written_in_their_order(
    tmp_path: Path, cluster: LocalCluster, rows: pa.Table
) -> None:
    code, output, errors = run_export(cluster.endpoint, tmp_path / "dataset/data")
    assert code == 0, errors
    assert "5000 rows" in output
    written = pq.read_table(tmp_path / "dataset/data")
    assert written.column_names == rows.column_names
    assert written.to_pylist() == rows.to_pylist()


def test_pods_that_share_a_volume_write_one_complete_file(
    tmp_path: Path, cluster: LocalCluster, rows: pa.Table
) -> None:
    folder = tmp_path / "dataset/data"
    folder.mkdir(parents=True)
    (folder.parent / ".export-1").write_text("what a pod left that was killed")
    pods = [start_export(cluster.endpoint, folder, index) for index in range(3)]
    for pod in pods:
        _, errors = pod.communicate(timeout=60)
        assert pod.returncode == 0, errors
    assert [path.name for path in folder.parent.rglob("*") if path.is_file()] == [
        "train-00000.parquet"
    ]
    assert pq.read_table(folder).to_pylist() == rows.to_pylist()


def test_a_complete_file_is_not_replaced(
    tmp_path: Path, cluster: LocalCluster, rows: pa.Table
) -> None:
    assert run_export(cluster.endpoint, tmp_path)[0] == 0
    (file,) = tmp_path.iterdir()
    before = file.stat()
    code, output, errors = run_export(cluster.endpoint, tmp_path, 1)
    assert (code, "is there already" in output) == (0, True), errors
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_an_incomplete_file_has_another_name(
    tmp_path: Path, cluster: LocalCluster, rows: pa.Table
) -> None:
    folder = tmp_path / "dataset/data"
    with start_export(cluster.endpoint, folder, limit_bytes=4096) as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "File too large" in errors) == (1, True), errors
    assert list(folder.iterdir()) == []
    assert 0 < (folder.parent / ".export-0").stat().st_size <= 4096
    assert run_export(cluster.endpoint, folder)[0] == 0
    assert pq.read_table(folder).num_rows == rows.num_rows
