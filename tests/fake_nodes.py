"""Cache nodes as a coordinator sees them, and a clock that stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.protocol_version import PROTOCOL
from cache_server.auth.namespace_shares import NamespaceShare
from cache_server.auth.principals import Principal
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.catalogue_store import CatalogueStore
from cache_server.coordination.commits import AskHolder
from cache_server.coordination.coordinator import Coordinator
from cache_server.shards.version_key import VersionKey

TIMEOUT_S, LEASE_S = 10.0, 100.0
FILES, ROWS_PER_FILE = 8, 5  # each file becomes a shard
SHARDS = frozenset(range(FILES))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeNode:
    """A node as the coordinator sees it: it holds what it was told to, at once and perfectly.

    Attributes:
        by: the principal that reports; None: the coordinator's own process, which is believed.
        sealed: version -> shard -> what the node holds of it.
        starts: version -> shard -> the first row id that it was told.
        failing: (dataset, shard) -> the reason why this node cannot load it.
        rows_of: shard -> rows that come out of it, where not those of its footer.
        idle_s: since rows were read here; None: never.
        loads: how many shards it has loaded or copied so far.
        shared: how many shards it took over from another version.
        boot: of the node; changes when it starts again.
        leaving: it ends soon.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        node_id: str,
        *,
        limit_bytes: int = 0,
        by: Principal | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.id = node_id
        self.location = f"grpc://{node_id}:1"
        self.by = by
        self.limit_bytes = limit_bytes
        self.sealed: dict[VersionKey, dict[int, pb.SealedShard]] = {}
        self.starts: dict[VersionKey, dict[int, int]] = {}
        self.attempts: dict[VersionKey, int] = {}
        self.failing: dict[tuple[str, int], str] = {}
        self.failed: dict[VersionKey, dict[int, str]] = {}
        self.loads = self.shared = 0
        self.rows_of: dict[int, int] = {}
        self.shard_bytes = 100
        self.idle_s: float | None = None
        self.boot, self.leaving = "", False
        self._number = 0  # of the last report
        self._known: pb.HeartbeatRequest | None = None  # the report that the coordinator has
        self._answer = pb.HeartbeatResponse()  # the last one

    def _exchange(self) -> pb.HeartbeatResponse:
        """Reports what changed since the last report; returns the whole answer."""
        full = self.report()
        self._number += 1
        full.report, full.answer = self._number, self._answer.answer
        if not isinstance(self.coordinator, Coordinator):  # a test that looks at whole reports
            full.report = full.answer = 0
            return self.coordinator.heartbeat(full, by=self.by)
        answer = self.coordinator.heartbeat(shortened(full, self._known), by=self.by)
        if answer.resend:
            answer = self.coordinator.heartbeat(full, by=self.by)
        assert answer.report == self._number
        self._known = full
        if answer.unchanged:
            assert answer.answer == self._answer.answer
            return self._answer
        self._answer = answer
        return answer

    def report(self) -> pb.HeartbeatRequest:
        request = pb.HeartbeatRequest(
            node=pb.Node(
                id=self.id,
                flight_location=self.location,
                process=self.boot,
                protocol=PROTOCOL,
                leaving=self.leaving,
                memory_limit_bytes=self.limit_bytes,
                stored_bytes=self.shard_bytes
                * len({id(shard) for held in self.sealed.values() for shard in held.values()}),
            )
        )
        for key in {*self.sealed, *self.failed}:
            actual = request.datasets.add(
                dataset=key.dataset,
                fingerprint=key.fingerprint,
                attempt=self.attempts.get(key),
                idle_s=self.idle_s,
            )
            starts = self.starts.get(key, {})
            for index, shard in self.sealed.get(key, {}).items():
                actual.shards.add(
                    index=index,
                    sealed=True,
                    num_rows=shard.num_rows,
                    num_bytes=shard.num_bytes,
                    checksum=shard.checksum,
                    rows_fixed=index in starts,
                    row_start=starts.get(index, 0),
                )
            for index, reason in self.failed.get(key, {}).items():
                actual.shards.add(index=index, failure=reason)
        return request

    def beat(self, *, load: Iterable[int] = SHARDS) -> dict[str, set[int]]:
        """Reports, then does what it is told; returns dataset -> shards it should hold.

        Args:
            load: the shards that this node gets done now, of those that it lacks.
        """
        answer = self._exchange()
        wanted: dict[str, set[int]] = {}
        for desired in answer.datasets:
            key = VersionKey(desired.plan.dataset, desired.plan.fingerprint)
            if self.attempts.get(key) not in (None, desired.plan.attempt):
                self._forget(key)
            self.attempts[key] = desired.plan.attempt
            indices = {shard.index for shard in desired.shards}
            wanted[key.dataset] = indices
            held = self.sealed.setdefault(key, {})
            for shard in desired.shards:
                if shard.index in held or shard.index in self.failed.get(key, {}):
                    continue
                if reason := self.failing.get((key.dataset, shard.index)):
                    self.failed.setdefault(key, {})[shard.index] = reason
                elif shard.index not in load:
                    continue
                elif shard.HasField("same_as") and not shard.same_as.copy_from:
                    other = VersionKey(key.dataset, shard.same_as.fingerprint)
                    held[shard.index] = self.sealed[other][shard.same_as.index]
                    self.shared += 1
                elif shard.splits or shard.copy_from or shard.same_as.copy_from:
                    rows = shard.num_rows or sum(split.num_rows for split in shard.splits)
                    rows = self.rows_of.get(shard.index, rows)
                    held[shard.index] = pb.SealedShard(
                        num_rows=rows,
                        num_bytes=self.shard_bytes,
                        checksum=shard.checksum or _checksum(shard),
                    )
                    self.loads += 1
            for index in set(held) - indices:
                del held[index]
            self.starts[key] = (
                {s.index: s.row_start for s in desired.shards if s.index in held}
                if desired.rows_fixed
                else {}
            )
        for gone in answer.gone:
            self._forget(VersionKey(gone.dataset, gone.fingerprint))
        return wanted

    def restart(self, coordinator: Coordinator | None = None) -> FakeNode:
        """The node after a restart: it has its shards, and has been told nothing."""
        again = FakeNode(
            coordinator or self.coordinator, self.id, limit_bytes=self.limit_bytes, by=self.by
        )
        again.sealed = {key: dict(shards) for key, shards in self.sealed.items() if shards}
        return again

    @property
    def drain(self) -> pb.Drain:
        """What the coordinator says of its drain now."""
        return self.coordinator.heartbeat(self.report(), by=self.by).drain

    def holds(self, dataset: str) -> set[int]:
        return {
            index for key, held in self.sealed.items() if key.dataset == dataset for index in held
        }

    def _forget(self, key: VersionKey) -> None:
        for of_version in (self.sealed, self.starts, self.failed):
            of_version.pop(key, None)
        self.attempts.pop(key, None)


def shortened(
    report: pb.HeartbeatRequest, known: pb.HeartbeatRequest | None
) -> pb.HeartbeatRequest:
    """A report that only names the versions that are as in the one that the coordinator has."""
    short = pb.HeartbeatRequest()
    short.CopyFrom(report)
    if known is None:
        return short
    short.since = known.report
    before = {(actual.dataset, actual.fingerprint): actual for actual in known.datasets}
    for actual in short.datasets:
        if before.get((actual.dataset, actual.fingerprint)) == actual:
            name = pb.ActualDataset(
                dataset=actual.dataset, fingerprint=actual.fingerprint, unchanged=True
            )
            if actual.HasField("idle_s"):
                name.idle_s = actual.idle_s
            actual.CopyFrom(name)
    return short


def _checksum(shard: pb.DesiredShard) -> str:
    """The same for the same file, in any version."""
    return f"sum-{int(Path(shard.splits[0].file.path).stem.removeprefix('part-'))}"


HERE = pb.CoordinatorEndpoints(flight_location="grpc://here:1", control_location="here:1")


def make_coordinator(
    place: Path | CatalogueStore,
    clock: Clock,
    ask_holder: AskHolder | None = None,
    endpoints: pb.CoordinatorEndpoints = HERE,
    shares: Iterable[NamespaceShare] = (),
) -> Coordinator:
    """A coordinator of the catalogue in a directory or a store: the same one after a restart."""
    return Coordinator(
        Catalogue(place / "catalogue" if isinstance(place, Path) else place),
        endpoints=endpoints,
        heartbeat_interval_s=0.01,
        node_timeout_s=TIMEOUT_S,
        lease_s=LEASE_S,
        ask_holder=ask_holder,
        shares=shares,
        clock=clock,
    )


def spec(source: Path, name: str = "table", **changes: object) -> DatasetSpec:
    """A spec of `source` that makes a shard of each of its files."""
    return DatasetSpec(name, source, target_shard_bytes=1, **changes)  # type: ignore[arg-type]


def serving(coordinator: Coordinator, wanted: DatasetSpec, *ids: str) -> list[FakeNode]:
    """New nodes, which have joined, and then loaded a dataset."""
    nodes = [FakeNode(coordinator, node_id) for node_id in ids]
    settle(*nodes)
    coordinator.create(wanted)
    settle(*nodes)
    return nodes


def settle(*nodes: FakeNode) -> None:
    """As many rounds as it takes: loads are reported, row ids told, and those reported."""
    for _ in range(5):
        for node in nodes:
            node.beat()


def told(coordinator: Coordinator, node: FakeNode) -> pb.DesiredDataset:
    """What the node is told of its one dataset; it does nothing of it."""
    (desired,) = coordinator.heartbeat(node.report(), by=node.by).datasets
    return desired


def failing(reason: str) -> dict[tuple[str, int], str]:
    """What a node says that can load no shard of the dataset any more."""
    return {("table", index): reason for index in SHARDS}


def state(coordinator: Coordinator, name: str = "table") -> str:
    """The state of a dataset in one word: loading, ready, failed."""
    return pb.DatasetState.Name(coordinator.get(name).state).removeprefix("DATASET_STATE_").lower()


def homes(coordinator: Coordinator, name: str = "table") -> list[list[str]]:
    """For each shard the ids of the nodes that hold it, the one it belongs on first."""
    return [list(shard.node_ids) for shard in coordinator.get(name).shards]
