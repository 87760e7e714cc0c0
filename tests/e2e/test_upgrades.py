"""An installed runtime becomes another one in place, while a job of it runs."""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cache_runtimes import MANIFESTS
from tests.e2e.clusters import Cluster, manifests
from tests.e2e.conftest import FLAGSHIP, SHARED, MakeJob, ready_nodes
from tests.e2e.jobs import assert_complete, wait_for_end, wait_for_step
from tests.helm import CHART, HELM
from tests.kustomize import KUBECTL, build
from tests.manifests import is_runtime, job_named, job_set, pod_of

Json = dict[str, Any]

ROOT = MANIFESTS.parent
BEFORE_1_35 = "overlays/before-kubernetes-1.35"
SLOWLY = "time.sleep(0.4)"
GUIDE = (ROOT / "docs/kubernetes.md").read_text("utf-8")


def released() -> Json:
    """The flagship of an earlier release, in the form that its manifest had."""
    packed = (ROOT / f"tests/golden/{FLAGSHIP}.json.xz").read_bytes()
    found: Json = json.loads(lzma.decompress(packed))["runtime"]
    return found


def built(folder: str) -> Json:
    (found,) = (each for each in build(MANIFESTS / folder).values() if is_runtime(each))
    return found


def of_namespace(runtime: Json) -> Json:
    """The runtime as one of a namespace, so that other tests keep theirs."""
    return {**runtime, "kind": "TrainingRuntime"}


def run(cluster: Cluster, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
    )


def kubectl_apply(
    cluster: Cluster, namespace: str, runtime: Json
) -> subprocess.CompletedProcess[str]:
    text = yaml.safe_dump(runtime)
    return run(cluster, str(KUBECTL), "apply", "-n", namespace, "-f", "-", stdin=text)


def restart_policy(runtime: Json) -> str:
    found: str = pod_of(job_named(runtime, "dataset-initializer"))["spec"]["restartPolicy"]
    return found


def job_of_runtime(make_job: MakeJob, kind: str = "TrainingRuntime", **changes: Any) -> Json:
    made = make_job(**changes)
    made["spec"]["runtimeRef"]["kind"] = kind
    return made


def test_kubectl_apply_goes_from_the_last_release_to_this_and_to_older_clusters_and_back(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    steps = [released(), built(FLAGSHIP), built(BEFORE_1_35), built(FLAGSHIP)]
    first = kubectl_apply(cluster, namespace, of_namespace(steps[0]))
    assert first.returncode == 0, first.stderr
    cluster.apply(job_of_runtime(make_job, hook=SLOWLY), namespace=namespace)
    wait_for_step(cluster, namespace, 2)
    for step in steps[1:]:
        done = kubectl_apply(cluster, namespace, of_namespace(step))
        assert done.returncode == 0, done.stderr
        found = cluster.get("TrainingRuntime", FLAGSHIP, namespace)
        assert found is not None
        assert restart_policy(found) == restart_policy(step)
    cluster.apply(job_of_runtime(make_job, name="next"), namespace=namespace)
    assert_complete(cluster, namespace, "job")
    assert_complete(cluster, namespace, "next")


def test_on_older_clusters_a_wrong_source_fails_the_job_after_three_starts_of_its_jobset(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(of_namespace(built(BEFORE_1_35)), namespace=namespace)
    made = job_of_runtime(make_job)
    made["spec"]["initializer"]["dataset"]["storageUri"] = "file:///nowhere/rows"
    cluster.apply(made, namespace=namespace)
    assert wait_for_end(cluster, namespace) == "Failed"
    reasons = [line for line in cluster.lines(namespace, "initializer") if "/nowhere/rows" in line]
    errors = [line for line in reasons if line.startswith("cache-server: ")]
    # A Job whose pods restart in place fails at its third restart; that start may still be seen.
    assert 9 <= len(errors) <= 12, cluster.report(namespace)


def commands_of_guide(namespace: str) -> list[list[str]]:
    """The steps of docs/kubernetes.md for a runtime whose immutable part changed."""
    section = GUIDE.partition("### Change a runtime in place\n")[2].partition("\n### ")[0]
    (block,) = re.findall(r"```console\n(.*?)```", section, flags=re.DOTALL)
    lines = block.replace("\\\n", "").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    kinds = {"clustertrainingruntime": "trainingruntime"}
    return [
        [str(KUBECTL), "-n", namespace, *(kinds.get(word, word) for word in line[1:])]
        for line in words
        if line and line[:2] == ["kubectl", "patch"]
    ]


def test_the_steps_of_the_guide_change_an_immutable_part_while_a_job_runs(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    old = of_namespace(built(FLAGSHIP))
    # As the overlay for older clusters was before this release.
    rule = job_set(old)["failurePolicy"]["rules"][0]
    rule["onJobFailureReasons"] = ["BackoffLimitExceeded"]
    assert kubectl_apply(cluster, namespace, old).returncode == 0
    cluster.apply(job_of_runtime(make_job, hook=SLOWLY), namespace=namespace)
    wait_for_step(cluster, namespace, 2)
    new = of_namespace(built(FLAGSHIP))
    refused = kubectl_apply(cluster, namespace, new)
    assert refused.returncode == 1
    assert "failurePolicy: Invalid value" in refused.stderr
    assert "Value is immutable" in refused.stderr
    (patch,) = commands_of_guide(namespace)
    done = run(cluster, *patch)
    assert done.returncode == 0, done.stderr
    done = kubectl_apply(cluster, namespace, new)
    assert done.returncode == 0, done.stderr
    found = cluster.get("TrainingRuntime", FLAGSHIP, namespace)
    assert found is not None
    assert job_set(found)["failurePolicy"]["rules"] == job_set(new)["failurePolicy"]["rules"]
    assert_complete(cluster, namespace)


@pytest.fixture
def flagship_afterwards(cluster: Cluster) -> Iterator[None]:
    """Leaves the runtime of the cluster as it was."""
    yield
    cluster.apply(*manifests(FLAGSHIP))


@pytest.mark.usefixtures("no_shared_cache_afterwards")
def test_helm_test_asks_the_shared_cache_as_a_client_does(cluster: Cluster, namespace: str) -> None:
    release = ("data-cache", "--namespace", namespace)
    install = (str(HELM), "install", *release, str(CHART), "--take-ownership")
    done = run(cluster, *install, "--set-json", "runtimes=[]")
    assert done.returncode == 0, done.stderr
    cluster.wait(SHARED, lambda: ready_nodes(cluster) == 2, "the shared cache")
    done = run(cluster, str(HELM), "test", *release, "--timeout", "50s")
    assert done.returncode == 0, f"{done.stderr}\n{cluster.report(SHARED)}"
    assert any("and its coordinator answered" in line for line in cluster.lines(SHARED, "-test"))


@pytest.mark.usefixtures("flagship_afterwards")
def test_helm_switches_an_installed_chart_while_a_job_runs(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    def helm(verb: str, *values: str) -> None:
        command = [str(HELM), verb, "data-cache", str(CHART), "--namespace", namespace]
        for value in (f"runtimes={{{FLAGSHIP}}}", "shared.enabled=false", *values):
            command += ["--set", value]
        done = run(cluster, *command, "--take-ownership")
        assert done.returncode == 0, done.stderr

    def installed() -> Json:
        found = cluster.get("ClusterTrainingRuntime", FLAGSHIP, "")
        assert found is not None
        return found

    helm("install")
    first = installed()
    cluster.apply(
        job_of_runtime(make_job, "ClusterTrainingRuntime", hook=SLOWLY), namespace=namespace
    )
    wait_for_step(cluster, namespace, 2)
    helm("upgrade", "beforeKubernetes135=true")
    assert restart_policy(installed()) == "OnFailure"
    helm("upgrade", "startTogether=true", "cache.memory=16Gi", "cache.nodes=3")
    assert "dependsOn" not in job_named(installed(), "node")
    helm("upgrade")
    assert installed()["spec"] == first["spec"]
    assert_complete(cluster, namespace)
