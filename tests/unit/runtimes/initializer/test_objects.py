"""The objects of a cache: created, adopted from an earlier run, or left to their owner."""

from __future__ import annotations

import copy
import threading
import time

import pytest

from cache_protocol.errors import NotReadyError
from cache_runtimes.initializer.cluster import Cluster, ClusterError, Patience, connect
from cache_runtimes.initializer.plan import Kind
from cache_runtimes.initializer.program import Ending
from tests.api_server import Fault
from tests.initializer_cluster import (
    JOB,
    NAMESPACE,
    OBJECTS,
    PERMISSIONS,
    WAIT_S,
    InitializerCluster,
    Json,
    each_object,
)
from tests.stateful_sets import StatefulSets, running, starting
from tests.waiting import wait_until


def test_a_run_creates_the_cache_and_removes_it_when_told_to_end(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    running_ = cluster.begin().until_ready()
    made = cluster.objects()
    assert set(made) == {*OBJECTS, ("pods", "train-1-cache-0"), ("pods", "train-1-cache-1")}
    for key, planned in cluster.planned().items():
        (owner,) = made[key]["metadata"]["ownerReferences"]
        assert owner["uid"] == cluster.job["metadata"]["uid"]
        assert made[key].get("spec") == planned.body.get("spec")

    assert running_.end() is Ending.REMOVED
    assert cluster.objects() == {}
    assert cluster.store.get("trainjobs", JOB, NAMESPACE) == cluster.job


def test_without_a_dataset_of_the_job_the_cache_starts_empty(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    cluster.store.delete("trainjobs", JOB, NAMESPACE)
    cluster.job = cluster.store.create(
        "trainjobs", {"metadata": {"name": JOB}, "spec": {"initializer": None}}, NAMESPACE
    )
    running_ = cluster.begin(STORAGE_URI="", CLUSTER_SIZE="").until_ready()
    (container,) = cluster.objects()["pods", "train-1-cache-0"]["spec"]["containers"]
    assert "STORAGE_URI" not in {variable["name"] for variable in container["env"]}
    assert "--load-from-env" in container["args"]
    assert running_.end() is Ending.REMOVED


def test_it_uses_exactly_the_rights_of_its_role(cluster: InitializerCluster) -> None:
    for plural, name in OBJECTS:
        cluster.make_planned(plural, name)
    cluster.store.delete("statefulsets", "train-1-cache", NAMESPACE)
    quota = 'pods "train-1-cache-0" is forbidden: exceeded quota: q'
    allowed = threading.Event()
    with StatefulSets(
        cluster.store, lambda name: running() if allowed.is_set() else None, refusal=quota
    ):
        running_ = cluster.begin(POD_NAME="initializer")
        cluster.wait_for_calls("list", "events")
        allowed.set()
        cluster.store.create(
            "configmaps", {"metadata": {"name": "wakes-the-controller"}}, NAMESPACE
        )
        running_.until_ready().end()
    assert cluster.server.verbs == PERMISSIONS


def test_the_ready_file_of_an_earlier_run_does_not_count(cluster: InitializerCluster) -> None:
    cluster.ready_file.touch()
    with StatefulSets(cluster.store, lambda name: starting()):
        running_ = cluster.begin()
        cluster.wait_for_calls("watch", "pods")
        assert not cluster.ready_file.exists()
        running_.end()


def test_variables_of_a_head_are_named_as_ignored(
    cluster: InitializerCluster, pods: StatefulSets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cluster.store.patch("trainjobs", JOB, {"metadata": {"labels": {"a": "b"}}}, NAMESPACE)
    cluster.begin(HEAD_CPU="1", HEAD_MEM="1Gi").until_ready().end()
    assert "HEAD_CPU, HEAD_MEM: ignored" in caplog.text


def test_each_pod_that_becomes_ready_is_logged(
    cluster: InitializerCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with StatefulSets(cluster.store, lambda name: starting()) as pods:
        running_ = cluster.begin()
        wait_until(lambda: "0 of 2 cache pods ready" in caplog.text, WAIT_S, "begun")
        wait_until(lambda: caplog.text.count("0 of 2") > 2, WAIT_S, "repeated progress lines")
        assert not cluster.ready_file.exists()
        pods.set_pod("train-1-cache-1", NAMESPACE, running())
        wait_until(lambda: "1 of 2 cache pods ready" in caplog.text, WAIT_S, "one is ready")
        pods.set_pod("train-1-cache-0", NAMESPACE, running())
        running_.until_ready()
        assert "2 of 2 cache pods ready" in caplog.text
        running_.end()


# -- objects that are there already ----------------------------------------------------------------


@each_object
def test_an_object_of_an_earlier_run_is_adopted(
    cluster: InitializerCluster, pods: StatefulSets, plural: str, name: str
) -> None:
    former = cluster.make_planned(plural, name)
    running_ = cluster.begin().until_ready()
    assert cluster.uids()[plural, name] == former["metadata"]["uid"]
    running_.end()
    assert cluster.objects() == {}


@each_object
def test_an_object_that_an_earlier_run_planned_differently_is_replaced(
    cluster: InitializerCluster, pods: StatefulSets, plural: str, name: str
) -> None:
    body = copy.deepcopy(cluster.planned()[plural, name].body)
    body["metadata"]["annotations"]["trainer-data-cache/plan"] = "of another version"
    former = cluster.store.create(plural, body)
    running_ = cluster.begin().until_ready()
    assert cluster.uids()[plural, name] != former["metadata"]["uid"]
    running_.end()
    assert cluster.objects() == {}


@pytest.mark.parametrize("owner", ["none", "another-kind", "another-job"])
@each_object
def test_an_object_of_another_owner_is_named_with_its_owner_and_left_untouched(
    cluster: InitializerCluster, pods: StatefulSets, plural: str, name: str, owner: str
) -> None:
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "uid-web"}
    if owner == "another-job":
        job = {"metadata": {"name": "train-2"}}
        uid = cluster.store.create("trainjobs", job, NAMESPACE)["metadata"]["uid"]
        api = "trainer.kubeflow.org/v1alpha1"
        reference = {"apiVersion": api, "kind": "TrainJob", "name": "train-2", "uid": uid}
    cluster.store.collects_garbage = owner != "another-kind"  # whose Deployment is not in the store
    references = [] if owner == "none" else [reference]
    template: Json = {"metadata": {}, "spec": {"containers": []}}
    theirs = cluster.store.create(
        plural,
        {
            "metadata": {"name": name, "ownerReferences": references},
            "spec": {"replicas": 0, "template": template},
        },
        NAMESPACE,
    )

    error = cluster.fail()

    assert isinstance(error, ClusterError)
    assert f"{plural}/{name}" in str(error)
    assert ("without an owner" if owner == "none" else reference["uid"]) in str(error)
    left = {key: one for key, one in cluster.objects().items() if key[0] != "pods"}
    assert set(left) == {(plural, name)}
    assert left[plural, name]["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert "deletionTimestamp" not in left[plural, name]["metadata"]


@pytest.mark.parametrize("ending", [True, False], ids=["being-deleted", "not-yet-deleted"])
@each_object
def test_objects_of_a_deleted_job_of_that_name_are_waited_for(
    cluster: InitializerCluster, pods: StatefulSets, plural: str, name: str, ending: bool
) -> None:
    cluster.store.collects_garbage = False
    body = copy.deepcopy(cluster.planned()[plural, name].body)
    body["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former-job"
    body["metadata"]["finalizers"] = ["foregroundDeletion"]
    former = cluster.store.create(plural, body)
    if ending:
        cluster.store.delete(plural, name, NAMESPACE)
    running_ = cluster.begin()
    wait_until(
        lambda: [call.verb for call in cluster.server.calls if call.name == name].count("get") > 1,
        WAIT_S,
        "it looks again",
    )
    assert cluster.uids()[plural, name] == former["metadata"]["uid"]
    assert ("delete", plural) not in cluster.server.verbs

    cluster.store.collects_garbage = True
    cluster.store.patch(plural, name, {"metadata": {"finalizers": None}}, NAMESPACE)
    if not ending:
        cluster.store.collect_garbage()
    running_.until_ready().end()
    assert cluster.objects() == {}


def test_objects_of_a_deleted_job_fail_the_run_at_the_deadline(
    cluster: InitializerCluster,
) -> None:
    cluster.store.collects_garbage = False
    body = copy.deepcopy(cluster.planned()["services", "train-1-cache"].body)
    body["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former-job"
    cluster.store.create("services", body)
    error = cluster.fail(CACHE_READY_DEADLINE_S="1")
    assert isinstance(error, NotReadyError)
    assert "services/train-1-cache" in str(error)
    assert set(cluster.objects()) == {("services", "train-1-cache")}


@pytest.mark.parametrize("ends", ["deadline", "signal"])
def test_a_reserved_name_without_an_object_is_polled(
    cluster: InitializerCluster, ends: str
) -> None:
    cluster.server.faults.append(Fault(409, "create", "services", message="already exists"))
    began = time.monotonic()
    running_ = cluster.begin(CACHE_READY_DEADLINE_S="2" if ends == "deadline" else "1000")
    if ends == "deadline":
        error = running_.error()
        assert isinstance(error, NotReadyError)
        assert "services/train-1-cache" in str(error)
    else:
        cluster.wait_for_calls("create", "services", 2)
        assert running_.end() is Ending.REMOVED
    assert cluster.count("create", "services") <= 2 + 3 * (time.monotonic() - began)
    assert cluster.objects() == {}


def test_an_object_that_took_the_place_of_a_deleted_one_is_not_deleted(
    cluster: InitializerCluster,
) -> None:
    former = cluster.make_planned("services", "train-1-cache")["metadata"]["uid"]
    cluster.store.delete("services", "train-1-cache", NAMESPACE)
    theirs = cluster.store.create("services", {"metadata": {"name": "train-1-cache"}}, NAMESPACE)
    api = Cluster(connect(str(cluster.kubeconfig)), NAMESPACE)
    patience = Patience.lasting(WAIT_S, threading.Event())
    assert not api.delete(Kind.SERVICE, "train-1-cache", former, patience)
    assert cluster.store.get("services", "train-1-cache", NAMESPACE) == theirs
