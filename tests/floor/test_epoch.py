"""A client of the lowest versions reads an epoch of a cache of the newest ones.

The cache runs in the environment of ``SERVER_PYTHON``, which `make floor` sets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from cache_client import CacheClient, CacheDataset, CacheIterableDataset, Connection
from tests.conftest import write_numbered

SERVER_PYTHON = os.environ.get("SERVER_PYTHON")
NUM_ROWS = 5_000

pytestmark = pytest.mark.skipif(SERVER_PYTHON is None, reason="run by make floor")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("floor")
    source = write_numbered(folder / "table", NUM_ROWS, files=4, row_group_size=500)
    spec = folder / "spec.yaml"
    spec.write_text(f"name: table\nsource: {source}\ntarget_shard_bytes: 20000\n")
    assert SERVER_PYTHON is not None
    with subprocess.Popen(
        [SERVER_PYTHON, "-m", "cache_server", "local", "--nodes", "2", "--load", str(spec)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["endpoint"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize("local", [True, False], ids=["files", "flight"])
def test_a_shuffled_epoch_brings_every_row_once(endpoint: str, local: bool) -> None:
    dataset = CacheIterableDataset(
        "table", cache=Connection(endpoint, local=local), batch_size=64, rank=0, world_size=1,
        shuffle=True, seed=3)  # fmt: skip
    rows = []
    for batch in dataset:
        row = batch["row"].numpy()
        assert np.array_equal(batch["a"].numpy(), (row * 0.5).astype(np.float32))
        assert np.array_equal(batch["b"].numpy(), (row * 2.0).astype(np.float32))
        assert np.array_equal(batch["label"].numpy(), (row % 7).astype(np.int32))
        assert batch["text"] == [f"row {number}" for number in row]
        rows.append(row)
    read = np.concatenate(rows)
    assert not np.array_equal(read, np.arange(NUM_ROWS))
    assert np.array_equal(np.sort(read), np.arange(NUM_ROWS))


def test_rows_by_number_and_the_description_are_read(endpoint: str) -> None:
    info = CacheClient(endpoint).describe("table")
    assert info.num_rows == NUM_ROWS
    assert info.num_shards > 2
    assert CacheDataset("table", cache=endpoint)[NUM_ROWS - 1]["text"] == f"row {NUM_ROWS - 1}"
