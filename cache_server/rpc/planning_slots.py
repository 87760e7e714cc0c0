"""Shares the threads that plan loads among the hosts of the sources.

A plan reads its source in the thread of its call. A server that never answers would take every
thread, so that all other loads would wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb

_RUNNING, _WAITING = 32, 96  # calls of one host
THREADS = 4 * (_RUNNING + _WAITING)  # so many calls occupy a thread at most for three hosts
_WAIT_S = 30.0


class PlanningSlots:
    """Running and waiting plans of each host. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def hold(self, spec: pb.DatasetSpec) -> Iterator[None]:
        """Waits for a slot of every host of the sources, and holds it.

        Raises:
            NodeUnavailableError: too many calls wait, or none ended in time; names the host.
        """
        taken: list[str] = []
        try:
            for host in sorted(hosts_of(spec)):  # one order, so that no two calls block each other
                self._take(host)
                taken.append(host)
            yield
        finally:
            with self._changed:
                self._running.subtract(taken)
                self._running = +self._running
                self._changed.notify_all()

    def _take(self, host: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        with self._changed:
            if self._running[host] >= _RUNNING and self._waiting[host] >= _WAITING:
                raise _refused(host, f"and {_WAITING} wait")
            self._waiting[host] += 1
            try:
                while self._running[host] >= _RUNNING:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise _refused(host, f"and none ended within {_WAIT_S:g} s")
                    self._changed.wait(left_s)
                self._running[host] += 1
            finally:
                self._waiting[host] -= 1


def hosts_of(spec: pb.DatasetSpec) -> set[str]:
    """The hosts or buckets of the sources of a spec; empty text: the files of the node."""
    hosts = set()
    for table in spec.tables:
        for text in (*table.source, *table.options.values()):
            if "://" in text:
                hosts.add(_host_of(text))
    return hosts or {""}


def _host_of(uri: str) -> str:
    try:
        return urlsplit(uri).netloc.rpartition("@")[2].lower()
    except ValueError:  # it will be refused
        return ""


def _refused(host: str, why: str) -> NodeUnavailableError:
    return NodeUnavailableError(
        f"{_RUNNING} loads from {host or 'the files of the node'!r} are being planned, the most at "
        f"once, {why}: try again later"
    )
