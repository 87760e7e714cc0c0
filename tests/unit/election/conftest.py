"""A cache's objects on a Kubernetes API server in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.auth.kubernetes import Cluster
from cache_server.election.cluster_objects import ClusterObjects
from tests.api_server import ApiServer


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def objects(api: ApiServer, tmp_path: Path) -> ClusterObjects:
    file = api.write_kubeconfig(tmp_path / "kubeconfig")
    return ClusterObjects(Cluster(kubeconfig=str(file)), "team", "cache")
