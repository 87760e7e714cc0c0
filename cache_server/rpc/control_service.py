"""The gRPC verbs: the coordinator's service, and health on every node.

Each handler parses, calls one function, encodes. A `CacheError` becomes a status and the trailer
``cache-error-bin``.

A call occupies a thread until it ends. Verbs that wait for a load or a source have separate
threads, so that heartbeats and health are always answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pyarrow as pa
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import CacheError, ConfigError, RequestError
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.channels import MAX_MESSAGE_BYTES
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_protocol.wire.load_progress import shorten_shards
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.auth.principals import Principal, Role, Viewer
from cache_server.coordination.catalogue_store import CatalogueLostError
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.versions.writes import Chosen, require_small_schema
from cache_server.jobs.job import MOST_RANKS
from cache_server.rpc import planning_slots
from cache_server.rpc.call_threads import PooledHandler, RunningCalls, TimedPool
from cache_server.rpc.callbacks import Callbacks, member_service
from cache_server.rpc.control_calls import CallerInterceptor, abort, caller_of
from cache_server.rpc.planning_slots import PlanningSlots
from cache_server.secrets import error_text

logger = logging.getLogger(__name__)

LIVE, READY = "live", "ready"
_HANDLER_THREADS = 64  # for verbs that do not wait
_HEARTBEAT_THREADS = 8  # they wait for one lock, and a call is dearer with more idle threads
_WATCHING_THREADS = 64  # half for long watches, half for watches that answer once
_MIN_PING_INTERVAL_MS = 1_000
_LEAST_WAIT_S = 0.5  # for calls that were ended
_RANKS_OF_EACH = 16  # where every job is listed
_MOST_KNOWN = 4  # answers that are kept in bytes
_NO_SECRETS = pb.Secrets()


class ControlService:
    """The gRPC server of one node. Listens from construction, serves from `start` on.

    Args:
        bind: host to listen on.
        port: 0 picks a free one; see ``.port``.
        authenticator: of callers; default: every caller may do everything.
        tls: certificate and key to serve TLS with; None: plain text.
        require_client_cert: refuse callers without a certificate of ``tls.tls_ca``.
    """

    def __init__(
        self,
        bind: str,
        port: int,
        authenticator: Authenticator | None = None,
        *,
        tls: Credentials | None = None,
        require_client_cert: bool = False,
    ) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_HANDLER_THREADS, thread_name_prefix="control"),
            interceptors=[CallerInterceptor(authenticator or Authenticator())],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                # Callers that watch a load send keepalive pings.
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ],
        )
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(f"{bind}:{port}")
            else:
                certificates = _certificates(tls, require_client_cert=require_client_cert)
                self.port = self._server.add_secure_port(f"{bind}:{port}", certificates)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on control port {bind}:{port}: if it is taken, choose another with "
                "--control-port"
            ) from None
        self._credentials = tls or NO_CREDENTIALS
        self._planning_calls = RunningCalls()
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_ready(False)
        for service in ("", LIVE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def start(
        self, coordinator: Callable[[], Coordinator] | None, node: pb.Node | None = None
    ) -> None:
        """Serves health, and the coordinator's verbs if this node may have one.

        Args:
            coordinator: that of this node now; raises a CacheError while another node has it.
            node: that this is, which a coordinator asks for; None: no coordinator does.
        """
        if node is not None:
            serving = health_pb2.HealthCheckResponse.SERVING
            self._health.set(member_service(node), serving)
        if coordinator is not None:
            servicer = CoordinatorServicer(
                coordinator, self._planning_calls, Callbacks(self._credentials)
            )
            cache_pb2_grpc.add_CoordinatorServicer_to_server(servicer, self._server)
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """Sets the answer of the health service ``ready``."""
        status = health_pb2.HealthCheckResponse
        self._health.set(READY, status.SERVING if ready else status.NOT_SERVING)

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, gives running ones ``grace_s`` seconds, then ends them.

        Returns:
            Whether planning has ended: a source that hangs occupies its thread after the call.
        """
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)
        return self._planning_calls.have_ended(_LEAST_WAIT_S)


def _certificates(tls: Credentials, *, require_client_cert: bool) -> grpc.ServerCredentials:
    """The certificates of the server; those of renewed files are used for new connections."""

    def configuration() -> Any:
        files = tls.tls_files()
        assert files.key is not None and files.cert is not None
        return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.ca)

    def renewed() -> Any:
        try:
            return configuration()
        except ConfigError as error:
            logger.error("certificate not read again reason=%s", error)
            return None  # keeps the last one

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_cert)


class CoordinatorServicer(cache_pb2_grpc.CoordinatorServicer):
    """cache.v1.Coordinator over a `Coordinator`.

    Args:
        coordinator: see `ControlService.start`.
        planning_calls: counts the calls that read sources.
        callbacks: ask nodes that join.
    """

    def __init__(
        self,
        coordinator: Callable[[], Coordinator],
        planning_calls: RunningCalls,
        callbacks: Callbacks,
    ) -> None:
        self._callbacks = callbacks
        self._planning_calls = planning_calls
        self._current = coordinator
        self._long_watches = threading.Semaphore(_WATCHING_THREADS // 2)
        self._slots = PlanningSlots()
        self._short_maps = _ShortMaps()
        planning = ThreadPoolExecutor(planning_slots.THREADS, thread_name_prefix="planning")
        watching = ThreadPoolExecutor(_WATCHING_THREADS, thread_name_prefix="watching")
        beating = TimedPool(_HEARTBEAT_THREADS, thread_name_prefix="heartbeats")
        self._beating = beating
        for verb, threads in (
            ("CreateDataset", planning),
            ("PlanDataset", planning),
            ("ForgetRows", planning),
            ("WatchDataset", watching),
            ("Heartbeat", beating),
        ):
            setattr(self, verb, PooledHandler(getattr(self, verb), threads))

    @property
    def _coordinator(self) -> Coordinator:
        """The coordinator of this node now.

        Raises:
            NodeUnavailableError: another node has it.
        """
        coordinator = self._current()
        coordinator.watch_backlog(self._beating.waiting_since, self._beating.unread_at)
        return coordinator

    def CreateDataset(
        self, request: pb.CreateDatasetRequest, context: grpc.ServicerContext
    ) -> pb.CreateDatasetResponse:
        """Starts a load or attaches to it."""
        with (
            self._planning_calls.call(),
            _error_statuses(context, request.secrets),
            self._slots.hold(request.spec),
        ):
            caller = caller_of(context)
            principal = caller.principal
            request.spec.name = principal.viewer.resolve(request.spec.name)
            caller.about["dataset"] = request.spec.name
            principal.require_own(request.spec.name, "a load")
            spec = DatasetSpec.from_proto(request.spec, request.secrets)
            info = self._coordinator.create(
                spec, refresh=request.refresh, append=request.append, by=principal
            )
            caller.about["version"] = info.fingerprint
            return pb.CreateDatasetResponse(dataset=info)

    def PlanDataset(
        self, request: pb.PlanDatasetRequest, context: grpc.ServicerContext
    ) -> pb.PlanDatasetResponse:
        """Forecasts a load."""
        with (
            self._planning_calls.call(),
            _error_statuses(context, request.secrets),
            self._slots.hold(request.spec),
        ):
            principal = caller_of(context).principal
            request.spec.name = principal.viewer.resolve(request.spec.name)
            principal.require_own(request.spec.name, "a load")
            forecast = self._coordinator.plan(
                DatasetSpec.from_proto(request.spec, request.secrets),
                num_nodes=request.num_nodes,
                memory_limit_bytes=request.memory_limit_bytes,
                by=principal,
            )
            forecast.spec.name = principal.viewer.shown(forecast.spec.name)
            return pb.PlanDatasetResponse(forecast=forecast)

    def GetDataset(self, request: pb.GetDatasetRequest, context: grpc.ServicerContext) -> Any:
        """One dataset; short shards as bytes, which are made once for all callers."""
        with _error_statuses(context):
            viewer = _viewer(caller_of(context), request.viewer)
            info = self._coordinator.get(
                request.name,
                request.fingerprint,
                lease=request.lease,
                viewer=viewer,
                follow=request.follow if request.HasField("follow") else None,
            )
            if request.known_tag and request.known_tag == info.tag:
                return pb.GetDatasetResponse()
            if request.short_shards:
                return self._short_maps.encode(info)
            return pb.GetDatasetResponse(dataset=info)

    def WatchDataset(
        self, request: pb.WatchDatasetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchDatasetResponse]:
        """One dataset at every change, until it is ready or failed.

        With too many watches at once, one ends after its first answer; its caller retries.
        """
        is_long = self._long_watches.acquire(blocking=False)
        try:
            with _error_statuses(context):
                caller = caller_of(context)

                def active() -> bool:
                    caller.still_allowed()
                    return bool(context.is_active())

                for info in self._coordinator.watch(
                    request.name, request.fingerprint, active, viewer=caller.principal.viewer
                ):
                    yield pb.WatchDatasetResponse(dataset=info)
                    if not is_long:
                        return
        finally:
            if is_long:
                self._long_watches.release()

    def ListDatasets(
        self, request: pb.ListDatasetsRequest, context: grpc.ServicerContext
    ) -> pb.ListDatasetsResponse:
        """One version of every dataset: the newest that has not failed; or orphans or shares."""
        with _error_statuses(context):
            viewer = _viewer(caller_of(context), request.viewer)
            if request.orphans:
                own = _own_viewer(caller_of(context).principal)
                return pb.ListDatasetsResponse(orphans=self._coordinator.orphans(own))
            if request.shares:
                return pb.ListDatasetsResponse(shares=self._coordinator.shares(viewer))
            return pb.ListDatasetsResponse(datasets=self._coordinator.datasets(viewer))

    def DeleteDataset(
        self, request: pb.DeleteDatasetRequest, context: grpc.ServicerContext
    ) -> pb.DeleteDatasetResponse:
        """Forgets a dataset, or what no dataset has."""
        with _error_statuses(context):
            caller = caller_of(context)
            principal = caller.principal
            caller.about["dataset"] = name = principal.viewer.resolve(request.name or "all")
            principal.require_own(name, "a drop")
            if request.orphans:
                own = _own_viewer(principal)
                dropped = self._coordinator.drop_orphans(own, request.name)
                return pb.DeleteDatasetResponse(orphans=dropped)
            self._coordinator.delete(request.name, viewer=principal.viewer)
            return pb.DeleteDatasetResponse()

    def KeepDataset(
        self, request: pb.KeepDatasetRequest, context: grpc.ServicerContext
    ) -> pb.KeepDatasetResponse:
        """Pins a dataset, or sets its priority."""
        with _error_statuses(context):
            caller = caller_of(context)
            principal = caller.principal
            caller.about["dataset"] = name = principal.viewer.resolve(request.name)
            principal.require_own(name, "a pin or a priority")
            info = self._coordinator.keep(
                request.name,
                pinned=request.pinned if request.HasField("pinned") else None,
                priority=request.priority if request.HasField("priority") else None,
                viewer=principal.viewer,
            )
            return pb.KeepDatasetResponse(dataset=info)

    def BeginWrite(
        self, request: pb.BeginWriteRequest, context: grpc.ServicerContext
    ) -> pb.BeginWriteResponse:
        """Begins a write."""
        with _error_statuses(context):
            caller = caller_of(context)
            principal = caller.principal
            request.spec.name = principal.viewer.resolve(request.spec.name)
            caller.about["dataset"] = request.spec.name
            principal.require_own(request.spec.name, "a write")
            require_small_schema(len(request.schema))
            try:
                arriving = schema_from_bytes(request.schema)
            except (ValueError, OSError, pa.ArrowException) as error:
                raise RequestError(f"the schema of the rows cannot be read: {error}") from None
            begun = self._coordinator.begin_write(request, arriving, by=principal)
            caller.about["write"] = begun.write_id
            return begun

    def CommitWrite(
        self, request: pb.CommitWriteRequest, context: grpc.ServicerContext
    ) -> pb.CommitWriteResponse:
        """Makes a version of what was put."""
        with _error_statuses(context):
            wanted = [Chosen(c.partition, c.attempt, c.checksum) for c in request.partitions]
            caller = caller_of(context)
            caller.about["write"] = request.write_id
            outcome = self._coordinator.commit_write(request.write_id, wanted, by=caller.principal)
            if isinstance(outcome, pb.DatasetInfo):
                name = caller.principal.viewer.resolve(outcome.spec.name)
                caller.about |= {"dataset": name, "version": outcome.fingerprint}
                return pb.CommitWriteResponse(dataset=outcome)
            return pb.CommitWriteResponse(lost=outcome)

    def AbortWrite(
        self, request: pb.AbortWriteRequest, context: grpc.ServicerContext
    ) -> pb.AbortWriteResponse:
        """Ends a write without a version."""
        with _error_statuses(context):
            caller = caller_of(context)
            caller.about["write"] = request.write_id
            self._coordinator.abort_write(request.write_id, by=caller.principal)
            return pb.AbortWriteResponse()

    def GetWriteSchema(
        self, request: pb.GetWriteSchemaRequest, context: grpc.ServicerContext
    ) -> pb.GetWriteSchemaResponse:
        """The schema of an open write, for a node."""
        with _error_statuses(context):
            schema = self._coordinator.write_schema(request.write_id)
            return pb.GetWriteSchemaResponse(schema=schema)

    def ListNodes(
        self, request: pb.ListNodesRequest, context: grpc.ServicerContext
    ) -> pb.ListNodesResponse:
        """Every known node."""
        with _error_statuses(context):
            return pb.ListNodesResponse(nodes=self._coordinator.nodes(), now_s=time.time())

    def DrainNode(
        self, request: pb.DrainNodeRequest, context: grpc.ServicerContext
    ) -> pb.DrainNodeResponse:
        """Begins to move the shards of a node away."""
        with _error_statuses(context):
            caller_of(context).about["node"] = request.node
            return pb.DrainNodeResponse(node=self._coordinator.drain(request.node))

    def UndrainNode(
        self, request: pb.UndrainNodeRequest, context: grpc.ServicerContext
    ) -> pb.UndrainNodeResponse:
        """Lets a node take shards again."""
        with _error_statuses(context):
            caller_of(context).about["node"] = request.node
            return pb.UndrainNodeResponse(node=self._coordinator.undrain(request.node))

    def ListJobs(
        self, request: pb.ListJobsRequest, context: grpc.ServicerContext
    ) -> pb.ListJobsResponse:
        """Jobs that read from the cache."""
        with _error_statuses(context):
            viewer = caller_of(context).principal.viewer
            jobs = self._coordinator.jobs.jobs(
                request.name,
                viewer=viewer,
                most_ranks=MOST_RANKS if request.name else _RANKS_OF_EACH,
                audits=request.audits,
            )
            return pb.ListJobsResponse(jobs=jobs)

    def ForgetRows(
        self, request: pb.ForgetRowsRequest, context: grpc.ServicerContext
    ) -> pb.ForgetRowsResponse:
        """Erases rows in all versions of a dataset."""
        with _error_statuses(context):
            caller = caller_of(context)
            principal = caller.principal
            caller.about["dataset"] = name = principal.viewer.resolve(request.name)
            principal.require_own(name, "an erasure")
            act = self._coordinator.forget(request, principal)
            caller.about["act"] = str(act.number)
            return pb.ForgetRowsResponse(act=act)

    def ListForgotten(
        self, request: pb.ListForgottenRequest, context: grpc.ServicerContext
    ) -> pb.ListForgottenResponse:
        """The acts that forgot rows."""
        with _error_statuses(context):
            own = _own_viewer(caller_of(context).principal)
            coordinator = self._coordinator
            return pb.ListForgottenResponse(
                acts=coordinator.forgotten(request.name, request.number, own),
                public_key=coordinator.attestation_key(),
            )

    def GetTombstones(
        self, request: pb.GetTombstonesRequest, context: grpc.ServicerContext
    ) -> pb.GetTombstonesResponse:
        """The hashes of rows that loads leave out, for a node."""
        with _error_statuses(context):
            return self._coordinator.tombstones(request.dataset)

    def GetErasedRows(
        self, request: pb.GetErasedRowsRequest, context: grpc.ServicerContext
    ) -> pb.GetErasedRowsResponse:
        """The rows of a version that were forgotten."""
        with _error_statuses(context):
            viewer = _viewer(caller_of(context), request.viewer)
            return self._coordinator.erased_rows(
                request.dataset, request.fingerprint, request.start, viewer
            )

    def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        """Takes a node's report, answers what it should hold."""
        with _error_statuses(context):
            host, coordinator = "", self._coordinator
            if not coordinator.knows(request.node.id):
                host = self._callbacks.ask(request.node, context.peer())
            answer = coordinator.heartbeat(request, by=caller_of(context).principal, host=host)
            if self._current() is not coordinator:
                raise CatalogueLostError  # files would go that a later coordinator wants
            return answer


def _own_viewer(principal: Principal) -> Viewer:
    """Sees what the caller may drop."""
    return Viewer(principal.namespace, sees_all=Role.ADMIN in principal.roles)


def _viewer(caller: Caller, asked: pb.Viewer) -> Viewer:
    """Whose datasets a caller sees: a node asks for the callers that it serves."""
    own = caller.principal.viewer
    if own.sees_all and asked.namespace:
        return Viewer(asked.namespace, sees_all=asked.sees_all)
    return own


class _ShortMaps:
    """Answers with short shards, in bytes. Thread-safe.

    All nodes ask for the same few, and 100,000 shards take several megabytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], bytes] = {}  # by the name and the tag

    def encode(self, info: pb.DatasetInfo) -> bytes:
        """The answer of `GetDataset`."""
        key = info.spec.name, info.tag
        with self._lock:
            if key not in self._known:
                short = pb.GetDatasetResponse(dataset=info)
                shorten_shards(short.dataset)
                self._known[key] = short.SerializeToString()
                for old in [*self._known][:-_MOST_KNOWN]:
                    del self._known[old]
            return self._known[key]


@contextmanager
def _error_statuses(
    context: grpc.ServicerContext, secrets: pb.Secrets = _NO_SECRETS
) -> Iterator[None]:
    """Turns errors into statuses; hides the secrets of the request in unexpected errors.

    The end of the call goes to the record of callers.
    """
    try:
        yield
        caller_of(context).note()
    except CacheError as error:
        caller_of(context).note(error)
        abort(context, error)
    except error_text.EXITS:
        raise
    except BaseException as error:
        if not context.is_active():
            raise  # the abort of an inner handler, or a caller that left
        logger.error("defect in a gRPC verb\n%s", error_text.trace(error, secrets))
        reason = error_text.reason(error, secrets)
        abort(context, CacheError(f"defect in the cache node: {reason}"))
