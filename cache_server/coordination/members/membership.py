"""The nodes of the cache: which ones answer, and the last report of each."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import PurePath

from cache_protocol.errors import ConfigError, InvalidTicketError, PermissionDeniedError
from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.shards import checked_names
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

MAX_MEMBERS = 1000
MAX_MEMBERS_OF_HOST = 64
MAX_HEARTBEAT_BYTES = 32 * 1024 * 1024  # about 300,000 shards
_SETTLE_S = 60.0  # longer than a node takes to restart
_HEARTBEATS_PER_S = 200  # of all nodes: about a tenth of a core
_HEARTBEATS_PER_TIMEOUT = 2.5
_SUSPECT_TIMEOUTS = 0.5  # longer than between two heartbeats
REPORT_S = 3.0  # longer than a node takes to find a new coordinator
_FORGET_TIMEOUTS = 60  # a member that is silent for this many node timeouts is removed


@dataclass(frozen=True)
class Answer:
    """What a node was told to hold.

    Attributes:
        number: of the answer; never used twice, also not by another coordinator.
        content: without what follows from the number of nodes and the report.
        as_of: what the content follows from, besides the report; compared.
    """

    number: int
    content: pb.HeartbeatResponse
    as_of: object = None


@dataclass
class Member:
    """A node and its last report.

    Attributes:
        reporter: the principal that reports for it; None: from before a restart.
        is_own: it is the node of this process.
        report: the number of its last report, in its process; 0: not numbered.
        answer: the last answer to it; None: there was none.
        running: the shards of each version whose loads have begun.
        has_news: whether the report changed, apart from the time of the last read.
        changed: the versions whose shards changed in the report, or all at a new place.
        is_placed_anew: a node joined, left or moved, so all versions are affected.
        untrusted: why its reports do not count; empty: they do. Ends with its process.
        host: where it answered the coordinator; empty: it was not asked.
    """

    node: pb.Node
    last_seen: float
    reporter: str | None = None
    heard: int = 0
    is_own: bool = False
    report: int = 0
    answer: Answer | None = None
    actual: dict[VersionKey, pb.ActualDataset] = field(default_factory=dict)
    former: FormerProcess | None = None
    running: dict[VersionKey, frozenset[int]] = field(default_factory=dict)
    has_news: bool = True
    changed: Set[VersionKey] = frozenset()
    is_placed_anew: bool = True
    untrusted: str = ""
    host: str = ""


@dataclass(frozen=True)
class FormerProcess:
    """The process or location of a node before its last change, and when it was last seen."""

    node: pb.Node
    last_seen: float


class Membership:
    """The members of a cache. One thread at a time.

    Args:
        catalogue: keeps the ids over a restart. A node from the catalogue counts as alive until its
            timeout, so no shard moves before it can report.
        timeout_s: a node without a heartbeat for this long counts as lost.
        clock: monotonic seconds.

    Attributes:
        heard: how many heartbeats were taken.
        waiting_since: when the oldest report came that waits to be taken; infinite if none waits.
            The time since then counts for no node as silence: its report may be behind that one.
        unread_at: when the last report came that was never read: its sender gave up waiting. It
            may be of any node, so no node that answered then was silent before.
    """

    def __init__(self, catalogue: Catalogue, timeout_s: float, clock: Callable[[], float]) -> None:
        self._catalogue = catalogue
        self._timeout_s = timeout_s
        self._clock = clock
        self.waiting_since: Callable[[], float] = lambda: math.inf
        self.unread_at: Callable[[], float] = lambda: -math.inf
        self._unread_at = -math.inf
        zones = catalogue.read_zones()
        self._members = {  # in the order of their last reports
            node_id: Member(pb.Node(id=node_id, zone=zones.get(node_id, "")), clock())
            for node_id in catalogue.read_members()
        }
        self.heard = 0
        self._unwritten = False
        self._names: tuple[str, ...] | None = None
        self._zones: dict[str, str] | None = None
        self._written_zones: Mapping[str, str] = zones
        self._back_at = -math.inf  # the last return of a lost node
        self._alive: frozenset[str] = frozenset()
        self._alive_until = -math.inf

    @property
    def members(self) -> Mapping[str, Member]:
        """Every member by node id, lost ones too."""
        return self._members

    def names(self) -> tuple[str, ...]:
        """The ids of all members, sorted; the same object until a node joins or leaves."""
        if self._names is None:
            self._names = tuple(sorted(self._members))
        return self._names

    def zones(self) -> Mapping[str, str]:
        """The zones of members that have one; the same object until one has another."""
        if self._zones is None:
            members = sorted(self._members.items())
            self._zones = {node_id: m.node.zone for node_id, m in members if m.node.zone}
        return self._zones

    def alive(self) -> frozenset[str]:
        """The ids of the members that answer and are trusted; the same object until they change."""
        self._take_unread()
        if self._heard_until() > self._alive_until:
            seen = {
                node_id: member.last_seen
                for node_id, member in self._members.items()
                if self._answers(member) and not member.untrusted
            }
            if seen.keys() != self._alive:
                self._alive = frozenset(seen)
            self._alive_until = min(seen.values(), default=-math.inf) + self._timeout_s
        return self._alive

    def interval_s(self, wanted_s: float) -> float:
        """The time between two heartbeats of a node, longer with many nodes.

        A node that misses one heartbeat is not lost. While one is about to be lost, the others come
        more often, so that they soon hear of its shards.
        """
        longest_s = self._timeout_s / _HEARTBEATS_PER_TIMEOUT
        if self._is_one_about_to_be_lost():
            longest_s /= 2
        return max(wanted_s, min(longest_s, len(self._members) / _HEARTBEATS_PER_S))

    def _is_one_about_to_be_lost(self) -> bool:
        silent = self._silent_for(_SUSPECT_TIMEOUTS * self._timeout_s)
        return any(self._answers(self._members[node_id]) for node_id in silent)

    def distrust(self, node_id: str, reason: str) -> None:
        """Ignores the reports of a node until its process changes."""
        member = self._members[node_id]
        if not member.untrusted:
            logger.error("node untrusted id=%s reason=%s", node_id, reason)
            member.untrusted = reason
            self._alive_until = -math.inf

    def count_silence(self, silent_s: float) -> None:
        """Counts what passed before this coordinator as silence of the nodes of the catalogue.

        Who waits for the shards of a lost one has waited since then, too. But each node has a few
        seconds to report to this coordinator.
        """
        left_s = max(self._timeout_s - silent_s, min(REPORT_S, self._timeout_s))
        seen = self._clock() - self._timeout_s + left_s
        for member in self._members.values():
            member.last_seen = min(member.last_seen, seen)

    def _heard_until(self) -> float:
        """The moment until which all reports that came were taken."""
        return min(self._clock(), self.waiting_since())

    def _take_unread(self) -> None:
        if (came_at := self.unread_at()) <= self._unread_at:
            return
        self._unread_at = came_at
        for node_id in self._alive & self._members.keys():
            member = self._members[node_id]
            member.last_seen = max(member.last_seen, came_at)

    def _answers(self, member: Member) -> bool:
        return member.last_seen >= self._heard_until() - self._timeout_s

    def is_stable(self) -> bool:
        """Whether no node was lost or came back within the last minute."""
        now = self._heard_until()
        unstable_since = now - self._timeout_s - _SETTLE_S
        is_lost = any(
            self._members[node_id].last_seen >= unstable_since
            for node_id in self._silent_for(self._timeout_s)
        )
        return not is_lost and now - self._back_at > _SETTLE_S

    def nodes(self) -> list[pb.Node]:
        """Every member by id, with ``alive`` and ``untrusted`` set."""
        alive = self.alive()
        result = []
        for node_id in sorted(self._members):
            node = pb.Node()
            node.CopyFrom(self._members[node_id].node)
            node.alive = node_id in alive
            node.untrusted = self._members[node_id].untrusted
            result.append(node)
        return result

    def completes(self, request: pb.HeartbeatRequest, reporter: str) -> bool:
        """Whether what a report leaves out is known, from an earlier one of the same process.

        If it is not, the node must report everything: this coordinator has started again, or a
        report or its answer was lost.
        """
        known = self._members.get(request.node.id)
        if request.since and (known is None or not _is_same(known.node, request.node)):
            return False  # its functions are not known
        if not any(actual.unchanged for actual in request.datasets):
            return True
        return (
            known is not None
            and known.report == request.since != 0
            and known.reporter == reporter
            and _is_same(known.node, request.node)
            and all(
                VersionKey(actual.dataset, actual.fingerprint) in known.actual
                for actual in request.datasets
                if actual.unchanged
            )
        )

    def knows(self, node_id: str) -> bool:
        """Whether a node has a place that it answered for, or is that of this process."""
        known = self._members.get(node_id)
        return known is not None and (known.is_own or bool(known.host))

    def apply_heartbeat(
        self,
        request: pb.HeartbeatRequest,
        reporter: str,
        *,
        is_own: bool = False,
        host: str = "",
    ) -> Member:
        """Makes the node of a heartbeat a member; removes members that were silent for long.

        Such a member is, for example, a pod that came back under another name. `completes` must
        hold.

        Args:
            reporter: the principal that sent it. An id is theirs until the node counts as lost.
            is_own: the node of this process sent it. Its id is always its own.
            host: where a new node answered the coordinator; its place counts for this machine.

        Raises:
            ConfigError: another live node has the same id, or there are too many members, or too
                many on this host.
            InvalidTicketError: the report has a name that no node gives.
            PermissionDeniedError: another principal reported for this id.
        """
        node_id = request.node.id
        known = self._members.get(node_id)
        if known is None or known.node != request.node:
            _check_node(request.node)
        keys = _checked_keys(request)
        if (
            known is not None
            and not is_own
            and known.reporter not in (None, reporter)
            and self._answers(known)
        ):
            raise PermissionDeniedError(
                f"{reporter!r} reported for node {node_id}, which is of {known.reporter!r} until "
                "it counts as lost"
            )
        if known is None:
            self._require_place(node_id)
        host = host or (known.host if known is not None else "")
        if known is None or known.host != host:
            self._require_place_of_host(node_id, host)
        joined = known is None
        if request.since and known is not None and _is_same(known.node, request.node):
            request.node.ClearField("functions")
            request.node.functions.extend(known.node.functions)
        former = self._former(known, request.node, is_own=is_own)
        self.heard += 1
        member = Member(
            request.node,
            self._clock(),
            reporter,
            self.heard,
            is_own,
            request.report,
            former=former,
            host=host,
        )
        member.actual = dict(zip(keys, request.datasets, strict=True))
        member.changed = member.actual.keys()
        if known is not None:
            member.changed |= known.actual.keys()
            if known.node.process == request.node.process:
                member.untrusted = known.untrusted
            if known.reporter == reporter and _is_same(known.node, request.node):
                member.answer = known.answer
            if is_back := not self._answers(known):
                self._back_at = member.last_seen
            if _is_same(known.node, request.node) and known.reporter == reporter:
                member.changed = _changed(known, member)
                member.running = known.running
            member.is_placed_anew = is_back or not _is_same_place(known.node, request.node)
            member.has_news = (
                member.is_placed_anew or bool(member.changed) or known.node != request.node
            )
        member.running = _running(member)
        if member.has_news:
            _check_shards(request)
        self._members.pop(node_id, None)
        self._members[node_id] = member
        if node_id not in self._alive:
            self._alive_until = -math.inf
        gone = sorted(self._silent_for(_FORGET_TIMEOUTS * self._timeout_s))
        for silent in gone:
            del self._members[silent]
        if joined or gone:
            logger.info("members id=%s joined=%s gone=%s", node_id, joined, gone)
            self._names = None
            self._unwritten = member.has_news = member.is_placed_anew = True
        if joined or gone or known is None or known.node.zone != member.node.zone:
            self._zones, self._unwritten = None, True
        if self._unwritten:
            self._write()
        return member

    def _require_place(self, node_id: str) -> None:
        """Makes room for a new member: the one that was silent longest gives its place, if lost."""
        if len(self._members) < MAX_MEMBERS:
            return
        longest_silent = next(iter(self._members))
        if self._answers(self._members[longest_silent]):
            raise ConfigError(
                f"node {node_id} cannot join: a cache has at most {MAX_MEMBERS} members"
            )
        logger.info("member gives its place id=%s to=%s", longest_silent, node_id)
        del self._members[longest_silent]
        self._names = self._zones = None

    def _require_place_of_host(self, node_id: str, host: str) -> None:
        others = (m for m in self._members.values() if self._answers(m) and m.node.id != node_id)
        if host and sum(other.host == host for other in others) >= MAX_MEMBERS_OF_HOST:
            raise ConfigError(
                f"node {node_id} cannot join: a cache has at most {MAX_MEMBERS_OF_HOST} members on "
                f"a machine, and {host} has them"
            )

    def _former(self, known: Member | None, node: pb.Node, *, is_own: bool) -> FormerProcess | None:
        """The former process of a node.

        A node may restart at another location. If both processes report, they are two nodes with
        one id.
        """
        if known is None:
            return None
        if not known.node.flight_location or _is_same(known.node, node):  # its first report
            return known.former
        former = known.former
        if (
            former is not None
            and not is_own
            and _is_same(former.node, node)
            and self._clock() - former.last_seen < self._timeout_s
            and self._clock() - known.last_seen < self._timeout_s
        ):
            known.former = replace(former, last_seen=self._clock())
            raise ConfigError(_two_nodes(node, known.node))
        return FormerProcess(known.node, known.last_seen)

    def _silent_for(self, seconds: float) -> Iterator[str]:
        oldest = self._heard_until() - seconds
        return takewhile(lambda node_id: self._members[node_id].last_seen < oldest, self._members)

    def _write(self) -> None:
        try:
            if self.zones() != self._written_zones:
                self._catalogue.write_zones(self.zones())
                self._written_zones = self.zones()
            self._catalogue.write_members(self._members)
            self._unwritten = False
        except OSError as error:  # matters only after a restart; tried again at each heartbeat
            logger.error("members not written reason=%s", error.strerror)


def _checked_keys(request: pb.HeartbeatRequest) -> list[VersionKey]:
    """The versions of a report, after a check of their names and its size.

    Raises:
        InvalidTicketError: quotes the bad value.
    """
    num_bytes = request.ByteSize()
    if num_bytes > MAX_HEARTBEAT_BYTES:
        raise InvalidTicketError(
            f"a heartbeat has at most {MAX_HEARTBEAT_BYTES} bytes, got {num_bytes}"
        )
    return [
        checked_names.version_key(actual.dataset, actual.fingerprint) for actual in request.datasets
    ]


def _check_node(node: pb.Node) -> None:
    """Checks what a node says of itself.

    Raises:
        InvalidTicketError: quotes the bad value.
    """
    checked_names.token(node.id, "node id")
    checked_names.zone(node.zone)
    if node.flight_location:
        checked_names.location(node.flight_location)
    if node.control_location:
        checked_names.address(node.control_location)
    if node.cache_dir and not PurePath(node.cache_dir).is_absolute():
        raise InvalidTicketError(f"not an absolute cache_dir: {node.cache_dir[:200]!r}")


def _check_shards(request: pb.HeartbeatRequest) -> None:
    """Checks the shards of a report; there may be 100,000 of them.

    Raises:
        InvalidTicketError: quotes the bad value.
    """
    for actual in request.datasets:
        checked_names.shard_index(actual.num_shards)
        times = Counter(shard.index for shard in actual.shards if shard.sealed)
        if twice := [index for index, count in times.items() if count > 1]:
            raise InvalidTicketError(
                f"a report names shard {twice[0]} of {actual.dataset!r} as sealed more than once"
            )
        for shard in actual.shards:
            checked_names.shard_index(shard.index)
            if shard.sealed:
                checked_names.token(shard.checksum, "checksum")


def _changed(before: Member, now: Member) -> Set[VersionKey]:
    """The versions whose reports differ in more than ``idle_s``; others stay the same objects."""
    changed = before.actual.keys() ^ now.actual.keys()
    for key, actual in now.actual.items():
        if (known := before.actual.get(key)) is None:
            continue
        if actual.HasField("idle_s"):
            known.idle_s = actual.idle_s
        else:
            known.ClearField("idle_s")
        if known is actual or actual.unchanged or known == actual:
            now.actual[key] = known
        else:
            changed.add(key)
    return changed


def _running(member: Member) -> dict[VersionKey, frozenset[int]]:
    """The running loads, brought up to date with the changed versions."""
    running = {key: loads for key, loads in member.running.items() if key not in member.changed}
    for key in member.changed & member.actual.keys():
        shards = member.actual[key].shards
        if indices := frozenset(shard.index for shard in shards if shard.running):
            running[key] = indices
    return running


def _is_same(node: pb.Node, other: pb.Node) -> bool:
    """Whether two nodes with one id are the same process at the same location."""
    return (node.flight_location, node.process) == (other.flight_location, other.process)


def _is_same_place(node: pb.Node, other: pb.Node) -> bool:
    """Whether readers find two nodes with one id in the same way."""
    return without_sums(node) == without_sums(other)


def without_sums(node: pb.Node) -> pb.Node:
    """A node without what it stores, which changes with every shard."""
    plain = pb.Node()
    plain.CopyFrom(node)
    plain.ClearField("stored_bytes")
    plain.ClearField("stored_shards")
    return plain


def _two_nodes(node: pb.Node, other: pb.Node) -> str:
    """The error for two nodes with one id."""
    if node.flight_location == other.flight_location:
        return (
            f"two nodes are at {node.flight_location} and have the same id {node.id}: give each "
            "another --advertise or --flight-port"
        )
    return (
        f"nodes at {node.flight_location} and {other.flight_location} have the same id {node.id}: "
        "one's cache directory is a copy of the other's; empty it, or remove its "
        f"{NODE_ID_FILE}"
    )
