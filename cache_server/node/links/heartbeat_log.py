"""Logs a coordinator that does not answer, without a line for each heartbeat."""

from __future__ import annotations

import logging
import time

from cache_protocol.errors import CacheError

logger = logging.getLogger(__name__)

_LOG_S = 10.0
_START_S = 1.0  # nodes that start together with their coordinator log nothing


class HeartbeatLog:
    """Logs unanswered heartbeats, and the first answer after them. One thread."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._due = 0.0
        self._has_logged = False

    def record_failure(self, error: CacheError, *, joined: bool) -> None:
        """A heartbeat was not answered."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._due = now if joined else now + _START_S
        if now >= self._due:
            what = "heartbeat failed" if joined else "waiting for the coordinator"
            logger.warning("%s since_s=%.0f reason=%s", what, now - self._since, error)
            self._due, self._has_logged = now + _LOG_S, True

    def record_answer(self) -> None:
        """A heartbeat was answered."""
        if self._since is not None:
            if self._has_logged:
                waited_s = time.monotonic() - self._since
                logger.info("coordinator answers after_s=%.1f", waited_s)
            self._since, self._has_logged = None, False
