"""The coordinator: which versions there are, what each node should hold, what is ready.

It tells nodes what they should hold and learns from their heartbeats what they do hold; it never
moves a row. Everything it decides follows from (catalogue, live nodes, heartbeats), so that a
restarted coordinator, which reads its catalogue back, decides the same. It knows neither gRPC nor
Flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    LoadError,
    StaleVersionError,
)
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.capacity import check_capacity
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.forecast import LoadRate, forecast
from cache_server.coordination.holdings import Holdings
from cache_server.coordination.membership import Membership
from cache_server.coordination.orphans import Orphans
from cache_server.coordination.version_record import VersionRecord
from cache_server.plan.pinned_version import plan_version
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
_AsOf = tuple[int, frozenset[str]]  # the number of changes, and who is alive


class Coordinator:
    """Thread-safe.

    Args:
        catalogue: what lasts over a restart.
        endpoints: where this coordinator is reached.
        heartbeat_interval_s: asked of every node.
        node_timeout_s: after so long without a heartbeat a node counts as lost; a node known from
            before a restart is given as long to report again.
        lease_s: how long a version that was replaced is kept after its rows were last read. As
            long a new catalogue leaves alone what nodes hold and it does not know: a coordinator
            that lost its disk is given the specs again, or reads go on to their end.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        endpoints: pb.CoordinatorEndpoints,
        heartbeat_interval_s: float,
        node_timeout_s: float,
        lease_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._endpoints = endpoints
        self._interval_s = heartbeat_interval_s
        self._lease_s = lease_s
        self._clock = clock
        self._changed = threading.Condition()
        self._changes = 0  # so that one between two looks is not missed
        self._listeners: list[Callable[[], None]] = []
        self._created = 0
        self._load_rate = LoadRate()
        self._versions: dict[VersionKey, VersionRecord] = {}
        self._views: dict[VersionKey, tuple[_AsOf, Holdings]] = {}  # see `_holdings`
        self._membership = Membership(catalogue, node_timeout_s, clock)
        self._orphans = Orphans(
            self._versions, self._membership, catalogue, lease_s=lease_s, clock=clock
        )
        self._restore()

    def close(self) -> None:
        """Lets go of the sources of loads under way; nothing is decided any more after it."""
        with self._changed:
            for version in self._versions.values():
                version.release()
            self._mark_changed()

    def listen(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called when there is something new to do, before a heartbeat is due."""
        self._listeners.append(callback)

    # -- datasets ------------------------------------------------------------------------------

    def create(self, spec: DatasetSpec, *, refresh: bool = False) -> pb.DatasetInfo:
        """Starts the load of ``spec``; attaches when its version exists; retries a failed one.

        Args:
            refresh: look again at a source that cannot say whether it changed; otherwise a version
                of the same spec counts as the same. Also takes away replicas beyond those of the
                spec, which others may have asked for.

        Raises:
            LoadError: the source cannot be read, it cannot fit, or the catalogue cannot be written.
            RequestError: a bad query.
        """
        with self._changed:
            version = None if refresh else self._newest_of_spec(spec)
            if version is not None:
                return self._attach(version, spec)
        planned = plan_version(spec)
        with self._changed:
            version = self._versions.get(planned.version.key)
            if version is not None and self._holdings(version).load_failure() is None:
                planned.close()
                return self._attach(version, spec, fewer_replicas=refresh)
            if version is None:
                attempt = self._orphans.attempt(planned.version.key)
            else:
                attempt = version.attempt + 1
            made = VersionRecord(
                planned.version,
                self._created + 1,
                spec.secrets_to_proto(),
                tuple(planned.pins.values()),
                attempt=attempt,
                asked_at=self._clock(),
            )
            try:
                self._check_capacity(made)
                made.save(self._catalogue)
            except LoadError:
                made.release()
                raise
            if version is not None:
                version.release()
            else:  # what nodes kept of it counts before any of them is answered
                for node_id, member in self._membership.members.items():
                    if planned.version.key in member.actual:
                        made.apply_report(member.actual[planned.version.key], node_id)
            self._created = made.created
            self._versions[planned.version.key] = made
            logger.info(
                "dataset planned name=%s fingerprint=%s shards=%s",
                spec.name, planned.version.key.fingerprint, made.num_shards,
            )  # fmt: skip
            self._settle()
            self._mark_changed()
            info = self._describe(made)
        self._notify_listeners()
        return info

    def attach(self, spec: DatasetSpec) -> pb.DatasetInfo | None:
        """Attaches to a version of this very spec that was ready before, and reads no source.

        For whoever starts again and wants what it had, whether or not the source is another one
        by now, or is there at all; `create` looks.

        Returns:
            None where there is none.

        Raises:
            LoadError: more replicas are asked for than there is room for, or the catalogue cannot
                be written; then nothing has changed.
        """
        with self._changed:
            version = self._newest(
                version
                for version in self._versions.values()
                if version.was_ready and _content(version.pinned.spec) == _content(spec)
            )
            return None if version is None else self._attach(version, spec)

    def plan(
        self, spec: DatasetSpec, *, num_nodes: int = 0, memory_limit_bytes: int = 0
    ) -> pb.LoadForecast:
        """What a load would come to; loads nothing.

        Args:
            num_nodes: 0 for the nodes that are alive.
            memory_limit_bytes: of each node; 0 for the smallest of those alive.

        Raises:
            LoadError: the source cannot be read. RequestError: a bad query.
        """
        with closing(plan_version(spec)) as planned:
            with self._changed:
                alive = [node for node in self._membership.nodes() if node.alive]
            names = [node.id for node in alive]
            if num_nodes:
                names = [f"node-{index}" for index in range(num_nodes)]
            limits = [node.memory_limit_bytes for node in alive if node.memory_limit_bytes]
            limit = memory_limit_bytes or min(limits, default=0)
            return forecast(planned, names, limit, self._load_rate.node_bytes_per_s)

    def _newest_of_spec(self, spec: DatasetSpec) -> VersionRecord | None:
        """The newest version of this spec, of a source that cannot tell whether it changed."""
        return self._newest(
            version
            for version in self._versions.values()
            if not version.pinned.comparable
            # What kept the source as it was planned is lost with a restart in the middle of a load.
            and (version.was_ready or version.asked_at is not None)
            and self._holdings(version).load_failure() is None
            and _content(version.pinned.spec) == _content(spec)
        )

    @staticmethod
    def _newest(versions: Iterable[VersionRecord]) -> VersionRecord | None:
        return max(versions, key=lambda version: version.created, default=None)

    def _attach(
        self, version: VersionRecord, spec: DatasetSpec, *, fewer_replicas: bool = False
    ) -> pb.DatasetInfo:
        """Has one more user of a version that is there already; it is the newest now.

        Whoever gives no secrets, because it has none or reads by other ones, takes none away; nor,
        unless that is what is asked for, whoever wants fewer replicas.

        Raises:
            LoadError: more replicas are asked for than there is room for, or the catalogue cannot
                be written; then nothing has changed.
        """
        given = spec.secrets_to_proto()
        if spec.replicas > version.pinned.spec.replicas:
            self._check_capacity(replace(version, pinned=replace(version.pinned, spec=spec)))
        elif not fewer_replicas:
            spec = _with_replicas(spec, version.pinned.spec.replicas)
        secrets = given if given.tables else version.secrets
        pinned = replace(version.pinned, spec=spec, has_secrets=bool(secrets.tables))
        created = self._created + 1
        replace(version, pinned=pinned, created=created).save(self._catalogue)
        version.pinned, version.secrets, version.created = pinned, secrets, created
        self._created = created
        self._settle()
        self._mark_changed()
        self._notify_listeners()
        return self._describe(version)

    def get(self, name: str, fingerprint: str = "", *, lease: bool = False) -> pb.DatasetInfo:
        """The newest version of ``name`` that has not failed, or the one with ``fingerprint``.

        A load that fails takes nothing away from whoever reads what was there before. Where there
        is nothing else, the failed one says why.

        Args:
            lease: its rows are about to be read, so it is kept for a while if it is replaced.

        Raises:
            DatasetNotFoundError: listing the datasets there are.
            StaleVersionError: there is ``name``, without this fingerprint.
            NotReadyError: nodes may hold it, of a catalogue that was lost: see `Orphans`.
        """
        with self._changed:
            version = self._find(name, fingerprint)
            if lease:
                version.last_used = self._clock()
            return self._describe(version)

    def failure(self, name: str, fingerprint: str) -> CacheError | None:
        """Why a version cannot be served; None while it can be, or may be when it is loaded.

        Raises:
            DatasetNotFoundError, StaleVersionError: it was dropped.
        """
        with self._changed:
            return self._holdings(self._find(name, fingerprint)).failure()

    def datasets(self) -> list[pb.DatasetInfo]:
        """One version of every dataset, as `get` has it, by name."""
        with self._changed:
            names = sorted({key.dataset for key in self._versions})
            return [self._describe(self._find(name)) for name in names]

    def summaries(self) -> list[pb.DatasetInfo]:
        """Like `datasets`, without schemas, shards and nodes: as cheap as can be, for a page."""
        with self._changed:
            names = sorted({key.dataset for key in self._versions})
            return [self._holdings(self._find(name)).summarize() for name in names]

    def delete(self, name: str) -> None:
        """Forgets every version of ``name``; the nodes remove its shards at their next heartbeat.

        Raises:
            DatasetNotFoundError: listing the datasets there are.
        """
        with self._changed:
            orphans = self._orphans.find(name)
            if not orphans:
                self._find(name)
            self._orphans.drop(*orphans)
            self._forget(*(key for key in self._versions if key.dataset == name))
            self._mark_changed()
        self._notify_listeners()

    def watch(
        self, name: str, fingerprint: str, active: Callable[[], bool]
    ) -> Iterator[pb.DatasetInfo]:
        """The dataset at every change, until it is ready or failed, or ``active()`` is false.

        At least one is given every half a second or so, changed or not.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError: as `get`.
        """
        while active():
            with self._changed:
                seen = self._changes
                info = self._describe(self._find(name, fingerprint))
            yield info
            if info.state != pb.DATASET_STATE_LOADING:
                return
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(min(self._interval_s, _WATCH_S))

    # -- nodes ---------------------------------------------------------------------------------

    def nodes(self) -> list[pb.Node]:
        """Every node heard of, by id."""
        with self._changed:
            return self._membership.nodes()

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Takes in what a node holds and answers what it should hold.

        Raises:
            ConfigError: another node that answers has the same id.
        """
        node_id = request.node.id
        with self._changed:
            member = self._membership.apply_heartbeat(request)
            has_news = member.has_news
            for key, actual in member.actual.items():
                if (version := self._versions.get(key)) is not None:
                    has_news |= version.apply_report(actual, node_id)
                    if actual.HasField("idle_s"):
                        version.last_used = max(
                            version.last_used or 0.0, self._clock() - actual.idle_s
                        )
            if has_news:
                self._mark_changed()
            self._settle()
            response = pb.HeartbeatResponse(
                interval_s=self._interval_s,
                coordinator=self._endpoints,
                room_may_come=not self._membership.is_stable(),
                datasets=[
                    self._holdings(version).desired(node_id)
                    for version in self._versions.values()
                    if version.failure is None
                ],
            )
            for key in member.actual.keys() & self._orphans.find():
                response.kept.add(dataset=key.dataset, fingerprint=key.fingerprint)
            return response

    def _mark_changed(self) -> None:
        """Inside the lock, after any change: wakes whoever watches, and ends every view."""
        self._changes += 1
        self._changed.notify_all()

    def _notify_listeners(self) -> None:
        for callback in self._listeners:
            callback()

    # -- inside the lock -----------------------------------------------------------------------

    def _find(self, name: str, fingerprint: str = "") -> VersionRecord:
        named = [
            version
            for key, version in self._versions.items()
            if key.dataset == name and (not fingerprint or key.fingerprint == fingerprint)
        ]
        found = self._newest(version for version in named if version.failure is None)
        if found is None:
            found = self._newest(named)
        if found is not None:
            return found
        self._orphans.require_none(name, fingerprint)
        others = [key.fingerprint for key in self._versions if key.dataset == name]
        if others:
            raise StaleVersionError(
                f"dataset {name!r} has fingerprint {', '.join(others)}, not {fingerprint}"
            )
        known = sorted({key.dataset for key in self._versions})
        raise DatasetNotFoundError(f"no dataset {name!r}; datasets: {', '.join(known) or 'none'}")

    def _settle(self) -> None:
        """Draws what follows from the latest heartbeats: fixed rows, readiness, old versions."""
        for key, version in list(self._versions.items()):
            if key not in self._versions:
                continue  # forgotten for a newer one meanwhile
            starts, older = version.row_starts(), self._older(version)
            if version.failure is not None or starts is None or (version.was_ready and not older):
                continue
            if version.pinned.keeps_every_row and starts[-1] != version.pinned.max_rows:
                reason = (
                    f"it came out with {starts[-1]} rows, but the metadata of its files says "
                    f"{version.pinned.max_rows}"
                )
                version.fail(version.load_error(reason))
                self._mark_changed()
                continue
            if not self._holdings(version).is_ready():
                continue
            if not version.was_ready:
                version.was_ready = True
                version.release()
                self._mark_changed()
                try:
                    version.save(self._catalogue)
                except LoadError as error:  # after a restart nobody would know of its shards
                    version.was_ready = False
                    version.fail(error)
                    continue
                if version.asked_at is not None:
                    elapsed_s = self._clock() - version.asked_at
                    self._load_rate.record(version.pinned, elapsed_s, len(self._membership.alive()))
                logger.info("dataset ready name=%s rows=%d", version.pinned.spec.name, starts[-1])
            self._forget(*(key for key in older if not self._is_leased(self._versions[key])))
        for version in self._versions.values():
            version.save_failure(self._catalogue)

    def _is_leased(self, version: VersionRecord) -> bool:
        """Whether somebody may still read it: rows were read, or asked for, not long ago."""
        return (
            version.was_ready
            and version.last_used is not None
            and self._clock() - version.last_used < self._lease_s
        )

    def _older(self, version: VersionRecord) -> list[VersionKey]:
        name = version.pinned.key.dataset
        return [
            key
            for key, other in self._versions.items()
            if key.dataset == name and other.created < version.created
        ]

    def _forget(self, *keys: VersionKey) -> None:
        self._orphans.drop(*keys)
        for key in keys:
            self._versions.pop(key).release()
            self._views.pop(key, None)
            self._catalogue.forget(key)
            logger.info("dataset forgotten name=%s fingerprint=%s", key.dataset, key.fingerprint)
        if keys:
            self._mark_changed()

    def _holdings(self, version: VersionRecord) -> Holdings:
        """One view until something changes: it goes through every shard, and keeps its answers."""
        key = version.pinned.key
        alive = frozenset(self._membership.alive())
        as_of = self._changes, alive
        known = self._views.get(key)
        if known is not None and known[0] == as_of and known[1].version is version:
            return known[1]
        view = Holdings(version, self._membership.members, alive)
        if self._versions.get(key) is version:
            self._views[key] = as_of, view
        return view

    def _describe(self, version: VersionRecord) -> pb.DatasetInfo:
        return self._holdings(version).describe(self._lease_s)

    def _check_capacity(self, wanted: VersionRecord) -> None:
        """Refuses a version that cannot fit, new or with another spec than it has now."""
        key = wanted.pinned.key
        there = self._versions.get(key)
        # What there is of the same version may be of an attempt that failed.
        lasts = there is not None and there.attempt == wanted.attempt
        check_capacity(
            self._holdings(wanted),
            [self._holdings(version) for other, version in self._versions.items() if other != key],
            self._membership.members,
            alive=self._membership.alive(),
            will_be_removed=lambda other, actual: (
                self._will_be_removed(other, actual) or (other == key and not lasts)
            ),
        )

    def _will_be_removed(self, key: VersionKey, actual: pb.ActualDataset) -> bool:
        """Whether a node removes at its next heartbeat what it said of a version."""
        version = self._versions.get(key)
        if version is None:
            return key not in self._orphans.find()
        return version.failure is not None or not version.is_current(actual)

    def _restore(self) -> None:
        for entry in self._catalogue.read():
            self._created = max(self._created, entry.created)
            version = VersionRecord.from_catalogue(entry)
            if version.was_ready:  # who reads it now has had no time to listeners so
                version.last_used = self._clock()
            self._versions[entry.pinned.key] = version
            logger.info("dataset found in the catalogue name=%s", entry.pinned.spec.name)


def _with_replicas(spec: DatasetSpec, replicas: int) -> DatasetSpec:
    """The same without its secrets."""
    content = spec.to_proto()
    content.replicas = replicas
    return DatasetSpec.from_proto(content)


def _content(spec: DatasetSpec) -> bytes:
    """What is compared of two specs: all but the replicas and the secrets."""
    content = spec.to_proto()
    content.replicas = 0
    return content.SerializeToString(deterministic=True)
