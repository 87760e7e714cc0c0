"""A refusal of the cluster is named, and nothing is left behind."""

from __future__ import annotations

import pytest

from cache_protocol.errors import ConfigError, LoadError
from cache_runtimes.initializer.cluster import ClusterError
from tests.api_server import Fault
from tests.initializer_cluster import JOB, NAMESPACE, OBJECTS, InitializerCluster, each_object
from tests.stateful_sets import StatefulSets, exited


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("get", "trainjobs"),
        *(("create", plural) for plural in ("serviceaccounts", "services", "statefulsets")),
        *(("list", plural) for plural in ("statefulsets", "pods", "events")),
        *(("watch", plural) for plural in ("statefulsets", "pods")),
    ],
)
def test_a_missing_permission_is_named_and_nothing_is_left(
    cluster: InitializerCluster, verb: str, resource: str
) -> None:
    assert cluster.server.permissions is not None
    cluster.server.permissions.remove((verb, resource))
    never_made = 'pods "train-1-cache-0" is forbidden: exceeded quota: q'
    with StatefulSets(cluster.store, lambda name: None, refusal=never_made):
        error = cluster.fail()
    assert isinstance(error, ClusterError)
    assert str(error).startswith(f"not allowed to {verb} {resource}")
    assert "team-a" in str(error)
    assert cluster.objects() == {}


@each_object
def test_a_missing_permission_to_read_an_object_is_named(
    cluster: InitializerCluster, pods: StatefulSets, plural: str, name: str
) -> None:
    cluster.make_planned(plural, name)
    assert cluster.server.permissions is not None
    cluster.server.permissions.remove(("get", plural))
    error = cluster.fail()
    assert str(error).startswith(f"not allowed to get {plural}/{name}")


@pytest.mark.parametrize("resource", ["serviceaccounts", "services", "statefulsets"])
def test_an_object_that_cannot_be_deleted_is_logged_and_the_failure_stays_the_reason(
    cluster: InitializerCluster, resource: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert cluster.server.permissions is not None
    cluster.server.permissions.remove(("delete", resource))
    with StatefulSets(cluster.store, lambda name: exited(65, "cache-server: LoadError: no table")):
        error = cluster.begin().error()
    assert isinstance(error, LoadError)
    assert "no table" in str(error)
    assert f"not allowed to delete {resource}/train-1-cache" in caplog.text
    left = {plural for plural, _ in cluster.objects() if plural != "pods"}
    assert left == {resource}


def test_an_object_that_cannot_be_deleted_at_the_end_fails_the_run(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    assert cluster.server.permissions is not None
    cluster.server.permissions.remove(("delete", "services"))
    running_ = cluster.begin().until_ready()
    with pytest.raises(ClusterError, match="left behind: not allowed to delete services"):
        running_.end()
    assert {plural for plural, _ in cluster.objects()} == {"services"}


def test_an_admission_that_refuses_an_object_is_the_reason(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    refusal = 'admission webhook "policy.example" denied the request: no such image'
    cluster.server.faults.append(Fault(403, "create", "statefulsets", message=refusal))
    error = cluster.fail()
    assert refusal in str(error)
    assert "create statefulsets/train-1-cache" in str(error)
    assert cluster.objects() == {}


def test_an_object_that_is_not_valid_is_the_reason(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    cluster.server.faults.append(Fault(422, "create", "services", message="spec.ports: Invalid"))
    error = cluster.fail()
    assert "422" in str(error)
    assert "spec.ports: Invalid" in str(error)
    assert cluster.objects() == {}


def test_a_missing_job_is_named_and_nothing_is_created(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    cluster.store.delete("trainjobs", JOB, NAMESPACE)
    error = cluster.fail()
    assert isinstance(error, ClusterError)
    assert str(error) == "trainjobs/train-1 in namespace team-a does not exist"
    assert cluster.server.verbs == {("get", "trainjobs")}


def test_a_job_that_is_being_deleted_gets_no_cache(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    cluster.store.patch("trainjobs", JOB, {"metadata": {"finalizers": ["x"]}}, NAMESPACE)
    cluster.store.delete("trainjobs", JOB, NAMESPACE)
    assert "is being deleted" in str(cluster.fail())
    assert cluster.objects() == {}


def test_a_bad_setting_of_the_job_removes_the_objects_of_an_earlier_run(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    for plural, name in OBJECTS:
        cluster.make_planned(plural, name)
    error = cluster.fail(CACHE_REPLICAS="2")  # of this pod, and not of the job
    assert isinstance(error, ConfigError)
    assert "CACHE_REPLICAS" in str(error)
    assert cluster.objects() == {}
