"""What objects say went wrong, each with a key that tells two causes apart. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from cache_runtimes.diagnosis.owned import (
    Json,
    Objects,
    involved,
    job_of,
    line,
    name_of,
    seconds_since,
    uid_of,
)
from cache_runtimes.local.trainer.info import NODE

# A controller or a kubelet that works acts within moments.
UNHURRIED_S = 30.0
_STOPPED = 143  # 128 + SIGTERM
_STARTING = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")
_IMAGE = re.compile(r"Image|RegistryUnavailable")
_MOUNTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedBinding")
_PROBE = re.compile(r"failed (liveness|startup) probe")
# Words that say that a gang waits, and not for what.
_GANG_WAITS = re.compile(r"[Pp]od group is not ready|has not looked at it|at plugin Coscheduling")
_GANG_EVENT = re.compile(r"Unschedulable|queueable|FailedScheduling")
_CREATION = ("TrainJobResourcesCreationFailed", "JobCreationFailed", "FailedCreate")
_OWN_ERROR = re.compile(r"cache_protocol\.errors\.\w+: \S")
_ERROR = re.compile(r"\w(Error|Exception): \S")
_PREFIX = re.compile(r"^\[rank\d+\]:\s*|\b(cache-server|initializer): |cache_protocol\.errors\.")


@dataclass(frozen=True)
class Cause:
    """One thing that an object says.

    Attributes:
        where: the object, as Kind/name.
        what: the cluster's own words, in one line; never empty.
        key: the same for causes that are one.
        job: the replicated job of an exit, else empty.
        at: when, to sort exits; an RFC 3339 time, or empty.
    """

    where: str
    what: str
    key: tuple[str, ...]
    job: str = ""
    at: str = ""


def silent(pods: Sequence[Json]) -> list[Json]:
    """Pods of trainers that failed and whose termination message names no error."""
    found = []
    for pod in pods:
        for container in _containers(pod):
            ended = (container.get("state") or {}).get("terminated") or {}
            message = ended.get("message") or ""
            if container["name"] == NODE and ended.get("exitCode") and not _ERROR.search(message):
                found.append(pod)
    return found


def of_creations(objects: Objects) -> Iterator[Cause]:
    """The last refusal to create what is still missing."""
    last: dict[str, Json] = {}
    for event in objects.events:
        if event.get("reason") in _CREATION:
            last[str(involved(event)["uid"])] = event
    missing = _incomplete(objects)
    there = {name_of(job) for job in objects.jobs}
    for uid, event in last.items():
        message = event.get("message") or event.get("note") or ""
        if uid not in missing or any(f'"{name}"' in message for name in there):
            continue
        of, what = involved(event), line(event["reason"], message)
        yield Cause(f"{of.get('kind')}/{of.get('name')}", what, ("create", _same(what, objects)))


def _incomplete(objects: Objects) -> set[str]:
    """The uids of objects that lack one that they should have made."""
    found = set()
    if objects.train_job is not None and objects.jobset is None:
        found.add(uid_of(objects.train_job))
    if objects.jobset is not None:
        wanted = sum(job.get("replicas", 1) for job in objects.jobset["spec"]["replicatedJobs"])
        if len(objects.jobs) < wanted:
            found.add(uid_of(objects.jobset))
    for maker in (*objects.jobs, *objects.stateful_sets):
        spec, status = maker["spec"], maker.get("status") or {}
        wanted = spec.get("parallelism") or spec.get("replicas") or 1
        made = [
            pod
            for pod in objects.pods
            if any(uid_of(maker) == each["uid"] for each in pod["metadata"]["ownerReferences"])
            and (pod.get("status") or {}).get("phase") != "Failed"
        ]
        if max(len(made), status.get("succeeded") or 0) < wanted:
            found.add(uid_of(maker))
    return found


def of_pod(pod: Json, objects: Objects) -> Iterator[Cause]:
    """Why a pod does not run, or how it ended."""
    where, status = f"Pod/{name_of(pod)}", pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        yield from _terminating(pod, where, objects.now)
        return
    if status.get("phase") == "Failed" and status.get("reason"):  # evicted, or lost with its node
        what = line(status["reason"], status.get("message"))
        yield Cause(where, what, ("phase", _same(what, objects)))
        return
    yield from _scheduling(pod, where, objects)
    for container in _containers(pod):
        yield from _container(pod, container, objects)
    if status.get("phase", "Pending") == "Pending" or not _is_settled(pod):
        yield from _events_of(pod, where, objects)


def _terminating(pod: Json, where: str, now: datetime) -> Iterator[Cause]:
    """A pod that should be gone; its time of deletion has the grace in it."""
    overdue_s = seconds_since(pod["metadata"]["deletionTimestamp"], now)
    if overdue_s <= UNHURRIED_S:
        return
    node = (pod.get("spec") or {}).get("nodeName") or "none"
    held = ", ".join(pod["metadata"].get("finalizers") or ())
    what = f"Terminating for {overdue_s:.0f} s longer than its grace, on node {node}"
    yield Cause(where, f"{what}, finalizers: {held}" if held else what, ("terminating", node, held))


def _scheduling(pod: Json, where: str, objects: Objects) -> Iterator[Cause]:
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    if spec.get("nodeName"):
        return
    scheduled = [each for each in status.get("conditions") or () if each["type"] == "PodScheduled"]
    for condition in scheduled:
        if condition["status"] == "False":
            what = line(condition.get("reason") or "Unschedulable", condition.get("message"))
            yield Cause(where, what, ("schedule", _same(what, objects)))
    waits_s = seconds_since(pod["metadata"].get("creationTimestamp"), objects.now)
    if not scheduled and waits_s > UNHURRIED_S:
        scheduler = spec.get("schedulerName") or "default-scheduler"
        what = f"Pending for {waits_s:.0f} s: scheduler {scheduler} has not looked at it"
        yield Cause(where, what, ("scheduler", scheduler))


def explained(found: Sequence[Cause], objects: Objects) -> list[Cause]:
    """The causes, with what its PodGroup says in place of pods that only wait for their gang."""
    if not objects.pod_groups:
        return [*found]
    clear = [each for each in found if not _GANG_WAITS.search(each.what)]
    if any(each.key[0] in ("schedule", "create") for each in clear):
        return clear
    told = [cause for group in objects.pod_groups for cause in _gang(group, objects)]
    return [*clear, *told] if told else [*found]


def _gang(group: Json, objects: Objects) -> Iterator[Cause]:
    """Why a PodGroup waits: by its last condition, or by its last event where that is vague."""
    status = group.get("status") or {}
    last = (status.get("schedulingConditions") or status.get("conditions") or [])[-1:]
    said = [
        line(each.get("reason") or "Unschedulable", each.get("message"))
        for condition in last
        if condition.get("status") == "True" and condition.get("type") != "Scheduled"
        for each in condition.get("reasons") or [condition]
    ]
    events = [
        line(event["reason"], event.get("message") or event.get("note"))
        for event in objects.events
        if involved(event).get("uid") == uid_of(group) and _GANG_EVENT.search(event["reason"])
    ]
    for told in (said, events[::-1]):
        if clear := [what for what in told if not _GANG_WAITS.search(what)]:
            said = clear if told is said else clear[:1]
            break
    else:
        said = [*said, *events][:1]
    for what in said:
        yield Cause(f"PodGroup/{name_of(group)}", what, ("gang", _same(what, objects)))


def _containers(pod: Json) -> list[Json]:
    status = pod.get("status") or {}
    first, others = status.get("initContainerStatuses"), status.get("containerStatuses")
    return [*(first or ()), *(others or ())]


def _is_settled(pod: Json) -> bool:
    """Whether all its containers are ready or have ended."""
    containers = _containers(pod)
    return all(c.get("ready") or "terminated" in (c.get("state") or {}) for c in containers)


def _container(pod: Json, container: Json, objects: Objects) -> Iterator[Cause]:
    if container.get("ready"):
        return
    where, state = f"Pod/{name_of(pod)}", container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason") or ""
    if reason and reason not in _STARTING:
        what = line(reason, waiting.get("message"))
        is_image = _IMAGE.search(reason) is not None
        same = container.get("image") or "" if is_image else _same(what, objects)
        yield Cause(where, what, ("start", "image" if is_image else reason, same))
        return
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    code = ended.get("exitCode") or 0
    if not code or (code == _STOPPED and container["name"] != NODE):
        return  # a cache pod that was told to stop is replaced
    text = said(ended.get("message"), objects.logs.get(uid_of(pod)))
    told = text or ended.get("reason") or "it said nothing"
    why = ended.get("reason")
    why = f" ({why})" if why and why not in ("Error", told) else ""
    job = job_of(pod)
    key = ("exit", job, container["name"], str(code), _same(told, objects))
    at = ended.get("finishedAt") or ""
    yield Cause(where, f"exited with {code}: {told}{why}", key, f"{job}/{container['name']}", at)


def said(message: str | None, log: str | None = None) -> str:
    """The line of a termination message or a log that names the error, else its last line.

    torchrun prints much after the error of a trainer: Kubernetes keeps only the end of that.
    """
    last = ""
    for text in (message, log):
        lines = [each.strip() for each in (text or "").splitlines() if each.strip()]
        for pattern in (_OWN_ERROR, _ERROR):
            named = [each for each in lines if pattern.search(each)]
            if named:
                return _PREFIX.sub("", named[-1])
        last = last or (_PREFIX.sub("", lines[-1]) if lines else "")
    return last


def _events_of(pod: Json, where: str, objects: Objects) -> Iterator[Cause]:
    """The last reason why its volumes or its network are not there, or a probe that failed."""
    waits = any(
        ((c.get("state") or {}).get("waiting") or {}).get("reason") in _STARTING
        for c in _containers(pod)
    )
    found: dict[str, str] = {}
    for event in objects.events:
        if involved(event).get("uid") != uid_of(pod):
            continue
        reason, message = event.get("reason"), event.get("message") or event.get("note") or ""
        if reason in _MOUNTS and waits:
            # A mount that timed out says only that; the event before it said why.
            if "mount" not in found or "timed out waiting" not in message:
                found["mount"] = line(reason, message)
        elif reason == "Killing" and _PROBE.search(message):
            found["probe"] = line(reason, message)
    for kind, what in found.items():
        yield Cause(where, what, (kind, _same(what, objects)))


def _same(text: str, objects: Objects) -> str:
    """The text without names of pods and without numbers, which differ between equal causes."""
    name = re.escape(name_of(objects.train_job)) if objects.train_job else "(?!)"
    return re.sub(r"\d+", "#", re.sub(rf"\b{name}-[\w-]+", "*", text))
