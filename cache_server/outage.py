"""The log of a coordinator that does not answer: how long, and without a line a heartbeat."""

from __future__ import annotations

import logging
import time

from protos.errors import CacheError

logger = logging.getLogger(__name__)

_LOG_S = 10.0


class Outage:
    """One thread."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._due = 0.0

    def note(self, error: CacheError, *, joined: bool) -> None:
        """A heartbeat was not answered."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._due = now
        if now >= self._due:
            what = "heartbeat failed" if joined else "waiting for the coordinator to join it"
            logger.warning("%s since_s=%.0f reason=%s", what, now - self._since, error)
            self._due = now + _LOG_S

    def end(self) -> None:
        """One was answered."""
        if self._since is not None:
            waited_s = time.monotonic() - self._since
            logger.info("the coordinator answers after_s=%.1f", waited_s)
            self._since = None
