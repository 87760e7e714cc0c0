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
_MAX_VIEW: Final = 4096
_MAX_NUMBER: Final = 1e15
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
    for name in ("view", "view_digest"):
        if len(getattr(report, name)) > _MAX_VIEW:
            raise RequestError(f"{name} of a report has at most {_MAX_VIEW} characters")
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
    """Reports that wait for the next heartbeat of a node. Thread-safe.

    A report replaces the one before of its reader and pass: sums are since the run began. The bytes
    of each principal and each namespace are bounded; the oldest reports of who sends most are left
    out first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._reports: dict[tuple[object, ...], pb.ReaderReport] = {}
        self._shares: Shares[tuple[object, ...]] = Shares(_WAITING_BYTES)

    def put(self, report: pb.ReaderReport, *, is_older: bool = False) -> None:
        """Adds a report that was checked.

        Args:
            is_older: it was taken before, and is left out if there is a later one.
        """
        owner = owner_of(report)
        key = (*owner, report.job, report.dataset, report.rank, report.run, audit_key(report))
        with self._lock:
            if is_older and key in self._reports:
                return
            self._reports[key] = report
            for gone in self._shares.put(key, owner, report.ByteSize()):
                del self._reports[gone]

    def take(self) -> list[pb.ReaderReport]:
        """All of them, the oldest first; none waits afterwards."""
        with self._lock:
            reports = list(self._reports.values())
            self._clear()
            return reports
