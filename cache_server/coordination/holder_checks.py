"""Whose claim to hold a shard is proven, and which file to read next. Pure.

A checksum is public, so any node can repeat it. The coordinator believes the first node that loads
a shard from the source, as it was told to. Every other claim counts once the second reader has read
the file back from the node, and it had the checksum. Proven files are read again from time to time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple

from cache_server.shards.version_key import VersionKey

_WHOLE_QUERY = None  # in place of the index of a shard
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # after a failed read
_MOST_LIES = 2  # an honest node drops a file that it finds damaged, and claims it no more
_SEEN_AT_ONCE = 32  # claims that are compared to choose the next one


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


@dataclass(frozen=True, slots=True)
class Said:
    """What a node says of a shard.

    Attributes:
        is_known: the version has this checksum for the shard.
        is_first: no other node said anything of the shard before.
    """

    num_bytes: int
    checksum: str
    is_known: bool
    is_first: bool = False


@dataclass(slots=True)
class _State:
    """Of a claim.

    Attributes:
        proven_at: seconds; None: not proven.
        due: the next read may begin; only after a failed one.
        failures, lies: reads in a row without the file, and with another checksum.
    """

    said: Said
    proven_at: float | None = None
    due: float = 0.0
    failures: int = 0
    lies: int = 0


class HolderChecks:
    """The claims of all nodes. One thread at a time.

    Args:
        again_after_s: a proven file is read again after this time; 0: never.
    """

    def __init__(self, again_after_s: float) -> None:
        self._again_after_s = again_after_s
        self._holders: dict[str, Holder] = {}  # by node id
        self._told: dict[tuple[VersionKey, str], set[int | None]] = {}
        self._claims: dict[Claim, _State] = {}
        self._of: dict[tuple[VersionKey, str], set[int]] = {}  # the indices of `_claims`
        self._pending: dict[Claim, None] = {}  # the oldest first
        self._proven: dict[Claim, None] = {}  # likewise, by the time of the last read
        self._num_proven: Counter[str] = Counter()  # by node
        self._running: set[str] = set()  # nodes: one file at a time

    def meet(self, holder: Holder) -> None:
        """Notes who reports under a node id; forgets what was proven of another one."""
        if self._holders.get(holder.node_id, holder) != holder:
            self.forget_node(holder.node_id)
        self._holders[holder.node_id] = holder

    def note_told(self, key: VersionKey, node_id: str, indices: Set[int | None]) -> None:
        """Notes the loads from the source that a node was told to do; None: the whole query."""
        if indices:
            self._told.setdefault((key, node_id), set()).update(indices)

    def apply_report(
        self,
        key: VersionKey,
        node_id: str,
        said: Mapping[int, Said],
        now: float,
        *,
        believed: bool = False,
    ) -> None:
        """Takes what a node says now of one version.

        Args:
            said: by shard; without those that contradict the version.
            believed: no claim is checked first: of the coordinator's own node, or of a node that
                reports again after a restart of the coordinator.
        """
        told = self._told.get((key, node_id), set())
        before = self._of.get((key, node_id), set())
        for index in before - said.keys():
            self._forget(Claim(key, index, node_id))
        for index, now_said in said.items():
            claim = Claim(key, index, node_id)
            state = self._claims.get(claim)
            if state is not None and state.said == now_said:
                continue
            self._forget(claim)
            self._claims[claim] = _State(now_said)
            was_told = index in told or _WHOLE_QUERY in told
            if believed or (was_told and now_said.is_first):
                self._prove(claim, now)
            elif was_told or now_said.is_known:
                self._pending[claim] = None
        self._of[key, node_id] = set(said)

    def is_proven(self, key: VersionKey, index: int, node_id: str) -> bool:
        """Whether a claim counts."""
        return Claim(key, index, node_id) in self._proven

    def proven_nodes(self) -> Set[str]:
        """The nodes that hold a shard for certain."""
        return self._num_proven.keys()

    def is_doubtful(self, key: VersionKey, index: int, node_id: str) -> bool:
        """Whether a read of the file failed: no other node should wait for it."""
        state = self._claims.get(Claim(key, index, node_id))
        return state is not None and bool(state.failures or state.lies)

    def hopeless(self, key: VersionKey, node_id: str) -> set[int]:
        """The shards that a node holds and no read can prove: they have other checksums."""
        indices = self._of.get((key, node_id), set())
        claims = (Claim(key, index, node_id) for index in indices)
        return {c.shard for c in claims if c not in self._proven and c not in self._pending}

    def next(self, alive: Set[str], now: float) -> ShardCheck | None:
        """The next file to read; its outcome must follow. None: nothing is due.

        Shards without a proven holder come first, proven files that are old come last.
        """
        due = [
            claim
            for claim in islice(self._pending, _SEEN_AT_ONCE)
            if self._may_read(claim, alive) and self._claims[claim].due <= now
        ]
        if due:
            claim = min(due, key=lambda claim: self._is_held(claim, alive))
            return self._begin(claim, is_first=True)
        for claim in islice(self._proven, _SEEN_AT_ONCE if self._again_after_s else 0):
            proven_at = self._claims[claim].proven_at
            if proven_at is None or now - proven_at < self._again_after_s:
                break
            if self._may_read(claim, alive):
                return self._begin(claim, is_first=False)
        self._rotate(self._pending)
        return None

    def _may_read(self, claim: Claim, alive: Set[str]) -> bool:
        return claim.node_id in alive and claim.node_id not in self._running

    def _is_held(self, claim: Claim, alive: Set[str]) -> bool:
        return any(claim._replace(node_id=node_id) in self._proven for node_id in alive)

    @staticmethod
    def _rotate(claims: dict[Claim, None]) -> None:
        """Lets those be seen that are not the oldest."""
        for claim in list(islice(claims, _SEEN_AT_ONCE if len(claims) > _SEEN_AT_ONCE else 0)):
            del claims[claim]
            claims[claim] = None

    def _begin(self, claim: Claim, *, is_first: bool) -> ShardCheck:
        said = self._claims[claim].said
        self._running.add(claim.node_id)
        return ShardCheck(
            claim, self._holders[claim.node_id], said.num_bytes, said.checksum, is_first
        )

    def apply_outcome(self, check: ShardCheck, outcome: Outcome, now: float) -> bool:
        """Takes the outcome of a check; returns whether the node lies.

        One wrong file is no lie: an honest node finds the damage itself, and drops the file.
        """
        claim = check.claim
        self._running.discard(claim.node_id)
        state = self._claims.get(claim)
        holder = self._holders.get(claim.node_id)
        if state is None or (state.said.checksum, holder) != (check.checksum, check.holder):
            return False  # of another node or file meanwhile
        if outcome is Outcome.MATCHES:
            state.failures = state.lies = 0
            self._prove(claim, now)
        elif outcome is Outcome.UNREAD and not check.is_first:
            self._prove(claim, now)  # a node that is busy or lost is no liar
        else:
            self._unprove(claim)
            self._pending.pop(claim, None)
            self._pending[claim] = None
            state.failures += outcome is Outcome.UNREAD
            state.lies += outcome is Outcome.DIFFERS
            pause_s = _FIRST_PAUSE_S * 2 ** min(state.failures + state.lies - 1, 10)
            state.due = now + min(pause_s, _LONGEST_PAUSE_S)
        return state.lies >= _MOST_LIES

    def _prove(self, claim: Claim, now: float) -> None:
        self._claims[claim].proven_at = now
        self._pending.pop(claim, None)
        self._unprove(claim)
        self._proven[claim] = None
        self._num_proven[claim.node_id] += 1

    def _unprove(self, claim: Claim) -> None:
        if claim in self._proven:
            del self._proven[claim]
            self._num_proven[claim.node_id] -= 1
            if not self._num_proven[claim.node_id]:
                del self._num_proven[claim.node_id]

    def _forget(self, claim: Claim) -> None:
        self._claims.pop(claim, None)
        self._pending.pop(claim, None)
        self._unprove(claim)

    def forget(self, key: VersionKey) -> None:
        """Forgets a version."""
        self._drop(lambda known, _: known == key)

    def forget_node(self, node_id: str) -> None:
        """Forgets what a node said, and what it was told."""
        self._drop(lambda _, known: known == node_id)
        self._holders.pop(node_id, None)

    def _drop(self, is_meant: Callable[[VersionKey, str], bool]) -> None:
        for place in [place for place in self._of if is_meant(*place)]:
            for index in self._of.pop(place):
                self._forget(Claim(place[0], index, place[1]))
        for place in [place for place in self._told if is_meant(*place)]:
            del self._told[place]
