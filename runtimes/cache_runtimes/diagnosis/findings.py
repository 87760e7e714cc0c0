"""The objects of a TrainJob -> what is wrong, and what to do. Pure.

Each cause has one finding, and consequences have none: the failure of a Job follows from that of
its pod, and a trainer loses a cache that has failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache_protocol.errors import short
from cache_runtimes.diagnosis import causes
from cache_runtimes.diagnosis.causes import UNHURRIED_S, Cause
from cache_runtimes.diagnosis.owned import (
    Objects,
    is_ready,
    job_of,
    line,
    name_of,
    own,
    seconds_since,
    true_conditions,
    wanted_pods,
)
from cache_runtimes.diagnosis.remedies import remedy
from cache_runtimes.local.trainer.info import NODE

_QUEUE = "kueue.x-k8s.io/queue-name"
_COMPLETE, _FAILED, _SUSPENDED = "Complete", "Failed", "Suspended"
_DEADLINE = "DeadlineExceeded"
_LOST_CACHE = re.compile(r"NodeUnavailableError|NotReadyError")
_RECOVERED_S = 60.0  # ready for so long: an earlier failure of its job is over
_MOST = 600  # characters
_LEAST_REPEATED = 20


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: the object, such as ``Pod/lineitem-node-0-0-x7k2p``, and how many others say so.
        what: the cluster's own words, in one line; never empty.
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
        is_well: it waits, trains or is complete, and nothing is wrong.
        findings: the causes, nearest to the TrainJob first.
    """

    state: str
    is_well: bool
    findings: tuple[Finding, ...]


def diagnose(name: str, namespace: str, objects: Objects) -> Diagnosis:
    """Says why a TrainJob does not train, or that it does."""
    refused = tuple(_refused(objects))
    train_job = objects.train_job
    if train_job is None:
        there = ", ".join(sorted(objects.train_jobs)) or "none"
        state = f"TrainJob {name} does not exist in namespace {namespace}; TrainJobs there: {there}"
        return Diagnosis(state, False, refused)
    objects = own(objects)
    true = true_conditions(train_job)
    if _COMPLETE in true:
        found: list[Cause] = []
    elif _SUSPENDED in true or train_job["spec"].get("suspend"):
        # A refusal may be over on resume, but not that of what Trainer itself could not make.
        unmade = [] if objects.jobset else _merged([*causes.of_creations(objects)])
        told = (*_told(unmade), _suspended(objects))
        return Diagnosis(_state(name, objects), False, (*refused, *told))
    else:
        seen = [*causes.of_creations(objects), *_of_pods(objects)]
        found = _merged(causes.explained(seen, objects))
        found = [*_deadline(objects), *found] or _without_cause(objects)
    findings = (*refused, *_told(found))
    return Diagnosis(_state(name, objects), not findings and _FAILED not in true, findings)


def _told(found: Sequence[Cause]) -> tuple[Finding, ...]:
    return tuple(Finding(each.where, short(each.what, _MOST), remedy(each.what)) for each in found)


def _refused(objects: Objects) -> Iterator[Finding]:
    for kind, why in objects.refused.items():
        yield Finding(kind, why, f"You may not read {kind}: ask for the verbs get and list.")


def _state(name: str, objects: Objects) -> str:
    true = true_conditions(objects.train_job)
    for condition in (_COMPLETE, _FAILED, _SUSPENDED):
        if condition in true:
            said = true[condition].get("message") or true[condition].get("reason") or ""
            return f"TrainJob {name} is {condition.lower()}: {said}".rstrip(": ")
    if objects.jobset is None:
        return f"TrainJob {name} has no JobSet yet: Trainer has not created it"
    wanted = wanted_pods(objects.jobset)
    ready = [job_of(pod) for pod in objects.pods if is_ready(pod)]
    parts = [f"{job} {ready.count(job)} of {count}" for job, count in wanted.items()]
    return f"TrainJob {name} runs; ready pods: {', '.join(parts)}"


def _suspended(objects: Objects) -> Finding:
    job = objects.train_job or {}
    name = name_of(job)
    if _QUEUE in (job["metadata"].get("labels") or {}):
        told = "Kueue admits it when its queue has room: `kubectl get workloads`."
    else:
        patch = '\'{"spec":{"suspend":false}}\''
        told = f"Resume it: kubectl patch trainjob {name} --type merge -p {patch}"
    return Finding(f"TrainJob/{name}", "it is suspended", told)


def _deadline(objects: Objects) -> Iterator[Cause]:
    """That the TrainJob took too long, which says nothing of its pods."""
    failed = true_conditions(objects.train_job).get(_FAILED)
    if failed and failed.get("reason") == _DEADLINE:
        what = line(failed["reason"], failed.get("message"))
        yield Cause(f"TrainJob/{name_of(objects.train_job or {})}", what, ("deadline",))


def _without_cause(objects: Objects) -> list[Cause]:
    """What there is to say where no pod and no event names a cause."""
    job = objects.train_job or {}
    kinds = (("Job", objects.jobs), ("JobSet", objects.jobsets), ("TrainJob", [job]))
    for kind, holders in kinds:
        for holder in holders:
            if condition := true_conditions(holder).get(_FAILED):
                what = line(condition.get("reason") or _FAILED, condition.get("message"))
                return [Cause(f"{kind}/{name_of(holder)}", what, ("failed",))]
    makers = (
        ("TrainJob", job, objects.jobsets, "Trainer"),
        *(("JobSet", jobset, objects.jobs, "JobSet") for jobset in objects.jobsets),
    )
    for kind, maker, made, program in makers:
        waits_s = seconds_since(maker["metadata"].get("creationTimestamp"), objects.now)
        if not made and waits_s > UNHURRIED_S:
            what = f"{program} has made nothing of it for {waits_s:.0f} s"
            return [Cause(f"{kind}/{name_of(maker)}", what, ("controller",))]
    return []


def _of_pods(objects: Objects) -> list[Cause]:
    """The causes that pods name, of jobs that are not well again."""
    found = [
        cause
        for pod in objects.pods
        if not _has_recovered(job_of(pod), objects)
        for cause in causes.of_pod(pod, objects)
    ]
    exits = sorted((cause for cause in found if cause.job), key=lambda cause: cause.at)
    others = [cause for cause in found if not cause.job]
    return [*others, *_roots(exits)]


def _has_recovered(job: str, objects: Objects) -> bool:
    """Whether all pods of a replicated job have been ready for a while."""
    ready = [pod for pod in objects.pods if job_of(pod) == job and is_ready(pod)]
    wanted = wanted_pods(objects.jobset).get(job, 1) if objects.jobset else 1
    since = (true_conditions(pod)["Ready"].get("lastTransitionTime") for pod in ready)
    return len(ready) >= wanted and all(
        seconds_since(moment, objects.now) > _RECOVERED_S for moment in since
    )


def _roots(exits: Sequence[Cause]) -> list[Cause]:
    """The exits that have no other exit as their cause; the earliest come first.

    In one container of a job, an exit without a known remedy follows from one with it, or from the
    first of all: ranks lose each other. A trainer that lost the cache follows from an exit of that.
    """
    found: list[Cause] = []
    for job in dict.fromkeys(each.job for each in exits):
        of_job = [each for each in exits if each.job == job]
        found += [each for each in of_job if remedy(each.what)] or of_job[:1]
    caches = [each for each in found if not each.job.endswith(f"/{NODE}")]
    return [
        each
        for each in found
        if not (caches and each not in caches and _LOST_CACHE.search(each.what))
    ]


def _merged(found: Sequence[Cause]) -> list[Cause]:
    """Each cause once; one that only repeats another, as the initializer does, is left out."""
    by_key: dict[tuple[str, ...], list[Cause]] = {}
    for cause in found:
        by_key.setdefault(cause.key, []).append(cause)
    merged = []
    for same in by_key.values():
        more = len({each.where for each in same}) - 1
        where = f"{same[0].where} and {more} more" if more else same[0].where
        merged.append(Cause(where, same[0].what, same[0].key, same[0].job))
    return [each for each in merged if not any(_repeats(each, other) for other in merged)]


def _repeats(cause: Cause, other: Cause) -> bool:
    """Whether a cause quotes the words of another one."""
    words = other.what
    return cause is not other and len(words) > _LEAST_REPEATED and words in cause.what
