"""The health of a cache, from its StatefulSet, pods and events. Pure.

It reads objects as the API gives them. The caller times problems that count only after a while.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from cache_protocol.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    CacheError,
    ConfigError,
    LoadError,
    NodeUnavailableError,
)
from cache_runtimes.initializer.plan import CONTAINER, Json

_OWN_REASON = {EXIT_DATA: LoadError, EXIT_CONFIG: ConfigError}

_PERMANENT_REASONS = ("InvalidImageName",)
# A registry may throttle, and a kubelet may not know a Secret yet.
_TRANSIENT_REASONS = (
    *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError"),
    *("RegistryUnavailable", "CreateContainerConfigError", "CreateContainerError"),
)
# Why admission refuses an object. A quota, a missing account or a server that has just started may
# let it through later; Pod Security, a webhook, a limit range or an invalid field does not.
_REFUSED = re.compile(r"is forbidden:|denied (the )?request|is invalid:")
_MAY_PASS = re.compile(
    r"exceeded quota|status unknown for quota|error looking up service account|being terminated"
    r"|not yet ready to handle request"
)


class Severity(Enum):
    """Whether a problem may end."""

    PENDING = "ends, or an administrator ends it"
    TRANSIENT = "ends within moments, or never"
    PERMANENT = "never ends"


@dataclass(frozen=True)
class Problem:
    """A reason why a pod is not ready.

    Attributes:
        about: identifies the problem while it lasts, also when its text changes.
        text: for people, in one line.
        raises: the class of the error.
    """

    about: tuple[str, str]
    text: str
    severity: Severity
    raises: type[CacheError] = NodeUnavailableError


@dataclass(frozen=True)
class CacheHealth:
    """A cache as it is now: ``ready`` of ``wanted`` pods, and its problems, the worst first."""

    ready: int
    wanted: int
    problems: tuple[Problem, ...]

    @property
    def is_ready(self) -> bool:
        """Whether every pod is ready."""
        return self.ready >= self.wanted

    def __str__(self) -> str:
        told = "".join(f"; {problem.text}" for problem in self.problems)
        return f"{self.ready} of {self.wanted} cache pods ready{told}"


def assess(stateful_set: Json, pods: Iterable[Json], events: Iterable[Json]) -> CacheHealth:
    """The health of a StatefulSet; other pods and events are ignored."""
    own = sorted(pods_of(stateful_set, pods), key=lambda pod: _ordinal(pod["metadata"]["name"]))
    wanted = stateful_set["spec"].get("replicas", 1)
    problems = [problem for pod in own for problem in pod_problems(pod)]
    if len(own) < wanted:
        problems += _refusals(stateful_set, events)
    problems.sort(key=_rank)
    ready = (stateful_set.get("status") or {}).get("readyReplicas") or 0
    return CacheHealth(ready, wanted, tuple(problems))


def pods_of(stateful_set: Json, pods: Iterable[Json]) -> list[Json]:
    """The pods of this StatefulSet, not of an earlier one with its name."""
    uid = stateful_set["metadata"]["uid"]
    return [pod for pod in pods if any(owner["uid"] == uid for owner in _owners(pod))]


def lacks_pods(stateful_set: Json, pods: Iterable[Json]) -> bool:
    """Whether pods do not exist yet; only then do its events say why."""
    wanted: int = stateful_set["spec"].get("replicas", 1)
    return len(pods_of(stateful_set, pods)) < wanted


def may_pass(message: str) -> bool:
    """Whether an admission with this message may let the same object through later."""
    return _MAY_PASS.search(message) is not None


def is_disrupted(pod: Json) -> str | None:
    """The reason of a disruption such as an eviction or a preemption, if there is one."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return str(condition.get("reason") or "DisruptionTarget")
    return None


def pod_problems(pod: Json) -> Iterator[Problem]:
    """Why a pod is not ready, or how it failed; nothing where it is ready or has succeeded."""
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        yield from _container_problems(pod, container)
    if status.get("phase") == "Failed":  # such as evicted: the StatefulSet makes it again
        text = f"pod {name} failed: {_words(status.get('reason'), status.get('message'))}"
        yield Problem((name, "phase"), text, Severity.PENDING)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = _words(condition.get("reason"), condition.get("message"))
            yield Problem((name, "scheduling"), f"pod {name}: {said}", Severity.PENDING)


def _container_problems(pod: Json, container: Json) -> Iterator[Problem]:
    if container.get("ready"):
        return
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    state = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if ended and ended.get("exitCode") != 0:
        code = ended["exitCode"]
        said = _last_line(ended.get("message")) or ended.get("reason") or "it said nothing"
        text = f"pod {name} exited with {code}: {said}"
        error = _OWN_REASON.get(code) if container["name"] == CONTAINER else None
        if error is not None:
            yield Problem((uid, "exit"), text, Severity.PERMANENT, error)
        else:
            why = ended.get("reason")
            why = f" ({why})" if why not in (None, "Error", said) else ""
            restarts = container.get("restartCount", 0)
            yield Problem((uid, "exit"), f"{text}{why}, restarts: {restarts}", Severity.PENDING)
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason")
    if reason in (*_PERMANENT_REASONS, *_TRANSIENT_REASONS):
        text = f"pod {name}: {_words(reason, waiting.get('message'))}"
        permanent = reason in _PERMANENT_REASONS
        severity = Severity.PERMANENT if permanent else Severity.TRANSIENT
        yield Problem((uid, f"start of {container['name']}"), text, severity)


def _refusals(stateful_set: Json, events: Iterable[Json]) -> Iterator[Problem]:
    """The last event in which the StatefulSet could not make a pod."""
    uid = stateful_set["metadata"]["uid"]
    own = [
        event
        for event in events
        if event.get("reason") == "FailedCreate"
        and (event.get("involvedObject") or {}).get("uid") == uid
    ]
    for event in sorted(own, key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")[-1:]:
        message = _words(event.get("message"))
        refused = bool(_REFUSED.search(message)) and not may_pass(message)
        severity = Severity.PERMANENT if refused else Severity.PENDING
        yield Problem((uid, "create"), f"a pod cannot be made: {message}", severity)


def _rank(problem: Problem) -> int:
    if problem.raises is not NodeUnavailableError:
        return 0  # the container's own reason says the most
    return {Severity.PERMANENT: 1, Severity.TRANSIENT: 2, Severity.PENDING: 3}[problem.severity]


def _owners(one: Json) -> list[Json]:
    return one["metadata"].get("ownerReferences") or []


def _ordinal(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _last_line(text: str | None) -> str:
    return next((line.strip() for line in reversed((text or "").splitlines()) if line.strip()), "")


def _words(*parts: str | None) -> str:
    return ": ".join(" ".join(part.split()) for part in parts if part)
