"""Forecasts the rows, bytes and nodes of a load from metadata.

The source was pinned before; no data is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from cache_protocol.storage.layout import Layout
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.members.placement import bytes_by_node, nodes_needed, place
from cache_server.plan.pinned_version import OpenPlan, PinnedVersion
from cache_server.plan.shard_plan import load_memory_bytes, max_rows

_NO_ZONES: Mapping[str, str] = {}
_FEWEST_RATED_BYTES = 16 * 1024 * 1024  # in a smaller load, most time is not reading


class LoadRate:
    """The rate of the latest load, to forecast the next one. One thread at a time.

    Attributes:
        node_bytes_per_s: decoded bytes that a node loads each second; 0 before the first load.
    """

    def __init__(self) -> None:
        self.node_bytes_per_s = 0.0

    def record(
        self, version: PinnedVersion, elapsed_s: float, num_nodes: int, reused: Collection[int] = ()
    ) -> None:
        """Computes the rate of a finished load, for the nodes that had a shard to read.

        Args:
            reused: the shards that were not loaded.
        """
        shards = version.shards or ()
        loaded = sum(shard.estimated_bytes for shard in shards if shard.index not in reused)
        if loaded >= _FEWEST_RATED_BYTES:
            readers = max(1, min(num_nodes, len(shards)))
            self.node_bytes_per_s = loaded / max(elapsed_s, 1e-3) / readers


def forecast(
    planned: OpenPlan,
    node_ids: Sequence[str],
    memory_limit_bytes: int,
    node_bytes_per_s: float = 0.0,
    reused: Collection[int] = (),
    zones: Mapping[str, str] = _NO_ZONES,
) -> pb.LoadForecast:
    """The forecast of a planned load.

    Args:
        node_ids: of the nodes that would hold the shards.
        memory_limit_bytes: of each node; 0 for none.
        node_bytes_per_s: see `LoadRate`.
        reused: the shards that the cache has already.
        zones: of the nodes that have one.
    """
    version = planned.version
    result = pb.LoadForecast(
        spec=version.spec.to_proto(),
        fingerprint=version.key.fingerprint,
        schema=version.logical.serialize().to_pybytes(),
        whole=version.shards is None,
        why=version.explanation,
        ordered=planned.query.ordered,
        memory_limit_bytes=memory_limit_bytes,
        makes_rows=version.shards is not None and not planned.query.only_drops_rows,
        guessed_columns=version.unsized_columns,
        load_memory_bytes=_load_memory_bytes(version),
        zones=Counter(zones.get(node_id) or node_id for node_id in node_ids) if zones else None,
    )
    for number, table in enumerate(version.tables):
        splits = planned.table_splits[table.name]
        files = {split.file.path: split.file.size for split in splits}
        result.tables.add(
            name=table.name,
            format=table.format,
            snapshot=table.snapshot,
            num_files=len(files),
            source_bytes=sum(files.values()),
            num_rows=max_rows(splits),
            num_bytes=sum(split.estimated_bytes for split in splits),
            columns=planned.query.columns[table.name],
            by_split=number == 0 and version.shards is not None,
            bytes_by=planned.pins[table.name].bytes_by,
        )
    if version.shards is None:
        result.num_bytes = sum(table.num_bytes for table in result.tables)
        return result
    rows = max_rows(split for shard in version.shards for split in shard.splits)
    if rows is not None:
        result.num_rows = rows
    result.rows_exact = version.keeps_every_row
    sizes = [shard.estimated_bytes for shard in version.shards]
    result.num_bytes = sum(sizes)
    result.num_shards = len(sizes)
    result.largest_shard_bytes = max(sizes, default=0)
    result.node_bytes.extend(_node_bytes(version, node_ids, zones))
    if not (result.makes_rows or version.unsized_columns):
        result.nodes_needed = nodes_needed(sizes, version.spec.replicas, memory_limit_bytes)
    fits = max(result.node_bytes, default=0) <= memory_limit_bytes
    if fits and len(node_ids) in range(version.spec.replicas, result.nodes_needed):
        result.nodes_needed = len(node_ids)  # `nodes_needed` is an upper bound
    result.shards_reused = len(reused)
    new = [size for index, size in enumerate(sizes) if index not in reused]
    if node_bytes_per_s and node_ids:
        result.load_s = sum(new) / node_bytes_per_s / min(len(node_ids), len(new) or 1)
    result.nulls.update(_nulls(planned))
    return result


def _nulls(planned: OpenPlan) -> dict[str, int]:
    """Result column of numbers -> the nulls of its source column, where statistics tell."""
    table = planned.version.tables[0].name
    count = planned.pins[table].nulls
    if count is None or not planned.query.only_drops_rows:
        return {}
    sources = {
        name: planned.query.lineage[name][1]
        for name, column in Layout(planned.version.logical).flat.items()
        if column.kind == "number" and name in planned.query.lineage
    }
    counts = count(set(sources.values()))
    return {name: counts[source] for name, source in sources.items() if counts.get(source)}


def _load_memory_bytes(version: PinnedVersion) -> int:
    """Memory for the largest load of a shard, or for the whole query."""
    whole = [split for table in version.tables for split in table.splits]
    placed = Layout(version.logical).fixed_row_bytes if version.keeps_every_row else 0
    loads = [()] if version.shards is None else [shard.splits for shard in version.shards]
    return max((load_memory_bytes(splits, whole, placed) for splits in loads), default=0)


def _node_bytes(
    version: PinnedVersion, node_ids: Sequence[str], zones: Mapping[str, str]
) -> list[int]:
    """Bytes of all replicas on each node, in the order of ``node_ids``."""
    shards = version.shards or ()
    placement = place(
        version.key.fingerprint, len(shards), node_ids, version.spec.replicas, zones=zones
    )
    totals = bytes_by_node(placement, [shard.estimated_bytes for shard in shards])
    return [totals.get(node_id, 0) for node_id in node_ids]
