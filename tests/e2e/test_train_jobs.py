"""TrainJobs on a real API server with the controllers of Kubernetes, JobSet and Trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.clusters import Cluster, manifests
from tests.e2e.conftest import MakeJob
from tests.e2e.jobs import assert_complete, wait_for_end, wait_for_step, without_gang

Json = dict[str, Any]

# A job that lasts long enough for a test to meddle with it: 20 steps of each rank.
SLOWLY = "time.sleep(0.25)"


def restarts(cluster: Cluster, namespace: str, part: str) -> list[int]:
    return [
        status["restartCount"]
        for pod in cluster.pods(namespace, part)
        for status in pod["status"].get("containerStatuses") or ()
    ]


def test_a_killed_cache_node_restarts_in_place_and_training_continues(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job(hook=SLOWLY), namespace=namespace)
    wait_for_step(cluster, namespace, 2)
    cluster.kill(namespace, "initializer-0-1")
    cluster.wait(
        namespace,
        lambda: restarts(cluster, namespace, "initializer-0-1") == [1],
        "the restart of the node",
    )
    assert_complete(cluster, namespace)


def test_a_deleted_coordinator_is_replaced_and_each_row_is_read_once(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job(hook=SLOWLY), namespace=namespace)
    wait_for_step(cluster, namespace, 2)
    (pod,) = cluster.pods(namespace, "initializer-0-0")
    cluster.delete("Pod", pod["metadata"]["name"], namespace)
    assert_complete(cluster, namespace)


def test_an_evicted_cache_node_is_replaced_and_is_no_failure_of_its_job(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job(hook=SLOWLY), namespace=namespace)
    wait_for_step(cluster, namespace, 2)
    (pod,) = cluster.pods(namespace, "initializer-0-1")
    cluster.evict(namespace, pod["metadata"]["name"], pod["metadata"]["uid"])
    assert_complete(cluster, namespace)


def test_a_trainer_that_fails_once_is_replaced(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job(hook=SLOWLY), namespace=namespace)
    wait_for_step(cluster, namespace, 2, "node-0-1")
    cluster.kill(namespace, "node-0-1")
    assert_complete(cluster, namespace)
    names = {pod["metadata"]["name"] for pod in cluster.pods(namespace, "initializer")}
    assert len(names) == 2  # the cache was not touched


def test_a_source_that_is_not_there_fails_the_job_at_once_and_by_name(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    made = make_job()
    made["spec"]["initializer"]["dataset"]["storageUri"] = "file:///nowhere/rows"
    cluster.apply(made, namespace=namespace)
    assert wait_for_end(cluster, namespace) == "Failed"
    assert any("/nowhere/rows" in line for line in cluster.lines(namespace, "initializer"))
    assert not cluster.pods(namespace, "node")


def test_a_job_is_suspended_and_resumed_twice(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job(suspend=True, hook=SLOWLY), namespace=namespace)
    for suspended in (True, False, True, False):
        cluster.patch("TrainJob", "job", namespace, {"spec": {"suspend": suspended}})
        if suspended:
            cluster.wait(
                namespace,
                lambda: (
                    cluster.condition("job", namespace) == "Suspended"
                    and not cluster.pods(namespace)
                ),
                "the suspension",
            )
        else:
            cluster.wait(namespace, lambda: len(cluster.pods(namespace)) >= 2, "the pods")
    assert_complete(cluster, namespace)


def test_processes_of_jax_find_their_ranks_and_the_cache(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    made = make_job(runtime="jax-distributed-data-cache")
    del made["spec"]["trainer"]["numProcPerNode"]
    cluster.apply(made, namespace=namespace)
    assert_complete(cluster, namespace)


def test_the_cache_may_be_a_sidecar_of_every_trainer(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    name = "torch-distributed-data-cache-colocated"
    runtime = without_gang(manifests(name)[0])
    cluster.apply(runtime)
    made = make_job(runtime=runtime["metadata"]["name"])
    dataset = made["spec"].pop("initializer")["dataset"]
    variables = [{"name": "STORAGE_URI", "value": dataset["storageUri"]}, *dataset["env"]]
    sidecar = {"name": "cache", "env": variables}
    template = {"spec": {"template": {"spec": {"initContainers": [sidecar]}}}}
    jobs = [{"name": "node", "template": template}]
    made["spec"]["runtimePatches"] = [
        {
            "manager": "example.com/test",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
        }
    ]
    cluster.apply(made, namespace=namespace)
    assert_complete(cluster, namespace)


@pytest.mark.usefixtures("shared_cache")
def test_two_jobs_read_one_dataset_of_the_shared_cache_at_once(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    for name in ("one", "two"):
        cluster.apply(
            make_job(name, runtime="torch-distributed-shared-data-cache"), namespace=namespace
        )
    for name in ("one", "two"):
        assert_complete(cluster, namespace, name)
    sealed = [
        line
        for line in cluster.lines("data-cache-system")
        if f"shard sealed dataset={namespace}/" in line
    ]
    assert len(sealed) == len(set(line.partition("shard=")[2] for line in sealed))
