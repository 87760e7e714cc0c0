"""Finds out in the background whether failed nodes answer again, and where the shards are now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from cache_client.background_task import CALL_TIMEOUT_S, BackgroundTask
from cache_client.node_health import NodeHealth
from cache_client.node_streams import NodeStreams
from cache_client.routing import ShardMap
from cache_protocol.errors import CacheError, NodeUnavailableError, NotReadyError

logger = logging.getLogger(__name__)


class NodeProbe:
    """Probes failed nodes, so that no window waits for a node that is still gone. Thread-safe.

    Args:
        streams: for connections to nodes; once they are closed, nothing is probed.
        health: which nodes failed; updated with the findings.
        endpoint: of the node to ask first for a shard map.
        columns: of the shard map.
        timeout_s: of one call to a node.
        on_change: called in the probing thread when `health` may have changed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        streams: NodeStreams,
        health: NodeHealth,
        endpoint: str,
        *,
        columns: tuple[str, ...],
        timeout_s: float,
        on_change: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._health = health
        self._endpoint = endpoint
        self._columns = columns
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._clock = clock
        self._task = BackgroundTask("cache-nodes", self.probe)

    def start_if_due(self) -> None:
        """Starts to probe the nodes that were avoided for long enough; waits for none of them."""
        locations = self._health.nodes_to_probe()
        if locations and not self._streams.is_closed:
            self._task.start(locations)

    def probe(self, locations: Collection[str]) -> None:
        """Probes these nodes in this thread, one after the other."""
        try:
            self.refresh_map(self._clock() + CALL_TIMEOUT_S)
            for location in locations:
                if self._streams.is_closed:
                    return
                self._probe_one(location)
            self._on_change()
        except CacheError as error:  # a fetch that needs the cache will say what is wrong
            name = self._health.shards.dataset
            logger.debug("nodes not probed dataset=%s reason=%s", name, error)
            if not self._streams.is_closed:
                for location in locations:
                    self._health.record_failure(location)

    def _probe_one(self, location: str) -> None:
        if all(node.location != location for node in self._health.shards.nodes):
            self._health.clear_failures(location)  # other nodes have its rows now
        elif self._answers(location):
            self._health.stop_avoiding(location)
        else:
            self._health.record_failure(location)

    def _answers(self, location: str) -> bool:
        shards = self._health.shards
        timeout_s = min(CALL_TIMEOUT_S, self._timeout_s)
        try:
            self._streams.connection(location).renew_lease(
                shards.dataset, shards.fingerprint, timeout_s
            )
        except (NodeUnavailableError, NotReadyError):
            self._streams.drop(location)
            return False
        return True

    def refresh_map(self, deadline: float) -> None:
        """Puts the newest shard map into `health`; keeps the old one if no node has a newer one.

        Args:
            deadline: on the clock.

        Raises:
            StaleVersionError, DatasetNotFoundError: the version is gone.
        """
        if (shards := self._read_map(deadline)) is not None:
            self._health.shards = shards

    def _read_map(self, deadline: float) -> ShardMap | None:
        shards = self._health.shards
        for location in shards.locations(self._endpoint):
            timeout_s = min(self._timeout_s, deadline - self._clock())
            if timeout_s <= 0:
                return None
            try:
                return self._streams.connection(location).read_plan(
                    shards.dataset,
                    shards.fingerprint,
                    self._columns,
                    timeout_s,
                    known_groups=None if shards.log is None else 0,
                )
            except NodeUnavailableError:
                continue
            except NotReadyError:
                return None  # no node has some shard at the moment
        return None
