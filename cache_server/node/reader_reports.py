"""Reports of readers on a node: who may send them, and those that wait for the next heartbeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from cache_protocol.datasets.dataset_names import names_in
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal, Viewer
from cache_server.jobs.reports import WaitingReports, checked_report, owner_of
from cache_server.jobs.shares import Rates

_RIGHT_S: Final = 30.0  # as long as a stream outlives a token that was taken away
_MAX_RIGHTS: Final = 4096
_MAX_TOLD: Final = 4096
# As the coordinator takes them of all nodes together.
_REPORTS_PER_S, _BURST = 1000.0, 16_384


class ReaderReports:
    """Takes the reports of readers for the next heartbeat. Thread-safe.

    Args:
        require_seen: raises if a dataset does not exist for a viewer. Of a mixture, it is asked for
            each source. Its answer holds for 30 s.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        require_seen: Callable[[str, Viewer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._require_seen = require_seen
        self._clock = clock
        self._lock = threading.Lock()
        self._rights: dict[tuple[Viewer, str], float] = {}  # until when, the oldest first
        self._rates = Rates(_REPORTS_PER_S, _BURST)
        self._waiting = WaitingReports()
        self._told: dict[tuple[str, str], pb.Disagreement] = {}  # by namespace and run

    def put(self, report: pb.ReaderReport, by: Principal) -> pb.Disagreement | None:
        """Takes a report of a principal; leaves it out if the principal sends too many.

        Returns:
            What the coordinator answered to an earlier report of the reader, if its ranks disagree.

        Raises:
            RequestError: it is no valid report.
            DatasetNotFoundError: its dataset does not exist, or the principal may not read it.
            NotReadyError, NodeUnavailableError: the coordinator does not know, or does not answer.
        """
        asked = report.dataset
        report.namespace, report.principal = by.namespace, by.name
        report.dataset = by.viewer.resolve(asked)
        checked_report(report)
        with self._lock:
            now = self._clock()
            told = self._told.get((report.namespace, report.run))
            if not self._rates.take(owner_of(report), now):
                return told
            is_known = self._rights.get((by.viewer, report.dataset), now) > now
        if not is_known:
            first, *others = names_in(asked)
            if others and others[-1].isdigit():  # how many sources have no room
                others.pop()
            for name in (first, *others):
                self._require_seen(name, by.viewer)
            with self._lock:
                self._rights.pop((by.viewer, report.dataset), None)
                self._rights[by.viewer, report.dataset] = now + _RIGHT_S
                if len(self._rights) > _MAX_RIGHTS:
                    del self._rights[next(iter(self._rights))]
        self._waiting.put(report)
        return told

    def take(self) -> list[pb.ReaderReport]:
        """Those that wait, the oldest first; they wait until their heartbeat is answered."""
        return self._waiting.take()

    def take_answer(self, told: Iterable[pb.Disagreement]) -> None:
        """Takes what the coordinator answered to the reports that were sent last."""
        reports = self._waiting.drop_taken()
        with self._lock:
            for report in reports:
                self._told.pop((report.namespace, report.run), None)
            for each in told:
                self._told[each.namespace, each.run] = each
            while len(self._told) > _MAX_TOLD:
                del self._told[next(iter(self._told))]

    def drop_taken(self) -> None:
        """Forgets what was sent last: the coordinator refused the heartbeat."""
        self._waiting.drop_taken()
