"""Posts the progress of a load to the status of its TrainJob.

Kubeflow Trainer (2.3, feature gate ``TrainJobStatus``) takes status over HTTP and shows it as
``status.trainerStatus`` of the TrainJob. It sets three variables in the containers:

    KUBEFLOW_TRAINER_SERVER_URL         where to post
    KUBEFLOW_TRAINER_SERVER_CA_CERT     file with the certificates to trust
    KUBEFLOW_TRAINER_SERVER_TOKEN       file with the bearer token; it is renewed, so read each time

``progressPercentage`` and ``estimatedRemainingSeconds`` are about the whole TrainJob. A load at
100 % would look like a finished job, and progress would fall to 0 % when the trainers report. So
during a load the percentage stays 0, the remaining seconds are not set, and the load has metrics:

    cache_load_percent, cache_load_remaining_seconds     if known
    cache_rows, cache_bytes, cache_shards_done, cache_shards_total

A post replaces the whole status, so there must be none once trainers may report. Close this object
when the dataset is ready, and do not create one if it was ready before. A post that was already
sent cannot be cancelled.

The status is optional: a failure to post is logged once and never fails the load.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from cache_protocol.wire.load_progress import LoadReport

logger = logging.getLogger(__name__)

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"

_INTERVAL_S = 5.0
_TIMEOUT_S = 5.0
_LAST_POST_S = 2.0  # how long a finished load waits for its last post


class TrainJobStatus:
    """Posts the latest report of a load in a background thread. Thread-safe; a context manager.

    Args:
        url: where to post.
        ca_file: certificates to trust; None for those of the machine.
        token_file: has the bearer token; None to send none.
        interval_s: the shortest time between two posts.
        timeout_s: of each post.
        closing_s: the longest time that `close` waits.
    """

    def __init__(
        self,
        url: str,
        *,
        ca_file: Path | None = None,
        token_file: Path | None = None,
        interval_s: float = _INTERVAL_S,
        timeout_s: float = _TIMEOUT_S,
        closing_s: float = _LAST_POST_S,
    ) -> None:
        self._url = url
        self._ca_file = ca_file
        self._token_file = token_file
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._closing_s = closing_s
        self._changed = threading.Condition()
        self._latest: LoadReport | None = None
        self._closed = False
        self._is_abandoned = False  # nothing must be sent any more
        self._has_logged = False
        self._thread = threading.Thread(target=self._run, name="trainjob-status", daemon=True)
        self._thread.start()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TrainJobStatus | None:
        """The status of the TrainJob in this environment; None if it takes none."""
        url, ca_file, token_file = (environ.get(name) for name in (URL, CA_CERT, TOKEN))
        if not url:
            return None
        return cls(
            url,
            ca_file=Path(ca_file) if ca_file else None,
            token_file=Path(token_file) if token_file else None,
        )

    def __enter__(self) -> TrainJobStatus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, report: LoadReport) -> None:
        """Posts ``report`` soon, unless a later one replaces it; does not wait.

        Does nothing after `close`.
        """
        with self._changed:
            if not self._closed:
                self._latest = report
                self._changed.notify_all()

    def close(self) -> None:
        """Posts the last report if needed, and ends; waits at most ``closing_s``.

        A report that is not sent by then never is. A post that was sent but not answered may still
        take effect.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(min(self._closing_s, self._timeout_s))
        with self._changed:
            self._is_abandoned = True
            self._latest = None

    # -- in the posting thread -----------------------------------------------------------------

    def _run(self) -> None:
        while (report := self._next()) is not None:
            try:
                self._post(report)
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._log_failure(error)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._interval_s)

    def _next(self) -> LoadReport | None:
        """Waits for the next report to post; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._latest is not None)
            report, self._latest = self._latest, None
            return report

    def _post(self, report: LoadReport) -> None:
        place = urlsplit(self._url)
        headers = {"Content-Type": "application/json"}
        if self._token_file is not None:
            token = self._token_file.read_text(encoding="utf-8").strip()
            headers["Authorization"] = f"Bearer {token}"
        connection = self._connection(place.scheme, place.hostname or "", place.port)
        try:
            path = (place.path or "/") + (f"?{place.query}" if place.query else "")
            connection.connect()
            if self._is_abandoned:
                return
            connection.request("POST", path, json.dumps(status_of(report)), headers)
            response = connection.getresponse()
            response.read()
        finally:
            connection.close()
        # Redirects are not followed: the token is for this server.
        if not 200 <= response.status < 300:
            raise OSError(f"HTTP {response.status} {response.reason}")

    def _connection(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "https":
            context = ssl.create_default_context(
                cafile=str(self._ca_file) if self._ca_file is not None else None
            )
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        raise OSError("it is no http or https URL")

    def _log_failure(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_logged else logging.WARNING
        self._has_logged = True
        # Other messages may quote a header, and so the token.
        reason = error if isinstance(error, OSError) else type(error).__name__
        logger.log(level, "TrainJob status not posted url=%s reason=%s", self._url, reason)


def status_of(report: LoadReport, now_s: float | None = None) -> dict[str, object]:
    """The body of a post: an UpdateTrainJobStatusRequest of Trainer.

    Args:
        now_s: seconds since the epoch; default: now.
    """
    moment = datetime.fromtimestamp(time.time() if now_s is None else now_s, UTC)
    metrics = {
        "cache_load_percent": report.percent,
        "cache_load_remaining_seconds": (
            None if report.remaining_s is None else round(report.remaining_s)
        ),
        "cache_rows": report.num_rows,
        "cache_bytes": report.num_bytes,
        "cache_shards_done": report.shards_done,
        "cache_shards_total": report.shards_total or None,
    }
    return {
        "trainerStatus": {
            "lastUpdatedTime": moment.isoformat(timespec="seconds"),
            "progressPercentage": 0,
            "metrics": [
                {"name": name, "value": str(value)}
                for name, value in metrics.items()
                if value is not None
            ],
        }
    }
