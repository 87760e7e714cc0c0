"""Posts how far a load is to the status of the TrainJob that it belongs to.

Kubeflow Trainer (2.3, feature gate ``TrainJobStatus``) takes status over HTTP and shows it as
``status.trainerStatus`` of the TrainJob. Where it does, it gives its containers three variables:

    KUBEFLOW_TRAINER_SERVER_URL         where to post to
    KUBEFLOW_TRAINER_SERVER_CA_CERT     file: whom to trust there
    KUBEFLOW_TRAINER_SERVER_TOKEN       file: who we are; renewed now and then, so read each time

What a user sees there is about the training: ``progressPercentage`` says how complete the whole
TrainJob is, ``estimatedRemainingSeconds`` when it ends. Loading is neither. A load that is through
with 100 % would look like a job that is through, and progress would fall back to 0 % when the
trainers begin to report. So the percentage stays 0 while a load runs, nothing is said of the time
that the job needs, and the load has metrics of its own:

    cache_load_percent, cache_load_remaining_seconds     where they are known
    cache_rows, cache_bytes, cache_shards_done, cache_shards_total

A post replaces the whole status, so nothing must be posted any more once trainers may report:
whoever uses this closes it when the dataset is ready, and does not begin where it was ready before.
Nothing is posted after that but what was sent before: a post that hangs then cannot be called back.

The status is a courtesy: what goes wrong with it is logged once, and never an error of the load.
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
_LAST_POST_S = 2.0  # that a finished load waits for its last post


class TrainJobStatus:
    """Posts the latest report of a load, in a thread of its own. Thread-safe; a context manager.

    Args:
        url: where to post to.
        ca_file: certificates to trust; None for those of the machine.
        token_file: holds the bearer token; None to send none.
        interval_s: between two posts, at least.
        timeout_s: of each post.
        closing_s: that `close` waits at most.
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
        self._given_up = False  # and no longer waited for
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="trainjob-status", daemon=True)
        self._thread.start()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TrainJobStatus | None:
        """The status of the TrainJob of this environment; None where it takes none."""
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
        """Has ``report`` posted soon, unless a later one comes before; waits for nothing.

        Once this is closed it does nothing.
        """
        with self._changed:
            if not self._closed:
                self._latest = report
                self._changed.notify_all()

    def close(self) -> None:
        """Posts the last report, if it was not yet, and ends; waits a moment for that at most.

        What was not sent by then never is. One post that was sent, and is not answered, may still
        be taken.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(min(self._closing_s, self._timeout_s))
        with self._changed:
            self._given_up = True
            self._latest = None

    # -- in the posting thread -----------------------------------------------------------------

    def _run(self) -> None:
        while (report := self._next()) is not None:
            try:
                self._post(report)
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._complain(error)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._interval_s)

    def _next(self) -> LoadReport | None:
        """The next report to post; None when there is none any more."""
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
            if self._given_up:
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
        raise OSError("it is no http or https address")

    def _complain(self, error: Exception) -> None:
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        # Other texts may quote a header, and with it the token.
        reason = error if isinstance(error, OSError) else type(error).__name__
        logger.log(level, "TrainJob status not posted url=%s reason=%s", self._url, reason)


def status_of(report: LoadReport, now_s: float | None = None) -> dict[str, object]:
    """The body of a post: an UpdateTrainJobStatusRequest of Trainer's API.

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
