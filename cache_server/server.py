"""The composition root: one cache node made of its parts, started and stopped in order."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from types import TracebackType

import pyarrow as pa

from cache_server.catalogue import Catalogue
from cache_server.config import NodeConfig
from cache_server.control_link import RemoteCoordinator
from cache_server.control_service import ControlService
from cache_server.coordinator import Coordinator
from cache_server.flight_service import FlightService
from cache_server.node import CoordinatorLink, Node
from cache_server.store import ShardStore
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class CacheServer:
    """A running cache node: serves from construction until `close`.

    Raises:
        ConfigError: the directory or a port cannot be used.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        with ExitStack() as stack:
            store = stack.enter_context(
                ShardStore(config.cache_dir.absolute(), config.memory_limit_bytes)
            )
            self._control = ControlService(config.bind, config.control_port)
            try:
                self._flight = FlightService(config.bind, config.flight_port)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(
                    f"cannot listen on Flight port {config.bind}:{config.flight_port}: {error}"
                ) from None
            self.endpoints = pb.CoordinatorEndpoints(
                flight_location=f"grpc://{config.host}:{self._flight.port}",
                control_location=f"{config.host}:{self._control.port}",
            )
            description = pb.Node(
                id=store.node_id,
                flight_location=self.endpoints.flight_location,
                control_location=self.endpoints.control_location,
                cache_dir=str(store.cache_dir),
                memory_limit_bytes=config.memory_limit_bytes or 0,
            )
            self.node_id = store.node_id
            coordinator: Coordinator | None = None
            link: CoordinatorLink
            if config.coordinator is None:
                link = coordinator = Coordinator(
                    Catalogue(store.cache_dir),
                    endpoints=self.endpoints,
                    heartbeat_interval_s=config.heartbeat_interval_s,
                    node_timeout_s=config.node_timeout_s,
                    lease_s=config.lease_s,
                )
            else:
                link = stack.enter_context(RemoteCoordinator(config.coordinator))
            node = stack.enter_context(
                Node(
                    store,
                    link,
                    description,
                    load_threads=config.load_threads,
                    on_ready=self._control.set_ready,
                )
            )
            if coordinator is not None:
                coordinator.listen(node.wake)
            self._flight.attach(node)
            self._control.start(coordinator)
            node.start()
            if coordinator is not None:
                # In this process, so it answers at once; from then on every call is answered.
                node.wait_until_joined(_JOIN_TIMEOUT_S)
            self._parts = stack.pop_all()
        logger.info("node up id=%s flight=%s", self.node_id, self.endpoints.flight_location)

    def __enter__(self) -> CacheServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> bool:
        """Stops; returns whether every Flight call ended within the drain timeout.

        Flight has no way to end a running call from the server, so one that does not end by
        itself lives until the process does.
        """
        deadline = time.monotonic() + self._config.drain_timeout_s
        drained = threading.Event()

        def shut_down() -> None:
            self._flight.shutdown()
            drained.set()

        threading.Thread(target=shut_down, name="drain", daemon=True).start()
        self._control.stop(self._config.drain_timeout_s)
        in_time = drained.wait(max(0.0, deadline - time.monotonic()))
        self._parts.close()
        logger.info("node down id=%s drained=%s", self.node_id, in_time)
        return in_time
