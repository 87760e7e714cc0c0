"""Decides which nodes hold which shards. Pure.

Placement is rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup
and Zadimoghaddam, 2018). Each member gets a score for each shard. The `replicas` members with the
best scores that still have room in their even share hold it. The result depends on names only: a
restarted coordinator reaches the same answer, and a lost node moves only its own shards.

Shards that an earlier version also has stay on its nodes, as far as their even share allows.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import accumulate, chain, islice

import numpy as np
from numpy.typing import NDArray

_Words = NDArray[np.uint64]


def place(
    fingerprint: str,
    num_shards: int,
    members: Iterable[str],
    replicas: int,
    *,
    alive: Collection[str] | None = None,
    wanted: Sequence[Sequence[str]] = (),
) -> tuple[tuple[str, ...], ...]:
    """The nodes that should hold each shard, in order of preference.

    While all members are alive, none gets more than its even share (rounded up). Only the shards of
    a lost member move, to the next best live nodes.

    Args:
        fingerprint: of the version; each dataset is placed differently.
        num_shards: shards ``0 .. num_shards - 1``.
        members: every node that belongs to the cache, in any order.
        replicas: wanted copies; fewer if there are fewer nodes.
        alive: the members that answer; None for all.
        wanted: for each shard, nodes that are better than any other; empty: none are.

    Returns:
        ``num_shards`` tuples of ``min(replicas, live nodes)`` distinct node ids.
    """
    nodes = tuple(sorted(set(members)))
    living = frozenset(nodes if alive is None else alive)
    return _place(fingerprint, num_shards, nodes, replicas, living, tuple(map(tuple, wanted)))


# The homes stay as they are until a node joins or leaves, the placement until one answers or stops
# answering. A few of each are enough: a view of a version keeps its placement.
@lru_cache(maxsize=32)
def _place(
    fingerprint: str,
    num_shards: int,
    nodes: tuple[str, ...],
    replicas: int,
    living: frozenset[str],
    wanted: tuple[tuple[str, ...], ...],
) -> tuple[tuple[str, ...], ...]:
    homes = _homes(fingerprint, num_shards, nodes, replicas, wanted)
    if living.issuperset(nodes):
        return homes
    alive = [place for place, node in enumerate(nodes) if node in living]
    scores = _Scores(fingerprint, tuple(nodes[place] for place in alive))
    placement = list(homes)
    for shard, held in enumerate(homes):
        if not living.issuperset(held):
            placement[shard] = _replaced(held, scores.of(shard), scores.nodes, living)
    return tuple(placement)


def _replaced(
    held: tuple[str, ...], scores: _Words, alive: tuple[str, ...], living: frozenset[str]
) -> tuple[str, ...]:
    """The living homes of a shard, and the best other live nodes in place of the lost ones.

    Args:
        scores: of the live nodes.
    """
    kept = [node for node in held if node in living]
    best = _best(scores, min(len(held), len(alive)))  # as many as are needed, also with the kept
    spare = (alive[place] for place in best.tolist() if alive[place] not in kept)
    return tuple(kept + list(islice(spare, len(held) - len(kept))))


@lru_cache(maxsize=16)
def _homes(
    fingerprint: str,
    num_shards: int,
    nodes: tuple[str, ...],
    replicas: int,
    wanted: tuple[tuple[str, ...], ...],
) -> tuple[tuple[str, ...], ...]:
    """The homes of each shard while all nodes are alive."""
    if not nodes:
        return ((),) * num_shards
    copies = min(replicas, len(nodes))
    share = -(-num_shards * copies // len(nodes))
    room = np.full(len(nodes), share)
    scores = _Scores(fingerprint, nodes)
    place_of = {node: place for place, node in enumerate(nodes)}
    placement: dict[int, tuple[str, ...]] = {}
    wanted = wanted or ((),) * num_shards
    # Shards without a wish take the room that is left.
    for shard in sorted(range(num_shards), key=lambda shard: not wanted[shard]):
        left = num_shards - len(placement)
        order = scores.of(shard) >> np.uint64(2)
        there = [place_of[node] for node in wanted[shard] if node in place_of]
        best = _wished(order, there, room, copies, left) if there else None
        if best is None:
            # First the nodes that need every remaining shard to reach their share: otherwise the
            # last shards could find too few nodes with room. Then the best nodes with room.
            order[room > 0] |= _HAS_ROOM
            order[room >= left] |= _NEEDS_ALL
            best = _best(order, copies)
        room[best] -= 1
        placement[shard] = tuple(nodes[place] for place in best.tolist())
    return tuple(placement[shard] for shard in range(num_shards))


def _best(order: _Words, copies: int) -> NDArray[np.intp]:
    """The places of the largest numbers, the largest first."""
    best = np.argpartition(order, -copies)[-copies:]
    return best[np.argsort(order[best])[::-1]]


def _wished(
    order: _Words, there: Sequence[int], room: NDArray[np.int64], copies: int, left: int
) -> NDArray[np.intp] | None:
    """The nodes that a shard is on, then the best ones with room.

    Returns:
        None if too few nodes have room, or would have for the shards after it.
    """
    order = np.where(room > 0, order, np.uint64(0))
    for rank, place in enumerate(there):
        if room[place] > 0:
            order[place] = _HAS_ROOM - np.uint64(rank)
    best = _best(order, copies)
    after = room.copy()
    after[best] -= 1
    fits = after.min() >= 0 and np.minimum(after, left - 1).sum() >= copies * (left - 1)
    return best if fits else None


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
