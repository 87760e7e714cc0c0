"""The nodes that placements follow, looked at again only as often as placing can keep up.

To place 100,000 shards on 1,000 nodes takes seconds, and each node that joins, leaves or comes back
changes the result. When very many do so at once, they are placed in groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cache_server.coordination.members.drains import Drain, Drains
from cache_server.coordination.members.membership import Membership
from cache_server.coordination.members.placement import place
from cache_server.shards.version_key import VersionKey

_TIMES_PLACING = 5  # so placing takes at most a fifth of the time
_LONGEST_WAIT_S = 60.0
_UNNOTICED_S = 0.05  # no rest after less


@dataclass
class PlacingTime:
    """How long placements took since the nodes were looked at.

    Attributes:
        took_s: of a processor; a machine that is busy with something else does not count.
    """

    took_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Cluster:
    """The members at one moment; another object when one joins, leaves, is lost or comes back.

    Attributes:
        names: ids of all members, sorted.
        alive: ids of those that answer.
        spent: takes the time of placements.
        drains: of nodes that take no shards.
        zones: of the members that have one.
    """

    names: tuple[str, ...]
    alive: frozenset[str]
    spent: PlacingTime = field(default_factory=PlacingTime)
    drains: Mapping[str, Drain] = field(default_factory=dict)
    zones: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def takers(self) -> frozenset[str]:
        """The nodes that shards are placed on: while all are drained, they keep what they have."""
        return self.alive - self.drains.keys() or self.alive

    def moved(self, key: VersionKey) -> Mapping[int, tuple[str, ...]]:
        """The homes of the shards of a version that a drain put elsewhere."""
        moved: dict[int, tuple[str, ...]] = {}
        for drain in self.drains.values():
            for index, homes in drain.moves.get(key, {}).items():
                if self.takers.issuperset(homes):
                    moved[index] = homes
        return moved

    def place(
        self,
        fingerprint: str,
        num_shards: int,
        replicas: int,
        wanted: Sequence[Sequence[str]] = (),
    ) -> tuple[tuple[str, ...], ...]:
        """The nodes that should hold each shard; see `placement.place`."""
        used_s = time.thread_time()
        placement = place(
            fingerprint,
            num_shards,
            self.names,
            replicas,
            alive=self.takers,
            wanted=wanted,
            zones=self.zones,
        )
        self.spent.took_s += time.thread_time() - used_s
        return placement


class Clusters:
    """Looks at the members for placements. One thread at a time.

    Args:
        membership: the members.
        clock: seconds of real time.
        drains: of nodes that take no shards; None: there is none.
    """

    def __init__(
        self,
        membership: Membership,
        clock: Callable[[], float] = time.perf_counter,
        drains: Drains | None = None,
    ) -> None:
        self._membership = membership
        self._drains = drains
        self._clock = clock
        self._cluster = Cluster((), frozenset())
        self._looked_at = -math.inf

    def look(self) -> Cluster:
        """The members that placements follow now: those of this moment, or of a moment ago."""
        names, alive = self._membership.names(), self._membership.alive()
        now, zones = self._cluster, self._membership.zones()
        if names is now.names and alive is now.alive and zones is now.zones:
            return now
        took_s = self._cluster.spent.took_s
        wait_s = _TIMES_PLACING * took_s if took_s > _UNNOTICED_S else 0.0
        now_s = self._clock()
        if now_s - self._looked_at >= min(wait_s, _LONGEST_WAIT_S):
            drains = {} if self._drains is None else self._drains.by_node
            self._cluster = Cluster(names, alive, drains=drains, zones=zones)
            self._looked_at = now_s
        return self._cluster

    def look_again(self) -> None:
        """Lets the next `look` see the members of that moment."""
        self._cluster = Cluster((), frozenset())
