"""The newest shard map of a version, and which nodes failed lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cache_client.flight.routing import ShardMap

# How long a failed node is avoided where another replica is; twice as long at each failure.
_FIRST_AVOID_S, _LONGEST_AVOID_S = 2.0, 120.0


class NodeHealth:
    """Which nodes of a version answer, as far as this process knows. Thread-safe.

    The readers of a dataset share it, so that no pass waits for a node that failed in an earlier
    one.

    Args:
        shards: the shard map to start with.
        clock: monotonic seconds.
    """

    def __init__(self, shards: ShardMap, clock: Callable[[], float] = time.monotonic) -> None:
        self._shards = shards
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        self._avoid_until: dict[str, float] = {}

    @property
    def shards(self) -> ShardMap:
        """The newest shard map."""
        return self._shards

    @shards.setter
    def shards(self, shards: ShardMap) -> None:
        with self._lock:
            if shards.log is None or shards.num_rows >= self._shards.num_rows:
                self._shards = shards  # else it was asked for before a load went on

    def record_failure(self, location: str) -> bool:
        """Counts a failure of a node, and avoids it for a while.

        Returns:
            Whether it is the first failure since the node answered.
        """
        now = self._clock()
        with self._lock:
            if now < self._avoid_until.get(location, now):
                return False  # of a request that was under way when the node failed
            count = self._failures.get(location, 0)
            self._failures[location] = count + 1
            self._avoid_until[location] = now + min(_FIRST_AVOID_S * 2**count, _LONGEST_AVOID_S)
        return count == 0

    def clear_failures(self, location: str) -> None:
        """Forgets the failures of a node that sent rows, or that holds no shard any more."""
        with self._lock:
            self._failures.pop(location, None)
            self._avoid_until.pop(location, None)

    def stop_avoiding(self, location: str) -> None:
        """Lets a node be asked for rows again; its next failure still counts as one more."""
        with self._lock:
            self._avoid_until.pop(location, None)

    def nodes_to_avoid(self) -> set[str]:
        """Locations of nodes that failed, until a probe finds that they answer."""
        with self._lock:
            return set(self._avoid_until)

    def nodes_to_probe(self) -> set[str]:
        """Locations of nodes that were avoided for long enough."""
        now = self._clock()
        with self._lock:
            return {location for location, until in self._avoid_until.items() if until <= now}
