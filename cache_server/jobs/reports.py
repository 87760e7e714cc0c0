"""Reports of readers: what one may say, and those that wait for the next heartbeat of a node."""

from __future__ import annotations

import math
import re
import threading
from typing import Final

from cache_protocol.errors import RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.jobs.shares import Bounds, Owner, Shares

MAX_REPORT_BYTES: Final = 16 * 1024
MAX_NODES: Final = 64  # in a report
_MAX_WORLD_SIZE: Final = 1_000_000
_MAX_NAME: Final = 256
_MAX_NUMBER: Final = 1e15
_MAX_TEXTS: Final = {
    **{"view": 4096, "view_digest": 64, "seed": 128, "order": 512},
    **{"host": 256, "process": 64, "attempt": 256},
}  # characters; each may be empty
_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
# In a heartbeat, which has 32 MiB. A report takes about 600 bytes.
_WAITING_BYTES: Final = Bounds(principal=2 << 20, namespace=4 << 20, total=8 << 20)


def checked_report(report: pb.ReaderReport) -> pb.ReaderReport:
    """Checks a report that came from outside.

    Raises:
        RequestError: quotes what is wrong.
    """
    if report.ByteSize() > MAX_REPORT_BYTES:
        raise RequestError(f"a report has at most {MAX_REPORT_BYTES} bytes")
    if not _NAME.fullmatch(report.job):
        raise RequestError(f"the report has a bad name of a job: {report.job[:64]!r}")
    for name in ("dataset", "run"):
        _check_name(name, getattr(report, name))
    for name, most in _MAX_TEXTS.items():
        value = getattr(report, name)
        if len(value) > most or not value.isprintable():
            raise RequestError(f"the report has a bad {name}: {value[:64]!r}")
    if not report.rank < report.world_size <= _MAX_WORLD_SIZE:
        raise RequestError(f"the report is of rank {report.rank} of {report.world_size}")
    if len(report.nodes) > MAX_NODES:
        raise RequestError(f"a report has at most {MAX_NODES} nodes, got {len(report.nodes)}")
    for node in report.nodes:
        _check_name("node_id", node.node_id)
    for message in (report, *report.nodes):
        for field, number in message.ListFields():
            if isinstance(number, int | float) and not (
                math.isfinite(number) and 0 <= number <= _MAX_NUMBER
            ):
                raise RequestError(f"the report has {field.name}={number}")
    return report


def _check_name(what: str, value: str) -> None:
    if not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise RequestError(f"the report has a bad {what}: {value[:64]!r}")


def owner_of(report: pb.ReaderReport) -> Owner:
    """The principal that sent a report, as the node says that took it."""
    return Owner(report.namespace, report.principal)


def audit_key(report: pb.ReaderReport) -> str:
    """Which pass the audit record of a report is of; empty: it has none."""
    return report.audit.partition(',"dataset"')[0]  # it begins with the numbers of run and pass


class WaitingReports:
    """Reports that wait for a heartbeat of a node that is answered. Thread-safe.

    A report replaces the one before of its reader and pass: sums are since the run began. The bytes
    of each principal and each namespace are bounded; the oldest reports of who sends most are left
    out first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[tuple[object, ...], pb.ReaderReport] = {}  # the oldest first
        self._taken: dict[tuple[object, ...], pb.ReaderReport] = {}
        self._shares: Shares[tuple[object, ...]] = Shares(_WAITING_BYTES)

    def put(self, report: pb.ReaderReport) -> None:
        """Adds a report that was checked."""
        owner = owner_of(report)
        key = (*owner, report.job, report.dataset, report.rank, report.run, audit_key(report))
        with self._lock:
            self._reports.pop(key, None)
            self._reports[key] = report
            for gone in self._shares.put(key, owner, report.ByteSize()):
                del self._reports[gone]

    def take(self) -> list[pb.ReaderReport]:
        """All of them, the oldest first; each is given again until `drop_taken`."""
        with self._lock:
            self._taken = dict(self._reports)
            return list(self._taken.values())

    def drop_taken(self) -> list[pb.ReaderReport]:
        """Forgets and returns those that `take` gave last; one that was replaced since waits on."""
        with self._lock:
            taken, self._taken = self._taken, {}
            for key, report in taken.items():
                if self._reports.get(key) is report:
                    del self._reports[key]
                    self._shares.drop(key)
            return list(taken.values())
