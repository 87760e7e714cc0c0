"""One run: makes a cache, waits for it, stays while it is used, and removes it."""

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
from cache_runtimes.initializer.making import make, remove
from cache_runtimes.initializer.plan import Json, Kind, Names, plan_objects
from cache_runtimes.initializer.settings import Settings
from cache_runtimes.initializer.waiting import Pace, Watcher

REMOVAL_BUDGET_S = 15.0  # of the 60 s that its runtime gives the pod to end

logger = logging.getLogger(__name__)


class Ending(Enum):
    """How a run ended that did not fail."""

    REMOVED = "told to end, and what belonged to the job is removed"
    LEFT = (
        "told to end by an eviction, and the cache stays for the pod that comes in this one's place"
    )


def run(settings: Settings, cluster: Cluster, stop: threading.Event) -> Ending:
    """Runs until ``stop`` is set.

    Whatever happens, nothing of the TrainJob is left behind, unless this very pod is evicted while
    the job goes on: its replacement adopts what is there.

    Raises:
        CacheError: the reason why there is no cache. What belonged to the TrainJob is removed.
    """
    settings.ready_file.unlink(missing_ok=True)
    names = Names(settings.train_job)
    patience = Patience.lasting(settings.ready_deadline_s, stop)
    try:
        train_job = _train_job(settings, cluster, patience)
    except StoppedError:
        return Ending.REMOVED  # nothing was made
    owner_uid = train_job["metadata"]["uid"]
    try:
        _make_and_stay(settings, cluster, names, train_job, patience)
    except StoppedError:
        return _end(settings, cluster, names, owner_uid)
    except BaseException:
        settings.ready_file.unlink(missing_ok=True)
        _remove(cluster, names, owner_uid)
        raise


def _make_and_stay(
    settings: Settings, cluster: Cluster, names: Names, train_job: Json, patience: Patience
) -> NoReturn:
    if settings.head_variables:
        logger.info("%s: not used, there is no head", ", ".join(settings.head_variables))
    uid = train_job["metadata"]["uid"]
    own_pod = _own_pod(settings, cluster, patience, otherwise="without pull secrets or tolerations")
    planned = plan_objects(settings, train_job, own_pod)
    pods = [make(cluster, one, uid, patience) for one in planned][-1]
    pace = Pace(failure_grace_s=settings.failure_grace_s, progress_s=settings.progress_s)
    with Watcher(cluster, names, pods["metadata"]["uid"], pace, patience.stop) as watcher:
        watcher.wait_until_ready(patience)
        watcher.stay(partial(_show, settings.ready_file))


def _show(ready_file: Path, ready: bool) -> None:
    """Whether the cache is ready, to the readiness probe of this pod."""
    if ready:
        ready_file.touch()
    else:
        ready_file.unlink(missing_ok=True)


def _own_pod(
    settings: Settings, cluster: Cluster, patience: Patience, *, otherwise: str
) -> Json | None:
    """This pod; None where its name is not given, and where it cannot be read, which is told."""
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
        raise ClusterError(f"there is no {where}")
    if train_job["metadata"].get("deletionTimestamp") is not None:
        raise ClusterError(f"{where} is being deleted")
    return train_job


def _end(settings: Settings, cluster: Cluster, names: Names, owner_uid: str) -> Ending:
    """After the signal.

    Raises:
        CacheError: something could not be removed.
    """
    settings.ready_file.unlink(missing_ok=True)
    reason = _disruption(settings, cluster)
    if reason is not None:
        logger.info("this pod is disrupted (%s): the cache is left for its replacement", reason)
        return Ending.LEFT
    failures = _remove(cluster, names, owner_uid)
    if failures:
        raise ClusterError(f"left behind: {'; '.join(str(failure) for failure in failures)}")
    return Ending.REMOVED


def _disruption(settings: Settings, cluster: Cluster) -> str | None:
    """Why this pod is taken from its node, if it is; a job that ends deletes it without a reason.

    The evictions of the API (a drain, a preemption) are written into the pod before the signal is
    sent, those of a kubelet (a machine short of memory or disk) often only after it: such a one
    counts as the end of the job, and the next pod makes the cache anew.
    """
    patience = Patience.lasting(REMOVAL_BUDGET_S / 3, threading.Event())
    pod = _own_pod(settings, cluster, patience, otherwise="taken for the end of the job")
    return is_disrupted(pod) if pod is not None else None


def _remove(cluster: Cluster, names: Names, owner_uid: str) -> tuple[CacheError, ...]:
    # Whether or not the program was told to end: this is what is left to do.
    patience = Patience.lasting(REMOVAL_BUDGET_S, threading.Event())
    return remove(cluster, names, owner_uid, patience)
