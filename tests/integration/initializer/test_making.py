"""The objects of a cache: made, adopted from a former run, left to whose they are, removed."""

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
from tests.initializer_world import (
    JOB,
    NAMESPACE,
    OBJECTS,
    PERMISSIONS,
    WAIT_S,
    Json,
    World,
    each_object,
)
from tests.stateful_sets import StatefulSets, running, starting
from tests.waiting import wait_until


def test_a_fresh_run_makes_the_cache_and_removes_it_when_it_is_told_to_end(
    world: World, pods: StatefulSets
) -> None:
    running_ = world.begin().until_ready()
    made = world.objects()
    assert set(made) == {*OBJECTS, ("pods", "train-1-cache-0"), ("pods", "train-1-cache-1")}
    for key, planned in world.planned().items():
        (owner,) = made[key]["metadata"]["ownerReferences"]
        assert owner["uid"] == world.job["metadata"]["uid"]
        assert made[key].get("spec") == planned.body.get("spec")

    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}
    assert world.store.get("trainjobs", JOB, NAMESPACE) == world.job


def test_without_a_dataset_of_the_job_the_cache_comes_up_empty(
    world: World, pods: StatefulSets
) -> None:
    world.store.delete("trainjobs", JOB, NAMESPACE)
    world.job = world.store.create(
        "trainjobs", {"metadata": {"name": JOB}, "spec": {"initializer": None}}, NAMESPACE
    )
    running_ = world.begin(STORAGE_URI="", CLUSTER_SIZE="").until_ready()
    (container,) = world.objects()["pods", "train-1-cache-0"]["spec"]["containers"]
    assert "STORAGE_URI" not in {variable["name"] for variable in container["env"]}
    assert "--load-from-env" in container["args"]
    assert running_.end() is Ending.REMOVED


def test_it_asks_for_what_its_role_allows_and_needs_all_of_it(world: World) -> None:
    for plural, name in OBJECTS:
        world.make_planned(plural, name)
    world.store.delete("statefulsets", "train-1-cache", NAMESPACE)
    quota = 'pods "train-1-cache-0" is forbidden: exceeded quota: q'
    allowed = threading.Event()
    with StatefulSets(
        world.store, lambda name: running() if allowed.is_set() else None, refusal=quota
    ):
        running_ = world.begin(POD_NAME="initializer")
        world.wait_for_calls("list", "events")
        allowed.set()
        world.store.create("configmaps", {"metadata": {"name": "wakes-the-controller"}}, NAMESPACE)
        running_.until_ready().end()
    assert world.server.verbs == PERMISSIONS


def test_a_file_that_a_former_run_left_does_not_count_as_ready(world: World) -> None:
    world.ready_file.touch()
    with StatefulSets(world.store, lambda name: starting()):
        running_ = world.begin()
        world.wait_for_calls("watch", "pods")
        assert not world.ready_file.exists()
        running_.end()


def test_the_head_of_the_ancestor_is_named_as_not_used(
    world: World, pods: StatefulSets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world.store.patch("trainjobs", JOB, {"metadata": {"labels": {"a": "b"}}}, NAMESPACE)
    world.begin(HEAD_CPU="1", HEAD_MEM="1Gi").until_ready().end()
    assert "HEAD_CPU, HEAD_MEM: not used" in caplog.text


def test_pods_that_come_up_one_after_the_other_are_reported_as_they_do(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with StatefulSets(world.store, lambda name: starting()) as pods:
        running_ = world.begin()
        wait_until(lambda: "0 of 2 cache pods ready" in caplog.text, WAIT_S, "begun")
        wait_until(lambda: caplog.text.count("0 of 2") > 2, WAIT_S, "said again and again")
        assert not world.ready_file.exists()
        pods.set_pod("train-1-cache-1", NAMESPACE, running())
        wait_until(lambda: "1 of 2 cache pods ready" in caplog.text, WAIT_S, "one is ready")
        pods.set_pod("train-1-cache-0", NAMESPACE, running())
        running_.until_ready()
        assert "2 of 2 cache pods ready" in caplog.text
        running_.end()


# -- objects that are there already ----------------------------------------------------------------


@each_object
def test_an_object_of_a_former_run_is_adopted(
    world: World, pods: StatefulSets, plural: str, name: str
) -> None:
    former = world.make_planned(plural, name)
    running_ = world.begin().until_ready()
    assert world.uids()[plural, name] == former["metadata"]["uid"]
    running_.end()
    assert world.objects() == {}


@each_object
def test_an_object_that_a_former_run_planned_otherwise_is_replaced(
    world: World, pods: StatefulSets, plural: str, name: str
) -> None:
    body = copy.deepcopy(world.planned()[plural, name].body)
    body["metadata"]["annotations"]["trainer-data-cache/plan"] = "of another version"
    former = world.store.create(plural, body)
    running_ = world.begin().until_ready()
    assert world.uids()[plural, name] != former["metadata"]["uid"]
    running_.end()
    assert world.objects() == {}


@pytest.mark.parametrize("owner", ["nobody", "another-kind", "another-job"])
@each_object
def test_an_object_of_somebody_else_is_named_with_its_owner_and_left_untouched(
    world: World, pods: StatefulSets, plural: str, name: str, owner: str
) -> None:
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "uid-web"}
    if owner == "another-job":
        job = {"metadata": {"name": "train-2"}}
        uid = world.store.create("trainjobs", job, NAMESPACE)["metadata"]["uid"]
        api = "trainer.kubeflow.org/v1alpha1"
        reference = {"apiVersion": api, "kind": "TrainJob", "name": "train-2", "uid": uid}
    world.store.collects_garbage = owner != "another-kind"  # whose Deployment is not in the store
    references = [] if owner == "nobody" else [reference]
    template: Json = {"metadata": {}, "spec": {"containers": []}}
    theirs = world.store.create(
        plural,
        {
            "metadata": {"name": name, "ownerReferences": references},
            "spec": {"replicas": 0, "template": template},
        },
        NAMESPACE,
    )

    error = world.fail()

    assert isinstance(error, ClusterError)
    assert f"{plural}/{name}" in str(error)
    assert ("owned by nobody" if owner == "nobody" else reference["uid"]) in str(error)
    left = {key: one for key, one in world.objects().items() if key[0] != "pods"}
    assert set(left) == {(plural, name)}
    assert left[plural, name]["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert "deletionTimestamp" not in left[plural, name]["metadata"]


@pytest.mark.parametrize("ending", [True, False], ids=["being-deleted", "not-yet-deleted"])
@each_object
def test_what_a_former_job_of_that_name_left_is_waited_for(
    world: World, pods: StatefulSets, plural: str, name: str, ending: bool
) -> None:
    world.store.collects_garbage = False
    body = copy.deepcopy(world.planned()[plural, name].body)
    body["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former-job"
    body["metadata"]["finalizers"] = ["foregroundDeletion"]
    former = world.store.create(plural, body)
    if ending:
        world.store.delete(plural, name, NAMESPACE)
    running_ = world.begin()
    wait_until(
        lambda: [call.verb for call in world.server.calls if call.name == name].count("get") > 1,
        WAIT_S,
        "it looks again",
    )
    assert world.uids()[plural, name] == former["metadata"]["uid"]
    assert ("delete", plural) not in world.server.verbs

    world.store.collects_garbage = True
    world.store.patch(plural, name, {"metadata": {"finalizers": None}}, NAMESPACE)
    if not ending:
        world.store.collect_garbage()
    running_.until_ready().end()
    assert world.objects() == {}


def test_what_a_former_job_left_may_not_stay_beyond_the_deadline(world: World) -> None:
    world.store.collects_garbage = False
    body = copy.deepcopy(world.planned()["services", "train-1-cache"].body)
    body["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former-job"
    world.store.create("services", body)
    error = world.fail(CACHE_READY_DEADLINE_S="1")
    assert isinstance(error, NotReadyError)
    assert "services/train-1-cache" in str(error)
    assert set(world.objects()) == {("services", "train-1-cache")}


@pytest.mark.parametrize("ends", ["deadline", "signal"])
def test_a_name_that_is_taken_by_nothing_to_be_seen_is_asked_for_now_and_then(
    world: World, ends: str
) -> None:
    world.server.faults.append(Fault(409, "create", "services", message="already exists"))
    began = time.monotonic()
    running_ = world.begin(CACHE_READY_DEADLINE_S="2" if ends == "deadline" else "1000")
    if ends == "deadline":
        error = running_.error()
        assert isinstance(error, NotReadyError)
        assert "services/train-1-cache" in str(error)
    else:
        world.wait_for_calls("create", "services", 2)
        assert running_.end() is Ending.REMOVED
    assert world.count("create", "services") <= 2 + 3 * (time.monotonic() - began)
    assert world.objects() == {}


def test_an_object_that_took_the_place_of_a_deleted_one_is_not_deleted(world: World) -> None:
    former = world.make_planned("services", "train-1-cache")["metadata"]["uid"]
    world.store.delete("services", "train-1-cache", NAMESPACE)
    theirs = world.store.create("services", {"metadata": {"name": "train-1-cache"}}, NAMESPACE)
    cluster = Cluster(connect(str(world.kubeconfig)), NAMESPACE)
    patience = Patience.lasting(WAIT_S, threading.Event())
    assert not cluster.delete(Kind.SERVICE, "train-1-cache", former, patience)
    assert world.store.get("services", "train-1-cache", NAMESPACE) == theirs
