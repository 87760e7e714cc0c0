"""The least that a load of objects can be, to compare one with.

Two processes, as two nodes are, each read half of the rows by DataFusion's own S3 reader, pack the
batches and seal them as a shard. Nothing is planned, pinned, copied or told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from datafusion import ExecutionPlan, SessionConfig, SessionContext
from datafusion.object_store import AmazonS3

from benchmarks.processes import child_process
from cache_protocol.storage.layout import Layout
from cache_server.shards.packing import ShardBuilder, logical_schema
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey

_NODES = 2
_PARTS = 8
_KEY = VersionKey("bare", "load")
_BATCH_ROWS = 32_768  # as a node reads


class BareLoad:
    """Loads a table and drops it again; each in all processes at once."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def load(self, uri: str) -> int:
        """The rows that were sealed."""
        return sum(self._ask(uri))

    def drop(self) -> None:
        """Removes what was loaded last."""
        self._ask(None)

    def _ask(self, uri: str | None) -> list[int]:
        for pipe in self._pipes:
            pipe.send(uri)
        return [pipe.recv() for pipe in self._pipes]


@contextmanager
def bare_load(
    directory: Path, bucket: str, endpoint: str, keys: dict[str, str]
) -> Iterator[BareLoad]:
    """Processes that load from an S3 server into a folder each."""
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(
                child_process(_main, node, directory / f"bare-{node}", bucket, endpoint, keys)
            )
            for node in range(_NODES)
        ]
        yield BareLoad(pipes)


def _main(
    pipe: Connection, node: int, directory: Path, bucket: str, endpoint: str, keys: dict[str, str]
) -> None:
    config = (
        SessionConfig()
        .with_target_partitions(_PARTS)
        .with_batch_size(_BATCH_ROWS)
        # Else the first partition reads them all.
        .set("datafusion.execution.enable_file_stream_work_stealing", "false")
    )
    shares: dict[str, tuple[list[int], int]] = {}
    with ExitStack() as stack:
        store = ShardStore(directory)
        stack.callback(store.close)
        while True:
            try:
                uri = pipe.recv()
            except EOFError:
                return
            if uri is None:
                store.drop_version(_KEY)
                pipe.send(0)
                continue
            context = with_store(config, bucket, endpoint, keys)
            context.register_parquet("source", uri)
            if uri not in shares:  # in the first round, which is not counted
                shares[uri] = _share(context, node)
            parts, num_rows = shares[uri]
            if num_rows:
                _seal(context, parts, num_rows, store)
            pipe.send(num_rows)


def _share(context: SessionContext, node: int) -> tuple[list[int], int]:
    """The partitions of a node, with as many rows as those of the other; and how many."""
    plan = _plan(context)
    rows = [
        sum(batch.to_pyarrow().num_rows for batch in context.execute(plan, part))
        for part in range(plan.partition_count)
    ]
    shares: list[list[int]] = [[] for _ in range(_NODES)]
    for part in sorted(range(len(rows)), key=lambda part: -rows[part]):
        min(shares, key=lambda share: sum(rows[part] for part in share)).append(part)
    return sorted(shares[node]), sum(rows[part] for part in shares[node])


def _seal(context: SessionContext, parts: list[int], num_rows: int, store: ShardStore) -> None:
    plan = _plan(context)
    schema = logical_schema(context.table("source").schema())
    with store.draft(_KEY, 0, Layout(schema), num_rows) as draft:
        builder = ShardBuilder(schema, num_rows, draft)
        for part in parts:
            for batch in context.execute(plan, part):
                builder.append(batch.to_pyarrow())
        assert builder.num_rows == num_rows
        store.seal(_KEY, 0, builder.finish(), draft)


def with_store(
    config: SessionConfig, bucket: str, endpoint: str, keys: dict[str, str]
) -> SessionContext:
    """A DataFusion session that reads ``s3://bucket`` directly."""
    context = SessionContext(config)
    store = AmazonS3(bucket, region="us-east-1", endpoint=endpoint, allow_http=True, **keys)
    context.register_object_store("s3://", store, bucket)
    return context


def _plan(context: SessionContext) -> ExecutionPlan:
    return context.sql("SELECT * FROM source").execution_plan()
