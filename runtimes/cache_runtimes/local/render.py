"""A TrainJob and its runtime -> the JobSet that Kubeflow Trainer 2.3 makes of them. Pure.

Restates ``pkg/runtime/core/trainingruntime.go`` and the plugins ``jobset``, ``torch`` and ``jax``
of kubeflow/trainer, as far as this project's runtimes use them, and what the webhooks refuse in a
TrainJob. Plugins that schedule (gangs) change no process and are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from cache_protocol.errors import ConfigError
from cache_runtimes.local.supported import ML_POLICY, check_supported

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

_INITIALIZERS = (("dataset", DATASET), ("model", MODEL))
_TORCH_VARIABLES = (
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
)
# patchMergeKey of each list in k8s.io/api/core/v1/types.go; a patch replaces other lists.
_MERGE_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes"), "name"),
    **{"imagePullSecrets": "name", "schedulingGates": "name", "volumeMounts": "mountPath"},
}
_COMPLETION_INDEX_FIELD = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}


def render(train_job: Json, runtime: Json) -> Json:
    """The JobSet of a TrainJob.

    Raises:
        UnsupportedFieldError: naming an mlPolicy that is neither ``torch`` nor ``jax``.
        ConfigError: quoting everything that the webhooks of Trainer and JobSet would refuse.
    """
    spec, name = train_job["spec"], train_job["metadata"]["name"]
    trainer = spec.get("trainer")
    policy = runtime["spec"].get("mlPolicy") or {}
    check_supported(policy, ML_POLICY, f"runtime {runtime['metadata']['name']}: spec.mlPolicy")
    jobset = copy.deepcopy(runtime["spec"]["template"])
    metadata, jobs = jobset.get("metadata") or {}, jobset["spec"]["replicatedJobs"]
    _refuse(_wrong_patches(spec.get("runtimePatches") or (), jobs))
    for patch in spec.get("runtimePatches") or ():
        _apply_patch(patch, jobs, metadata)
    _refuse(_wrong_job(spec, policy, jobs))
    for job in jobs:
        job_spec = job["template"]["spec"]
        job_spec["parallelism"] = job_spec["completions"] = _pod_count(job, trainer, policy)
        _initialize(job, spec.get("initializer") or {})
    _refuse(_too_long(name, jobs))
    for job in jobs:
        node = _container(job, NODE)
        if _ancestor(job) == TRAINER and node is not None:
            _train(node, trainer or {})
            if "torch" in policy and trainer is not None:
                _torch(name, trainer, job, node)
            if "jax" in policy:
                _jax(name, job, node)
            _inject(policy.get("torch") or {}, node, jobs)
    if spec.get("suspend") is not None:
        jobset["spec"]["suspend"] = spec["suspend"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
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


def _refuse(problems: Iterable[str]) -> None:
    found = "; ".join(problems)
    if found:
        raise ConfigError(f"a cluster would refuse it: {found}")


def _wrong_patches(patches: Iterable[Json], jobs: list[Json]) -> Iterator[str]:
    """``pkg/runtime/framework/plugins/jobset/jobset.go``, Validate."""
    names = {job["name"]: {found["name"] for found in containers(job)} for job in jobs}
    for patch in patches:
        for job in _job_patches(patch):
            if job["name"] not in names:
                yield f"runtimePatches: no replicated job {job['name']!r}"
                continue
            pod = _at(job, "template", "spec", "template", "spec")
            for found in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
                if found["name"] not in names[job["name"]]:
                    yield f"runtimePatches: {job['name']} has no container {found['name']!r}"
                elif found.get("env") and found["name"] in (NODE, DATASET, MODEL):
                    yield (
                        f"runtimePatches: env of the container {found['name']} is set by the "
                        "TrainJob's trainer and initializer"
                    )


def _at(value: Json, *steps: str) -> Json:
    """The object at ``steps`` below ``value``; empty if it is absent."""
    for step in steps:
        value = value.get(step) or {}
    return value


def _job_patches(patch: Json) -> list[Json]:
    return list(_at(patch, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs") or ())


def _apply_patch(patch: Json, jobs: list[Json], metadata: Json) -> None:
    _merge(metadata, _at(patch, "trainingRuntimeSpec", "template", "metadata"))
    _merge_list(jobs, _job_patches(patch), "name")


def _merge(base: Json, patch: Json) -> None:
    """Merges a patch into an object, as ``k8s.io/apimachinery/pkg/util/strategicpatch`` does."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        elif key in _MERGE_KEYS and base.get(key) and value is not None:
            _merge_list(base[key], value, _MERGE_KEYS[key])
        else:
            base[key] = copy.deepcopy(value)


def _merge_list(base: list[Json], patch: Iterable[Json], merge_key: str) -> None:
    known = {item[merge_key]: item for item in base}
    for item in patch:
        if item[merge_key] in known:
            _merge(known[item[merge_key]], item)
        else:
            base.append(copy.deepcopy(item))


def _wrong_job(spec: Json, policy: Json, jobs: list[Json]) -> Iterator[str]:
    """``Validate`` of the plugins jobset and torch."""
    trainer, initializer = spec.get("trainer") or {}, spec.get("initializer") or {}
    if (trainer.get("numNodes") or 0) < 0:
        yield f"spec.trainer.numNodes must be at least 0, got {trainer['numNodes']}"
    for key, name in _INITIALIZERS:
        if initializer.get(key) is None:
            continue
        job = next((job for job in jobs if job["name"] == name), None)
        found = _container(job, name) if job is not None else None
        if found is None:
            yield f"spec.initializer.{key}: the runtime has no job and container {name!r}"
        elif "initializer" not in {mount["name"] for mount in found.get("volumeMounts") or ()}:
            yield f"spec.initializer.{key}: container {name} has no volumeMount 'initializer'"
    if "torch" in policy:
        reserved = {item["name"] for item in trainer.get("env") or ()} & {*_TORCH_VARIABLES}
        yield from (f"spec.trainer.env must not have {name}" for name in sorted(reserved))


def _too_long(name: str, jobs: list[Json]) -> Iterator[str]:
    """``jobset_webhook.go`` of JobSet."""
    for job in jobs:
        last = job["template"]["spec"]["completions"] - 1
        longest = f"{name}-{job['name']}-0-{last}-abcde"
        if len(longest) > MAX_NAME_LENGTH:
            yield (
                f"metadata.name {name!r} is {len(longest) - MAX_NAME_LENGTH} characters too long: "
                f"its pods, such as {longest}, may have {MAX_NAME_LENGTH}"
            )


def _pod_count(job: Json, trainer: Json | None, policy: Json) -> int:
    if _ancestor(job) != TRAINER:
        return max(1, int(job["template"]["spec"].get("parallelism") or 1))
    asked = (trainer or {}).get("numNodes")
    return int(asked if asked is not None else policy.get("numNodes") or 1)


def _initialize(job: Json, initializer: Json) -> None:
    """``builder.go``, Initializer: STORAGE_URI, then env, then the secret as envFrom."""
    for key, name in _INITIALIZERS:
        wanted, found = initializer.get(key), _container(job, name)
        if _ancestor(job) != name or wanted is None or found is None:
            continue
        if wanted.get("storageUri") is not None:
            _set_env(found, [{"name": "STORAGE_URI", "value": wanted["storageUri"]}])
        _set_env(found, wanted.get("env") or ())
        if wanted.get("secretRef") is not None:
            found.setdefault("envFrom", []).append({"secretRef": dict(wanted["secretRef"])})


def _train(node: Json, trainer: Json) -> None:
    """``builder.go``, Trainer."""
    for key in ("image", "command", "args"):
        if trainer.get(key) is not None:
            node[key] = copy.deepcopy(trainer[key])
    resources = trainer.get("resourcesPerNode") or {}
    if resources.get("limits") or resources.get("requests"):
        node["resources"] = copy.deepcopy(resources)
    _set_env(node, trainer.get("env") or ())


def _torch(name: str, trainer: Json, job: Json, node: Json) -> None:
    """``torch.go``, EnforceMLPolicy: PET_* for torchrun."""
    values: tuple[str | Json, ...] = (
        str(job["template"]["spec"]["parallelism"]),
        _processes_per_node(trainer, node),
        _COMPLETION_INDEX_FIELD,
        f"{name}-{NODE}-0-0.{name}",
        str(TORCH_PORT),
    )
    _set_env(node, map(_variable, _TORCH_VARIABLES, values))
    _add_port(node, TORCH_PORT)


def _inject(policy: Json, node: Json, jobs: list[Json]) -> None:
    """``torch.go``: the same variables in other containers."""
    variables = [item for item in node.get("env") or () if item["name"] in _TORCH_VARIABLES]
    for target in (policy.get("envInjection") or {}).get("targets") or ():
        for job in jobs:
            for found in containers(job):
                if job["name"] == target["jobName"] and found["name"] in target["containerNames"]:
                    _set_env(found, variables)


def _processes_per_node(trainer: Json, node: Json) -> str:
    if trainer.get("numProcPerNode") is not None:
        return str(trainer["numProcPerNode"])
    resources = node.get("resources") or {}
    given = [resources.get(key) or {} for key in ("requests", "limits")]
    if any("gpu" in name.lower() for names in given for name in names):
        return "auto"
    cpus = [names["cpu"] for names in given if names.get("cpu") is not None]
    return str(max(1, -(-int(parse_quantity(str(cpus[0])) * 1000) // 1000))) if cpus else "1"


def _jax(name: str, job: Json, node: Json) -> None:
    """``jax.go``, EnforceMLPolicy."""
    values: dict[str, str | Json] = {
        "JAX_NUM_PROCESSES": str(job["template"]["spec"]["parallelism"]),
        "JAX_PROCESS_ID": _COMPLETION_INDEX_FIELD,
        "JAX_COORDINATOR_ADDRESS": f"{name}-{NODE}-0-0.{name}:{JAX_PORT}",
        "JAX_COORDINATOR_PORT": str(JAX_PORT),
        "JAX_DISTRIBUTED_BACKEND": "gloo",
    }
    _set_env(node, map(_variable, values, values.values()))
    _add_port(node, JAX_PORT)


def _variable(name: str, value: str | Json) -> Json:
    return {"name": name, "value" if isinstance(value, str) else "valueFrom": value}


def _set_env(container: Json, added: Iterable[Json]) -> None:
    env = container.setdefault("env", [])
    positions = {item["name"]: index for index, item in enumerate(env)}
    for item in added:
        if item["name"] in positions:
            env[positions[item["name"]]] = copy.deepcopy(item)
        else:
            env.append(copy.deepcopy(item))


def _add_port(container: Json, port: int) -> None:
    ports = container.setdefault("ports", [])
    if port not in {item["containerPort"] for item in ports}:
        ports.append({"containerPort": port})
