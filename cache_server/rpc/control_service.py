"""The gRPC verbs: the coordinator's service on its node, and health on every node.

Each handler parses, calls one function, encodes. An error of the tree travels as a status and,
whole, as the trailer ``cache-error-bin``.

A call holds a thread until it ends. Verbs that wait, for a load or for a source, have threads of
their own: however many callers there are, heartbeats and health are answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cache_protocol.errors import (
    CacheError,
    ConfigError,
    DatasetNotFoundError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    StaleVersionError,
    to_proto,
)
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.control import ERROR_TRAILER, MAX_MESSAGE_BYTES
from cache_server.coordination.coordinator import Coordinator
from cache_server.secrets import error_text

logger = logging.getLogger(__name__)

LIVE, READY = "live", "ready"
_HANDLER_THREADS = 64  # for what is answered at once
_PLANNING_THREADS = 64  # of what is planned: its files are listed, its footers read
_WATCHING_THREADS = 64  # half of them for watches that stay, half for those that answer once
_MIN_PING_INTERVAL_MS = 1_000
_LEAST_WAIT_S = 0.5  # for calls whose end has been told to their callers
_NO_SECRETS = pb.Secrets()

_STATUS: tuple[tuple[type[CacheError], grpc.StatusCode], ...] = (
    (DatasetNotFoundError, grpc.StatusCode.NOT_FOUND),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotReadyError, grpc.StatusCode.UNAVAILABLE),
    (NodeUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StaleVersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (LoadError, grpc.StatusCode.FAILED_PRECONDITION),
)


class ControlService:
    """The gRPC server of one node. Listens from construction, serves from `start` on.

    Args:
        bind: host to listen on.
        port: 0 picks a free one; see ``.port``.
    """

    def __init__(self, bind: str, port: int) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_HANDLER_THREADS, thread_name_prefix="control"),
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                # Callers that watch a load ask now and then whether this node still lives.
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ],
        )
        try:
            self.port = self._server.add_insecure_port(f"{bind}:{port}")
        except RuntimeError:
            raise ConfigError(f"cannot listen on control port {bind}:{port}") from None
        self._planned = _Running()
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_ready(False)
        for service in ("", LIVE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def start(self, coordinator: Coordinator | None) -> None:
        """Serves health, and the coordinator's verbs where there is one."""
        if coordinator is not None:
            servicer = CoordinatorServicer(coordinator, self._planned)
            cache_pb2_grpc.add_CoordinatorServicer_to_server(servicer, self._server)
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """Sets what the health service ``ready`` answers."""
        status = health_pb2.HealthCheckResponse
        self._health.set(READY, status.SERVING if ready else status.NOT_SERVING)

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, gives running ones ``grace_s`` seconds, then ends them.

        Returns:
            Whether nothing is planned any more: a source that hangs does not let go of a thread
            whose call has ended.
        """
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)
        return self._planned.have_ended(_LEAST_WAIT_S)


class CoordinatorServicer(cache_pb2_grpc.CoordinatorServicer):
    """cache.v1.Coordinator over a `Coordinator`.

    Args:
        planned: is told of the calls that look at sources.
    """

    def __init__(self, coordinator: Coordinator, planned: _Running) -> None:
        self._planned = planned
        self._coordinator = coordinator
        self._stays = threading.Semaphore(_WATCHING_THREADS // 2)
        planning = ThreadPoolExecutor(_PLANNING_THREADS, thread_name_prefix="planning")
        watching = ThreadPoolExecutor(_WATCHING_THREADS, thread_name_prefix="watching")
        for verb, threads in (
            ("CreateDataset", planning),
            ("PlanDataset", planning),
            ("WatchDataset", watching),
        ):
            setattr(self, verb, _Apart(getattr(self, verb), threads))

    def CreateDataset(
        self, request: pb.CreateDatasetRequest, context: grpc.ServicerContext
    ) -> pb.CreateDatasetResponse:
        """Starts a load or attaches to it."""
        with self._planned.call(), _statuses(context, request.secrets):
            spec = DatasetSpec.from_proto(request.spec, request.secrets)
            info = self._coordinator.create(spec, refresh=request.refresh)
            return pb.CreateDatasetResponse(dataset=info)

    def PlanDataset(
        self, request: pb.PlanDatasetRequest, context: grpc.ServicerContext
    ) -> pb.PlanDatasetResponse:
        """What a load would come to."""
        with self._planned.call(), _statuses(context, request.secrets):
            forecast = self._coordinator.plan(
                DatasetSpec.from_proto(request.spec, request.secrets),
                num_nodes=request.num_nodes,
                memory_limit_bytes=request.memory_limit_bytes,
            )
            return pb.PlanDatasetResponse(forecast=forecast)

    def GetDataset(
        self, request: pb.GetDatasetRequest, context: grpc.ServicerContext
    ) -> pb.GetDatasetResponse:
        """One dataset."""
        with _statuses(context):
            info = self._coordinator.get(request.name, request.fingerprint, lease=request.lease)
            return pb.GetDatasetResponse(dataset=info)

    def WatchDataset(
        self, request: pb.WatchDatasetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchDatasetResponse]:
        """One dataset at every change, until it is ready or failed.

        Beyond so many watches one ends after its first answer; its caller asks again.
        """
        stays = self._stays.acquire(blocking=False)
        try:
            with _statuses(context):
                active: Callable[[], bool] = context.is_active
                for info in self._coordinator.watch(request.name, request.fingerprint, active):
                    yield pb.WatchDatasetResponse(dataset=info)
                    if not stays:
                        return
        finally:
            if stays:
                self._stays.release()

    def ListDatasets(
        self, request: pb.ListDatasetsRequest, context: grpc.ServicerContext
    ) -> pb.ListDatasetsResponse:
        """One version of every dataset: the newest that has not failed."""
        with _statuses(context):
            return pb.ListDatasetsResponse(datasets=self._coordinator.datasets())

    def DeleteDataset(
        self, request: pb.DeleteDatasetRequest, context: grpc.ServicerContext
    ) -> pb.DeleteDatasetResponse:
        """Forgets a dataset."""
        with _statuses(context):
            self._coordinator.delete(request.name)
            return pb.DeleteDatasetResponse()

    def ListNodes(
        self, request: pb.ListNodesRequest, context: grpc.ServicerContext
    ) -> pb.ListNodesResponse:
        """Every node heard of."""
        with _statuses(context):
            return pb.ListNodesResponse(nodes=self._coordinator.nodes())

    def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        """What a node holds -> what it should hold."""
        with _statuses(context):
            return self._coordinator.heartbeat(request)


class _Running:
    """Counts calls while they run. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def have_ended(self, timeout_s: float) -> bool:
        """Whether none runs, at the latest after so long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, timeout_s)


class _Apart:
    """A handler whose calls run in threads of their own: grpc looks for the attribute.

    Attributes:
        experimental_thread_pool: these threads.
    """

    def __init__(self, handler: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
        self._handler = handler
        self.experimental_thread_pool = threads

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._handler(request, context)


@contextmanager
def _statuses(context: grpc.ServicerContext, secrets: pb.Secrets = _NO_SECRETS) -> Iterator[None]:
    """Turns the error tree into statuses; of what nobody foresaw shows no secret of the request."""
    try:
        yield
    except CacheError as error:
        _abort(context, error)
    except error_text.EXITS:
        raise
    except BaseException as error:
        if not context.is_active():
            raise  # the abort of an inner handler, or a caller that left
        logger.error("defect in a gRPC verb\n%s", error_text.trace(error, secrets))
        reason = error_text.reason(error, secrets)
        _abort(context, CacheError(f"defect in the cache node: {reason}"))


def _abort(context: grpc.ServicerContext, error: CacheError) -> NoReturn:
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    told = to_proto(error)
    context.set_trailing_metadata(((ERROR_TRAILER, told.SerializeToString()),))
    context.abort(status, told.message)
    raise AssertionError("abort raises")
