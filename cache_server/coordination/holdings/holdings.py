"""One version on the live nodes: what each holds, what it should hold, what callers see.

Everything follows from the version, the members and which of them are alive. Nothing is changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from itertools import chain

from cache_protocol.errors import CacheError, LoadError, NodeUnavailableError, some_of, to_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import tracing
from cache_server.coordination.holdings.holder_checks import HolderChecks
from cache_server.coordination.holdings.progress import load_progress
from cache_server.coordination.holdings.shard_holders import NOTHING, ShardHolders
from cache_server.coordination.members.clusters import Cluster
from cache_server.coordination.members.ended_nodes import WHOLE_QUERY
from cache_server.coordination.members.membership import Member, without_sums
from cache_server.coordination.members.placement import (
    bytes_by_node,
    desired_shards,
    shards_by_node,
    where_held,
)
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.plan.pinned_version import split_to_proto
from cache_server.plan.written_version import put_of
from cache_server.shards.version_key import VersionKey

_NONE: frozenset[str] = frozenset()


class Holdings:
    """A view of one version, valid while its arguments do not change.

    Answers are computed once and cached: do not change them.

    Args:
        version: to look at.
        members: every node that belongs to the cache.
        cluster: the nodes that the placement follows.
        checks: which claims count.
        base: a view of the version's ``base``; None if there is none any more.
        before: the view of this version before the last change; it must not be used any more.
        as_of: equal to that of ``before`` if nothing but this version has changed since. Then
            `note_claims` of it was called for each node whose claims did.
    """

    def __init__(
        self,
        version: VersionRecord,
        members: Mapping[str, Member],
        cluster: Cluster,
        checks: HolderChecks,
        base: Holdings | None = None,
        before: Holdings | None = None,
        as_of: object = None,
    ) -> None:
        self.version = version
        self._as_of = as_of
        self._base = base
        self._checks = checks
        self._members = members
        self._cluster = cluster
        self._alive = cluster.alive
        self._pinned = version.pinned
        self._desired: dict[str, pb.DesiredDataset] = {}  # by node
        self._settled: dict[str, tuple[object, pb.DesiredDataset]] = {}  # by node, over many views
        self._loads: dict[str, frozenset[int | None]] = {}  # likewise
        self._described: dict[float, pb.DatasetInfo] = {}  # by lease
        self._placements: dict[int, tuple[tuple[str, ...], ...]] = {}  # by number of shards
        self._assignments: dict[int, Mapping[str, Sequence[int]]] = {}  # likewise
        self._shard_holders = ShardHolders(version, checks)
        if before is not None:
            self._shard_holders, self._settled = before._shard_holders, before._settled
            self._take_placements(before)

    def _take_placements(self, before: Holdings) -> None:
        """Keeps the placements of the view before, if nothing that they follow from has changed."""
        same = (
            (before._cluster, self._cluster),
            (before._pinned, self._pinned),
        )
        if all(old is new for old, new in same) and not self._pinned.is_written:
            self._placements, self._assignments = before._placements, before._assignments

    def last_report(self, node_id: str) -> pb.ActualDataset:
        """The last report of a node about this attempt of the version; empty if there is none."""
        actual = self._members[node_id].actual.get(self.version.pinned.key, NOTHING)
        return actual if self.version.is_current(actual) else NOTHING

    def failure(self) -> CacheError | None:
        """Why the version cannot be served: `load_failure`, or its secrets were lost.

        A load of the same spec with its secrets repairs the latter and continues.
        """
        return self.load_failure() or self._secrets_failure()

    def load_failure(self) -> CacheError | None:
        """Why the version must be loaded again: its load failed, or the load of a lost shard.

        The latter follows from the reports of the live nodes. The other shards stay: the version is
        complete again when the lost node comes back.
        """
        version = self.version
        if not version.state.was_served:
            return version.failure
        if version.state.is_evicted or not self._all_reported():
            return None
        held = self.holders(serving=False)
        lost = {index: ids for index, ids in self._given_up.items() if index not in held}
        if lost and len(held) < (version.num_shards or 0):
            return version.ended_error(lost)
        reports = self._holders.reports
        for node_id in sorted(n for n, report in reports.items() if report.has_trouble):
            actual = reports[node_id].actual
            for shard in actual.shards:
                if shard.index in held or not self.may_load(node_id, shard.index):
                    continue
                if shard.failure:
                    return version.load_error(shard.failure, may_pass=shard.failure_may_pass)
                if self._contradicts(shard):  # a query that gave other rows this time
                    return version.load_error(version.contradiction(shard, node_id))
            lacks_some = len(held) < (version.num_shards or 0)
            if actual.failure and lacks_some and self.may_load(node_id, WHOLE_QUERY):
                return version.load_error(actual.failure, may_pass=actual.failure_may_pass)
        return None

    @cached_property
    def num_rows_away(self) -> int:
        """How many rows of a written version no live node has, and no source."""
        version = self.version
        if not version.pinned.is_written or not self._all_reported():
            return 0
        indices = range(version.num_shards or 0)
        return sum(version.sealed[i].num_rows for i in indices if not self._rows_on(i))

    def awaited(self) -> list[str]:
        """The nodes that are away and have such rows; all that are away, if none is known to."""
        away = self._members.keys() - self._alive
        dataset = self._pinned.key.dataset
        keys = {VersionKey(dataset, put) for put in self.version.puts} | {self._pinned.key}
        known = {node_id for node_id in away if not keys.isdisjoint(self._members[node_id].actual)}
        known |= set(self.version.holders) - self._alive
        return sorted(known or away)

    def absence(self) -> NodeUnavailableError:
        """The error of a version that waits for its nodes."""
        nodes = some_of(self.awaited(), ", node ")
        return NodeUnavailableError(
            f"dataset {self._pinned.spec.name!r} is unavailable: {self.num_rows_away} of its rows "
            f"were written, and lie only on nodes that are away: node {nodes}. It is ready again "
            "when they are back with their files. Start them, or write the dataset again"
        )

    @cached_property
    def _put_on(self) -> Mapping[int, Set[str]]:
        """The live nodes with each shard of a written version as it was put, not moved yet."""
        version = self.version
        if not version.pinned.is_written or version.state.was_served:
            return {}
        put_on: dict[int, set[str]] = {}
        dataset = version.pinned.key.dataset
        known: dict[VersionKey, dict[int, int]] = {}
        for plan in version.pinned.shards or ():
            if plan.index in version.reused:
                continue
            name, place = put_of(plan.splits[0])
            known.setdefault(VersionKey(dataset, name), {})[place] = plan.index
        for node_id in self._alive:
            actual = self._members[node_id].actual
            for key in known.keys() & actual.keys():
                for shard in actual[key].shards:
                    index = known[key].get(shard.index)
                    if index is not None and shard.checksum == version.sealed[index].checksum:
                        put_on.setdefault(index, set()).add(node_id)
        return put_on

    def _rows_on(self, index: int) -> Set[str]:
        """The live nodes with the rows of a shard of a written version, under any name."""
        holders = {*self.holders(serving=False).get(index, ()), *self._put_on.get(index, ())}
        return holders | self._same_on(index, proven=False)

    @cached_property
    def _given_up(self) -> Mapping[int | None, list[str]]:
        return self.version.ended.given_up()

    def _secrets_failure(self) -> CacheError | None:
        if not self.version.lacks_secrets:
            return None
        if not self._all_reported():
            return None
        if len(self.holders(serving=False)) == self.version.num_shards:
            return None  # no source is read
        return LoadError(
            f"the credentials of {self.version.pinned.spec.name!r} were not kept over the restart "
            "of the coordinator: load its spec again"
        )

    def _all_reported(self) -> bool:
        """Whether every live node has reported since the coordinator started."""
        return all(self._members[node_id].node.flight_location for node_id in self._alive)

    @property
    def _may_be_held(self) -> bool:
        """Whether shards without a holder may be on nodes that a new coordinator has not heard."""
        return self.version.state.was_served and not self._all_reported()

    def _contradicts(self, shard: pb.ActualShard) -> bool:
        return (
            shard.sealed and shard.index in self.version.sealed and not self.version.agrees(shard)
        )

    def lie(self, node_id: str) -> str:
        """A claim of a node against what a ready version has on other nodes; empty: none.

        A report without an attempt is no lie: a node that restarts may hold an older load. Nor is
        a shard that no other node is proven to hold: its query may give other rows when it runs
        again.
        """
        report = self.last_report(node_id)
        if report.HasField("attempt"):
            for shard in filter(self._contradicts, report.shards):
                if self._holders.holding.get(shard.index):
                    name = self.version.pinned.spec.name
                    return f"{name!r}: {self.version.contradiction(shard, node_id)}"
        return ""

    def holders(self, *, serving: bool) -> Mapping[int, Set[str]]:
        """The live nodes that say that they hold each shard; with ``serving``, that serve it.

        Of the latter it is proven that they hold it.
        """
        return self._holders.serving if serving else self._holders.saying

    @cached_property
    def _holders(self) -> ShardHolders:
        self._shard_holders.update(self._alive, self.last_report, self._as_of)
        return self._shard_holders

    def note_claims(self, node_id: str) -> None:
        """Notes for the views after this one that a node says something else, or more is proven."""
        self._shard_holders.changed.add(node_id)

    def shard_bytes(self) -> list[int] | None:
        """Bytes of each shard, sealed or estimated; None if there is no estimate.

        There is none before a load with a filter, a join or a whole query has ended, and none for
        strings of unknown length.
        """
        sealed, pinned = self.version.sealed, self.version.pinned
        if self.version.row_starts() is not None:
            return [sealed[index].num_bytes for index in range(self.version.num_shards or 0)]
        if pinned.shards is None or not pinned.keeps_every_row or pinned.unsized_columns:
            return None
        return [shard.estimated_bytes for shard in pinned.shards]

    def missing_bytes(self) -> dict[str, int]:
        """Bytes that each live node must still load or copy; without nodes that lack nothing."""
        sizes = self.shard_bytes()
        if sizes is None or self.version.state.is_evicted or self.failure() is not None:
            return {}
        held, put = self.holders(serving=False), self._put_on
        lacking = [
            tuple(
                node_id
                for node_id in homes
                if node_id not in held.get(index, ())
                and node_id not in put.get(index, ())
                and node_id not in self._same_on(index)
            )
            for index, homes in enumerate(self.placement(len(sizes)))
        ]
        return bytes_by_node(lacking, sizes)

    def _same_on(self, index: int, *, proven: bool = True) -> Set[str]:
        """The nodes that hold the same shard of the base, or only say so."""
        other = self.version.reused.get(index)
        if self._base is None or other is None:
            return frozenset()
        if self.version.sealed.get(index) != self._base.version.sealed.get(other):
            return frozenset()
        holders = self._base._holders
        return (holders.holding if proven else holders.saying).get(other, frozenset())

    def is_shared(self, shard: pb.ActualShard, node_id: str) -> bool:
        """Whether a node has proven that it holds the file of a shard: the base has it too."""
        is_known = shard.checksum == self.version.sealed[shard.index].checksum
        return is_known and node_id in self._same_on(shard.index)

    def is_ready(self) -> bool:
        """Whether a live node serves every shard; the first time, whether every replica does."""
        version = self.version
        if version.state.has_failed or version.state.is_evicted or version.row_starts() is None:
            return False
        holders = self.holders(serving=True)
        num_shards = version.num_shards or 0
        if version.state.was_served:
            return len(holders) == num_shards
        # A ready dataset with replicas survives the loss of a node.
        placement = self.placement(num_shards)
        # From the shard that was not ready the last time: most calls look at no other one.
        begin = min(self._holders.unready_at, num_shards)
        for index in chain(range(begin, num_shards), range(begin)):
            if not placement[index] or not holders.get(index, frozenset()) >= set(placement[index]):
                self._holders.unready_at = index
                return False
        return True

    def is_open(self) -> bool:
        """Whether readers may have the rows: every replica was there once, and said so again."""
        return self.version.state.was_served and self.is_ready()

    def placement(self, num_shards: int) -> tuple[tuple[str, ...], ...]:
        """The nodes that should hold each shard; see `place`."""
        if num_shards not in self._placements:
            pinned = self.version.pinned
            placement = self._cluster.place(
                pinned.key.fingerprint,
                num_shards,
                pinned.spec.replicas,
                wanted=self.version.homes if num_shards == len(self.version.homes) else (),
            )
            if moved := self._cluster.moved(pinned.key):
                placement = tuple(moved.get(i, homes) for i, homes in enumerate(placement))
            if pinned.is_written:
                # Until it is served, rows stay on the node that they were put on.
                keep = self._cluster.takers if self.version.state.was_served else self._alive
                placement = tuple(
                    where_held(homes, self._rows_on(index) & keep, self._cluster.zones)
                    for index, homes in enumerate(placement)
                )
            self._placements[num_shards] = placement
        return self._placements[num_shards]

    def _assigned(self, node_id: str) -> Sequence[int]:
        """The shards that a node should hold; of a whole query, none before it has run."""
        num_shards = self.version.num_shards or 0
        if num_shards not in self._assignments:
            self._assignments[num_shards] = shards_by_node(self.placement(num_shards))
        return self._assignments[num_shards].get(node_id, ())

    def loader(self, index: int | None) -> str | None:
        """The node that loads a shard, or the whole query, from its source; None: no live node."""
        num_shards = 1 if index is WHOLE_QUERY else self.version.num_shards or 0
        return next(iter(self.placement(num_shards)[index or 0]), None)

    def may_load(self, node_id: str, index: int | None) -> bool:
        """Whether a node was asked to load a shard, or the whole query, or would be asked now.

        After a restart the coordinator does not know what it asked before.
        """
        key = self.version.pinned.key
        return self._checks.is_assigned(key, node_id, index) or self.loader(index) == node_id

    def desired(self, node_id: str) -> pb.DesiredDataset:
        """What a node should hold, and where it gets missing shards."""
        if node_id not in self._desired:
            basis, known = self._basis_if_settled(node_id), self._settled.get(node_id)
            if basis is None or known is None or known[0] != basis:
                known = basis, self._build_desired(node_id)
                self._settled[node_id] = known
            self._desired[node_id] = known[1]
        return self._desired[node_id]

    def _basis_if_settled(self, node_id: str) -> object:
        """What `desired` alone follows from, if a node holds exactly what it should; else None."""
        starts, report = self.version.row_starts(), self._holders.reports.get(node_id)
        if starts is None or report is None or self._pinned.shards is None:
            return None
        assigned = self._assigned(node_id)
        if not report.has_only(assigned):
            return None
        erased = tuple(self.version.erasures.places.items()), self.version.tombstones
        return report, assigned, starts, self._pinned, erased

    def loads(self, node_id: str) -> frozenset[int | None]:
        """The loads from the source that `desired` asks of a node."""
        if node_id not in self._loads:
            desired = self.desired(node_id)
            whole = {WHOLE_QUERY} if desired.run_whole else set()
            loads = {shard.index for shard in desired.shards if shard.splits}
            self._loads[node_id] = frozenset(loads | whole)
        return self._loads[node_id]

    def _build_desired(self, node_id: str) -> pb.DesiredDataset:
        version = self.version
        pinned, starts = version.pinned, version.row_starts()
        desired = pb.DesiredDataset(
            rows_fixed=starts is not None,
            num_rows=starts[-1] if starts else 0,
        )
        sealed_on = self.holders(serving=False)
        if pinned.shards is None:
            self._ask_for_whole_run(node_id, sealed_on, desired)
            if starts is not None and version.num_shards is not None:
                desired.num_shards = version.num_shards
        placement = self.placement(version.num_shards or 0)
        # Rows cannot be read before row ids are known, so extra copies only take room.
        holders = self._holders.holding if starts is None else self._holders.serving
        loading = self._loading(node_id)
        reported = self.last_report(node_id).shards
        mine = {each.index for each in reported if node_id in sealed_on.get(each.index, ())}
        wrong = {shard.index for shard in reported if self._contradicts(shard)}
        odd = self._checks.unprovable(pinned.key, node_id)
        put = self._put_on
        if pinned.shards is None and version.num_shards is None:
            mine = set()  # from an interrupted run
        assigned = self._assigned(node_id)
        for index in sorted(desired_shards(assigned, mine, placement, holders)):
            held_by = self._sources(index, node_id)
            if index in odd or (index in wrong and held_by):
                continue  # dropped first, made again after the next heartbeat
            is_held, is_put = node_id in sealed_on.get(index, ()), node_id in put.get(index, ())
            same_on = self._same_on(index)
            if pinned.is_written and not (is_held or is_put or held_by or same_on):
                continue  # it is away: see `num_rows_away`
            shard = desired.shards.add(index=index, row_start=starts[index] if starts else 0)
            if is_held:
                continue
            if is_put and pinned.shards is not None:
                shard.splits.extend(split_to_proto(split) for split in pinned.shards[index].splits)
                continue
            if held_by and node_id not in same_on:
                self._let_copy(shard, held_by)
                continue
            if same_on:
                self._let_share(shard, node_id, same_on)
            if (
                held_by
                or pinned.shards is None
                or pinned.is_written
                or version.lacks_secrets
                or index in loading
                or index in self._given_up
                or self._may_be_held
            ):
                continue
            elif self.loader(index) == node_id:
                # One node reads the source; the others copy its sealed shard.
                shard.splits.extend(split_to_proto(split) for split in pinned.shards[index].splits)
        reads = desired.run_whole or any(shard.splits for shard in desired.shards)
        if reads:
            desired.secrets.CopyFrom(version.secrets)
            desired.traceparent = tracing.traceparent(version.span) if version.span else ""
        mine = {shard.index for shard in desired.shards}
        for index, places in version.erasures.places.items():
            if index in mine:
                desired.erased.add(index=index, places=places)
        desired.tombstones = version.tombstones
        desired.plan.CopyFrom(pinned.to_load_plan(version.attempt, with_splits=reads))
        return desired

    def _sources(self, index: int, node_id: str) -> Set[str]:
        """The other nodes to copy a shard from: those that hold it, else those that say so."""
        if proven := self._holders.holding.get(index, set()) - {node_id}:
            return proven
        key, others = self.version.pinned.key, self._holders.saying.get(index, set()) - {node_id}
        return {other for other in others if not self._checks.is_doubtful(key, index, other)}

    def _loading(self, node_id: str) -> frozenset[int]:
        """The shards that a node reports as loading: it has their splits already."""
        shards = self.last_report(node_id).shards
        return frozenset(s.index for s in shards if not s.sealed and not s.failure)

    def _ask_for_whole_run(
        self, node_id: str, sealed_on: Mapping[int, Set[str]], desired: pb.DesiredDataset
    ) -> None:
        """Asks one node to run a whole query, the first time or for lost shards."""
        version = self.version
        if version.lacks_secrets or WHOLE_QUERY in self._given_up or self._may_be_held:
            return
        wrong = {shard.index for shard in self.last_report(node_id).shards if shard.sealed}
        missing = [i for i in range(version.num_shards or 0) if i not in {*sealed_on, *wrong}]
        if node_id == self.loader(WHOLE_QUERY) and (version.num_shards is None or missing):
            desired.run_whole = True
            desired.missing.extend(missing)

    def _let_copy(self, shard: pb.DesiredShard, held_by: Set[str]) -> None:
        self._tell_sealed(shard)
        shard.copy_from.extend(self._locations(held_by))

    def _let_share(self, shard: pb.DesiredShard, node_id: str, same_on: Set[str]) -> None:
        assert self.version.base is not None
        self._tell_sealed(shard)
        shard.same_as.fingerprint = self.version.base.fingerprint
        shard.same_as.index = self.version.reused[shard.index]
        if node_id not in same_on:
            shard.same_as.copy_from.extend(self._locations(same_on))

    def _tell_sealed(self, shard: pb.DesiredShard) -> None:
        sealed = self.version.sealed[shard.index]
        shard.num_rows, shard.num_bytes = sealed.num_rows, sealed.num_bytes
        shard.checksum = sealed.checksum
        shard.nulls.update(sealed.nulls)
        if shard.index not in self.version.unerased:
            shard.erased = self.version.erasures.places.get(shard.index, b"")

    def _locations(self, node_ids: Set[str]) -> list[str]:
        return [self._members[node_id].node.flight_location for node_id in sorted(node_ids)]

    @property
    def state(self) -> pb.DatasetState.ValueType:
        """Of the version, for callers."""
        return self._summary.state

    def is_described(self, lease_s: float) -> bool:
        """Whether `describe` has nothing to compute."""
        return lease_s in self._described

    def describe(self, lease_s: float) -> pb.DatasetInfo:
        """The version for callers."""
        if lease_s not in self._described:
            self._described[lease_s] = self._build_description(lease_s)
        return self._described[lease_s]

    def _build_description(self, lease_s: float) -> pb.DatasetInfo:
        version = self.version
        pinned, starts = version.pinned, version.row_starts()
        info = self.summarize()
        info.schema = pinned.logical.serialize().to_pybytes()
        info.lease_s = lease_s
        num_shards = version.num_shards or 0
        placement = self.placement(num_shards)
        # Readers of sealed shards need no row ids, and all others wait until it is ready.
        is_ready = info.state == pb.DATASET_STATE_READY
        holders = self._holders.serving if is_ready else self._holders.holding
        info.log.CopyFrom(version.log_message())
        named: set[str] = set()
        for index in range(num_shards):
            held = holders.get(index, _NONE)
            ordered = [n for n in placement[index] if n in held]
            if len(ordered) < len(held):
                ordered += sorted(held.difference(ordered))
            named.update(ordered)
            sealed = version.sealed.get(index)
            info.shards.add(
                index=index,
                rows=pb.RowRange(start=starts[index], stop=starts[index + 1]) if starts else None,
                num_bytes=sealed.num_bytes if sealed else 0,
                checksum=sealed.checksum if sealed else "",
                node_ids=ordered,
            )
        info.nodes.extend(without_sums(self._members[node_id].node) for node_id in sorted(named))
        content = info.SerializeToString(deterministic=True)
        info.tag = hashlib.blake2b(content, digest_size=16).hexdigest()
        return info

    def summarize(self) -> pb.DatasetInfo:
        """State and sums of the version, without schema, shards and nodes; the caller's own."""
        summary = pb.DatasetInfo()
        summary.CopyFrom(self._summary)
        return summary

    @cached_property
    def _summary(self) -> pb.DatasetInfo:
        version = self.version
        info = pb.DatasetInfo(
            spec=version.pinned.spec.to_proto(),
            fingerprint=version.pinned.key.fingerprint,
            num_bytes=version.sealed_sums().num_bytes,
            nulls=version.sealed_sums().nulls,
            progress=load_progress(version, self._holders),
            notes=sorted(version.notes),
            erasures=len(version.erasures.acts),
            erased_rows=version.erasures.num_rows,
        )
        failure = self.failure()
        if failure is not None:
            info.state = pb.DATASET_STATE_FAILED
            info.error.CopyFrom(to_proto(failure))
        elif version.state.is_away:
            info.state = pb.DATASET_STATE_UNAVAILABLE
            info.error.CopyFrom(to_proto(self.absence()))
            info.awaited.extend(self.awaited())
        elif version.state.is_evicted:
            info.state = pb.DATASET_STATE_EVICTED
            if version.recall_error is not None:
                info.error.CopyFrom(to_proto(version.recall_error))
        elif self.is_open():
            info.state = pb.DATASET_STATE_READY
        else:
            info.state = pb.DATASET_STATE_LOADING
        if (starts := version.row_starts()) is not None:
            info.num_rows = starts[-1]
        return info
