"""Whether loads fit on the nodes, where the sizes are known beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from cache_protocol.errors import some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.members.membership import Member
from cache_server.coordination.members.placement import nodes_needed
from cache_server.shards.version_key import VersionKey


@dataclass(frozen=True)
class Shortage:
    """A node that has too little room for a version.

    Attributes:
        needed: bytes that the version puts on it.
        stored: bytes that it has.
        awaited: bytes of running loads that it waits for.
        limit: of its bytes.
    """

    node_id: str
    needed: int
    stored: int
    awaited: int
    limit: int

    @property
    def lack(self) -> int:
        """Bytes that do not fit."""
        return self.stored + self.awaited + self.needed - self.limit


def shortages(
    wanted: Holdings,
    others: Iterable[Holdings],
    members: Mapping[str, Member],
    will_be_removed: Callable[[VersionKey, pb.ActualDataset], bool],
) -> list[Shortage]:
    """The nodes on which a version does not fit beside stored shards and running loads, by id.

    Args:
        wanted: the version to add; one of unknown size fits.
        others: the versions that stay.
        members: all nodes.
        will_be_removed: whether a node is about to remove a version, which makes room.
    """
    missing = wanted.missing_bytes()
    if not any(members[node_id].node.memory_limit_bytes for node_id in missing):
        return []
    awaited: Counter[str] = Counter()
    for other in others:
        awaited.update(other.missing_bytes())
    all_of_them = (
        Shortage(
            node_id,
            needed,
            lasting_bytes(members[node_id], will_be_removed),
            awaited[node_id],
            members[node_id].node.memory_limit_bytes,
        )
        for node_id, needed in sorted(missing.items())
    )
    return [each for each in all_of_them if each.limit and each.lack > 0]


def refusal(wanted: Holdings, shortage: Shortage, lost: Set[str]) -> str:
    """Why a version is refused: names the node that is too small, and the number of nodes needed.

    Args:
        lost: ids of the nodes that do not answer.
    """
    sizes, spec = wanted.shard_bytes() or [], wanted.version.pinned.spec
    loading = f" and waits for {shortage.awaited}" if shortage.awaited else ""
    nodes = nodes_needed(sizes, spec.replicas, shortage.limit)
    needs = (
        f"{nodes} node{'s' * (nodes > 1)}"
        if nodes
        else "a smaller target_shard_bytes: no number of nodes"
    )
    return (
        f"dataset {spec.name!r} cannot fit: it puts about {shortage.needed} bytes on node "
        f"{shortage.node_id}, which holds {shortage.stored}{loading} of its memory limit of "
        f"{shortage.limit}; the dataset is about {sum(sizes)} bytes with replicas={spec.replicas} "
        f"and needs {needs} of that limit{'' if nodes else ' is enough'}{_are_lost(lost)}"
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
        will_be_removed: see `shortages`.
    """
    awaited: Counter[str] = Counter()
    for view in views:
        awaited.update(view.missing_bytes())
    return {
        node_id: member.node.memory_limit_bytes
        - lasting_bytes(member, will_be_removed)
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


def lasting_bytes(
    member: Member, will_be_removed: Callable[[VersionKey, pb.ActualDataset], bool]
) -> int:
    """Stored bytes of a node, without the versions that it is about to remove.

    Versions of a dataset may share a file. Shards of one version never do, even equal ones.
    """
    staying: set[tuple[str, str]] = set()
    going: Counter[tuple[str, str, int]] = Counter()
    for key, actual in member.actual.items():
        files = Counter((key.dataset, s.checksum, s.num_bytes) for s in actual.shards if s.sealed)
        if will_be_removed(key, actual):
            going |= files
        else:
            staying.update((dataset, checksum) for dataset, checksum, _ in files)
    removed = sum(
        size * count
        for (dataset, checksum, size), count in going.items()
        if (dataset, checksum) not in staying
    )
    return max(0, member.node.stored_bytes - removed)
