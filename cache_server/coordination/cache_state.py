"""What the coordinator knows, and the steps that keep it consistent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from cache_protocol.errors import DatasetNotFoundError, LoadError, NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import EVERYTHING, Viewer
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.forgets import Forgets
from cache_server.coordination.holdings.capacity import room_on
from cache_server.coordination.holdings.holder_checks import HolderChecks
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.holdings.views import Views, as_seen_by
from cache_server.coordination.members.clusters import Clusters
from cache_server.coordination.members.drains import Drains
from cache_server.coordination.members.membership import Membership
from cache_server.coordination.versions.file_fates import Event, Fate, Holder, fate_of
from cache_server.coordination.versions.forecast import LoadRate
from cache_server.coordination.versions.keeping import Keepings
from cache_server.coordination.versions.load_run import LoadRun
from cache_server.coordination.versions.orphans import Orphans
from cache_server.coordination.versions.states import State, Step
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.versions import Versions
from cache_server.coordination.versions.writes import Writes
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0


class CacheState:
    """The catalogue, the members, the versions and the writes, under one lock.

    Use all of it inside ``changed``, except where a method says otherwise.

    Args:
        catalogue, node_timeout_s, lease_s, checks, clock: see `Coordinator`.

    Attributes:
        changed: the lock; notified after every change.
        num_changes: counted, so that a watch misses none.
        listeners: called when the nodes have something new to do.
        expected: the name of a dataset whose load will be created; None: there is none.
        load_rate: how fast the nodes load.
        keepings: pins, priorities and reads of datasets.
        forgets: the acts that forget rows.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        node_timeout_s: float,
        lease_s: float,
        checks: HolderChecks,
        clock: Callable[[], float],
    ) -> None:
        self.catalogue = catalogue
        self.lease_s = lease_s
        self.checks = checks
        self.clock = clock
        self.changed = threading.Condition()
        self.num_changes = 0
        self._settled, self._settles_at = -1, 0.0
        self._settled_with: frozenset[str] = frozenset()
        self.listeners: list[Callable[[], None]] = []
        self.expected: str | None = None
        self.load_rate = LoadRate()
        self._since_1970 = time.time() - clock()
        self.keepings = Keepings(catalogue, self.now)
        self.versions = Versions(catalogue.read(), clock(), catalogue.damaged)
        self.membership = Membership(catalogue, node_timeout_s, clock)
        self.drains = Drains(catalogue)
        self.clusters = Clusters(self.membership, drains=self.drains)
        self.views = Views(self.versions, self.membership.members, checks, lease_s)
        self.writes = Writes(self.membership.members, clock, catalogue.id())
        self.forgets = Forgets(catalogue.forget_book)
        self.orphans = Orphans(
            self.versions, self.membership, catalogue, lease_s=lease_s, clock=clock
        )
        for version in self.versions.values():
            if version.state.is_loading:
                version.run = self.run_of(version)

    def now(self) -> float:
        """Seconds since 1970, as long after the start as the clock says."""
        return self.clock() + self._since_1970

    def find(self, name: str, fingerprint: str = "", viewer: Viewer = EVERYTHING) -> VersionRecord:
        """The version that a caller means; the errors are those of `Readers.get`."""
        if (version := self.versions.find(name, fingerprint, viewer)) is not None:
            return version
        full = viewer.resolve(name)
        error = self.versions.not_found(name, fingerprint, viewer)
        if viewer.can_read(full, ()):
            self.versions.require_undamaged(full, fingerprint)
            self.orphans.require_none(full, fingerprint)
            if full == self.expected and isinstance(error, DatasetNotFoundError):
                raise NotReadyError(
                    f"dataset {name!r} waits for the nodes, and for its source to be read"
                )
        raise error

    def forget(self, *keys: VersionKey) -> None:
        """Forgets versions; nodes remove their shards."""
        self.orphans.drop(*keys)
        for key in keys:
            self.versions.forget(key)
            self.views.forget(key)
            self.checks.forget(key)
            self.catalogue.forget(key)
            logger.info("dataset forgotten name=%s fingerprint=%s", key.dataset, key.fingerprint)
        if keys:
            self.mark_changed()

    def run_of(self, version: VersionRecord) -> LoadRun:
        """The load of a version, for lineage."""
        attempt = self.writes.catalogue_id, version.created, version.attempt
        return LoadRun.of(version.pinned, version.secrets, version.owner, *attempt)

    def holdings(self, version: VersionRecord) -> Holdings:
        """What the nodes hold of a version now."""
        return self.views.look(version, self.clusters.look())

    def describe(self, version: VersionRecord, viewer: Viewer) -> pb.DatasetInfo:
        """A version for a caller."""
        return as_seen_by(viewer, self.views.describe(self.holdings(version)))

    def room_on(self, node_ids: Collection[str]) -> dict[str, int | None]:
        """Free bytes of nodes; see `capacity.room_on`."""
        members = {node_id: self.membership.members[node_id] for node_id in node_ids}
        views = [self.holdings(version) for version in self.versions.values()]
        return room_on(views, members, self.will_be_removed)

    def will_be_removed(self, key: VersionKey, actual: pb.ActualDataset) -> bool:
        """Whether a node removes a version at its next heartbeat."""
        version = self.versions.get(key)
        is_other = version is not None and not version.is_current(actual)
        return is_other or self.fate(key) is Fate.GONE

    def fate(self, key: VersionKey, holder: Holder = Holder.PLACED) -> Fate:
        """What becomes of files on a node."""
        if (put := PutKey.of(key.fingerprint)) is not None:
            return self._fate_of_put(key, put, holder)
        version, event = self.versions.get(key), Event.NONE
        if version is None and self.orphans.is_dropped(key):
            event = Event.DROPPED
        elif version is None and key in self.catalogue.damaged:
            event = Event.DAMAGED
        state = None if version is None else version.state
        has_source = version is not None and not version.pinned.is_written
        return fate_of(state, holder, event, has_source=has_source)

    def _fate_of_put(self, key: VersionKey, put: PutKey, holder: Holder) -> Fate:
        state, event = None, Event.NONE
        made_of = self.versions.of_put(key)
        if self.writes.is_open(put):
            state = State.LOADING
        elif made_of is not None and not made_of.state.was_served:
            state = made_of.state
        elif self.catalogue.damaged.of(key.dataset) is not None:
            event = Event.DAMAGED
        elif made_of is not None:
            event = Event.MOVED
        elif self.orphans.is_dropped(key):
            event = Event.DROPPED
        elif self.writes.began(put):
            event = Event.ENDED
        return fate_of(state, holder, event, has_source=False)

    def next_attempt(self, key: VersionKey) -> int:
        """The attempt for a version that is new, or has failed."""
        version = self.versions.get(key)
        return self.orphans.attempt(key) if version is None else version.attempt + 1

    def mark_changed(self, key: VersionKey | None = None, node_id: str | None = None) -> None:
        """Wakes watchers and outdates views, after a change.

        Args:
            key: of the version that changed; None: all may have.
            node_id: the node whose claims about this version changed; None: those of no node.
        """
        self.num_changes += 1
        self.views.outdate(key, node_id)
        self.changed.notify_all()

    def notify_listeners(self) -> None:
        """Says that the nodes have something new to do; not inside the lock."""
        for callback in self.listeners:
            callback()

    def settle(self) -> None:
        """Takes every version to the state that follows from the nodes; forgets replaced ones.

        While nothing changes, it looks once a second: leases end by the clock. While a commit is
        on its way, each heartbeat counts.
        """
        self.writes.end_old()
        self.keepings.write_if_due()
        alive, now = self.membership.alive(), self.clock()
        is_same = self._settled == self.num_changes and self._settled_with is alive
        if (
            is_same
            and now < self._settles_at
            and not (self.versions.are_moving() or self.forgets.open_acts)
        ):
            return
        self.forgets.settle(self)
        for key, version in self.versions.items():
            if version.ended.note_lost(alive):
                self.mark_changed(key)
            if version.state.is_loading and (ends := version.ended.given_up()):
                self._fail(version, version.ended_error(ends))
            if not version.state.has_failed and version.extend_log(self.catalogue):
                self.mark_changed(key)
            self._note_absence(version)
            if version.state.is_loading and (starts := version.row_starts()) is not None:
                self._complete(version, num_rows=starts[-1])
        self.forget(*self.versions.replaced(self._is_served, now - self.lease_s))
        for version in self.versions.values():
            version.save_failure(self.catalogue)
        self._settled, self._settled_with = self.num_changes, alive
        self._settles_at = now + _SETTLE_S

    def _note_absence(self, version: VersionRecord) -> None:
        """Notes that written rows lie only on nodes that are away, or are there again."""
        if version.state.has_failed or not version.pinned.is_written:
            return
        is_away = self.holdings(version).num_rows_away > 0
        if is_away != version.state.is_away:
            version.advance(Step.LOSE if is_away else Step.RETURN)
            self.mark_changed(version.pinned.key)
            logger.warning(
                "dataset %s name=%s", "unavailable" if is_away else "available again",
                version.pinned.spec.name,
            )  # fmt: skip

    def _is_served(self, version: VersionRecord) -> bool:
        return self.holdings(version).is_open()

    def _complete(self, version: VersionRecord, *, num_rows: int) -> None:
        """Takes a version whose shards were all sealed once to `State.SERVED`, if it is ready."""
        planned = version.pinned.max_rows
        if version.pinned.keeps_every_row and num_rows != planned:
            reason = f"it has {num_rows} rows, but the metadata of its files says {planned}"
            self._fail(version, version.load_error(reason))
        elif version.state.is_away or not (view := self.holdings(version)).is_ready():
            version.complete_at = None
        elif not version.pinned.is_written or self._is_confirmed(version, view):
            self._serve(version, num_rows=num_rows)

    def _is_confirmed(self, version: VersionRecord, view: Holdings) -> bool:
        """Whether the nodes with the replicas of a write have just said so once more."""
        members = self.membership.members
        node_ids = {
            node_id for homes in view.placement(version.num_shards or 0) for node_id in homes
        }
        if not version.is_confirmed(
            self.membership.heard, [members[node_id].heard for node_id in node_ids]
        ):
            return False
        version.holders = tuple(sorted(node_ids))
        return True

    def _fail(self, version: VersionRecord, error: LoadError) -> None:
        version.fail(error)
        self.mark_changed(version.pinned.key)

    def _serve(self, version: VersionRecord, *, num_rows: int) -> None:
        version.advance(Step.COMPLETE)
        version.release()
        version.wanted_at = self.clock()
        if version.asked_at is not None:
            version.note_load_time(self.clock() - version.asked_at)
        self.mark_changed()
        try:
            version.save(self.catalogue)
        except LoadError as error:  # a restart would lose its shards
            version.fail(error)
            return
        if version.asked_at is not None:
            elapsed_s = self.clock() - version.asked_at
            nodes = len(self.membership.alive())
            self.load_rate.record(version.pinned, elapsed_s, nodes, version.reused)
        logger.info("dataset ready name=%s rows=%d", version.pinned.spec.name, num_rows)
