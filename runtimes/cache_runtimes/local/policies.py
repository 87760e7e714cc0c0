"""What follows from an exit code: the rules of kubelets, Jobs and JobSets. Pure.

Sources: ``pkg/kubelet/container/helpers.go`` (restart rules of containers) and
``pkg/controller/job/{job_controller,pod_failure_policy}.go`` of kubernetes/kubernetes,
``pkg/controllers/{failure_policy,success_policy,depends_on}.go`` of kubernetes-sigs/jobset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]

DEFAULT_BACKOFF_LIMIT = 6  # of a Job
POD_FAILURE_POLICY = "PodFailurePolicy"
BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"

# Fields of Jobs that change when they end, and are not restated here.
_JOB_FIELDS = ("backoffLimitPerIndex", "maxFailedIndexes", "successPolicy", "activeDeadlineSeconds")
_POD_ACTIONS = ("FailJob", "Ignore", "Count")
_JOB_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


def unknown_policies(jobset_spec: Json) -> Iterator[str]:
    """What a JobSet and its Jobs say about their end that is not restated here."""
    for rule in (jobset_spec.get("failurePolicy") or {}).get("rules") or ():
        if rule["action"] not in _JOB_ACTIONS:
            yield f"failurePolicy: action {rule['action']}"
    for job in jobset_spec["replicatedJobs"]:
        spec = job["template"]["spec"]
        yield from (f"{job['name']}: {name}" for name in _JOB_FIELDS if spec.get(name) is not None)
        for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
            if rule["action"] not in _POD_ACTIONS:
                yield f"{job['name']}: podFailurePolicy: action {rule['action']}"


@dataclass(frozen=True)
class ContainerExit:
    """How a container ended.

    Attributes:
        container: its name.
        code: as a shell gives it: 128 + the signal for a killed one.
        message: its last line, which says why.
    """

    container: str
    code: int
    message: str


def is_sidecar(container: Json) -> bool:
    """Whether an init container is a native sidecar."""
    return bool(container.get("restartPolicy") == "Always")


def restarts_in_place(container: Json, pod_spec: Json, code: int) -> bool:
    """Whether a kubelet starts a container again after it ended with ``code``."""
    for rule in container.get("restartPolicyRules") or ():
        if _matches(rule.get("exitCodes"), code):
            return bool(rule["action"].startswith("Restart"))
    policy = container.get("restartPolicy") or pod_spec.get("restartPolicy", "Always")
    return bool(policy == "Always" or (policy == "OnFailure" and code != 0))


PodFailureAction = Literal["FailJob", "Ignore", "Count"]


def after_pod_failure(job_spec: Json, exits: Iterable[ContainerExit]) -> PodFailureAction:
    """What the Job does about a failed pod. Disruptions do not happen on one machine."""
    failed = [exit for exit in exits if exit.code != 0]
    for rule in (job_spec.get("podFailurePolicy") or {}).get("rules") or ():
        wanted = rule.get("onExitCodes")
        if wanted is None:
            continue
        of = wanted.get("containerName")
        if any(_matches(wanted, exit.code) for exit in failed if of in (None, exit.container)):
            action: PodFailureAction = rule["action"]
            return action
    return "Count"


def exceeds_backoff_limit(pod_spec: Json, limit: int, failures: int, restarts: int) -> bool:
    """Whether a Job has failed too often.

    ``exceedsBackoffLimit`` and ``pastBackoffLimitOnFailure`` of the Job's controller.

    Args:
        pod_spec: of its pods.
        failures: pods that have failed.
        restarts: of containers in place, of all pods that run; they count under ``OnFailure`` only,
            and reach a limit that failures must pass. The last of them is not made: a cluster makes
            it and takes it back when the Job's controller sees it.
    """
    if failures > limit:
        return True
    return pod_spec.get("restartPolicy") == "OnFailure" and restarts >= max(1, limit)


def _matches(wanted: Json | None, code: int) -> bool:
    if wanted is None:
        return False
    return bool((code in wanted["values"]) == (wanted["operator"] == "In"))


def after_job_failure(failure_policy: Json | None, job: str, reason: str, restarts: int) -> str:
    """``FailJobSet``, ``RestartJobSet`` or ``RestartJobSetAndIgnoreMaxRestarts``.

    Args:
        failure_policy: of the JobSet.
        job: the replicated job whose Job failed.
        reason: of the failed Job.
        restarts: that counted towards the maximum so far.
    """
    if failure_policy is None:
        return "FailJobSet"
    action = "RestartJobSet"
    for rule in failure_policy.get("rules") or ():
        reasons = rule.get("onJobFailureReasons") or [reason]
        targets = rule.get("targetReplicatedJobs") or [job]
        if reason in reasons and job in targets:
            action = rule["action"]
            break
    if action == "RestartJobSet" and restarts >= failure_policy.get("maxRestarts", 0):
        return "FailJobSet"
    return action


def is_complete(spec: Json, succeeded: Mapping[str, int]) -> bool:
    """Whether a JobSet is complete.

    Args:
        spec: of the JobSet.
        succeeded: how many Jobs of each replicated job have succeeded.
    """
    policy = spec.get("successPolicy") or {"operator": "All"}
    targets = policy.get("targetReplicatedJobs") or [job["name"] for job in spec["replicatedJobs"]]
    jobs = [job for job in spec["replicatedJobs"] if job["name"] in targets]
    if policy["operator"] == "Any":
        return any(succeeded.get(job["name"], 0) for job in jobs)
    return all(succeeded.get(job["name"], 0) >= job.get("replicas", 1) for job in jobs)


@dataclass(frozen=True)
class JobStatus:
    """The Jobs of one replicated job: how many are ready, and how many succeeded."""

    ready: int = 0
    succeeded: int = 0


def may_start(job: Json, status: Mapping[str, JobStatus], replicas: Mapping[str, int]) -> bool:
    """Whether what a replicated job depends on has come to pass."""
    for dependency in job.get("dependsOn") or ():
        of = status.get(dependency["name"], JobStatus())
        reached = of.succeeded if dependency["status"] == "Complete" else of.ready + of.succeeded
        if reached < replicas[dependency["name"]]:
            return False
    return True
