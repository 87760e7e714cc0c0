"""Decides which nodes hold which shards. Pure.

Placement is rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup
and Zadimoghaddam, 2018). Each member gets a score for each shard. The `replicas` members with the
best scores that still have room in their even share hold it. The result depends on names only: a
restarted coordinator reaches the same answer, and a lost node moves only its own shards.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import accumulate


def place(
    fingerprint: str,
    num_shards: int,
    members: Iterable[str],
    replicas: int,
    *,
    alive: Collection[str] | None = None,
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

    Returns:
        ``num_shards`` tuples of ``min(replicas, live nodes)`` distinct node ids.
    """
    nodes = tuple(sorted(set(members)))
    living = frozenset(nodes if alive is None else alive)
    return _place(fingerprint, num_shards, nodes, replicas, living)


# Needed for every heartbeat and caller; the same until a node comes or goes.
@lru_cache(maxsize=512)
def _place(
    fingerprint: str,
    num_shards: int,
    nodes: Sequence[str],
    replicas: int,
    living: Set[str],
) -> tuple[tuple[str, ...], ...]:
    if not nodes:
        return ((),) * num_shards
    share = -(-num_shards * min(replicas, len(nodes)) // len(nodes))
    load = dict.fromkeys(nodes, 0)
    placement = []
    for shard in range(num_shards):
        left = num_shards - shard
        ranking = sorted(nodes, key=lambda node: _score(fingerprint, shard, node), reverse=True)
        # First the nodes that need every remaining shard to reach their share: otherwise the last
        # shards could find too few nodes with room. Then the best nodes with room.
        homes = sorted(
            ranking, key=lambda node: (load[node] >= share) - (share - load[node] >= left)
        )[:replicas]
        for node in homes:
            load[node] += 1
        spare = [node for node in ranking if node in living and node not in homes]
        kept = [node for node in homes if node in living]
        placement.append(tuple(kept + spare[: len(homes) - len(kept)]))
    return tuple(placement)


def _score(fingerprint: str, shard: int, node: str) -> bytes:
    return hashlib.blake2b(f"{fingerprint}/{shard}/{node}".encode(), digest_size=8).digest()


def desired_shards(
    node_id: str,
    placement: Sequence[Sequence[str]],
    holders: Mapping[int, Set[str]],
    sealed: Collection[int] = (),
) -> frozenset[int]:
    """The shards that ``node_id`` should hold.

    Those that `place` assigns to it, and those that it holds until all new homes hold them.

    Args:
        placement: from `place`.
        holders: the nodes that serve each shard now.
        sealed: the shards that the node holds, served or not.
    """
    wanted = set()
    for shard, homes in enumerate(placement):
        held_by = holders.get(shard, frozenset())
        held = node_id in held_by or shard in sealed
        if node_id in homes or (held and not set(homes) <= held_by):
            wanted.add(shard)
    return frozenset(wanted)


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
