"""TrainJobs with what their controllers made of them, as plain objects of an API server."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from cache_runtimes.diagnosis import Objects

Json = dict[str, Any]

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
CACHE, NODE = "dataset-initializer", "node"
_numbers = itertools.count()


def at(seconds_ago: float) -> str:
    """A time before `NOW`, as the API server writes it."""
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class BrokenJob:
    """A TrainJob with a JobSet, a Job of two cache pods, and one of two trainers.

    Each method adds what a controller or a kubelet reports, and returns the job.
    """

    name: str
    uid: str
    job: Json = field(default_factory=dict)
    jobset: Json | None = None
    jobs: dict[str, Json] = field(default_factory=dict)
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    pod_groups: list[Json] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)

    @classmethod
    def made(cls, name: str, uid: str, *, parts: tuple[str, ...] = (CACHE, NODE)) -> Self:
        """With its JobSet and the Jobs of ``parts``, without pods."""
        found = cls.sent(name, uid)
        found.jobset = _thing(name, f"{uid}-jobset", owner=uid)
        found.jobset["spec"] = {
            "replicatedJobs": [
                {"name": part, "template": {"spec": {"parallelism": 2}}} for part in (CACHE, NODE)
            ]
        }
        for part in parts:
            job = _thing(f"{name}-{part}-0", f"{uid}-{part}", owner=f"{uid}-jobset")
            found.jobs[part] = {**job, "spec": {"parallelism": 2}}
        return found

    @classmethod
    def sent(cls, name: str, uid: str) -> Self:
        """As a user creates it: no controller has seen it."""
        return cls(name, uid, {**_thing(name, uid), "spec": {}})

    def pod(self, part: str = NODE, **status: Any) -> Json:
        """Adds a pod of a Job, and returns it."""
        number = next(_numbers)
        made = _thing(f"{self.name}-{part}-0-{number % 2}-x{number}", f"pod-{number}")
        made["metadata"]["ownerReferences"] = [{"uid": f"{self.uid}-{part}"}]
        made["metadata"]["labels"] = {"jobset.sigs.k8s.io/replicatedjob-name": part}
        made |= {"spec": {"nodeName": "machine-1"}, "status": {"phase": "Pending", **status}}
        self.pods.append(made)
        return made

    def ready(self, part: str, seconds: float = 300) -> Self:
        """Two pods that have been ready for so long."""
        for _ in range(2):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": at(seconds)}
            container = {"name": part, "ready": True, "state": {"running": {}}}
            self.pod(part, phase="Running", conditions=[ready], containerStatuses=[container])
        return self

    def waits(self, reason: str, message: str = "", part: str = NODE) -> Self:
        """Two pods whose container does not start."""
        for _ in range(2):
            state = {"waiting": {"reason": reason, "message": message}}
            container = {"name": part, "image": "registry/image:1", "ready": False, "state": state}
            self.pod(part, containerStatuses=[container])
        return self

    def unscheduled(self, message: str, reason: str = "Unschedulable") -> Self:
        """Two pods without a machine."""
        for _ in range(2):
            condition = {"type": "PodScheduled", "status": "False", "reason": reason}
            pod = self.pod(conditions=[{**condition, "message": message}])
            del pod["spec"]["nodeName"]
            self.on("Pod", pod, "FailedScheduling", message)
        return self

    def in_gang(self, mark: str, *, message: str = "", **status: Any) -> Self:
        """Two waiting pods of a PodGroup, whose name a label or an annotation of them tells.

        Args:
            message: of their condition; empty: the scheduler has looked at the group only.
        """
        if message:
            self.unscheduled(message)
        else:
            for _ in range(2):
                self.pod()["spec"] = {"schedulerName": "other"}
        for pod in self.pods[-2:]:
            kind = "labels" if mark.startswith("scheduling.x-k8s.io") else "annotations"
            pod["metadata"].setdefault(kind, {})[mark] = f"{self.name}-{self.uid}"
        group = _thing(f"{self.name}-{self.uid}", f"{self.uid}-group", owner=self.uid)
        self.pod_groups.append({**group, "status": status})
        return self

    def exits(
        self, code: int, message: str = "", part: str = NODE, reason: str = "Error", log: str = ""
    ) -> Self:
        """Two pods that failed alike."""
        for _ in range(2):
            ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": at(20)}
            container = {"name": part, "ready": False, "state": {"terminated": ended}}
            pod = self.pod(part, phase="Failed", containerStatuses=[container])
            self.logs[pod["metadata"]["uid"]] = log
        return self

    def on(self, kind: str, thing: Json, reason: str, message: str, seconds_ago: float = 1) -> Self:
        """An event about an object."""
        of = {"kind": kind, "name": thing["metadata"]["name"], "uid": thing["metadata"]["uid"]}
        told = {"reason": reason, "message": message, "lastTimestamp": at(seconds_ago)}
        self.events.append({"involvedObject": of, **told})
        return self

    def fails(self, reason: str, message: str) -> Self:
        """The conditions of a Job, its JobSet and its TrainJob after a failure."""
        for thing in (*self.jobs.values(), self.jobset, self.job):
            assert thing is not None
            thing["status"] = conditions(Failed=(reason, message))
        return self

    def objects(self, *others: Self) -> Objects:
        """What `read_objects` would read beside other TrainJobs of the namespace."""
        all_of = (self, *others)
        return Objects(
            train_job=self.job,
            jobsets=[each.jobset for each in all_of if each.jobset is not None],
            jobs=[job for each in all_of for job in each.jobs.values()],
            pods=[pod for each in all_of for pod in each.pods],
            events=[event for each in all_of for event in each.events],
            pod_groups=[group for each in all_of for group in each.pod_groups],
            logs={uid: log for each in all_of for uid, log in each.logs.items()},
            now=NOW,
        )


def conditions(**true: tuple[str, str]) -> Json:
    """A status with conditions that hold: type -> reason and message."""
    return {
        "conditions": [
            {"type": kind, "status": "True", "reason": reason, "message": message}
            for kind, (reason, message) in true.items()
        ]
    }


def refused(objects: Objects, **kinds: str) -> Objects:
    """Objects whose reader had no right to list some kinds."""
    return replace(objects, refused=kinds)


def _thing(name: str, uid: str, owner: str | None = None) -> Json:
    metadata: Json = {"name": name, "uid": uid, "creationTimestamp": at(120)}
    if owner is not None:
        metadata["ownerReferences"] = [{"uid": owner}]
    return {"metadata": metadata}
