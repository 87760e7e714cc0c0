"""Runs whose pods do not start, or go away while the job trains."""

from __future__ import annotations

import pytest

from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
)
from cache_runtimes.initializer.cluster import ClusterError
from cache_runtimes.initializer.program import Ending
from tests.api_server import Fault
from tests.initializer_cluster import JOB, NAMESPACE, OBJECTS, WAIT_S, InitializerCluster, Json
from tests.stateful_sets import StatefulSets, exited, running, starting, unschedulable, waiting
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (waiting("ErrImagePull", "not found"), NodeUnavailableError, "ErrImagePull: not found"),
        (waiting("ImagePullBackOff", "server:1"), NodeUnavailableError, "ImagePullBackOff"),
        (waiting("InvalidImageName"), NodeUnavailableError, "InvalidImageName"),
        (
            waiting("CreateContainerConfigError", 'secret "keys" not found'),
            NodeUnavailableError,
            'CreateContainerConfigError: secret "keys" not found',
        ),
        (
            exited(65, "log\ncache-server: LoadError: no table\n"),
            LoadError,
            "pod train-1-cache-1 exited with 65: cache-server: LoadError: no table",
        ),
        (
            exited(78, "cache-server: ConfigError: bad sql"),
            ConfigError,
            "pod train-1-cache-1 exited with 78: cache-server: ConfigError: bad sql",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pod_that_cannot_start_fails_the_run_at_once_with_its_reason(
    cluster: InitializerCluster, status: Json, error: type[CacheError], reason: str
) -> None:
    def states(name: str) -> Json:
        return status if name.endswith("-1") else starting()

    with StatefulSets(cluster.store, states):
        found = cluster.fail(CACHE_READY_DEADLINE_S="1000")
    assert type(found) is error
    assert reason in str(found)
    assert cluster.objects() == {}


def test_pods_that_pod_security_refuses_fail_the_run_at_once(cluster: InitializerCluster) -> None:
    refusal = 'pods "train-1-cache-0" is forbidden: violates PodSecurity "restricted:latest"'
    with StatefulSets(cluster.store, lambda name: None, refusal=refusal):
        error = cluster.fail(CACHE_READY_DEADLINE_S="1000")
    assert isinstance(error, NodeUnavailableError)
    assert refusal in str(error)
    assert cluster.objects() == {}


def test_a_slow_image_pull_is_waited_for(cluster: InitializerCluster) -> None:
    with StatefulSets(cluster.store, lambda name: waiting("ErrImagePull", "throttled")) as pods:
        running_ = cluster.begin(CACHE_FAILURE_GRACE_S="1000")
        cluster.wait_for_calls("watch", "pods")
        pods.set_pod("train-1-cache-0", NAMESPACE, waiting("ImagePullBackOff"))
        for index in range(2):
            pods.set_pod(f"train-1-cache-{index}", NAMESPACE, running())
        running_.until_ready().end()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (unschedulable("0/3 nodes are available"), "Unschedulable: 0/3 nodes are available"),
        (exited(137, "", "OOMKilled"), "exited with 137: OOMKilled"),
        (starting(), "0 of 2 cache pods ready"),
    ],
    ids=["unschedulable", "crashes", "never-ready"],
)
def test_at_the_deadline_the_reason_is_what_the_pods_wait_for(
    cluster: InitializerCluster, status: Json, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with StatefulSets(cluster.store, lambda name: status):
        error = cluster.fail(CACHE_READY_DEADLINE_S="1")
    assert isinstance(error, NotReadyError)
    assert "not ready after 1 s" in str(error)
    assert reason in str(error)
    assert any(reason in record.message for record in caplog.records)
    assert cluster.objects() == {}


def test_at_the_deadline_the_error_names_the_quota(cluster: InitializerCluster) -> None:
    refusal = 'pods "train-1-cache-0" is forbidden: exceeded quota: q'
    with StatefulSets(cluster.store, lambda name: None, refusal=refusal):
        error = cluster.fail(CACHE_READY_DEADLINE_S="1")
    assert isinstance(error, NotReadyError)
    assert refusal in str(error)


def test_pods_of_a_deleted_job_of_that_name_are_ignored(
    cluster: InitializerCluster,
) -> None:
    label = {"trainer-data-cache/train-job": JOB}
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "x", "uid": "former"}
    cluster.store.collects_garbage = False
    status = exited(65, "of a former job")
    status["containerStatuses"][0]["name"] = "cache"
    former = {
        "metadata": {"name": "train-1-cache-9", "labels": label, "ownerReferences": [owner]},
        "status": status,
    }
    cluster.store.create("pods", former, NAMESPACE)
    with StatefulSets(cluster.store):
        running_ = cluster.begin().until_ready()
        cluster.store.delete("pods", "train-1-cache-9", NAMESPACE)
        running_.end()


# -- while the job trains --------------------------------------------------------------------------


def test_deleting_the_cache_of_a_job_fails_the_run(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    running_ = cluster.begin().until_ready()
    cluster.store.delete("statefulsets", "train-1-cache", NAMESPACE)
    error = running_.error()
    assert isinstance(error, ClusterError)
    assert "statefulsets/train-1-cache was deleted" in str(error)
    assert not cluster.ready_file.exists()
    assert cluster.objects() == {}


def test_replacing_the_cache_of_a_job_fails_the_run(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    running_ = cluster.begin().until_ready()
    with cluster.store.changed:
        cluster.store.delete("statefulsets", "train-1-cache", NAMESPACE)
        metadata = {"name": "train-1-cache"}
        template: Json = {"metadata": {}, "spec": {"containers": []}}
        theirs = cluster.store.create(
            "statefulsets",
            {"metadata": metadata, "spec": {"replicas": 0, "template": template}},
            NAMESPACE,
        )
    assert "statefulsets/train-1-cache was deleted" in str(running_.error())
    (left,) = cluster.objects().values()
    assert left["metadata"]["uid"] == theirs["metadata"]["uid"]


def test_a_pod_that_fails_for_good_while_the_job_trains_fails_the_run(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    running_ = cluster.begin().until_ready()
    pods.set_pod("train-1-cache-0", NAMESPACE, exited(65, "cache-server: LoadError: changed"))
    error = running_.error()
    assert isinstance(error, LoadError)
    assert not cluster.ready_file.exists()
    assert cluster.objects() == {}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (exited(137, "", "OOMKilled"), "OOMKilled"),
        (waiting("ErrImagePull", "the registry is away"), "ErrImagePull: the registry is away"),
        (waiting("ImagePullBackOff"), "ImagePullBackOff"),
        (waiting("CreateContainerConfigError", 'secret "keys" not found'), 'secret "keys"'),
    ],
    ids=["killed", "no-image", "still-no-image", "no-secret"],
)
def test_a_missing_pod_of_a_training_job_is_waited_for_and_the_cache_is_not_ready(
    cluster: InitializerCluster,
    pods: StatefulSets,
    status: Json,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    running_ = cluster.begin(CACHE_READY_DEADLINE_S="2", CACHE_FAILURE_GRACE_S="0").until_ready()
    before = cluster.uids()
    pods.set_pod("train-1-cache-0", NAMESPACE, status)
    wait_until(lambda: "1 of 2 cache pods ready" in caplog.text, WAIT_S, "it is told")
    wait_until(lambda: told in caplog.text, WAIT_S, "so is why")
    wait_until(lambda: not cluster.ready_file.exists(), WAIT_S, "not ready")
    pods.set_pod("train-1-cache-0", NAMESPACE, running())
    good = "2 of 2 cache pods ready"
    wait_until(lambda: caplog.records[-1].message == good, WAIT_S, "told again")
    wait_until(cluster.ready_file.exists, WAIT_S, "ready again")
    assert cluster.uids() == before
    assert running_.end() is Ending.REMOVED


def test_the_cache_stays_where_only_this_pod_is_evicted(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    own = {"metadata": {"name": "initializer"}, "status": {"conditions": [condition]}}
    cluster.store.create("pods", own, NAMESPACE)
    running_ = cluster.begin(POD_NAME="initializer").until_ready()
    before = cluster.uids()
    assert running_.end() is Ending.LEFT
    assert cluster.uids() == before

    cluster.store.delete("pods", "initializer", NAMESPACE)
    running_ = cluster.begin(POD_NAME="initializer-2").until_ready()
    after = cluster.uids()
    assert {key: after[key] for key in OBJECTS} == {key: before[key] for key in OBJECTS}
    assert running_.end() is Ending.REMOVED
    assert cluster.objects() == {}


def test_a_pod_that_cannot_be_read_counts_as_the_end_of_the_job(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    assert cluster.server.permissions is not None
    cluster.server.permissions.remove(("get", "pods"))
    assert cluster.begin(POD_NAME="initializer").until_ready().end() is Ending.REMOVED
    assert cluster.objects() == {}


def test_a_signal_during_a_call_removes_the_objects(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    cluster.server.faults.append(Fault(503, "create", "statefulsets"))
    running_ = cluster.begin()
    cluster.wait_for_calls("create", "statefulsets")
    assert running_.end() is Ending.REMOVED
    assert cluster.objects() == {}
