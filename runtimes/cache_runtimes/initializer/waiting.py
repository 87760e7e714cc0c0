"""Waits on a StatefulSet and its pods by watching them, and says what it sees."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cache_protocol.errors import NotReadyError
from cache_runtimes.initializer.cache_health import CacheHealth, Hope, judge, lacks_pods
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
_FOREVER = float("inf")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How patient the wait is, and how talkative.

    Attributes:
        failure_grace_s: how long something that may pass within moments may last.
        progress_s: the longest silence of the log.
    """

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
class _View:
    """What is known of the cluster by now."""

    objects: dict[Kind, dict[str, Json]] = field(default_factory=dict)

    def take(self, news: _Listed | _Changed) -> None:
        if isinstance(news, _Listed):
            self.objects[news.kind] = {one["metadata"]["name"]: one for one in news.items}
        elif news.type == "DELETED":
            self.objects[news.kind].pop(news.one["metadata"]["name"], None)
        else:
            self.objects[news.kind][news.one["metadata"]["name"]] = news.one

    @property
    def is_whole(self) -> bool:
        """Whether every kind has been listed."""
        return {Kind.STATEFUL_SET, Kind.POD} <= self.objects.keys()


class Watcher:
    """Watches one StatefulSet and its pods; a context manager.

    Args:
        stop: ends every wait when it is set.
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        stateful_set_uid: str,
        pace: Pace,
        stop: threading.Event,
    ) -> None:
        self._cluster = cluster
        self._name = names.cache
        self._uid = stateful_set_uid
        self._pace = pace
        self._stop = stop
        self._closed = threading.Event()
        self._is_used = False
        self._news: queue.SimpleQueue[_Listed | _Changed | Exception] = queue.SimpleQueue()
        self._view = _View()
        self._events: list[Json] = []
        self._events_due = 0.0
        self._log = _Log(pace.progress_s)
        self._stuck_since: dict[tuple[str, str], float] = {}
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
        # They are not waited for: each ends with its request, or with the process.
        self._closed.set()

    def wait_until_ready(self, patience: Patience) -> None:
        """Returns once every pod is ready.

        Raises:
            CacheError: they cannot become ready, by their own reasons: LoadError and ConfigError
                as a pod exited, NodeUnavailableError for the rest.
            NotReadyError: at the deadline; with what they wait for.
            ClusterError: the StatefulSet is gone, or the cluster refuses to be asked.
            StoppedError: the program was told to end.
        """
        began = time.monotonic()
        for verdict in self._verdicts(patience, self._pace.failure_grace_s):
            if verdict is not None and verdict.is_ready:
                logger.info("the cache is ready after %.1f s", time.monotonic() - began)
                return
            if not patience.left_s:
                waited_s = time.monotonic() - began
                told = verdict if verdict is not None else "its state could not be read"
                raise NotReadyError(
                    f"the cache is not ready after {waited_s:.0f} s, see CACHE_READY_DEADLINE_S: "
                    f"{told}"
                )

    def stay(self, tell: Callable[[bool], None]) -> NoReturn:
        """Watches on, and never returns.

        A pod that is away is waited for, however long its image cannot be pulled: the others serve
        on, and trainers wait. So is a cluster that refuses to be asked, as while a role is made
        anew: what is known of the cache counts until then.

        Args:
            tell: is told whether every pod is ready, first and at every change.

        Raises:
            As `wait_until_ready`, but for the deadline, a refusal to be asked and what may pass.
        """
        self._is_used = True
        was_ready: bool | None = None
        for verdict in self._verdicts(Patience(_FOREVER, self._stop), _FOREVER):
            if verdict is not None and verdict.is_ready is not was_ready:
                was_ready = verdict.is_ready
                tell(was_ready)
        raise AssertionError("verdicts have no end")

    def _verdicts(self, patience: Patience, grace_s: float) -> Iterator[CacheHealth | None]:
        """The state after every change, and now and then; None before it is known.

        Raises:
            As `wait_until_ready`; what may pass, after it has lasted ``grace_s``.
        """
        while True:
            self._take_news(min(_TICK_S, patience.left_s))
            verdict = self._verdict(patience) if self._view.is_whole else None
            if verdict is not None:
                self._log.tell(verdict)
                self._raise_failure(verdict, grace_s)
            yield verdict
            if self._stop.is_set():
                raise StoppedError

    def _take_news(self, timeout_s: float) -> None:
        """What came meanwhile; waits for the first."""
        try:
            news = self._news.get(timeout=timeout_s)
            while True:
                if isinstance(news, Exception):
                    raise news
                self._view.take(news)
                news = self._news.get_nowait()
        except queue.Empty:
            pass

    def _verdict(self, patience: Patience) -> CacheHealth:
        found = self._view.objects[Kind.STATEFUL_SET].get(self._name)
        if (
            found is None
            or found["metadata"]["uid"] != self._uid
            or found["metadata"].get("deletionTimestamp") is not None
        ):
            raise ClusterError(
                f"{Kind.STATEFUL_SET.plural}/{self._name} was deleted while the job needs it"
            )
        pods = list(self._view.objects[Kind.POD].values())
        if lacks_pods(found, pods):
            self._read_events(patience)
        return judge(found, pods, self._events)

    def _read_events(self, patience: Patience) -> None:
        """Why pods are not made is told by events alone. They are many, so they are not watched."""
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

    def _raise_failure(self, verdict: CacheHealth, grace_s: float) -> None:
        now = time.monotonic()
        stuck = {problem.about for problem in verdict.problems if problem.hope is Hope.STUCK}
        self._stuck_since = {about: self._stuck_since.get(about, now) for about in stuck}
        for problem in verdict.problems:
            since = self._stuck_since.get(problem.about, now)
            if problem.hope is Hope.NONE or (problem.hope is Hope.STUCK and now - since >= grace_s):
                raise problem.raises(problem.text)

    # -- in threads --------------------------------------------------------------------------------

    def _watch(self, kind: Kind, selectors: dict[str, str]) -> None:
        try:
            self._watch_on(kind, selectors)
        except StoppedError:
            pass
        except Exception as error:
            self._news.put(error)

    def _watch_on(self, kind: Kind, selectors: dict[str, str]) -> None:
        """Lists, and watches from there; after a break from where it broke, if that is known."""
        version: str | None = None
        back_off_s = _FIRST_BACK_OFF_S
        while not self._closed.is_set():
            try:
                if version is None:
                    page = self._cluster.list(kind, selectors, Patience(_FOREVER, self._closed))
                    version = page.version
                    self._news.put(_Listed(kind, page.items))
                for happened, one in self._cluster.watch(kind, selectors, version):
                    version = one["metadata"]["resourceVersion"]
                    back_off_s = _FIRST_BACK_OFF_S
                    if happened != "BOOKMARK":
                        self._news.put(_Changed(kind, happened, one))
                    if self._closed.is_set():
                        return
                continue  # it ended by itself
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
    """Says what is new at once, and what is not now and then."""

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._said: tuple[Any, ...] = ()
        self._said_at = 0.0

    def tell(self, verdict: CacheHealth) -> None:
        # Not by the words of the problems: some count up.
        state = (
            verdict.ready,
            verdict.wanted,
            *((problem.about, problem.hope) for problem in verdict.problems),
        )
        now = time.monotonic()
        due = not verdict.is_ready and now - self._said_at >= self._progress_s
        if state != self._said or due:
            logger.info("%s", verdict)
            self._said, self._said_at = state, now
