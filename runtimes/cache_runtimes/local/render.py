"""A TrainJob and its runtime -> the objects that Kubeflow Trainer 2.3 makes of them. Pure.

Restates ``pkg/runtime/core/trainingruntime.go`` of kubeflow/trainer; `trainer` has its plugins.
The objects do not have what only a cluster adds: ``ownerReferences``, the SSH key of MPI, and the
defaults of the API server.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from cache_runtimes.local.supported import ML_POLICY, check_supported
from cache_runtimes.local.trainer import gangs, jax, jobset, mpi, plainml, torch, xgboost
from cache_runtimes.local.trainer.admission import is_readable, job_set_problems, train_job_problems
from cache_runtimes.local.trainer.info import TRAINER, Info, ancestor
from cache_runtimes.local.trainer.patches import apply_runtime_patch
from cache_runtimes.local.trainer.refusals import Refusal, RefusedError

Json = dict[str, Any]

_PLUGINS = {"torch": torch, "mpi": mpi, "jax": jax, "xgboost": xgboost}


def render(train_job: Json, runtime: Json) -> Json:
    """The JobSet of a TrainJob.

    Raises:
        RefusedError: with everything that the API server and the webhooks would refuse.
        UnsupportedFieldError: naming an mlPolicy that is not rendered.
    """
    return next(made for made in render_objects(train_job, runtime) if made["kind"] == "JobSet")


def render_objects(train_job: Json, runtime: Json) -> list[Json]:
    """Every object that Trainer makes of a TrainJob, sorted by kind.

    Raises:
        RefusedError: with everything that the API server and the webhooks would refuse.
        UnsupportedFieldError: naming an mlPolicy that is not rendered.
    """
    where = f"runtime {runtime['metadata']['name']}: spec.mlPolicy"
    check_supported(runtime["spec"].get("mlPolicy") or {}, ML_POLICY, where)
    refused = list(train_job_problems(train_job))
    if not is_readable(refused):
        raise RefusedError(refused)
    info = _info(train_job, runtime)
    by_webhook = list(_webhook_problems(info))
    refused += by_webhook
    if by_webhook:
        raise RefusedError(refused)
    _enforce(info)
    made = [jobset.build(info), *gangs.build(info)]
    if "mpi" in (info.policy or {}):
        made += mpi.build(info)
    refused += job_set_problems(made[0])
    if refused:
        raise RefusedError(refused)
    return sorted(made, key=lambda each: str(each["kind"]))


def _info(train_job: Json, runtime: Json) -> Info:
    """``TrainingRuntime.newRuntimeInfo``."""
    spec = copy.deepcopy(train_job["spec"])
    template = copy.deepcopy(runtime["spec"]["template"])
    for patch in spec.get("runtimePatches") or ():
        apply_runtime_patch(template, patch)
    info = Info(
        name=train_job["metadata"]["name"],
        namespace=train_job["metadata"].get("namespace", "default"),
        spec=spec,
        policy=runtime["spec"].get("mlPolicy"),
        gang=runtime["spec"].get("podGroupPolicy") or {},
        metadata=template.get("metadata") or {},
        jobset=template["spec"],
    )
    for job in info.jobs:
        # A patch may add a job without a template.
        template = job.setdefault("template", {})
        template.setdefault("spec", {}).setdefault("template", {}).setdefault("spec", {})
    info.counts = [_pod_count(job, info.policy) for job in info.jobs]
    return info


def _pod_count(job: Json, policy: Json | None) -> int:
    if ancestor(job) == TRAINER and policy is not None:
        count = policy.get("numNodes")
    else:
        count = job["template"]["spec"].get("parallelism")
    return max(1, 1 if count is None else int(count))


def _webhook_problems(info: Info) -> Iterator[Refusal]:
    """``Validate`` of each plugin."""
    for name, plugin in (("torch", torch), ("mpi", mpi), ("xgboost", xgboost)):
        if name in (info.policy or {}):
            yield from plugin.problems(info)
    yield from jobset.problems(info)


def _enforce(info: Info) -> None:
    """``EnforceMLPolicy`` of the plugin of the framework, then ``EnforcePodGroupPolicy``."""
    plugins = [_PLUGINS[name] for name in _PLUGINS if name in (info.policy or {})]
    for plugin in plugins or [plainml]:
        plugin.enforce(info)
    gangs.enforce(info)
