"""Takes nodes out of the cache without a loss: their shards move to other nodes first.

A drained node takes no shards, and serves its own until other nodes serve them: see
`Cluster.takers` and `desired_shards`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set

from cache_protocol.errors import RequestError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.members.clusters import Cluster
from cache_server.coordination.members.drain_plan import (
    NO_TAKER,
    DrainPlan,
    LeavingShard,
    plan_drain,
)
from cache_server.coordination.members.drains import Drain, find_node
from cache_server.coordination.members.membership import Member
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.shards.put_key import PutKey

logger = logging.getLogger(__name__)


class Draining:
    """Drains nodes. Thread-safe, except where a method says that the caller has the lock."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def nodes(self) -> list[pb.Node]:
        """Every known node, by id, with its drain."""
        with self._state.changed:
            nodes = self._state.membership.nodes()
            for node in nodes:
                if (drain := self.progress(node.id)) is not None:
                    node.drain.CopyFrom(drain)
            return nodes

    def drain(self, name: str) -> pb.Node:
        """Begins to move the shards of a node away; again: to plan anew for new datasets.

        Args:
            name: of the node; see `find_node`.

        Raises:
            RequestError: no such node, or its shards do not fit elsewhere; nothing is moved then.
        """
        with self._state.changed:
            node = find_node(self._state.membership.nodes(), name)
            if not node.alive:
                raise RequestError(f"node {node.id} at {node.flight_location} does not answer")
            if why_not := self._begin(node):
                raise RequestError(f"node {node.id} cannot be drained: {why_not}")
        self._state.notify_listeners()
        return self._described(node.id)

    def undrain(self, name: str) -> pb.Node:
        """Ends a drain: the node takes shards again.

        Raises:
            RequestError: no such node, or it ends.
        """
        with self._state.changed:
            node = find_node(self._state.membership.nodes(), name)
            if node.alive and node.leaving:
                raise RequestError(f"node {node.id} ends: it takes shards when it starts again")
            self._end(node.id)
        self._state.notify_listeners()
        return self._described(node.id)

    def _described(self, node_id: str) -> pb.Node:
        return next((node for node in self.nodes() if node.id == node_id), pb.Node(id=node_id))

    def apply_report(self, member: Member) -> pb.Drain | None:
        """Takes a report: ends the drains of nodes that started again, drains one that leaves.

        The caller has the lock.

        Returns:
            Why nothing is moved away from a node that leaves; None: it is, or it stays.
        """
        members = self._state.membership.members
        processes = {
            node_id: members[node_id].node.process
            for node_id in self._state.drains.by_node
            if node_id in members
        }
        self._end(*self._state.drains.ended(processes))
        node = member.node
        if not node.leaving or member.untrusted:
            return None
        under_way = self.progress(node.id)
        if under_way is None:
            why_not = self._begin(node)
        else:  # the nodes that took its shards may leave or be lost, too
            why_not = "" if under_way.done or self._takers(node.id) else NO_TAKER
        return pb.Drain(refused=why_not) if why_not else None

    def progress(self, node_id: str) -> pb.Drain | None:
        """How far a node is drained; None: it is not. The caller has the lock."""
        state = self._state
        drain, member = state.drains.by_node.get(node_id), state.membership.members.get(node_id)
        if drain is None or member is None:
            return None
        progress = pb.Drain(waits=self._waits(member))
        for version in self._versions():
            for shard in state.holdings(version).desired(node_id).shards:
                progress.shards_left += 1
                if shard.index in version.sealed:
                    progress.bytes_left += version.sealed[shard.index].num_bytes
        progress.done = not progress.shards_left and not progress.waits
        return progress

    def _versions(self) -> Iterator[VersionRecord]:
        versions = self._state.versions.values()
        return (v for v in versions if not (v.state.has_failed or v.state.is_evicted))

    def _waits(self, member: Member) -> str:
        """What no node can copy from this one now."""
        state = self._state
        writes, unknown = set(), set()
        orphans = state.orphans.find()
        for key in member.actual.keys() - state.versions.keys():
            put = PutKey.of(key.fingerprint)
            if put is not None and state.writes.is_open(put):
                writes.add(f"{key.dataset} (write {put.write_id})")
            elif key in orphans:
                unknown.add(key.dataset)
        reasons = []
        if writes:
            reasons.append(f"it has rows of open writes to {some_of(sorted(writes))}: commit them")
        if unknown:
            reasons.append(
                f"it has rows of {some_of(sorted(unknown))}, which this coordinator does not know: "
                "load their specs again"
            )
        return "; ".join(reasons)

    def _begin(self, node: pb.Node) -> str:
        """Plans a drain and begins it; returns why it cannot be."""
        plan = self._plan(node.id)
        if plan.why_not:
            logger.error("drain refused id=%s reason=%s", node.id, plan.why_not)
            return plan.why_not
        self._state.drains.begin(node.id, Drain(node.process, plan.moves))
        logger.info("drain begins id=%s", node.id)
        self._look_again()
        return ""

    def _end(self, *node_ids: str) -> None:
        if self._state.drains.by_node.keys() & set(node_ids):
            self._state.drains.end(*node_ids)
            logger.info("drain ends ids=%s", ",".join(node_ids))
            self._look_again()

    def _look_again(self) -> None:
        self._state.clusters.look_again()
        self._state.mark_changed()

    def _plan(self, node_id: str) -> DrainPlan:
        """Where the shards of a node go."""
        state, membership = self._state, self._state.membership
        others = {id_: drain for id_, drain in state.drains.by_node.items() if id_ != node_id}
        drains = {**others, node_id: Drain("")}
        zones = membership.zones()
        cluster = Cluster(membership.names(), membership.alive(), drains=drains, zones=zones)
        leaving = [
            shard
            for version in self._versions()
            for shard in self._leaving(version, node_id, cluster)
        ]
        return plan_drain(leaving, state.room_on(self._takers(node_id)), zones)

    def _takers(self, node_id: str) -> Set[str]:
        """The other nodes that answer, stay and are not drained."""
        members = self._state.membership.members
        others = self._state.membership.alive() - self._state.drains.by_node.keys() - {node_id}
        return {other for other in others if not members[other].node.leaving}

    def _leaving(
        self, version: VersionRecord, node_id: str, cluster: Cluster
    ) -> Iterator[LeavingShard]:
        """The shards of a version that leave a node.

        Args:
            cluster: without the node.
        """
        state = self._state
        now = state.holdings(version)
        sizes = now.shard_bytes()
        if sizes is None:
            return  # its load begins again elsewhere
        then = Holdings(version, state.membership.members, cluster, state.checks)
        held, placed = now.holders(serving=False), now.placement(len(sizes))
        for index, homes in enumerate(then.placement(len(sizes))):
            holders = held.get(index, frozenset())
            if node_id in holders or node_id in placed[index]:
                yield LeavingShard(
                    version.pinned.key, index, sizes[index], homes, frozenset(holders - {node_id})
                )
