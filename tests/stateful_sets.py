"""StatefulSets of `tests.api_objects.Store` as a test scripts them, and the states of pods."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

from tests.api_objects import ApiError, Store, now

Json = dict[str, Any]

_LOOK_AGAIN_S = 0.2


def running() -> Json:
    """The status of a pod whose containers run and are ready."""
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [_container(True, {"running": {"startedAt": now()}})],
    }


def starting() -> Json:
    """The status of a pod that runs and is not ready."""
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [_container(False, {"running": {"startedAt": now()}})],
    }


def waiting(reason: str, message: str = "") -> Json:
    """The status of a pod whose container is not started, such as for ``ImagePullBackOff``."""
    return {
        "phase": "Pending",
        "containerStatuses": [
            _container(False, {"waiting": {"reason": reason, "message": message}})
        ],
    }


def exited(code: int, message: str = "", reason: str = "Error") -> Json:
    """The status of a pod whose container has ended and is about to be started again."""
    ended = {"terminated": {"exitCode": code, "message": message, "reason": reason}}
    pause = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting"}}
    status = _container(False, pause) | {"lastState": ended, "restartCount": 1}
    return {"phase": "Running", "containerStatuses": [status]}


def unschedulable(message: str) -> Json:
    """The status of a pod that no node has room for."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {"phase": "Pending", "conditions": [{**condition, "message": message}]}


def _container(ready: bool, state: Json) -> Json:
    # The name is filled in from the pod.
    return {"ready": ready, "restartCount": 0, "state": state}


class StatefulSets:
    """Makes the pods of StatefulSets, and counts the ready ones; a context manager.

    Args:
        status: of each pod, by its name; None: the pod is not made, and an event tells
            ``refusal``.
    """

    def __init__(
        self,
        store: Store,
        status: Callable[[str], Json | None] = lambda name: running(),
        refusal: str = "refused",
    ) -> None:
        self._store = store
        self._status = status
        self._refusal = refusal
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="statefulsets", daemon=True)

    def __enter__(self) -> StatefulSets:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        with self._store.changed:
            self._store.changed.notify_all()
        self._thread.join()

    def set_pod(self, name: str, namespace: str, status: Json) -> None:
        """Sets the status of a pod, which may not exist yet."""
        with self._store.changed:
            self._store.changed.wait_for(lambda: self._is_made(name, namespace), timeout=10.0)
            pod = self._store.get("pods", name, namespace)
            pod["status"] = self._named(pod, status)
            self._store.replace("pods", name, pod, namespace)

    def _is_made(self, name: str, namespace: str) -> bool:
        return bool(self._store.find("pods", namespace, fieldSelector=f"metadata.name={name}"))

    def _run(self) -> None:
        seen = -1
        while not self._closed:
            with self._store.changed:
                if self._store.version == seen:
                    self._store.changed.wait(_LOOK_AGAIN_S)
                    continue
                seen = self._store.version
                for one in self._store.find("statefulsets"):
                    self._reconcile(one)

    def _reconcile(self, stateful_set: Json) -> None:
        metadata, spec = stateful_set["metadata"], stateful_set["spec"]
        namespace = metadata["namespace"]
        own = {
            pod["metadata"]["name"]: pod
            for pod in self._store.find("pods", namespace)
            if any(o["uid"] == metadata["uid"] for o in pod["metadata"].get("ownerReferences", ()))
        }
        wanted = 0 if metadata.get("deletionTimestamp") else spec.get("replicas", 1)
        for index in range(wanted):
            name = f"{metadata['name']}-{index}"
            if name not in own:
                self._make_pod(stateful_set, name)
        ready = sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            for pod in own.values()
            if (conditions := pod.get("status", {}).get("conditions", ())) is not None
        )
        status = {"replicas": len(own), "readyReplicas": ready}
        self._store.patch("statefulsets", metadata["name"], {"status": status}, namespace)

    def _make_pod(self, stateful_set: Json, name: str) -> None:
        metadata = stateful_set["metadata"]
        namespace = metadata["namespace"]
        about = {"kind": "StatefulSet", "name": metadata["name"], "uid": metadata["uid"]}
        status = self._status(name)
        if status is None:
            told = f"create Pod {name} in StatefulSet {metadata['name']} failed error: "
            event = {
                "metadata": {"name": f"{name}.refused"},
                "involvedObject": {**about, "namespace": namespace, "apiVersion": "apps/v1"},
                "reason": "FailedCreate",
                "type": "Warning",
                "message": told + self._refusal,
                "lastTimestamp": now(),
            }
            with contextlib.suppress(ApiError):  # told already
                self._store.create("events", event, namespace)
            return
        template = stateful_set["spec"]["template"]
        labels = {
            **template["metadata"].get("labels", {}),
            "statefulset.kubernetes.io/pod-name": name,
        }
        owner = {"apiVersion": "apps/v1", **about, "controller": True, "blockOwnerDeletion": True}
        pod = {
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": template["spec"],
        }
        pod["status"] = self._named(pod, status)
        with contextlib.suppress(ApiError):  # one of a former StatefulSet is still there
            self._store.create("pods", pod, namespace)

    def _named(self, pod: Json, status: Json) -> Json:
        named = copy.deepcopy(status)
        containers = pod["spec"]["containers"]
        for container, told in zip(containers, named.get("containerStatuses", ()), strict=False):
            told["name"] = container["name"]
        return named
