"""Refuses loads that cannot fit on the nodes, where the sizes are known beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set

from cache_protocol.errors import LoadError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.members.membership import Member
from cache_server.coordination.members.placement import nodes_needed
from cache_server.shards.version_key import VersionKey


def check_capacity(
    wanted: Holdings,
    others: Iterable[Holdings],
    members: Mapping[str, Member],
    *,
    alive: Collection[str],
    will_be_removed: Callable[[VersionKey, pb.ActualDataset], bool],
) -> None:
    """Refuses a version that cannot fit beside stored shards and running loads.

    Args:
        wanted: the version to add; a version of unknown size is accepted.
        others: the versions that stay.
        members: all nodes.
        alive: ids of the nodes that answer.
        will_be_removed: whether a node is about to remove a version, which makes room.

    Raises:
        LoadError: names the node that is too small, the number of nodes needed, and lost nodes.
    """
    sizes = wanted.shard_bytes()
    if sizes is None:
        return
    spec = wanted.version.pinned.spec
    awaited: Counter[str] = Counter()
    for other in others:
        awaited.update(other.missing_bytes())
    for node_id, needed in sorted(wanted.missing_bytes().items()):
        limit = members[node_id].node.memory_limit_bytes
        stored = _lasting_bytes(members[node_id], will_be_removed)
        if not limit or stored + awaited[node_id] + needed <= limit:
            continue
        loading = f" and waits for {awaited[node_id]}" if awaited[node_id] else ""
        nodes = nodes_needed(sizes, spec.replicas, limit)
        needs = (
            f"{nodes} node{'s' * (nodes > 1)}"
            if nodes
            else "a smaller target_shard_bytes: no number of nodes"
        )
        raise LoadError(
            f"dataset {spec.name!r} cannot fit: it puts about {needed} bytes on node "
            f"{node_id}, which holds {stored}{loading} of its memory limit of {limit}; the dataset "
            f"is about {sum(sizes)} bytes with replicas={spec.replicas} and needs {needs} "
            f"of that limit{'' if nodes else ' is enough'}{_are_lost(members.keys() - alive)}"
        )


def room_on(
    views: Iterable[Holdings],
    members: Mapping[str, Member],
    will_be_removed: Callable[[VersionKey, pb.ActualDataset], bool],
) -> dict[str, int | None]:
    """Free bytes of each node beside stored shards and running loads; None: it has no limit.

    Args:
        views: of every version.
        members: the nodes to look at.
        will_be_removed: see `check_capacity`.
    """
    awaited: Counter[str] = Counter()
    for view in views:
        awaited.update(view.missing_bytes())
    return {
        node_id: member.node.memory_limit_bytes
        - _lasting_bytes(member, will_be_removed)
        - awaited[node_id]
        if member.node.memory_limit_bytes
        else None
        for node_id, member in members.items()
    }


def _are_lost(node_ids: Set[str]) -> str:
    if not node_ids:
        return ""
    names = some_of(sorted(node_ids))
    return f"; nodes {names} are lost" if len(node_ids) > 1 else f"; node {names} is lost"


def _lasting_bytes(
    member: Member, will_be_removed: Callable[[VersionKey, pb.ActualDataset], bool]
) -> int:
    """Stored bytes of a node, without the versions that it is about to remove.

    Versions may share a file. Shards of one version never do, even if they are the same.
    """
    staying: set[str] = set()
    going: Counter[tuple[str, int]] = Counter()
    for key, actual in member.actual.items():
        files = Counter((s.checksum, s.num_bytes) for s in actual.shards if s.sealed)
        if will_be_removed(key, actual):
            going |= files
        else:
            staying.update(checksum for checksum, _ in files)
    removed = sum(
        size * count for (checksum, size), count in going.items() if checksum not in staying
    )
    return max(0, member.node.stored_bytes - removed)
