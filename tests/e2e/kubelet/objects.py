"""A pod of the API server -> the pod that the runner runs. Pure."""

from __future__ import annotations

import copy
import re
from typing import Any

from cache_runtimes.local.pods import Pod

Json = dict[str, Any]

_INDEX = "batch.kubernetes.io/job-completion-index"
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class UnsupportedPodError(Exception):
    """The pod has a field that this kubelet cannot obey."""


def runner_pod(pod: Json, address: str) -> Pod:
    """The pod as the runner takes it, with its downward variables resolved.

    Args:
        pod: as the API server has it, bound to this node.
        address: its loopback address.

    Raises:
        UnsupportedPodError: it has an init container that is no sidecar, or an unknown fieldPath.
    """
    spec = copy.deepcopy(pod["spec"])
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") != "Always":
            raise UnsupportedPodError(f"init container {container['name']!r} is no sidecar")
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            if "fieldRef" in source:
                variable["value"] = _field(pod, source["fieldRef"]["fieldPath"], address)
                del variable["valueFrom"]
    annotations = pod["metadata"].get("annotations") or {}
    template = {"metadata": {"annotations": annotations}, "spec": spec}
    return Pod(
        jobset=spec.get("subdomain") or "",
        namespace=pod["metadata"]["namespace"],
        name=spec.get("hostname") or pod["metadata"]["name"],
        address=address,
        job={"name": "", "template": {"spec": {"template": template}}},
        index=int(annotations.get(_INDEX, 0)),
    )


def _field(pod: Json, path: str, address: str) -> str:
    if path in ("status.podIP", "status.podIPs"):
        return address
    if match := _KEYED.fullmatch(path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    group, _, name = path.partition(".")
    if group not in ("metadata", "spec") or name not in pod[group]:
        raise UnsupportedPodError(f"fieldPath {path!r}")
    return str(pod[group][name])
