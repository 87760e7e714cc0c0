"""Transient failures of the API server."""

from __future__ import annotations

import time

import pytest

from cache_protocol.errors import NotReadyError
from cache_runtimes.initializer.program import Ending
from tests.api_server import Fault
from tests.initializer_cluster import NAMESPACE, OBJECTS, PERMISSIONS, InitializerCluster
from tests.stateful_sets import StatefulSets, running, starting


@pytest.mark.parametrize("status", [429, 500, 503, 0], ids=["429", "500", "503", "cut-off"])
def test_calls_with_transient_failures_are_repeated(
    cluster: InitializerCluster, pods: StatefulSets, status: int
) -> None:
    for verb, resource in sorted(PERMISSIONS):
        headers = {"Retry-After": "0"} if status == 429 else {}
        cluster.server.faults.append(Fault(status, verb, resource, times=1, headers=headers))
    running_ = cluster.begin().until_ready()
    assert {plural for plural, _ in cluster.objects()} > {"statefulsets", "services"}
    assert running_.end() is Ending.REMOVED
    assert cluster.objects() == {}


@pytest.mark.parametrize("status", [500, 0], ids=["500", "cut-off"])
def test_a_call_with_a_lost_answer_has_its_effect_once(
    cluster: InitializerCluster, pods: StatefulSets, status: int
) -> None:
    for verb in ("create", "delete"):
        for plural, name in OBJECTS:
            cluster.server.faults.append(
                Fault(status, verb, plural, name, times=1, carried_out=True)
            )
    running_ = cluster.begin().until_ready()
    assert set(cluster.objects()) >= set(OBJECTS)
    created = [change for change in cluster.server.calls if change.verb == "create"]
    assert len(created) == 2 * len(OBJECTS)
    assert running_.end() is Ending.REMOVED
    assert cluster.objects() == {}


def test_retry_after_of_the_server_is_kept(cluster: InitializerCluster, pods: StatefulSets) -> None:
    cluster.server.faults.append(
        Fault(429, "get", "trainjobs", times=1, headers={"Retry-After": "2"})
    )
    began = time.monotonic()
    cluster.begin().until_ready().end()
    assert time.monotonic() - began >= 2


def test_at_the_deadline_the_error_names_the_failing_server(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    fault = Fault(503, "create", "services", message="etcd is away")
    cluster.server.faults.append(fault)
    error = cluster.fail(CACHE_READY_DEADLINE_S="2")
    assert isinstance(error, NotReadyError)
    assert "create services/train-1-cache" in str(error)
    assert "etcd is away" in str(error)
    assert cluster.objects() == {}


def test_a_broken_watch_resumes_where_it_broke(cluster: InitializerCluster) -> None:
    with StatefulSets(cluster.store, lambda name: starting()) as pods:
        running_ = cluster.begin()
        cluster.wait_for_calls("watch", "pods")
        cluster.server.cut_connections()
        pods.set_pod("train-1-cache-0", NAMESPACE, running())
        for resource in ("pods", "statefulsets"):  # until they have seen all that happened
            cluster.wait_for_calls("watch", resource, cluster.count("watch", resource) + 3)
        cluster.store.forget_changes()
        cluster.server.cut_connections()
        pods.set_pod("train-1-cache-1", NAMESPACE, running())
        running_.until_ready()
        assert cluster.count("list", "pods") == cluster.count("list", "statefulsets") == 1
        running_.end()


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_watch_from_an_expired_version_lists_again(cluster: InitializerCluster, how: str) -> None:
    with StatefulSets(cluster.store, lambda name: starting()) as pods:
        running_ = cluster.begin()
        for plural in ("pods", "statefulsets"):
            cluster.wait_for_calls("watch", plural)
        if how == "status":
            cluster.server.faults += [
                Fault(410, "watch", plural, times=1) for plural in ("pods", "statefulsets")
            ]
        with cluster.store.changed:  # what happens between is never told
            cluster.server.cut_connections()
            for index in range(2):
                pods.set_pod(f"train-1-cache-{index}", NAMESPACE, running())
            cluster.store.forget_changes()
        running_.until_ready()
        for plural in ("pods", "statefulsets"):
            cluster.wait_for_calls("list", plural, 2)
        running_.end()
