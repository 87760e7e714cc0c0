"""Decides which nodes hold which shards. Pure.

Placement is rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup
and Zadimoghaddam, 2018). Each member gets a score for each shard. The `replicas` members with the
best scores that still have room in their even share hold it. The result depends on names only: a
restarted coordinator reaches the same answer, and a lost node moves only its own shards.

The replicas of a shard are spread over the zones: first it gets zones, by the best node of each,
and then nodes in these. A node without a zone counts as a separate zone.

Shards that an earlier version also has stay on its nodes, as far as their even share allows.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

_Words = NDArray[np.uint64]
_Places = NDArray[np.intp]
_NO_ZONES: Mapping[str, str] = {}


def place(
    fingerprint: str,
    num_shards: int,
    members: Iterable[str],
    replicas: int,
    *,
    alive: Collection[str] | None = None,
    wanted: Sequence[Sequence[str]] = (),
    zones: Mapping[str, str] = _NO_ZONES,
) -> tuple[tuple[str, ...], ...]:
    """The nodes that should hold each shard, in order of preference.

    While all members are alive, the replicas of a shard are in as many zones as there can be, and
    none gets more than its even share (rounded up); where zones differ in size, those of a small
    one get as much as that takes. Only the shards of a lost member move, to the next best live
    nodes, in other zones than its other replicas if there are any.

    Args:
        fingerprint: of the version; each dataset is placed differently.
        num_shards: shards ``0 .. num_shards - 1``.
        members: every node that belongs to the cache, in any order.
        replicas: wanted copies; fewer if there are fewer nodes.
        alive: the members that answer; None for all.
        wanted: for each shard, nodes that are better than any other; empty: none are.
        zones: those of nodes that have one.

    Returns:
        ``num_shards`` tuples of ``min(replicas, live nodes)`` distinct node ids.
    """
    nodes = tuple(sorted(set(members)))
    living = frozenset(nodes if alive is None else alive)
    where = _zones_of(nodes, replicas, zones)
    return _place(
        fingerprint, num_shards, nodes, where, replicas, living, tuple(map(tuple, wanted))
    )


def _zones_of(nodes: tuple[str, ...], replicas: int, zones: Mapping[str, str]) -> tuple[str, ...]:
    """The zone of each node; empty where zones do not matter: each node stands for itself."""
    found = tuple(zones.get(node) or f"/{node}" for node in nodes)  # no zone has a slash
    return () if replicas == 1 or len(set(found)) in (1, len(nodes)) else found


# The homes stay as they are until a node joins or leaves, the placement until one answers or stops
# answering. A few of each are enough: a view of a version keeps its placement.
@lru_cache(maxsize=32)
def _place(
    fingerprint: str,
    num_shards: int,
    nodes: tuple[str, ...],
    zones: tuple[str, ...],
    replicas: int,
    living: frozenset[str],
    wanted: tuple[tuple[str, ...], ...],
) -> tuple[tuple[str, ...], ...]:
    homes = _homes(fingerprint, num_shards, nodes, zones, replicas, wanted)
    if living.issuperset(nodes):
        return homes
    alive = [place for place, node in enumerate(nodes) if node in living]
    scores = _Scores(fingerprint, tuple(nodes[place] for place in alive))
    zone_of = dict(zip(nodes, zones, strict=True)) if zones else {}
    placement = list(homes)
    for shard, held in enumerate(homes):
        if not living.issuperset(held):
            placement[shard] = _replaced(held, scores.of(shard), scores.nodes, living, zone_of)
    return tuple(placement)


def _replaced(
    held: tuple[str, ...],
    scores: _Words,
    alive: tuple[str, ...],
    living: frozenset[str],
    zone_of: Mapping[str, str],
) -> tuple[str, ...]:
    """The living homes of a shard, and the best other live nodes in place of the lost ones.

    Args:
        scores: of the live nodes.
        zone_of: of all nodes; empty: zones do not matter.
    """
    kept = [node for node in held if node in living]
    # As many as are needed, also with the kept; of any zone.
    best = _best(scores, len(alive) if zone_of else min(len(held), len(alive)))
    spare = [alive[place] for place in best.tolist() if alive[place] not in kept]
    return spread(kept, spare, len(held), zone_of)


def spread(
    first: Sequence[str], others: Sequence[str], count: int, zone_of: Mapping[str, str]
) -> tuple[str, ...]:
    """``first``, and as many others as are missing: the next one in a zone with the fewest so far.

    Args:
        others: nodes in order of preference, none of ``first``.
        count: of nodes; fewer if there are fewer.
        zone_of: of nodes that have a zone; others count as one each.
    """
    chosen, left = list(first), list(others)
    used = Counter(zone_of.get(node, f"/{node}") for node in first)
    while left and len(chosen) < count:
        node = min(left, key=lambda node: used[zone_of.get(node, f"/{node}")])  # the first such
        left.remove(node)
        chosen.append(node)
        used[zone_of.get(node, f"/{node}")] += 1
    return tuple(chosen)


def where_held(homes: tuple[str, ...], held: Set[str], zones: Mapping[str, str]) -> tuple[str, ...]:
    """As many nodes as ``homes``, those that hold the shard first: written rows move to no home.

    A home in another zone comes before one more holder in the same zone.
    """
    nodes = [node_id for node_id in homes if node_id in held]
    nodes += sorted(held - set(homes))
    nodes += [node_id for node_id in homes if node_id not in held]
    return spread(nodes[:1], nodes[1:], len(homes), zones)


@lru_cache(maxsize=16)
def _homes(
    fingerprint: str,
    num_shards: int,
    nodes: tuple[str, ...],
    zones: tuple[str, ...],
    replicas: int,
    wanted: tuple[tuple[str, ...], ...],
) -> tuple[tuple[str, ...], ...]:
    """The homes of each shard while all nodes are alive."""
    if not nodes:
        return ((),) * num_shards
    room = _Rooms(zones or nodes, num_shards, min(replicas, len(nodes)))
    scores = _Scores(fingerprint, nodes)
    place_of = {node: place for place, node in enumerate(nodes)}
    placement: dict[int, tuple[str, ...]] = {}
    wanted = wanted or ((),) * num_shards
    # Shards without a wish take the room that is left.
    for shard in sorted(range(num_shards), key=lambda shard: not wanted[shard]):
        left = num_shards - len(placement)
        order = scores.of(shard) >> np.uint64(2)
        there = [place_of[node] for node in wanted[shard] if node in place_of]
        best = room.take_wished(order, there, left) if there else None
        best = room.take(order, left) if best is None else best
        placement[shard] = tuple(nodes[place] for place in best.tolist())
    return tuple(placement[shard] for shard in range(num_shards))


class _Rooms:
    """The shards that each node and each zone may still get.

    Every shard has ``least`` replicas in each zone, and one more in ``extra`` of them.

    Args:
        zones: of each node, any names.
        num_shards: to place.
        copies: of each shard, no more than nodes.
    """

    def __init__(self, zones: Sequence[str], num_shards: int, copies: int) -> None:
        names, self._zone_of, sizes = np.unique(zones, return_inverse=True, return_counts=True)
        self._alone = len(names) == len(zones)  # each node is a zone
        self._nodes = [np.flatnonzero(self._zone_of == zone) for zone in range(len(names))]
        most = [np.minimum(sizes, each).sum() for each in range(1, copies + 1)]
        self._least = np.minimum(sizes, bisect_left(most, copies))
        self._extra = copies - int(self._least.sum())
        always = self._least * num_shards

        def of_zones(share: int) -> NDArray[np.int64]:
            return np.where(sizes > self._least, np.clip(share * sizes - always, 0, num_shards), 0)

        def is_enough(share: int) -> bool:
            has_least = (share * sizes >= always).all()
            return bool(has_least and of_zones(share).sum() >= self._extra * num_shards)

        share = bisect_left(range(num_shards), True, key=is_enough)
        self._of_zone = of_zones(share)
        self._of_node = (-(-(always + self._of_zone) // sizes))[self._zone_of]

    def take(self, order: _Words, left: int) -> _Places:
        """Takes room for a shard; returns the best nodes with room, the best first.

        Args:
            order: the larger, the better; of each node.
            left: shards to place, with this one.
        """
        # First those that need every remaining shard to reach their share: otherwise the last
        # shards could find too few with room. Then the best ones with room.
        order[self._of_node > 0] |= _HAS_ROOM
        order[self._of_node >= left] |= _NEEDS_ALL
        if self._alone:
            best = _best(order, self._extra)
        else:
            zones = self._next_in_zones(order) & (_HAS_ROOM - np.uint64(1))
            zones[self._of_zone > 0] |= _HAS_ROOM
            zones[self._of_zone >= left] |= _NEEDS_ALL
            best = self._best_in_zones(order, zones)
        self._of_node[best] -= 1
        self._of_zone -= self._taken(best)
        return best

    def take_wished(self, order: _Words, there: Sequence[int], left: int) -> _Places | None:
        """As `take`, first the nodes that the shard is on.

        Returns:
            None if too few nodes have room, or would have for the shards after it.
        """
        order = np.where(self._of_node > 0, order, np.uint64(0))
        for rank, place in enumerate(there):
            if self._of_node[place] > 0:
                order[place] = _HAS_ROOM - np.uint64(rank)
        if self._alone:
            best = _best(order, self._extra)
        else:
            zones = np.where(self._of_zone > 0, self._next_in_zones(order), np.uint64(0))
            best = self._best_in_zones(order, zones)
        of_node, of_zone = self._of_node.copy(), self._of_zone - self._taken(best)
        of_node[best] -= 1
        if not self._are_enough(of_node, of_zone, left - 1):
            return None
        self._of_node, self._of_zone = of_node, of_zone
        return best

    def _next_in_zones(self, order: _Words) -> _Words:
        """The order of the node of each zone that it would give beyond its least."""
        found = [
            np.partition(order[nodes], -least - 1)[-least - 1] if least < len(nodes) else 0
            for nodes, least in zip(self._nodes, self._least.tolist(), strict=True)
        ]
        return np.array(found, np.uint64)

    def _best_in_zones(self, order: _Words, zones: _Words) -> _Places:
        """The best nodes of the best zones.

        Args:
            zones: the order of the zones.
        """
        counts = self._least.copy()
        if self._extra:
            counts[_best(zones, self._extra)] += 1
        found = np.concatenate([
            nodes[_best(order[nodes], count)]
            for nodes, count in zip(self._nodes, counts.tolist(), strict=True)
            if count
        ])  # fmt: skip
        return found[np.argsort(order[found])[::-1]]

    def _taken(self, best: _Places) -> NDArray[np.int64]:
        """What these nodes take of the room of the zones."""
        if self._alone:
            return np.zeros_like(self._of_zone)
        return np.bincount(self._zone_of[best], minlength=len(self._nodes)) - self._least

    def _are_enough(
        self, of_node: NDArray[np.int64], of_zone: NDArray[np.int64], left: int
    ) -> bool:
        """Whether so many shards can be placed in these rooms."""
        if of_node.min() < 0 or of_zone.min() < 0:
            return False
        of_node, of_zone = np.minimum(of_node, left), np.minimum(of_zone, left)
        if self._alone:
            return bool(of_node.sum() >= self._extra * left)
        have = np.bincount(self._zone_of, of_node)
        needed = self._least * left + of_zone
        return bool(of_zone.sum() >= self._extra * left and (have >= needed).all())


def _best(order: _Words, count: int) -> _Places:
    """The places of the largest numbers, the largest first."""
    best = np.argpartition(order, -count)[-count:]
    return best[np.argsort(order[best])[::-1]]


_HAS_ROOM, _NEEDS_ALL = np.uint64(1 << 62), np.uint64(1 << 63)  # above all scores


class _Scores:
    """A pseudo-random number for each pair of a shard and a node, in arrays of all nodes.

    The finaliser is MurmurHash3's, by Stafford's constants ("Better bit mixing", 2011, variant 13).
    """

    def __init__(self, fingerprint: str, nodes: tuple[str, ...]) -> None:
        names = (f"{fingerprint}/{node}".encode() for node in nodes)
        digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names)
        self.nodes = nodes
        self._names: _Words = np.frombuffer(digests, "<u8")

    def of(self, shard: int) -> _Words:
        """The scores of one shard; uint64, shape ``(nodes,)``."""
        words = self._names + np.uint64(shard * 0x9E3779B97F4A7C15 % 2**64)
        words ^= words >> np.uint64(30)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(27)
        words *= np.uint64(0x94D049BB133111EB)
        words ^= words >> np.uint64(31)
        return words


def shards_by_node(placement: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """The shards that `place` assigns to each node, in their order."""
    shards: dict[str, list[int]] = {}
    for shard, homes in enumerate(placement):
        for node in homes:
            shards.setdefault(node, []).append(shard)
    return shards


def desired_shards(
    assigned: Iterable[int],
    held: Iterable[int],
    placement: Sequence[Sequence[str]],
    holders: Mapping[int, Set[str]],
) -> frozenset[int]:
    """The shards that one node should hold.

    Those that are assigned to it, and those that it holds until all new homes hold them.

    Args:
        assigned: to the node, by `shards_by_node`.
        held: by the node, served or not.
        placement: from `place`.
        holders: the nodes that serve each shard now.
    """
    kept = (shard for shard in held if not set(placement[shard]) <= holders.get(shard, frozenset()))
    return frozenset(chain(assigned, kept))


def bytes_by_node(placement: Sequence[Sequence[str]], sizes: Sequence[int]) -> dict[str, int]:
    """Bytes that ``placement`` puts on each node; only nodes with shards."""
    totals: dict[str, int] = {}
    for homes, size in zip(placement, sizes, strict=True):
        for node in homes:
            totals[node] = totals.get(node, 0) + size
    return totals


def nodes_needed(sizes: Sequence[int], replicas: int, memory_limit_bytes: int) -> int:
    """A number of nodes with this limit that always hold every replica; 0 if none does.

    `place` gives no node more shards than its even share. So a node holds at most that many of the
    largest shards. If shards differ in size, fewer nodes may be enough.

    Args:
        sizes: bytes of each shard.
        memory_limit_bytes: of each node; 0 for none.
    """
    if not memory_limit_bytes or not sizes:
        return replicas
    if max(sizes) > memory_limit_bytes:
        return 0
    largest = list(accumulate(sorted(sizes, reverse=True)))

    def fits(count: int) -> bool:
        share = -(-len(sizes) * replicas // count)
        return largest[share - 1] <= memory_limit_bytes

    # More nodes never hold more each. With a node for each copy, every node holds one shard.
    counts = range(replicas, len(sizes) * replicas + 1)
    return counts[bisect_left(counts, True, key=fits)]
