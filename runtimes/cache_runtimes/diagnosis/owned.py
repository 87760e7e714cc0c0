"""The objects of one TrainJob: those that it owns by uid, and what they say. Pure.

Names tell nothing: the pods of ``run-2`` begin with ``run-``, and events of an earlier TrainJob
``run`` stay for an hour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from cache_runtimes.local.trainer.jobset import JOBSET_LABEL

Json = dict[str, Any]

_REPLICATED_JOB = f"{JOBSET_LABEL}replicatedjob-name"
# What names the PodGroup of a pod -> the API of that PodGroup.
_GROUP_MARKS = {
    "scheduling.x-k8s.io/pod-group": "apis/scheduling.x-k8s.io/v1alpha1",  # coscheduling
    "scheduling.k8s.io/group-name": "apis/scheduling.volcano.sh/v1beta1",
    "pod-group-name": "apis/scheduling.run.ai/v2alpha2",  # KAI
}


@dataclass(frozen=True)
class Objects:
    """A TrainJob and objects of its namespace, as the API server has them.

    Attributes:
        train_job: None where it does not exist.
        train_jobs: the names of all TrainJobs in the namespace.
        events: of any object.
        pod_groups: those that its waiting pods name.
        logs: the uid of a pod -> the end of its log.
        refused: kind -> why it could not be read.
        now: when they were read.
    """

    train_job: Json | None
    train_jobs: Sequence[str] = ()
    jobsets: Sequence[Json] = ()
    stateful_sets: Sequence[Json] = ()
    jobs: Sequence[Json] = ()
    pods: Sequence[Json] = ()
    events: Sequence[Json] = ()
    pod_groups: Sequence[Json] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def jobset(self) -> Json | None:
        """Of the TrainJob, after `own`."""
        return next(iter(self.jobsets), None)


def own(objects: Objects) -> Objects:
    """Only what the TrainJob owns, itself or through others, and the events of those."""
    job = objects.train_job
    jobsets = _owned(objects.jobsets, [job] if job else [])
    sets = _owned(objects.stateful_sets, [job] if job else [])
    jobs = _owned(objects.jobs, jobsets)
    pods = _owned(objects.pods, [*jobs, *sets])
    named = {name for _, name in groups_of(pods)}
    groups = [each for each in objects.pod_groups if name_of(each) in named]
    things = (*([job] if job else ()), *jobsets, *sets, *jobs, *pods, *groups)
    uids = {uid_of(each) for each in things}
    events = [each for each in objects.events if involved(each).get("uid") in uids]
    return replace(
        objects,
        jobsets=jobsets,
        stateful_sets=sets,
        jobs=jobs,
        pods=pods,
        pod_groups=groups,
        events=sorted(events, key=time_of),
    )


def groups_of(pods: Iterable[Json]) -> set[tuple[str, str]]:
    """The PodGroups of pods without a machine: the API and the name of each."""
    found = set()
    for pod in pods:
        if (pod.get("spec") or {}).get("nodeName"):
            continue
        metadata = pod["metadata"]
        marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
        found |= {(api, marks[mark]) for mark, api in _GROUP_MARKS.items() if mark in marks}
    return found


def _owned(things: Iterable[Json], owners: Iterable[Json]) -> list[Json]:
    uids = {uid_of(owner) for owner in owners}
    return [
        thing
        for thing in things
        if any(owner["uid"] in uids for owner in thing["metadata"].get("ownerReferences") or ())
    ]


def uid_of(thing: Json) -> str:
    """The uid of an object."""
    return str(thing["metadata"]["uid"])


def name_of(thing: Json) -> str:
    """The name of an object."""
    return str(thing["metadata"]["name"])


def involved(event: Json) -> Json:
    """What an event is about."""
    found: Json = event.get("involvedObject") or event.get("regarding") or {}
    return found


def time_of(event: Json) -> str:
    """When an event came last."""
    series = (event.get("series") or {}).get("lastObservedTime")
    return series or event.get("lastTimestamp") or event.get("eventTime") or ""


def seconds_since(moment: str | None, now: datetime) -> float:
    """The age of a time of the API server; 0 where there is none."""
    if not moment:
        return 0.0
    return (now - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()


def job_of(pod: Json) -> str:
    """The replicated job of a pod; the StatefulSet's pods have none."""
    return str((pod["metadata"].get("labels") or {}).get(_REPLICATED_JOB) or "")


def wanted_pods(jobset: Json) -> dict[str, int]:
    """The number of pods of each replicated job."""
    return {
        job["name"]: job.get("replicas", 1) * (job["template"]["spec"].get("parallelism") or 1)
        for job in jobset["spec"]["replicatedJobs"]
    }


def is_ready(pod: Json) -> bool:
    """Whether the pod has the condition Ready and stays."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return "Ready" in true_conditions(pod)


def true_conditions(holder: Json | None) -> dict[str, Json]:
    """The conditions of an object that hold, by type."""
    conditions = ((holder or {}).get("status") or {}).get("conditions") or ()
    return {each["type"]: each for each in conditions if each["status"] == "True"}


def line(*parts: str | None) -> str:
    """Texts as one line."""
    return ": ".join(" ".join(part.split()) for part in parts if part)
