"""Creates and removes the planned objects of one TrainJob, and never those of others."""

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

_POLL_S = 0.5

logger = logging.getLogger(__name__)


class _Owner(Enum):
    """The owner of an object that has a planned name."""

    THIS_JOB = "of this TrainJob"
    DELETED_JOB = "of a deleted TrainJob of the same name"
    OTHER = "of another owner"


def create_or_adopt(cluster: Cluster, planned: Planned, owner_uid: str, patience: Patience) -> Json:
    """Creates an object, or adopts the one of an earlier run; as the cluster has it.

    An object that an earlier run planned differently is replaced. The initializer of a TrainJob is
    immutable, so only another version of this program plans differently. Replacing needs no right
    to change objects.

    The garbage collector removes the objects of a deleted TrainJob of the same name; this waits
    for it.

    Raises:
        ClusterError: an object of another owner has the name; it is left as it is.
        NotReadyError: an object that must go first did not go in time.
        StoppedError: the program was told to end.
    """
    logged = ""
    while True:
        made = cluster.create(planned.kind, planned.body, patience)
        if made is not None:
            logger.info("created %s/%s", planned.kind.plural, planned.name)
            return made
        found = cluster.get(planned.kind, planned.name, patience)
        if found is not None and _is_as_planned(found, planned, owner_uid):
            logger.info("adopted %s/%s of an earlier run", planned.kind.plural, planned.name)
            return found
        if found is None:  # it went just now, or the server reserves its name
            reason = f"{planned.kind.plural}/{planned.name}, which exists for create, not for get"
        else:
            reason = _end_conflict(cluster, planned, found, owner_uid, patience)
        if reason != logged:
            logger.info("waiting for the end of %s", reason)
            logged = reason
        if not patience.left_s:
            raise NotReadyError(f"still there at the deadline: {reason}")
        patience.pause(_POLL_S)


def remove_all(
    cluster: Cluster, names: Names, owner_uid: str, patience: Patience
) -> tuple[CacheError, ...]:
    """Removes the objects of the TrainJob ``owner_uid``; an error for each that is left."""
    failures: list[CacheError] = []
    for kind, name in names.removed_in_order:
        try:
            found = cluster.get(kind, name, patience)
            if found is None or _owner(found, names.train_job, owner_uid) is not _Owner.THIS_JOB:
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


def _end_conflict(
    cluster: Cluster, planned: Planned, found: Json, owner_uid: str, patience: Patience
) -> str:
    """Deletes ``found`` if this job owns it; what is waited for.

    Raises:
        ClusterError: it has another owner.
    """
    kind, name = planned.kind, planned.name
    uid = found["metadata"]["uid"]
    (job,) = _owners(planned.body)
    owner = _owner(found, job["name"], owner_uid)
    if owner is _Owner.OTHER:
        raise ClusterError(
            f"{kind.plural}/{name} in namespace {cluster.namespace} already exists, "
            f"{_owned_by(found)}, and is left as it is"
        )
    if owner is _Owner.THIS_JOB and not _is_ending(found):
        logger.info("replacing %s/%s, which an earlier run planned differently", kind.plural, name)
        cluster.delete(kind, name, uid, patience)
    return f"{kind.plural}/{name} (uid {uid}), {owner.value}"


def _owner(found: Json, train_job: str, owner_uid: str) -> _Owner:
    owners = _owners(found)
    if any(owner["uid"] == owner_uid for owner in owners):
        return _Owner.THIS_JOB
    if owners and all(
        owner["kind"] == Kind.TRAIN_JOB
        and owner["apiVersion"].partition("/")[0] == TRAINER_GROUP
        and owner["name"] == train_job
        for owner in owners
    ):
        return _Owner.DELETED_JOB  # this job has its name now
    return _Owner.OTHER


def _owned_by(found: Json) -> str:
    owners: Iterable[Json] = _owners(found)
    named = [f"{owner['kind']}/{owner['name']} (uid {owner['uid']})" for owner in owners]
    return f"owned by {', '.join(named)}" if named else "without an owner"


def _is_ending(found: Json) -> bool:
    return found["metadata"].get("deletionTimestamp") is not None


def _owners(one: Json) -> list[Json]:
    return one["metadata"].get("ownerReferences") or []
