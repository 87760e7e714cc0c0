"""Whether shards fit on the nodes there are, where that is known before they are made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set

from cache_server.forecast import nodes_needed
from cache_server.holdings import Member
from cache_server.planning import VersionKey, bytes_by_node, place
from cache_server.versions import VersionPlan
from protos.errors import LoadError


def check_room(
    plan: VersionPlan,
    sizes: Sequence[int],
    members: Mapping[str, Member],
    alive: Collection[str],
    *,
    held: Mapping[int, Set[str]],
    is_going: Callable[[VersionKey], bool],
) -> None:
    """Refuses what cannot fit.

    Args:
        sizes: bytes of each shard.
        members, alive: as `cache_server.holdings.Holdings` has them.
        held: shard -> the nodes that have it already.
        is_going: whether the nodes are about to remove a version, so that it makes room.

    Raises:
        LoadError: quoting what it comes to on one node, and how many nodes would do.
    """
    placement = place(plan.key.fingerprint, len(sizes), members, plan.spec.replicas, alive=alive)
    lacking = [
        tuple(node_id for node_id in homes if node_id not in held.get(index, ()))
        for index, homes in enumerate(placement)
    ]
    for node_id, needed in sorted(bytes_by_node(lacking, sizes).items()):
        limit = members[node_id].node.memory_limit_bytes
        stored = _lasting_bytes(members[node_id], is_going)
        if limit and stored + needed > limit:
            raise LoadError(
                f"dataset {plan.spec.name!r} cannot fit: it puts about {needed} bytes on node "
                f"{node_id}, which holds {stored} of its memory limit of {limit}; "
                f"the dataset is about {sum(sizes)} bytes with replicas={plan.spec.replicas} "
                f"and needs {nodes_needed(plan, limit) or 'smaller shards: no number of'} "
                "nodes of that limit"
            )


def _lasting_bytes(member: Member, is_going: Callable[[VersionKey], bool]) -> int:
    """What a node holds, without the versions that it is about to remove."""
    going = sum(
        shard.num_bytes
        for key, actual in member.actual.items()
        if is_going(key)
        for shard in actual.shards
        if shard.sealed
    )
    return max(0, member.node.stored_bytes - going)
