"""What follows from an exit code: the rules of kubelets, Jobs and JobSets. Pure.

Sources: ``pkg/kubelet/container/helpers.go`` (restart rules of containers) and
``pkg/controller/job/{job_controller,pod_failure_policy}.go`` of kubernetes/kubernetes,
``pkg/controllers/{failure_policy,success_policy,depends_on}.go`` of kubernetes-sigs/jobset. The
operators and actions are the ones that `supported` lets through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]

DEFAULT_BACKOFF_LIMIT = 6  # of a Job
POD_FAILURE_POLICY = "PodFailurePolicy"
BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"


@dataclass(frozen=True)
class ContainerExit:
    """How a container ended."""

    container: str
    code: int  # as a shell gives it: 128 + the signal for a killed one
    message: str  # its last line, which says why


def restarts_in_place(container: Json, pod_spec: Json, code: int) -> bool:
    """Whether a kubelet restarts a container that ended with ``code``."""
    for rule in container.get("restartPolicyRules") or ():
        if code not in rule["exitCodes"]["values"]:  # NotIn
            return True
    policy = container.get("restartPolicy") or pod_spec["restartPolicy"]
    return bool(policy == "Always" or (policy == "OnFailure" and code != 0))


def after_pod_failure(
    job_spec: Json, exits: Iterable[ContainerExit]
) -> Literal["FailJob", "Ignore", "Count"]:
    """What a Job does about a failed pod. Disruptions do not happen on one machine."""
    failed = [exit for exit in exits if exit.code != 0]
    for rule in (job_spec.get("podFailurePolicy") or {}).get("rules") or ():
        wanted = rule.get("onExitCodes") or {"values": ()}
        name = wanted.get("containerName")
        if any(exit.code in wanted["values"] and name in (None, exit.container) for exit in failed):
            return "FailJob" if rule["action"] == "FailJob" else "Ignore"
    return "Count"


def exceeds_backoff_limit(pod_spec: Json, limit: int, failures: int, restarts: int) -> bool:
    """Whether a Job has failed too often.

    ``exceedsBackoffLimit`` and ``pastBackoffLimitOnFailure`` of the Job's controller.

    Args:
        failures: of pods.
        restarts: in place, of the running pods. They count under ``OnFailure`` only, and exceed a
            limit when they reach it. A cluster makes the last restart and takes it back.
    """
    if failures > limit:
        return True
    return pod_spec["restartPolicy"] == "OnFailure" and restarts >= max(1, limit)


def restarts_jobset(failure_policy: Json | None, job: str, reason: str, restarts: int) -> bool:
    """Whether a JobSet starts again after ``restarts`` of them, when a Job fails by ``reason``."""
    policy = failure_policy or {}
    for rule in policy.get("rules") or ():  # FailJobSet
        reasons = rule.get("onJobFailureReasons") or [reason]
        targets = rule.get("targetReplicatedJobs") or [job]
        if reason in reasons and job in targets:
            return False
    return restarts < int(policy.get("maxRestarts", 0))


def success_targets(jobset_spec: Json) -> list[str]:
    """The replicated jobs whose success completes a JobSet."""
    targets = (jobset_spec.get("successPolicy") or {}).get("targetReplicatedJobs")
    return list(targets or (job["name"] for job in jobset_spec["replicatedJobs"]))


def may_start(job: Json, ready: Collection[str], succeeded: Collection[str]) -> bool:
    """Whether the dependencies of a job are met; ``ready`` ones may have succeeded."""
    return all(
        dependency["name"] in (succeeded if dependency["status"] == "Complete" else ready)
        for dependency in job.get("dependsOn") or ()
    )
