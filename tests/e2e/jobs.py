"""TrainJobs of the end-to-end tests: their parts, how far they are, and how they end."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from cache_runtimes.diagnosis import Diagnosis, diagnose, read_objects
from tests.e2e.clusters import Cluster, manifests
from tests.e2e.rows import NUM_ROWS
from tests.train_jobs import container as shell
from tests.train_jobs import replicated_job

Json = dict[str, Any]

WITH_CACHE = "torch-distributed-with-cache"
STATE = {
    "volumes": [{"name": "state", "emptyDir": {}}],
    "mounts": [{"name": "state", "mountPath": "/state"}],
}
_ALLOWED: Json = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_DROP = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def job_of(name: str, script: str, *, container: Json | None = None, **fields: Any) -> Json:
    """A replicated job whose pods say that they have started, then run a script.

    Args:
        container: other fields of its container; those of the pod and the Job are ``fields``.
    """
    made = shell(name, f"echo started; {script}", securityContext=_DROP, **(container or {}))
    if "volumes" in fields:
        made["volumeMounts"] = STATE["mounts"]
    ancestor = "trainer" if name == "node" else None
    return replicated_job(name, made, ancestor=ancestor, securityContext=_ALLOWED, **fields)


def without_gang(runtime: Json) -> Json:
    """As the overlay for the default scheduler makes it."""
    made = copy.deepcopy(runtime)
    made["metadata"]["name"] += "-default-scheduler"
    del made["spec"]["podGroupPolicy"]
    job = made["spec"]["template"]["spec"]["replicatedJobs"][0]
    del job["template"]["spec"]["template"]["spec"]["schedulerName"]
    return made


def grant(cluster: Cluster, namespace: str, *kinds: str) -> None:
    """Gives the initializer of `WITH_CACHE` in a namespace its account and its rights."""
    for each in manifests(f"{WITH_CACHE}/namespace-access"):
        if each["kind"] in kinds:
            for subject in each.get("subjects") or ():
                subject["namespace"] = namespace
            cluster.apply(each, namespace=namespace)


def assert_complete(cluster: Cluster, namespace: str, name: str = "job", *, ranks: int = 2) -> None:
    """Waits for the end of a TrainJob; it read each row exactly once."""
    end = wait_for_end(cluster, namespace, name)
    assert end == "Complete", cluster.report(namespace)
    read = [json.loads(line) for line in cluster.lines(namespace, name) if '"ids"' in line]
    assert sorted(each["rank"] for each in read) == list(range(ranks))
    assert {each["world_size"] for each in read} == {ranks}
    assert sorted(row for each in read for row in each["ids"]) == list(range(NUM_ROWS))


def wait_for_end(cluster: Cluster, namespace: str, name: str = "job") -> str | None:
    """The condition by which a TrainJob ended."""

    def ended() -> str | None:
        condition = cluster.condition(name, namespace)
        return condition if condition in ("Complete", "Failed") else None

    return cluster.wait(namespace, ended, f"the end of {name}")


def wait_for_step(cluster: Cluster, namespace: str, step: int, part: str = "node") -> None:
    """Waits until trainers whose pods have ``part`` in their name are at a step."""
    cluster.wait(
        namespace,
        lambda: f"step {step}" in cluster.lines(namespace, part),
        f"step {step} of {part}",
    )


def diagnosis_of(cluster: Cluster, namespace: str, name: str) -> Diagnosis:
    """What ``cachectl diagnose`` finds out about a TrainJob."""
    _, objects = read_objects(name, namespace, kubeconfig=str(cluster.kubeconfig))
    return diagnose(name, namespace, objects)


def wait_for_finding(cluster: Cluster, namespace: str, name: str, what: str, remedy: str) -> None:
    """Waits until one finding has words of a pattern and this remedy."""
    cluster.wait(
        namespace,
        lambda: any(
            re.search(what, finding.what) and remedy in finding.remedy
            for finding in diagnosis_of(cluster, namespace, name).findings
        ),
        f"a finding {what!r} of {name}",
    )
