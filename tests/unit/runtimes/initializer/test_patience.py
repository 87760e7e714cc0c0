"""Transient refusals of the API server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_protocol.errors import NotReadyError
from cache_runtimes.initializer.cluster import (
    Cluster,
    ClusterError,
    Patience,
    StoppedError,
    connect,
)
from cache_runtimes.initializer.plan import JOB_LABEL, Kind, Names
from cache_runtimes.initializer.watcher import Timing, Watcher
from tests.api_server import ApiServer, Fault
from tests.stateful_sets import StatefulSets, running, starting
from tests.waiting import wait_until

WAIT_S = 60.0
NAMESPACE = "team-a"
SERVICE = {"metadata": {"name": "train-1-cache"}, "spec": {}}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running_:
        yield running_


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Cluster:
    api = connect(str(server.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE)))
    return Cluster(api, NAMESPACE, watch_timeout_s=1)


def lasting(seconds: float) -> Patience:
    return Patience.lasting(seconds, threading.Event())


@pytest.mark.parametrize(
    "reason", ["status unknown for quota: q, resources: services", "exceeded quota: q, used: 5"]
)
def test_an_object_over_quota_is_created_once_there_is_room(
    server: ApiServer, cluster: Cluster, reason: str
) -> None:
    message = f'services "train-1-cache" is forbidden: {reason}'
    server.faults.append(Fault(403, "create", "services", times=2, message=message))
    assert cluster.create(Kind.SERVICE, SERVICE, lasting(WAIT_S)) is not None


def test_a_quota_without_room_is_the_reason_at_the_deadline(
    server: ApiServer, cluster: Cluster
) -> None:
    message = 'services "train-1-cache" is forbidden: exceeded quota: q, used: 5'
    server.faults.append(Fault(403, "create", "services", message=message))
    with pytest.raises(NotReadyError, match=r"did not create services/train-1-cache .* quota: q"):
        cluster.create(Kind.SERVICE, SERVICE, lasting(1.0))


def test_a_missing_permission_is_not_waited_for(server: ApiServer, cluster: Cluster) -> None:
    server.faults.append(Fault(403, "create", "services", message="cannot create services"))
    with pytest.raises(ClusterError, match="not allowed to create services/train-1-cache"):
        cluster.create(Kind.SERVICE, SERVICE, lasting(WAIT_S))


@pytest.mark.parametrize("status", [401, 403])
def test_while_the_job_trains_a_refused_watch_is_repeated(
    server: ApiServer, cluster: Cluster, status: int
) -> None:
    names = Names("train-1")
    labels = {JOB_LABEL: "train-1"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "cache"}]}}
    body = {"metadata": {"name": names.cache}, "spec": {"replicas": 1, "template": template}}
    made = server.store.create("statefulsets", body, NAMESPACE)
    stop, told = threading.Event(), list[bool]()
    patience = Patience.lasting(WAIT_S, stop)
    failures: list[Exception] = []

    def run() -> None:
        timing = Timing(failure_grace_s=0.0, progress_s=1.0)
        with Watcher(cluster, names, made["metadata"]["uid"], timing, stop) as watcher:
            try:
                watcher.wait_until_ready(patience)
                watcher.stay(told.append)
            except Exception as error:
                failures.append(error)

    with StatefulSets(server.store) as pods:
        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: told == [True] or failures, WAIT_S, "ready")
        server.faults.append(Fault(status, message="RBAC: role not found"))
        server.cut_connections()
        asked = len(server.calls)
        wait_until(lambda: len(server.calls) > asked + 4 or failures, WAIT_S, "refused")
        server.faults.clear()
        pods.set_pod("train-1-cache-0", NAMESPACE, starting())
        wait_until(lambda: told == [True, False] or failures, WAIT_S, "not ready")
        pods.set_pod("train-1-cache-0", NAMESPACE, running())
        wait_until(lambda: told == [True, False, True] or failures, WAIT_S, "ready again")
        stop.set()
        thread.join(WAIT_S)
    (error,) = failures
    assert isinstance(error, StoppedError)
