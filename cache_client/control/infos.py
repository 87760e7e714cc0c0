"""What the coordinator reports of datasets and nodes, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import state_name


@dataclass(frozen=True)
class DatasetInfo:
    """One version of a dataset, as the coordinator reports it.

    Attributes:
        num_rows: 0 until every shard is loaded.
        num_bytes: of the shards loaded so far, one replica.
        schema: logical columns in their storage types.
        state: ``loading``, ``ready`` or ``failed``.
        placement: shard -> ids of the nodes that hold it, in order of preference.
        error: why the load failed; None unless it did.
        waits: why a part of the load has to wait; None if none has to.
        replicas: the requested number; ``placement`` has fewer if there are fewer nodes.
        nulls: column of floats -> nulls that became NaN, of the shards loaded so far.
        notes: what the load changed, such as leading zeros; one for each column.
        shards_reused: shards that the version before had too.
        files_read: by the loads; a file counts once for each shard that is made of it.
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


@dataclass(frozen=True)
class NodeInfo:
    """One cache node.

    Attributes:
        memory_limit_bytes: None if there is no limit.
        version: of its package; empty if it is of an earlier release.
        untrusted: why the coordinator ignores the node; empty: it does not.
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


@dataclass(frozen=True)
class CacheStatus:
    """The nodes of a cache.

    Attributes:
        nodes: by id.
        now_s: clock of the coordinator, in seconds since 1970; 0 if it is of an earlier release.
    """

    nodes: tuple[NodeInfo, ...]
    now_s: float


def dataset_info(info: pb.DatasetInfo) -> DatasetInfo:
    """The record of a message."""
    return DatasetInfo(
        info.spec.name,
        info.fingerprint,
        info.num_rows,
        info.num_bytes,
        len(info.shards),
        schema_from_bytes(info.schema),
        state_name(info.state),
        {shard.index: tuple(shard.node_ids) for shard in info.shards},
        info.error.message or None,
        info.progress.waits or None,
        info.spec.replicas,
        dict(info.nulls),
        tuple(info.notes),
        info.progress.shards_reused,
        info.progress.files_read,
    )
