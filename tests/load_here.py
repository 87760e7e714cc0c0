"""Loads a dataset as a node does, in this process."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_server.node.desired import DesiredShard
from cache_server.node.links.heartbeat_messages import decode_plan
from cache_server.node.loads import loading
from cache_server.plan.pinned_version import plan_version
from cache_server.shards.store import ShardStore


def load_here(spec: DatasetSpec, directory: Path) -> pa.Table:
    """The rows of all shards, in row order, as logical columns.

    Args:
        directory: of a cache that nothing else uses.
    """
    opened = plan_version(spec)
    with ExitStack() as stack:
        stack.callback(opened.close)
        version = opened.version
        plan = decode_plan(version.to_load_plan(1), spec.secrets_to_proto())
        store = stack.enter_context(ShardStore(directory))
        spooled = stack.enter_context(closing(loading.SpooledTables(store.scratch / "spooled")))
        if version.shards is None:
            loading.run_whole(store, loading.Job(plan))
        for shard in version.shards or ():
            wanted = DesiredShard(shard.index, splits=shard.splits)
            loading.load_shard(store, loading.Job(plan, wanted), spooled)
        shards = store.shards(plan.key)
        batches = [shards[index].layout.unpack(shards[index].batch) for index in sorted(shards)]
        store.drop_version(plan.key)
    return pa.Table.from_batches(batches, plan.logical)
