"""Which nodes belong to the cache, which of them answer, and what each said last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cache_protocol.errors import ConfigError
from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_SETTLE_S = 60.0  # a node that starts again is back by then
_FORGET_TIMEOUTS = 60  # a member silent for so many node timeouts keeps no share any more


@dataclass
class Member:
    """A node, as it last reported.

    Attributes:
        back_at: when it reported for the first time after it was lost; None if it never was.
        has_news: whether the report said anything new, but for how long ago rows were read.
    """

    node: pb.Node
    last_seen: float
    back_at: float | None = None
    actual: dict[VersionKey, pb.ActualDataset] = field(default_factory=dict)
    former: FormerProcess | None = None
    has_news: bool = True


@dataclass(frozen=True)
class FormerProcess:
    """What a node was before it was another process, or somewhere else, and until when."""

    node: pb.Node
    last_seen: float


class Membership:
    """One thread at a time.

    Args:
        catalogue: keeps the names over a restart. Who is read back from it counts as alive until it
            has had time to report, so that nothing moves meanwhile.
        timeout_s: after so long without a heartbeat a node counts as lost.
        clock: monotonic seconds.
    """

    def __init__(self, catalogue: Catalogue, timeout_s: float, clock: Callable[[], float]) -> None:
        self._catalogue = catalogue
        self._timeout_s = timeout_s
        self._clock = clock
        self._members = {
            node_id: Member(pb.Node(id=node_id), clock()) for node_id in catalogue.read_members()
        }
        self._unwritten = False

    @property
    def members(self) -> Mapping[str, Member]:
        """By node id, lost ones too."""
        return self._members

    def alive(self) -> set[str]:
        """The ids of those that answer."""
        return self._silent_for_less_than(self._timeout_s)

    def is_stable(self) -> bool:
        """Whether every shard is where it stays: nobody was lost, or came back, lately."""
        lost = self._silent_for_less_than(self._timeout_s + _SETTLE_S) - self.alive()
        now = self._clock()
        back = (m.back_at for m in self._members.values() if m.back_at is not None)
        return not lost and all(now - back_at > _SETTLE_S for back_at in back)

    def nodes(self) -> list[pb.Node]:
        """Every node heard of, by id, and whether it is alive."""
        alive = self.alive()
        result = []
        for node_id in sorted(self._members):
            node = pb.Node()
            node.CopyFrom(self._members[node_id].node)
            node.alive = node_id in alive
            result.append(node)
        return result

    def apply_heartbeat(self, request: pb.HeartbeatRequest) -> Member:
        """A heartbeat: from now on its node is a member. Long silent ones no longer are.

        Those are, for example, pods that came back under another name.

        Raises:
            ConfigError: another node that answers has the same id.
        """
        node_id = request.node.id
        known = self._members.get(node_id)
        joined = known is None
        member = Member(request.node, self._clock(), former=self._former(known, request.node))
        for actual in request.datasets:
            member.actual[VersionKey(actual.dataset, actual.fingerprint)] = actual
        if known is not None:
            is_back = node_id not in self.alive()
            member.back_at = member.last_seen if is_back else known.back_at
            member.has_news = is_back or not _is_same_report(known, member)
        self._members[node_id] = member
        kept = self._silent_for_less_than(_FORGET_TIMEOUTS * self._timeout_s)
        gone = sorted(self._members.keys() - kept)
        for silent in gone:
            del self._members[silent]
        if joined or gone:
            logger.info("members id=%s joined=%s gone=%s", node_id, joined, gone)
            self._unwritten = member.has_news = True
        if self._unwritten:
            self._write()
        return member

    def _former(self, known: Member | None, node: pb.Node) -> FormerProcess | None:
        """A node that starts again may be elsewhere; one that then reports from before is two."""
        if known is None:
            return None
        if not known.node.flight_location or _is_same(known.node, node):  # not: before a restart
            return known.former
        former = known.former
        if (
            former is not None
            and _is_same(former.node, node)
            and self._clock() - former.last_seen < self._timeout_s
            and self._clock() - known.last_seen < self._timeout_s
        ):
            known.former = replace(former, last_seen=self._clock())
            raise ConfigError(_two_nodes(node, known.node))
        return FormerProcess(known.node, known.last_seen)

    def _silent_for_less_than(self, seconds: float) -> set[str]:
        oldest = self._clock() - seconds
        return {node_id for node_id, m in self._members.items() if m.last_seen >= oldest}

    def _write(self) -> None:
        try:
            self._catalogue.write_members(self._members)
            self._unwritten = False
        except OSError as error:  # it is missed after a restart only; tried at each heartbeat
            logger.error("members not kept reason=%s", error.strerror)


def _is_same_report(before: Member, now: Member) -> bool:
    """Whether two reports differ by how long ago rows were read at most; ends the earlier one."""
    if before.node != now.node or before.actual.keys() != now.actual.keys():
        return False
    for key, actual in now.actual.items():
        said = before.actual[key]
        if actual.HasField("idle_s"):
            said.idle_s = actual.idle_s
        else:
            said.ClearField("idle_s")
        if said != actual:
            return False
    return True


def _is_same(node: pb.Node, other: pb.Node) -> bool:
    """Whether two nodes of one id are one: the same process, where it was."""
    return (node.flight_location, node.process) == (other.flight_location, other.process)


def _two_nodes(node: pb.Node, other: pb.Node) -> str:
    """What is wrong where two nodes have one id."""
    if node.flight_location == other.flight_location:
        return (
            f"two nodes are at {node.flight_location} and have the same id {node.id}: give each an "
            "--advertise or a --flight-port of its own"
        )
    return (
        f"nodes at {node.flight_location} and {other.flight_location} have the same id {node.id}: "
        "one's cache directory is a copy of the other's; empty it, or remove its "
        f"{NODE_ID_FILE}"
    )
