"""What StatefulSet, pods and events say of a cache: how far it is, and whether it can get there.

Pure: objects as the API has them in, words out. What has to last for a while before it counts is
timed by whoever asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from cache_protocol.errors import CacheError, ConfigError, LoadError, NodeUnavailableError
from cache_runtimes.initializer.plan import CONTAINER, Json

EXIT_DATA = 65  # EX_DATAERR, of `cache-server`: the data or the query is bad
EXIT_CONFIG = 78  # EX_CONFIG: a setting is bad
_OWN_REASON = {EXIT_DATA: LoadError, EXIT_CONFIG: ConfigError}

_HOPELESS = ("InvalidImageName",)
# They may pass: a registry that throttles, a kubelet that has not seen a secret yet.
_STUCK = (
    *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError"),
    *("RegistryUnavailable", "CreateContainerConfigError", "CreateContainerError"),
)
# What keeps an object from being made: a quota may be raised, or be so new that nobody counted yet,
# an account be made, a server that has just started learn its rules; the rest (Pod Security, a
# webhook, a limit range, a field that is not valid) stays as it is.
_REFUSED = re.compile(r"is forbidden:|denied (the )?request|is invalid:")
_MAY_PASS = re.compile(
    r"exceeded quota|status unknown for quota|error looking up service account|being terminated"
    r"|not yet ready to handle request"
)


class Hope(Enum):
    """Whether something may still become good."""

    WAITING = "passes, or needs a person"
    STUCK = "may pass within moments, else never"
    NONE = "never"


@dataclass(frozen=True)
class Problem:
    """Something that keeps a pod from being ready.

    Attributes:
        about: the pod, or what should have made it, and in which way; the same for as long as the
            problem lasts, whichever words it is told in.
        text: for a person, in one line.
        raises: the error that it comes to.
    """

    about: tuple[str, str]
    text: str
    hope: Hope
    raises: type[CacheError] = NodeUnavailableError


@dataclass(frozen=True)
class CacheHealth:
    """A cache as it is now.

    Attributes:
        ready: pods, of ``wanted``.
        problems: the worst first.
    """

    ready: int
    wanted: int
    problems: tuple[Problem, ...]

    @property
    def is_ready(self) -> bool:
        """Whether every pod is."""
        return self.ready >= self.wanted

    def __str__(self) -> str:
        told = "".join(f"; {problem.text}" for problem in self.problems)
        return f"{self.ready} of {self.wanted} cache pods ready{told}"


def judge(stateful_set: Json, pods: Iterable[Json], events: Iterable[Json]) -> CacheHealth:
    """What is known of a StatefulSet.

    Args:
        pods: any; those that are not its own are passed over.
        events: the same.
    """
    own = sorted(pods_of(stateful_set, pods), key=lambda pod: _ordinal(pod["metadata"]["name"]))
    wanted = stateful_set["spec"].get("replicas", 1)
    problems = [problem for pod in own for problem in _pod_problems(pod)]
    if len(own) < wanted:
        problems += _refusals(stateful_set, events)
    problems.sort(key=_badness)
    ready = (stateful_set.get("status") or {}).get("readyReplicas") or 0
    return CacheHealth(ready, wanted, tuple(problems))


def pods_of(stateful_set: Json, pods: Iterable[Json]) -> list[Json]:
    """The pods of this StatefulSet and not of one of the same name before it."""
    uid = stateful_set["metadata"]["uid"]
    return [pod for pod in pods if any(owner["uid"] == uid for owner in _owners(pod))]


def lacks_pods(stateful_set: Json, pods: Iterable[Json]) -> bool:
    """Whether pods are not even made; only then do its events tell why."""
    wanted: int = stateful_set["spec"].get("replicas", 1)
    return len(pods_of(stateful_set, pods)) < wanted


def may_pass(message: str) -> bool:
    """Whether an admission that says this may let the same object through later."""
    return _MAY_PASS.search(message) is not None


def is_disrupted(pod: Json) -> str | None:
    """Why a pod is taken from its node (eviction, preemption, ...), if it is."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return str(condition.get("reason") or "DisruptionTarget")
    return None


def _pod_problems(pod: Json) -> Iterator[Problem]:
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        yield from _container_problems(pod, container)
    if status.get("phase") == "Failed":  # evicted, its node lost, ...: it is made again
        text = f"pod {name} failed: {_words(status.get('reason'), status.get('message'))}"
        yield Problem((name, "phase"), text, Hope.WAITING)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = _words(condition.get("reason"), condition.get("message"))
            yield Problem((name, "scheduling"), f"pod {name}: {said}", Hope.WAITING)


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
            yield Problem((uid, "exit"), text, Hope.NONE, error)
        else:
            why = ended.get("reason")
            why = f" ({why})" if why not in (None, "Error", said) else ""
            restarts = container.get("restartCount", 0)
            yield Problem((uid, "exit"), f"{text}{why}, restarts: {restarts}", Hope.WAITING)
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason")
    if reason in (*_HOPELESS, *_STUCK):
        text = f"pod {name}: {_words(reason, waiting.get('message'))}"
        hope = Hope.NONE if reason in _HOPELESS else Hope.STUCK
        yield Problem((uid, f"start of {container['name']}"), text, hope)


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
        hope = Hope.NONE if refused else Hope.WAITING
        yield Problem((uid, "create"), f"a pod cannot be made: {message}", hope)


def _badness(problem: Problem) -> int:
    if problem.raises is not NodeUnavailableError:
        return 0  # its own reason says more than what others make of it
    return {Hope.NONE: 1, Hope.STUCK: 2, Hope.WAITING: 3}[problem.hope]


def _owners(one: Json) -> list[Json]:
    return one["metadata"].get("ownerReferences") or []


def _ordinal(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _last_line(text: str | None) -> str:
    return next((line.strip() for line in reversed((text or "").splitlines()) if line.strip()), "")


def _words(*parts: str | None) -> str:
    return ": ".join(" ".join(part.split()) for part in parts if part)
