"""The record of callers: a JSON line for each load, write, drop, pin, drain, refusal, first read.

    {"time": "2026-11-28T03:30:00.123+00:00", "event": "load", "principal": "trainer",
     "namespace": "team-a", "address": "ipv4:10.0.0.7:51234", "dataset": "team-a/houses",
     "version": "5d41…", "outcome": "ok"}

Tokens and keys of stores are never in it: a reason is the text that the caller got.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

from cache_protocol.errors import (
    CacheError,
    ConfigError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from cache_server.auth.principals import Principal

logger = logging.getLogger(__name__)

LOAD = "CreateDataset"
_EVENTS: Mapping[str, str] = {
    LOAD: "load",
    "DeleteDataset": "drop",
    "KeepDataset": "keep",
    "BeginWrite": "begin write",
    "CommitWrite": "commit write",
    "AbortWrite": "abort write",
    "DrainNode": "drain",
    "UndrainNode": "undrain",
}
_STDOUT = "-"
_MOST_READS = 100_000  # (principal, version) that are remembered; then a first read may come again


class CallerLog:
    """Writes the record. Thread-safe.

    A file that was moved away is made anew, as rotation needs it. If a line cannot
    be written, the node logs an error, and the call succeeds all the same.

    Args:
        target: a file, to which lines are added; ``-``: standard output; None: no record.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, target: str | None = None) -> None:
        self._handler: logging.Handler | None = None
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str, str], None] = {}
        if target is None:
            return
        try:
            self._handler = (
                logging.StreamHandler(sys.stdout) if target == _STDOUT else _LogFile(target)
            )
        except OSError as error:
            raise ConfigError(f"audit_log cannot be written: {error}") from None

    def note(
        self,
        verb: str,
        principal: Principal | None,
        address: str,
        *,
        about: Mapping[str, str],
        error: CacheError | None = None,
    ) -> None:
        """Records the end of a call, if it is a change or was refused.

        Args:
            verb: a row of `cache_server.auth.verbs`.
            principal: None: unknown.
            address: of the caller; empty: unknown.
            about: ``dataset`` (the name inside the cache), ``version`` (the fingerprint),
                ``write`` and ``node``, as far as they are known.
            error: of a call that failed.
        """
        event = _EVENTS.get(verb.rpartition("/")[2])
        is_refusal = isinstance(error, PermissionDeniedError | UnauthenticatedError)
        if event is not None or is_refusal:
            self._write(event or verb, principal, address, about, error)

    def note_read(self, principal: Principal, address: str, dataset: str, version: str) -> None:
        """Records the first read of a version by a principal on this node."""
        key = principal.name, dataset, version
        if self._handler is None or key in self._read:
            return
        with self._lock:
            if key in self._read:
                return
            self._read[key] = None
            if len(self._read) > _MOST_READS:
                del self._read[next(iter(self._read))]
        self._write("read", principal, address, {"dataset": dataset, "version": version})

    def close(self) -> None:
        """Closes the file."""
        if self._handler is not None:
            self._handler.close()

    def _write(
        self,
        event: str,
        principal: Principal | None,
        address: str,
        about: Mapping[str, str],
        error: CacheError | None = None,
    ) -> None:
        if self._handler is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            "principal": principal.process if principal else "",
            "namespace": principal.namespace if principal else "",
            "address": address,
            **about,
            "outcome": "ok" if error is None else type(error).__name__,
            "reason": "" if error is None else str(error),
        }
        text = json.dumps({name: value for name, value in line.items() if value})
        self._handler.handle(logging.makeLogRecord({"msg": text}))


class _LogFile(WatchedFileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file was moved away, and no other can be made
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        logger.error("audit log not written path=%s reason=%s", self.baseFilename, sys.exception())
