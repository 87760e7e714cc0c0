"""A TrainJob and its runtime -> the JobSet that Kubeflow Trainer 2.3 makes of them. Pure.

Restates ``pkg/runtime/core/trainingruntime.go`` and the plugins ``jobset``, ``torch``, ``jax`` and
``mpi`` of kubeflow/trainer, and what the webhooks there refuse, for what this project's runtimes
use. Plugins that schedule (gangs) change no process and are left out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from cache_protocol.errors import ConfigError
from cache_runtimes.local.patches import merged

Json = dict[str, Any]

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
TRAINER = "trainer"
NODE = "node"
DATASET = "dataset-initializer"
MODEL = "model-initializer"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET_LABEL = "jobset.sigs.k8s.io/"
TORCH_PORT = 29_500
JAX_PORT = 6_666
MAX_NAME_LENGTH = 63

_STORAGE_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.")
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_TORCH_RESERVED = {
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
}
_REQUIRED_CONTAINER = {TRAINER: NODE, DATASET: DATASET, MODEL: MODEL}


def render(train_job: Json, runtime: Json) -> Json:
    """The JobSet of a TrainJob.

    Raises:
        ConfigError: quoting everything that the webhooks of Trainer and JobSet would refuse, and
            what of a runtime cannot be rendered here.
    """
    spec = train_job["spec"]
    policy = runtime["spec"].get("mlPolicy") or {}
    jobset = copy.deepcopy(runtime["spec"]["template"])
    metadata = jobset.get("metadata") or {}
    _refuse([*_wrong_policy(policy, runtime)])
    _refuse([*_wrong_patches(spec.get("runtimePatches") or (), jobset["spec"]["replicatedJobs"])])
    for patch in spec.get("runtimePatches") or ():
        _apply_patch(patch, jobset["spec"]["replicatedJobs"], metadata)
    jobs = jobset["spec"]["replicatedJobs"]
    _refuse([*_wrong_runtime(jobs), *_wrong_job(spec, policy, jobs)])
    for job in jobs:
        _set_pod_count(job, _pod_count(job, spec, policy))
        _initialize(job, spec.get("initializer") or {})
        if _ancestor(job) == TRAINER:
            _train(job, spec.get("trainer"))
    if "torch" in policy:
        _torch(train_job, policy["torch"] or {}, jobs)
    if "jax" in policy:
        _jax(train_job, jobs)
    _refuse([*_too_long(train_job["metadata"]["name"], jobs)])
    if spec.get("suspend") is not None:
        jobset["spec"]["suspend"] = spec["suspend"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": train_job["metadata"]["name"],
            "namespace": train_job["metadata"].get("namespace", "default"),
            **{key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)},
        },
        "spec": jobset["spec"],
    }


def pod_spec(job: Json) -> Json:
    """The pod spec of a replicated job."""
    found: Json = job["template"]["spec"]["template"]["spec"]
    return found


def containers(job: Json) -> Iterator[Json]:
    """Init containers, then containers."""
    yield from pod_spec(job).get("initContainers") or ()
    yield from pod_spec(job)["containers"]


def _ancestor(job: Json) -> str | None:
    labels = (job["template"].get("metadata") or {}).get("labels") or {}
    found: str | None = labels.get(ANCESTOR)
    return found


def _container(job: Json, name: str) -> Json | None:
    return next((found for found in containers(job) if found["name"] == name), None)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("a cluster would refuse it: " + "; ".join(problems))


def _wrong_policy(policy: Json, runtime: Json) -> Iterator[str]:
    unknown = policy.keys() - {"numNodes", "torch", "jax"}
    if unknown:
        raise ConfigError(
            f"runtime {runtime['metadata']['name']}: run-local knows the policies torch, jax and "
            f"none, got {', '.join(sorted(unknown))}"
        )
    if "torch" in policy and "jax" in policy:
        yield "spec.mlPolicy has torch and jax: one of them"


def _wrong_patches(patches: Iterable[Json], jobs: list[Json]) -> Iterator[str]:
    """``pkg/runtime/framework/plugins/jobset/jobset.go``, Validate."""
    names = {job["name"]: {found["name"] for found in containers(job)} for job in jobs}
    for patch in patches:
        manager = patch.get("manager", "")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?\.[a-z]+/\S+", manager):
            yield f"runtimePatches.manager must be a path such as example.com/name, got {manager!r}"
        for job in _job_patches(patch):
            if job["name"] not in names:
                yield f"runtimePatches: no replicated job {job['name']!r}"
                continue
            for found in _patched_containers(job):
                if found["name"] not in names[job["name"]]:
                    yield f"runtimePatches: {job['name']} has no container {found['name']!r}"
                elif found.get("env") and found["name"] in _REQUIRED_CONTAINER.values():
                    yield (
                        f"runtimePatches: env of the container {found['name']} is set by the "
                        "TrainJob's trainer and initializer"
                    )


def _job_patches(patch: Json) -> list[Json]:
    template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
    return list((template.get("spec") or {}).get("replicatedJobs") or ())


def _patched_containers(job: Json) -> Iterator[Json]:
    spec = (((job.get("template") or {}).get("spec") or {}).get("template") or {}).get("spec") or {}
    yield from spec.get("initContainers") or ()
    yield from spec.get("containers") or ()


def _apply_patch(patch: Json, jobs: list[Json], metadata: Json) -> None:
    template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
    for key in ("labels", "annotations"):
        added = (template.get("metadata") or {}).get(key)
        if added:
            metadata[key] = {**(metadata.get(key) or {}), **added}
    for job_patch in _job_patches(patch):
        for job in jobs:
            if job["name"] == job_patch["name"]:
                job["template"] = merged(job["template"], job_patch.get("template") or {})


def _wrong_runtime(jobs: list[Json]) -> Iterator[str]:
    """``pkg/webhooks/trainingruntime_webhook.go`` and JobSet's ``jobset_webhook.go``."""
    earlier: set[str] = set()
    for job in jobs:
        ancestor = _ancestor(job)
        if ancestor in _REQUIRED_CONTAINER:
            if job.get("replicas", 1) != 1:
                yield f"{job['name']}: replicas must be 1, got {job['replicas']}"
            required = _REQUIRED_CONTAINER[ancestor]
            if required not in {found["name"] for found in pod_spec(job)["containers"]}:
                yield f"{job['name']}: no container {required!r}"
        for dependency in job.get("dependsOn") or ():
            if dependency["name"] not in earlier:
                yield f"{job['name']}: dependsOn {dependency['name']!r}, which is no earlier job"
        earlier.add(job["name"])


def _wrong_job(spec: Json, policy: Json, jobs: list[Json]) -> Iterator[str]:
    """``Validate`` of the plugins jobset and torch, and what the schema of a TrainJob says."""
    trainer = spec.get("trainer") or {}
    for path, value, least in (
        ("trainer.numNodes", trainer.get("numNodes"), 0),
        ("trainer.numProcPerNode", trainer.get("numProcPerNode"), 1),
        ("activeDeadlineSeconds", spec.get("activeDeadlineSeconds"), 1),
    ):
        if value is not None and value < least:
            yield f"spec.{path} must be at least {least}, got {value}"
    names = {job["name"]: job for job in jobs}
    for key, name in (("dataset", DATASET), ("model", MODEL)):
        if (spec.get("initializer") or {}).get(key) is None:
            continue
        job = names.get(name)
        found = _container(job, name) if job is not None else None
        if found is None:
            yield f"spec.initializer.{key}: the runtime has no job and container {name!r}"
        elif "initializer" not in {mount["name"] for mount in found.get("volumeMounts") or ()}:
            yield f"spec.initializer.{key}: container {name} has no volumeMount 'initializer'"
        uri = spec["initializer"][key].get("storageUri")
        if uri and not _STORAGE_URI.match(uri):
            yield f"spec.initializer.{key}.storageUri must be a URI, such as file:///data/table"
    if "torch" in policy:
        reserved = {item["name"] for item in trainer.get("env") or ()}
        for name in sorted(reserved & _TORCH_RESERVED):
            yield f"spec.trainer.env must not have {name}"


def _too_long(name: str, jobs: list[Json]) -> Iterator[str]:
    if not _JOB_NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        yield f"metadata.name must be an RFC 1035 label, got {name!r}"
    for job in jobs:
        last = job["template"]["spec"]["completions"] - 1
        longest = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}-{last}-abcde"
        if len(longest) > MAX_NAME_LENGTH:
            yield (
                f"metadata.name {name!r} is {len(longest) - MAX_NAME_LENGTH} characters too long: "
                f"its pods, such as {longest}, may have {MAX_NAME_LENGTH}"
            )


def _pod_count(job: Json, spec: Json, policy: Json) -> int:
    if _ancestor(job) != TRAINER:
        return max(1, int(job["template"]["spec"].get("parallelism") or 1))
    asked = (spec.get("trainer") or {}).get("numNodes")
    return int(asked if asked is not None else policy.get("numNodes") or 1)


def _set_pod_count(job: Json, count: int) -> None:
    job["template"]["spec"]["parallelism"] = job["template"]["spec"]["completions"] = count


def _initialize(job: Json, initializer: Json) -> None:
    """``builder.go``, Initializer: STORAGE_URI, then env, then the secret as envFrom."""
    for key, name in (("dataset", DATASET), ("model", MODEL)):
        wanted = initializer.get(key)
        if _ancestor(job) != name or wanted is None:
            continue
        job["replicas"] = 1
        for found in pod_spec(job)["containers"]:
            if found["name"] != name:
                continue
            if wanted.get("storageUri") is not None:
                _upsert_env(found, [{"name": "STORAGE_URI", "value": wanted["storageUri"]}])
            _upsert_env(found, wanted.get("env") or ())
            if wanted.get("secretRef") is not None:
                found.setdefault("envFrom", []).append({"secretRef": dict(wanted["secretRef"])})


def _train(job: Json, trainer: Json | None) -> None:
    """``builder.go``, Trainer."""
    job["replicas"] = 1
    for found in pod_spec(job)["containers"]:
        if found["name"] != NODE or trainer is None:
            continue
        for key in ("image", "command", "args"):
            if trainer.get(key) is not None:
                found[key] = copy.deepcopy(trainer[key])
        resources = trainer.get("resourcesPerNode") or {}
        if resources.get("limits") or resources.get("requests"):
            found["resources"] = copy.deepcopy(resources)
        _upsert_env(found, trainer.get("env") or ())


def _torch(train_job: Json, policy: Json, jobs: list[Json]) -> None:
    """``torch.go``, EnforceMLPolicy: PET_* for torchrun, where the TrainJob has a trainer."""
    trainer = train_job["spec"].get("trainer")
    for job in jobs:
        if _ancestor(job) != TRAINER or trainer is None:
            continue
        node = _container(job, NODE)
        if node is None:
            continue
        name = train_job["metadata"]["name"]
        env: list[Json] = [
            {"name": "PET_NNODES", "value": str(job["template"]["spec"]["parallelism"])},
            {"name": "PET_NPROC_PER_NODE", "value": _processes_per_node(trainer, node)},
            {"name": "PET_NODE_RANK", "valueFrom": _completion_index()},
            {"name": "PET_MASTER_ADDR", "value": f"{name}-{NODE}-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(TORCH_PORT)},
        ]
        _upsert_env(node, env)
        _add_port(node, TORCH_PORT)
    if trainer is None:
        return
    for target in (policy.get("envInjection") or {}).get("targets") or ():
        job = next(job for job in jobs if job["name"] == target["jobName"])
        source = _container(next(j for j in jobs if _ancestor(j) == TRAINER), NODE) or {}
        pet = [item for item in source.get("env") or () if item["name"] in _TORCH_RESERVED]
        for found in containers(job):
            if found["name"] in target["containerNames"]:
                _upsert_env(found, pet)


def _processes_per_node(trainer: Json, node: Json) -> str:
    if trainer.get("numProcPerNode") is not None:
        return str(trainer["numProcPerNode"])
    resources = node.get("resources") or {}
    for key in ("requests", "limits"):
        given = resources.get(key) or {}
        if any("gpu" in name.lower() for name in given):
            return "auto"
    for key in ("requests", "limits"):
        cpu = (resources.get(key) or {}).get("cpu")
        if cpu is not None:
            return str(max(1, -(-int(parse_quantity(str(cpu)) * 1000) // 1000)))
    return "1"


def _jax(train_job: Json, jobs: list[Json]) -> None:
    """``jax.go``, EnforceMLPolicy."""
    name = train_job["metadata"]["name"]
    for job in jobs:
        node = _container(job, NODE) if _ancestor(job) == TRAINER else None
        if node is None:
            continue
        address = f"{name}-{NODE}-0-0.{name}:{JAX_PORT}"
        env: list[Json] = [
            {"name": "JAX_NUM_PROCESSES", "value": str(job["template"]["spec"]["parallelism"])},
            {"name": "JAX_PROCESS_ID", "valueFrom": _completion_index()},
            {"name": "JAX_COORDINATOR_ADDRESS", "value": address},
            {"name": "JAX_COORDINATOR_PORT", "value": str(JAX_PORT)},
            {"name": "JAX_DISTRIBUTED_BACKEND", "value": "gloo"},
        ]
        _upsert_env(node, env)
        _add_port(node, JAX_PORT)


def _completion_index() -> Json:
    return {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}


def _upsert_env(container: Json, added: Iterable[Json]) -> None:
    env = container.setdefault("env", [])
    for item in added:
        for index, old in enumerate(env):
            if old["name"] == item["name"]:
                env[index] = copy.deepcopy(item)
                break
        else:
            env.append(copy.deepcopy(item))


def _add_port(container: Json, port: int) -> None:
    ports = container.setdefault("ports", [])
    if port not in {item["containerPort"] for item in ports}:
        ports.append({"containerPort": port})
