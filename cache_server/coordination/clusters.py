"""The nodes that placements follow, looked at again only as often as placing can keep up.

To place 100,000 shards on 1,000 nodes takes seconds, and each node that joins, leaves or comes back
changes the result. When very many do so at once, they are placed in groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_server.coordination.membership import Membership
from cache_server.coordination.placement import place

_TIMES_PLACING = 5  # so placing takes at most a fifth of the time
_LONGEST_WAIT_S = 60.0
_UNNOTICED_S = 0.05  # no rest after less


@dataclass
class PlacingTime:
    """How long placements took since the nodes were looked at, in seconds.

    Attributes:
        took_s: of a processor; a machine that is busy with something else does not count.
        missed_s: of real time.
    """

    took_s: float = 0.0
    missed_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Cluster:
    """The members at one moment; another object when one joins, leaves, is lost or comes back.

    Attributes:
        names: ids of all members, sorted.
        alive: ids of those that answer.
        spent: takes the time of placements.
    """

    names: tuple[str, ...]
    alive: frozenset[str]
    spent: PlacingTime = field(default_factory=PlacingTime)
    clock: Callable[[], float] = time.perf_counter

    def place(
        self,
        fingerprint: str,
        num_shards: int,
        replicas: int,
        wanted: Sequence[Sequence[str]] = (),
    ) -> tuple[tuple[str, ...], ...]:
        """The nodes that should hold each shard; see `placement.place`."""
        begun, used_s = self.clock(), time.thread_time()
        placement = place(
            fingerprint, num_shards, self.names, replicas, alive=self.alive, wanted=wanted
        )
        self.spent.missed_s += self.clock() - begun
        self.spent.took_s += time.thread_time() - used_s
        return placement


class Clusters:
    """Looks at the members for placements. One thread at a time.

    Args:
        clock: seconds of real time.
    """

    def __init__(
        self, membership: Membership, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._membership = membership
        self._clock = clock
        self._cluster = Cluster((), frozenset(), clock=clock)
        self._looked_at = -math.inf
        self._excused_s = 0.0

    def look(self) -> Cluster:
        """The members that placements follow now: those of this moment, or of a moment ago."""
        spent = self._cluster.spent
        # While nodes are placed, no report is taken: that is not their silence.
        if (missed_s := spent.missed_s - self._excused_s) > _UNNOTICED_S:
            self._membership.excuse(missed_s)
            self._excused_s = spent.missed_s
        names, alive = self._membership.names(), self._membership.alive()
        if names is self._cluster.names and alive is self._cluster.alive:
            return self._cluster
        wait_s = _TIMES_PLACING * spent.took_s if spent.took_s > _UNNOTICED_S else 0.0
        now = self._clock()
        if now - self._looked_at >= min(wait_s, _LONGEST_WAIT_S):
            self._cluster = Cluster(names, alive, clock=self._clock)
            self._looked_at, self._excused_s = now, 0.0
        return self._cluster

    def look_again(self) -> None:
        """Lets the next `look` see the members of that moment."""
        self._cluster = Cluster((), frozenset(), clock=self._clock)
        self._excused_s = 0.0
