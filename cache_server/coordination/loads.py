"""Plans loads: a spec becomes a version, attaches to one, or is forecast."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from itertools import cycle

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, NotReadyError, RequestError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import tracing
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.claims import Claims
from cache_server.coordination.evictions import Evictions
from cache_server.coordination.members.placement import place
from cache_server.coordination.versions.eviction import EvictionPlan
from cache_server.coordination.versions.forecast import forecast
from cache_server.coordination.versions.load_run import tell_refused
from cache_server.coordination.versions.states import State
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.versions import newest
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.functions.declared import Function
from cache_server.functions.installed import installed
from cache_server.plan.pinned_version import OpenPlan, plan_version
from cache_server.plan.planned_functions import Functions
from cache_server.plan.shard_plan import same_shards

logger = logging.getLogger(__name__)

_MOST_PLANS = 20  # of a load, while others of its spec are faster


class Loads:
    """Begins loads. Thread-safe.

    Args:
        evictions: make room.
        sources: that it may read.
        functions: that SQL may call; None: those of this package.
    """

    def __init__(
        self,
        state: CacheState,
        claims: Claims,
        evictions: Evictions,
        sources: AllowedSources,
        functions: Mapping[str, Function] | None = None,
    ) -> None:
        self._state = state
        self._claims = claims
        self._evictions = evictions
        self._sources = sources
        known = installed() if functions is None else functions
        self._functions = Functions(known, sources.check_source, self._check_nodes)

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
            try:
                info = self._create(spec, refresh, append, by)
            except (LoadError, RequestError) as error:
                tell_refused(spec, error)
                raise
            if info is not None:
                self._claims.write_proven()
                self._state.notify_listeners()
                return info
        raise NotReadyError(f"dataset {spec.name!r} is loaded by too many others: load it again")

    def _create(
        self, spec: DatasetSpec, refresh: bool, append: bool, by: Principal
    ) -> pb.DatasetInfo | None:
        """As `create`; None: a load that began later was faster; look again."""
        with self._state.changed:
            if append and self._state.versions.has_other_source(spec):
                raise RequestError(
                    f"cannot append to {spec.name!r}: another write made or replaced its rows "
                    "meanwhile. Append again"
                )
            version = None if refresh else self._newest_of_spec(spec)
            if version is not None:
                return self.attach_to(version, spec, by=by)
            before = self._state.versions.readable(spec.name, spec.secrets_to_proto(), by.name)
            begun, cluster = self._state.versions.last_created, self._state.clusters.look()
        planned = plan_version(spec, [version.pinned for version in before], self._functions)
        num_shards = len(planned.version.shards or ())
        # Reports are taken meanwhile; inside the lock, the result is known.
        place(
            planned.version.key.fingerprint,
            num_shards,
            cluster.names,
            spec.replicas,
            zones=cluster.zones,
        )
        with self._state.changed:
            overtaken = planned.version.comparable and any(
                version.created > begun and version.pinned.key != planned.version.key
                for version in self._state.versions.of_spec(spec)
            )
            if overtaken or (append and self._state.versions.has_other_source(spec)):
                planned.close()
                return None
            version = self._state.versions.get(planned.version.key)
            if version is not None and self._state.holdings(version).load_failure() is None:
                planned.close()
                return self.attach_to(version, spec, by=by, fewer_replicas=refresh)
            return self.add(self._made(planned, self._state.versions.next_created(), by), by)

    def _made(self, planned: OpenPlan, created: int, by: Principal) -> VersionRecord:
        """The record of a planned version, with the shards that an earlier one has; in the lock."""
        made = VersionRecord(
            planned.version,
            created,
            planned.version.spec.secrets_to_proto(),
            tuple(planned.pins.values()),
            attempt=self._state.next_attempt(planned.version.key),
            asked_at=self._state.clock(),
            owner=by.name,
            wanted_at=self._state.clock(),
        )
        if (base := self._state.versions.base_of(made)) is not None:
            made.reuse(base, self._state.holdings(base).placement(base.num_shards or 0))
        return made

    def _check_nodes(self, name: str, version: str) -> None:
        """Refuses a function that a node that answers has in another version, or not at all.

        Raises:
            RequestError: names the nodes and their versions.
        """
        with self._state.changed:
            nodes = [node for node in self._state.membership.nodes() if node.alive]
        found = {
            node.id: next((each.version for each in node.functions if each.name == name), "none")
            for node in nodes
        }
        if others := [f"node {node} has {had}" for node, had in found.items() if had != version]:
            raise RequestError(
                f"function {name} has version {version} on the coordinator, but "
                f"{some_of(others)}: install the same packages on every node, and allow it there"
            )

    def add(self, made: VersionRecord, by: Principal) -> pb.DatasetInfo:
        """Adds a version, or replaces a failed one; inside the lock. Raises what `create` does."""
        key = made.pinned.key
        try:
            self._evictions.carry_out(self._evictions.plan(made, by.viewer), key.dataset)
            made.save(self._state.catalogue)
        except LoadError:
            made.release()
            raise
        replaced = self._state.versions.get(key)
        if replaced is not None:
            replaced.release()
        self._state.checks.forget(key)
        self._state.versions[key] = made
        made.span = tracing.begin("cache.load", dataset=key.dataset, version=key.fingerprint)
        made.run = self._state.run_of(made)
        made.run.begin()
        if replaced is None:  # orphans of the nodes count before any heartbeat is answered
            for node_id, member in self._state.membership.members.items():
                if key in member.actual and not member.untrusted:
                    self._claims.apply(made, node_id, believed=member.is_own)
        self._state.mark_changed()
        logger.info(
            "dataset planned name=%s fingerprint=%s shards=%s",
            key.dataset, key.fingerprint, made.num_shards,
        )  # fmt: skip
        self._state.settle()
        return self._state.describe(made, by.viewer)

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
        with self._state.changed:
            version = newest(v for v in self._state.versions.of_spec(spec) if v.state.was_served)
            return None if version is None else self.attach_to(version, spec, by=by)

    def attach_to(
        self,
        version: VersionRecord,
        spec: DatasetSpec,
        *,
        by: Principal,
        fewer_replicas: bool = False,
    ) -> pb.DatasetInfo:
        """Makes an existing version the newest one; inside the lock.

        A spec without secrets keeps the stored ones. Replicas are lowered only with
        ``fewer_replicas``.

        Raises:
            LoadError: there is no room for more replicas, or the catalogue cannot be written. Then
                nothing has changed.
            PermissionDeniedError: see `create`.
        """
        given = spec.secrets_to_proto()
        plan = self._plan_attaching(version, spec, by)
        if spec.replicas <= version.pinned.spec.replicas and not fewer_replicas:
            spec = _with_replicas(spec, version.pinned.spec.replicas)
        secrets = given if given.tables else version.secrets
        pinned = replace(version.pinned, spec=spec, has_secrets=bool(secrets.tables))
        created = self._state.versions.next_created()
        replace(version, pinned=pinned, created=created).save(self._state.catalogue)
        version.pinned, version.secrets, version.created = pinned, secrets, created
        version.wanted_at = self._state.clock()
        self._evictions.carry_out(plan, pinned.key.dataset)
        if version.state.is_evicted:
            self._evictions.recall(version, by.viewer)
        self._state.mark_changed()
        self._state.settle()
        self._state.notify_listeners()
        return self._state.describe(version, by.viewer)

    def _plan_attaching(
        self, version: VersionRecord, spec: DatasetSpec, by: Principal
    ) -> EvictionPlan:
        """What goes for `attach_to`; raises what it raises before it changes anything."""
        version.require_secrets(spec.secrets_to_proto(), by)
        if spec.replicas <= version.pinned.spec.replicas and not version.state.is_evicted:
            return EvictionPlan()
        state = State.SERVED if version.state.is_evicted else version.state
        wanted = replace(version, pinned=replace(version.pinned, spec=spec), state=state)
        return self._evictions.plan(wanted, by.viewer)

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

        Returns:
            With why the load would be refused now, where it is for these nodes.

        Raises:
            LoadError: the source cannot be read. RequestError: a bad query.
            PermissionDeniedError: see `create`.
        """
        self._sources.check_spec(spec)
        with self._state.changed:
            before = self._state.versions.readable(spec.name, spec.secrets_to_proto(), by.name)
        earlier = [version.pinned for version in before]
        with closing(plan_version(spec, earlier, self._functions)) as planned:
            reused = {
                index
                for version in before
                for index in same_shards(planned.version.shards or (), version.pinned.shards or ())
            }
            with self._state.changed:
                takers = self._state.clusters.look().takers
                nodes = self._state.membership.nodes()
                alive = [node for node in nodes if node.alive and node.id in takers]
                goes, refusal = EvictionPlan(), ""
                if not (num_nodes or memory_limit_bytes):
                    goes, refusal = self._foresee(planned, by)
            names = [node.id for node in alive]
            zones = {node.id: node.zone for node in alive if node.zone}
            if num_nodes:
                names = [f"node-{index}" for index in range(num_nodes)]
                zones = dict(zip(names, cycle(sorted({*zones.values()})), strict=False))
            limits = [node.memory_limit_bytes for node in alive if node.memory_limit_bytes]
            limit = memory_limit_bytes or min(limits, default=0)
            rate = self._state.load_rate.node_bytes_per_s
            result = forecast(planned, names, limit, rate, reused, zones)
            result.refusal = refusal
            with self._state.changed:
                self._evictions.forecast(goes, by.viewer, result)
            return result

    def _foresee(self, planned: OpenPlan, by: Principal) -> tuple[EvictionPlan, str]:
        """What `create` would evict, and why it would refuse; empty: it would not. In the lock."""
        spec = planned.version.spec
        version = self._newest_of_spec(spec) or self._state.versions.get(planned.version.key)
        try:
            if version is not None and self._state.holdings(version).load_failure() is None:
                return self._plan_attaching(version, spec, by), ""
            made = self._made(planned, self._state.versions.last_created + 1, by)
            return self._evictions.plan(made, by.viewer), ""
        except LoadError as error:
            return EvictionPlan(), str(error)

    def _newest_of_spec(self, spec: DatasetSpec) -> VersionRecord | None:
        """The newest version of this spec, if its source cannot tell whether it changed."""
        return newest(
            version
            for version in self._state.versions.of_spec(spec)
            if not version.pinned.comparable
            # A restart during a load loses the pins of the source.
            and version.state is not State.RESUMED
            and self._state.holdings(version).load_failure() is None
        )


def _with_replicas(spec: DatasetSpec, replicas: int) -> DatasetSpec:
    """The spec with other replicas, and without its secrets."""
    content = spec.to_proto()
    content.replicas = replicas
    return DatasetSpec.from_proto(content)
