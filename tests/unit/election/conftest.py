"""A cache's objects on a Kubernetes API server in this process, and in a real etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.auth.etcd import Etcd
from cache_server.auth.kubernetes import Cluster
from cache_server.election.cluster_objects import ClusterObjects
from cache_server.election.etcd import EtcdStore
from cache_server.election.objects import ElectionStore
from tests.api_server import ApiServer
from tests.etcd_server import EtcdServer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of a store is for both, unless it looks into one."""
    if "kind" in metafunc.fixturenames:
        looks = {"api": "kubernetes", "etcd": "etcd"}
        found = [kind for fixture, kind in looks.items() if fixture in metafunc.fixturenames]
        files = ["files"] if "store" in metafunc.fixturenames else []
        metafunc.parametrize("kind", [*files, *(found or ["kubernetes", "etcd"])], indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Of the store."""
    return str(request.param)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(etcd_server: EtcdServer) -> EtcdServer:
    """An empty one."""
    etcd_server.clear()
    return etcd_server


@pytest.fixture
def objects(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> ElectionStore:
    if kind == "etcd":
        server: EtcdServer = request.getfixturevalue("etcd")
        return EtcdStore(Etcd((server.endpoint,)), "cache")
    api: ApiServer = request.getfixturevalue("api")
    file = api.write_kubeconfig(tmp_path / "kubeconfig")
    return ClusterObjects(Cluster(kubeconfig=str(file)), "team", "cache")
