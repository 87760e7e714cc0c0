"""The objects of a TrainJob -> what is wrong, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_runtimes.initializer.cache_health import pod_problems
from cache_runtimes.local.trainer.jobset import JOBSET_LABEL

Json = dict[str, Any]

_QUEUE = "kueue.x-k8s.io/queue-name"
_REPLICATED_JOB = f"{JOBSET_LABEL}replicatedjob-name"
# Events by which a controller says that it cannot make an object.
_REFUSALS = (
    *("TrainJobResourcesCreationFailed", "JobCreationFailed", "FailedCreate"),
    *("FailedScheduling", "FailedMount", "Evicted", "Unhealthy"),
)
_FAILED = "Failed"

# What a message says -> what to do. The first that matches counts.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"Limit must be set for non overcommitable resources|must be equal to \S+ limit",
        "A device, such as nvidia.com/gpu, needs the same number in `requests` and `limits` of "
        "`spec.trainer.resourcesPerNode`.",
    ),
    (
        r"must be less than or equal to .*limit",
        "The requests of `spec.trainer.resourcesPerNode` are above the limits of the runtime, or "
        "its limits are below the requests. Set `limits` and `requests` of the same resources.",
    ),
    (
        r"no matches for kind \"?PodGroup|podgroups?.* not found|PodGroup",
        "The runtime needs a gang scheduler that this cluster does not have. Install "
        "scheduler-plugins or Volcano, or use the overlay "
        "torch-distributed-data-cache-colocated-default-scheduler.",
    ),
    (
        r"exceeded quota",
        "The namespace has no quota left for the pods. Ask for less, or ask an administrator for "
        "more (`kubectl describe resourcequota`).",
    ),
    (
        r"violates PodSecurity",
        "The namespace enforces a Pod Security level that a pod template breaks. Take the fields "
        "that the message names out of your `runtimePatches`.",
    ),
    (
        r"runAsUser: Invalid value|unable to validate against any security context constraint",
        "OpenShift chooses the user id of pods. Install the runtimes with "
        "runtimes/components/openshift.",
    ),
    (
        r"serviceaccount .* not found|error looking up service account",
        "The namespace lacks the ServiceAccount. For torch-distributed-with-cache, apply its "
        "namespace-access/ in this namespace.",
    ),
    (
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull",
        "The image cannot be fetched. Check its name, `imagePullSecrets`, and whether the machine "
        "reaches the registry.",
    ),
    (
        r"OOMKilled",
        "The container needed more memory than its limit. For the cache, give it more nodes or a "
        "larger limit (`cachectl plan SPEC` says how much); for the trainer, lower `batch_size`, "
        "`num_workers` or `prefetch_batches`.",
    ),
    (
        r"Insufficient (?P<what>\S+)",
        "No machine has room for the pod. Ask for less, or wait until other jobs end.",
    ),
    (
        r"untolerated taint|didn't match Pod's node (affinity|selector)",
        "No machine is allowed for the pod. Check tolerations and `nodeSelector`.",
    ),
    (
        r"secret \"?[^ ]*\"? not found|configmap \"?[^ ]*\"? not found|MountVolume",
        "A Secret or ConfigMap that the pod mounts or reads does not exist in this namespace.",
    ),
    (
        r"needs the package .* on every node",
        "The image of the cache pods lacks this source. Install the runtimes with the image "
        "server-full (`kustomize edit set image`, or `images.server` of the chart; for "
        "torch-distributed-with-cache, `images.serverFull`).",
    ),
    (
        r"exited with 65\b",
        "The data or the query is bad. The line above names it; correct the source or the SQL, "
        "then create the TrainJob again.",
    ),
    (
        r"exited with 78\b",
        "A setting is bad. The line above names it; correct it and create the TrainJob again.",
    ),
    (r"is forbidden|cannot (create|get|list)", "Ask an administrator for this right."),
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: the object, such as ``Pod/lineitem-node-0-0-x7k2p``.
        what: the cluster's own words, in one line.
        remedy: what to do; empty where the words say all there is.
    """

    where: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a TrainJob.

    Attributes:
        state: in one sentence.
        findings: the causes, nearest to the TrainJob first.
    """

    state: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Objects:
    """The objects of one TrainJob, as the API server has them.

    Attributes:
        train_job: None where it does not exist.
        train_jobs: the names of all TrainJobs in the namespace.
        refused: kind -> why it could not be read.
    """

    train_job: Json | None
    train_jobs: Sequence[str] = ()
    jobset: Json | None = None
    jobs: Sequence[Json] = ()
    pods: Sequence[Json] = ()
    events: Sequence[Json] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def diagnose(name: str, namespace: str, objects: Objects) -> Diagnosis:
    """Says why a TrainJob does not train, or that it does."""
    if objects.train_job is None:
        there = ", ".join(sorted(objects.train_jobs)) or "none"
        refused = tuple(_refused(objects))
        return Diagnosis(
            f"TrainJob {name} does not exist in namespace {namespace}; TrainJobs there: {there}",
            refused,
        )
    found = (*_refused(objects), *_of_train_job(objects), *_of_pods(objects), *_of_events(objects))
    return Diagnosis(_state(name, objects), tuple(dict.fromkeys(found)))


def _refused(objects: Objects) -> Iterator[Finding]:
    for kind, why in objects.refused.items():
        remedy = f"You may not read {kind}: ask for the verbs get and list."
        yield Finding(kind, why, remedy)


def _state(name: str, objects: Objects) -> str:
    true = _true_conditions(objects.train_job)
    for condition in ("Complete", _FAILED, "Suspended"):
        if condition in true:
            said = true[condition].get("message") or true[condition].get("reason") or ""
            return f"TrainJob {name} is {condition.lower()}: {said}".rstrip(": ")
    if objects.jobset is None:
        return f"TrainJob {name} has no JobSet yet: Trainer has not created it"
    ready = {
        job: sum(_is_ready(pod) for pod in objects.pods if _job_of(pod) == job)
        for job in _wanted(objects.jobset)
    }
    parts = [f"{job} {ready[job]} of {count}" for job, count in _wanted(objects.jobset).items()]
    return f"TrainJob {name} runs; ready pods: {', '.join(parts)}"


def _of_train_job(objects: Objects) -> Iterator[Finding]:
    job = objects.train_job or {}
    name = job["metadata"]["name"]
    true = _true_conditions(job)
    if "Suspended" in true or job["spec"].get("suspend"):
        if _QUEUE in (job["metadata"].get("labels") or {}):
            remedy = "Kueue admits it when its queue has room: `kubectl get workloads`."
        else:
            remedy = f"Resume it: kubectl patch trainjob {name} --type merge -p " + (
                '\'{"spec":{"suspend":false}}\''
            )
        yield Finding(f"TrainJob/{name}", "it is suspended", remedy)
    for holder in (job, objects.jobset):
        failed = _true_conditions(holder).get(_FAILED)
        if holder and failed:
            what = _line(failed.get("reason"), failed.get("message"))
            kind = holder.get("kind") or "TrainJob"
            yield Finding(f"{kind}/{holder['metadata']['name']}", what, _remedy(what))


def _of_pods(objects: Objects) -> Iterator[Finding]:
    for pod in objects.pods:
        for problem in pod_problems(pod):
            what = " ".join(problem.text.split())
            yield Finding(f"Pod/{pod['metadata']['name']}", what, _remedy(what))


def _of_events(objects: Objects) -> Iterator[Finding]:
    """The last refusal of each object; a pod's own status says the rest."""
    own = {objects.train_job["metadata"]["name"]} if objects.train_job else set()
    own |= {each["metadata"]["name"] for each in (*objects.jobs, *objects.pods)}
    last: dict[tuple[str, str], Json] = {}
    for event in sorted(objects.events, key=_time_of):
        of = event.get("involvedObject") or event.get("regarding") or {}
        name = of.get("name") or ""
        is_own = name in own or any(name.startswith(f"{each}-") for each in own)
        if is_own and event.get("reason") in _REFUSALS:
            last[f"{of.get('kind')}/{name}", event["reason"]] = event
    ready = {f"Pod/{pod['metadata']['name']}" for pod in objects.pods if _is_ready(pod)}
    for (where, reason), event in last.items():
        if where in ready or _has_ended(objects):
            continue
        what = _line(reason, event.get("message") or event.get("note"))
        yield Finding(where, what, _remedy(what))


def _has_ended(objects: Objects) -> bool:
    return "Complete" in _true_conditions(objects.train_job)


def _remedy(text: str) -> str:
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text)), "")


def _wanted(jobset: Json) -> dict[str, int]:
    """The number of pods of each replicated job."""
    return {
        job["name"]: job.get("replicas", 1) * (job["template"]["spec"].get("parallelism") or 1)
        for job in jobset["spec"]["replicatedJobs"]
    }


def _job_of(pod: Json) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get(_REPLICATED_JOB)
    return found


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _true_conditions(holder: Json | None) -> dict[str, Json]:
    conditions = ((holder or {}).get("status") or {}).get("conditions") or ()
    return {each["type"]: each for each in conditions if each["status"] == "True"}


def _time_of(event: Json) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or ""


def _line(*parts: str | None) -> str:
    return ": ".join(" ".join(part.split()) for part in parts if part)
