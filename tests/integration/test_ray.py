"""`CacheIterableDataset` in Ray Train: two workers of a TorchTrainer, which has its own gRPC."""

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

ROWS = 203  # 7 steps of 2 * 16 rows, the last of 11

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(500),  # it starts a dozen processes
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

# num_workers, how they start, whether rows come from files of this machine. Each worker that is
# spawned imports torch, in each of two epochs.
CELLS = [(0, None, False), (2, "fork", False), (1, "spawn", True)]

PROGRAM = """
import json, os, sys
from pathlib import Path
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader

endpoint, folder, cells = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def train_func(config):
    from cache_client import CacheIterableDataset, Connection
    found = []
    for num_workers, method, local in config["cells"]:
        dataset = CacheIterableDataset(
            "table", cache=Connection(config["endpoint"], local=local), batch_size=16, shuffle=True
        )
        options = {"multiprocessing_context": method} if num_workers else {}
        loader = prepare_data_loader(dataset.loader(num_workers=num_workers, **options))
        epochs = []
        for epoch in range(2):
            dataset.set_epoch(epoch)
            rows = []
            for step, batch in enumerate(loader, 1):
                rows += batch["row"].tolist()
                if epoch == 1 and step == 3:  # a checkpoint, and the rest by another loader
                    state = dataset.state_dict()
                    break
            if epoch == 1:
                resumed = dataset.loader()
                resumed.load_state_dict(state)
                rows += [row for batch in resumed for row in batch["row"].tolist()]
            epochs.append(rows)
        found.append([dataset.world_size, epochs])
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"rank-{rank}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    TorchTrainer(
        train_func,
        train_loop_config={"endpoint": endpoint, "folder": folder, "cells": cells},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
"""


def test_two_workers_of_a_torch_trainer_read_each_row_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    with LocalCluster(nodes=2) as cluster:
        source = write_numbered(tmp_path / "source", ROWS, files=2)
        CacheClient(cluster.endpoint).load(DatasetSpec("table", source))
        done = subprocess.run(
            [sys.executable, str(script), cluster.endpoint, str(tmp_path), json.dumps(CELLS)],
            env=environment, capture_output=True, text=True, timeout=480, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for cell, *of_ranks in zip(CELLS, *ranks, strict=True):
        assert [world_size for world_size, _ in of_ranks] == [2, 2], cell
        for first, second in zip(*(epochs for _, epochs in of_ranks), strict=True):
            assert sorted(first + second) == list(range(ROWS)), cell
        epochs = of_ranks[0][1]
        assert epochs[0] != epochs[1], cell
