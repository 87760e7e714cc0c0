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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import astuple
from typing import Protocol

import pyarrow as pa

from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.backoff import pause_s
from cache_server.node import loading
from cache_server.node.heartbeat_log import HeartbeatLog
from cache_server.node.load_memory import LoadMemory
from cache_server.node.loading import CancelledError, Job, WholeTables
from cache_server.node.serving import Load, Serving
from cache_server.node.status import Held
from cache_server.plan.version import split_from_proto
from cache_server.secrets import error_text
from cache_server.shards.checksums import PieceDigests
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.store import NoRoomError, ShardStore
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_RETRY_S = 0.5  # between attempts of what failed
# At most, between heartbeats that are not answered: nodes often start with their coordinator.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 1.0


class CoordinatorLink(Protocol):
    """What a node asks of its coordinator, in this process or another."""

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Reports the actual shards; answers the desired ones."""

    def get(self, name: str, fingerprint: str = "", *, lease: bool = False) -> pb.DatasetInfo:
        """One dataset; the newest version that has not failed unless a fingerprint is given."""

    def datasets(self) -> list[pb.DatasetInfo]:
        """Every dataset."""


class Node:
    """Thread-safe; `start` begins the heartbeat loop, `close` ends it.

    Args:
        store: the shards on disk; the caller closes it after the node.
        link: the coordinator.
        description: id, locations and limits of this node, as the coordinator shows them.
        load_threads: shards loaded at once.
        container_bytes: memory limit of the container, which the loads keep to; None for none.
        on_ready: called with True or False whenever `is_ready` changes.
    """

    def __init__(
        self,
        store: ShardStore,
        link: CoordinatorLink,
        description: pb.Node,
        *,
        load_threads: int,
        container_bytes: int | None = None,
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self._store = store
        self._link = link
        self.description = description
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._serving: dict[VersionKey, Serving] = {}
        self._running: set[Job] = set()  # of a load thread each; many more may wait for one
        self._joined = threading.Event()
        self._ready = False
        self._room_may_come = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(load_threads, thread_name_prefix="load")
        self._memory = LoadMemory(container_bytes, self._wanted_bytes)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.coordinator = pb.CoordinatorEndpoints()

    def start(self) -> None:
        """Begins to report to the coordinator."""
        self._thread.start()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
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
        if not running:
            self._memory.close()
        return not running and not self._thread.is_alive()

    def _loads(self) -> list[Load]:
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

    def shard_file(self, key: VersionKey, index: int, max_bytes: int) -> Iterator[pa.Buffer]:
        """The bytes of a sealed shard's file, whether its rows are served yet or not.

        A file that is not what was sealed any more is dropped at its end, and made anew: whoever
        copies it notices, too. So is one that is gone.

        Args:
            max_bytes: of a piece.

        Raises:
            NotReadyError: it is not here.
        """
        shard = self._store.shards(key).get(index)
        if shard is None:
            raise NotReadyError(f"shard {index} of {key.dataset!r} is not on this node")
        try:
            mapped = pa.memory_map(str(shard.path))
        except FileNotFoundError:
            if self._drop_damaged(key, shard):
                reason = "is made anew: its file was removed"
            else:
                reason = "was just dropped"
            raise NotReadyError(f"shard {index} of {key.dataset!r} {reason}") from None
        return self._checked_bytes(key, shard, mapped, max_bytes)

    def _checked_bytes(
        self, key: VersionKey, shard: MappedShard, mapped: pa.MemoryMappedFile, max_bytes: int
    ) -> Iterator[pa.Buffer]:
        digests = PieceDigests()
        with mapped:
            while len(chunk := mapped.read_buffer(max_bytes)):
                digests.add(mapped.tell() - len(chunk), chunk)
                yield chunk
            checksum = digests.checksum(mapped.fileno())
        if checksum != shard.sealed.checksum:
            self._drop_damaged(key, shard)

    def _drop_damaged(self, key: VersionKey, shard: MappedShard) -> bool:
        """Has a shard made anew, unless it was dropped, or another took its place, meanwhile."""
        dropped = self._store.drop_this(key, shard)
        if dropped:
            logger.error("shard damaged dataset=%s path=%s", key.dataset, shard.path)
            self.wake()
        return dropped

    def describe(self, dataset: str, fingerprint: str = "") -> pb.DatasetInfo:
        """One dataset, as the coordinator knows it, for somebody who is about to read its rows."""
        return self._link.get(dataset, fingerprint, lease=True)

    def datasets(self) -> list[pb.DatasetInfo]:
        """Every dataset, as the coordinator knows them."""
        return self._link.datasets()

    def held(self) -> tuple[Held, ...]:
        """What it has of each version that it was asked for, or still stores; by name."""
        sealed = self._store.versions()
        with self._lock:
            return tuple(
                self._held(key, sealed.get(key, {}), self._serving.get(key))
                for key in sorted({*sealed, *self._serving}, key=astuple)
            )

    @staticmethod
    def _held(key: VersionKey, sealed: dict[int, MappedShard], serving: Serving | None) -> Held:
        return Held(
            key,
            served=len(serving.row_starts) if serving and serving.rows else 0,
            sealed=len(sealed),
            loading=sum(not load.future.done() for load in serving.all_loads()) if serving else 0,
            failed=len(serving.failures) if serving else 0,
            num_bytes=sum(shard.sealed.num_bytes for shard in sealed.values()),
        )

    def is_ready(self) -> bool:
        """Whether this node has joined and serves every shard asked of it."""
        with self._lock:
            return self._ready

    @property
    def is_loading(self) -> bool:
        """Whether a shard is loaded or copied just now."""
        with self._lock:
            return bool(self._running)

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        failed = 0  # heartbeats, one after the other
        outage = HeartbeatLog()
        while not self._stop.is_set():
            self._wake.clear()
            try:
                response = self._link.heartbeat(self._report())
            except CacheError as error:
                outage.note(error, joined=self._joined.is_set())
                failed += 1
                interval = pause_s(failed, _FIRST_RETRY_S, _LONGEST_RETRY_S)
            except Exception:  # of the coordinator in this process, such as a full disk
                logger.exception("heartbeat failed; trying again")
                interval = _RETRY_S
            else:
                outage.end()
                failed, interval = 0, response.interval_s
                self.coordinator = response.coordinator
                try:
                    news = self._reconcile(response)
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
        node.CopyFrom(self.description)
        node.stored_bytes = sum(
            shard.sealed.num_bytes for shards in sealed.values() for shard in shards.values()
        )
        node.stored_shards = sum(len(shards) for shards in sealed.values())
        request = pb.HeartbeatRequest(node=node)
        with self._lock:
            for key in {*sealed, *self._serving}:
                serving = self._serving.get(key)
                if serving is not None and serving.retired:
                    continue  # what is asked for under this name now has not begun
                actual = request.datasets.add(dataset=key.dataset, fingerprint=key.fingerprint)
                starts = serving.row_starts if serving else {}
                for index, shard in sealed.get(key, {}).items():
                    actual.shards.add(
                        index=index,
                        sealed=True,
                        num_rows=shard.sealed.num_rows,
                        num_bytes=shard.sealed.num_bytes,
                        checksum=shard.sealed.checksum,
                        rows_fixed=index in starts,
                        row_start=starts.get(index, 0),
                    )
                if serving:
                    serving.report(actual, num_shards.get(key))
                    serving.reported = set(sealed.get(key, {}))
        return request

    def _reconcile(self, response: pb.HeartbeatResponse) -> bool:
        """Moves towards what is desired; returns whether there is something new to report."""
        wanted = {VersionKey(d.plan.dataset, d.plan.fingerprint): d for d in response.datasets}
        kept = {VersionKey(version.dataset, version.fingerprint) for version in response.kept}
        news = False
        with self._lock:
            if self._stop.is_set():
                return False
            sealed = self._store.versions()
            for key in {*self._serving, *sealed} - wanted.keys() - kept:
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
                    serving = self._serving[key] = Serving(key, dataset, tables)
                serving.want(dataset)
                if dataset.HasField("num_shards"):
                    serving.num_shards = dataset.num_shards
                self._load_missing(key, serving, sealed.get(key, {}))
                self._drop_surplus(key, serving, sealed.get(key, {}))
                news |= serving.publish(self._store.shards(key))
            self._room_may_come = response.room_may_come
            self._joined.set()
            ready = all(
                serving.is_settled()
                for key, serving in self._serving.items()
                if key in wanted and not serving.retired
            )
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
            # What is done is not waited for: its room may be needed by what comes next.
            self._store.drop(key, *self._store.shards(key))
            return False
        serving.whole_tables.close()
        del self._serving[key]
        return True

    def _load_missing(
        self, key: VersionKey, serving: Serving, sealed: dict[int, MappedShard]
    ) -> None:
        desired, wanted = serving.desired, serving.wanted
        for index, load in list(serving.loads.items()):
            if index not in wanted:
                load.job.cancelled.set()
            if load.future.done():
                del serving.loads[index]
        serving.forget_unwanted()
        serving.forgive_copies()
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

    def _shard_work(self, job: Job, serving: Serving, shard: pb.DesiredShard) -> Callable[[], None]:
        if shard.copy_from:
            return lambda: loading.copy_shard(self._store, job, shard)

        def work() -> None:
            splits = [split_from_proto(split) for split in shard.splits]
            self._memory.run(
                job,
                splits,
                lambda: loading.load_shard(self._store, job, shard, serving.whole_tables),
            )

        return work

    def _run_whole_if_asked(self, key: VersionKey, serving: Serving, sealed: set[int]) -> None:
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
            num_shards = self._memory.run(
                job, (), lambda: loading.run_whole(self._store, job, missing)
            )
            with self._lock:
                serving.num_shards = num_shards

        serving.whole_run = self._submit(serving, job, work)

    def _submit(
        self,
        serving: Serving,
        job: Job,
        work: Callable[[], None],
        splits: Iterable[pb.Split] = (),
    ) -> Load:
        what = "the whole query" if job.index is None else f"shard {job.index}"
        if splits:
            what += f" of {', '.join(str(split_from_proto(split)) for split in splits)}"
        return Load(self._pool.submit(self._run_job, serving, what, job, work), job)

    def _wanted_bytes(self) -> int:
        with self._lock:
            kept = [serving for serving in self._serving.values() if not serving.retired]
            return sum(serving.wanted_bytes() for serving in kept)

    def _drop_surplus(
        self, key: VersionKey, serving: Serving, sealed: dict[int, MappedShard]
    ) -> None:
        if serving.desired.run_whole:
            return  # whose shards the result will be is not decided yet
        # What was sealed since the last report is not surplus: nobody has decided about it yet.
        self._store.drop(key, *(sealed.keys() & serving.reported) - serving.wanted.keys())

    # -- in the loading threads ----------------------------------------------------------------

    def _run_job(self, serving: Serving, what: str, job: Job, work: Callable[[], None]) -> None:
        """Does ``work`` to its end; what goes wrong is reported with the next heartbeat.

        Args:
            what: is loaded, for the log.
        """
        with self._lock:
            self._running.add(job)
            beside = list(self._running)
        waits = False
        try:
            if not job.cancelled.is_set():  # while it waited for a thread
                work()
        except CancelledError:
            return
        except NodeUnavailableError as error:
            logger.warning("copy failed dataset=%s %s %s", job.key.dataset, what, error)
            self._stop.wait(_RETRY_S)
        except CacheError as error:
            leaving = any(other.cancelled.is_set() for other in beside)
            waits = isinstance(error, NoRoomError) and (leaving or self._room_may_come)
            if waits:
                self._wait_for_room(serving, what, job, error, leaving=leaving)
            else:
                logger.error("load failed dataset=%s %s %s", job.key.dataset, what, error)
                self._fail(serving, job, str(error))
        except error_text.EXITS:
            raise
        except BaseException as error:
            reason, trace = (
                error_text.reason(error, job.secrets),
                error_text.trace(error, job.secrets),
            )
            logger.error("load failed dataset=%s %s\n%s", job.key.dataset, what, trace)
            self._fail(serving, job, f"cannot load {what}: {reason}")
        finally:
            with self._lock:
                self._running.discard(job)
                if not waits:
                    serving.waits.pop(job.index, None)
            self._wake.set()

    def _wait_for_room(
        self, serving: Serving, what: str, job: Job, error: CacheError, *, leaving: bool
    ) -> None:
        """Pauses before the load is begun again; says why, once."""
        until = (
            "until a load that is not wanted any more has ended"
            if leaving
            else "for a moment, in which a node that was lost may come back"
        )
        reason = f"{what} waits on node {self.description.id} {until}: {error}"
        with self._lock:
            known, serving.waits[job.index] = serving.waits.get(job.index), reason
        if known is None:
            logger.warning("load waits dataset=%s %s", job.key.dataset, reason)
        self._stop.wait(_RETRY_S)

    def _fail(self, serving: Serving, job: Job, reason: str) -> None:
        with self._lock:
            serving.fail(job.index, f"{reason} (on node {self.description.id})")
