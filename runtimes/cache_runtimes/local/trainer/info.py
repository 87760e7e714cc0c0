"""What Trainer's plugins share while they build the objects of a TrainJob. Pure.

``pkg/runtime/runtime.go`` (Info, PodSet) and ``pkg/apply/apply.go`` of kubeflow/trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cache_runtimes.local.trainer.quantities import rounded_up

Json = dict[str, Any]

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
TRAINER = "trainer"
NODE = "node"
LAUNCHER = "launcher"
TRAINER_PORT = 29_500
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
COMPLETION_INDEX_FIELD: Json = {
    "fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}
}


@dataclass
class Info:
    """A TrainJob with the template of its runtime.

    Attributes:
        spec: of the TrainJob.
        policy: the runtime's mlPolicy; None where it has none.
        gang: the runtime's podGroupPolicy.
        metadata: labels and annotations of the JobSet.
        jobset: the spec of the JobSet; the plugins change it.
        counts: the number of pods of each replicated job.
        pod_labels, pod_annotations: of every pod.
    """

    name: str
    namespace: str
    spec: Json
    policy: Json | None
    gang: Json
    metadata: Json
    jobset: Json
    counts: list[int] = field(default_factory=list)
    pod_labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)

    @property
    def jobs(self) -> list[Json]:
        """The replicated jobs."""
        found: list[Json] = self.jobset["replicatedJobs"]
        return found

    @property
    def trainer(self) -> Json | None:
        """``spec.trainer`` of the TrainJob."""
        return self.spec.get("trainer")

    @property
    def runtime_name(self) -> str:
        """The name in ``spec.runtimeRef``."""
        found: str = self.spec["runtimeRef"]["name"]
        return found

    @property
    def first_host(self) -> str:
        """The DNS name of the first pod of the job ``node``."""
        return f"{self.name}-{NODE}-0-0.{self.name}"

    def trainer_index(self) -> int | None:
        """The first replicated job of the trainer step."""
        return next((i for i, job in enumerate(self.jobs) if ancestor(job) == TRAINER), None)

    def job_index(self, name: str) -> int | None:
        """The replicated job called ``name``."""
        return next((i for i, job in enumerate(self.jobs) if job["name"] == name), None)

    def trainer_node(self) -> Json | None:
        """The container ``node`` of the trainer step."""
        index = self.trainer_index()
        return None if index is None else main_container(self.jobs[index], NODE)

    def trainer_count(self) -> int:
        """The number of pods of the trainer step."""
        index = self.trainer_index()
        return 1 if index is None else self.counts[index]

    def set_trainer_count(self) -> None:
        """Gives the trainer step as many pods as the TrainJob's numNodes says."""
        index, wanted = self.trainer_index(), (self.trainer or {}).get("numNodes")
        if index is not None and wanted is not None:
            self.counts[index] = wanted

    def runtime_resources(self) -> Json:
        """The runtime's resources of ``node``: ``ExtractResourcePerNodeFromRuntime``."""
        for job in self.jobs:
            node = main_container(job, NODE)
            if (job["name"] == NODE or ancestor(job) == TRAINER) and node is not None:
                return dict(node.get("resources") or {})
        return {}

    def counted_resources(self) -> Json:
        """The resources that say how many processes a node has.

        They are those of the TrainJob, else those of the runtime. Trainer merges the two only in
        the pod.
        """
        given = (self.trainer or {}).get("resourcesPerNode")
        return self.runtime_resources() if given is None else dict(given)


def pod_spec(job: Json) -> Json:
    """The pod spec of a replicated job."""
    found: Json = job["template"]["spec"]["template"]["spec"]
    return found


def containers(job: Json) -> Iterator[Json]:
    """Init containers, then containers."""
    yield from pod_spec(job).get("initContainers") or ()
    yield from pod_spec(job).get("containers") or ()


def main_container(job: Json, name: str) -> Json | None:
    """A container by its name; never an init container."""
    return next((c for c in pod_spec(job).get("containers") or () if c["name"] == name), None)


def ancestor(job: Json) -> str | None:
    """The step of the TrainJob that a replicated job stands for."""
    labels = (job["template"].get("metadata") or {}).get("labels") or {}
    found: str | None = labels.get(ANCESTOR)
    return found


def gpus(resources: Json) -> int:
    """The number of GPUs: ``GetNumGPUPerNode``, of the requests, else of the limits.

    Of several kinds of GPUs Trainer takes any one; here it is the first by name.
    """
    for part in ("requests", "limits"):
        counts = [
            rounded_up(quantity)
            for name, quantity in sorted((resources.get(part) or {}).items())
            if "gpu" in name.lower()
        ]
        if counts and counts[0]:
            return counts[0]
    return 0


def variable(name: str, value: str | Json) -> Json:
    """An environment variable with a value or a source."""
    return {"name": name, "value" if isinstance(value, str) else "valueFrom": value}


def given_variables(env: Iterable[Json]) -> list[Json]:
    """Variables of a TrainJob as ``apply.EnvVars`` copies them."""
    found = []
    for item in env:
        source = copy.deepcopy(item.get("valueFrom"))
        if source is not None and "fieldRef" in source:
            source["fieldRef"].pop("apiVersion", None)
        if source is not None and "resourceFieldRef" in source:
            source["resourceFieldRef"].setdefault("containerName", "")
        found.append(
            variable(item["name"], source if source is not None else item.get("value", ""))
        )
    return found


def set_env(container: Json, added: Iterable[Json]) -> None:
    """Sets variables: known ones keep their place, others come last."""
    upsert(container, "env", added, lambda a, b: a["name"] == b["name"])


def set_volumes(job: Json, added: Iterable[Json]) -> None:
    """Sets volumes of a replicated job by their names."""
    upsert(pod_spec(job), "volumes", added, lambda a, b: a["name"] == b["name"])


def set_mounts(container: Json, added: Iterable[Json]) -> None:
    """Sets mounts of a container by their paths."""
    upsert(container, "volumeMounts", added, lambda a, b: a["mountPath"] == b["mountPath"])


def set_ports(container: Json, added: Iterable[Json]) -> None:
    """Sets ports of a container.

    Trainer takes two ports for one where their numbers or their names are equal, and two ports
    without names have equal names.
    """
    upsert(
        container,
        "ports",
        added,
        lambda a, b: a["containerPort"] == b["containerPort"] or a.get("name") == b.get("name"),
    )


def upsert(
    owner: Json, key: str, added: Iterable[Json], same: Callable[[Json, Json], bool]
) -> None:
    """Replaces the first item that is the ``same``, else appends."""
    items = owner.setdefault(key, [])
    for item in added:
        index = next((i for i, known in enumerate(items) if same(known, item)), len(items))
        items[index : index + 1] = [copy.deepcopy(item)]
    if not items:
        del owner[key]
