"""A node: makes what it holds equal to what it should hold, and serves the rows it holds.

Each heartbeat tells the coordinator the actual shards and brings back the desired ones. The node
then starts loads, stops them, drops shards and publishes immutable `ResidentRows` for readers; it
never waits for a load inside the loop. It knows neither Flight nor gRPC: how the coordinator is
reached is a `CoordinatorLink`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import pyarrow as pa

from cache_server import loader, sources
from cache_server.packing import ShardBuilder
from cache_server.planning import Split, VersionKey, max_rows
from cache_server.store import ResidentRows, ShardStore
from cache_server.versions import split_from_proto
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import (
    CacheError,
    DatasetNotFoundError,
    LoadError,
    NotReadyError,
    StaleVersionError,
)
from protos.layout import Layout, schema_from_bytes
from protos.shards import MappedShard

logger = logging.getLogger(__name__)

_RETRY_S = 0.5  # between heartbeats that the coordinator does not answer


class CoordinatorLink(Protocol):
    """What a node asks of its coordinator, in this process or another."""

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Reports the actual shards; answers the desired ones."""

    def get(self, name: str, fingerprint: str = "") -> pb.DatasetInfo:
        """One dataset; the newest version unless a fingerprint is given."""

    def datasets(self) -> list[pb.DatasetInfo]:
        """Every dataset."""


class _LoadCancelledError(Exception):
    """The shard is not wanted any more."""


@dataclass
class _Load:
    """One shard being loaded."""

    future: Future[None]
    cancelled: threading.Event
    rows: list[int] = field(default_factory=lambda: [0])  # so far; written by the loading thread


@dataclass
class _Serving:
    """What this node has to do for one version."""

    desired: pb.DesiredDataset
    loads: dict[int, _Load] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    rows: ResidentRows | None = None
    row_starts: dict[int, int] = field(default_factory=dict)


class Node:
    """Thread-safe; `start` begins the heartbeat loop, `close` ends it.

    Args:
        store: the shards on disk; the caller closes it after the node.
        link: the coordinator.
        description: id, locations and limits of this node, as the coordinator shows them.
        load_threads: shards loaded at once.
        on_ready: called with True or False whenever `is_ready` changes.
    """

    def __init__(
        self,
        store: ShardStore,
        link: CoordinatorLink,
        description: pb.Node,
        *,
        load_threads: int,
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self._store = store
        self._link = link
        self._description = description
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._serving: dict[VersionKey, _Serving] = {}
        self._joined = threading.Event()
        self._ready = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(load_threads, thread_name_prefix="load")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.coordinator = pb.CoordinatorEndpoints()

    def start(self) -> None:
        """Begins to report to the coordinator."""
        self._thread.start()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the loop and the loads; sealed shards stay on disk."""
        self._stop.set()
        self._wake.set()
        with self._lock:
            for serving in self._serving.values():
                for load in serving.loads.values():
                    load.cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()

    def wait_until_joined(self, timeout_s: float) -> bool:
        """Waits until the coordinator has answered once; whether it did."""
        return self._joined.wait(timeout_s)

    def wake(self) -> None:
        """Has the next heartbeat sent now."""
        self._wake.set()

    # -- reading -------------------------------------------------------------------------------

    def rows(self, dataset: str, fingerprint: str) -> ResidentRows:
        """The rows of one version that this node serves now.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError.
        """
        with self._lock:
            serving = self._serving.get(VersionKey(dataset, fingerprint))
            if serving is not None:
                if serving.rows is None:
                    raise NotReadyError(f"dataset {dataset!r} is loading")
                return serving.rows
            if not self._joined.is_set():
                raise NotReadyError("this node has not reached its coordinator yet")
            others = [key.fingerprint for key in self._serving if key.dataset == dataset]
            if others:
                raise StaleVersionError(
                    f"dataset {dataset!r} has fingerprint {', '.join(others)}, not {fingerprint}"
                )
            names = sorted({key.dataset for key in self._serving})
        raise DatasetNotFoundError(
            f"no dataset {dataset!r} on this node; datasets: {', '.join(names) or 'none'}"
        )

    def describe(self, dataset: str, fingerprint: str = "") -> pb.DatasetInfo:
        """One dataset, as the coordinator knows it."""
        return self._link.get(dataset, fingerprint)

    def datasets(self) -> list[pb.DatasetInfo]:
        """Every dataset, as the coordinator knows them."""
        return self._link.datasets()

    def is_ready(self) -> bool:
        """Whether this node has joined and serves every shard asked of it."""
        with self._lock:
            return self._ready

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = _RETRY_S
        while not self._stop.is_set():
            self._wake.clear()
            try:
                response = self._link.heartbeat(self._report())
            except CacheError as error:
                logger.warning("heartbeat failed reason=%s", error)
                interval = _RETRY_S
            else:
                interval = response.interval_s
                self.coordinator = response.coordinator
                try:
                    news = self._reconcile(response.datasets)
                except OSError:
                    logger.exception("reconcile failed; trying again")
                    news = False
                if news:
                    continue  # tell the coordinator at once
            self._wake.wait(interval)

    def _report(self) -> pb.HeartbeatRequest:
        sealed = self._store.versions()
        node = pb.Node()
        node.CopyFrom(self._description)
        node.stored_bytes = self._store.stored_bytes
        node.stored_shards = sum(len(shards) for shards in sealed.values())
        request = pb.HeartbeatRequest(node=node)
        with self._lock:
            for key in {*sealed, *self._serving}:
                serving = self._serving.get(key)
                actual = request.datasets.add(
                    dataset=key.dataset,
                    fingerprint=key.fingerprint,
                    attempt=serving.desired.plan.attempt if serving else 0,
                )
                for index, shard in sealed.get(key, {}).items():
                    start = serving.row_starts.get(index) if serving else None
                    actual.shards.add(
                        index=index,
                        sealed=True,
                        num_rows=shard.sealed.num_rows,
                        num_bytes=shard.sealed.num_bytes,
                        checksum=shard.sealed.checksum,
                        rows_fixed=start is not None,
                        row_start=start or 0,
                    )
                if serving:
                    for index, load in serving.loads.items():
                        actual.shards.add(index=index, rows_loaded=load.rows[0])
                    for index, reason in serving.failures.items():
                        actual.shards.add(index=index, failure=reason)
        return request

    def _reconcile(self, desired: Iterable[pb.DesiredDataset]) -> bool:
        """Moves towards ``desired``; returns whether there is something new to report."""
        wanted = {VersionKey(d.plan.dataset, d.plan.fingerprint): d for d in desired}
        news = False
        with self._lock:
            sealed = self._store.versions()
            for key in [key for key in {*self._serving, *sealed} if key not in wanted]:
                if self._retire(key):
                    self._store.drop_version(key)
            for key, dataset in wanted.items():
                serving = self._serving.get(key)
                if serving and serving.desired.plan.attempt != dataset.plan.attempt:
                    if not self._retire(key):
                        continue
                    self._store.drop_version(key)
                    sealed.pop(key, None)
                    serving = None
                if serving is None:
                    serving = self._serving[key] = _Serving(dataset)
                serving.desired = dataset
                self._load_missing(key, serving, sealed.get(key, {}))
                self._drop_surplus(key, serving, sealed.get(key, {}))
                news |= self._publish(key, serving, self._store.versions().get(key, {}))
            self._joined.set()
            ready = all(self._complete(serving) for serving in self._serving.values())
            changed, self._ready = ready != self._ready, ready
        if changed:
            self._on_ready(ready)
        return news

    def _retire(self, key: VersionKey) -> bool:
        """Stops serving and loading ``key``; returns whether nothing writes to it any more."""
        serving = self._serving.get(key)
        if serving is None:
            return True
        serving.rows = None
        for load in serving.loads.values():
            load.cancelled.set()
        if any(not load.future.done() for load in serving.loads.values()):
            return False
        del self._serving[key]
        return True

    def _load_missing(
        self, key: VersionKey, serving: _Serving, sealed: dict[int, MappedShard]
    ) -> None:
        wanted = {shard.index: shard for shard in serving.desired.shards}
        for index, load in list(serving.loads.items()):
            if index not in wanted:
                load.cancelled.set()
            if load.future.done():
                del serving.loads[index]
        for index, shard in wanted.items():
            if index in sealed or index in serving.loads or index in serving.failures:
                continue
            cancelled, rows = threading.Event(), [0]
            future = self._pool.submit(
                self._load, key, serving, serving.desired.plan, shard, cancelled, rows
            )
            serving.loads[index] = _Load(future, cancelled, rows)

    def _drop_surplus(
        self, key: VersionKey, serving: _Serving, sealed: dict[int, MappedShard]
    ) -> None:
        wanted = {shard.index for shard in serving.desired.shards}
        for index in set(sealed) - wanted:
            self._store.drop(key, index)

    def _publish(self, key: VersionKey, serving: _Serving, sealed: dict[int, MappedShard]) -> bool:
        if not serving.desired.rows_fixed:
            return False
        starts = {
            shard.index: shard.row_start
            for shard in serving.desired.shards
            if shard.index in sealed
        }
        if serving.rows is not None and starts == serving.row_starts:
            return False
        layout = Layout(schema_from_bytes(serving.desired.plan.logical_schema))
        # Shards without rows share their start with the next one; they serve nothing.
        shards = {start: sealed[i] for i, start in starts.items() if sealed[i].sealed.num_rows}
        serving.rows = ResidentRows(key, layout, serving.desired.num_rows, shards)
        serving.row_starts = starts
        return True

    def _complete(self, serving: _Serving) -> bool:
        wanted = {shard.index for shard in serving.desired.shards}
        return serving.rows is not None and wanted <= set(serving.row_starts)

    # -- in the loading threads ----------------------------------------------------------------

    def _load(
        self,
        key: VersionKey,
        serving: _Serving,
        plan: pb.LoadPlan,
        shard: pb.DesiredShard,
        cancelled: threading.Event,
        rows: list[int],
    ) -> None:
        splits = [split_from_proto(split) for split in shard.splits]
        try:
            logical = schema_from_bytes(plan.logical_schema)
            expected = max_rows(splits)
            with ExitStack() as stack:
                draft, matrices = None, None
                if plan.keeps_every_row and expected:
                    draft = stack.enter_context(
                        self._store.draft(key, shard.index, Layout(logical), expected)
                    )
                    matrices = draft.matrices
                builder = ShardBuilder(logical, expected, matrices)
                batch = fill(builder, plan, splits, cancelled, rows)
                if not cancelled.is_set():
                    self._store.seal(key, shard.index, batch, draft)
        except _LoadCancelledError:
            return
        except LoadError as error:
            logger.error("load failed dataset=%s shard=%d %s", key.dataset, shard.index, error)
            self._fail(serving, shard.index, str(error))
        except Exception as error:
            logger.exception("load failed dataset=%s shard=%d", key.dataset, shard.index)
            where = ", ".join(map(str, splits))
            self._fail(serving, shard.index, f"cannot load {where}: {error!r}")
        finally:
            self._wake.set()

    def _fail(self, serving: _Serving, index: int, reason: str) -> None:
        with self._lock:
            serving.failures[index] = reason


def fill(
    builder: ShardBuilder,
    plan: pb.LoadPlan,
    splits: list[Split],
    cancelled: threading.Event,
    rows: list[int],
) -> pa.RecordBatch:
    """Reads the splits of one shard, in order, into one stored batch.

    Args:
        builder: of the plan's logical schema, empty.
        plan: how to read.
        splits: in row order.
        cancelled: set when the shard is not wanted any more.
        rows: its one element is the number of rows so far, for progress.

    Raises:
        LoadError: naming the file, the split and the reason.
    """
    source_schema = schema_from_bytes(plan.source_schema)
    for split in splits:
        sources.check_unchanged(split.file)
        for batch in loader.read_split(split, plan.sql, plan.format, source_schema):
            if cancelled.is_set():
                raise _LoadCancelledError
            try:
                builder.append(batch)
            except pa.ArrowInvalid as error:
                raise LoadError(f"cannot store {split}: {error}") from None
            rows[0] = builder.num_rows
        sources.check_unchanged(split.file)
    try:
        return builder.finish()
    except LoadError as error:
        raise LoadError(f"{', '.join(map(str, splits))}: {error}") from None
