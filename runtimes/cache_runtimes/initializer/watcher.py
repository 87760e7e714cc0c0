"""Watches a StatefulSet and its pods until they are ready, and after that."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cache_protocol.errors import NotReadyError
from cache_runtimes.initializer.cache_health import CacheHealth, Severity, assess, lacks_pods
from cache_runtimes.initializer.cluster import (
    Cluster,
    ClusterError,
    Patience,
    StoppedError,
    WatchExpiredError,
)
from cache_runtimes.initializer.plan import JOB_LABEL, Json, Kind, Names

_TICK_S = 0.25  # a signal is noticed within it
_EVENTS_EVERY_S = 2.0
_FIRST_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 8.0
_FOREVER = math.inf

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """How long a watcher accepts a transient problem, and the longest silence of its log."""

    failure_grace_s: float
    progress_s: float


@dataclass(frozen=True)
class _Listed:
    kind: Kind
    items: list[Json]


@dataclass(frozen=True)
class _Changed:
    kind: Kind
    type: str
    one: Json


@dataclass
class _Snapshot:
    """The last known objects of the cluster."""

    objects: dict[Kind, dict[str, Json]] = field(default_factory=dict)

    def apply(self, update: _Listed | _Changed) -> None:
        if isinstance(update, _Listed):
            self.objects[update.kind] = {one["metadata"]["name"]: one for one in update.items}
        elif update.type == "DELETED":
            self.objects[update.kind].pop(update.one["metadata"]["name"], None)
        else:
            self.objects[update.kind][update.one["metadata"]["name"]] = update.one

    @property
    def is_complete(self) -> bool:
        """Whether every kind has been listed."""
        return {Kind.STATEFUL_SET, Kind.POD} <= self.objects.keys()


class Watcher:
    """Watches one StatefulSet and its pods; a context manager. ``stop`` ends every wait."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        stateful_set_uid: str,
        timing: Timing,
        stop: threading.Event,
    ) -> None:
        self._cluster = cluster
        self._name = names.cache
        self._uid = stateful_set_uid
        self._timing = timing
        self._stop = stop
        self._closed = threading.Event()
        self._is_used = False
        self._updates: queue.SimpleQueue[_Listed | _Changed | Exception] = queue.SimpleQueue()
        self._snapshot = _Snapshot()
        self._events: list[Json] = []
        self._events_due = 0.0
        self._log = _Log(timing.progress_s)
        self._transient_since: dict[tuple[str, str], float] = {}
        of_job = {"label_selector": f"{JOB_LABEL}={names.train_job}"}
        by_name = {"field_selector": f"metadata.name={names.cache}"}
        self._threads = [
            threading.Thread(
                target=self._watch, args=(kind, selectors), name=f"watch-{kind}", daemon=True
            )
            for kind, selectors in ((Kind.STATEFUL_SET, by_name), (Kind.POD, of_job))
        ]

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # Not joined: each thread ends with its request, or with the process.
        self._closed.set()

    def wait_until_ready(self, patience: Patience) -> None:
        """Waits until every pod is ready.

        Raises:
            LoadError, ConfigError: a cache process exited by one.
            NodeUnavailableError: pods cannot become ready for another reason.
            NotReadyError: at the deadline; names what the pods wait for.
            ClusterError: the StatefulSet is gone, or the cluster refuses the watch.
            StoppedError: the program was told to end.
        """
        began = time.monotonic()
        for health in self._health_changes(patience, self._timing.failure_grace_s):
            if health is not None and health.is_ready:
                logger.info("the cache is ready after %.1f s", time.monotonic() - began)
                return
            if not patience.left_s:
                waited_s = time.monotonic() - began
                state = health if health is not None else "its state could not be read"
                raise NotReadyError(
                    f"the cache is not ready after {waited_s:.0f} s, see CACHE_READY_DEADLINE_S: "
                    f"{state}"
                )

    def stay(self, tell: Callable[[bool], None]) -> NoReturn:
        """Keeps watching, and never returns.

        It waits for a missing pod without a limit: the other pods serve, and trainers wait. It also
        waits while the cluster refuses the watch, such as while a role is replaced; the last known
        health counts until then.

        Args:
            tell: called with whether every pod is ready, first and at every change.

        Raises:
            As `wait_until_ready`, without the deadline, the refused watch and transient problems.
        """
        self._is_used = True
        was_ready: bool | None = None
        for health in self._health_changes(Patience(_FOREVER, self._stop), _FOREVER):
            if health is not None and health.is_ready is not was_ready:
                was_ready = health.is_ready
                tell(was_ready)
        raise AssertionError("health changes have no end")

    def _health_changes(self, patience: Patience, grace_s: float) -> Iterator[CacheHealth | None]:
        """The health after every change and every tick; None before it is known.

        Raises:
            As `wait_until_ready`; a transient problem counts after ``grace_s``.
        """
        while True:
            self._apply_updates(min(_TICK_S, patience.left_s))
            health = self._health(patience) if self._snapshot.is_complete else None
            if health is not None:
                self._log.tell(health)
                self._raise_failure(health, grace_s)
            yield health
            if self._stop.is_set():
                raise StoppedError

    def _apply_updates(self, timeout_s: float) -> None:
        """Waits for an update, and applies all there are."""
        try:
            update = self._updates.get(timeout=timeout_s)
            while True:
                if isinstance(update, Exception):
                    raise update
                self._snapshot.apply(update)
                update = self._updates.get_nowait()
        except queue.Empty:
            pass

    def _health(self, patience: Patience) -> CacheHealth:
        found = self._snapshot.objects[Kind.STATEFUL_SET].get(self._name)
        if (
            found is None
            or found["metadata"]["uid"] != self._uid
            or found["metadata"].get("deletionTimestamp") is not None
        ):
            raise ClusterError(
                f"{Kind.STATEFUL_SET.plural}/{self._name} was deleted while the job needs it"
            )
        pods = list(self._snapshot.objects[Kind.POD].values())
        if lacks_pods(found, pods):
            self._read_events(patience)
        return assess(found, pods, self._events)

    def _read_events(self, patience: Patience) -> None:
        """Reads why pods are not created: only events say it, and they are too many to watch."""
        now = time.monotonic()
        if now < self._events_due:
            return
        selector = f"involvedObject.uid={self._uid},reason=FailedCreate"
        soon = Patience(min(patience.until, now + _EVENTS_EVERY_S), patience.stop)
        try:
            page = self._cluster.list(Kind.EVENT, {"field_selector": selector}, soon)
            self._events = page.items
        except (NotReadyError, ClusterError) as error:
            if isinstance(error, ClusterError) and not self._is_used:
                raise
            logger.warning("%s", error)
        self._events_due = time.monotonic() + _EVENTS_EVERY_S

    def _raise_failure(self, health: CacheHealth, grace_s: float) -> None:
        now = time.monotonic()
        self._transient_since = {
            problem.about: self._transient_since.get(problem.about, now)
            for problem in health.problems
            if problem.severity is Severity.TRANSIENT
        }
        for problem in health.problems:
            since = self._transient_since.get(problem.about, math.inf)
            if problem.severity is Severity.PERMANENT or now - since >= grace_s:
                raise problem.raises(problem.text)

    # -- in threads --------------------------------------------------------------------------------

    def _watch(self, kind: Kind, selectors: dict[str, str]) -> None:
        try:
            self._watch_on(kind, selectors)
        except StoppedError:
            pass
        except Exception as error:
            self._updates.put(error)

    def _watch_on(self, kind: Kind, selectors: dict[str, str]) -> None:
        """Lists, then watches from that version; resumes a broken watch where it broke."""
        version: str | None = None
        back_off_s = _FIRST_BACK_OFF_S
        while not self._closed.is_set():
            try:
                if version is None:
                    page = self._cluster.list(kind, selectors, Patience(_FOREVER, self._closed))
                    version = page.version
                    self._updates.put(_Listed(kind, page.items))
                for happened, one in self._cluster.watch(kind, selectors, version):
                    version = one["metadata"]["resourceVersion"]
                    back_off_s = _FIRST_BACK_OFF_S
                    if happened != "BOOKMARK":
                        self._updates.put(_Changed(kind, happened, one))
                    if self._closed.is_set():
                        return
                continue  # the watch reached its time limit
            except WatchExpiredError as error:
                logger.info("listing %s again: %s", kind.plural, error)
                version = None
            except ClusterError as error:
                if not self._is_used:
                    raise
                logger.warning("listing %s again in %.1f s: %s", kind.plural, back_off_s, error)
                version = None
            except OSError as error:
                logger.info("watching %s again in %.1f s: %s", kind.plural, back_off_s, error)
            self._closed.wait(back_off_s)
            back_off_s = min(2 * back_off_s, _MAX_BACK_OFF_S)


class _Log:
    """Logs a change at once, and an unchanged state from time to time."""

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._logged: tuple[Any, ...] = ()
        self._logged_at = 0.0

    def tell(self, health: CacheHealth) -> None:
        # Without the texts of the problems: some count restarts.
        state = (
            health.ready,
            health.wanted,
            *((problem.about, problem.severity) for problem in health.problems),
        )
        now = time.monotonic()
        due = not health.is_ready and now - self._logged_at >= self._progress_s
        if state != self._logged or due:
            logger.info("%s", health)
            self._logged, self._logged_at = state, now
