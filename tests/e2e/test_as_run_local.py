"""``cachectl run-local`` answers as the real controllers do for the same TrainJob."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cache_runtimes.local import Console, read_manifests, run_local
from tests.e2e.clusters import Cluster
from tests.e2e.jobs import STATE, job_of
from tests.train_jobs import runtime, train_job, write

Json = dict[str, Any]

_FAIL_JOB = {
    "rules": [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "node", "operator": "In", "values": [65]},
        }
    ]
}
_ONCE = "[ -e /state/failed ] || { touch /state/failed; exit 3; }"
_IN_PLACE = {
    "restartPolicy": "Never",
    "restartPolicyRules": [
        {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": [0, 65]}}
    ],
}


@dataclass
class Case:
    """A TrainJob and how it ends, here and there.

    Attributes:
        starts: how often a container of each replicated job starts.
        code: the exit code of run-local, which is that of the container that failed the job.
        spec: of the TrainJob.
    """

    runtime: Json
    end: str
    starts: dict[str, int]
    code: int = 0
    spec: Json = field(default_factory=dict)


CASES: dict[str, Case] = {
    "complete": Case(runtime(job_of("node", "exit 0")), "Complete", {"node": 1}),
    "too-many-failures": Case(
        runtime(job_of("node", "exit 1", job={"backoffLimit": 1})),
        "Failed",
        {"node": 2},
        code=1,
    ),
    "policy-of-exit-codes": Case(
        runtime(job_of("node", "exit 65", job={"backoffLimit": 5, "podFailurePolicy": _FAIL_JOB})),
        "Failed",
        {"node": 1},
        code=65,
    ),
    "restart-of-all-jobs": Case(
        runtime(
            job_of("node", "exit 1", job={"backoffLimit": 0}), failurePolicy={"maxRestarts": 1}
        ),
        "Failed",
        {"node": 2},
        code=1,
    ),
    "failed-dependency": Case(
        runtime(
            job_of("first", "exit 65", job={"backoffLimit": 0}),
            job_of("node", "exit 0", depends_on="first:Complete"),
        ),
        "Failed",
        {"first": 1, "node": 0},
        code=65,
    ),
    "success-of-one-job": Case(
        runtime(
            job_of("cache", "exec sleep 1000"),
            job_of("node", "true"),
            successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
        ),
        "Complete",
        {"node": 1},  # the job may end before its cache starts
    ),
    "restart-in-place": Case(
        runtime(job_of("node", _ONCE, volumes=STATE["volumes"], container=_IN_PLACE)),
        "Complete",
        {"node": 2},
    ),
    "replaced-on-failure": Case(
        runtime(job_of("node", _ONCE, volumes=STATE["volumes"], job={"backoffLimit": 2})),
        "Failed",  # the directory ends with its pod
        {"node": 3},
        code=3,
    ),
    "deadline": Case(
        runtime(job_of("node", "exec sleep 1000")),
        "Failed",
        {},  # a busy machine may not even start it
        code=1,
        spec={"activeDeadlineSeconds": 3},
    ),
}


def run_here(folder: Path, job: Json, made: Json) -> tuple[int, list[str]]:
    """The exit code of the job under run-local; the pods that said they had started."""
    name = job["metadata"]["name"]
    file = write(folder / f"{name}.yaml", job)
    manifests = read_manifests(file, write(folder / f"{name}-runtime.yaml", made))
    started: list[str] = []
    code = run_local(
        manifests,
        environment=os.environ,
        extra_environment={},
        console=Console(
            event=lambda text: None,
            line=lambda pod, _, text: started.append(pod) if text == "started" else None,
        ),
        backoff_s=0.01,
    )
    return code, started


def exit_codes(cluster: Cluster, namespace: str, name: str) -> set[int]:
    """How containers of a job's failed pods ended."""
    return {
        status["state"]["terminated"]["exitCode"]
        for pod in cluster.pods(namespace, f"{name}-")
        if pod["status"]["phase"] == "Failed"
        for status in pod["status"]["containerStatuses"]
    }


def test_jobs_end_alike_after_equally_many_attempts(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    jobs = {}
    for name, case in CASES.items():
        case.runtime["metadata"]["name"] = f"e2e-{name}"
        cluster.apply(case.runtime)
        jobs[name] = train_job(name, runtimeRef={"name": f"e2e-{name}"}, **case.spec)
        cluster.apply(jobs[name], namespace=namespace)
    for name, case in CASES.items():
        condition = cluster.wait(
            namespace, partial(cluster.condition, name, namespace), f"the end of {name}"
        )
        code, started = run_here(tmp_path, jobs[name], case.runtime)
        assert (condition, code) == (case.end, case.code), name
        if code and "activeDeadlineSeconds" not in case.spec:
            assert exit_codes(cluster, namespace, name) == {code}, name
        for of, count in case.starts.items():
            lines = cluster.lines(namespace, f"{name}-{of}-0-0")
            assert lines.count("started") == count, (name, of, cluster.report(namespace))
            assert started.count(f"{name}-{of}-0-0") == count, (name, of)
