"""The JobSet of a TrainJob, and the Jobs that JobSet makes of it. Pure.

``pkg/runtime/framework/plugins/jobset/{jobset,builder}.go`` of kubeflow/trainer;
``pkg/webhooks/jobset_webhook.go`` (defaults) and ``pkg/controllers/jobset_controller.go`` (Jobs) of
kubernetes-sigs/jobset.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator
from typing import Any

from cache_runtimes.local.trainer import mpi
from cache_runtimes.local.trainer.info import (
    NODE,
    TRAINER,
    Info,
    Json,
    ancestor,
    containers,
    given_variables,
    main_container,
    pod_spec,
    set_env,
    set_ports,
)
from cache_runtimes.local.trainer.patches import is_left_out, merge_resources
from cache_runtimes.local.trainer.quantities import canonical
from cache_runtimes.local.trainer.refusals import Refusal, by_trainer

DATASET = "dataset-initializer"
MODEL = "model-initializer"
_INITIALIZERS = (("dataset", DATASET), ("model", MODEL))
_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN_PATH = re.compile(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*/[A-Za-z0-9/\-._~%!$&'()*+,;=:]+")
JOBSET_LABEL = "jobset.sigs.k8s.io/"


def problems(info: Info) -> Iterator[Refusal]:
    """``JobSet.Validate``, after the patches are merged."""
    names = {job["name"]: {found["name"] for found in containers(job)} for job in info.jobs}
    for key, name in _INITIALIZERS:
        if (info.spec.get("initializer") or {}).get(key) is None:
            continue
        if name not in names.get(name, ()):
            yield by_trainer(
                "spec.runtimeRef",
                f"the runtime has no job and container {name!r} for spec.initializer.{key}",
            )
        elif not _mounts_initializer(info, name):
            yield by_trainer(
                "spec.runtimeRef",
                f"container {name} has no volumeMount 'initializer' for spec.initializer.{key}",
            )
    for patch in info.spec.get("runtimePatches") or ():
        if not _DOMAIN_PATH.fullmatch(patch["manager"]):
            yield by_trainer(
                "spec.runtimePatches.manager", f"{patch['manager']!r} is no path with a domain"
            )
        if any(found.get("env") for found in _patched_containers(patch)):
            yield by_trainer(
                "spec.runtimePatches",
                f"env of the containers {NODE}, {DATASET} and {MODEL} is set by spec.trainer and "
                "spec.initializer",
            )


def build(info: Info) -> Json:
    """``JobSet.Build``."""
    for job, count in zip(info.jobs, info.counts, strict=True):
        job["template"]["spec"] |= {"parallelism": count, "completions": count}
        for container in pod_spec(job).get("containers") or ():
            set_ports(container, list(container.get("ports") or ()))
    _set_initializers(info)
    _set_trainer(info)
    for job in info.jobs:
        template = job["template"]["spec"]["template"]
        for key, values in (("labels", info.pod_labels), ("annotations", info.pod_annotations)):
            if values:
                template.setdefault("metadata", {}).setdefault(key, {}).update(values)
    if info.spec.get("suspend") is not None:
        info.jobset["suspend"] = info.spec["suspend"]
    metadata = {
        key: info.metadata[key] for key in ("labels", "annotations") if info.metadata.get(key)
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": info.name, "namespace": info.namespace, **metadata},
        "spec": as_go_writes(info.jobset),
    }


def jobs_of(jobset: Json) -> list[Json]:
    """The Jobs that JobSet makes of a new JobSet, in the order of its replicated jobs."""
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    replicated = [
        (job, index)
        for job in jobset["spec"]["replicatedJobs"]
        for index in range(job.get("replicas", 1))
    ]
    groups = [job.get("groupName", "default") for job, _ in replicated]
    made: list[Json] = []
    for number, (job, index) in enumerate(replicated):
        job_name = f"{name}-{job['name']}-{index}"
        key = hashlib.sha1(f"{namespace}/{job_name}".encode(), usedforsecurity=False)
        labels = {
            "jobset-name": name,
            "jobset-uid": jobset["metadata"].get("uid", ""),
            "replicatedjob-name": job["name"],
            "replicatedjob-replicas": str(job.get("replicas", 1)),
            "job-index": str(index),
            "job-key": key.hexdigest(),
            "job-global-index": str(number),
            "global-replicas": str(len(replicated)),
            "group-name": groups[number],
            "group-replicas": str(groups.count(groups[number])),
            "job-group-index": str(groups[:number].count(groups[number])),
            "restart-attempt": "0",
        }
        made.append(_job(jobset, job, job_name, {JOBSET_LABEL + k: v for k, v in labels.items()}))
    return made


def _job(jobset: Json, job: Json, name: str, labels: dict[str, str]) -> Json:
    made: Json = copy.deepcopy(job["template"])
    spec = made["spec"]
    pod = spec["template"]["spec"]
    for owner in (made, spec["template"]):
        metadata = owner.setdefault("metadata", {})
        for key in ("labels", "annotations"):
            metadata[key] = {**(metadata.get(key) or {}), **labels}
    made["metadata"] |= {"name": name, "namespace": jobset["metadata"]["namespace"]}
    spec.setdefault("completionMode", "Indexed")
    spec["suspend"] = bool(jobset["spec"].get("suspend"))
    pod.setdefault("restartPolicy", "OnFailure")
    network = jobset["spec"].get("network") or {}
    if network.get("enableDNSHostnames", True):
        pod["subdomain"] = network.get("subdomain") or jobset["metadata"]["name"]
    mounted = {m["name"] for found in containers(job) for m in found.get("volumeMounts") or ()}
    for policy in jobset["spec"].get("volumeClaimPolicies") or ():
        for template in policy.get("templates") or ():
            claim = template["metadata"]["name"]
            if claim in mounted:
                source = {"claimName": f"{claim}-{jobset['metadata']['name']}"}
                pod.setdefault("volumes", []).append(
                    {"name": claim, "persistentVolumeClaim": source}
                )
    return {"metadata": made["metadata"], "spec": spec}


def as_go_writes(value: Any, *, key: str = "") -> Any:
    """An object as Go writes it: canonical quantities, no empty lists and no empty maps."""
    if isinstance(value, dict):
        if key in ("limits", "requests", "overhead"):
            return {name: canonical(quantity) for name, quantity in value.items()}
        parts = {name: as_go_writes(part, key=name) for name, part in value.items()}
        return {name: part for name, part in parts.items() if not is_left_out(name, part)}
    if isinstance(value, list):
        return [as_go_writes(part) for part in value]
    return canonical(value) if key in ("sizeLimit", "divisor") else value


def _set_initializers(info: Info) -> None:
    """``Builder.Initializer``: STORAGE_URI, then env, then the secret as envFrom."""
    for job in info.jobs:
        for key, name in _INITIALIZERS:
            if ancestor(job) != name:
                continue
            job["replicas"] = 1
            wanted = (info.spec.get("initializer") or {}).get(key)
            found = main_container(job, name)
            if wanted is None or found is None:
                continue
            if wanted.get("storageUri") is not None:
                set_env(found, [{"name": "STORAGE_URI", "value": wanted["storageUri"]}])
            set_env(found, given_variables(wanted.get("env") or ()))
            if wanted.get("secretRef") is not None:
                found.setdefault("envFrom", []).append({"secretRef": dict(wanted["secretRef"])})


def _set_trainer(info: Info) -> None:
    """``Builder.Trainer``. The nodes of MPI get resources and variables of the TrainJob too."""
    for job in info.jobs:
        is_trainer = ancestor(job) == TRAINER
        if is_trainer:
            job["replicas"] = 1
        node = main_container(job, NODE)
        is_node = job["name"] == NODE and mpi.runs_launcher_as_node(info)
        if info.trainer is None or node is None or not (is_trainer or is_node):
            continue
        if is_trainer:
            for key in ("image", "command", "args"):
                if info.trainer.get(key) == []:
                    node.pop(key, None)
                elif info.trainer.get(key) is not None:
                    node[key] = copy.deepcopy(info.trainer[key])
        given = info.trainer.get("resourcesPerNode") or {}
        if info.policy is not None and (given.get("limits") or given.get("requests")):
            node["resources"] = merge_resources(node.get("resources") or {}, given)
        set_env(node, given_variables(info.trainer.get("env") or ()))


def _mounts_initializer(info: Info, name: str) -> bool:
    index = info.job_index(name)
    found = [c for c in containers(info.jobs[index or 0]) if c["name"] == name]
    return any(m["name"] == "initializer" for c in found for m in c.get("volumeMounts") or ())


def _patched_containers(patch: Json) -> Iterator[Json]:
    """The containers of a patch that belong to the trainer and the initializers."""
    for job in _at(patch, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs") or ():
        pod = _at(job, "template", "spec", "template", "spec")
        for found in pod.get("containers") or ():
            if found["name"] in (NODE, DATASET, MODEL):
                yield found


def _at(value: Json, *steps: str) -> Json:
    """The object at ``steps`` below ``value``; empty if it is absent."""
    for step in steps:
        value = value.get(step) or {}
    return value
