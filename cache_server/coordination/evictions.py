"""Makes room: datasets that are not read leave the nodes, and load again when they are read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cache_protocol.cli.output import size
from cache_protocol.datasets.dataset_names import namespace_of
from cache_protocol.errors import LoadError, NotReadyError, RequestError, short, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.namespace_shares import NamespaceShare
from cache_server.auth.principals import EVERYTHING, NOTHING, Viewer
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.holdings.capacity import lasting_bytes, refusal, shortages
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.members.membership import Member
from cache_server.coordination.versions.eviction import (
    EvictionPlan,
    Resident,
    Room,
    chance_of,
    plan_eviction,
    worth_of,
)
from cache_server.coordination.versions.states import State
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_RECALL_AGAIN_S = 1.0  # after one that found no room: readers that wait ask often
_MOST_PRIORITY = 1000
_STAYS_LENGTH, _REASON_LENGTH = 250, 450  # of parts of an error


class Evictions:
    """Evicts versions and recalls them. The caller has the lock, except where a method says so.

    Args:
        shares: of namespaces; others have no guaranteed and no largest size.

    Attributes:
        num_evicted, bytes_evicted: since the start; the bytes are those of all replicas.
    """

    def __init__(self, state: CacheState, shares: Iterable[NamespaceShare] = ()) -> None:
        self._state = state
        self._shares = {share.namespace: share for share in shares}
        self._guaranteed = {name: share.guaranteed for name, share in self._shares.items()}
        self._recalled_at: dict[VersionKey, float] = {}  # without room
        self.num_evicted = self.bytes_evicted = 0

    def plan(self, wanted: VersionRecord, viewer: Viewer = EVERYTHING) -> EvictionPlan:
        """What must go for a version to fit: a new one, or one with another spec or state.

        Args:
            viewer: sees the error.

        Raises:
            LoadError: nothing that may go is enough. Names the node or the namespace that is full,
                what holds its room, and why that stays.
        """
        state, key = self._state, wanted.pinned.key
        view, namespace = state.holdings(wanted), namespace_of(key.dataset)
        existing = state.versions.get(key)
        # Shards of a failed attempt of the same version are removed.
        lasts = existing is not None and existing.attempt == wanted.attempt
        others = [v for other, v in state.versions.items() if other != key]
        lacks = shortages(
            view,
            map(state.holdings, others),
            state.membership.members,
            lambda other, actual: (
                state.will_be_removed(other, actual) or (other == key and not lasts)
            ),
        )
        room = Room(
            namespace,
            {each.node_id: each.lack for each in lacks},
            self._over_largest(namespace, self._held_by(namespace, others), self._size_of(wanted)),
        )
        if room.is_there:
            return EvictionPlan()
        plan = plan_eviction(self._residents(room, besides=key), room, self._guaranteed)
        if not plan.is_enough:
            lost = state.membership.members.keys() - state.membership.alive()
            reason = refusal(view, lacks[0], lost) if lacks else self._over(wanted)
            raise LoadError(f"{reason}{self._stays(plan, viewer)}")
        return plan

    def carry_out(self, plan: EvictionPlan, what: str) -> None:
        """Evicts the versions of a plan; nodes remove their files at their next heartbeats.

        Args:
            what: needs the room; for the log.

        Raises:
            LoadError: the catalogue cannot be written.
        """
        for each in plan.goes:
            self._state.versions[each.key].evict(self._state.catalogue)
            self._state.checks.forget(each.key)
            self._state.mark_changed()
            self.num_evicted += 1
            self.bytes_evicted += each.num_bytes
            logger.info(
                "dataset evicted name=%s fingerprint=%s bytes=%d for=%s",
                each.key.dataset, each.key.fingerprint, each.num_bytes, what,
            )  # fmt: skip

    def recall(self, version: VersionRecord, viewer: Viewer = EVERYTHING) -> None:
        """Lets the nodes load an evicted version again; evicts others for it.

        Raises:
            LoadError: there is no room, or the catalogue cannot be written.
        """
        name = version.pinned.key.dataset
        self.carry_out(self.plan(replace(version, state=State.SERVED), viewer), name)
        version.recall(self._state.catalogue)
        version.wanted_at = self._state.clock()
        self._state.mark_changed()
        logger.info("dataset recalled name=%s", name)

    def recall_for_reader(self, version: VersionRecord) -> bool:
        """As `recall`, if it is evicted; without room, its description says so.

        Returns:
            Whether it is loaded again from now on.
        """
        key, now = version.pinned.key, self._state.clock()
        if not version.state.is_evicted:
            return False
        if version.recall_error and now - self._recalled_at.get(key, now) < _RECALL_AGAIN_S:
            return False
        try:
            self.recall(version, _viewer_of(version))
        except LoadError as error:
            version.recall_error = NotReadyError(
                f"dataset {version.pinned.spec.name!r} was evicted, and waits for room: "
                f"{short(str(error), _REASON_LENGTH)}"
            )
            self._recalled_at[key] = now
            self._state.mark_changed(key)
            return False
        self._recalled_at.pop(key, None)
        return True

    def make_room(self, member: Member, lacks: Sequence[pb.Lack]) -> list[str]:
        """Makes room on a node for loads and puts that did not fit.

        Returns:
            For each, why there is none; empty: the node has it once it has removed what goes.
        """
        if member.untrusted:
            return ["this node is not trusted"] * len(lacks)
        answers, promised = list[str](), 0
        for lack in lacks:
            why_not = self._make_room(member, lack, promised)
            answers.append(why_not)
            promised += 0 if why_not else lack.num_bytes
        return answers

    def may_come(self, lacks: Sequence[pb.Lack], no_room: Sequence[str]) -> bool:
        """Whether loads without room wait: their dataset was ready, and readers wait for it."""
        for lack, why_not in zip(lacks, no_room, strict=True):
            version = self._state.versions.find(lack.dataset) if why_not else None
            if version is not None and version.state.was_served:
                return True
        return False

    def _make_room(self, member: Member, lack: pb.Lack, promised: int) -> str:
        state, namespace = self._state, namespace_of(lack.dataset)
        going = member.node.stored_bytes - lasting_bytes(member, state.will_be_removed)
        held = self._held_by(namespace, state.versions.values())
        over = self._over_largest(namespace, held, lack.num_bytes)
        room = Room(namespace, {member.node.id: promised + lack.num_bytes - going}, over)
        viewer = Viewer(namespace, sees_all=False)
        if (of_dataset := state.versions.find(lack.dataset)) is not None:
            viewer = _viewer_of(of_dataset)
        plan = plan_eviction(self._residents(room), room, self._guaranteed)
        if not plan.is_enough:
            return f"no dataset makes room{self._stays(plan, viewer)}"
        try:
            self.carry_out(plan, lack.dataset)
        except LoadError as error:
            return str(error)
        return ""

    def shares(self, viewer: Viewer) -> list[pb.NamespaceShare]:
        """What each namespace holds and may hold, of those that a viewer sees, by name."""
        held = Counter[str]({name: 0 for name in self._shares})
        for key, version in self._state.versions.items():
            held[namespace_of(key.dataset)] += self._size_of(version)
        found = []
        for name in sorted(held):
            if viewer.sees_all or name == viewer.namespace:
                share = self._shares.get(name, NamespaceShare(name))
                found.append(
                    pb.NamespaceShare(
                        namespace=name,
                        num_bytes=held[name],
                        guaranteed_bytes=share.guaranteed,
                        largest_bytes=share.largest,
                    )
                )
        return found

    def keep(
        self, name: str, *, pinned: bool | None, priority: int | None, viewer: Viewer
    ) -> VersionRecord:
        """Pins a dataset, or sets its priority; None leaves it as it is.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
            RequestError: the priority is out of range; quotes it.
            LoadError: the catalogue cannot be written. Then nothing has changed.
        """
        version = self._state.find(name, viewer=viewer)
        if priority is not None and abs(priority) > _MOST_PRIORITY:
            raise RequestError(
                f"priority must be from -{_MOST_PRIORITY} to {_MOST_PRIORITY}, got {priority}"
            )
        try:
            self._state.keepings.set(version.pinned.key.dataset, pinned=pinned, priority=priority)
        except OSError as error:
            raise LoadError(f"cannot write the pins: {error.strerror}") from None
        return version

    def _size_of(self, version: VersionRecord) -> int:
        """Bytes of all replicas of a version, as far as they are known; shared files count once."""
        if version.state.is_evicted or version.state.has_failed:
            return 0
        state = self._state
        base = None if version.base is None else state.versions.get(version.base)
        reused = set() if base is None or base.state.is_evicted else set(version.reused)
        sizes = state.holdings(version).shard_bytes()
        if sizes is None:
            known = {index: shard.num_bytes for index, shard in version.sealed.items()}
        else:
            known = dict(enumerate(sizes))
        copies = min(version.pinned.spec.replicas, max(1, len(state.clusters.look().takers)))
        return copies * sum(num for index, num in known.items() if index not in reused)

    def _held_by(self, namespace: str, versions: Iterable[VersionRecord]) -> int:
        if self._largest(namespace) is None:
            return 0  # nobody asks
        of_namespace = (v for v in versions if namespace_of(v.pinned.key.dataset) == namespace)
        return sum(map(self._size_of, of_namespace))

    def _largest(self, namespace: str) -> int | None:
        share = self._shares.get(namespace)
        return None if share is None else share.largest

    def _over_largest(self, namespace: str, held: int, wanted: int) -> int:
        largest = self._largest(namespace)
        return 0 if largest is None else max(0, held + wanted - largest)

    def _over(self, wanted: VersionRecord) -> str:
        namespace = namespace_of(wanted.pinned.key.dataset)
        return (
            f"dataset {wanted.pinned.spec.name!r} cannot fit: it is about "
            f"{self._size_of(wanted)} bytes with its replicas, and namespace {namespace!r} may "
            f"hold {self._largest(namespace)}"
        )

    def _residents(self, room: Room, besides: VersionKey | None = None) -> Iterator[Resident]:
        """Every other version that has files on nodes.

        Args:
            room: the nodes to look at.
        """
        state = self._state
        freed = self._freed([node_id for node_id, lack in room.on.items() if lack > 0])
        bases = {v.base for v in state.versions.values() if v.state.is_loading}
        for key, version in state.versions.items():
            if key == besides or version.state.is_evicted:
                continue
            view, keeping = state.holdings(version), state.keepings.of(key.dataset)
            num_bytes = self._size_of(version)
            of_one = num_bytes // max(1, version.pinned.spec.replicas)
            chance = chance_of(keeping.reads, state.now())
            yield Resident(
                key,
                namespace_of(key.dataset),
                freed.get(key, {}),
                num_bytes,
                worth_of(version.load_s, of_one, chance),
                keeping.priority,
                self._kept_because(version, view, bases),
            )

    def _freed(self, node_ids: Collection[str]) -> dict[VersionKey, dict[str, int]]:
        """The bytes of each version on each of these nodes that no other of its dataset shares."""
        freed: dict[VersionKey, dict[str, int]] = {}
        for node_id in node_ids:
            files: Counter[tuple[str, str]] = Counter()
            of_version: dict[VersionKey, Mapping[str, int]] = {}
            for key, actual in self._state.membership.members[node_id].actual.items():
                if not self._state.will_be_removed(key, actual):
                    sealed = {s.checksum: s.num_bytes for s in actual.shards if s.sealed}
                    of_version[key] = sealed
                    files.update((key.dataset, checksum) for checksum in sealed)
            for key, held in of_version.items():
                own = sum(num for each, num in held.items() if files[key.dataset, each] == 1)
                if own:
                    freed.setdefault(key, {})[node_id] = own
        return freed

    def _kept_because(
        self, version: VersionRecord, view: Holdings, bases: Collection[VersionKey | None]
    ) -> str:
        """Why a version may not go, after its name; empty: it may."""
        pinned, lease_s = version.pinned, self._state.lease_s
        if pinned.is_written:
            return "was written, so no source has its rows"
        if version.state.is_loading or version.pinned.key in bases:
            return "is loading"
        if self._state.keepings.of(pinned.key.dataset).pinned:
            return "is pinned"
        if version.is_wanted_since(self._state.clock() - lease_s):
            return f"was read or loaded in the last {lease_s:g} s"
        if version.lacks_secrets:
            return "cannot load again: its credentials were lost in a restart"
        if not pinned.comparable or (pinned.shards is None and pinned.spec.allow_unordered):
            return "could get other rows if it was loaded again"
        return "" if view.is_open() else "is loading, or has failed"

    def _stays(self, plan: EvictionPlan, viewer: Viewer) -> str:
        """What holds the room and may not go, for a viewer."""
        seen = [each for each in plan.stays if self._is_seen(each, viewer)]
        hidden = len(plan.stays) - len(seen)
        stays = [
            f"{viewer.shown(each.key.dataset)!r} of {size(each.num_bytes)} {each.kept_because}"
            for each in seen
        ]
        text = f"; {short(some_of(stays, '; '), _STAYS_LENGTH)}" if stays else ""
        others = f"; {hidden} of other namespaces may not go" if hidden else ""
        return text + others

    def _is_seen(self, each: Resident, viewer: Viewer) -> bool:
        version = self._state.versions.get(each.key)
        readers = () if version is None else version.pinned.spec.readers
        return viewer.can_read(each.key.dataset, readers)

    def forecast(self, plan: EvictionPlan, viewer: Viewer, result: pb.LoadForecast) -> None:
        """Adds what would go to a forecast."""
        seen = (each for each in plan.goes if self._is_seen(each, viewer))
        result.evicts.extend(sorted(viewer.shown(each.key.dataset) for each in seen))
        result.evicts_datasets = len(plan.goes)
        result.evicts_bytes = sum(each.num_bytes for each in plan.goes)


def _viewer_of(version: VersionRecord) -> Viewer:
    """Who may see an error that every reader of a version sees."""
    if version.pinned.spec.readers:
        return NOTHING
    return Viewer(namespace_of(version.pinned.key.dataset), sees_all=False)
