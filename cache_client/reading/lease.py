"""Keeps a version in the cache while a reader uses it, and finds nodes that answer again.

The cache drops a replaced version when its lease runs out. Nodes count the rows that they send as
use. They do not see reads of mapped files, nor a long window, so the reader renews the lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from cache_client.reading.background_task import CALL_TIMEOUT_S, BackgroundTask
from cache_client.reading.local_shards import LocalShards
from cache_client.reading.node_health import NodeHealth
from cache_client.reading.node_streams import NodeStreams
from cache_client.reading.shard_maps import ask_in_turn, newer_shard_map
from cache_protocol.errors import CacheError, NodeUnavailableError, NotReadyError

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 4


class Lease:
    """The lease on one version, renewed in the background. Thread-safe.

    Args:
        streams: for connections to nodes; once they are closed, nothing is renewed.
        health: has the version and its nodes.
        endpoint: of the node to ask first.
        local: remembers when the lease was last renewed, for later readers; None: it counts as
            renewed now.
        timeout_s: of one call to a node.
        deadline_s: of one renewal, over all nodes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        streams: NodeStreams,
        health: NodeHealth,
        endpoint: str,
        *,
        local: LocalShards | None,
        timeout_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._health = health
        self._endpoint = endpoint
        self._local = local
        self._timeout_s = min(CALL_TIMEOUT_S, timeout_s)
        self._deadline_s = deadline_s
        self._clock = clock
        self._interval_s = health.shards.lease_s / _RENEWALS_PER_LEASE
        now = clock()
        # Without local shards the first fetch asks a node for rows, which is a use.
        leased_at = now if local is None else local.leased_at
        # A time in the future comes from another machine, or from before a restart of this one.
        self._due_at = now if leased_at > now else leased_at + self._interval_s
        self._task = BackgroundTask("cache-lease", self.renew)

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew the lease."""
        return self._clock() >= self._due_at

    def record_use(self) -> None:
        """Postpones the renewal: a node has sent rows, and counts that as use."""
        self._due_at = self._clock() + self._interval_s

    def renew_if_due(self) -> None:
        """Starts a renewal in the background when it is due; waits for no node."""
        if self.is_due and not self._streams.is_closed:
            self._task.start()

    def renew(self) -> None:
        """Renews the lease in this thread; logs a warning if no node could."""
        asked_at = self._clock()
        self._due_at = asked_at + self._interval_s
        try:
            shards = self._health.shards
            ask_in_turn(
                lambda location, timeout_s: self._streams.connection(location).renew_lease(
                    shards.dataset, shards.fingerprint, timeout_s
                ),
                shards.locations(self._endpoint),
                timeout_s=self._timeout_s,
                deadline=asked_at + self._deadline_s,
                clock=self._clock,
            )
        except CacheError as error:
            # Not raised: mapped rows stay readable, and a fetch that needs the cache will fail.
            if not self._streams.is_closed:
                name = self._health.shards.dataset
                logger.warning("lease not renewed dataset=%s reason=%s", name, error)
            return
        if self._local is not None:
            self._local.leased_at = asked_at


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
        self._health.shards = newer_shard_map(
            self._health.shards,
            self._endpoint,
            self._columns,
            self._streams.connection,
            timeout_s=self._timeout_s,
            deadline=deadline,
            clock=self._clock,
        )
