"""How a pod runs -> the status that the API server shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cache_runtimes.local.policies import ContainerExit

Json = dict[str, Any]


@dataclass
class PodState:
    """What is known of a pod that has begun."""

    address: str
    started_at: str  # RFC 3339
    is_ready: bool = False
    restarts: dict[str, int] = field(default_factory=dict)  # by container
    exits: Sequence[ContainerExit] | None = None  # of all containers, once the pod has ended

    @property
    def phase(self) -> Literal["Running", "Succeeded", "Failed"]:
        if self.exits is None:
            return "Running"
        return "Failed" if any(exit.code for exit in self.exits) else "Succeeded"


def waiting_status(spec: Mapping[str, Any], image: str) -> Json:
    """The ``status`` of a pod whose image cannot be fetched."""
    waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
    statuses = [
        {
            **{"name": each["name"], "image": each["image"], "imageID": ""},
            **{"ready": False, "restartCount": 0, "state": {"waiting": waiting}},
        }
        for each in spec["containers"]
    ]
    return {"phase": "Pending", "containerStatuses": statuses}


def pod_status(spec: Mapping[str, Any], state: PodState, now: str) -> Json:
    """The ``status`` of a pod, to be merged strategically."""
    conditions = {
        "PodScheduled": True,
        "Initialized": True,
        "ContainersReady": state.is_ready,
        "Ready": state.is_ready,
    }
    containers, sidecars = spec["containers"], spec.get("initContainers") or ()
    return {
        "phase": state.phase,
        "podIP": state.address,
        "podIPs": [{"ip": state.address}],
        "hostIP": "127.0.0.1",
        "startTime": state.started_at,
        "conditions": [
            {"type": name, "status": str(value), "lastTransitionTime": now}
            for name, value in conditions.items()
        ],
        "initContainerStatuses": [_container(each, state, now) for each in sidecars],
        "containerStatuses": [_container(each, state, now) for each in containers],
    }


def _container(container: Json, state: PodState, now: str) -> Json:
    name = container["name"]
    running: Json = {"running": {"startedAt": state.started_at}}
    if state.exits is not None:
        ended = {exit.container: exit for exit in state.exits}.get(name)
        code = ended.code if ended else 0  # a sidecar, which was stopped
        running = {
            "terminated": {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "message": ended.message if ended else "",
                "startedAt": state.started_at,
                "finishedAt": now,
            }
        }
    return {
        "name": name,
        "image": container.get("image") or "",
        "imageID": "",
        "ready": state.is_ready,
        "started": state.exits is None,
        "restartCount": state.restarts.get(name, 0),
        "state": running,
    }
