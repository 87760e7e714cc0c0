"""Where pods are given a proxy for what lies outside of the cluster, a cache still finds itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.dataset_export import run_export

NUM_ROWS = 1000


@pytest.fixture(scope="module")
def proxy() -> Iterator[None]:
    """A proxy that is not there, for every address."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")
        for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def cluster(proxy: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Of two nodes, each with a copy of every shard: of half of them from the other node."""
    folder = tmp_path_factory.mktemp("numbered")
    write_numbered(folder, NUM_ROWS, files=4)
    with LocalCluster(nodes=2) as running:
        spec = DatasetSpec(name="numbered", source=str(folder), replicas=2)
        CacheClient(running.endpoint).load(spec, timeout_s=60)
        yield running


def test_nodes_find_each_other_and_a_client_finds_them(cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    assert client.describe("numbered").num_rows == NUM_ROWS
    assert client.head("numbered", 3).num_rows == 3


def test_the_script_of_the_torchtune_runtime_finds_the_cache(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    code, output, errors = run_export(cluster.endpoint, tmp_path / "data")
    assert code == 0, errors
    assert f"{NUM_ROWS} rows" in output
