"""Kubernetes's strategic merge of a patch into a Job template. Pure.

As ``k8s.io/apimachinery/pkg/util/strategicpatch`` does it for the fields that Trainer lets a
TrainJob patch: maps are merged, lists of named things are merged by their merge key, other lists
are replaced, ``null`` removes.
"""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

# patchMergeKey of each list in k8s.io/api/core/v1/types.go; a list that is not here is replaced.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
}


def merged(base: Json, patch: Json) -> Json:
    """A copy of ``base`` with ``patch`` in it."""
    result = copy.deepcopy(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif isinstance(value, list) and isinstance(result.get(key), list) and key in _MERGE_KEYS:
            result[key] = _merged_list(result[key], value, _MERGE_KEYS[key])
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged_list(base: list[Json], patch: list[Json], merge_key: str) -> list[Json]:
    """Those of the base in their order, changed, then those that only the patch has."""
    result = copy.deepcopy(base)
    for item in patch:
        for index, old in enumerate(result):
            if old.get(merge_key) == item.get(merge_key):
                result[index] = merged(old, item)
                break
        else:
            result.append(copy.deepcopy(item))
    return result
