"""How far the load of one version is, as the nodes report it."""

from __future__ import annotations

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.holdings.shard_holders import ShardHolders
from cache_server.coordination.versions.version_record import VersionRecord


def load_progress(version: VersionRecord, holders: ShardHolders) -> pb.LoadProgress:
    """Shards, rows and bytes of a load, with those of shards that are not sealed yet."""
    sums = version.sealed_sums()
    partial: dict[int, int] = {}
    whole, files, waits = 0, 0, ""
    for report in holders.reports.values():
        whole += report.actual.rows_loaded
        files += report.actual.files_read
        waits = max(waits, report.actual.waits)
        for index, rows in report.loading.items():
            if index not in version.sealed:
                partial[index] = max(partial.get(index, 0), rows)
    done = sums.num_rows + sum(partial.values())
    return pb.LoadProgress(
        shards_done=len(holders.saying if version.state.was_served else version.sealed),
        shards_total=version.num_shards or 0,
        rows_done=max(done, whole),
        estimated_rows=version.pinned.max_rows,
        bytes_done=sums.num_bytes,
        waits=waits,
        shards_reused=len(version.reused),
        files_read=files,
    )
