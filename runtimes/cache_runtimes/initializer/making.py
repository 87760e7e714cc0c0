"""Makes the planned objects, and removes them: only ever those of one TrainJob."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum

from cache_protocol.errors import CacheError, NotReadyError
from cache_runtimes.initializer.cluster import Cluster, ClusterError, Patience
from cache_runtimes.initializer.plan import (
    PLAN_ANNOTATION,
    TRAINER_GROUP,
    Json,
    Kind,
    Names,
    Planned,
)

_LOOK_AGAIN_S = 0.5

logger = logging.getLogger(__name__)


class _Whose(Enum):
    """Of whom an object is that was found under a planned name."""

    OURS = "of this TrainJob"
    FORMER = "of a TrainJob of the same name that is gone"
    ANOTHER = "of somebody else"


def make(cluster: Cluster, planned: Planned, owner_uid: str, patience: Patience) -> Json:
    """The object as the cluster has it: made now, or by a former run of the same TrainJob.

    One that a former run planned otherwise is replaced. That cannot come from the TrainJob, whose
    initializer is immutable, only from another version of this program; and then no trainer has
    begun, or the pods would have had to be rolled anyway. So it is one rule for all kinds, which
    needs no permission to change anything.

    What is left of a former TrainJob of that name is waited for: the garbage collector removes it.

    Raises:
        ClusterError: the name is taken by an object of somebody else, which is left as it is.
        NotReadyError: what has to go first did not go in time.
        StoppedError: the program was told to end.
    """
    said = ""
    while True:
        made = cluster.create(planned.kind, planned.body, patience)
        if made is not None:
            logger.info("made %s/%s", planned.kind.plural, planned.name)
            return made
        found = cluster.get(planned.kind, planned.name, patience)
        if found is not None and _is_as_planned(found, planned, owner_uid):
            logger.info("adopted %s/%s of a former run", planned.kind.plural, planned.name)
            return found
        if found is None:  # it went just now, or its name is held by something else
            reason = f"{planned.kind.plural}/{planned.name}, there for one call and not for another"
        else:
            reason = _make_way(cluster, planned, found, owner_uid, patience)
        if reason != said:
            logger.info("waiting for the end of %s", reason)
            said = reason
        if not patience.left_s:
            raise NotReadyError(f"still there at the deadline: {reason}")
        patience.pause(_LOOK_AGAIN_S)


def remove(
    cluster: Cluster, names: Names, owner_uid: str, patience: Patience
) -> tuple[CacheError, ...]:
    """Removes what belongs to the TrainJob ``owner_uid``, and nothing else.

    Returns:
        Why something is left, one for each object; the others are removed all the same.
    """
    failures: list[CacheError] = []
    for kind, name in names.removed_in_order:
        try:
            found = cluster.get(kind, name, patience)
            if found is None or _whose(found, names.train_job, owner_uid) is not _Whose.OURS:
                continue
            if _is_ending(found) or cluster.delete(kind, name, found["metadata"]["uid"], patience):
                logger.info("removed %s/%s", kind.plural, name)
        except CacheError as error:
            logger.error("%s/%s is left behind: %s", kind.plural, name, error)
            failures.append(error)
    return tuple(failures)


def _is_as_planned(found: Json, planned: Planned, owner_uid: str) -> bool:
    annotations = found["metadata"].get("annotations") or {}
    return (
        any(owner["uid"] == owner_uid for owner in _owners(found))
        and not _is_ending(found)
        and annotations.get(PLAN_ANNOTATION) == planned.fingerprint
    )


def _make_way(
    cluster: Cluster, planned: Planned, found: Json, owner_uid: str, patience: Patience
) -> str:
    """What ``found`` is, which ends or is ended now.

    Raises:
        ClusterError: it is somebody else's.
    """
    kind, name = planned.kind, planned.name
    uid = found["metadata"]["uid"]
    (owner,) = _owners(planned.body)
    whose = _whose(found, owner["name"], owner_uid)
    if whose is _Whose.ANOTHER:
        raise ClusterError(
            f"{kind.plural}/{name} in namespace {cluster.namespace} is there already, "
            f"{_owned_by(found)}, and is left as it is"
        )
    if whose is _Whose.OURS and not _is_ending(found):
        logger.info("replacing %s/%s, which a former run planned otherwise", kind.plural, name)
        cluster.delete(kind, name, uid, patience)
    return f"{kind.plural}/{name} (uid {uid}), {whose.value}"


def _whose(found: Json, train_job: str, owner_uid: str) -> _Whose:
    owners = _owners(found)
    if any(owner["uid"] == owner_uid for owner in owners):
        return _Whose.OURS
    if owners and all(
        owner["kind"] == Kind.TRAIN_JOB
        and owner["apiVersion"].partition("/")[0] == TRAINER_GROUP
        and owner["name"] == train_job
        for owner in owners
    ):
        return _Whose.FORMER  # the name is taken by our job, so that one must be gone
    return _Whose.ANOTHER


def _owned_by(found: Json) -> str:
    owners: Iterable[Json] = _owners(found)
    named = [f"{owner['kind']}/{owner['name']} (uid {owner['uid']})" for owner in owners]
    return f"owned by {', '.join(named)}" if named else "owned by nobody"


def _is_ending(found: Json) -> bool:
    return found["metadata"].get("deletionTimestamp") is not None


def _owners(one: Json) -> list[Json]:
    return one["metadata"].get("ownerReferences") or []
