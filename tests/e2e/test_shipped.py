"""Every shipped runtime and overlay on a real API server; MPI and TorchTune in detail."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from cache_runtimes import MANIFESTS
from cache_runtimes.local.render import render_objects
from tests.e2e.clusters import Cluster
from tests.e2e.conftest import FLAGSHIP, MakeJob
from tests.e2e.jobs import assert_complete, grant, wait_for_finding
from tests.kustomize import build
from tests.manifests import container_named, is_runtime, pod_of, read
from tests.train_jobs import env, train_job

Json = dict[str, Any]

DEEPSPEED = "deepspeed-data-cache"
TORCHTUNE = "torchtune-qwen2.5-1.5b"
COLOCATED = f"{FLAGSHIP}-colocated"
# They need the PodGroups of a gang scheduler, which this cluster lacks.
GANGS = (COLOCATED, f"overlays/{COLOCATED}-volcano")
FOLDERS = sorted(
    str(path.parent.relative_to(MANIFESTS))
    for pattern in ("*/runtime.yaml", "overlays/*/kustomization.yaml")
    for path in MANIFESTS.glob(pattern)
)
ROOT = env(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def job_for(name: str, runtime: Json) -> Json:
    """A TrainJob that makes its JobSet and starts nothing."""
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    steps = [job["name"].partition("-")[0] for job in jobs if job["name"].endswith("-initializer")]
    made = train_job(
        name,
        runtimeRef={"name": runtime["metadata"]["name"], "kind": runtime["kind"]},
        suspend=True,
        trainer={"command": ["python", "train.py"]},
    )
    if steps:
        made["spec"]["initializer"] = {step: {"storageUri": f"hf://org/{step}"} for step in steps}
    return made


def assert_admitted(cluster: Cluster, namespace: str, jobset: Json) -> None:
    """The API server takes each Job of a JobSet, and pods of it under *restricted*."""
    batch = client.BatchV1Api(cluster.api)
    claims = [
        {"name": each["metadata"]["name"], "persistentVolumeClaim": {"claimName": "claim"}}
        for policy in jobset["spec"].get("volumeClaimPolicies") or ()
        for each in policy["templates"]
    ]
    for job in jobset["spec"]["replicatedJobs"]:
        metadata = {"name": f"dry-{job['name']}"}
        spec = job["template"]["spec"]
        pod_spec = spec["template"]["spec"]
        pod_spec["volumes"] = [*(pod_spec.get("volumes") or ()), *claims]  # as JobSet adds them
        batch.create_namespaced_job(namespace, {"metadata": metadata, "spec": spec}, dry_run="All")
        pod = {**spec["template"], "metadata": {**spec["template"].get("metadata", {}), **metadata}}
        cluster.core.create_namespaced_pod(namespace, pod, dry_run="All")


def test_the_cluster_takes_every_runtime_and_overlay_and_the_pods_of_their_jobs(
    cluster: Cluster, namespace: str
) -> None:
    grant(cluster, namespace, "ServiceAccount")
    jobs: dict[str, str] = {}
    for number, folder in enumerate(FOLDERS):
        (runtime,) = (each for each in build(MANIFESTS / folder).values() if is_runtime(each))
        runtime["metadata"]["name"] = f"shipped-{number}"
        cluster.apply(runtime, namespace=namespace)
        jobs[folder] = f"of-{number}"
        cluster.apply(job_for(jobs[folder], runtime), namespace=namespace)
    assert {*GANGS} < jobs.keys()
    for folder, name in jobs.items():
        if folder in GANGS:
            wait_for_finding(cluster, namespace, name, "PodGroup", "gang scheduler")
            continue
        jobset = cluster.wait(
            namespace,
            lambda name=name: cluster.get("JobSet", name, namespace),  # type: ignore[misc]
            f"the JobSet of {folder}",
        )
        assert_admitted(cluster, namespace, jobset)


def test_torchtune_gets_its_command_its_volume_and_the_folder_of_the_export(
    cluster: Cluster, namespace: str
) -> None:
    runtime = read(MANIFESTS / TORCHTUNE / "runtime.yaml")
    cluster.apply(runtime, namespace=namespace)
    made = job_for("tune", runtime)
    made["spec"]["trainer"] = {
        "command": ["tune", "run"],
        "args": ["epochs=1", "dataset.data_dir=/workspace/dataset/data"],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": "1"}},
    }
    cluster.apply(made, namespace=namespace)
    jobset = cluster.wait(
        namespace, lambda: cluster.get("JobSet", "tune", namespace), "the JobSet of TorchTune"
    )
    (rendered,) = (each for each in render_objects(made, runtime) if each["kind"] == "JobSet")
    found, ours = (
        container_named(pod_of(each), "node")
        for of in (jobset, rendered)
        for each in of["spec"]["replicatedJobs"]
        if each["name"] == "node"
    )
    assert (found["command"], found["args"]) == (ours["command"], ours["args"])
    assert found["command"][:2] == ["tune", "run"]
    assert jobset["spec"]["volumeClaimPolicies"][0]["templates"][0]["metadata"] == {
        "name": "workspace"
    }


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd (openssh-server)")
def test_mpirun_reaches_the_other_pod_with_the_key_and_the_hosts_of_trainer(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    made = make_job(runtime=DEEPSPEED)
    trainer = made["spec"]["trainer"]
    # Open MPI 5, which pip installs, does not read the variables of Trainer.
    launch = ["--hostfile", "/etc/mpi/hostfile", "-n", "2", *trainer["command"]]
    trainer |= {"command": ["mpirun"], "args": [*launch, *trainer["args"]], "env": ROOT}
    cluster.apply(made, namespace=namespace)
    assert_complete(cluster, namespace)
    secret = cluster.get("Secret", "job-mpi-ssh-auth", namespace)
    hosts = cluster.get("ConfigMap", "job-mpi-hostfile", namespace)
    assert secret is not None and hosts is not None
    assert secret["type"] == "kubernetes.io/ssh-auth"
    assert b"PRIVATE KEY" in base64.b64decode(secret["data"]["ssh-privatekey"])
    assert {"ssh-privatekey", "ssh-publickey"} == secret["data"].keys()
    rendered = render_objects(made, read(MANIFESTS / DEEPSPEED / "runtime.yaml"))
    (ours,) = (each for each in rendered if each["kind"] == "ConfigMap")
    assert hosts["data"] == ours["data"]
    assert any("Accepted publickey" in line for line in cluster.lines(namespace, "job-node-0-0"))


def test_overrides_of_pods_that_zenml_writes_are_dropped(cluster: Cluster, namespace: str) -> None:
    made = job_for("step", read(MANIFESTS / FLAGSHIP / "runtime.yaml"))
    del made["spec"]["initializer"]
    made["spec"]["podTemplateOverrides"] = [{"targetJobs": [{"name": "node"}], "spec": {}}]
    client.CustomObjectsApi(cluster.api).create_namespaced_custom_object(
        "trainer.kubeflow.org", "v1alpha1", namespace, "trainjobs", made
    )
    found = cluster.get("TrainJob", "step", namespace)
    assert found is not None
    assert "podTemplateOverrides" not in found["spec"]
