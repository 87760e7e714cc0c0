"""The load that the environment of a coordinator requests.

Waits for the nodes, loads, reports progress, and then watches the dataset. A dataset that can never
be served again ends the process, so that its user learns why. Callbacks report the result; this
module knows neither signals nor health checks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    StaleVersionError,
    require_ready,
    some_of,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadMeter, LoadReport, OncePerSecond
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.coordinator import Coordinator
from cache_server.secrets import error_text

logger = logging.getLogger(__name__)

_CHECK_S = 0.5  # between two checks of the nodes and the dataset
_JOINED_S = 0.05  # between two looks for nodes that join, at the start
_WAITING_LOG_S = 10.0


class EnvironmentLoad:
    """Loads a dataset in a thread, from `start` until `close`.

    If a version of the same spec was ready before this process, it is reused without a look at the
    source: a cache that restarts during a job serves the same rows.

    A ready dataset fails if lost shards cannot be loaded again. A missing node may bring them back,
    so it is waited for. A load that failed while a node was missing is tried again when the node is
    back: the other nodes may have lacked room for its share.

    Args:
        coordinator: of this process.
        spec: to load.
        num_nodes: to wait for before the load begins.
        join_timeout_s: longest wait for nodes.
        on_ready: called once, when the cache serves the dataset, or when it was dropped.
        on_failure: called at most once, with the error that ends the process; nothing is called
            after it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        spec: DatasetSpec,
        *,
        owner: Principal = ANYONE,
        num_nodes: int,
        join_timeout_s: float,
        on_ready: Callable[[], None],
        on_failure: Callable[[CacheError], None],
    ) -> None:
        self._coordinator = coordinator
        self._spec = spec
        self._owner = owner
        self._num_nodes = num_nodes
        self._join_timeout_s = join_timeout_s
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._was_ready = False  # in this process or before it
        self._lacked_a_node = False  # during a load that was never ready
        self._is_notified = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="environment-load", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stops watching; the coordinator continues the load. Returns whether the thread ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._load()
        except (DatasetNotFoundError, StaleVersionError) as error:
            logger.info("dataset of the environment was dropped reason=%s", error)
            self._become_ready()
        except CacheError as error:
            self._fail(error)
        except error_text.EXITS:
            raise
        except BaseException as error:
            secrets = self._spec.secrets_to_proto()
            logger.error("defect in a load\n%s", error_text.trace(error, secrets))
            self._fail(CacheError(f"defect in the cache node: {error_text.reason(error, secrets)}"))

    def _load(self) -> None:
        info = self._coordinator.attach(self._spec, by=self._owner)
        if info is None:
            if not self._wait_for_nodes():
                return
            info = self._coordinator.create(self._spec, by=self._owner)
        else:
            self._was_ready = True
            logger.info("dataset was ready before, reusing it name=%s", self._spec.name)
        failed_at: float | None = None
        while not self._stop.is_set():
            info = self._wait_until_settled(info)
            if info.state in (pb.DATASET_STATE_READY, pb.DATASET_STATE_EVICTED):
                failed_at = None
                self._become_ready()
                self._wait_for_failure(info.fingerprint)
            elif info.state == pb.DATASET_STATE_FAILED:
                if failed_at is None:
                    failed_at = time.monotonic()
                    logger.error("dataset failed reason=%s", info.error.message)
                info = self._retry_or_fail(info, failed_at)

    def _wait_for_nodes(self) -> bool:
        """Returns True when all nodes joined, False when the wait was stopped."""
        deadline = time.monotonic() + self._join_timeout_s
        logged_at = float("-inf")
        while len(joined := self._joined()) < self._num_nodes:
            now = time.monotonic()
            if now > deadline:
                raise NodeUnavailableError(
                    f"only {len(joined)} of {self._num_nodes} cache nodes joined within "
                    f"{self._join_timeout_s:g} s: {some_of(joined)}"
                )
            if now - logged_at >= _WAITING_LOG_S:
                logged_at = now
                logger.info("waiting for nodes joined=%d wanted=%d", len(joined), self._num_nodes)
            if self._stop.wait(min(_JOINED_S, self._join_timeout_s)):
                return False
        return True

    def _joined(self) -> list[str]:
        """Flight locations of the live nodes that have reported to this process."""
        nodes = self._coordinator.nodes()
        return [node.flight_location for node in nodes if node.alive and node.flight_location]

    def _wait_until_settled(self, info: pb.DatasetInfo) -> pb.DatasetInfo:
        """The dataset when it is ready or failed, or when the wait was stopped."""
        meter, log = LoadMeter(self._spec.name), OncePerSecond(_log)
        latest = info
        for latest in self._coordinator.watch(self._spec.name, info.fingerprint, self._active):
            self._count_missing()
            log(meter.read(latest.progress))
        return latest

    def _active(self) -> bool:
        return not self._stop.is_set()

    def _wait_for_failure(self, fingerprint: str) -> None:
        while not self._stop.wait(_CHECK_S):
            if self._coordinator.failure(self._spec.name, fingerprint) is not None:
                return

    def _retry_or_fail(self, info: pb.DatasetInfo, failed_at: float) -> pb.DatasetInfo:
        """Waits while a missing node may repair the failure, else raises it.

        Returns:
            The dataset; the retried load, if a missing node is back.
        """
        missing = self._count_missing()
        patient = time.monotonic() - failed_at < self._join_timeout_s
        if missing <= 0 and self._lacked_a_node and patient:
            self._lacked_a_node = False
            logger.info("all nodes are back, loading again name=%s", self._spec.name)
            return self._coordinator.create(self._spec, by=self._owner)
        if missing <= 0 or not patient:
            require_ready(info)
        self._stop.wait(_CHECK_S)
        return info

    def _count_missing(self) -> int:
        """Number of missing nodes."""
        missing = self._num_nodes - len(self._joined())
        self._lacked_a_node = not self._was_ready and (self._lacked_a_node or missing > 0)
        return missing

    def _become_ready(self) -> None:
        self._was_ready = True
        if not self._is_notified:
            self._is_notified = True
            self._on_ready()

    def _fail(self, error: CacheError) -> None:
        if not self._stop.is_set():
            self._on_failure(error)


def _log(report: LoadReport) -> None:
    logger.info("%s", report)
