"""The load that the environment of a coordinator asks for, from its first node to its end.

Waits for the nodes, loads, says how far it is, and watches on: a dataset that can never be served
again is the end of the process, so that whoever started it learns why. It knows neither signals
nor health; what became of the load is told by callbacks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    StaleVersionError,
    require_ready,
)
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import EachSecond, LoadMeter, LoadReport
from cache_protocol.wire.trainjob_status import TrainJobStatus
from cache_server.coordination.coordinator import Coordinator
from cache_server.secrets import error_text

logger = logging.getLogger(__name__)

_CHECK_S = 0.5  # between two looks at who has joined, or whether a dataset failed
_WAITING_LOG_S = 10.0


class EnvironmentLoad:
    """Runs in a thread of its own from `start` on; `close` gives it up.

    A version of the same spec that was ready before this process is attached to as it is: a cache
    that is restarted in the middle of a job goes on with the very rows it had. Anything else is a
    load like any other.

    A dataset that was ready fails later when its lost shards cannot be loaded again. A node that is
    missing may bring them back, so it is waited for as long as for one that joins. So it is where a
    load fails that lacked a node, which is then done again: the share of that node may be what did
    not fit.

    Args:
        coordinator: of this process.
        spec: what to load.
        num_nodes: that are waited for before a load begins.
        join_timeout_s: how long.
        environ: of this process; where a TrainJob takes the status of its load, is told there.
        on_ready: called once, when the whole cache serves the dataset, or when somebody dropped it.
        on_failure: called at most once, with what is to end the process; nothing is called after.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        spec: DatasetSpec,
        *,
        num_nodes: int,
        join_timeout_s: float,
        environ: Mapping[str, str],
        on_ready: Callable[[], None],
        on_failure: Callable[[CacheError], None],
    ) -> None:
        self._coordinator = coordinator
        self._spec = spec
        self._num_nodes = num_nodes
        self._join_timeout_s = join_timeout_s
        self._environ = environ
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._was_ready = False  # in this process or before it
        self._was_short = False  # of a node, at some time of a load that was never ready
        self._told = False
        self._stop = threading.Event()
        self._status = ExitStack()
        self._thread = threading.Thread(target=self._run, name="environment-load", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Gives up watching; the load itself is the coordinator's. Whether the thread ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._status:
                self._load()
        except (DatasetNotFoundError, StaleVersionError) as error:
            logger.info("dataset of the environment is watched no more reason=%s", error)
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
        info = self._coordinator.attach(self._spec)
        if info is None:
            if not self._wait_for_nodes():
                return
            say = self._sayers()
            info = self._coordinator.create(self._spec)
        else:
            self._was_ready = True
            logger.info("dataset was ready before name=%s: it is taken as it is", self._spec.name)
            say = [EachSecond(_log)]  # trainers may have begun to report to their TrainJob
        failed_at: float | None = None
        while not self._stop.is_set():
            info = self._wait_until_settled(info, say)
            if info.state == pb.DATASET_STATE_READY:
                failed_at = None
                self._become_ready()
                say = [EachSecond(_log)]
                self._wait_for_failure(info.fingerprint)
            elif info.state == pb.DATASET_STATE_FAILED:
                if failed_at is None:
                    failed_at = time.monotonic()
                    logger.error("dataset failed reason=%s", info.error.message)
                info = self._bear(info, failed_at)

    def _sayers(self) -> list[Callable[[LoadReport], None]]:
        status = TrainJobStatus.from_env(self._environ)
        if status is None:
            return [EachSecond(_log)]
        return [EachSecond(_log), self._status.enter_context(status).show]

    def _wait_for_nodes(self) -> bool:
        """Returns whether they are there; False when nobody waits any more."""
        deadline = time.monotonic() + self._join_timeout_s
        logged_at = float("-inf")
        while len(joined := self._joined()) < self._num_nodes:
            now = time.monotonic()
            if now > deadline:
                raise NodeUnavailableError(
                    f"only {len(joined)} of {self._num_nodes} cache nodes joined within "
                    f"{self._join_timeout_s:g} s: {', '.join(joined)}"
                )
            if now - logged_at >= _WAITING_LOG_S:
                logged_at = now
                logger.info("waiting for nodes joined=%d wanted=%d", len(joined), self._num_nodes)
            if self._stop.wait(min(_CHECK_S, self._join_timeout_s)):
                return False
        return True

    def _joined(self) -> list[str]:
        """Where the nodes are that are alive and have said so themselves."""
        nodes = self._coordinator.nodes()
        return [node.flight_location for node in nodes if node.alive and node.flight_location]

    def _wait_until_settled(
        self, info: pb.DatasetInfo, say: list[Callable[[LoadReport], None]]
    ) -> pb.DatasetInfo:
        """The dataset once it is ready or failed, or as it is when nobody waits any more."""
        meter = LoadMeter(self._spec.name)
        latest = info
        for latest in self._coordinator.watch(self._spec.name, info.fingerprint, self._active):
            self._note_missing()
            report = meter.read(latest.progress)
            for take in say:
                take(report)
        return latest

    def _active(self) -> bool:
        return not self._stop.is_set()

    def _wait_for_failure(self, fingerprint: str) -> None:
        while not self._stop.wait(_CHECK_S):
            if self._coordinator.failure(self._spec.name, fingerprint) is not None:
                return

    def _bear(self, info: pb.DatasetInfo, failed_at: float) -> pb.DatasetInfo:
        """Waits a moment while a missing node may make up for the failure, else raises.

        Returns:
            The dataset; as it is loaded again, once the node is back that a first load lacked.
        """
        missing = self._note_missing()
        patient = time.monotonic() - failed_at < self._join_timeout_s
        if missing <= 0 and self._was_short and patient:
            self._was_short = False
            logger.info("no node is missing any more: loading again name=%s", self._spec.name)
            return self._coordinator.create(self._spec)
        if missing <= 0 or not patient:
            require_ready(info)
        self._stop.wait(_CHECK_S)
        return info

    def _note_missing(self) -> int:
        """How many nodes are missing now."""
        missing = self._num_nodes - len(self._joined())
        self._was_short = not self._was_ready and (self._was_short or missing > 0)
        return missing

    def _become_ready(self) -> None:
        self._was_ready = True
        if not self._told:
            self._told = True
            self._status.close()  # from now on trainers may report
            self._on_ready()

    def _fail(self, error: CacheError) -> None:
        if not self._stop.is_set():
            self._on_failure(error)


def _log(report: LoadReport) -> None:
    logger.info("%s", report)
