"""A cache's objects on a Kubernetes API server in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.auth.kubernetes import Cluster
from cache_server.election.cluster_objects import ClusterObjects
from tests.api_server import ApiServer


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture
def objects(api: ApiServer) -> ClusterObjects:
    return ClusterObjects(Cluster(), "team", "cache")
