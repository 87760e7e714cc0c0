"""What the API server and JobSet's webhook refuse of a TrainJob and of its JobSet. Pure.

The schema and CEL rules of the CRD ``trainjobs.trainer.kubeflow.org``;
``pkg/webhooks/jobset_webhook.go`` of kubernetes-sigs/jobset, ValidateCreate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cache_runtimes.local.trainer.info import Json, containers, pod_spec
from cache_runtimes.local.trainer.quantities import PATTERN
from cache_runtimes.local.trainer.refusals import (
    SCHEMA_OF_JOB_SET,
    SCHEMA_OF_TRAIN_JOB,
    WEBHOOK_OF_JOB_SET,
    Refusal,
)

MAX_NAME_LENGTH = 63
_MAX_URI_LENGTH = 2048
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")
_MANAGERS = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")

_MAX_VALUE_LENGTH = 200
_MISSING = "must be set"

_Check = Callable[[Any], str | None]  # why a value is refused


def train_job_problems(train_job: Json) -> Iterator[Refusal]:
    """The schema of the TrainJob."""
    for path, check in _SCHEMA:
        for where, value in _values(train_job, path.split("."), ""):
            reason = check(value)
            if reason is not None:
                got = repr(value)[:_MAX_VALUE_LENGTH]
                yield Refusal(SCHEMA_OF_TRAIN_JOB, where, f"{reason}, got {got}")
    for path, keys in _UNIQUE:
        for where, items in _values(train_job, path.split("."), ""):
            yield from _repeated(where, items, keys)


def is_readable(refusals: Iterable[Refusal]) -> bool:
    """Whether webhooks can read a TrainJob in spite of what its schema refuses."""
    return not any(
        "resourcesPerNode" in refusal.field or refusal.reason == _MISSING for refusal in refusals
    )


def job_set_problems(jobset: Json) -> Iterator[Refusal]:
    """The schema of the JobSet, and if it passes, JobSet's webhook."""
    yield from list(_schema_of_job_set(jobset)) or _webhook(jobset)


def _schema_of_job_set(jobset: Json) -> Iterator[Refusal]:
    for where, job in _jobs(jobset):
        pod = pod_spec(job)
        where = f"{where}.template.spec.template.spec.containers"
        if not pod.get("containers"):
            yield Refusal(SCHEMA_OF_JOB_SET, where, "must be set")
        for index, container in enumerate(pod.get("containers") or ()):
            ports = [
                (port["containerPort"], port.get("protocol", "TCP"))
                for port in container.get("ports") or ()  # pyright: ignore
            ]
            if len({*ports}) < len(ports):
                yield Refusal(
                    SCHEMA_OF_JOB_SET,
                    f"{where}[{index}].ports",
                    f"has a port twice: {ports}; Trainer takes ports without names for one, so "
                    "name them in the runtime",
                )


def _webhook(jobset: Json) -> Iterator[Refusal]:
    def refused(field: str, reason: str) -> Refusal:
        return Refusal(WEBHOOK_OF_JOB_SET, field, reason)

    spec, name, known = jobset["spec"], jobset["metadata"]["name"], set()
    for where, job in _jobs(jobset):
        spec_of_job = job["template"]["spec"]
        last = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}"
        if spec_of_job.get("completionMode", "Indexed") == "Indexed":
            last += f"-{spec_of_job['completions'] - 1}-abcde"
        if len(last) > MAX_NAME_LENGTH:
            yield refused(
                f"{where}.name",
                f"makes metadata.name {name!r} {len(last) - MAX_NAME_LENGTH} characters too long: "
                f"its pods, such as {last}, may have {MAX_NAME_LENGTH}",
            )
        elif not _DNS_LABEL.fullmatch(last):
            yield refused(f"{where}.name", f"makes {last!r}, which is no DNS label")
        known.add(job["name"])
        for number, dependency in enumerate(job.get("dependsOn") or ()):
            if dependency["name"] not in known - {job["name"]}:
                yield refused(
                    f"{where}.dependsOn[{number}].name",
                    f"must name an earlier replicated job, got {dependency['name']!r}",
                )
    rules = (spec.get("failurePolicy") or {}).get("rules") or ()
    for policy in (spec.get("successPolicy") or {}, *rules):
        for target in policy.get("targetReplicatedJobs") or ():
            if target not in known:
                yield refused("spec", f"names no replicated job: {target!r}")
    for rule in rules:
        if rule.get("name") and not _RULE_NAME.fullmatch(rule["name"]):
            yield refused("spec.failurePolicy", f"{rule['name']!r} is no name of a rule")
    yield from _claim_problems(jobset, refused)


def _claim_problems(jobset: Json, refused: Callable[[str, str], Refusal]) -> Iterator[Refusal]:
    for number, policy in enumerate(jobset["spec"].get("volumeClaimPolicies") or ()):
        for index, template in enumerate(policy.get("templates") or ()):
            where = f"spec.volumeClaimPolicies[{number}].template[{index}].name"
            claim = f"{template['metadata']['name']}-{jobset['metadata']['name']}"
            if len(claim) > MAX_NAME_LENGTH:
                yield refused(
                    where, f"makes {claim!r}, which may have {MAX_NAME_LENGTH} characters"
                )
            mounts = (
                mount["name"]
                for _, job in _jobs(jobset)
                for found in containers(job)
                for mount in found.get("volumeMounts") or ()
            )
            if template["metadata"]["name"] not in mounts:
                yield refused(where, "is mounted by no container")


def _jobs(jobset: Json) -> Iterator[tuple[str, Json]]:
    for index, job in enumerate(jobset["spec"]["replicatedJobs"]):
        yield f"spec.replicatedJobs[{index}]", job


def _values(value: Any, steps: list[str], where: str) -> Iterator[tuple[str, Any]]:
    """Each value at a path; ``name[]`` is each item, ``name{}`` each value of a map."""
    if not steps:
        yield where, value
        return
    step, *rest = steps
    key = step.rstrip("[]{}")
    part = value.get(key) if isinstance(value, dict) else None
    where = f"{where}.{key}" if where else key
    if part is None:
        return
    if step.endswith("[]"):
        for index, item in enumerate(part):
            yield from _values(item, rest, f"{where}[{index}]")
    elif step.endswith("{}"):
        for name, item in part.items():
            yield from _values(item, rest, f"{where}[{name}]")
    else:
        yield from _values(part, rest, where)


def _at_least(least: int) -> _Check:
    return lambda value: f"must be at least {least}" if value < least else None


def _has_at_most(most: int, what: str, least: int = 0) -> _Check:
    words = f"must have {least} to {most} {what}"
    return lambda value: None if least <= len(value) <= most else words


def _repeated(where: str, items: list[Json], key: str) -> Iterator[Refusal]:
    names = [item.get(key) for item in items]
    for index, name in enumerate(names):
        if name is None:
            yield Refusal(SCHEMA_OF_TRAIN_JOB, f"{where}[{index}].{key}", _MISSING)
        elif name in names[:index]:
            reason = f"must be the only item with the {key} {name!r}"
            yield Refusal(SCHEMA_OF_TRAIN_JOB, f"{where}[{index}]", reason)


def _name(name: str) -> str | None:
    if len(name) > MAX_NAME_LENGTH:
        return f"must have {MAX_NAME_LENGTH} characters at most"
    return None if _DNS_LABEL.fullmatch(name) else "must be a DNS label"


def _uri(uri: str) -> str | None:
    if len(uri) > _MAX_URI_LENGTH:
        return f"must have {_MAX_URI_LENGTH} characters at most"
    return None if uri == "" or _URI.fullmatch(uri) else "must be empty or scheme://..."


def _manager(manager: str) -> str | None:
    return None if manager in _MANAGERS else f"must be {' or '.join(_MANAGERS)}"


def _quantity(quantity: str) -> str | None:
    return None if PATTERN.fullmatch(str(quantity)) else "must be a quantity"


_PATCHES = "spec.runtimePatches"
_PATCHED_JOBS = f"{_PATCHES}[].trainingRuntimeSpec.template.spec.replicatedJobs"
_PATCHED_POD = f"{_PATCHED_JOBS}[].template.spec.template.spec"
_PATCHED_CONTAINERS = (f"{_PATCHED_POD}.containers", f"{_PATCHED_POD}.initContainers")
_VARIABLES = (
    *("spec.initializer.dataset.env", "spec.initializer.model.env", "spec.trainer.env"),
    *(f"{containers}[].env" for containers in _PATCHED_CONTAINERS),
)
_SCHEMA: tuple[tuple[str, _Check], ...] = (
    ("metadata.name", _name),
    ("spec.activeDeadlineSeconds", _at_least(1)),
    ("spec.initializer.dataset.storageUri", _uri),
    ("spec.initializer.model.storageUri", _uri),
    ("spec.managedBy", _manager),
    (_PATCHES, _has_at_most(16, "items")),
    (f"{_PATCHES}[].manager", _has_at_most(253, "characters", least=1)),
    (_PATCHED_JOBS, _has_at_most(100, "items")),
    *((containers, _has_at_most(64, "items")) for containers in _PATCHED_CONTAINERS),
    (f"{_PATCHED_POD}.terminationGracePeriodSeconds", _at_least(0)),
    ("spec.runtimeRef.name", _has_at_most(253, "characters", least=1)),
    ("spec.trainer.image", _has_at_most(500, "characters")),
    ("spec.trainer.args", _has_at_most(128, "items")),
    ("spec.trainer.command", _has_at_most(128, "items")),
    *((variables, _has_at_most(128, "items")) for variables in _VARIABLES),
    ("spec.trainer.numNodes", _at_least(0)),
    ("spec.trainer.numProcPerNode", _at_least(1)),
    ("spec.trainer.resourcesPerNode.limits{}", _quantity),
    ("spec.trainer.resourcesPerNode.requests{}", _quantity),
)
# Lists whose items have a key: x-kubernetes-list-map-keys.
_UNIQUE = (
    (_PATCHES, "manager"),
    (_PATCHED_JOBS, "name"),
    *((containers, "name") for containers in _PATCHED_CONTAINERS),
    *((f"{containers}[].volumeMounts", "name") for containers in _PATCHED_CONTAINERS),
    (f"{_PATCHED_POD}.imagePullSecrets", "name"),
    (f"{_PATCHED_POD}.schedulingGates", "name"),
    *((variables, "name") for variables in _VARIABLES),
)
