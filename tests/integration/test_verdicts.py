"""The verdict names the rank or the node that is slow: four synchronous ranks on two nodes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_client import CacheClient, DatasetNotFoundError, DatasetSpec
from cache_server import LocalCluster
from tests.waiting import wait_until

WAIT_S = 60.0
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "observe.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("observe", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nodes(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    source = example.write_table(tmp_path_factory.mktemp("observe"))
    with LocalCluster(nodes=2) as running:
        CacheClient(running.endpoint).load(
            DatasetSpec("rows", source, target_shard_bytes=example.SHARD_BYTES)
        )
        yield running


def wait_for(cluster: LocalCluster, job: str, text: str) -> None:
    client = CacheClient(cluster.endpoint)
    said = ""

    def says() -> bool:
        nonlocal said
        try:
            (found,) = client.jobs(job)
        except DatasetNotFoundError:
            return False
        said = found.verdict
        return said.startswith(text)

    try:
        wait_until(says, WAIT_S, f"the verdict {text!r}")
    except AssertionError as error:
        raise AssertionError(f"{error}; the last one: {said!r}") from None


def test_a_slow_rank_is_named(example: Any, nodes: LocalCluster) -> None:
    with example.training(nodes.endpoint, "slow-rank", slow=2):
        wait_for(nodes, "slow-rank", "rank 2 is slow:")


def test_a_throttled_node_is_named(example: Any, nodes: LocalCluster) -> None:
    throttled = nodes.nodes[1]
    with example.throttled(throttled.pid), example.training(nodes.endpoint, "slow-node"):
        wait_for(nodes, "slow-node", f"input bound: node {throttled.node_id} is slow:")
