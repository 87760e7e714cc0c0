"""One run: creates a cache, waits for it, stays while it is used, and removes it."""

from __future__ import annotations

import logging
import threading
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NoReturn

from cache_protocol.errors import CacheError
from cache_runtimes.initializer.cache_health import is_disrupted
from cache_runtimes.initializer.cluster import Cluster, ClusterError, Patience, StoppedError
from cache_runtimes.initializer.objects import create_or_adopt, remove_all
from cache_runtimes.initializer.plan import Json, Kind, Names, plan_objects
from cache_runtimes.initializer.settings import Settings
from cache_runtimes.initializer.watcher import Timing, Watcher

REMOVAL_BUDGET_S = 15.0  # of the pod's 60 s grace period

logger = logging.getLogger(__name__)


class Ending(Enum):
    """How a run without an error ended."""

    REMOVED = "told to end; the objects of the job are removed"
    LEFT = "told to end by an eviction; the cache stays for the next pod"


def run(settings: Settings, cluster: Cluster, stop: threading.Event) -> Ending:
    """Runs until ``stop`` is set.

    It removes every object of the TrainJob at its end. After an eviction of this pod the objects
    stay: the next pod adopts them.

    Raises:
        CacheError: the reason why there is no cache; the objects are removed.
    """
    settings.ready_file.unlink(missing_ok=True)
    names = Names(settings.train_job)
    patience = Patience.lasting(settings.ready_deadline_s, stop)
    try:
        train_job = _train_job(settings, cluster, patience)
    except StoppedError:
        return Ending.REMOVED  # nothing was created
    owner_uid = train_job["metadata"]["uid"]
    try:
        _create_and_stay(settings, cluster, names, train_job, patience)
    except StoppedError:
        return _end(settings, cluster, names, owner_uid)
    except BaseException:
        settings.ready_file.unlink(missing_ok=True)
        _remove_all(cluster, names, owner_uid)
        raise


def _create_and_stay(
    settings: Settings, cluster: Cluster, names: Names, train_job: Json, patience: Patience
) -> NoReturn:
    if settings.head_variables:
        logger.info("%s: ignored, there is no head", ", ".join(settings.head_variables))
    uid = train_job["metadata"]["uid"]
    own_pod = _own_pod(
        settings, cluster, patience, otherwise="without its pull secrets, tolerations and user"
    )
    planned = plan_objects(settings, train_job, own_pod)
    pods = [create_or_adopt(cluster, one, uid, patience) for one in planned][-1]
    timing = Timing(failure_grace_s=settings.failure_grace_s, progress_s=settings.progress_s)
    with Watcher(cluster, names, pods["metadata"]["uid"], timing, patience.stop) as watcher:
        watcher.wait_until_ready(patience)
        watcher.stay(partial(_show, settings.ready_file))


def _show(ready_file: Path, ready: bool) -> None:
    """Shows the readiness probe of this pod whether the cache is ready."""
    if ready:
        ready_file.touch()
    else:
        ready_file.unlink(missing_ok=True)


def _own_pod(
    settings: Settings, cluster: Cluster, patience: Patience, *, otherwise: str
) -> Json | None:
    """This pod; None where its name is unknown, or where it cannot be read, which is logged."""
    if settings.pod_name is None:
        return None
    try:
        return cluster.get(Kind.POD, settings.pod_name, patience)
    except CacheError as error:
        logger.warning("%s, since this pod cannot be read: %s", otherwise, error)
        return None


def _train_job(settings: Settings, cluster: Cluster, patience: Patience) -> Json:
    where = f"{Kind.TRAIN_JOB.plural}/{settings.train_job} in namespace {settings.namespace}"
    train_job = cluster.get(Kind.TRAIN_JOB, settings.train_job, patience)
    if train_job is None:
        raise ClusterError(f"{where} does not exist")
    if train_job["metadata"].get("deletionTimestamp") is not None:
        raise ClusterError(f"{where} is being deleted")
    return train_job


def _end(settings: Settings, cluster: Cluster, names: Names, owner_uid: str) -> Ending:
    """Ends the run after the signal.

    Raises:
        CacheError: an object could not be removed.
    """
    settings.ready_file.unlink(missing_ok=True)
    reason = _disruption(settings, cluster)
    if reason is not None:
        logger.info("this pod is disrupted (%s): the cache stays for the next pod", reason)
        return Ending.LEFT
    failures = _remove_all(cluster, names, owner_uid)
    if failures:
        raise ClusterError(f"left behind: {'; '.join(str(failure) for failure in failures)}")
    return Ending.REMOVED


def _disruption(settings: Settings, cluster: Cluster) -> str | None:
    """The reason of a disruption of this pod; None at the end of the job.

    The API writes its evictions (a drain, a preemption) into the pod before the signal. A kubelet
    (a machine short of memory or disk) often writes them after it: such an eviction counts as the
    end of the job, and the next pod creates the cache again.
    """
    patience = Patience.lasting(REMOVAL_BUDGET_S / 3, threading.Event())
    pod = _own_pod(settings, cluster, patience, otherwise="taken for the end of the job")
    return is_disrupted(pod) if pod is not None else None


def _remove_all(cluster: Cluster, names: Names, owner_uid: str) -> tuple[CacheError, ...]:
    # With an event that is never set: a signal does not stop the removal.
    patience = Patience.lasting(REMOVAL_BUDGET_S, threading.Event())
    return remove_all(cluster, names, owner_uid, patience)
