"""The plugins of gangs: coscheduling and Volcano. Pure.

``coscheduling/coscheduling.go`` and ``volcano/volcano.go`` of ``pkg/runtime/framework/plugins`` in
kubeflow/trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cache_runtimes.local.trainer.info import TRAINER, Info, Json, ancestor, pod_spec
from cache_runtimes.local.trainer.patches import merge_resources
from cache_runtimes.local.trainer.quantities import add, raise_to

_DEFAULT_TIMEOUT_S = 60
_QUEUE = "scheduling.volcano.sh/queue-name"


def enforce(info: Info) -> None:
    """``EnforcePodGroupPolicy``."""
    if info.gang.get("coscheduling") is not None:
        info.pod_labels["scheduling.x-k8s.io/pod-group"] = info.name
    if info.gang.get("volcano") is not None:
        info.pod_annotations["scheduling.k8s.io/group-name"] = info.name


def build(info: Info) -> Iterator[Json]:
    """``Build``: the PodGroup, of all pods of all jobs."""
    coscheduling, volcano = info.gang.get("coscheduling"), info.gang.get("volcano")
    if coscheduling is not None:
        timeout_s = coscheduling.get("scheduleTimeoutSeconds", _DEFAULT_TIMEOUT_S)
        api = "scheduling.x-k8s.io/v1alpha1"
        yield _pod_group(info, api, {"scheduleTimeoutSeconds": timeout_s})
    if volcano is not None:
        yield _pod_group(info, "scheduling.volcano.sh/v1beta1", _volcano_fields(info, volcano))


def _volcano_fields(info: Info, volcano: Json) -> Json:
    fields: Json = {}
    queue = (info.metadata.get("annotations") or {}).get(_QUEUE)
    if queue is not None:
        fields["queue"] = queue
    for job in info.jobs:
        if pod_spec(job).get("priorityClassName"):
            fields["priorityClassName"] = pod_spec(job)["priorityClassName"]
    if volcano.get("networkTopology") is not None:
        fields["networkTopology"] = volcano["networkTopology"]
    return fields


def _pod_group(info: Info, api_version: str, fields: Json) -> Json:
    total: dict[str, str] = {}
    for job, count in zip(info.jobs, info.counts, strict=True):
        add(total, _pod_requests(info, job), count)
    return {
        "apiVersion": api_version,
        "kind": "PodGroup",
        "metadata": {"name": info.name, "namespace": info.namespace},
        "spec": {"minMember": sum(info.counts), "minResources": total, **fields},
    }


def _pod_requests(info: Info, job: Json) -> dict[str, str]:
    """The requests of a pod: ``PodRequests`` of k8s.io/component-helpers/resource.

    Containers and sidecars add up; each other init container runs beside the sidecars before it.
    """
    pod = pod_spec(job)
    given: Any = (info.trainer or {}).get("resourcesPerNode") or {}
    total: dict[str, str] = {}
    for container in pod.get("containers") or ():
        resources = container.get("resources") or {}
        if container["name"] == "node" and ancestor(job) == TRAINER and info.policy is not None:
            resources = merge_resources(resources, given)
        add(total, resources.get("requests") or {})
    peak: dict[str, str] = {}
    sidecars: dict[str, str] = {}
    for container in pod.get("initContainers") or ():
        requests = (container.get("resources") or {}).get("requests") or {}
        if container.get("restartPolicy") == "Always":
            add(total, requests)
            add(sidecars, requests)
            raise_to(peak, sidecars)
        else:
            now = dict(sidecars)
            add(now, requests)
            raise_to(peak, now)
    raise_to(total, peak)
    add(total, pod.get("overhead") or {})
    return total
