"""The composition root: makes one cache node of its parts, starts and stops them in order."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    NodeUnavailableError,
    UnauthenticatedError,
)
from cache_protocol.storage.memory_budget import expression_memory, loads_at_once
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import TLS_SCHEME, Credentials
from cache_protocol.wire.protocol_version import PROTOCOL
from cache_server.auth.authenticator import Authenticator
from cache_server.auth.caller_log import LOAD, CallerLog
from cache_server.auth.principals import ANYONE, Principal, Viewer
from cache_server.config import NodeConfig
from cache_server.coordinating import Coordinating
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.environment_load import EnvironmentLoad
from cache_server.coordination.holdings.holder_checks import HolderChecks
from cache_server.egress import gate
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.election.cluster_objects import ClusterObjects
from cache_server.election.election import Election
from cache_server.election.etcd import EtcdStore
from cache_server.election.lease import identity
from cache_server.election.objects import ElectionStore
from cache_server.functions.declared import Function
from cache_server.functions.installed import installed
from cache_server.node import peer_files
from cache_server.node.links.coordinator_link import RemoteCoordinator
from cache_server.node.links.link import CoordinatorLink
from cache_server.node.loads.load_functions import NodeFunctions
from cache_server.node.node import Node
from cache_server.node.status import CacheStatus, NodeStatus
from cache_server.node.traffic import Traffic
from cache_server.rpc.control_service import ControlService
from cache_server.rpc.flight_service import FlightService
from cache_server.scratch.scratch import Scratch
from cache_server.shards.huge_pages import HugePages
from cache_server.shards.scrub import Scrub
from cache_server.shards.store import ShardStore
from cache_server.sql.function_runs import FunctionWorkers
from cache_server.web.service import WebService

logger = logging.getLogger(__name__)

_MOST_FUNCTION_WORKERS = 8
_LEAST_FUNCTION_BYTES = 384 << 20  # of address space: a tokenizer of 128,000 tokens takes half
_JOIN_TIMEOUT_S = 10.0
_KEYS_TIMEOUT_S = 20.0  # for the keys of callers, at the start
_MOST_RANKS = 1024  # of a job, on the page: 60 ms
_MIN_STOP_TIMEOUT_S = 0.5  # for each part of a node that stops
_OWN_TOKEN_RETRY_S = 0.5
_LINGER_S = 1.0  # of a coordinator whose shards were moved


class CacheServer:
    """A running cache node: serves from construction until `close`.

    Args:
        config: of this node.
        load: the dataset that a coordinator loads. The node is ready when the cache serves it.
        on_load_failure: called at most once, from another thread, with the reason why ``load`` can
            never be served. The caller should close the server.

    Raises:
        ConfigError: the directory or a port cannot be used.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        load: DatasetSpec | None = None,
        on_load_failure: Callable[[CacheError], None] = lambda error: None,
    ) -> None:
        self._config = config
        self._memory = config.memory()
        self._traffic = Traffic(config.zone or "")
        self._credentials = config.credentials
        self._authenticator = _authenticator(config, self._credentials)
        self._load: EnvironmentLoad | None = None
        self._election: Election | None = None
        load_threads = config.load_threads or loads_at_once(_num_processors())
        with ExitStack() as stack:
            stack.callback(self._authenticator.log.close)
            store = stack.enter_context(
                ShardStore(
                    config.cache_dir.absolute(),
                    self._memory.shard_limit_bytes,
                    adopt_threads=load_threads,
                    address=config.lasting_address,
                )
            )
            self.node_id = store.node_id
            if config.is_coordinator:
                _refuse_shards_of_others(store, Catalogue(_catalogue_dir(config)))
            self._listen(stack)
            sources = AllowedSources(config.allow_source)
            stack.enter_context(gate.opened(sources))
            functions = installed(config.allow_function)
            scratch = _scratch(config, store)
            description = self._description(store, functions)
            if config.scratch_limit_bytes is not None and not self._memory.most_shard_bytes:
                description.prepares_above_bytes = scratch.sizes.above_bytes
            own, link = self._coordinate(stack, description, sources, functions)
            coordinator = None if own is None else own.coordinator
            self._readiness = _Readiness(
                self._control.set_ready, waits=coordinator is not None and load is not None
            )
            self._node = stack.enter_context(
                Node(
                    store,
                    link,
                    description,
                    load_threads=load_threads,
                    memory=self._memory,
                    credentials=self._credentials,
                    sources=sources,
                    functions=stack.enter_context(
                        _node_functions(config, functions, sources, load_threads)
                    ),
                    on_ready=self._readiness.set_node,
                    keep_orphans_s=(
                        math.inf if config.keep_orphans_s is None else config.keep_orphans_s
                    ),
                    scratch=scratch,
                )
            )
            node = self._node  # no reference to this object: gRPC ends with it
            self._huge_pages = stack.enter_context(
                HugePages(store.cache_dir, store.sealed, lambda: not node.is_loading)
            )
            owner = ANYONE
            self._scrub = stack.enter_context(
                Scrub(store.versions, self._node.drop_damaged, config.scrub_interval_s)
            )
            if coordinator is not None and load is not None:
                owner = _own_principal(self._authenticator, self._credentials)
                load = load.renamed(owner.viewer.resolve(load.name))
                coordinator.expect(load.name)
            self._serve(own)
            if coordinator is not None and load is not None:
                self._load = EnvironmentLoad(
                    coordinator,
                    load,
                    owner=owner,
                    num_nodes=config.num_nodes,
                    join_timeout_s=config.join_timeout_s,
                    on_ready=self._readiness.set_loaded,
                    on_failure=on_load_failure,
                )
                self._load.start()
                self._authenticator.log.note(LOAD, owner, "", about={"dataset": load.name})
            self._parts = stack.pop_all()
        logger.info("node up id=%s flight=%s", self.node_id, self.endpoints.flight_location)

    def _listen(self, stack: ExitStack) -> None:
        config = self._config
        access: dict[str, Any] = {
            "authenticator": self._authenticator,
            "tls": self._credentials if config.tls_cert else None,
            "require_client_cert": config.require_client_cert,
        }
        self._control = ControlService(config.listen_host, config.control_port, **access)
        self._web = WebService(config.listen_host, config.http_port, **access)
        stack.callback(self._web.stop)  # if the node does not start
        try:
            self._flight = FlightService(
                config.listen_host,
                config.flight_port,
                self._traffic,
                slow_reader_timeout_s=config.slow_reader_timeout_s,
                memory_bytes=self._memory.all_bytes,
                **access,
            )
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(
                f"cannot listen on Flight port {config.bind}:{config.flight_port}: {error}; if it "
                "is taken, choose another with --flight-port"
            ) from None
        tls = config.tls_cert is not None
        self.page = f"{'https' if tls else 'http'}://{config.host}:{self._web.port}/"
        self.endpoints = pb.CoordinatorEndpoints(
            flight_location=f"{TLS_SCHEME if tls else 'grpc://'}{config.host}:{self._flight.port}",
            control_location=f"{TLS_SCHEME if tls else ''}{config.host}:{self._control.port}",
            page=self.page,
            protocol=PROTOCOL,
        )

    def _description(self, store: ShardStore, functions: Mapping[str, Function]) -> pb.Node:
        return pb.Node(
            id=store.node_id,
            flight_location=self.endpoints.flight_location,
            control_location=self.endpoints.control_location,
            cache_dir=str(store.cache_dir),
            memory_limit_bytes=self._memory.shard_limit_bytes or 0,
            process=uuid.uuid4().hex,
            version=version("trainer-data-cache"),
            name=socket.gethostname(),
            protocol=PROTOCOL,
            functions=[
                pb.NodeFunction(
                    name=each.name, version=each.version, signature=each.signature, text=each.text
                )
                for each in functions.values()
            ],
            zone=self._config.zone or "",
        )

    def _serve(self, own: Coordinating | None) -> None:
        if own is not None:
            own.listen(self._node.wake)
        self._flight.attach(self._node)
        self._control.start(None if own is None else own.required, self._node.description)
        self._node.start()
        self._scrub.start()
        if self._config.huge_pages:
            self._huge_pages.start()
        # Not by this object: it could not be freed, nor gRPC, beside which no process can fork.
        status = _Status(
            self._node, own, self._traffic, self._huge_pages, self._scrub, self._readiness
        )
        self._web.start(status.seen_by, self._readiness.is_ready)
        if self._election is not None:
            self._election.start(self._forget_coordinator)
        elif own is not None:
            # The coordinator of this process answers at once. Then the node serves every call.
            self._node.wait_until_joined(_JOIN_TIMEOUT_S)

    def _coordinate(
        self,
        stack: ExitStack,
        node: pb.Node,
        sources: AllowedSources,
        functions: Mapping[str, Function],
    ) -> tuple[Coordinating | None, CoordinatorLink]:
        """The coordinator that this process has or may have, and the link of the node to it."""
        config = self._config
        make = partial(_coordinator, config, self._credentials, sources, functions, self.endpoints)
        if config.leader_election is not None:
            me = identity(node.control_location, node.process)
            self._election = Election(_election_store(config), me, make, self._credentials)
            stack.enter_context(self._election)
            return self._election.own, self._election.link
        if config.is_coordinator:
            own = stack.enter_context(Coordinating(make, self._credentials))
            return own, own.begin(Catalogue(_catalogue_dir(config)))
        location = f"{TLS_SCHEME if config.tls_cert else ''}{config.coordinator}"
        return None, stack.enter_context(RemoteCoordinator(location, self._credentials))

    def _forget_coordinator(self) -> None:
        """Names no coordinator until one answers: who asks for it asks again."""
        self._node.coordinator = pb.CoordinatorEndpoints()

    def __enter__(self) -> CacheServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leave(self) -> None:
        """Moves the shards of this node to other nodes, for ``leave_timeout_s`` at most.

        It serves meanwhile. Ends early when `close` is called by another thread.
        """
        begun = time.monotonic()
        logger.info("node leaves id=%s timeout_s=%g", self.node_id, self._config.leave_timeout_s)
        reason = self._node.leave(self._config.leave_timeout_s)
        elapsed_s = time.monotonic() - begun
        if reason:
            logger.warning("node ends with shards id=%s reason=%s", self.node_id, reason)
            return
        logger.info("node left id=%s seconds=%.1f", self.node_id, elapsed_s)
        if self._config.is_coordinator and elapsed_s > _LINGER_S:
            # Something was moved. Readers that come here for it still learn where it is.
            time.sleep(_LINGER_S)

    def close(self) -> bool:
        """Stops; returns whether every call, plan and load ended within the drain timeout.

        A server cannot end a running Flight call, and a source that hangs can block a plan or a
        load until the process ends. While a plan or a load runs, the cache directory stays locked.
        """
        deadline = time.monotonic() + self._config.drain_timeout_s
        drained = threading.Event()
        self._readiness.end()
        if self._load is not None:
            self._load.close(0.0)  # first: loads that end now are no failures
        if self._election is not None:
            self._election.close()  # another node coordinates while calls end here
        self._node.stop()

        def shut_down() -> None:
            self._flight.shutdown()
            drained.set()

        threading.Thread(target=shut_down, name="drain", daemon=True).start()
        planned = self._control.stop(self._config.drain_timeout_s)
        self._web.stop()
        in_time = drained.wait(max(0.0, deadline - time.monotonic()))
        in_time &= self._load is None or self._load.close(_left_s(deadline))
        loaded = self._node.close(_left_s(deadline))
        if planned and loaded:
            self._parts.close()
        else:
            what = " and ".join(["plans"] * (not planned) + ["loads"] * (not loaded))
            logger.warning("%s did not end in time id=%s", what, self.node_id)
            in_time = False
        logger.info("node down id=%s drained=%s", self.node_id, in_time)
        return in_time


@dataclass(frozen=True)
class _Status:
    """What the HTTP port shows. Thread-safe."""

    node: Node
    own: Coordinating | None
    traffic: Traffic
    huge_pages: HugePages
    scrub: Scrub
    readiness: _Readiness

    def seen_by(self, viewer: Viewer, job: str) -> NodeStatus:
        """What a viewer sees now, with the ranks of a job; "": of the only one that runs."""
        versions = self.node.versions()
        seen = self.node.versions(viewer)
        node = pb.Node(
            alive=True,
            stored_bytes=sum(version.num_bytes for version in versions),
            stored_shards=sum(version.sealed for version in versions),
        )
        node.MergeFrom(self.node.description)
        cache = None
        coordinator = None if self.own is None else self.own.coordinator
        if coordinator is not None:
            jobs = coordinator.jobs.jobs(viewer=viewer, most_ranks=0)
            live = {each.name for each in jobs if each.live}
            job = job or (live.pop() if len(live) == 1 else "")
            ranks = []
            if job in {each.name for each in jobs}:
                ranks = coordinator.jobs.jobs(job, viewer=viewer, most_ranks=_MOST_RANKS)
            cache = CacheStatus(
                tuple(coordinator.nodes()),
                tuple(coordinator.summaries(viewer)),
                tuple(jobs),
                tuple(ranks),
                len(coordinator.damaged),
                coordinator.evictions.num_evicted,
                coordinator.evictions.bytes_evicted,
            )
        return NodeStatus(
            node=node,
            ready=self.readiness.is_ready(),
            coordinator=self.node.coordinator.control_location,
            coordinator_page=self.node.coordinator.page,
            versions=seen,
            huge_page_bytes=self.huge_pages.num_bytes,
            counts=self.traffic.counts({version.key.dataset for version in versions}).of(
                {version.key.dataset for version in seen}
            ),
            loads_running=sum(version.loading for version in versions),
            scrubbed_bytes=self.scrub.num_bytes,
            orders=self.node.scratch.counts,
            damaged_shards=self.scrub.num_damaged,
            cache=cache,
        )


class _Readiness:
    """Ready once the node can serve and its requested load has been served, until it stops.

    Args:
        tell: called with every change, in order.
        waits: whether a load was requested.
    """

    def __init__(self, tell: Callable[[bool], None], *, waits: bool) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._node = False
        self._loaded = not waits
        self._ends = False

    def set_node(self) -> None:
        """Notes that the node can serve."""
        with self._lock:
            self._node = True
            self._tell(self._is_ready())

    def is_ready(self) -> bool:
        """The last value passed to ``tell``."""
        with self._lock:
            return self._is_ready()

    def set_loaded(self) -> None:
        """Notes that the cache serves the requested load."""
        with self._lock:
            self._loaded = True
            self._tell(self._is_ready())

    def end(self) -> None:
        """Makes the node not ready for good."""
        with self._lock:
            self._ends = True
            self._tell(False)

    def _is_ready(self) -> bool:
        return self._node and self._loaded and not self._ends


def _authenticator(config: NodeConfig, own: Credentials) -> Authenticator:
    """How this node finds out who calls.

    Raises:
        ConfigError: every caller could do everything, and other machines reach the node.
    """
    found = Authenticator(
        config.auth_tokens,
        config.auth_jwt,
        own,
        config.auth_pods,
        config.cluster,
        CallerLog(config.audit_log),
    )
    if not found.is_open:
        return found
    if not (config.is_loopback or config.insecure):
        raise ConfigError(
            f"--bind {config.bind} lets every machine of the network read, load and drop datasets: "
            "set CACHE_TOKEN or CACHE_TOKEN_FILE to a token that nodes and clients share, or give "
            "--auth-tokens, --auth-jwt or --auth-pods; or accept it with --insecure"
        )
    if not config.is_loopback:
        logger.warning("every caller may do everything bind=%s: --insecure is set", config.bind)
    return found


def _own_principal(authenticator: Authenticator, own: Credentials) -> Principal:
    """The principal of this node, which owns the dataset of its environment.

    Raises:
        ConfigError: this node does not accept its own token.
        NodeUnavailableError: the keys of the issuer cannot be fetched.
    """
    if own.current_token() is None:
        return ANYONE
    deadline = time.monotonic() + _KEYS_TIMEOUT_S
    while True:
        try:
            return authenticator.authenticate(dict(own.authorization()), "")
        except UnauthenticatedError as error:
            raise ConfigError(f"this node does not accept its own token: {error}") from None
        except NodeUnavailableError:  # such as while the network of a new pod is set up
            if time.monotonic() > deadline:
                raise
            time.sleep(_OWN_TOKEN_RETRY_S)


def _coordinator(
    config: NodeConfig,
    credentials: Credentials,
    sources: AllowedSources,
    functions: Mapping[str, Function],
    endpoints: pb.CoordinatorEndpoints,
    catalogue: Catalogue,
    term: int,
) -> Coordinator:
    of_term = pb.CoordinatorEndpoints(term=term)
    of_term.MergeFrom(endpoints)
    return Coordinator(
        catalogue,
        sources=sources,
        functions=functions,
        endpoints=of_term,
        heartbeat_interval_s=config.heartbeat_interval_s,
        node_timeout_s=config.node_timeout_s,
        lease_s=config.lease_s,
        checks=HolderChecks(config.scrub_interval_s),
        ask_holder=partial(peer_files.held_shards, credentials=credentials),
        shares=config.namespace_share,
        find_rows=partial(peer_files.find_rows, credentials=credentials),
    )


def _election_store(config: NodeConfig) -> ElectionStore:
    """Where the nodes elect their coordinator."""
    namespace, name = config.lease
    if namespace:
        return ClusterObjects(config.cluster, namespace, name)
    return EtcdStore(config.etcd, name)


def _node_functions(
    config: NodeConfig,
    functions: Mapping[str, Function],
    sources: AllowedSources,
    load_threads: int,
) -> NodeFunctions:
    all_bytes = config.memory().all_bytes
    memory_bytes = max(expression_memory(all_bytes, load_threads).num_bytes, _LEAST_FUNCTION_BYTES)
    count = config.function_workers or min(_num_processors(), _MOST_FUNCTION_WORKERS)
    return NodeFunctions(functions, FunctionWorkers(count, memory_bytes), sources.check_source)


def _scratch(config: NodeConfig, store: ShardStore) -> Scratch:
    folder = store.scratch / "orders"
    if config.scratch_dir is not None:
        folder = config.scratch_dir.absolute() / f".orders-{store.node_id}"
    return Scratch(folder, config.scratch_limit_bytes, config.memory().all_bytes)


def _catalogue_dir(config: NodeConfig) -> Path:
    return (config.catalogue_dir or config.cache_dir).absolute()


def _refuse_shards_of_others(store: ShardStore, catalogue: Catalogue) -> None:
    """Refuses the directory of another cache: a new coordinator would remove its shards."""
    if store.stored_bytes and not catalogue.exists():
        raise ConfigError(
            f"cache_dir {store.cache_dir} holds {store.stored_bytes} bytes of a cache with another "
            "coordinator: set that coordinator, or empty the directory"
        )


def _num_processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _left_s(deadline: float) -> float:
    """Seconds until the deadline, or a short minimum for what should have ended before."""
    return max(_MIN_STOP_TIMEOUT_S, deadline - time.monotonic())
