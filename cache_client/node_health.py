"""Which nodes have the rows of a version, and which of them did not answer lately."""

from __future__ import annotations

import threading
import time

from cache_client.routing import ShardMap

# A node that failed is passed over for so long where another replica is; longer at each failure.
_FIRST_AVOID_S, _LONGEST_AVOID_S = 2.0, 120.0


class NodeHealth:
    """Where the rows of a version are, as far as a process knows: the map, and who did not answer.

    Shared by the readers of a dataset, so that no pass waits for a node again that an earlier one
    waited for in vain. Thread-safe.

    Attributes:
        shards: the newest shard map.
    """

    def __init__(self, shards: ShardMap) -> None:
        self.shards = shards
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._avoid_until: dict[str, float] = {}

    def note(self, location: str) -> bool:
        """Counts a failure; whether it is the first one since the node answered."""
        now = time.monotonic()
        with self._lock:
            if now < self._avoid_until.get(location, now):
                return False  # of a request that was under way when the node failed
            count = self._counts.get(location, 0)
            self._counts[location] = count + 1
            self._avoid_until[location] = now + min(_FIRST_AVOID_S * 2**count, _LONGEST_AVOID_S)
        return count == 0

    def forget(self, location: str) -> None:
        """The node has answered with rows, or nobody asks it any more."""
        with self._lock:
            self._counts.pop(location, None)
            self._avoid_until.pop(location, None)

    def let_try(self, location: str) -> None:
        """The node answers: it may be asked for rows. It is avoided for longer if that fails."""
        with self._lock:
            self._avoid_until.pop(location, None)

    def avoided(self) -> set[str]:
        """Locations to pass over, until it is found that they answer."""
        with self._lock:
            return set(self._avoid_until)

    def to_try(self) -> set[str]:
        """Those that were passed over for long enough."""
        now = time.monotonic()
        with self._lock:
            return {location for location, until in self._avoid_until.items() if until <= now}
