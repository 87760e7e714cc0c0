"""Fixtures of the initializer's tests: an API server, and pods that start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server import ApiServer
from tests.initializer_cluster import InitializerCluster
from tests.stateful_sets import StatefulSets


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[InitializerCluster]:
    with ApiServer() as server:
        yield InitializerCluster(server, tmp_path)


@pytest.fixture
def pods(cluster: InitializerCluster) -> Iterator[StatefulSets]:
    """A controller that brings every pod up."""
    with StatefulSets(cluster.store) as controller:
        yield controller
