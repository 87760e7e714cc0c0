"""Strategic merge patches of pod templates. Pure.

``k8s.io/apimachinery/pkg/util/strategicpatch/patch.go``, as far as ``spec.runtimePatches`` of a
TrainJob can reach: it cannot hold directives or nulls.
"""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

# patchMergeKey of each list in k8s.io/api/core/v1/types.go and of the JobSet; a patch replaces
# other lists.
_MERGE_KEYS = {
    **dict.fromkeys(("replicatedJobs", "containers", "initContainers", "env", "volumes"), "name"),
    **{"imagePullSecrets": "name", "schedulingGates": "name", "volumeMounts": "mountPath"},
    "claims": "name",
}


_MAPS = (*("nodeSelector", "labels", "annotations", "matchLabels", "limits", "requests"),)
_PLAIN = ("value", "readOnly")  # no pointers: Go cannot tell "" and false from an absent field


def apply_runtime_patch(template: Json, patch: Json) -> None:
    """Merges one of ``spec.runtimePatches`` into the template of a runtime."""
    wanted = ((patch.get("trainingRuntimeSpec") or {}).get("template")) or {}
    metadata = wanted.get("metadata") or {}
    for key in ("labels", "annotations"):
        if metadata.get(key):
            template.setdefault("metadata", {}).setdefault(key, {}).update(metadata[key])
    for job in (wanted.get("spec") or {}).get("replicatedJobs") or ():
        merge(template["spec"], {"replicatedJobs": [job]})


def merge_resources(base: Json, override: Json) -> Json:
    """Resources with others merged in, name by name: ``MergeResourceRequirements``."""
    merged = copy.deepcopy(base)
    merge(merged, override)
    return merged


def merge(base: Json, patch: Json) -> None:
    """Merges a patch into an object."""
    for key, value in patch.items():
        if is_left_out(key, value) or (key in _PLAIN and not value):
            continue
        if key in _MERGE_KEYS and isinstance(value, list):
            base[key] = _merged_list(base.get(key) or [], value, _MERGE_KEYS[key])
        elif isinstance(value, dict):
            merge(base.setdefault(key, {}), value)
        else:
            base[key] = copy.deepcopy(value)


def is_left_out(key: str, value: Any) -> bool:
    """Whether Go leaves a field out when it writes an object (``omitempty``)."""
    if value == {}:
        return key in _MAPS
    return value is None or value == []


def _merged_list(base: list[Json], patch: list[Json], merge_key: str) -> list[Json]:
    """The merged items in the order of ``normalizeElementOrder``.

    Items of the patch keep its order. An item of the base alone stands before the first item of
    the patch that the base has after it.
    """
    place = {item[merge_key]: index for index, item in enumerate(base)}
    merged: dict[str, Json] = {}
    for item in patch:
        name = item[merge_key]
        merged[name] = copy.deepcopy(base[place[name]]) if name in place else {}
        merge(merged[name], item)
    left = [item for item in base if item[merge_key] not in merged]
    found: list[Json] = []
    for name, item in merged.items():
        while left and name in place and place[left[0][merge_key]] < place[name]:
            found.append(left.pop(0))
        found.append(item)
    return found + left
