"""The coordinator: knows every version, and decides what each node should hold.

Heartbeats report what the nodes hold. The coordinator moves no rows. Its decisions follow from the
catalogue, the live nodes and their heartbeats, so a restarted coordinator decides the same. This
module knows neither gRPC nor Flight.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import closing
from dataclasses import astuple, replace

import pyarrow as pa

from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    LoadError,
    NotReadyError,
    RequestError,
)
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.backoff import rest_s
from cache_server.auth.principals import ANYONE, EVERYTHING, Principal, Viewer
from cache_server.coordination.capacity import check_capacity
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.clusters import Clusters
from cache_server.coordination.epoch_versions import EpochVersions
from cache_server.coordination.forecast import LoadRate, forecast
from cache_server.coordination.holder_checks import (
    Holder,
    HolderChecks,
    Outcome,
    Said,
    ShardCheck,
)
from cache_server.coordination.holdings import Holdings
from cache_server.coordination.membership import Answer, Member, Membership
from cache_server.coordination.orphans import Orphans
from cache_server.coordination.placement import place
from cache_server.coordination.version_record import VersionRecord
from cache_server.coordination.versions import Versions, newest
from cache_server.coordination.views import Views, as_seen_by
from cache_server.coordination.writes import Chosen, Writes, new_write
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.jobs.jobs import Jobs
from cache_server.jobs.reports import checked_report
from cache_server.plan.pinned_version import plan_version
from cache_server.plan.shard_plan import same_shards
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
_MOST_PLANS = 20  # of a load, while others of its spec are faster


class Coordinator:
    """Decides for the whole cache. Thread-safe.

    Args:
        catalogue: the state that lasts over a restart.
        endpoints: of this coordinator.
        heartbeat_interval_s: of every node.
        node_timeout_s: a node without a heartbeat for this long counts as lost. After a restart of
            the coordinator, every known node has this long to report again.
        lease_s: how long a replaced version is kept after its last read. A new catalogue also keeps
            unknown versions of the nodes for this long: their specs may be loaded again.
        sources: that it may read.
        checks: which claims of nodes count; `next_check` must be called for it.
        clock: monotonic seconds.

    Attributes:
        jobs: that read from the cache.
        damaged: the catalogue entries that cannot be read.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        sources: AllowedSources = AllowedSources([""]),  # noqa: B008  it is immutable
        endpoints: pb.CoordinatorEndpoints,
        heartbeat_interval_s: float,
        node_timeout_s: float,
        lease_s: float = 600.0,
        checks: HolderChecks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue, self.damaged = catalogue, catalogue.damaged
        self._checks = HolderChecks(0) if checks is None else checks
        self._proven = self._written_proven = frozenset(catalogue.read_proven())
        self._writes_proven = threading.Lock()
        self._sources = sources
        self._endpoints = endpoints
        self._interval_s = heartbeat_interval_s
        self._lease_s = lease_s
        self._clock = clock
        self.jobs = Jobs(clock)
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._changes = 0  # counted, so that `watch` misses none
        self._listeners: list[Callable[[], None]] = []
        self._answers = secrets.randbits(62)  # numbered; another coordinator uses other numbers
        self._expected: str | None = None
        self._load_rate = LoadRate()
        self._epochs = EpochVersions(lease_s, clock)
        self._versions = Versions(catalogue.read(), clock(), catalogue.damaged)
        self._membership = Membership(catalogue, node_timeout_s, clock)
        self._clusters = Clusters(self._membership)
        self._views = Views(self._versions, self._membership.members, self._checks, lease_s)
        self._writes = Writes(self._membership.members, clock)
        self._orphans = Orphans(
            self._versions, self._membership, catalogue, lease_s=lease_s, clock=clock
        )

    def close(self) -> None:
        """Closes the sources of running loads, and ends watches. Nothing is decided after it."""
        self._closed.set()
        with self._changed:
            for version in self._versions.values():
                version.release()
            self._mark_changed()

    def watch_backlog(self, waiting_since: Callable[[], float]) -> None:
        """Lets no node count as lost while its report may wait; see `Membership`."""
        self._membership.waiting_since = waiting_since

    def listen(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when the nodes have something new to do."""
        self._listeners.append(callback)

    def expect(self, dataset: str) -> None:
        """Says that a load of ``dataset`` will be created: until then it is not ready.

        Clients then wait for it, and do not take its name for a wrong one.
        """
        with self._changed:
            self._expected = dataset

    # -- datasets ------------------------------------------------------------------------------

    def create(
        self,
        spec: DatasetSpec,
        *,
        refresh: bool = False,
        append: bool = False,
        by: Principal = ANYONE,
    ) -> pb.DatasetInfo:
        """Starts the load of ``spec``, attaches to its version, or retries a failed one.

        Args:
            refresh: plan a source again that cannot tell whether it changed; by default a version
                of the same spec is reused. Also lowers the replicas to those of the spec.
            append: do not replace the rows of another source.
            by: asks for it, and owns a new version.

        Raises:
            LoadError: the source cannot be read, the shards cannot fit, or the catalogue cannot be
                written.
            RequestError: a bad query, or ``append`` and the newest version has another source.
            NotReadyError: other loads of the same spec were faster, many times.
            PermissionDeniedError: the version needs secrets that the caller did not give, and
                another principal owns it.
        """
        self._sources.check_spec(spec)
        for _ in range(_MOST_PLANS):
            if (info := self._create(spec, refresh, append, by)) is not None:
                self._write_proven()
                self._notify_listeners()
                return info
        raise NotReadyError(f"dataset {spec.name!r} is loaded by too many others: load it again")

    def _create(
        self, spec: DatasetSpec, refresh: bool, append: bool, by: Principal
    ) -> pb.DatasetInfo | None:
        """As `create`; None: a load that began later was faster; look again."""
        with self._changed:
            if append and self._versions.has_other_source(spec):
                raise RequestError(
                    f"cannot append to {spec.name!r}: another write made or replaced its rows "
                    "meanwhile. Append again"
                )
            version = None if refresh else self._newest_of_spec(spec)
            if version is not None:
                return self._attach(version, spec, by=by)
            before = self._versions.readable(spec.name, spec.secrets_to_proto(), by.name)
            begun, cluster = self._versions.last_created, self._clusters.look()
        planned = plan_version(spec, [version.pinned for version in before])
        num_shards = len(planned.version.shards or ())
        # Reports are taken meanwhile; inside the lock, the result is known.
        place(planned.version.key.fingerprint, num_shards, cluster.names, spec.replicas)
        with self._changed:
            overtaken = planned.version.comparable and any(
                version.created > begun and version.pinned.key != planned.version.key
                for version in self._versions.of_spec(spec)
            )
            if overtaken or (append and self._versions.has_other_source(spec)):
                planned.close()
                return None
            version = self._versions.get(planned.version.key)
            if version is not None and self._holdings(version).load_failure() is None:
                planned.close()
                return self._attach(version, spec, by=by, fewer_replicas=refresh)
            made = VersionRecord(
                planned.version,
                self._versions.next_created(),
                spec.secrets_to_proto(),
                tuple(planned.pins.values()),
                attempt=self._next_attempt(planned.version.key),
                asked_at=self._clock(),
                owner=by.name,
            )
            if (base := self._versions.base_of(made)) is not None:
                made.reuse(base, self._holdings(base).placement(base.num_shards or 0))
            return self._add(made, by)

    def _add(self, made: VersionRecord, by: Principal) -> pb.DatasetInfo:
        """Adds a version, or replaces a failed one. See `create` for the errors."""
        key = made.pinned.key
        try:
            self._check_capacity(made)
            made.save(self._catalogue)
        except LoadError:
            made.release()
            raise
        replaced = self._versions.get(key)
        if replaced is not None:
            replaced.release()
        self._checks.forget(key)
        self._versions[key] = made
        if replaced is None:  # orphans of the nodes count before any heartbeat is answered
            for node_id, member in self._membership.members.items():
                if key in member.actual and not member.untrusted:
                    self._apply_claims(made, node_id, believed=member.is_own)
        self._mark_changed()
        logger.info(
            "dataset planned name=%s fingerprint=%s shards=%s",
            key.dataset, key.fingerprint, made.num_shards,
        )  # fmt: skip
        self._settle()
        return self._describe(made, by.viewer)

    def _next_attempt(self, key: VersionKey) -> int:
        """The attempt for a version that is new, or has failed."""
        version = self._versions.get(key)
        return self._orphans.attempt(key) if version is None else version.attempt + 1

    # -- writes --------------------------------------------------------------------------------

    def begin_write(
        self, request: pb.BeginWriteRequest, arriving: pa.Schema, *, by: Principal = ANYONE
    ) -> pb.BeginWriteResponse:
        """Begins a write: nodes take rows for it until it is committed, aborted or too old.

        Args:
            request: with the full name of the dataset.
            arriving: schema of the rows.

        Raises:
            ConfigError, RequestError: quotes what is wrong.
            LoadError: rows of the version to append to are lost.
            NotReadyError: no node answers yet.
        """
        with self._changed:
            alive = self._membership.alive()
            nodes = [
                node
                for node in self._membership.nodes()
                if node.id in alive and node.flight_location
            ]
            if not nodes:
                raise NotReadyError("no node can take rows yet")
            before = self._appended_to(request.spec.name) if request.append else None
        write = new_write(request, arriving, before.pinned if before else None, by)
        with self._changed:
            self._writes.begin(write)
        self._notify_listeners()
        return pb.BeginWriteResponse(
            write_id=write.write_id,
            dataset=by.viewer.shown(write.spec.name),
            schema=write.schema,
            nodes=nodes,
        )

    def write_schema(self, write_id: str) -> bytes:
        """The schema of an open write; see `Writes.schema`."""
        with self._changed:
            return self._writes.schema(write_id)

    def commit_write(
        self, write_id: str, wanted: Collection[Chosen], *, by: Principal = ANYONE
    ) -> pb.DatasetInfo | list[int]:
        """Makes a version of the chosen attempts, all or nothing. A repeated call changes nothing.

        The version is in the catalogue before this returns. It is ready when the nodes have moved
        and copied its shards: watch it. An append has the shards of the newest version, too.

        Returns:
            A list of numbers if rows were lost: the partitions to put again, by other attempts.

        Raises:
            RequestError: the write is not open, or the choice is wrong.
            PermissionDeniedError: it is of another namespace.
            LoadError: the catalogue cannot be written, more replicas do not fit, or rows of the
                version to append to are lost.
            NotReadyError: the version to append to is not ready: commit again.
        """
        with self._changed:
            if (committed := self._committed(write_id)) is not None:
                by.require_own(committed.pinned.key.dataset, "a write")
                return self._describe(committed, by.viewer)
            write = self._writes.find(write_id, by)
            before = self._appended_to(write.spec.name) if write.appends else None
            if before is not None and not self._holdings(before).is_ready():
                raise NotReadyError(f"dataset {write.spec.name!r} is not ready for an append yet")
            alive = self._membership.alive()
            chosen = self._writes.choose(write, wanted, alive, before.pinned if before else None)
            if isinstance(chosen, list):
                return chosen
            key = chosen.version.key
            version = self._versions.get(key)
            if version is not None and self._holdings(version).load_failure() is None:
                info = self._attach(version, chosen.version.spec, by=by)
            else:
                made = VersionRecord.written(
                    chosen,
                    self._versions.next_created(),
                    attempt=self._next_attempt(key),
                    asked_at=self._clock(),
                    owner=by.name,
                )
                if before is not None:
                    made.reuse(before)
                info = self._add(made, by)
            self._writes.end_committed(write, key)
            self._mark_changed()
        self._write_proven()
        self._notify_listeners()
        return info

    def _committed(self, write_id: str) -> VersionRecord | None:
        """The version that a write became, or a later one that has its rows."""
        key = self._writes.committed(write_id)
        known = None if key is None else self._versions.get(key)
        return self._versions.of_write(write_id) if known is None else known

    def _appended_to(self, name: str) -> VersionRecord | None:
        """The version whose rows an append follows; None: it makes a dataset.

        Raises:
            RequestError: it was loaded. LoadError: some of its rows are lost, or it is damaged.
            NotReadyError: nodes may hold one, but the catalogue was lost.
        """
        self._versions.require_undamaged(name)
        version = self._versions.find(name)
        if version is None:
            self._orphans.require_none(name, "")
            return None
        if not version.pinned.is_written:
            raise RequestError(
                f"cannot append to {name!r}: it was loaded, and its next load would drop the rows. "
                "Add files to its source and load it again, or write another dataset"
            )
        if version.failure is None and (lost := self._holdings(version).load_failure()):
            raise LoadError(f"cannot append: {lost}")
        return version if version.failure is None else None

    def abort_write(self, write_id: str, *, by: Principal = ANYONE) -> None:
        """Ends a write: nodes drop its rows. A write that has ended stays as it is.

        Raises:
            PermissionDeniedError: it is of another namespace.
        """
        with self._changed:
            self._writes.abort(write_id, by)
        self._notify_listeners()

    def attach(self, spec: DatasetSpec, *, by: Principal = ANYONE) -> pb.DatasetInfo | None:
        """Attaches to a version of this spec that was ready before; reads no source.

        A job that restarts gets the same rows, even if the source has changed or is gone. `create`
        looks at the source.

        Returns:
            None if there is no such version.

        Raises:
            LoadError: there is no room for more replicas, or the catalogue cannot be written. Then
                nothing has changed.
        """
        with self._changed:
            version = newest(v for v in self._versions.of_spec(spec) if v.was_ready)
            return None if version is None else self._attach(version, spec, by=by)

    def plan(
        self,
        spec: DatasetSpec,
        *,
        num_nodes: int = 0,
        memory_limit_bytes: int = 0,
        by: Principal = ANYONE,
    ) -> pb.LoadForecast:
        """Forecasts a load; loads nothing.

        Args:
            num_nodes: 0 for the live nodes.
            memory_limit_bytes: of each node; 0 for the smallest limit of the live nodes.
            by: asks for it.

        Raises:
            LoadError: the source cannot be read. RequestError: a bad query.
        """
        self._sources.check_spec(spec)
        full = by.viewer.resolve(spec.name)
        with self._changed:
            before = self._versions.readable(full, spec.secrets_to_proto(), by.name)
            before *= by.viewer.can_read(full, ())
        with closing(plan_version(spec, [version.pinned for version in before])) as planned:
            reused = {
                index
                for version in before
                for index in same_shards(planned.version.shards or (), version.pinned.shards or ())
            }
            with self._changed:
                alive = [node for node in self._membership.nodes() if node.alive]
            names = [node.id for node in alive]
            if num_nodes:
                names = [f"node-{index}" for index in range(num_nodes)]
            limits = [node.memory_limit_bytes for node in alive if node.memory_limit_bytes]
            limit = memory_limit_bytes or min(limits, default=0)
            return forecast(planned, names, limit, self._load_rate.node_bytes_per_s, reused)

    def _newest_of_spec(self, spec: DatasetSpec) -> VersionRecord | None:
        """The newest version of this spec, if its source cannot tell whether it changed."""
        return newest(
            version
            for version in self._versions.of_spec(spec)
            if not version.pinned.comparable
            # A restart during a load loses the pins of the source.
            and (version.was_ready or version.asked_at is not None)
            and self._holdings(version).load_failure() is None
        )

    def _attach(
        self,
        version: VersionRecord,
        spec: DatasetSpec,
        *,
        by: Principal,
        fewer_replicas: bool = False,
    ) -> pb.DatasetInfo:
        """Makes an existing version the newest one.

        A spec without secrets keeps the stored ones. Replicas are lowered only with
        ``fewer_replicas``.

        Raises:
            LoadError: there is no room for more replicas, or the catalogue cannot be written. Then
                nothing has changed.
            PermissionDeniedError: see `create`.
        """
        given = spec.secrets_to_proto()
        version.require_secrets(given, by)
        if spec.replicas > version.pinned.spec.replicas:
            self._check_capacity(replace(version, pinned=replace(version.pinned, spec=spec)))
        elif not fewer_replicas:
            spec = _with_replicas(spec, version.pinned.spec.replicas)
        secrets = given if given.tables else version.secrets
        pinned = replace(version.pinned, spec=spec, has_secrets=bool(secrets.tables))
        created = self._versions.next_created()
        replace(version, pinned=pinned, created=created).save(self._catalogue)
        version.pinned, version.secrets, version.created = pinned, secrets, created
        self._mark_changed()
        self._settle()
        self._notify_listeners()
        return self._describe(version, by.viewer)

    def get(
        self,
        name: str,
        fingerprint: str = "",
        *,
        lease: bool = False,
        viewer: Viewer = EVERYTHING,
        follow: pb.EpochOfJob | None = None,
    ) -> pb.DatasetInfo:
        """The version with ``fingerprint``, or the newest one of ``name`` that has not failed.

        A failed load does not affect readers of an older version. If every version failed, the
        newest one is returned, with its error.

        Args:
            lease: its rows are about to be read, so it is kept for a while after it is replaced.
            viewer: who asks; other datasets do not exist for it.
            follow: the version that a job reads in an epoch, if there is no fingerprint.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
            StaleVersionError: ``name`` exists, but not with this fingerprint.
            NotReadyError: nodes may hold it, but the catalogue was lost: see `Orphans`.
            LoadError: its catalogue entry is damaged.
        """
        with self._changed:
            if follow is not None and not fingerprint:
                fingerprint = self._fingerprint_of_epoch(name, follow, viewer)
            version = self._find(name, fingerprint, viewer)
            if lease:
                version.last_used = self._clock()
            return self._describe(version, viewer)

    def _fingerprint_of_epoch(self, name: str, follow: pb.EpochOfJob, viewer: Viewer) -> str:
        """The version of an epoch; empty if there is no ready one."""
        full = viewer.resolve(name)
        ready = {
            version.pinned.key.fingerprint: version
            for version in self._versions.seen_by(viewer, full)
            if version.was_ready and version.failure is None
        }
        if (latest := newest(ready.values())) is None:
            return ""
        self._versions.require_undamaged(full)
        asked = viewer.namespace, follow.job, follow.epoch, full
        return self._epochs.choose(asked, latest.pinned.key.fingerprint, ready.keys())

    def failure(self, name: str, fingerprint: str) -> CacheError | None:
        """Why a version cannot be served; None while it is served or loaded.

        Raises:
            DatasetNotFoundError, StaleVersionError: it was dropped.
        """
        with self._changed:
            return self._holdings(self._find(name, fingerprint)).failure()

    def datasets(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """The version that `get` returns of each dataset that a viewer sees, by name."""
        with self._changed:
            known = self._versions.newest_of_each(viewer)
            return self._versions.damaged.among([self._describe(v, viewer) for v in known], viewer)

    def summaries(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """Like `datasets`, without schemas, shards and nodes; cheap, for the status page."""
        with self._changed:
            summaries = []
            for version in self._versions.newest_of_each(viewer):
                summary = self._holdings(version).summarize()
                if version.asked_at is not None and summary.state == pb.DATASET_STATE_LOADING:
                    summary.progress.elapsed_s = self._clock() - version.asked_at
                summaries.append(as_seen_by(viewer, summary))
            return self._versions.damaged.among(summaries, viewer)

    def delete(self, name: str, *, viewer: Viewer = EVERYTHING) -> None:
        """Forgets every version of ``name``; nodes remove the shards at their next heartbeat.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
        """
        full = viewer.resolve(name)
        with self._changed:
            orphans = self._orphans.find(full)
            if not orphans and self._versions.damaged.of(full) is None:
                self._find(name, viewer=viewer)
            self._orphans.drop(*orphans)
            self._forget(*self._versions.named(full))
            if full == self._expected:
                self._expected = None
            self._mark_changed()
        self._notify_listeners()

    def watch(
        self,
        name: str,
        fingerprint: str,
        active: Callable[[], bool],
        *,
        viewer: Viewer = EVERYTHING,
    ) -> Iterator[pb.DatasetInfo]:
        """The dataset at every change, until it is ready or failed, or ``active()`` is false.

        While it loads, it has no shards and nodes. It is repeated at least every half second.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError: as `get`.
        """
        while active() and not self._closed.is_set():
            with self._changed:
                seen, begun = self._changes, time.perf_counter()
                version = self._find(name, fingerprint, viewer)
                info = self._holdings(version).summarize()
                loads = info.state == pb.DATASET_STATE_LOADING
                info = as_seen_by(viewer, info) if loads else self._describe(version, viewer)
                took_s = time.perf_counter() - begun
            yield info
            if not loads:
                return
            self._closed.wait(rest_s(took_s))
            with self._changed:
                if self._changes == seen and not self._closed.is_set():
                    self._changed.wait(min(self._interval_s, _WATCH_S))

    # -- nodes ---------------------------------------------------------------------------------

    def nodes(self) -> list[pb.Node]:
        """Every known node, by id."""
        with self._changed:
            return self._membership.nodes()

    def knows(self, node_id: str) -> bool:
        """Whether a node is a member that was called back, or that of this process."""
        with self._changed:
            return self._membership.knows(node_id)

    def heartbeat(
        self, request: pb.HeartbeatRequest, *, by: Principal | None = None, host: str = ""
    ) -> pb.HeartbeatResponse:
        """Applies the report of a node, and answers what it should hold.

        What the node has of the last answer is not sent again. If the report leaves out what this
        coordinator does not know, the answer asks for all of it, and nothing else happens.

        Args:
            by: sent it. The id of the node is theirs until the node counts as lost. None: the node
                of this process, which is believed.
            host: where a new node was called back; empty: it was not.

        Raises:
            ConfigError: another live node has the same id, or there is no place for the node.
            PermissionDeniedError: another principal reported for this id.
            RequestError: a report of a reader is no valid one.
        """
        node_id = request.node.id
        reports = [checked_report(report) for report in request.reports]
        with self._changed:
            reporter = (by or ANYONE).process
            if not self._membership.completes(request, reporter):
                return pb.HeartbeatResponse(resend=True, coordinator=self._endpoints)
            known = self._membership.members.get(node_id)
            returns = (  # after a restart of the coordinator
                known is not None
                and known.reporter is None
                and node_id in self._proven
                and node_id in self._membership.alive()
            )
            member = self._membership.apply_heartbeat(
                request, reporter, is_own=by is None, host=host
            )
            if member.has_news:
                self._note_holder(member, believed=returns or member.is_own)
            for version in self._versions.values():
                if self._may_record_waiting(version, node_id):
                    self._apply_claims(version, node_id)
            if member.has_news and not member.untrusted:
                self._writes.apply_report(node_id, member.actual, member.changed)
            running = {} if member.untrusted else member.running
            used = {} if member.untrusted else member.actual
            for key, version in self._versions.items():
                loads = running.get(key, frozenset())
                version.ended.apply_report(node_id, request.node.process, loads)
                if key in used and used[key].HasField("idle_s"):
                    used_at = self._clock() - used[key].idle_s
                    version.last_used = max(version.last_used or 0.0, used_at)
            self._distrust_liar(node_id)
            self._settle()
            wanted = pb.HeartbeatResponse(
                room_may_come=not self._membership.is_stable(),
                writes=self._writes.messages(
                    self._versions.moving(), with_schemas=not request.takes_digests
                ),
            )
            # A node that is not placed yet keeps what it has.
            is_placed = node_id in self._clusters.look().alive and not member.untrusted
            for version in self._versions.values() if is_placed else ():
                if version.failure is None:
                    view = self._holdings(version)
                    if asked := view.loads(node_id):
                        version.ended.note_told(node_id, asked)
                        self._checks.assign(version.pinned.key, node_id, asked)
                    wanted.datasets.append(view.desired(node_id))
            # An untrusted node changes nothing, so that its files can be examined.
            kept: Set[VersionKey] = member.actual.keys()
            if is_placed:
                kept = kept - self._versions.keys()
                kept = kept & self._orphans.find() if kept else kept
            for key in sorted(kept, key=astuple):
                wanted.kept.add(dataset=key.dataset, fingerprint=key.fingerprint)
            response = self._as_answer(member, wanted, known_to_node=request.answer)
        self.jobs.apply(reports)
        if member.has_news:
            self._write_proven()
        return response

    def _as_answer(
        self, member: Member, wanted: pb.HeartbeatResponse, *, known_to_node: int
    ) -> pb.HeartbeatResponse:
        """The answer to a node, without what it has of the last one.

        Args:
            known_to_node: the number of that answer, as the node says.
        """
        before = member.answer
        if before is None or before.content != wanted:
            self._answers += 1
            member.answer = before = Answer(self._answers, wanted)
        response = pb.HeartbeatResponse(
            interval_s=self._membership.interval_s(self._interval_s),
            coordinator=self._endpoints,
            report=member.report,
            answer=before.number,
            unchanged=before.number == known_to_node,
        )
        if not response.unchanged:
            response.MergeFrom(wanted)
        return response

    def _distrust_liar(self, node_id: str) -> None:
        """Marks a node that claims what contradicts the other nodes."""
        for version in self._versions.values():
            suspect = version.was_ready and node_id in version.contradicted
            if suspect and (lie := self._holdings(version).lie(node_id)):
                self._distrust(node_id, lie)
                return

    def _distrust(self, node_id: str, reason: str) -> None:
        self._membership.distrust(node_id, reason)
        self._clusters.look_again()
        self._checks.forget_node(node_id)
        self._proven -= {node_id}
        for version in self._versions.values():
            version.forget_claims(node_id)
        self._mark_changed()

    # -- second reader -------------------------------------------------------------------------

    def next_check(self, wait_s: float) -> ShardCheck | None:
        """The next file to read back from a node; `apply_check` must follow.

        Args:
            wait_s: for a file, if none is due.

        Returns:
            None if none was due.
        """
        with self._changed:
            if (found := self._next_check()) is None:
                self._changed.wait(wait_s)
                found = self._next_check()
            return found

    def _next_check(self) -> ShardCheck | None:
        return self._checks.next(self._membership.alive(), self._clock())

    def apply_check(self, check: ShardCheck, outcome: Outcome) -> None:
        """Takes the outcome of a check: the claim counts, or the node is not trusted."""
        key, index, node_id = check.claim
        if outcome is Outcome.DIFFERS:
            logger.warning("shard differs node=%s dataset=%s shard=%d", node_id, key.dataset, index)
        with self._changed:
            counted = node_id in self._checks.holders(key).get(index, ())
            lies = self._checks.apply_outcome(check, outcome, self._clock())
            if lies and node_id in self._membership.members:
                self._distrust(
                    node_id, f"{key.dataset!r}: the file of shard {index} has another checksum"
                )
            elif outcome is not Outcome.MATCHES or counted != (
                node_id in self._checks.holders(key).get(index, ())
            ):
                self._mark_changed(key)
            self._settle()
        self._write_proven()
        self._notify_listeners()

    def _note_holder(self, member: Member, *, believed: bool) -> None:
        """Takes the news of a report.

        Args:
            believed: its claims count without a look at the files.
        """
        if member.is_placed_anew:
            self._mark_changed()  # placement depends on the members
            self._checks.keep_nodes(self._membership.members)
        if not member.untrusted:
            node = member.node
            self._checks.meet(Holder(node.id, member.reporter or "", node.flight_location))
            for key in member.changed & self._versions.keys():
                self._mark_changed(key)
                self._apply_claims(self._versions[key], node.id, believed=believed)

    def _write_proven(self) -> None:
        """Writes which nodes are proven to hold a shard, after a change; not inside the lock."""
        with self._writes_proven:
            with self._changed:
                self._proven |= self._checks.proven_nodes()
                if self._proven == self._written_proven:
                    return
                self._written_proven = proven = self._proven
            try:
                self._catalogue.write_proven(proven)
            except OSError as error:  # after a restart their files are read back
                logger.error("members not written reason=%s", error.strerror)

    def _may_record_waiting(self, version: VersionRecord, node_id: str) -> bool:
        """Whether a node holds shards without a record, and is to load one of them by now."""
        waiting = version.waiting.get(node_id)
        if waiting is None or version.num_shards is None:
            return False
        view = self._holdings(version)
        return any(
            index < version.num_shards and view.may_load(node_id, index) for index in waiting
        )

    def _apply_claims(
        self, version: VersionRecord, node_id: str, *, believed: bool = False
    ) -> None:
        """Takes what a node says of a version, then what the nodes say that waited for this."""
        again = {node_id}
        while again:
            each = again.pop()
            again |= self._apply_report(version, each, believed=believed and each == node_id)
        self._mark_changed(version.pinned.key)

    def _apply_report(self, version: VersionRecord, node_id: str, *, believed: bool) -> Set[str]:
        """Takes what a node says of a version; returns the nodes that waited for this."""
        key = version.pinned.key
        if node_id not in self._membership.members:
            version.forget_claims(node_id)
            return frozenset()
        view = self._holdings(version)
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
            if shard.sealed and version.agrees(shard):
                is_known = shard.checksum == version.sealed[shard.index].checksum
                said[shard.index] = Said(shard.num_bytes, shard.checksum, is_known)
        recorded |= version.take_put(node_id, said.keys())
        shared = {s.index for s in actual.shards if s.index in said and view.is_shared(s, node_id)}
        self._checks.apply_report(
            key, node_id, said, self._clock(), believed=said if believed else recorded | shared
        )
        return waiting - {node_id}

    def _mark_changed(self, key: VersionKey | None = None) -> None:
        """Wakes watchers and outdates views. Call it inside the lock after a change.

        Args:
            key: of the version that changed; None: all may have.
        """
        self._changes += 1
        self._views.outdate(key)
        self._changed.notify_all()

    def _notify_listeners(self) -> None:
        for callback in self._listeners:
            callback()

    # -- inside the lock -----------------------------------------------------------------------

    def _find(self, name: str, fingerprint: str = "", viewer: Viewer = EVERYTHING) -> VersionRecord:
        if (found := self._versions.find(name, fingerprint, viewer)) is not None:
            return found
        full = viewer.resolve(name)
        error = self._versions.not_found(name, fingerprint, viewer)
        if viewer.can_read(full, ()):
            self._versions.require_undamaged(full, fingerprint)
            self._orphans.require_none(full, fingerprint)
            if full == self._expected and isinstance(error, DatasetNotFoundError):
                raise NotReadyError(
                    f"dataset {name!r} waits for the nodes, and for its source to be read"
                )
        raise error

    def _settle(self) -> None:
        """Updates readiness and failures, and forgets old versions and writes."""
        self._writes.end_old()
        alive, since = self._membership.alive(), self._clock() - self._lease_s
        for key, version in list(self._versions.items()):
            if key not in self._versions:
                continue  # forgotten in this loop
            if version.ended.note_lost(alive):
                self._mark_changed(key)
            is_loading = not version.was_ready and version.failure is None
            if is_loading and (ends := version.ended.given_up()):
                version.fail(version.ended_error(ends))
                self._mark_changed(key)
            if version.failure is None and version.extend_log(self._catalogue):
                self._mark_changed(key)
            starts = version.row_starts()
            expired = self._versions.expired(version, since)
            if version.failure is not None or starts is None or (version.was_ready and not expired):
                continue
            if version.pinned.keeps_every_row and starts[-1] != version.pinned.max_rows:
                reason = (
                    f"it has {starts[-1]} rows, but the metadata of its files says "
                    f"{version.pinned.max_rows}"
                )
                version.fail(version.load_error(reason))
                self._mark_changed(key)
                continue
            if not self._holdings(version).is_ready():
                if not version.was_ready and (lost := self._holdings(version).lost_rows()):
                    version.fail(version.load_error(lost))
                    self._mark_changed(key)
                continue
            if not version.was_ready:
                version.was_ready = True
                version.release()
                self._mark_changed()
                try:
                    version.save(self._catalogue)
                except LoadError as error:  # a restart would lose its shards
                    version.was_ready = False
                    version.fail(error)
                    continue
                if version.asked_at is not None:
                    elapsed_s = self._clock() - version.asked_at
                    nodes = len(self._membership.alive())
                    self._load_rate.record(version.pinned, elapsed_s, nodes, version.reused)
                logger.info("dataset ready name=%s rows=%d", version.pinned.spec.name, starts[-1])
            self._forget(*expired)
        for version in self._versions.values():
            version.save_failure(self._catalogue)

    def _forget(self, *keys: VersionKey) -> None:
        self._orphans.drop(*keys)
        for key in keys:
            self._versions.forget(key)
            self._views.forget(key)
            self._checks.forget(key)
            self._catalogue.forget(key)
            logger.info("dataset forgotten name=%s fingerprint=%s", key.dataset, key.fingerprint)
        if keys:
            self._mark_changed()

    def _holdings(self, version: VersionRecord) -> Holdings:
        return self._views.look(version, self._clusters.look())

    def _describe(self, version: VersionRecord, viewer: Viewer) -> pb.DatasetInfo:
        return as_seen_by(viewer, self._views.describe(self._holdings(version)))

    def _check_capacity(self, wanted: VersionRecord) -> None:
        """Refuses a version that cannot fit: a new one, or one with another spec."""
        key = wanted.pinned.key
        existing = self._versions.get(key)
        # Shards of a failed attempt of the same version are removed.
        lasts = existing is not None and existing.attempt == wanted.attempt
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
        """Whether a node removes a version at its next heartbeat."""
        if (put := PutKey.of(key.fingerprint)) is not None:
            return not self._writes.keeps(put) and key not in self._orphans.find()
        version = self._versions.get(key)
        if version is None:
            return key not in self._orphans.find()
        return version.failure is not None or not version.is_current(actual)


def _with_replicas(spec: DatasetSpec, replicas: int) -> DatasetSpec:
    """The spec with other replicas, and without its secrets."""
    content = spec.to_proto()
    content.replicas = replicas
    return DatasetSpec.from_proto(content)
