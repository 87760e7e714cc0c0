"""Small TrainJobs and runtimes, whose containers are shell scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
API = "trainer.kubeflow.org/v1alpha1"


def container(name: str, script: str, **fields: Any) -> Json:
    return {
        "name": name,
        "image": "none",
        "command": ["bash", "-c"],
        "args": [script],
        **fields,
    }


def replicated_job(
    name: str,
    *containers: Json,
    ancestor: str | None = None,
    parallelism: int = 1,
    depends_on: str | None = None,
    job: Json | None = None,
    **pod: Any,
) -> Json:
    """One replicated job; ``job`` is merged into the Job's spec, other fields into the pod's."""
    template: Json = {
        "spec": {
            "parallelism": parallelism,
            "completions": parallelism,
            "completionMode": "Indexed",
            **(job or {}),
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 5,
                    "containers": list(containers),
                    **pod,
                }
            },
        }
    }
    if ancestor is not None:
        template["metadata"] = {"labels": {ANCESTOR: ancestor}}
    made: Json = {"name": name, "template": template}
    if depends_on is not None:
        of, _, status = depends_on.partition(":")
        made["dependsOn"] = [{"name": of, "status": status}]
    return made


def runtime(*jobs: Json, ml_policy: Json | None = None, **jobset: Any) -> Json:
    return {
        "apiVersion": API,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "scripts", "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": ml_policy if ml_policy is not None else {"numNodes": 1, "torch": {}},
            "template": {"spec": {"replicatedJobs": list(jobs), **jobset}},
        },
    }


def train_job(name: str = "job", **spec: Any) -> Json:
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"name": "scripts"}, **spec},
    }


def write(path: Path, *documents: Json) -> Path:
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return path


def env(**values: str) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]
