"""Ranks of `jax.distributed`, without the variables of a launcher, in two real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.free_ports import free_port

pytestmark = pytest.mark.frameworks

PROCESS = """
import json, sys
import jax
from jax._src import xla_bridge
from cache_client import CacheIterableDataset, ConfigError

endpoint, address, rank = json.loads(sys.argv[1])
options = {"cache": endpoint, "batch_size": 8, "batch_format": "numpy", "columns": ["row"]}
early = CacheIterableDataset("table", **options)
jax.distributed.initialize(address, 2, rank)
dataset = CacheIterableDataset("table", **options)
seen = [row for batch in dataset.loader() for row in batch["row"].tolist()]
try:
    next(iter(early))
except ConfigError as error:
    early = str(error)
print(json.dumps([dataset.rank, dataset.world_size, seen, early, bool(xla_bridge._backends)]))
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="not installed: jax")
def test_the_processes_of_jax_distributed_read_different_rows(tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    with LocalCluster(nodes=1) as cluster:
        source = write_numbered(tmp_path / "source", 100)
        CacheClient(cluster.endpoint).load(DatasetSpec("table", source))
        address = f"127.0.0.1:{free_port()}"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, json.dumps([cluster.endpoint, address, rank])],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            output = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
    seen = []
    for rank, (printed, errors) in enumerate(output):
        assert printed, errors
        found, world_size, rows, early, has_backend = json.loads(printed)
        assert (found, world_size) == (rank, 2)
        assert "rank 0 of 1, but jax.distributed, initialised later" in early
        assert not has_backend
        seen += rows
    assert sorted(seen) == list(range(100))
