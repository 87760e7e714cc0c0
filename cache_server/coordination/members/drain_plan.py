"""Decides where the shards of a drained node go. Pure.

A shard goes to the node that its placement names. Where there is no room, it goes to the node with
the most room, in another zone than its other replicas if one has. Only if no node has room for it,
the drain is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cache_protocol.errors import some_of
from cache_server.shards.version_key import Moves, VersionKey

_NO_ZONES: Mapping[str, str] = {}
NO_TAKER = "no other node answers and takes shards"


@dataclass(frozen=True)
class LeavingShard:
    """A shard that is on a node, or should be.

    Attributes:
        homes: the nodes that the placement without the drained node names.
        holders: of the other nodes, those that hold it.
    """

    key: VersionKey
    index: int
    num_bytes: int
    homes: tuple[str, ...]
    holders: frozenset[str] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """The homes that must copy it."""
        return tuple(home for home in self.homes if home not in self.holders)


@dataclass(frozen=True)
class DrainPlan:
    """Where shards go.

    Attributes:
        moves: the homes of shards that differ from their placement.
        why_not: why the shards do not fit; empty: they do.
    """

    moves: Moves = field(default_factory=dict)
    why_not: str = ""


def plan_drain(
    shards: Iterable[LeavingShard],
    room: Mapping[str, int | None],
    zones: Mapping[str, str] = _NO_ZONES,
) -> DrainPlan:
    """The homes of every shard that leaves a node, within the room of the other nodes.

    Args:
        shards: that leave.
        room: free bytes of every node that may take shards; None: no limit.
        zones: of the nodes that have one.
    """
    leaving = sorted(
        shards, key=lambda s: (-s.num_bytes, s.key.dataset, s.key.fingerprint, s.index)
    )
    if leaving and not room:
        return DrainPlan(why_not=NO_TAKER)
    left = dict(room)
    moves: dict[VersionKey, dict[int, tuple[str, ...]]] = {}
    # First those that fit where the placement names them: others take only the room that is left.
    away = []
    for shard in leaving:
        wanted = Counter(shard.missing)
        if all(_fits(left, node, shard.num_bytes) for node in wanted):
            _take(left, wanted, shard.num_bytes)
        else:
            away.append(shard)
    for shard in away:
        homes = [home for home in shard.homes if home in shard.holders]
        for _ in shard.missing:
            taken = {zones.get(home) or home for home in homes}
            fitting = _fitting(left, shard.num_bytes, besides={*homes, *shard.holders})
            elsewhere = [node for node in fitting if (zones.get(node) or node) not in taken]
            node = _roomiest(left, elsewhere or fitting)
            if node is None:
                return DrainPlan(why_not=_too_full(leaving, room))
            homes.append(node)
            _take(left, [node], shard.num_bytes)
        moves.setdefault(shard.key, {})[shard.index] = tuple(homes)
    return DrainPlan(moves)


def _fits(left: Mapping[str, int | None], node: str, num_bytes: int) -> bool:
    free = left.get(node, 0)
    return free is None or free >= num_bytes


def _take(left: dict[str, int | None], nodes: Iterable[str], num_bytes: int) -> None:
    for node in nodes:
        free = left[node]
        if free is not None:
            left[node] = free - num_bytes


def _fitting(
    left: Mapping[str, int | None], num_bytes: int, *, besides: Iterable[str]
) -> list[str]:
    return [node for node in left.keys() - set(besides) if _fits(left, node, num_bytes)]


def _roomiest(left: Mapping[str, int | None], nodes: Iterable[str]) -> str | None:
    def room_of(node: str) -> tuple[bool, int, str]:
        free = left[node]
        return free is None, free or 0, node

    return max(nodes, key=room_of, default=None)


def _too_full(shards: Iterable[LeavingShard], room: Mapping[str, int | None]) -> str:
    moving = [shard.num_bytes for shard in shards for _ in shard.missing]
    by_room = sorted(room, key=lambda node: (-(room[node] or 0), node))
    rooms = some_of(f"{node} has room for {max(0, room[node] or 0)}" for node in by_room)
    return (
        f"its {len(moving)} shards of {sum(moving)} bytes, the largest of {max(moving)}, do not "
        f"fit on the other nodes: {rooms}. Add a node, or drop a dataset"
    )
