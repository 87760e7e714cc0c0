"""``torch-distributed-with-cache``: pods that its initializer makes, with the rights it has."""

from __future__ import annotations

from typing import Any

from kubernetes import client

from tests.e2e.clusters import Cluster
from tests.e2e.conftest import MakeJob
from tests.e2e.jobs import (
    WITH_CACHE,
    assert_complete,
    grant,
    wait_for_finding,
    wait_for_step,
)
from tests.train_jobs import env

Json = dict[str, Any]


def sized_job(make_job: MakeJob) -> Json:
    made = make_job(runtime=WITH_CACHE, hook="time.sleep(0.5)")
    # The ready file is the default; a process without a mount finds it by the variable.
    made["spec"]["initializer"]["dataset"]["env"] += env(
        CLUSTER_SIZE="3", CACHE_READY_FILE="/tmp/ready"
    )
    return made


def objects_of(cluster: Cluster, namespace: str) -> list[str]:
    """What a job of this runtime leaves in a namespace while it runs."""
    kinds = ("StatefulSet", "Service", "PodDisruptionBudget", "Pod")
    return [
        f"{kind}/{each['metadata']['name']}"
        for kind in kinds
        for each in cluster.list_of(kind, namespace)
    ]


def uid(cluster: Cluster, namespace: str, pod: str) -> str | None:
    found = cluster.get("Pod", pod, namespace)
    return found["metadata"]["uid"] if found else None


def drain(cluster: Cluster, namespace: str, pod: str) -> None:
    """Evicts a pod until it is gone, as ``kubectl drain`` does: a budget may refuse for a while."""
    before = uid(cluster, namespace, pod)

    def is_gone() -> bool:
        # Its next pod has the same name: an eviction without the uid would evict that one, too.
        try:
            cluster.evict(namespace, pod, before)
        except client.ApiException as error:
            if error.status not in (404, 409, 429):
                raise
        return uid(cluster, namespace, pod) != before

    cluster.wait(namespace, is_gone, f"the eviction of {pod}")


def test_a_job_sets_the_size_of_its_cache_whose_nodes_are_drained_and_deleted(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    grant(cluster, namespace, "ServiceAccount", "RoleBinding")
    cluster.apply(sized_job(make_job), namespace=namespace)
    wait_for_step(cluster, namespace, 1)
    cluster.delete("Pod", "job-cache-1", namespace)
    drain(cluster, namespace, "job-cache-0")
    assert_complete(cluster, namespace)
    started = [line for line in cluster.lines(namespace, "job-cache-") if '"listening"' in line]
    assert len(started) == 4
    cluster.wait(
        namespace, lambda: not cluster.list_of("StatefulSet", namespace), "the end of the cache"
    )


def test_a_deleted_job_takes_its_cache_with_it(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    grant(cluster, namespace, "ServiceAccount", "RoleBinding")
    cluster.apply(sized_job(make_job), namespace=namespace)
    wait_for_step(cluster, namespace, 0)
    assert "StatefulSet/job-cache" in objects_of(cluster, namespace)
    cluster.delete("TrainJob", "job", namespace)
    cluster.wait(namespace, lambda: not objects_of(cluster, namespace), "the end of all objects")


def test_an_initializer_without_rights_is_named(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    grant(cluster, namespace, "ServiceAccount")
    cluster.apply(sized_job(make_job), namespace=namespace)
    refused = "not allowed to get trainjobs/job.*is forbidden"
    wait_for_finding(cluster, namespace, "job", refused, "Ask an administrator for this right")
    assert "StatefulSet/job-cache" not in objects_of(cluster, namespace)
