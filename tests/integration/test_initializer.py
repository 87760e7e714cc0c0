"""The initializer against an API server: whatever happens, it says why and leaves nothing behind.

Most runs are in this process, in a thread; those that a signal or a crash ends are real programs.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.errors import CacheError, ConfigError, LoadError, NodeUnavailableError, NotReadyError
from runtimes.initializer.cluster import Cluster, ClusterError, Patience, connect
from runtimes.initializer.plan import Kind, Planned, plan_objects
from runtimes.initializer.program import Ending, run
from runtimes.initializer.settings import from_env
from tests.api_server import ApiServer, Fault
from tests.stateful_sets import (
    StatefulSets,
    exited,
    running,
    starting,
    unschedulable,
    waiting,
)
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0
TERMINATED = 128 + signal.SIGTERM
JOB, NAMESPACE = "train-1", "team-a"
URI = "s3://bucket/tpch/lineitem/"
# What the shipped role allows, and no more.
PERMISSIONS = {
    ("get", "trainjobs"),
    *(
        (verb, resource)
        for verb in ("get", "create", "delete")
        for resource in ("serviceaccounts", "services", "statefulsets")
    ),
    *(("list", resource) for resource in ("statefulsets", "pods", "events")),
    *(("watch", resource) for resource in ("statefulsets", "pods")),
    ("get", "pods"),
}
OBJECTS = [
    ("serviceaccounts", "train-1-cache"),
    ("services", "train-1-cache"),
    ("services", "train-1-cache-service"),
    ("statefulsets", "train-1-cache"),
]
each_object = pytest.mark.parametrize(
    ("plural", "name"), OBJECTS, ids=[f"{plural}-{name}" for plural, name in OBJECTS]
)
Json = dict[str, Any]


class World:
    """An API server with a TrainJob, and what an initializer of it is told."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.store = server.store
        self.folder = folder
        self.kubeconfig = server.write_kubeconfig(folder / "kubeconfig", NAMESPACE)
        self.ready_file = folder / "ready"
        self.job = self.make_job()
        server.permissions = set(PERMISSIONS)

    def make_job(self) -> Json:
        dataset = {"storageUri": URI, "env": [{"name": "CLUSTER_SIZE", "value": "3"}]}
        body = {"metadata": {"name": JOB}, "spec": {"initializer": {"dataset": dataset}}}
        return self.store.create("trainjobs", body, NAMESPACE)

    def environ(self, **changes: str) -> dict[str, str]:
        return {
            "TRAIN_JOB_NAME": JOB,
            "POD_NAMESPACE": NAMESPACE,
            "CACHE_IMAGE": "server:1",
            "STORAGE_URI": URI,
            "CLUSTER_SIZE": "3",
            "CACHE_READY_FILE": str(self.ready_file),
            "CACHE_READY_DEADLINE_S": "30",
            "CACHE_FAILURE_GRACE_S": "0",
            "CACHE_PROGRESS_S": "0.2",
            **changes,
        }

    def planned(self, **changes: str) -> dict[tuple[str, str], Planned]:
        plan = plan_objects(from_env(self.environ(**changes)), self.job)
        return {(one.kind.plural, one.name): one for one in plan}

    def make_planned(self, plural: str, name: str, **changes: str) -> Json:
        """As a former run of the same TrainJob would have made it."""
        return self.store.create(plural, self.planned(**changes)[plural, name].body)

    def objects(self) -> dict[tuple[str, str], Json]:
        plurals = ("serviceaccounts", "services", "statefulsets", "pods")
        return {
            (plural, one["metadata"]["name"]): one
            for plural in plurals
            for one in self.store.find(plural, NAMESPACE)
        }

    def uids(self) -> dict[tuple[str, str], str]:
        return {key: one["metadata"]["uid"] for key, one in self.objects().items()}

    def count(self, verb: str, resource: str) -> int:
        """How many such calls there were so far."""
        calls = [(call.verb, call.resource) for call in list(self.server.calls)]
        return calls.count((verb, resource))

    def wait_for_calls(self, verb: str, resource: str, times: int = 1) -> None:
        """Until there were so many."""
        wait_until(
            lambda: self.count(verb, resource) >= times, WAIT_S, f"{times} x {verb} {resource}"
        )

    def fail(self, **changes: str) -> CacheError:
        """The error of a run, which left nothing behind."""
        error = self.begin(**changes).error()
        assert not self.ready_file.exists()
        return error

    def begin(self, **changes: str) -> Run:
        return Run(self, changes)


class Run:
    """A run in a thread of this process."""

    def __init__(self, world: World, changes: dict[str, str]) -> None:
        self.world = world
        self.stop = threading.Event()
        self._changes = changes
        self._ending: Ending | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            settings = from_env(self.world.environ(**self._changes))
            api = connect(str(self.world.kubeconfig))
            cluster = Cluster(api, settings.namespace, watch_timeout_s=1)
            self._ending = run(settings, cluster, self.stop)
        except Exception as error:
            self._error = error

    def until_ready(self) -> Run:
        wait_until(
            lambda: self.world.ready_file.exists() or not self._thread.is_alive(), WAIT_S, "ready"
        )
        if self._error is not None:
            raise self._error
        return self

    def end(self) -> Ending:
        """After it is told to end."""
        self.stop.set()
        self._join()
        if self._error is not None:
            raise self._error
        assert self._ending is not None
        assert not self.world.ready_file.exists()
        return self._ending

    def error(self) -> CacheError:
        """After it has ended by itself."""
        self._join()
        assert isinstance(self._error, CacheError), (self._error, self._ending)
        return self._error

    def _join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ApiServer() as server:
        yield World(server, tmp_path)


@pytest.fixture
def pods(world: World) -> Iterator[StatefulSets]:
    """A controller that brings every pod up."""
    with StatefulSets(world.store) as controller:
        yield controller


# -- as it should be -------------------------------------------------------------------------------


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


# -- what the cluster refuses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("get", "trainjobs"),
        *(("create", plural) for plural in ("serviceaccounts", "services", "statefulsets")),
        *(("list", plural) for plural in ("statefulsets", "pods", "events")),
        *(("watch", plural) for plural in ("statefulsets", "pods")),
    ],
)
def test_a_permission_that_is_missing_is_named_and_nothing_is_left(
    world: World, verb: str, resource: str
) -> None:
    assert world.server.permissions is not None
    world.server.permissions.remove((verb, resource))
    never_made = 'pods "train-1-cache-0" is forbidden: exceeded quota: q'
    with StatefulSets(world.store, lambda name: None, refusal=never_made):
        error = world.fail()
    assert isinstance(error, ClusterError)
    assert str(error).startswith(f"not allowed to {verb} {resource}")
    assert "team-a" in str(error)
    assert world.objects() == {}


@each_object
def test_a_permission_to_look_at_what_is_there_already_is_named(
    world: World, pods: StatefulSets, plural: str, name: str
) -> None:
    world.make_planned(plural, name)
    assert world.server.permissions is not None
    world.server.permissions.remove(("get", plural))
    error = world.fail()
    assert str(error).startswith(f"not allowed to get {plural}/{name}")


@pytest.mark.parametrize("resource", ["serviceaccounts", "services", "statefulsets"])
def test_what_may_not_be_deleted_is_named_and_the_failure_stays_the_reason(
    world: World, resource: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.server.permissions is not None
    world.server.permissions.remove(("delete", resource))
    with StatefulSets(world.store, lambda name: exited(65, "cache-server: LoadError: no table")):
        error = world.begin().error()
    assert isinstance(error, LoadError)
    assert "no table" in str(error)
    assert f"not allowed to delete {resource}/train-1-cache" in caplog.text
    left = {plural for plural, _ in world.objects() if plural != "pods"}
    assert left == {resource}


def test_what_may_not_be_deleted_at_the_end_of_the_job_is_the_reason_of_a_failure(
    world: World, pods: StatefulSets
) -> None:
    assert world.server.permissions is not None
    world.server.permissions.remove(("delete", "services"))
    running_ = world.begin().until_ready()
    with pytest.raises(ClusterError, match="left behind: not allowed to delete services"):
        running_.end()
    assert {plural for plural, _ in world.objects()} == {"services"}


def test_an_admission_that_refuses_an_object_is_the_reason(
    world: World, pods: StatefulSets
) -> None:
    refusal = 'admission webhook "policy.example" denied the request: no such image'
    world.server.faults.append(Fault(403, "create", "statefulsets", message=refusal))
    error = world.fail()
    assert refusal in str(error)
    assert "create statefulsets/train-1-cache" in str(error)
    assert world.objects() == {}


def test_an_object_that_is_not_valid_is_the_reason(world: World, pods: StatefulSets) -> None:
    world.server.faults.append(Fault(422, "create", "services", message="spec.ports: Invalid"))
    error = world.fail()
    assert "422" in str(error)
    assert "spec.ports: Invalid" in str(error)
    assert world.objects() == {}


def test_a_job_that_is_missing_is_named_and_nothing_is_touched(
    world: World, pods: StatefulSets
) -> None:
    world.store.delete("trainjobs", JOB, NAMESPACE)
    error = world.fail()
    assert isinstance(error, ClusterError)
    assert str(error) == "there is no trainjobs/train-1 in namespace team-a"
    assert world.server.verbs == {("get", "trainjobs")}


def test_a_job_that_is_being_deleted_gets_no_cache(world: World, pods: StatefulSets) -> None:
    world.store.patch("trainjobs", JOB, {"metadata": {"finalizers": ["x"]}}, NAMESPACE)
    world.store.delete("trainjobs", JOB, NAMESPACE)
    assert "is being deleted" in str(world.fail())
    assert world.objects() == {}


def test_a_bad_setting_of_the_job_removes_what_a_former_run_made(
    world: World, pods: StatefulSets
) -> None:
    for plural, name in OBJECTS:
        world.make_planned(plural, name)
    error = world.fail(CACHE_REPLICAS="2")  # of this pod, and not of the job
    assert isinstance(error, ConfigError)
    assert "CACHE_REPLICAS" in str(error)
    assert world.objects() == {}


# -- pods that do not come up ----------------------------------------------------------------------


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
def test_a_pod_that_cannot_come_up_fails_the_run_at_once_with_its_own_reason(
    world: World, status: Json, error: type[CacheError], reason: str
) -> None:
    def states(name: str) -> Json:
        return status if name.endswith("-1") else starting()

    with StatefulSets(world.store, states):
        found = world.fail(CACHE_READY_DEADLINE_S="1000")
    assert type(found) is error
    assert reason in str(found)
    assert world.objects() == {}


def test_pods_that_pod_security_refuses_fail_the_run_at_once(world: World) -> None:
    refusal = 'pods "train-1-cache-0" is forbidden: violates PodSecurity "restricted:latest"'
    with StatefulSets(world.store, lambda name: None, refusal=refusal):
        error = world.fail(CACHE_READY_DEADLINE_S="1000")
    assert isinstance(error, NodeUnavailableError)
    assert refusal in str(error)
    assert world.objects() == {}


def test_an_image_that_is_pulled_in_the_end_is_waited_for(world: World) -> None:
    with StatefulSets(world.store, lambda name: waiting("ErrImagePull", "throttled")) as pods:
        running_ = world.begin(CACHE_FAILURE_GRACE_S="1000")
        world.wait_for_calls("watch", "pods")
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
    world: World, status: Json, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with StatefulSets(world.store, lambda name: status):
        error = world.fail(CACHE_READY_DEADLINE_S="1")
    assert isinstance(error, NotReadyError)
    assert "not ready after 1 s" in str(error)
    assert reason in str(error)
    assert any(reason in record.message for record in caplog.records)
    assert world.objects() == {}


def test_pods_that_a_quota_holds_back_are_told_at_the_deadline(world: World) -> None:
    refusal = 'pods "train-1-cache-0" is forbidden: exceeded quota: q'
    with StatefulSets(world.store, lambda name: None, refusal=refusal):
        error = world.fail(CACHE_READY_DEADLINE_S="1")
    assert isinstance(error, NotReadyError)
    assert refusal in str(error)


def test_pods_of_a_former_job_of_that_name_are_not_taken_for_its_own(world: World) -> None:
    label = {"trainer-data-cache/train-job": JOB}
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "x", "uid": "former"}
    world.store.collects_garbage = False
    status = exited(65, "of a former job")
    status["containerStatuses"][0]["name"] = "cache"
    former = {
        "metadata": {"name": "train-1-cache-9", "labels": label, "ownerReferences": [owner]},
        "status": status,
    }
    world.store.create("pods", former, NAMESPACE)
    with StatefulSets(world.store):
        running_ = world.begin().until_ready()
        world.store.delete("pods", "train-1-cache-9", NAMESPACE)
        running_.end()


# -- an API server that has its moments ------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503, 0], ids=["429", "500", "503", "cut-off"])
def test_calls_that_fail_now_and_then_are_repeated(
    world: World, pods: StatefulSets, status: int
) -> None:
    for verb, resource in sorted(PERMISSIONS):
        headers = {"Retry-After": "0"} if status == 429 else {}
        world.server.faults.append(Fault(status, verb, resource, times=1, headers=headers))
    running_ = world.begin().until_ready()
    assert {plural for plural, _ in world.objects()} > {"statefulsets", "services"}
    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}


@pytest.mark.parametrize("status", [500, 0], ids=["500", "cut-off"])
def test_a_call_whose_answer_was_lost_has_had_its_effect_once(
    world: World, pods: StatefulSets, status: int
) -> None:
    for verb in ("create", "delete"):
        for plural, name in OBJECTS:
            world.server.faults.append(Fault(status, verb, plural, name, times=1, carried_out=True))
    running_ = world.begin().until_ready()
    assert set(world.objects()) >= set(OBJECTS)
    created = [change for change in world.server.calls if change.verb == "create"]
    assert len(created) == 2 * len(OBJECTS)
    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}


def test_as_long_as_the_server_asks_is_waited(world: World, pods: StatefulSets) -> None:
    world.server.faults.append(
        Fault(429, "get", "trainjobs", times=1, headers={"Retry-After": "2"})
    )
    began = time.monotonic()
    world.begin().until_ready().end()
    assert time.monotonic() - began >= 2


def test_a_server_that_never_answers_well_is_the_reason_at_the_deadline(
    world: World, pods: StatefulSets
) -> None:
    fault = Fault(503, "create", "services", message="etcd is away")
    world.server.faults.append(fault)
    error = world.fail(CACHE_READY_DEADLINE_S="2")
    assert isinstance(error, NotReadyError)
    assert "create services/train-1-cache" in str(error)
    assert "etcd is away" in str(error)
    assert world.objects() == {}


def test_a_watch_that_is_cut_off_goes_on_where_it_was(world: World) -> None:
    with StatefulSets(world.store, lambda name: starting()) as pods:
        running_ = world.begin()
        world.wait_for_calls("watch", "pods")
        world.server.cut_connections()
        pods.set_pod("train-1-cache-0", NAMESPACE, running())
        for resource in ("pods", "statefulsets"):  # until they have seen all that happened
            world.wait_for_calls("watch", resource, world.count("watch", resource) + 3)
        world.store.forget_changes()
        world.server.cut_connections()
        pods.set_pod("train-1-cache-1", NAMESPACE, running())
        running_.until_ready()
        assert world.count("list", "pods") == world.count("list", "statefulsets") == 1
        running_.end()


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_watch_from_a_version_that_is_forgotten_lists_again(world: World, how: str) -> None:
    with StatefulSets(world.store, lambda name: starting()) as pods:
        running_ = world.begin()
        for plural in ("pods", "statefulsets"):
            world.wait_for_calls("watch", plural)
        if how == "status":
            world.server.faults += [
                Fault(410, "watch", plural, times=1) for plural in ("pods", "statefulsets")
            ]
        with world.store.changed:  # what happens between is never told
            world.server.cut_connections()
            for index in range(2):
                pods.set_pod(f"train-1-cache-{index}", NAMESPACE, running())
            world.store.forget_changes()
        running_.until_ready()
        for plural in ("pods", "statefulsets"):
            world.wait_for_calls("list", plural, 2)
        running_.end()


# -- while the job trains --------------------------------------------------------------------------


def test_a_cache_that_is_deleted_under_the_job_fails_the_run(
    world: World, pods: StatefulSets
) -> None:
    running_ = world.begin().until_ready()
    world.store.delete("statefulsets", "train-1-cache", NAMESPACE)
    error = running_.error()
    assert isinstance(error, ClusterError)
    assert "statefulsets/train-1-cache was deleted" in str(error)
    assert not world.ready_file.exists()
    assert world.objects() == {}


def test_a_cache_that_another_one_replaces_under_the_job_fails_the_run(
    world: World, pods: StatefulSets
) -> None:
    running_ = world.begin().until_ready()
    with world.store.changed:
        world.store.delete("statefulsets", "train-1-cache", NAMESPACE)
        metadata = {"name": "train-1-cache"}
        template: Json = {"metadata": {}, "spec": {"containers": []}}
        theirs = world.store.create(
            "statefulsets",
            {"metadata": metadata, "spec": {"replicas": 0, "template": template}},
            NAMESPACE,
        )
    assert "statefulsets/train-1-cache was deleted" in str(running_.error())
    (left,) = world.objects().values()
    assert left["metadata"]["uid"] == theirs["metadata"]["uid"]


def test_a_pod_that_fails_for_good_while_the_job_trains_fails_the_run(
    world: World, pods: StatefulSets
) -> None:
    running_ = world.begin().until_ready()
    pods.set_pod("train-1-cache-0", NAMESPACE, exited(65, "cache-server: LoadError: changed"))
    error = running_.error()
    assert isinstance(error, LoadError)
    assert not world.ready_file.exists()
    assert world.objects() == {}


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
def test_a_pod_that_is_away_while_the_job_trains_is_waited_for_and_is_not_called_ready(
    world: World, pods: StatefulSets, status: Json, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    running_ = world.begin(CACHE_READY_DEADLINE_S="2", CACHE_FAILURE_GRACE_S="0").until_ready()
    before = world.uids()
    pods.set_pod("train-1-cache-0", NAMESPACE, status)
    wait_until(lambda: "1 of 2 cache pods ready" in caplog.text, WAIT_S, "it is told")
    wait_until(lambda: told in caplog.text, WAIT_S, "so is why")
    wait_until(lambda: not world.ready_file.exists(), WAIT_S, "not ready")
    pods.set_pod("train-1-cache-0", NAMESPACE, running())
    good = "2 of 2 cache pods ready"
    wait_until(lambda: caplog.records[-1].message == good, WAIT_S, "told again")
    wait_until(world.ready_file.exists, WAIT_S, "ready again")
    assert world.uids() == before
    assert running_.end() is Ending.REMOVED


def test_the_cache_stays_where_only_this_pod_is_evicted(world: World, pods: StatefulSets) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    own = {"metadata": {"name": "initializer"}, "status": {"conditions": [condition]}}
    world.store.create("pods", own, NAMESPACE)
    running_ = world.begin(POD_NAME="initializer").until_ready()
    before = world.uids()
    assert running_.end() is Ending.LEFT
    assert world.uids() == before

    world.store.delete("pods", "initializer", NAMESPACE)
    running_ = world.begin(POD_NAME="initializer-2").until_ready()
    after = world.uids()
    assert {key: after[key] for key in OBJECTS} == {key: before[key] for key in OBJECTS}
    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}


def test_a_pod_that_cannot_be_read_counts_as_the_end_of_the_job(
    world: World, pods: StatefulSets
) -> None:
    assert world.server.permissions is not None
    world.server.permissions.remove(("get", "pods"))
    assert world.begin(POD_NAME="initializer").until_ready().end() is Ending.REMOVED
    assert world.objects() == {}


def test_told_to_end_while_it_waits_for_a_call_it_removes_what_it_made(
    world: World, pods: StatefulSets
) -> None:
    world.server.faults.append(Fault(503, "create", "statefulsets"))
    running_ = world.begin()
    world.wait_for_calls("create", "statefulsets")
    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}


# -- the program -----------------------------------------------------------------------------------


class Program:
    """``python -m runtimes.initializer``; a context manager."""

    def __init__(self, world: World, **changes: str) -> None:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environ = {**inherited, **world.environ(**changes), "KUBECONFIG": str(world.kubeconfig)}
        self.world = world
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runtimes.initializer"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def until_ready(self) -> Program:
        wait_until(
            lambda: self.world.ready_file.exists() or self.process.poll() is not None,
            WAIT_S,
            "ready",
        )
        assert self.process.poll() is None, self.process.communicate()[1]
        return self

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Exit code and last line, by itself or after a signal."""
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=WAIT_S)
        assert output == ""
        assert "Traceback" not in errors
        return self.process.returncode, errors.splitlines()[-1] if errors else ""


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
def test_a_run_after_a_crash_at_any_step_makes_what_is_missing_and_nothing_twice(
    world: World, pods: StatefulSets, writes: int
) -> None:
    assert len(OBJECTS) == 4  # as many as it writes
    with Program(world) as crashed:

        def kill(number: int) -> None:
            if number == writes:
                crashed.process.kill()
                crashed.process.wait()

        world.server.on_write = kill
        assert crashed.end()[0] == -signal.SIGKILL
    before = {key: uid for key, uid in world.uids().items() if key in OBJECTS}
    assert list(before) == sorted(OBJECTS[:writes])

    running_ = world.begin().until_ready()
    after = world.uids()
    assert {key: after[key] for key in before} == before
    assert set(after) == {*OBJECTS, ("pods", "train-1-cache-0"), ("pods", "train-1-cache-1")}
    for key, planned in world.planned().items():
        assert world.objects()[key].get("spec") == planned.body.get("spec")
    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}


def test_a_run_after_a_crash_while_the_job_trains_adopts_the_cache_as_it_is(
    world: World, pods: StatefulSets
) -> None:
    with Program(world) as crashed:
        crashed.until_ready().end(signal.SIGKILL)
    before = world.uids()
    with Program(world) as program:
        program.until_ready()  # whatever the first one left there
        world.wait_for_calls("get", "statefulsets")
        code, last = program.until_ready().end(signal.SIGTERM)
    assert code == TERMINATED, last
    assert len(before) == 6
    created = [call.status for call in world.server.calls if call.verb == "create"]
    assert created == [201] * 4 + [409] * 4
    assert world.objects() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_removes_everything(
    world: World, number: signal.Signals
) -> None:
    with StatefulSets(world.store, lambda name: starting()), Program(world) as program:
        world.wait_for_calls("watch", "pods")
        code, last = program.end(number)
    assert (code, last.startswith("initializer: told to end")) == (TERMINATED, True)
    assert not world.ready_file.exists()
    assert world.objects() == {}


def test_sigterm_when_it_is_ready_removes_everything_in_time(
    world: World, pods: StatefulSets
) -> None:
    with Program(world) as program:
        program.until_ready()
        began = time.monotonic()
        code, last = program.end(signal.SIGTERM)
        assert time.monotonic() - began < 10
    assert code == TERMINATED, last  # a Job would take 0 for work that is done
    assert not world.ready_file.exists()
    assert world.objects() == {}


def test_sigterm_by_an_eviction_is_no_success_of_the_pod(world: World, pods: StatefulSets) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    own = {"metadata": {"name": "initializer"}, "status": {"conditions": [condition]}}
    world.store.create("pods", own, NAMESPACE)
    with Program(world, POD_NAME="initializer") as program:
        code, last = program.until_ready().end(signal.SIGTERM)
    assert code == TERMINATED
    assert "the cache stays" in last
    assert set(OBJECTS) <= set(world.objects())


@pytest.mark.parametrize(
    ("pod_code", "code", "error"), [(65, 65, "LoadError"), (78, 78, "ConfigError")]
)
def test_the_exit_code_of_a_pod_is_passed_on_and_its_reason_is_the_last_line(
    world: World, pod_code: int, code: int, error: str
) -> None:
    told = exited(pod_code, f"cache-server: {error}: what was wrong")
    with StatefulSets(world.store, lambda name: told), Program(world) as program:
        assert program.end() == (
            code,
            f"initializer: {error}: pod train-1-cache-0 exited with {pod_code}: "
            f"cache-server: {error}: what was wrong",
        )
    assert world.objects() == {}


def test_bad_settings_are_told_together_before_the_cluster_is_asked(world: World) -> None:
    with Program(world, CLUSTER_SIZE="many", STORAGE_URI="", CACHE_SQL="SELECT 1") as program:
        code, last = program.end()
    assert code == 78
    assert last.startswith("initializer: ConfigError: ")
    assert "'many'" in last
    assert "STORAGE_URI is missing" in last
    assert world.server.calls == []


def test_without_a_cluster_the_last_line_says_so(world: World) -> None:
    world.kubeconfig = world.folder / "absent"
    with Program(world) as program:
        code, last = program.end()
    assert code == 78
    assert "no way to the API server" in last


def test_a_missing_job_exits_with_1_and_its_name(world: World) -> None:
    world.store.delete("trainjobs", JOB, NAMESPACE)
    with Program(world) as program:
        assert program.end() == (
            1,
            "initializer: ClusterError: there is no trainjobs/train-1 in namespace team-a",
        )
