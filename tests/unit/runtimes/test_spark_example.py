"""The example of a Spark job builds, is admitted, and fits the shared cache and its TrainJob."""

from __future__ import annotations

import ast

import pytest

from cache_runtimes import MANIFESTS
from cache_runtimes.local.render import render_objects
from tests import admission
from tests.kustomize import build
from tests.manifests import Json, container_named, env_of, lost_fields, pods_are_restricted, read

EXAMPLE = MANIFESTS.parent / "examples" / "spark"
RUNTIME = read(MANIFESTS / "torch-distributed-shared-data-cache" / "runtime.yaml")


@pytest.fixture(scope="module")
def built() -> dict[str, Json]:
    return build(EXAMPLE)


def spark_of(built: dict[str, Json]) -> Json:
    spec: Json = built["SparkApplication/lineitem"]["spec"]
    return spec


def test_the_objects_are_valid(built: dict[str, Json]) -> None:
    # A second to import, which only this test needs.
    from kubeflow_spark_api.models import spark_v1beta2_spark_application

    application = built.pop("SparkApplication/lineitem")
    model = spark_v1beta2_spark_application.SparkV1beta2SparkApplication.from_dict(application)
    assert model is not None
    assert list(lost_fields(application, model.to_dict(), "$")) == []
    for thing in built.values():
        assert list(admission.problems(thing)) == []
    built["SparkApplication/lineitem"] = application
    image = next(
        line.split()[1]
        for line in (EXAMPLE / "Dockerfile").read_text().splitlines()
        if line.startswith("FROM ")
    )
    assert image.rpartition(":")[2].startswith(application["spec"]["sparkVersion"])


@pytest.mark.parametrize("role", ["driver", "executor"])
def test_the_pods_show_who_they_are_and_reach_the_cache(built: dict[str, Json], role: str) -> None:
    spec = spark_of(built)
    pod = spec[role]["template"]
    stand_in = {
        "kind": "Job",
        "metadata": {"name": role},
        "spec": {"template": pod},
    }
    assert list(pods_are_restricted(stand_in)) == []
    container = container_named(pod, f"spark-kubernetes-{role}")
    trainer = next(
        job
        for job in RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
        if job["name"] == "node"
    )["template"]["spec"]["template"]
    theirs = env_of(container_named(trainer, "node"))
    ours = env_of(container)
    assert ours["CACHE_TOKEN_FILE"] == theirs["CACHE_TOKEN_FILE"]
    if role == "driver":  # it sends the endpoint to the executors
        assert ours["CACHE_ENDPOINT"] == theirs["CACHE_ENDPOINT"]
    (token,) = [volume for volume in trainer["spec"]["volumes"] if volume["name"] == "cache-token"]
    assert token in pod["spec"]["volumes"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    # The policies of the jobs of a namespace, and of the shared cache.
    policy = built["NetworkPolicy/data-cache-jobs"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (client,) = [
        peer["namespaceSelector"]["matchLabels"]
        for rule in read(MANIFESTS / "shared" / "network-policy.yaml")["spec"]["ingress"]
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    assert client.items() <= built["Namespace/team-a"]["metadata"]["labels"].items()


def test_the_driver_may_make_executors_and_runs_the_program(built: dict[str, Json]) -> None:
    spec = spark_of(built)
    account = spec["driver"]["serviceAccount"]
    (subject,) = built["RoleBinding/spark"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "team-a"}
    (rule,) = built["Role/spark"]["rules"]
    assert "pods" in rule["resources"] and "create" in rule["verbs"]
    (program,) = built["ConfigMap/write-lineitem"]["data"]
    assert spec["mainApplicationFile"] == f"local:///opt/program/{program}"


def test_the_train_job_reads_what_spark_wrote(built: dict[str, Json]) -> None:
    job = read(EXAMPLE / "trainjob.yaml")
    assert list(admission.problems(job)) == []
    assert job["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    assert job["metadata"]["namespace"] == built["Namespace/team-a"]["metadata"]["name"]
    (job_set,) = [each for each in render_objects(job, RUNTIME) if each["kind"] == "JobSet"]
    assert list(admission.problems(job_set)) == []
    names = [
        node.value
        for node in ast.walk(ast.parse((EXAMPLE / "write_lineitem.py").read_text()))
        if isinstance(node, ast.Constant)
    ]
    assert "lineitem" in names
    assert 'CacheIterableDataset("lineitem"' in (EXAMPLE / "trainjob.yaml").read_text()
