"""The objects of a Kubernetes cluster in memory, and their changes, for tests.

Objects are JSON. The store knows what clients rely on: versions, names that are taken,
preconditions, finalizers, owner references, selectors. It validates nothing and sets no defaults.
"""

from __future__ import annotations

import copy
import re
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_REASONS = {
    **{400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict"},
    **{410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests"},
    **{500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"},
}


@dataclass(frozen=True)
class Resource:
    """A kind of objects, as the API names it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


RESOURCES = (
    *(
        Resource("", "v1", f"{kind.lower()}s", kind)
        for kind in ("ConfigMap", "Event", "Pod", "Secret", "Service", "ServiceAccount")
    ),
    Resource("", "v1", "namespaces", "Namespace", namespaced=False),
    Resource("", "v1", "nodes", "Node", namespaced=False),
    Resource("apps", "v1", "statefulsets", "StatefulSet"),
    Resource("batch", "v1", "jobs", "Job"),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
    Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    Resource("kubeflow.org", "v1beta1", "experiments", "Experiment"),
    Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
    Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime"),
    Resource(
        "trainer.kubeflow.org",
        "v1alpha1",
        "clustertrainingruntimes",
        "ClusterTrainingRuntime",
        namespaced=False,
    ),
)


class ApiError(Exception):
    """An answer other than a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason or _REASONS.get(status, "Unknown")
        self.headers = dict(headers or {})

    def body(self) -> Json:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status,
        }


@dataclass(frozen=True)
class Change:
    """A change of an object.

    Attributes:
        type: ADDED, MODIFIED or DELETED.
        before: it was so before; None for one that was added.
    """

    version: int
    type: str
    resource: Resource
    one: Json
    before: Json | None


_Key = tuple[str, str, str]  # plural, namespace, name


class Store:
    """The objects and their changes; thread-safe. It takes and returns copies."""

    def __init__(self, resources: tuple[Resource, ...] = RESOURCES) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.collects_garbage = True
        self._resources = {resource.plural: resource for resource in resources}
        self._objects: dict[_Key, Json] = {}
        self._changes: list[Change] = []
        self._version = 100
        self._oldest = 100

    @property
    def version(self) -> int:
        return self._version

    def resource(self, group: str, version: str, plural: str) -> Resource:
        found = self._resources.get(plural)
        if found is None or (found.group, found.version) != (group, version):
            raise ApiError(404, "the server could not find the requested resource")
        return found

    def create(self, plural: str, body: Json, namespace: str = "") -> Json:
        resource = self._resources[plural]
        with self.changed:
            one = copy.deepcopy(body)
            metadata = one.setdefault("metadata", {})
            if "name" not in metadata and "generateName" in metadata:
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            if not metadata.get("name"):
                raise ApiError(422, f"{resource.kind} is invalid: metadata.name: Required value")
            namespace = metadata.get("namespace", namespace) if resource.namespaced else ""
            key = (plural, namespace, metadata["name"])
            if key in self._objects:
                raise ApiError(
                    409,
                    f'{resource.qualified} "{metadata["name"]}" already exists',
                    reason="AlreadyExists",
                )
            if resource.namespaced:
                metadata["namespace"] = namespace
            one["apiVersion"], one["kind"] = resource.api_version, resource.kind
            metadata |= {
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
                "generation": 1,
            }
            self._put("ADDED", resource, key, one)
            return copy.deepcopy(one)

    def get(self, plural: str, name: str, namespace: str = "") -> Json:
        with self.changed:
            return copy.deepcopy(self._objects[self._existing(plural, namespace, name)])

    def find(self, plural: str, namespace: str = "", **selectors: str) -> list[Json]:
        """The objects of a namespace, or of all; selectors as in the API, ``labelSelector``, ..."""
        with self.changed:
            return [
                copy.deepcopy(one)
                for (kind, place, _), one in sorted(self._objects.items())
                if kind == plural and namespace in ("", place) and matches(one, selectors)
            ]

    def replace(self, plural: str, name: str, body: Json, namespace: str = "") -> Json:
        with self.changed:
            key = self._existing(plural, namespace, name)
            before = self._objects[key]
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, before["metadata"]["resourceVersion"]):
                raise ApiError(409, f'Operation cannot be fulfilled on {plural} "{name}": modified')
            one = copy.deepcopy(body)
            kept = ("uid", "creationTimestamp", "namespace", "name", "deletionTimestamp")
            one["metadata"] |= {k: v for k, v in before["metadata"].items() if k in kept}
            self._write(key, one)
            return copy.deepcopy(one)

    def patch(self, plural: str, name: str, patch: Json, namespace: str = "") -> Json:
        """A JSON merge patch (RFC 7386): lists are replaced."""
        with self.changed:
            key = self._existing(plural, namespace, name)
            one = _merged(self._objects[key], patch)
            self._write(key, one)
            return copy.deepcopy(one)

    def delete(
        self,
        plural: str,
        name: str,
        namespace: str = "",
        *,
        preconditions: Mapping[str, str] | None = None,
        orphan: bool = False,
    ) -> Json:
        """Deletes as the API does: an object with finalizers is only marked until they are gone."""
        with self.changed:
            key = self._existing(plural, namespace, name)
            one = copy.deepcopy(self._objects[key])
            for what, wanted in (preconditions or {}).items():
                if one["metadata"].get(what) != wanted:
                    raise ApiError(
                        409,
                        f'Operation cannot be fulfilled on {plural} "{name}": Precondition failed: '
                        f"{what} in precondition: {wanted}",
                    )
            if one["metadata"].get("finalizers"):
                one["metadata"].setdefault("deletionTimestamp", now())
                self._write(key, one)
            else:
                self._drop(key)
                if self.collects_garbage and not orphan:
                    self.collect_garbage()
            return one

    def collect_garbage(self) -> None:
        """Deletes every object whose owners are all gone, as the garbage collector does."""
        with self.changed:
            while True:
                uids = {one["metadata"]["uid"] for one in self._objects.values()}
                lost = [
                    key
                    for key, one in self._objects.items()
                    if (owners := one["metadata"].get("ownerReferences"))
                    and not any(owner["uid"] in uids for owner in owners)
                    and not one["metadata"].get("deletionTimestamp")
                ]
                if not lost:
                    return
                for plural, namespace, name in lost:
                    if (plural, namespace, name) in self._objects:
                        self.delete(plural, name, namespace)

    def forget_changes(self) -> None:
        """Makes earlier changes unavailable to watches."""
        with self.changed:
            self._changes.clear()
            self._oldest = self._version

    def changes_after(self, version: int) -> list[Change]:
        with self.changed:
            if version < self._oldest:
                raise ApiError(410, f"too old resource version: {version} ({self._oldest})")
            return [change for change in self._changes if change.version > version]

    def _existing(self, plural: str, namespace: str, name: str) -> _Key:
        key = (plural, namespace, name)
        if key not in self._objects:
            qualified = self._resources[plural].qualified
            raise ApiError(404, f'{qualified} "{name}" not found')
        return key

    def _write(self, key: _Key, one: Json) -> None:
        before = self._objects[key]
        metadata = one["metadata"]
        if one == before:
            return
        if one.get("spec") != before.get("spec"):
            metadata["generation"] = metadata.get("generation", 1) + 1
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._drop(key)
            if self.collects_garbage:
                self.collect_garbage()
        else:
            self._put("MODIFIED", self._resources[key[0]], key, one)

    def _put(self, type: str, resource: Resource, key: _Key, one: Json) -> None:
        self._happened(type, resource, one, self._objects.get(key))
        self._objects[key] = one

    def _drop(self, key: _Key) -> None:
        before = self._objects.pop(key)
        self._happened("DELETED", self._resources[key[0]], copy.deepcopy(before), before)

    def _happened(self, type: str, resource: Resource, one: Json, before: Json | None) -> None:
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        change = Change(self._version, type, resource, copy.deepcopy(one), before)
        self._changes.append(change)
        self.changed.notify_all()


def matches(one: Json, selectors: Mapping[str, str]) -> bool:
    labels = one["metadata"].get("labels") or {}
    by_label = re.split(r",(?![^(]*\))", selectors.get("labelSelector", ""))
    by_field = selectors.get("fieldSelector", "").split(",")
    return all(_has_label(labels, term.strip()) for term in by_label if term.strip()) and all(
        _has_field(one, term.strip()) for term in by_field if term.strip()
    )


def _has_label(labels: Mapping[str, str], term: str) -> bool:
    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", term):
        within = labels.get(match[1]) in [value.strip() for value in match[3].split(",")]
        return within == (match[2] == "in")
    if match := re.fullmatch(r"([^=!]+?)\s*(==|=|!=)\s*(\S*)", term):
        return (labels.get(match[1]) == match[3]) == (match[2] != "!=")
    return term[1:] not in labels if term.startswith("!") else term in labels


def _has_field(one: Json, term: str) -> bool:
    match = re.fullmatch(r"([^=!]+?)(==|=|!=)(.*)", term)
    if match is None:
        raise ApiError(400, f"unable to parse field selector {term!r}")
    value: Any = one
    for step in match[1].split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return (str(value if value is not None else "") == match[3]) == (match[2] != "!=")


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(copy.deepcopy(target)) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
