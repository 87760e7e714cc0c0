"""Lets the dataset that the trials of an `OptimizationJob` share go with their study.

    name = optimizer.optimize(TrainJobTemplate(
        runtime="torch-distributed-shared-data-cache", initializer=..., trainer=...), ...)
    dataset_goes_with(optimizer, name)

Trials load the dataset, and none of them may drop it: others read it. So a Job that the study owns
holds it. The Job loads and pins the dataset, and drops it at SIGTERM, which its pod gets when the
study is deleted: ``optimizer.delete_job(name)``.
"""

from __future__ import annotations

import copy
from typing import Any

from cache_protocol.datasets.job_settings import spec_from_env
from cache_protocol.errors import ConfigError
from cache_runtimes.local.trainer.info import containers
from cache_runtimes.sdk import runtime_of

Json = dict[str, Any]

_EXPERIMENTS = ("kubeflow.org", "v1beta1")
# The shell waits beside `sleep`, so that a signal reaches it at once.
_HOLD = """
trap 'cachectl drop "$CACHE_DATASET"; exit 0' TERM INT
cachectl load --from-env && cachectl keep "$CACHE_DATASET" --pinned || exit $?
sleep infinity & wait
"""


def dataset_goes_with(optimizer: Any, name: str) -> str:
    """Makes the dataset of a study go when the study is deleted.

    Args:
        optimizer: an `OptimizerClient` of Kubernetes.
        name: of the study, from ``optimizer.optimize``.

    Returns:
        The name of the Job that holds the dataset, in the namespace of the study.

    Raises:
        ConfigError: its trials do not load into a shared cache.
    """
    backend = optimizer.backend
    api, namespace = backend.custom_api, backend.namespace
    study = api.get_namespaced_custom_object(*_EXPERIMENTS, namespace, "experiments", name)
    made = holder(study, runtime_of(backend, _trial(study)["runtimeRef"]["name"]))
    api.create_namespaced_custom_object("batch", "v1", namespace, "jobs", made)
    return str(made["metadata"]["name"])


def holder(study: Json, runtime: Json) -> Json:
    """The Job that holds the dataset of a study. Pure.

    Args:
        study: an Experiment of Katib whose trials are TrainJobs, as the API server has it.
        runtime: of these TrainJobs.

    Raises:
        ConfigError: the runtime has no shared cache, or the trials have no dataset.
    """
    dataset = (_trial(study).get("initializer") or {}).get("dataset") or {}
    loads = [
        each
        for each in _jobs(runtime)
        if any(one.get("command") == ["cachectl"] for one in containers(each))
    ]
    if not loads or not dataset.get("storageUri"):
        raise ConfigError(
            f"study {study['metadata']['name']!r} has no dataset in a shared cache: its trials "
            "need the runtime torch-distributed-shared-data-cache and a dataset initializer"
        )
    template = copy.deepcopy(loads[0]["template"]["spec"]["template"])
    template["spec"]["restartPolicy"] = "OnFailure"
    (container,) = template["spec"]["containers"]
    given = [{"name": "STORAGE_URI", "value": dataset["storageUri"]}, *(dataset.get("env") or ())]
    plain = {each["name"]: each["value"] for each in given if "value" in each}
    (endpoint,) = (each for each in container["args"] if each.startswith("--endpoint="))
    ours = {
        "CACHE_DATASET": spec_from_env(plain).name,
        "CACHE_ENDPOINT": endpoint.partition("=")[2],
    }
    own = [{"name": name, "value": value} for name, value in ours.items()]
    others = [each for each in given if each["name"] not in ours]
    container |= {"command": ["sh", "-c"], "args": [_HOLD]}
    container["env"] = [*container["env"], *others, *own]
    if "secretRef" in dataset:
        container["envFrom"] = [{"secretRef": dataset["secretRef"]}]
    owner = {key: study[key] for key in ("apiVersion", "kind")}
    owner |= {key: study["metadata"][key] for key in ("name", "uid")}
    name = f"{study['metadata']['name']}-dataset"
    metadata = {"name": name, "ownerReferences": [owner]}
    spec = {"backoffLimit": 6, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _trial(study: Json) -> Json:
    spec: Json = study["spec"]["trialTemplate"]["trialSpec"]["spec"]
    return spec


def _jobs(runtime: Json) -> list[Json]:
    jobs: list[Json] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return jobs
