"""The cache pods of an initializer that is a pod itself, as the API server has them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cache_runtimes.initializer.cluster import Cluster, connect
from cache_runtimes.initializer.program import Ending, run
from cache_runtimes.initializer.settings import from_env
from tests.api_server import ApiServer
from tests.stateful_sets import StatefulSets
from tests.waiting import wait_until

WAIT_S = 60.0
NAMESPACE = "team-a"
ALLOWED = {
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [{"key": "training", "operator": "Exists"}],
}


def test_cache_pods_have_pull_secrets_and_tolerations_of_their_initializer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    ready, stop, endings = tmp_path / "ready", threading.Event(), list[Ending]()
    environ = {
        "TRAIN_JOB_NAME": "train-1",
        "POD_NAMESPACE": NAMESPACE,
        "POD_NAME": "initializer",
        "CACHE_IMAGE": "registry.example.com/server:1",
        "CACHE_READY_FILE": str(ready),
    }
    with ApiServer() as server, StatefulSets(server.store):
        store = server.store
        store.create("trainjobs", {"metadata": {"name": "train-1"}, "spec": {}}, NAMESPACE)
        store.create("pods", {"metadata": {"name": "initializer"}, "spec": ALLOWED}, NAMESPACE)
        api = connect(str(server.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE)))
        cluster = Cluster(api, NAMESPACE, watch_timeout_s=1)
        thread = threading.Thread(
            target=lambda: endings.append(run(from_env(environ), cluster, stop))
        )
        thread.start()
        wait_until(lambda: ready.exists() or not thread.is_alive(), WAIT_S, "ready")
        pods = [store.get("pods", f"train-1-cache-{index}", NAMESPACE) for index in range(2)]
        assert [{key: pod["spec"][key] for key in ALLOWED} for pod in pods] == [ALLOWED] * 2
        stop.set()
        thread.join(WAIT_S)
    assert endings == [Ending.REMOVED]
