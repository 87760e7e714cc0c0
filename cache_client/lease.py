"""Keeps a version in the cache while a reader uses it.

The cache drops a replaced version when its lease runs out. Nodes count the rows that they send as
use. They do not see reads of mapped files, nor a long window, so the reader renews the lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cache_client.background_task import CALL_TIMEOUT_S, BackgroundTask
from cache_client.local_shards import LocalShards
from cache_client.node_health import NodeHealth
from cache_client.node_streams import NodeStreams
from cache_protocol.errors import CacheError, NodeUnavailableError

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
            self._ask_nodes(asked_at + self._deadline_s)
        except CacheError as error:
            # Not raised: mapped rows stay readable, and a fetch that needs the cache will fail.
            if not self._streams.is_closed:
                name = self._health.shards.dataset
                logger.warning("lease not renewed dataset=%s reason=%s", name, error)
            return
        if self._local is not None:
            self._local.leased_at = asked_at

    def _ask_nodes(self, deadline: float) -> None:
        """Asks one node after the other until one renews the lease."""
        shards = self._health.shards
        reason = ""
        for location in shards.locations(self._endpoint):
            timeout_s = min(self._timeout_s, deadline - self._clock())
            if timeout_s <= 0:
                break
            try:
                self._streams.connection(location).renew_lease(
                    shards.dataset, shards.fingerprint, timeout_s
                )
                return
            except NodeUnavailableError as error:
                reason = reason or str(error)
        raise NodeUnavailableError(reason or f"no node was asked within {self._deadline_s:g} s")
