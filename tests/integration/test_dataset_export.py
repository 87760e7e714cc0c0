"""The script of the TorchTune runtime that writes a cached dataset to Parquet, on a real cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from runtimes import MANIFESTS
from tests.manifests import container_named, job_named, pod_of, read


def run_export(endpoint: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As the init container runs it."""
    runtime = read(MANIFESTS / "torchtune-qwen2.5-1.5b/runtime.yaml")
    container = container_named(pod_of(job_named(runtime, "node")), "export-dataset")
    assert container["command"] == ["python", "-c"]
    return subprocess.run(
        [sys.executable, "-c", *container["args"]],
        env={**os.environ, "CACHE_ENDPOINT": endpoint, "EXPORT_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_the_rows_of_the_only_dataset_are_written_in_their_order(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "instruction": [f"do {number}" for number in range(5000)],
            "output": [f"{number} is done" for number in range(5000)],
        }
    )
    source, folder = tmp_path / "alpaca.parquet", tmp_path / "dataset/data"
    pq.write_table(rows, source, row_group_size=500)
    with LocalCluster(num_nodes=2) as cluster:
        none = run_export(cluster.endpoint, folder)
        assert none.returncode == 1
        assert "the cache must hold one dataset, it holds 0" in none.stderr
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec("alpaca", str(source), target_shard_bytes="64KiB"))
        done = run_export(cluster.endpoint, folder)
        assert done.returncode == 0, done.stderr
        assert client.describe("alpaca").num_shards > 1
    assert "5000 rows" in done.stdout
    written = pq.read_table(folder)
    assert written.column_names == rows.column_names
    assert written.to_pylist() == rows.to_pylist()
