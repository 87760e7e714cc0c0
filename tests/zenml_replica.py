"""What a pod of ZenML's Kubeflow Trainer step operator does, without ZenML.

Restated from zenml-io/zenml, branch develop, ``src/zenml/integrations/kubeflow/step_operators/``:
`mapped` is normalize_kubeflow_trainer_distributed_env of ``distributed_utils.py``, `train_job` is
build_trainjob_manifest of ``trainjob_manifest_utils.py``. No release has them yet.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]


def mapped(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch that ZenML adds; those that are there already stay as they are."""
    nodes, processes = _positive(environ, "PET_NNODES"), _positive(environ, "PET_NPROC_PER_NODE")
    port = _positive(environ, "PET_MASTER_PORT")
    found = {
        "MASTER_ADDR": environ.get("PET_MASTER_ADDR") or None,
        "MASTER_PORT": None if port is None else str(port),
        "RANK": _integer(environ, "PET_NODE_RANK"),
        "WORLD_SIZE": None if nodes is None or processes is None else nodes * processes,
        "LOCAL_RANK": None if processes is None else 0,
    }
    return {
        name: str(value)
        for name, value in found.items()
        if value is not None and name not in environ
    }


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ.get(name, ""))
    except ValueError:
        return None


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    value = _integer(environ, name)
    return value if value is not None and value > 0 else None


# Every field of ``KubeflowTrainerStepOperatorSettings``, in the order of ZenML's page, with its
# default.
SETTINGS: Json = {
    "runtime_ref_name": None,  # must be given
    "runtime_ref_kind": "ClusterTrainingRuntime",
    "runtime_ref_api_group": "trainer.kubeflow.org",
    "num_nodes": 1,
    "num_proc_per_node": None,
    "trainer_overrides": {},
    "trainer_env": {},
    "pod_template_overrides": [],
    "poll_interval_seconds": 5.0,
    "timeout_seconds": None,
    "delete_trainjob_after_completion": False,
    "kubernetes_namespace": "default",
    "incluster": False,
    "kubernetes_context": None,
    "image": None,
}


def train_job(
    name: str,
    settings: Json,
    entrypoint: Sequence[str],
    *,
    environment: Mapping[str, str],
    resources: Json | None = None,
) -> Json:
    """The TrainJob of a step.

    Args:
        settings: of the step, by the names of `SETTINGS`.
        entrypoint: of which the first three are the command.
        environment: ZenML's own.
        resources: quantities of ``ResourceSettings`` as Kubernetes writes them.
    """
    of = {**SETTINGS, **settings}
    variables = {**environment, **of["trainer_env"]}
    trainer: Json = {
        "numNodes": of["num_nodes"],
        "image": of["image"] or "registry.example.com/zenml:lineitem-train",
        "command": [*entrypoint[:3]],
        "args": [*entrypoint[3:]],
        "env": [{"name": key, "value": value} for key, value in sorted(variables.items())],
    }
    if of["num_proc_per_node"] is not None:
        trainer["numProcPerNode"] = of["num_proc_per_node"]
    if resources:
        trainer["resourcesPerNode"] = {"requests": {**resources}, "limits": {**resources}}
    trainer = _merged(trainer, of["trainer_overrides"])
    processes = trainer.get("numProcPerNode")
    if isinstance(processes, int) and processes > 1:
        # One process a pod: there is no torchrun.
        trainer |= {"numNodes": trainer["numNodes"] * processes, "numProcPerNode": 1}
    spec: Json = {
        "runtimeRef": {
            "name": of["runtime_ref_name"],
            "kind": of["runtime_ref_kind"],
            "apiGroup": of["runtime_ref_api_group"],
        },
        "trainer": trainer,
    }
    if of["pod_template_overrides"]:
        spec["podTemplateOverrides"] = copy.deepcopy(of["pod_template_overrides"])
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "labels": {"pipeline": "lineitem", "step_name": "train"},
            "annotations": {"zenml.step_name": "train"},
        },
        "spec": spec,
    }


def _merged(base: Json, override: Json) -> Json:
    """``deep_merge_dicts``: lists are replaced."""
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def main() -> None:
    """As ``kubeflow_trainer_step_operator_entrypoint_configuration.py``: map, then run the step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step_file", required=True)
    arguments = parser.parse_args()
    os.environ.update(mapped(os.environ))
    spec = importlib.util.spec_from_file_location("step", arguments.step_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # ZenML's decorator keeps the function as `entrypoint`.
    loss = getattr(module.train, "entrypoint", module.train)()
    if os.environ["RANK"] == "0":  # only the first one publishes what the step returns
        print(f"artifact {loss}", flush=True)


if __name__ == "__main__":
    main()
