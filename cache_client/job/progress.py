"""`report_progress`: the status of the TrainJob says how far the training is.

Kubeflow Trainer 2.3 takes a status where its feature gate ``TrainJobStatus`` is on: it gives
trainers the address of its status server, the certificate that signed it, and a file with a token.
Elsewhere nothing happens. A thread sends, so that training never waits, and only the newest report.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cache_client.job.ranks import find_rank
from cache_protocol.errors import ConfigError

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_EVERY_S = 5.0
_TIMEOUT_S = 5.0
# The limits of the resource TrainJob; a status beyond them is refused as a whole.
_MOST_METRICS, _MOST_CHARACTERS = 256, 64
_MOST_SECONDS = 2**31 - 1

logger = logging.getLogger(__name__)


def report_progress(
    done: float, total: float, metrics: Mapping[str, float | str] | None = None
) -> bool:
    """Shows in the status of the TrainJob how far the training is.

    Call it on any rank, after each step if you like: rank 0 reports, at most every 5 seconds, and
    the last report when training is done or the process ends. It never waits and never fails a
    training; a status server that does not answer is logged once.

    Args:
        done: steps or epochs since the training began, also those before a resume; a part of an
            epoch counts.
        total: of them.
        metrics: the newest values by name, such as ``{"loss": 0.25}``.

    Returns:
        Whether this process reports: False outside a TrainJob, without the feature gate, and on
        other ranks.

    Raises:
        ConfigError: ``total`` is not positive, or ``done`` is negative or no number.
    """
    if not (math.isfinite(total) and total > 0 and done >= 0):
        raise ConfigError(
            f"done must be at least 0 and total above 0, got done={done!r} total={total!r}"
        )
    sender = _sender()
    if sender is None:
        return False
    sender.take(done, total, metrics or {})
    return True


@dataclass(frozen=True)
class StatusServer:
    """Where Trainer takes the status of this TrainJob.

    Attributes:
        url: of the status.
        ca_file: the certificates that sign the server's; empty: those of the machine.
        token_file: read for each report, because the kubelet renews it.
    """

    url: str
    ca_file: str
    token_file: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> StatusServer | None:
        """As Trainer names it; None where its feature gate is off."""
        environ = os.environ if environ is None else environ
        url, token_file = environ.get(_URL), environ.get(_TOKEN)
        return cls(url, environ.get(_CA) or "", token_file) if url and token_file else None

    def post(self, status: Mapping[str, Any]) -> None:
        """Sends a ``trainerStatus``.

        Raises:
            OSError: it was not taken.
        """
        context = ssl.create_default_context(cafile=self.ca_file or None)
        token = Path(self.token_file).read_text().strip()
        request = urllib.request.Request(  # Trainer names the address
            self.url,
            json.dumps({"trainerStatus": status}).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="POST",
        )
        # No proxy knows the names of a cluster.
        direct = urllib.request.ProxyHandler({})
        opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=context))
        with opener.open(request, timeout=_TIMEOUT_S):
            pass


@dataclass
class Pace:
    """How fast the training is, since the first report of this process."""

    began_s: float | None = None
    began_done: float = 0.0

    def seconds_left(self, done: float, total: float, now_s: float) -> int | None:
        """Seconds until the end; None before two reports differ."""
        if self.began_s is None:
            self.began_s, self.began_done = now_s, done
        if done >= total:
            return 0
        gained, lasted_s = done - self.began_done, now_s - self.began_s
        if gained <= 0 or lasted_s <= 0:
            return None
        return min(_MOST_SECONDS, math.ceil((total - done) * lasted_s / gained))


def trainer_status(
    done: float,
    total: float,
    seconds_left: int | None,
    metrics: Mapping[str, float | str],
    now: datetime,
) -> dict[str, Any]:
    """The ``trainerStatus`` of a TrainJob, within its limits. Pure."""
    status: dict[str, Any] = {
        "progressPercentage": min(100, math.floor(100 * min(done, total) / total)),
        "lastUpdatedTime": now.astimezone(UTC).isoformat(),
    }
    if seconds_left is not None:
        status["estimatedRemainingSeconds"] = seconds_left
    shown = {str(name)[:_MOST_CHARACTERS]: _shown(value) for name, value in metrics.items()}
    kept = [{"name": name, "value": value} for name, value in shown.items() if name and value]
    if kept:
        status["metrics"] = kept[:_MOST_METRICS]
    return status


def _shown(value: object) -> str:
    try:
        text = f"{float(value):.6g}"  # type: ignore[arg-type]  # tensors, too
    except (TypeError, ValueError):
        text = str(value)
    return text[:_MOST_CHARACTERS]


@dataclass
class Sender:
    """Sends the newest status in a thread. Thread-safe.

    Attributes:
        post: sends one; raises OSError.
        every_s: the shortest pause between two, but for the last one.
    """

    post: Callable[[Mapping[str, Any]], None]
    every_s: float = _EVERY_S
    _pace: Pace = field(default_factory=Pace)
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _next: dict[str, Any] | None = None
    _is_urgent: bool = False
    _is_sending: bool = False
    _has_failed: bool = False

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name="progress", daemon=True).start()

    def take(self, done: float, total: float, metrics: Mapping[str, float | str]) -> None:
        """Takes a report in place of one that was not sent yet."""
        with self._condition:
            left = self._pace.seconds_left(done, total, time.monotonic())
            self._next = trainer_status(done, total, left, metrics, datetime.now(UTC))
            self._is_urgent |= done >= total
            self._condition.notify_all()

    def flush(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Sends what was not sent yet, and waits for it."""
        with self._condition:
            self._is_urgent = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._next is None and not self._is_sending, timeout_s)

    def _run(self) -> None:
        sent_s = -math.inf
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._next is not None)
                pause_s = sent_s + self.every_s - time.monotonic()
                self._condition.wait_for(lambda: self._is_urgent, max(0.0, pause_s))
                status, self._next = self._next, None
                self._is_urgent, self._is_sending = False, True
            sent_s = time.monotonic()
            try:
                self.post(status or {})
            except (OSError, ValueError) as error:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning("the TrainJob does not show the progress: %s", error)
            finally:
                with self._condition:
                    self._is_sending = False
                    self._condition.notify_all()


_lock = threading.Lock()
_senders: dict[int, Sender | None] = {}  # by process: a thread does not survive a fork


def _sender() -> Sender | None:
    """That of this process; None where it does not report."""
    with _lock:
        pid = os.getpid()
        if pid not in _senders:
            server = StatusServer.from_env()
            found = Sender(server.post) if server and find_rank().rank == 0 else None
            if found is not None:
                atexit.register(found.flush)
            _senders.clear()
            _senders[pid] = found
        return _senders[pid]
