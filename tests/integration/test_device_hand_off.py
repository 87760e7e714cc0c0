"""Batches that are copied to a device ahead of use: the same batches, the same states."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from cache_client import CacheClient, CacheIterableDataset, ConfigError, DatasetSpec
from cache_client.order import order
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import write_numbered
from tests.job_arguments import grouped
from tests.waiting import suspend, wait_until
from tests.worker_errors import raises_in_workers

ROWS = 1_000
HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device here")


@pytest.fixture
def table(client: CacheClient, dataset_name: str, tmp_path: Path) -> str:
    source = write_numbered(tmp_path / "t", ROWS, files=2)
    client.load(DatasetSpec(dataset_name, source, target_shard_bytes=4_000))
    return dataset_name


def make(cluster: LocalCluster, table: str, **arguments: Any) -> CacheIterableDataset:
    defaults: dict[str, Any] = {"batch_size": 30, "shuffle": True, "seed": 3, "device": "cpu"}
    return CacheIterableDataset(
        table, **grouped(cache=cluster.endpoint, **{**defaults, **arguments})
    )


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("cache-device", "cache-f"))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_batches_on_a_device_are_the_same_batches(
    cluster: LocalCluster, table: str, device: str
) -> None:
    stack = {"x": ["a", "b"]}
    plain = list(make(cluster, table, device=None, stack=stack))
    moved = list(make(cluster, table, device=device, stack=stack))
    assert len(plain) == len(moved) == 34
    for want, got in zip(plain, moved, strict=True):
        assert list(got) == ["row", "x", "label", "text"]
        assert got["text"] == want["text"]
        for name in ("row", "x", "label"):
            assert got[name].device.type == device
            assert got[name].dtype == want[name].dtype
            assert torch.equal(got[name].cpu(), want[name])


def test_a_batch_counts_as_consumed_when_it_is_handed_out_not_when_it_is_made(
    cluster: LocalCluster, table: str
) -> None:
    made = itertools.count(1)
    latest = [0]

    def count(batch: Any) -> Any:
        latest[0] = next(made)
        return batch

    dataset = make(cluster, table, transform=count)
    taken: list[int] = []
    iterator = iter(dataset)
    for step in range(1, 6):
        taken += next(iterator)["row"].tolist()
        wait_until(lambda step=step: latest[0] >= step + 2, 30.0, "two batches made ahead")
        state = dataset.state_dict()
        assert (state["epoch"], state["rows_consumed"]) == (0, 30 * step)
    iterator.close()  # type: ignore[attr-defined]  # a generator
    assert dataset.state_dict() == state
    resumed = make(cluster, table, batch_size=70)
    resumed.load_state_dict(state)
    taken += [row for batch in resumed for row in batch["row"].tolist()]
    assert taken == order.EpochOrder(ROWS, shuffle=True, seed=3).row_ids(range(ROWS)).tolist()
    assert (resumed.state_dict()["epoch"], resumed.state_dict()["rows_consumed"]) == (1, 0)


def test_leaving_the_loop_early_stops_every_thread(cluster: LocalCluster, table: str) -> None:
    for batch in make(cluster, table, prefetch_batches=1):
        assert len(batch["row"]) == 30
        break
    wait_until(lambda: not threads(), 10.0, "no thread is left")


def test_an_error_while_a_batch_is_made_comes_in_its_turn(
    cluster: LocalCluster, table: str
) -> None:
    numbers = itertools.count()

    def fail_at_four(batch: Any) -> Any:
        if next(numbers) == 4:
            raise ValueError("the fifth batch is bad")
        return batch

    dataset = make(cluster, table, transform=fail_at_four)
    taken = 0
    with pytest.raises(ValueError, match="the fifth batch is bad"):
        for batch in dataset:
            taken += len(batch["row"])
    assert taken == 4 * 30 == dataset.state_dict()["rows_consumed"]


def test_a_data_loader_without_workers_hands_the_batches_on(
    cluster: LocalCluster, table: str
) -> None:
    loader = DataLoader(make(cluster, table), batch_size=None)
    rows = [row for batch in loader for row in batch["row"].tolist()]
    assert rows == order.EpochOrder(ROWS, shuffle=True, seed=3).row_ids(range(ROWS)).tolist()


def test_data_loader_workers_are_refused(cluster: LocalCluster, table: str) -> None:
    loader = DataLoader(make(cluster, table), batch_size=None, num_workers=1)
    with raises_in_workers(ConfigError, match=r"device='cpu' cannot be used in DataLoader workers"):
        list(loader)


def test_bad_devices_and_formats_are_quoted_together(cluster: LocalCluster, table: str) -> None:
    with pytest.raises(ConfigError, match=r"'gpu'.*batch_format='torch', got 'numpy'"):
        make(cluster, table, device="gpu", batch_format="numpy")
    with pytest.raises(ConfigError, match=r"batch_format='torch', got 'arrow'"):
        make(cluster, table, device="cuda", batch_format="arrow")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_that_pins_memory_takes_the_batches(
    cluster: LocalCluster, table: str, workers: int
) -> None:
    """Without an accelerator torch pins nothing, and hands the batches on."""
    dataset = make(cluster, table, device=None)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=True)
    rows: list[int] = []
    for batch in loader:
        assert all(isinstance(text, str) for text in batch["text"])
        assert batch["row"].is_pinned() == HAS_CUDA
        rows += batch["row"].tolist()
    assert rows == order.EpochOrder(ROWS, shuffle=True, seed=3).row_ids(range(ROWS)).tolist()


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """More than is made ahead of use, so that the background is busy when the program ends."""
    values = np.zeros(20_000, np.float32)
    columns = pa.table({f"c{number}": values for number in range(200)})
    pq.write_table(columns, tmp_path / "wide.parquet")
    return tmp_path / "wide.parquet"


LEAVES_AN_ITERATOR = """
import sys
from cache_client import CacheIterableDataset, Connection, Reading

cache = Connection(sys.argv[2], local=sys.argv[3] == "local", deadline_s=float(sys.argv[5]))
dataset = CacheIterableDataset(sys.argv[1], cache=cache, batch_size=31,
    device=sys.argv[4] or None, reading=Reading(prefetch_batches=1, message_bytes=100_000))
iterator = iter(dataset)
for step in range(5):
    next(iterator)
print("trained", flush=True)
sys.stdin.readline()
for step in range(2):  # of a message that is here; more were asked for
    next(iterator)
"""


def leaves_an_iterator(
    cluster: LocalCluster, name: str, how: str, device: str = "cpu", deadline_s: float = 60.0
) -> subprocess.Popen[str]:
    """A program that has trained; it goes on and ends, its iterator alive, when its input ends."""
    program = forked_python.Popen(
        [
            sys.executable,
            "-c",
            LEAVES_AN_ITERATOR,
            name,
            cluster.endpoint,
            how,
            device,
            f"{deadline_s}",
        ],
        env={**os.environ, "FORKED_PYTHON_FINALIZES": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "trained\n"
    return program


@pytest.mark.parametrize("how", ["local", "flight"])
def test_a_program_that_ends_while_an_iterator_is_alive_ends_well(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, wide: Path, how: str
) -> None:
    client.load(DatasetSpec(dataset_name, wide, target_shard_bytes=4_000_000))
    for _ in range(3):
        program = leaves_an_iterator(cluster, dataset_name, how)
        _, errors = program.communicate(timeout=60.0)
        assert (program.returncode, errors) == (0, "")


@pytest.mark.parametrize("device", ["cpu", ""], ids=["on a device", "where they came"])
def test_a_program_that_ends_waits_for_no_node_that_hangs(wide: Path, device: str) -> None:
    with LocalCluster(nodes=1) as nodes:
        CacheClient(nodes.endpoint).load(DatasetSpec("wide", wide, target_shard_bytes=4_000_000))
        program = leaves_an_iterator(nodes, "wide", "flight", device, deadline_s=1000.0)
        node = psutil.Process(nodes.nodes[0].pid)
        suspend(node)
        try:
            _, errors = program.communicate(timeout=200.0)
            assert (program.returncode, errors) == (0, "")
        finally:
            node.resume()
