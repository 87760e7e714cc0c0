"""A node: makes what it holds equal to what it should hold, and serves the rows it holds.

Each heartbeat tells the coordinator the actual shards and brings back the desired ones. The node
then starts loads, stops them, drops shards and publishes immutable `ResidentRows` for readers; it
never waits for a load inside the loop. It knows neither Flight nor gRPC: how the coordinator is
reached is a `CoordinatorLink`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from cache_server import defects, loading
from cache_server.loading import CancelledError, Job, WholeTables
from cache_server.planning import VersionKey
from cache_server.resident_rows import ResidentRows
from cache_server.store import ShardStore
from cache_server.versions import split_from_proto
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from protos.layout import Layout, schema_from_bytes
from protos.shards import MappedShard

logger = logging.getLogger(__name__)

_RETRY_S = 0.5  # between heartbeats that the coordinator does not answer
_OUTAGE_LOG_S = 10.0
_COPY_AGAIN_S = 30.0  # after a copy that failed, such as for want of room


class CoordinatorLink(Protocol):
    """What a node asks of its coordinator, in this process or another."""

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Reports the actual shards; answers the desired ones."""

    def get(self, name: str, fingerprint: str = "", *, lease: bool = False) -> pb.DatasetInfo:
        """One dataset; the newest version unless a fingerprint is given."""

    def datasets(self) -> list[pb.DatasetInfo]:
        """Every dataset."""


@dataclass
class _Load:
    """A job in the pool."""

    future: Future[None]
    job: Job


@dataclass
class _Serving:
    """What this node has to do for one version.

    Attributes:
        reported: the sealed shards that the coordinator knows of.
        loads, failures: by shard.
        copy_again_at: monotonic seconds; until then shards whose copy failed are left alone.
        whole_run, failure, num_shards: of a whole query, if this node is asked to run one.
        last_read: monotonic seconds; None while nobody has read its rows here.
        retired: not wanted any more, but some of its loads have yet to end.
    """

    desired: pb.DesiredDataset
    whole_tables: WholeTables
    reported: set[int] = field(default_factory=set)
    loads: dict[int, _Load] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    copy_again_at: float = 0.0
    whole_run: _Load | None = None
    failure: str = ""
    num_shards: int | None = None
    rows: ResidentRows | None = None
    row_starts: dict[int, int] = field(default_factory=dict)
    last_read: float | None = None
    retired: bool = False

    def all_loads(self) -> list[_Load]:
        """The jobs under way, or just ended."""
        return [*self.loads.values(), *([self.whole_run] if self.whole_run else [])]


class _Outage:
    """Logs that the coordinator does not answer, and for how long, without a line a heartbeat."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._due = 0.0

    def note(self, error: CacheError, *, joined: bool) -> None:
        """A heartbeat was not answered."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._due = now
        if now >= self._due:
            what = "heartbeat failed" if joined else "waiting for the coordinator to join it"
            logger.warning("%s since_s=%.0f reason=%s", what, now - self._since, error)
            self._due = now + _OUTAGE_LOG_S

    def end(self) -> None:
        """One was answered."""
        if self._since is not None:
            waited_s = time.monotonic() - self._since
            logger.info("the coordinator answers after_s=%.1f", waited_s)
            self._since = None


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

    def stop(self) -> None:
        """Ends the loop and the loads, and waits for neither; what is served is served on."""
        self._stop.set()
        self._wake.set()
        with self._lock:  # so that no load begins meanwhile
            self._pool.shutdown(wait=False, cancel_futures=True)
            for load in self._loads():
                load.job.cancelled.set()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stops, and waits until nothing writes any more; sealed shards stay on disk.

        A load looks only now and then whether it is still wanted, and a source that hangs may
        never let it.

        Args:
            timeout_s: None for as long as it takes.

        Returns:
            Whether the loop and every load ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._lock:
            # Not those that never began: `wait` would wait for them for ever.
            futures = [load.future for load in self._loads() if not load.future.done()]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        _, running = wait(futures, left)
        return not running and not self._thread.is_alive()

    def _loads(self) -> list[_Load]:
        return [load for serving in self._serving.values() for load in serving.all_loads()]

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
            if serving is not None and not serving.retired:
                if serving.rows is None:
                    raise NotReadyError(f"dataset {dataset!r} is loading")
                serving.last_read = time.monotonic()
                return serving.rows
            if not self._joined.is_set():
                raise NotReadyError("this node has not reached its coordinator yet")
            kept = [key for key, serving in self._serving.items() if not serving.retired]
            others = [key.fingerprint for key in kept if key.dataset == dataset]
            if others:
                raise StaleVersionError(
                    f"dataset {dataset!r} has fingerprint {', '.join(others)}, not {fingerprint}"
                )
            names = sorted({key.dataset for key in kept})
        raise DatasetNotFoundError(
            f"no dataset {dataset!r} on this node; datasets: {', '.join(names) or 'none'}"
        )

    def shard_file(self, key: VersionKey, index: int) -> Path:
        """The file of a sealed shard of this node, whether its rows are served yet or not.

        Raises:
            NotReadyError: it is not here.
        """
        shard = self._store.versions().get(key, {}).get(index)
        if shard is None:
            raise NotReadyError(f"shard {index} of {key.dataset!r} is not on this node")
        return shard.path

    def describe(
        self, dataset: str, fingerprint: str = "", *, lease: bool = False
    ) -> pb.DatasetInfo:
        """One dataset, as the coordinator knows it.

        Args:
            lease: somebody is about to read its rows.
        """
        return self._link.get(dataset, fingerprint, lease=lease)

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
        outage = _Outage()
        while not self._stop.is_set():
            self._wake.clear()
            try:
                response = self._link.heartbeat(self._report())
            except CacheError as error:
                outage.note(error, joined=self._joined.is_set())
                interval = _RETRY_S
            except Exception:  # of the coordinator in this process, such as a full disk
                logger.exception("heartbeat failed; trying again")
                interval = _RETRY_S
            else:
                outage.end()
                interval = response.interval_s
                self.coordinator = response.coordinator
                try:
                    news = self._reconcile(response.datasets)
                except Exception:  # such as no room for a thread; the node must not fall silent
                    logger.exception("reconcile failed; trying again")
                    news = False
                if news:
                    continue  # tell the coordinator at once
            self._wake.wait(interval)

    def _report(self) -> pb.HeartbeatRequest:
        with self._lock:  # before the shards are listed: who says how many there are lists them all
            num_shards = {key: serving.num_shards for key, serving in self._serving.items()}
        sealed = self._store.versions()
        node = pb.Node()
        node.CopyFrom(self._description)
        node.stored_bytes = self._store.stored_bytes
        node.stored_shards = sum(len(shards) for shards in sealed.values())
        request = pb.HeartbeatRequest(node=node)
        with self._lock:
            for key in {*sealed, *self._serving}:
                serving = self._serving.get(key)
                if serving is not None and serving.retired:
                    continue  # what is asked for under this name now has not begun
                actual = request.datasets.add(
                    dataset=key.dataset,
                    fingerprint=key.fingerprint,
                    attempt=serving.desired.plan.attempt if serving else None,
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
                    self._report_loads(serving, actual)
                    serving.reported = set(sealed.get(key, {}))
                    if (known := num_shards.get(key)) is not None:
                        actual.num_shards = known
        return request

    def _report_loads(self, serving: _Serving, actual: pb.ActualDataset) -> None:
        for index, load in serving.loads.items():
            actual.shards.add(index=index, rows_loaded=load.job.rows)
        for index, reason in serving.failures.items():
            actual.shards.add(index=index, failure=reason)
        if serving.whole_run is not None:
            actual.rows_loaded = serving.whole_run.job.rows
        if serving.last_read is not None:
            actual.idle_s = time.monotonic() - serving.last_read
        actual.failure = serving.failure

    def _reconcile(self, desired: Iterable[pb.DesiredDataset]) -> bool:
        """Moves towards ``desired``; returns whether there is something new to report."""
        wanted = {VersionKey(d.plan.dataset, d.plan.fingerprint): d for d in desired}
        news = False
        with self._lock:
            if self._stop.is_set():
                return False
            sealed = self._store.versions()
            for key in [key for key in {*self._serving, *sealed} if key not in wanted]:
                if self._retire(key):
                    self._store.drop_version(key)
            for key, dataset in wanted.items():
                serving = self._serving.get(key)
                if serving and (
                    serving.retired or serving.desired.plan.attempt != dataset.plan.attempt
                ):
                    if not self._retire(key):
                        continue
                    self._store.drop_version(key)
                    sealed.pop(key, None)
                    serving = None
                if serving is None:
                    # Of its own: two datasets of other names may have the same fingerprint.
                    tables = WholeTables(self._store.scratch / uuid.uuid4().hex)
                    serving = self._serving[key] = _Serving(dataset, tables)
                serving.desired = dataset
                self._load_missing(key, serving, sealed.get(key, {}))
                self._drop_surplus(key, serving, sealed.get(key, {}))
                news |= self._publish(key, serving, self._store.versions().get(key, {}))
            self._joined.set()
            ready = all(self._complete(s) for s in self._serving.values() if not s.retired)
            changed, self._ready = ready != self._ready, ready
        if changed:
            self._on_ready(ready)
        return news

    def _retire(self, key: VersionKey) -> bool:
        """Stops serving and loading ``key``; returns whether nothing writes to it any more."""
        serving = self._serving.get(key)
        if serving is None:
            return True
        serving.retired, serving.rows = True, None
        for load in serving.all_loads():
            load.job.cancelled.set()
        if any(not load.future.done() for load in serving.all_loads()):
            return False
        serving.whole_tables.close()
        del self._serving[key]
        return True

    def _load_missing(
        self, key: VersionKey, serving: _Serving, sealed: dict[int, MappedShard]
    ) -> None:
        desired = serving.desired
        wanted = {shard.index: shard for shard in desired.shards}
        for index, load in list(serving.loads.items()):
            if index not in wanted:
                load.job.cancelled.set()
            if load.future.done():
                del serving.loads[index]
        if serving.failures and time.monotonic() >= serving.copy_again_at:
            # There may be room by now; what a source said, it would say again.
            for index in [i for i in serving.failures if i in wanted and wanted[i].copy_from]:
                del serving.failures[index]
        for index, shard in wanted.items():
            if index in sealed or index in serving.loads or index in serving.failures:
                continue
            if not shard.copy_from and not shard.splits:
                continue  # another node makes it first
            job = Job(key, desired.plan, desired.secrets, index)
            work = self._shard_work(job, serving, shard)
            serving.loads[index] = self._submit(serving, job, work, shard.splits)
        self._run_whole_if_asked(key, serving, set(sealed))
        if not serving.loads:
            serving.whole_tables.close()

    def _shard_work(
        self, job: Job, serving: _Serving, shard: pb.DesiredShard
    ) -> Callable[[], None]:
        if shard.copy_from:
            return lambda: loading.copy_shard(self._store, job, shard)
        return lambda: loading.load_shard(self._store, job, shard, serving.whole_tables)

    def _run_whole_if_asked(self, key: VersionKey, serving: _Serving, sealed: set[int]) -> None:
        run, desired = serving.whole_run, serving.desired
        if run is not None and (run.future.done() or not desired.run_whole):
            run.job.cancelled.set()
            if not run.future.done():
                return
            run = serving.whole_run = None
        through = serving.num_shards is not None and set(desired.missing) <= sealed
        if run is not None or not desired.run_whole or through or serving.failure:
            return
        job = Job(key, desired.plan, desired.secrets, None)
        missing = frozenset(desired.missing) or None

        def work() -> None:
            num_shards = loading.run_whole(self._store, job, missing)
            with self._lock:
                serving.num_shards = num_shards

        serving.whole_run = self._submit(serving, job, work)

    def _submit(
        self,
        serving: _Serving,
        job: Job,
        work: Callable[[], None],
        splits: Iterable[pb.Split] = (),
    ) -> _Load:
        what = "the whole query" if job.index is None else f"shard {job.index}"
        if splits:
            what += f" of {', '.join(str(split_from_proto(split)) for split in splits)}"
        return _Load(self._pool.submit(self._run_job, serving, what, job, work), job)

    def _drop_surplus(
        self, key: VersionKey, serving: _Serving, sealed: dict[int, MappedShard]
    ) -> None:
        if serving.desired.run_whole:
            return  # whose shards the result will be is not decided yet
        wanted = {shard.index for shard in serving.desired.shards}
        # What was sealed since the last report is not surplus: nobody has decided about it yet.
        for index in (set(sealed) & serving.reported) - wanted:
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

    def _run_job(self, serving: _Serving, what: str, job: Job, work: Callable[[], None]) -> None:
        """Does ``work`` to its end; what goes wrong is reported with the next heartbeat.

        Args:
            what: is loaded, for the log.
        """
        try:
            work()
        except CancelledError:
            return
        except NodeUnavailableError as error:
            logger.warning("copy failed dataset=%s %s %s", job.key.dataset, what, error)
            self._stop.wait(_RETRY_S)
        except CacheError as error:
            logger.error("load failed dataset=%s %s %s", job.key.dataset, what, error)
            self._fail(serving, job, str(error))
        except Exception as error:
            reason, trace = defects.reason(error, job.secrets), defects.trace(error, job.secrets)
            logger.error("load failed dataset=%s %s\n%s", job.key.dataset, what, trace)
            self._fail(serving, job, f"cannot load {what}: {reason}")
        finally:
            self._wake.set()

    def _fail(self, serving: _Serving, job: Job, reason: str) -> None:
        with self._lock:
            if job.index is None:
                serving.failure = reason
            else:
                serving.failures[job.index] = reason
                serving.copy_again_at = time.monotonic() + _COPY_AGAIN_S
