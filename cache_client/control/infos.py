"""What the coordinator reports of datasets and nodes, as records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from cache_protocol.cli.facts import counted, facts_html, facts_text, type_name
from cache_protocol.cli.output import size
from cache_protocol.storage.layout import Layout, schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import state_name
from cache_protocol.wire.records import record


@dataclass(frozen=True)
class DatasetInfo:
    """One version of a dataset, as the coordinator reports it.

    Attributes:
        num_rows: 0 until every shard is loaded.
        num_bytes: of the shards loaded so far, one replica.
        schema: logical columns in their storage types.
        state: ``loading``, ``ready``, ``failed``, ``unavailable`` while its rows lie only on nodes
            that are away, or ``evicted`` until it is read.
        placement: shard -> ids of the nodes that hold it, in order of preference.
        error: why it failed or is unavailable; None if it is not.
        waits: why a part of the load has to wait; None if none has to.
        replicas: the requested number; ``placement`` has fewer if there are fewer nodes.
        nulls: column -> its nulls, of the shards loaded so far; strings are not counted.
        notes: what the load changed, such as leading zeros; one for each column.
        shards_reused: shards that the version before had too.
        files_read: by the loads; a file counts once for each shard that is made of it.
        awaited: ids of the nodes with its rows, while it is unavailable.
        pinned: it is never evicted.
        priority: those of lower priority are evicted first.
        last_read_s: clock of the coordinator, in seconds since 1970; None: it was not read yet.
        load_s: seconds that its load took; 0: unknown.
        zones: node -> its zone, of those that have one.
        erasures: acts that forgot some of its rows; see `CacheClient.erased_rows`.
        erased_rows: that they erased. They keep their row ids, and ``num_rows`` counts them.
    """

    name: str
    fingerprint: str
    num_rows: int
    num_bytes: int
    num_shards: int
    schema: pa.Schema
    state: str
    placement: Mapping[int, tuple[str, ...]]
    error: str | None = None
    waits: str | None = None
    replicas: int = 1
    nulls: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shards_reused: int = field(default=0, compare=False)  # not known after a restart
    files_read: int = field(default=0, compare=False)
    awaited: tuple[str, ...] = ()
    pinned: bool = False
    priority: int = 0
    last_read_s: float | None = field(default=None, compare=False)
    load_s: float = field(default=0.0, compare=False)
    zones: Mapping[str, str] = field(default_factory=dict, compare=False)
    erasures: int = 0
    erased_rows: int = 0

    def shards_of_zones(self) -> dict[str, int]:
        """How many shards have a replica in each zone; without nodes that have no zone."""
        found: Counter[str] = Counter()
        for node_ids in self.placement.values():
            found.update({self.zones[node] for node in node_ids if node in self.zones})
        return dict(sorted(found.items()))

    def shards_in_one_zone(self) -> int:
        """How many shards lose all of their replicas, which are several, with one zone."""
        return sum(
            len(nodes) > 1 and len({self.zones.get(node, node) for node in nodes}) == 1
            for nodes in self.placement.values()
        )

    def __repr__(self) -> str:
        """The facts in a few lines; `schema` and `placement` are there in full."""
        columns = self.schema.names[:8] + ["..."] * (len(self.schema.names) > 8)
        nodes = sorted({node for nodes in self.placement.values() for node in nodes})
        lines = [
            f"DatasetInfo({self.name!r}, {self.state}, fingerprint={self.fingerprint})",
            f"  {self.num_rows:,} rows, {self.num_bytes:,} bytes, {self.num_shards} shards, "
            f"{self.replicas} replicas on {len(nodes)} nodes",
            f"  {len(self.schema.names)} columns: {', '.join(columns)}",
        ]
        lines += [
            f"  {name}: {value}" for name in ("error", "waits") if (value := getattr(self, name))
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The facts and the columns, for notebooks."""
        nodes = {node for nodes in self.placement.values() for node in nodes}
        facts = [
            ("state", self.state),
            ("fingerprint", self.fingerprint),
            ("rows", f"{self.num_rows:,}"),
            ("size", f"{size(self.num_bytes)} in {counted(self.num_shards, 'shard')}"),
            ("replicas", f"{self.replicas} on {counted(len(nodes), 'node')}"),
            *((name, value) for name in ("error", "waits") if (value := getattr(self, name))),
            *(("note", note) for note in self.notes),
        ]
        columns = [(field.name, type_name(field.type)) for field in self.schema]
        return facts_html(f"dataset {self.name}", facts, ("column", "type"), columns)


@dataclass(frozen=True)
class DrainInfo:
    """How far the shards of a node were moved to other nodes.

    Attributes:
        done: other nodes serve everything that it had.
        shards_left, bytes_left: on this node, and not served by those that take them.
        waits: what cannot be moved now, and why; empty: nothing.
    """

    done: bool
    shards_left: int
    bytes_left: int
    waits: str = ""


@dataclass(frozen=True)
class OrphanInfo:
    """Files on nodes that belong to no dataset and no write that the coordinator knows.

    Attributes:
        fingerprint: of a version, or the name of what was put for a write.
        node_ids: the nodes that hold them.
        num_shards, num_bytes: on all of these nodes together.
    """

    dataset: str
    fingerprint: str
    node_ids: tuple[str, ...]
    num_shards: int
    num_bytes: int


@dataclass(frozen=True)
class ShareInfo:
    """What a namespace holds of the cache, and may hold.

    Attributes:
        num_bytes: of all replicas of its datasets.
        guaranteed_bytes: while it has no more, others evict nothing of it.
        largest_bytes: the most that it may hold; None: no limit.
    """

    namespace: str
    num_bytes: int
    guaranteed_bytes: int
    largest_bytes: int | None


@dataclass(frozen=True)
class FunctionInfo:
    """A function that SQL may call on a node.

    Attributes:
        version: of its results.
        signature: arguments and result.
        text: what it does.
    """

    name: str
    version: str
    signature: str
    text: str


@dataclass(frozen=True)
class NodeInfo:
    """One cache node.

    Attributes:
        memory_limit_bytes: None if there is no limit.
        version: of its package; empty if it was not heard yet.
        untrusted: why the coordinator ignores the node; empty: it does not.
        name: host name of its machine, or of its pod.
        drain: of the node; None: it is not drained.
        functions: that SQL may call on it.
        zone: of the node; empty: it has none.
    """

    id: str
    flight_location: str
    control_location: str
    cache_dir: str
    memory_limit_bytes: int | None
    stored_bytes: int
    stored_shards: int
    alive: bool
    version: str = ""
    untrusted: str = ""
    name: str = ""
    drain: DrainInfo | None = None
    functions: tuple[FunctionInfo, ...] = ()
    zone: str = ""


def node_info(node: pb.Node) -> NodeInfo:
    """The record of a message."""
    return record(
        NodeInfo,
        node,
        memory_limit_bytes=node.memory_limit_bytes or None,
        drain=record(DrainInfo, node.drain) if node.HasField("drain") else None,
        functions=tuple(record(FunctionInfo, each) for each in node.functions),
    )


@dataclass(frozen=True)
class CacheStatus:
    """The nodes of a cache.

    Attributes:
        nodes: by id.
        now_s: clock of the coordinator, in seconds since 1970.
    """

    nodes: tuple[NodeInfo, ...]
    now_s: float


def dataset_info(info: pb.DatasetInfo) -> DatasetInfo:
    """The record of a message."""
    return record(
        DatasetInfo,
        info,
        name=info.spec.name,
        num_shards=len(info.shards),
        schema=Layout(schema_from_bytes(info.schema)).logical if info.schema else pa.schema([]),
        state=state_name(info.state),
        placement={shard.index: tuple(shard.node_ids) for shard in info.shards},
        error=info.error.message or None,
        waits=info.progress.waits or None,
        replicas=info.spec.replicas,
        shards_reused=info.progress.shards_reused,
        files_read=info.progress.files_read,
        zones={node.id: node.zone for node in info.nodes if node.zone},
    )


@dataclass(frozen=True)
class RankInfo:
    """One rank of a job, as it last reported.

    Attributes:
        wait_share: of its time, it waits for data.
        step_s, transform_s, fetch_s: of a step.
        age_s: of its last report.
        wait_history: shares, the oldest first; ``wait_ages_s`` when they were taken.
    """

    rank: int
    live: bool
    epoch: int
    step: int
    rows_per_s: float
    wait_share: float
    step_s: float
    transform_s: float
    fetch_s: float
    age_s: float
    wait_history: tuple[float, ...]
    wait_ages_s: tuple[float, ...]


@dataclass(frozen=True)
class NodeShare:
    """What one node does for a job.

    Attributes:
        rows_share: of the rows that nodes sent to the job.
        wait_share: of its waits for nodes.
    """

    node_id: str
    rows_share: float
    wait_share: float


@dataclass(frozen=True)
class JobSample:
    """A job at one time of the last hour.

    Attributes:
        wait_share: the mean over its ranks.
        most_wait_share: of the rank that waits most.
    """

    age_s: float
    rows_per_s: float
    wait_share: float
    most_wait_share: float


@dataclass(frozen=True)
class AuditEntry:
    """The record of one reader, as JSON, and how long ago it began and was last reported."""

    run: str
    record: str
    begun_s: float
    last_s: float


@dataclass(frozen=True)
class JobInfo:
    """A job that reads from a cache, as its readers report.

    Attributes:
        step: of the rank that is behind.
        wait_share: of its time, the rank that waits most waits for data.
        local_share: of its rows, from files of the reader's machine.
        verdict: what the job waits for.
        verdict_s: for how long the same verdict has held.
        ranks: those that wait most, by rank; ``num_ranks`` report.
        history: of the last hour, the oldest first.
        audits: if asked for.
        namespace: of the readers.
        ranks_disagree: some read by other settings than others, so on wrong rows.
        end: of a job that is not live: how its last pass ended; empty: a rank fell silent in it.
        view: what the last reader that reported reads other than each row once, as JSON;
            ``view_digest`` is of it. Empty: nothing else.
    """

    name: str
    dataset: str
    fingerprint: str
    live: bool
    world_size: int
    epoch: int
    step: int
    num_steps: int
    rows_per_s: float
    wait_share: float
    local_share: float
    verdict: str
    verdict_s: float
    ranks: tuple[RankInfo, ...]
    nodes: tuple[NodeShare, ...]
    history: tuple[JobSample, ...]
    audits: tuple[AuditEntry, ...]
    namespace: str
    num_ranks: int
    ranks_disagree: bool
    end: Literal["", "finished", "stopped", "failed"]
    view: str = ""
    view_digest: str = ""

    def __repr__(self) -> str:
        """The job in a few lines; the attributes have it in full."""
        return facts_text(f"JobInfo({self.name!r}, {self.verdict})", self._facts())

    def _repr_html_(self) -> str:
        """The job and the ranks that wait most, for notebooks."""
        header = ("rank", "epoch", "step", "rows/s", "waits")
        ranks = [
            (
                *(f"{each.rank}", f"{each.epoch}", f"{each.step:,}", f"{each.rows_per_s:,.0f}"),
                f"{each.wait_share:.0%}",
            )
            for each in self.ranks
        ]
        facts = [("verdict", self.verdict), *self._facts()]
        return facts_html(f"job {self.name}", facts, header if ranks else (), ranks)

    def _facts(self) -> list[tuple[str, str]]:
        steps = f"{self.num_steps:,}" if self.num_steps or not self.step else "?"
        return [
            ("reads", f"{self.dataset} {self.fingerprint[:12]}"),
            *([("view", self.view)] if self.view else []),
            ("ranks", f"{self.num_ranks} of {self.world_size}"),
            ("at", f"epoch {self.epoch}, step {self.step:,} of {steps}"),
            ("speed", f"{self.rows_per_s:,.0f} rows/s; waits {self.wait_share:.0%} of its time"),
        ]


_PARTS = {"ranks": RankInfo, "nodes": NodeShare, "history": JobSample, "audits": AuditEntry}
_ENDS = {
    pb.PASS_END_UNSPECIFIED: "",
    pb.PASS_END_FINISHED: "finished",
    pb.PASS_END_STOPPED: "stopped",
    pb.PASS_END_FAILED: "failed",
}


def job_info(info: pb.JobInfo) -> JobInfo:
    """The record of a message."""
    parts: dict[str, tuple[object, ...]] = {
        name: tuple(record(part, message) for message in getattr(info, name))
        for name, part in _PARTS.items()
    }
    return record(JobInfo, info, **parts, end=_ENDS.get(info.end, ""))
