"""Takes what nodes say that they hold: what counts, what waits, and who is not trusted."""

from __future__ import annotations

import logging
from collections.abc import Set

from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.holdings.holder_checks import Holder, Outcome, Said, ShardCheck
from cache_server.coordination.members.membership import Member
from cache_server.coordination.versions.version_record import VersionRecord

logger = logging.getLogger(__name__)


class Claims:
    """The claims of all nodes. Inside the lock, except where a method says otherwise."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._proven = self._written_proven = frozenset(state.catalogue.read_proven())
        self._is_writing = False

    def was_proven(self, node_id: str) -> bool:
        """Whether a node was proven to hold a shard, also before a restart."""
        return node_id in self._proven

    def distrust_liar(self, node_id: str) -> None:
        """Marks a node that claims what contradicts the other nodes."""
        for version in self._state.versions.values():
            suspect = version.state.was_served and node_id in version.contradicted
            if suspect and (lie := self._state.holdings(version).lie(node_id)):
                self.distrust(node_id, lie)
                return

    def distrust(self, node_id: str, reason: str) -> None:
        """Takes no claim of a node any more."""
        self._state.membership.distrust(node_id, reason)
        self._state.clusters.look_again()
        self._state.checks.forget_node(node_id)
        self._proven -= {node_id}
        for version in self._state.versions.values():
            version.forget_claims(node_id)
        self._state.mark_changed()

    def apply_news(self, member: Member, *, believed: bool) -> None:
        """Takes the news of a report.

        Args:
            believed: its claims count without a look at the files.
        """
        if member.is_placed_anew:
            self._state.mark_changed()  # placement depends on the members
            self._state.checks.keep_nodes(self._state.membership.members)
        if not member.untrusted:
            node = member.node
            self._state.checks.meet(Holder(node.id, member.reporter or "", node.flight_location))
            for key in member.changed & self._state.versions.keys():
                self._state.mark_changed(key, node.id)
                self.apply(self._state.versions[key], node.id, believed=believed)

    def apply_waiting(self, node_id: str) -> None:
        """Takes what a node said of shards that it is to load by now."""
        for version in self._state.versions.values():
            if self._may_record_waiting(version, node_id):
                self.apply(version, node_id)

    def _may_record_waiting(self, version: VersionRecord, node_id: str) -> bool:
        """Whether a node holds shards without a record, and is to load one of them by now."""
        waiting = version.waiting.get(node_id)
        if waiting is None or version.num_shards is None:
            return False
        view = self._state.holdings(version)
        return any(
            index < version.num_shards and view.may_load(node_id, index) for index in waiting
        )

    def apply(self, version: VersionRecord, node_id: str, *, believed: bool = False) -> None:
        """Takes what a node says of a version, then what the nodes say that waited for this."""
        again = {node_id}
        while again:
            each = again.pop()
            again |= self._apply_report(version, each, believed=believed and each == node_id)
            self._state.mark_changed(version.pinned.key, each)

    def _apply_report(self, version: VersionRecord, node_id: str, *, believed: bool) -> Set[str]:
        """Takes what a node says of a version; returns the nodes that waited for this."""
        key = version.pinned.key
        if node_id not in self._state.membership.members:
            version.forget_claims(node_id)
            return frozenset()
        view = self._state.holdings(version)
        actual = view.last_report(node_id)
        had_run = version.num_shards is not None
        recorded = version.apply_report(
            actual, node_id, lambda index: believed or view.may_load(node_id, index)
        )
        if not had_run and version.num_shards is not None:
            waiting: Set[str] = set(version.waiting)
        else:
            waiting = version.waiting_for(recorded)
        said = {}
        for shard in actual.shards:
            if shard.sealed and version.agrees(shard) and not version.is_outdated(shard):
                is_known = shard.checksum == version.sealed[shard.index].checksum
                said[shard.index] = Said(shard.num_bytes, shard.checksum, is_known)
        recorded |= version.take_put(node_id, said.keys())
        shared = {s.index for s in actual.shards if s.index in said and view.is_shared(s, node_id)}
        self._state.checks.apply_report(
            key,
            node_id,
            said,
            self._state.clock(),
            believed=said if believed else recorded | shared,
        )
        return waiting - {node_id}

    def has_unwritten(self) -> bool:
        """Whether nodes are proven to hold a shard since the last write, and no thread writes."""
        self._proven |= self._state.checks.proven_nodes() - self._proven
        return not self._is_writing and self._proven != self._written_proven

    def write_proven(self) -> None:
        """Writes which nodes are proven to hold a shard, after a change; not inside the lock.

        One thread writes for all: the others would wait for the disk, and nodes for their answers.
        """
        with self._state.changed:
            if not self.has_unwritten():
                return
            self._is_writing = True
        try:
            while (proven := self._next_to_write()) is not None:
                self._state.catalogue.write_proven(proven)
        except BaseException as error:
            self._is_writing = False
            if not isinstance(error, OSError):
                raise
            # After a restart their files are read back.
            logger.error("members not written reason=%s", error.strerror)

    def _next_to_write(self) -> frozenset[str] | None:
        with self._state.changed:
            if self._proven == self._written_proven:
                self._is_writing = False
                return None
            self._written_proven = self._proven
            return self._proven

    def next_check(self, wait_s: float) -> ShardCheck | None:
        """The next file to read back from a node; `apply_check` must follow.

        Args:
            wait_s: for a file, if none is due.

        Returns:
            None if none was due.
        """
        with self._state.changed:
            if (check := self._next_check()) is None:
                self._state.changed.wait(wait_s)
                check = self._next_check()
            return check

    def _next_check(self) -> ShardCheck | None:
        return self._state.checks.next(self._state.membership.alive(), self._state.clock())

    def apply_check(self, check: ShardCheck, outcome: Outcome) -> None:
        """Takes the outcome of a check: the claim counts, or the node is not trusted."""
        key, index, node_id = check.claim
        if outcome is Outcome.DIFFERS:
            logger.warning("shard differs node=%s dataset=%s shard=%d", node_id, key.dataset, index)
        with self._state.changed:
            counted = node_id in self._state.checks.holders(key).get(index, ())
            lies = self._state.checks.apply_outcome(check, outcome, self._state.clock())
            if lies and node_id in self._state.membership.members:
                self.distrust(
                    node_id, f"{key.dataset!r}: the file of shard {index} has another checksum"
                )
            elif outcome is not Outcome.MATCHES or counted != (
                node_id in self._state.checks.holders(key).get(index, ())
            ):
                self._state.mark_changed(key, node_id)
            self._state.settle()
            must_write = self.has_unwritten()
        if must_write:
            self.write_proven()
        self._state.notify_listeners()
