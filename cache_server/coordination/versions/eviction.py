"""Decides which versions leave the cache when a load, a write or a read has no room. Pure.

A version goes if nothing keeps it: those of lowest priority first, then those that are worth least
a byte. All that is needed goes, or nothing does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cache_server.shards.version_key import VersionKey

MOST_READS = 8  # that tell how often a dataset is read
_DAY_S = 86_400.0
# Chosen with `benchmarks.eviction`, by other seeds than those of its result.
_READS, _OVER_S = 0.5, _DAY_S  # expected of a dataset that nobody knows yet
_ENDS, _GOES_ON = 1.0, 2.0  # how often a read is the last one, likewise
_BYTES_PER_S = 100e6  # what a byte costs, beside the seconds of a load


@dataclass(frozen=True)
class Resident:
    """A version that takes room.

    Attributes:
        namespace: of its dataset.
        on: node -> bytes that become free when it goes.
        num_bytes: of all its replicas.
        worth: see `worth_of`.
        kept_because: why it may not go; empty: it may.
    """

    key: VersionKey
    namespace: str
    on: Mapping[str, int]
    num_bytes: int
    worth: float = 0.0
    priority: int = 0
    kept_because: str = ""


@dataclass(frozen=True)
class Room:
    """What a load, a write or a read needs beyond what is free.

    Attributes:
        namespace: that needs it.
        on: node -> bytes that it lacks.
        of_namespace: bytes that the namespace would have beyond its largest size.
    """

    namespace: str
    on: Mapping[str, int] = field(default_factory=dict)
    of_namespace: int = 0

    @property
    def is_there(self) -> bool:
        """Whether nothing has to go."""
        return self.of_namespace <= 0 and all(lack <= 0 for lack in self.on.values())


@dataclass(frozen=True)
class EvictionPlan:
    """What goes.

    Attributes:
        goes: nothing, if it would not be enough.
        stays: if it is not enough: what holds the room and may not go, the largest first.
    """

    goes: tuple[Resident, ...] = ()
    stays: tuple[Resident, ...] = ()
    is_enough: bool = True


def chance_of(reads: Sequence[float], now: float) -> float:
    """How many reads a second to expect of a dataset, by the times of its last `MOST_READS`.

    Their rate, and how likely it is that more follow: a dataset that was read each hour, and not
    for a week, is worth less than one that is read each week. This is the BG/NBD model of customers
    (Fader, Hardie and Lee, 2005), without its integrals.

    Args:
        reads: the oldest first.
    """
    if not reads:
        return 0.0
    first, again = reads[0], len(reads) - 1
    age_s = max(0.0, now - first) + _OVER_S
    active_s = reads[-1] - first + _OVER_S
    ended = _ENDS / (_GOES_ON + again) * math.pow(age_s / active_s, _READS + again)
    return (_READS + again) / age_s / (1 + ended)


def worth_of(load_s: float, num_bytes: int, chance: float) -> float:
    """What a byte of a version saves: the cost of its load, in seconds and bytes, by its chance.

    Args:
        load_s: seconds that its load took; 0: unknown.
        num_bytes: of one replica.
    """
    size = max(1, num_bytes)
    return (load_s / size + 1 / _BYTES_PER_S) * chance


def plan_eviction(
    residents: Iterable[Resident], room: Room, guaranteed: Mapping[str, int] | None = None
) -> EvictionPlan:
    """The versions that make room, or those that hold it.

    Args:
        guaranteed: namespace -> bytes that only itself evicts.
    """
    if room.is_there:
        return EvictionPlan()
    guaranteed = guaranteed or {}
    known = [each for each in residents if each.num_bytes or each.on]
    left = {each.key: each for each in sorted(known, key=_order) if not each.kept_because}
    held = Counter[str]()
    for each in known:
        held[each.namespace] += each.num_bytes
    lacking, goes = _Lack(room), list[Resident]()
    while not lacking.is_covered:
        first = _first(left.values(), lacking, room, held, guaranteed)
        if first is None:
            others = [each for each in known if each.kept_because or each.key in left]
            return EvictionPlan(stays=_holders(others, room, held, guaranteed), is_enough=False)
        goes.append(first)
        del left[first.key]
        held[first.namespace] -= first.num_bytes
        lacking.take(first)
    return EvictionPlan(tuple(_needed(goes, room)))


class _Lack:
    """What is still needed."""

    def __init__(self, room: Room) -> None:
        self._namespace = room.namespace
        self._on = {node: lack for node, lack in room.on.items() if lack > 0}
        self._of_namespace = max(0, room.of_namespace)

    @property
    def is_covered(self) -> bool:
        return not self._on and not self._of_namespace

    def is_helped_by(self, each: Resident) -> bool:
        in_namespace = self._of_namespace and each.namespace == self._namespace
        return bool(in_namespace) or any(each.on.get(node) for node in self._on)

    def take(self, each: Resident) -> None:
        if each.namespace == self._namespace:
            self._of_namespace = max(0, self._of_namespace - each.num_bytes)
        left = {node: lack - each.on.get(node, 0) for node, lack in self._on.items()}
        self._on = {node: lack for node, lack in left.items() if lack > 0}


def _first(
    left: Iterable[Resident],
    lacking: _Lack,
    room: Room,
    held: Mapping[str, int],
    guaranteed: Mapping[str, int],
) -> Resident | None:
    """The first that helps, of namespaces above what they are guaranteed; else of the same one.

    Args:
        left: in the order in which they go.
    """
    own = None
    for each in left:
        if not lacking.is_helped_by(each):
            continue
        if not _is_guaranteed(each, held, guaranteed):
            return each
        if own is None and each.namespace == room.namespace:
            own = each
    return own


def _order(each: Resident) -> tuple[int, float, str, str]:
    return each.priority, each.worth, each.key.dataset, each.key.fingerprint


def _is_guaranteed(each: Resident, held: Mapping[str, int], guaranteed: Mapping[str, int]) -> bool:
    """Whether its namespace would have less than its guaranteed size without it."""
    share = guaranteed.get(each.namespace, 0)
    return share > 0 and held[each.namespace] - each.num_bytes < share


def _needed(goes: Collection[Resident], room: Room) -> list[Resident]:
    """Without those that are not needed any more, as larger ones went after them."""
    kept = list(goes)
    for each in reversed(kept[:]):  # the most worth first
        lacking = _Lack(room)
        for other in kept:
            if other is not each:
                lacking.take(other)
        if lacking.is_covered:
            kept.remove(each)
    return kept


def _holders(
    known: Iterable[Resident],
    room: Room,
    held: Mapping[str, int],
    guaranteed: Mapping[str, int],
) -> tuple[Resident, ...]:
    """What is where room is lacking, and stays; the largest first."""
    lacking = _Lack(room)
    stays = []
    for each in known:
        if not lacking.is_helped_by(each):
            continue
        is_other = each.namespace != room.namespace
        if is_other and not each.kept_because and _is_guaranteed(each, held, guaranteed):
            size = guaranteed[each.namespace]
            reason = f"is of the {size} bytes that namespace {each.namespace!r} is guaranteed"
            each = replace(each, kept_because=reason)
        if each.kept_because:
            stays.append(each)
    return tuple(sorted(stays, key=lambda each: -each.num_bytes))
