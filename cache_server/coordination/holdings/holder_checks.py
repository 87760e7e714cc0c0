"""Whose claim to hold a shard is proven, and which file to read next. Pure.

A checksum is public, so any node can repeat it. The coordinator believes the node that loads a
shard for the first time, as it was asked to: that claim makes the record. Every other claim counts
once the second reader has read the file back from the node, and it had the checksum. Proven files
are read again from time to time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

from cache_server.coordination.members.ended_nodes import WHOLE_QUERY, Indices
from cache_server.shards.version_key import VersionKey

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # of a node that did not give a file
_LOOK_EVERY_S = 1.0  # for proven files that are old
_MOST_LIES = 2  # an honest node drops a file that it finds damaged, and makes it again
_MOST_UNREAD = 8  # failed reads of a proven file, more than a minute
_SEEN_AT_ONCE = 32  # nodes, and claims of each, that are compared to choose the next file


class Holder(NamedTuple):
    """A node as the one that was checked: under another location it is another one.

    Attributes:
        reporter: the principal that reports for it.
    """

    node_id: str
    reporter: str
    location: str


class Claim(NamedTuple):
    """A node says that it holds a shard."""

    key: VersionKey
    shard: int
    node_id: str


@dataclass(frozen=True)
class ShardCheck:
    """A file to read back from a node.

    Attributes:
        checksum: that it must have.
        is_first: the node serves no row of it before.
    """

    claim: Claim
    holder: Holder
    num_bytes: int
    checksum: str
    is_first: bool


class Outcome(Enum):
    """What came of a check."""

    MATCHES = "matches"
    DIFFERS = "differs"
    UNREAD = "unread"  # the node did not give the file


class Said(NamedTuple):
    """What a node says of a shard.

    Attributes:
        is_known: the version has this checksum for the shard.
    """

    num_bytes: int
    checksum: str
    is_known: bool


@dataclass(slots=True)
class _State:
    """The state of a claim.

    Attributes:
        proven_at: seconds; None: not proven.
        unread: failed reads in a row.
    """

    said: Said
    proven_at: float | None = None
    unread: int = 0


_File = tuple[VersionKey, int]


@dataclass(slots=True)
class _Node:
    """What a node claims, and how its checks went.

    Attributes:
        assigned: the loads from the source that it was asked to do and has not proven.
        unprovable: the shards that no read can prove.
        pending: to be read, the oldest first.
        proven: likewise, by the time of the last read.
        revisions: version -> a number that changes with what is proven of it.
        lies: reads that found another checksum. A claim that is dropped and made again keeps them.
        failures: reads in a row without a file. Until `due` no read begins.
    """

    holder: Holder
    assigned: dict[VersionKey, set[int | None]] = field(default_factory=dict)
    claims: dict[VersionKey, dict[int, _State]] = field(default_factory=dict)
    unprovable: dict[VersionKey, set[int]] = field(default_factory=dict)
    pending: dict[_File, None] = field(default_factory=dict)
    proven: dict[_File, None] = field(default_factory=dict)
    revisions: dict[VersionKey, int] = field(default_factory=dict)
    lies: Counter[_File] = field(default_factory=Counter)
    failures: int = 0
    due: float = 0.0
    is_read: bool = False

    def pause(self, now: float) -> None:
        """Lets some time pass before the next read, more after each failure."""
        pause_s = _FIRST_PAUSE_S * 2 ** min(max(self.failures - 1, 0), 10)
        self.due = now + min(pause_s, _LONGEST_PAUSE_S)


class HolderChecks:
    """The claims of all nodes. One thread at a time.

    Args:
        again_after_s: a proven file is read again after this time; 0: never.
    """

    def __init__(self, again_after_s: float) -> None:
        self._again_after_s = again_after_s or math.inf
        self._nodes: dict[str, _Node] = {}
        self._waiting: dict[str, None] = {}  # nodes with pending claims; read last: at the end
        self._holders: defaultdict[VersionKey, dict[int, set[str]]] = defaultdict(dict)
        self._proven_nodes: set[str] = set()
        self._revision = 0
        self._look_at = -math.inf  # no proven file is old before

    def meet(self, holder: Holder) -> None:
        """Notes who reports under a node id; forgets what was proven of another one."""
        known = self._nodes.get(holder.node_id)
        if known is None or known.holder != holder:
            self.forget_node(holder.node_id)
            self._nodes[holder.node_id] = _Node(holder)

    def assign(self, key: VersionKey, node_id: str, indices: Indices) -> None:
        """Notes the loads from the source that a node is asked to do."""
        if indices and node_id in self._nodes:
            self._nodes[node_id].assigned.setdefault(key, set()).update(indices)

    def is_assigned(self, key: VersionKey, node_id: str, index: int | None) -> bool:
        """Whether a node was asked to load a shard, or the whole query, and has not proven it."""
        assigned = self._nodes[node_id].assigned.get(key, ()) if node_id in self._nodes else ()
        return index in assigned or WHOLE_QUERY in assigned

    def apply_report(
        self,
        key: VersionKey,
        node_id: str,
        said: Mapping[int, Said],
        now: float,
        *,
        believed: Collection[int] = (),
    ) -> None:
        """Takes what a node says now of one version; `meet` must have noted the node.

        Args:
            said: by shard; without those that contradict the version.
            believed: the shards whose claims are not read first.
        """
        node = self._nodes[node_id]
        claims = node.claims.setdefault(key, {})
        for index in claims.keys() - said.keys():
            self._forget(node, key, index)
        for index, now_said in said.items():
            state = claims.get(index)
            if state is not None and state.said == now_said:
                continue
            self._forget(node, key, index)
            claims[index] = _State(now_said)
            if index in believed:
                self._prove(node, key, index, now)
            elif now_said.is_known or self.is_assigned(key, node_id, index):
                self._queue(node, key, index)
            else:
                node.unprovable.setdefault(key, set()).add(index)

    def holders(self, key: VersionKey) -> Mapping[int, Set[str]]:
        """The nodes whose claims to hold a shard of a version count."""
        return self._holders.get(key, {})

    def revision(self, key: VersionKey, node_id: str) -> int:
        """A number that changes with the claims of a node that count; 0: there were none."""
        node = self._nodes.get(node_id)
        return 0 if node is None else node.revisions.get(key, 0)

    def _revise(self, node: _Node, key: VersionKey) -> None:
        self._revision += 1
        node.revisions[key] = self._revision

    def proven_nodes(self) -> Set[str]:
        """The nodes that hold a shard for certain."""
        return self._proven_nodes

    def is_doubtful(self, key: VersionKey, index: int, node_id: str) -> bool:
        """Whether a read of an unproven file failed: no other node should wait for it."""
        node = self._nodes.get(node_id)
        state = None if node is None else node.claims.get(key, {}).get(index)
        if node is None or state is None or state.proven_at is not None:
            return False
        return bool(state.unread or node.lies[key, index])

    def unprovable(self, key: VersionKey, node_id: str) -> Set[int]:
        """The shards that a node holds and no read can prove: they have other checksums."""
        node = self._nodes.get(node_id)
        return frozenset() if node is None else node.unprovable.get(key, frozenset())

    def next(self, alive: Set[str], now: float) -> ShardCheck | None:
        """The next file to read; its outcome must follow. None: nothing is due.

        Nodes take turns. Shards without a proven holder come first, proven files that are old come
        last.
        """
        idle = (node for node in self._of(self._waiting) if self._may_read(node, alive, now))
        fallback: tuple[_Node, _File] | None = None
        for node in islice(idle, _SEEN_AT_ONCE):
            for key, index in islice(node.pending, _SEEN_AT_ONCE):
                if self._holders[key].get(index, set()).isdisjoint(alive):
                    return self._begin(node, (key, index), is_first=True)
            fallback = fallback or (node, next(iter(node.pending)))
        if fallback is not None:
            return self._begin(*fallback, is_first=True)
        if now < self._look_at:
            return None
        old = [
            node
            for node in self._of(self._proven_nodes)
            if now - self._last_read(node) >= self._again_after_s
            and self._may_read(node, alive, now)
        ]
        if old:
            node = min(old, key=self._last_read)
            return self._begin(node, next(iter(node.proven)), is_first=False)
        self._look_at = now + _LOOK_EVERY_S
        return None

    def _of(self, node_ids: Iterable[str]) -> Iterator[_Node]:
        return map(self._nodes.__getitem__, node_ids)

    @staticmethod
    def _may_read(node: _Node, alive: Set[str], now: float) -> bool:
        return node.holder.node_id in alive and not node.is_read and node.due <= now

    @staticmethod
    def _last_read(node: _Node) -> float:
        key, index = next(iter(node.proven))
        proven_at = node.claims[key][index].proven_at
        return -math.inf if proven_at is None else proven_at

    def _begin(self, node: _Node, file: _File, *, is_first: bool) -> ShardCheck:
        key, index = file
        node.is_read = True
        node_id = node.holder.node_id
        if node_id in self._waiting:
            self._waiting[node_id] = self._waiting.pop(node_id)
        said = node.claims[key][index].said
        claim = Claim(key, index, node_id)
        return ShardCheck(claim, node.holder, said.num_bytes, said.checksum, is_first)

    def apply_outcome(self, check: ShardCheck, outcome: Outcome, now: float) -> bool:
        """Takes the outcome of a check; returns whether the node lies.

        One wrong file is no lie: an honest node finds the damage itself, and makes the file again.
        """
        key, index, node_id = check.claim
        node = self._nodes.get(node_id)
        if node is None or node.holder != check.holder:
            return False  # of another node meanwhile
        node.is_read = False
        node.failures = node.failures + 1 if outcome is Outcome.UNREAD else 0
        if outcome is not Outcome.MATCHES:
            node.pause(now)
        state = node.claims.get(key, {}).get(index)
        if state is None or state.said.checksum != check.checksum:
            return False  # of another file meanwhile
        if outcome is Outcome.MATCHES:
            state.unread = 0
            self._prove(node, key, index, now)
            return False
        if outcome is Outcome.DIFFERS:
            node.lies[key, index] += 1
            keeps_place = state.proven_at is None  # it is read again next
        else:
            state.unread += 1  # a node that is busy or lost is no liar
            keeps_place = state.proven_at is not None and state.unread < _MOST_UNREAD
        if not keeps_place:
            self._queue(node, key, index)
        return node.lies[key, index] >= _MOST_LIES

    def _prove(self, node: _Node, key: VersionKey, index: int, now: float) -> None:
        self._take_out(node, key, index)
        node_id = node.holder.node_id
        node.claims[key][index].proven_at = now
        node.proven[key, index] = None
        self._revise(node, key)
        node.assigned.get(key, set()).discard(index)
        self._holders[key].setdefault(index, set()).add(node_id)
        self._proven_nodes.add(node_id)

    def _queue(self, node: _Node, key: VersionKey, index: int) -> None:
        self._take_out(node, key, index)
        node.claims[key][index].proven_at = None
        node.pending[key, index] = None
        self._waiting.setdefault(node.holder.node_id)

    def _take_out(self, node: _Node, key: VersionKey, index: int) -> None:
        """Takes a claim out of all queues."""
        file, node_id = (key, index), node.holder.node_id
        node.unprovable.get(key, set()).discard(index)
        if file in node.pending:
            del node.pending[file]
            if not node.pending:
                del self._waiting[node_id]
        if file in node.proven:
            del node.proven[file]
            self._revise(node, key)
            self._holders[key][index].discard(node_id)
            if not node.proven:
                self._proven_nodes.discard(node_id)

    def _forget(self, node: _Node, key: VersionKey, index: int) -> None:
        if node.claims[key].pop(index, None) is not None:
            self._take_out(node, key, index)

    def forget(self, key: VersionKey) -> None:
        """Forgets a version."""
        for node in self._nodes.values():
            for index in list(node.claims.get(key, ())):
                self._forget(node, key, index)
            for by_version in (node.assigned, node.claims, node.unprovable, node.revisions):
                by_version.pop(key, None)
            for file in [file for file in node.lies if file[0] == key]:
                del node.lies[file]
        self._holders.pop(key, None)

    def forget_node(self, node_id: str) -> None:
        """Forgets what a node said, and what it was asked to do."""
        if (node := self._nodes.get(node_id)) is None:
            return
        for key, claims in node.claims.items():
            for index in list(claims):
                self._forget(node, key, index)
        del self._nodes[node_id]

    def keep_nodes(self, node_ids: Collection[str]) -> None:
        """Forgets all other nodes."""
        for node_id in self._nodes.keys() - node_ids:
            self.forget_node(node_id)
