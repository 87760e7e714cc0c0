"""The coordinator: dataset catalogue, membership, placement, readiness.

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

from cache_server.capacity import check_room
from cache_server.catalogue import Catalogue, SealedSummary
from cache_server.forecast import forecast
from cache_server.holdings import Holdings, Member, Version, is_of_attempt, load_error
from cache_server.planning import VersionKey
from cache_server.versions import plan_version
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import (
    CacheError,
    DatasetNotFoundError,
    LoadError,
    StaleVersionError,
)
from protos.spec import DatasetSpec

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
_FEWEST_RATED_BYTES = 16 * 1024 * 1024  # of a smaller load most of the time is not reading
_FORGET_TIMEOUTS = 60  # a member silent for so many node timeouts keeps no share any more


class Coordinator:
    """Thread-safe.

    Args:
        catalogue: what lasts over a restart.
        endpoints: where this coordinator is reached.
        heartbeat_interval_s: asked of every node.
        node_timeout_s: after so long without a heartbeat a node counts as lost; a node known from
            before a restart is given as long to report again.
        lease_s: how long a version that was replaced is kept after its rows were last read.
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
        self._timeout_s = node_timeout_s
        self._lease_s = lease_s
        self._clock = clock
        self._changed = threading.Condition()
        self._changes = 0  # so that one between two looks is not missed
        self._listeners: list[Callable[[], None]] = []
        self._created = 0
        self._node_rate = 0.0  # see `forecast`; 0 before the first load
        self._versions: dict[VersionKey, Version] = {}
        self._members: dict[str, Member] = {}
        self._members_changed = False  # since they were written down
        self._read_back()

    def close(self) -> None:
        """Lets go of the sources of loads under way; nothing is decided any more after it."""
        with self._changed:
            for version in self._versions.values():
                version.release()
            self._note_change()

    def listen(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called when there is something new to do, before a heartbeat is due."""
        self._listeners.append(callback)

    # -- datasets ------------------------------------------------------------------------------

    def create(self, spec: DatasetSpec, *, refresh: bool = False) -> pb.DatasetInfo:
        """Starts the load of ``spec``; attaches when its version exists; retries a failed one.

        Args:
            refresh: look again at a source that cannot say whether it changed; otherwise a version
                of the same spec counts as the same.

        Raises:
            LoadError: the source cannot be read, or it cannot fit. RequestError: a bad query.
        """
        with self._changed:
            version = None if refresh else self._of_same_spec(spec)
            if version is not None:
                return self._attach(version, spec)
        planned = plan_version(spec)
        with self._changed:
            version = self._versions.get(planned.plan.key)
            if version is not None and self._holdings(version).load_failure() is None:
                planned.close()
                return self._attach(version, spec)
            try:
                if planned.plan.keeps_every_row:
                    check_room(
                        planned.plan,
                        [shard.estimated_bytes for shard in planned.plan.shards or ()],
                        self._members,
                        self._alive(),
                        held={},
                        # What there is of the same version is of an attempt that failed.
                        is_going=lambda key: key == planned.plan.key or self._is_going(key),
                    )
            except LoadError:
                planned.close()
                raise
            self._created += 1
            attempt = 0
            if version is not None:
                version.release()
                attempt = version.attempt + 1
            made = Version(
                planned.plan,
                self._created,
                spec.secrets_to_proto(),
                tuple(planned.pins.values()),
                attempt=attempt,
                asked_at=self._clock(),
            )
            try:
                self._write(made)
            except LoadError:
                made.release()
                raise
            self._versions[planned.plan.key] = made
            logger.info(
                "dataset planned name=%s fingerprint=%s shards=%s",
                spec.name, planned.plan.key.fingerprint, made.num_shards,
            )  # fmt: skip
            self._settle()
            self._note_change()
            info = self._describe(made)
        self._tell()
        return info

    def attach(self, spec: DatasetSpec) -> pb.DatasetInfo | None:
        """Attaches to a version of this very spec that was ready before, and reads no source.

        For whoever starts again and wants what it had, whether or not the source is another one
        by now, or is there at all; `create` looks.

        Returns:
            None where there is none.
        """
        with self._changed:
            version = self._newest(
                version
                for version in self._versions.values()
                if version.was_ready and _content(version.plan.spec) == _content(spec)
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
                alive = [self._members[node_id].node for node_id in sorted(self._alive())]
            names = [node.id for node in alive]
            if num_nodes:
                names = [f"node-{index}" for index in range(num_nodes)]
            limits = [node.memory_limit_bytes for node in alive if node.memory_limit_bytes]
            limit = memory_limit_bytes or min(limits, default=0)
            return forecast(planned, names, limit, self._node_rate)

    def _of_same_spec(self, spec: DatasetSpec) -> Version | None:
        """The newest version of this spec, of a source that cannot tell whether it changed."""
        return self._newest(
            version
            for version in self._versions.values()
            if not version.plan.comparable
            # What kept the source as it was planned is lost with a restart in the middle of a load.
            and (version.was_ready or version.asked_at is not None)
            and self._holdings(version).load_failure() is None
            and _content(version.plan.spec) == _content(spec)
        )

    @staticmethod
    def _newest(versions: Iterable[Version]) -> Version | None:
        return max(versions, key=lambda version: version.created, default=None)

    def _attach(self, version: Version, spec: DatasetSpec) -> pb.DatasetInfo:
        """Has one more user of a version that is there already; it is the newest now.

        Whoever gives no secrets, because it has none or reads by other ones, takes none away.

        Raises:
            LoadError: more replicas are asked for than there is room for, or the catalogue cannot
                be written; then nothing has changed.
        """
        sealed = version.sealed
        if spec.replicas > version.plan.spec.replicas and version.row_starts() is not None:
            check_room(
                replace(version.plan, spec=spec),
                [sealed[index].num_bytes for index in range(version.num_shards or 0)],
                self._members,
                self._alive(),
                held=self._holdings(version).holders(serving=False),
                is_going=self._is_going,
            )
        given = spec.secrets_to_proto()
        secrets = given if given.tables else version.secrets
        plan = replace(version.plan, spec=spec, has_secrets=bool(secrets.tables))
        created = self._created + 1
        self._write(replace(version, plan=plan, created=created))
        version.plan, version.secrets, version.created = plan, secrets, created
        self._created = created
        self._settle()
        self._note_change()
        self._tell()
        return self._describe(version)

    def get(self, name: str, fingerprint: str = "", *, lease: bool = False) -> pb.DatasetInfo:
        """The newest version of ``name``, or the one with ``fingerprint``.

        Args:
            lease: its rows are about to be read, so it is kept for a while if it is replaced.

        Raises:
            DatasetNotFoundError: listing the datasets there are.
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
        """The newest version of every dataset, by name."""
        with self._changed:
            names = sorted({key.dataset for key in self._versions})
            return [self._describe(self._find(name)) for name in names]

    def delete(self, name: str) -> None:
        """Forgets every version of ``name``; the nodes remove its shards at their next heartbeat.

        Raises:
            DatasetNotFoundError: listing the datasets there are.
        """
        with self._changed:
            self._find(name)
            for key in [key for key in self._versions if key.dataset == name]:
                self._forget(key)
            self._note_change()
        self._tell()

    def watch(
        self, name: str, fingerprint: str, active: Callable[[], bool]
    ) -> Iterator[pb.DatasetInfo]:
        """The dataset at every change, until it is ready or failed, or ``active()`` is false.

        At least one is given every half a second or so, changed or not.
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
            alive = self._alive()
            result = []
            for node_id in sorted(self._members):
                node = pb.Node()
                node.CopyFrom(self._members[node_id].node)
                node.alive = node_id in alive
                result.append(node)
            return result

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Takes in what a node holds and answers what it should hold."""
        node_id = request.node.id
        with self._changed:
            new = node_id not in self._members
            member = Member(request.node, self._clock())
            for actual in request.datasets:
                member.actual[VersionKey(actual.dataset, actual.fingerprint)] = actual
            self._members[node_id] = member
            gone = self._forget_silent()
            if new or gone:
                logger.info("members id=%s joined=%s gone=%s", node_id, new, gone)
                self._members_changed = True
            if self._members_changed:
                self._write_members()
            for key, actual in member.actual.items():
                if (version := self._versions.get(key)) is not None:
                    self._take_in(version, actual, node_id)
                    if actual.HasField("idle_s"):
                        version.last_used = max(
                            version.last_used or 0.0, self._clock() - actual.idle_s
                        )
            self._settle()
            response = pb.HeartbeatResponse(
                interval_s=self._interval_s, coordinator=self._endpoints
            )
            for version in self._versions.values():
                if version.failure is None:
                    response.datasets.append(self._holdings(version).desired(node_id))
            self._note_change()
            return response

    def _note_change(self) -> None:
        """Inside the lock: wakes whoever watches."""
        self._changes += 1
        self._changed.notify_all()

    def _tell(self) -> None:
        for callback in self._listeners:
            callback()

    # -- inside the lock -----------------------------------------------------------------------

    def _find(self, name: str, fingerprint: str = "") -> Version:
        found = self._newest(
            version
            for key, version in self._versions.items()
            if key.dataset == name and (not fingerprint or key.fingerprint == fingerprint)
        )
        if found is not None:
            return found
        others = [key.fingerprint for key in self._versions if key.dataset == name]
        if others:
            raise StaleVersionError(
                f"dataset {name!r} has fingerprint {', '.join(others)}, not {fingerprint}"
            )
        known = sorted({key.dataset for key in self._versions})
        raise DatasetNotFoundError(f"no dataset {name!r}; datasets: {', '.join(known) or 'none'}")

    def _alive(self) -> set[str]:
        oldest = self._clock() - self._timeout_s
        return {node_id for node_id, m in self._members.items() if m.last_seen >= oldest}

    def _forget_silent(self) -> list[str]:
        """Members that were lost long ago, such as pods that came back under another name."""
        oldest = self._clock() - _FORGET_TIMEOUTS * self._timeout_s
        gone = [node_id for node_id, m in self._members.items() if m.last_seen < oldest]
        for node_id in gone:
            del self._members[node_id]
        return gone

    def _take_in(self, version: Version, actual: pb.ActualDataset, node_id: str) -> None:
        if not is_of_attempt(actual, version.attempt):
            return
        if actual.failure and version.failure is None and not version.was_ready:
            version.failure = load_error(version, actual.failure)
            logger.error("dataset failed reason=%s", version.failure)
        if actual.HasField("num_shards") and version.result_shards is None:
            version.result_shards = actual.num_shards
        for shard in actual.shards:
            if shard.failure:
                if version.failure is None and not version.was_ready:
                    version.failure = load_error(version, shard.failure)
                    logger.error("dataset failed reason=%s", version.failure)
            elif shard.sealed and shard.index < (version.num_shards or 0):
                summary = SealedSummary(shard.num_rows, shard.num_bytes, shard.checksum)
                known = version.sealed.setdefault(shard.index, summary)
                same = known.num_rows == summary.num_rows
                if version.plan.shards is None:
                    same = known.checksum == summary.checksum
                if not same and version.failure is None:
                    version.failure = LoadError(
                        f"shard {shard.index} of {version.plan.spec.name!r} has "
                        f"{summary.num_rows} rows on node {node_id} and {known.num_rows} "
                        "elsewhere, or other ones: load it again"
                    )
        if version.failure is not None:
            version.release()

    def _settle(self) -> None:
        """Draws what follows from the latest heartbeats: fixed rows, readiness, old versions."""
        for key, version in list(self._versions.items()):
            if key not in self._versions:
                continue  # forgotten for a newer one meanwhile
            starts, older = version.row_starts(), self._older(version)
            if version.failure is not None or starts is None or (version.was_ready and not older):
                continue
            if version.plan.keeps_every_row and starts[-1] != version.plan.max_rows:
                version.failure = LoadError(
                    f"dataset {version.plan.spec.name!r} came out with {starts[-1]} rows, but the "
                    f"footers of its files say {version.plan.max_rows}"
                )
                version.release()
                logger.error("dataset failed reason=%s", version.failure)
                continue
            if not self._holdings(version).is_ready():
                continue
            if not version.was_ready:
                version.was_ready = True
                version.release()
                try:
                    self._write(version)
                except LoadError as error:  # after a restart nobody would know of its shards
                    version.was_ready, version.failure = False, error
                    logger.error("dataset failed reason=%s", error)
                    continue
                self._note_rate(version)
                logger.info("dataset ready name=%s rows=%d", version.plan.spec.name, starts[-1])
            for other in older:
                if not self._is_leased(self._versions[other]):
                    self._forget(other)

    def _note_rate(self, version: Version) -> None:
        """How fast a load went, to foretell the next one by."""
        # What a load is foretold by: all that is read, on the nodes that have something to read.
        shards = version.plan.shards or ()
        loaded = sum(shard.estimated_bytes for shard in shards)
        if version.asked_at is not None and loaded >= _FEWEST_RATED_BYTES:
            elapsed_s = max(self._clock() - version.asked_at, 1e-3)
            self._node_rate = loaded / elapsed_s / max(1, min(len(self._alive()), len(shards)))

    def _is_leased(self, version: Version) -> bool:
        """Whether somebody may still read it: rows were read, or asked for, not long ago."""
        return (
            version.was_ready
            and version.last_used is not None
            and self._clock() - version.last_used < self._lease_s
        )

    def _older(self, version: Version) -> list[VersionKey]:
        name = version.plan.key.dataset
        return [
            key
            for key, other in self._versions.items()
            if key.dataset == name and other.created < version.created
        ]

    def _forget(self, key: VersionKey) -> None:
        self._versions.pop(key).release()
        self._catalogue.forget(key)
        logger.info("dataset forgotten name=%s fingerprint=%s", key.dataset, key.fingerprint)

    def _holdings(self, version: Version) -> Holdings:
        return Holdings(version, self._members, self._alive())

    def _describe(self, version: Version) -> pb.DatasetInfo:
        return self._holdings(version).describe(self._lease_s)

    def _is_going(self, key: VersionKey) -> bool:
        """Whether the nodes remove a version at their next heartbeats."""
        version = self._versions.get(key)
        return version is None or version.failure is not None

    def _write(self, version: Version) -> None:
        sealed: list[SealedSummary] = []
        if version.row_starts() is not None:
            sealed = [version.sealed[index] for index in range(version.num_shards or 0)]
        try:
            self._catalogue.write(
                version.plan,
                version.attempt,
                sealed,
                version.created,
                was_ready=version.was_ready,
            )
        except OSError as error:
            raise LoadError(
                f"cannot keep the catalogue entry of {version.plan.spec.name!r}: {error.strerror}"
            ) from None

    def _write_members(self) -> None:
        try:
            self._catalogue.write_members(self._members)
            self._members_changed = False
        except OSError as error:  # it is missed after a restart only; tried at each heartbeat
            logger.error("members not kept reason=%s", error.strerror)

    def _read_back(self) -> None:
        for entry in self._catalogue.read():
            self._created = max(self._created, entry.created)
            version = Version(entry.plan, entry.created, attempt=entry.attempt)
            version.sealed = dict(enumerate(entry.sealed))
            version.was_ready = entry.was_ready
            if entry.was_ready or entry.sealed:
                version.result_shards = len(entry.sealed)
            if version.was_ready:  # who reads it now has had no time to say so
                version.last_used = self._clock()
            self._versions[entry.plan.key] = version
            logger.info("dataset found in the catalogue name=%s", entry.plan.spec.name)
        # Presumed alive until they have had time to report, so that nothing moves meanwhile.
        for node_id in self._catalogue.read_members():
            self._members[node_id] = Member(pb.Node(id=node_id), self._clock())


def _content(spec: DatasetSpec) -> bytes:
    """What is compared of two specs: all but the replicas and the secrets."""
    content = spec.to_proto()
    content.replicas = 0
    return content.SerializeToString(deterministic=True)
