"""``cachectl run-local`` answers as the real controllers do for the same TrainJob."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from cache_runtimes.local import Console, read_manifests, render, run_local
from tests.e2e.clusters import Cluster
from tests.train_jobs import container, replicated_job, runtime, train_job, write

Json = dict[str, Any]

_ALLOWED: Json = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_DROP = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def job_of(name: str, script: str, **fields: Any) -> Json:
    made = container(name, f"echo started; {script}", securityContext=_DROP)
    ancestor = "trainer" if name == "node" else None
    return replicated_job(name, made, ancestor=ancestor, securityContext=_ALLOWED, **fields)


_FAIL_JOB = {
    "rules": [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "node", "operator": "In", "values": [65]},
        }
    ]
}
# Name -> the runtime, and how often a container of each replicated job starts.
CASES: dict[str, tuple[Json, str, dict[str, int]]] = {
    "complete": (runtime(job_of("node", "exit 0")), "Complete", {"node": 1}),
    "too-many-failures": (
        runtime(job_of("node", "exit 1", job={"backoffLimit": 1})),
        "Failed",
        {"node": 2},
    ),
    "policy-of-exit-codes": (
        runtime(job_of("node", "exit 65", job={"backoffLimit": 5, "podFailurePolicy": _FAIL_JOB})),
        "Failed",
        {"node": 1},
    ),
    "restart-of-all-jobs": (
        runtime(
            job_of("node", "exit 1", job={"backoffLimit": 0}), failurePolicy={"maxRestarts": 1}
        ),
        "Failed",
        {"node": 2},
    ),
    "failed-dependency": (
        runtime(
            job_of("first", "exit 65", job={"backoffLimit": 0}),
            job_of("node", "exit 0", depends_on="first:Complete"),
        ),
        "Failed",
        {"first": 1, "node": 0},
    ),
    "success-of-one-job": (
        runtime(
            job_of("cache", "exec sleep 1000"),
            job_of("node", "sleep 1"),
            successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
        ),
        "Complete",
        {"cache": 1, "node": 1},
    ),
}


def run_here(folder: Path, name: str, made: Json) -> tuple[str, list[str]]:
    """How the job ends under run-local; the pods that said they had started."""
    job = train_job(name, runtimeRef={"name": made["metadata"]["name"]})
    file = write(folder / f"{name}.yaml", job)
    manifests = read_manifests(file, write(folder / f"{name}-runtime.yaml", made))
    started: list[str] = []
    code = run_local(
        manifests,
        render(manifests.train_job, manifests.runtime),
        environment=os.environ,
        extra_environment={},
        console=Console(
            event=lambda text: None,
            line=lambda pod, _, text: started.append(pod) if text == "started" else None,
        ),
        backoff_s=0.01,
    )
    return "Complete" if code == 0 else "Failed", started


def test_jobs_end_alike_after_equally_many_attempts(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    for name, (made, _, _) in CASES.items():
        made["metadata"]["name"] = f"e2e-{name}"
        cluster.apply(made)
        job = train_job(name, runtimeRef={"name": f"e2e-{name}"})
        cluster.apply(job, namespace=namespace)
    for name, (made, wanted, starts) in CASES.items():
        condition = cluster.wait(
            namespace, partial(cluster.condition, name, namespace), f"the end of {name}"
        )
        ended, started = run_here(tmp_path, name, made)
        assert (condition, ended) == (wanted, wanted), name
        for of, count in starts.items():
            lines = cluster.lines(namespace, f"{name}-{of}-0-0")
            assert lines.count("started") == count, (name, of, cluster.report(namespace))
            assert started.count(f"{name}-{of}-0-0") == count, (name, of)
