"""A node: loads the shards that it should hold, and serves their rows.

Each heartbeat reports the actual shards and answers the desired ones. `reconcile` compares them,
and the node acts on the difference. The loop never waits for a load. Readers get immutable
`ResidentRows`. This module knows neither Flight nor gRPC: a `CoordinatorLink` reaches the
coordinator.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial

import pyarrow as pa

from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
    some_of,
)
from cache_protocol.storage.machine import MACHINE_BYTES
from cache_protocol.storage.memory_budget import NodeMemory, expression_memory
from cache_protocol.storage.row_index import ROWS_OF_A_SHARD
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import pause_s, rest_s
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_server.auth.principals import ANYONE, EVERYTHING, Principal, Viewer
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.node.desired import DesiredState, DesiredVersion, LoadPlan
from cache_server.node.forgetting import Forgetting, KnownTombstones
from cache_server.node.leaving import Leaving
from cache_server.node.links import heartbeat_messages
from cache_server.node.links.heartbeat_log import HeartbeatLog
from cache_server.node.links.heartbeat_messages import DesiredDecoder, ReportEncoder, SealedShards
from cache_server.node.links.link import CoordinatorLink
from cache_server.node.links.room_requests import RoomRequests
from cache_server.node.links.write_schemas import WriteSchemas
from cache_server.node.loads.load_functions import NodeFunctions
from cache_server.node.loads.load_memory import LoadMemory
from cache_server.node.loads.load_threads import LoadThreads
from cache_server.node.loads.loading import SpooledTables
from cache_server.node.loads.version_state import Load, VersionState
from cache_server.node.puts import PutMessage, Puts
from cache_server.node.reader_reports import ReaderReports
from cache_server.node.reconcile import (
    Action,
    ActualVersion,
    Cancel,
    CloseTables,
    DropShards,
    Erase,
    Forget,
    Orphans,
    Publish,
    Remove,
    Retire,
    StartLoads,
    StartWholeQuery,
    Update,
    reconcile,
)
from cache_server.node.row_values import RowValues
from cache_server.node.sent_files import file_bytes
from cache_server.node.status import VersionStatus, version_statuses
from cache_server.scratch.scratch import Scratch
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_RETRY_S = 0.5  # after a failure
# With fewer, each start of a load is reported at once, in case it ends the process.
_FEW_SHARDS = 256
# After an unanswered heartbeat; nodes often start together with their coordinator.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 1.0
_LONGEST_INTERVAL_S = 3600.0
_BEAT_S = 10.0  # for the coordinator to learn of a put


class Node:
    """One cache node. Thread-safe; `start` begins the heartbeat loop, `close` ends it.

    Args:
        store: the shards on disk; the caller closes it after the node.
        link: the coordinator.
        description: id, locations and limits of this node, as the coordinator shows them.
        load_threads: shards loaded at once.
        memory: of this node, which the loads respect; None: no limit.
        credentials: of this node, for copies from other nodes.
        on_ready: called once, when `is_ready` becomes true.
        sources: that it may read.
        functions: that SQL may call; None: no installed function.
        keep_orphans_s: how long files stay that the coordinator does not know.
        scratch: for announced orders; None: it prepares none.

    Attributes:
        row_values: computes values of the rows that it serves.
        scratch: the orders that readers announced.
    """

    def __init__(
        self,
        store: ShardStore,
        link: CoordinatorLink,
        description: pb.Node,
        *,
        load_threads: int,
        memory: NodeMemory | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        on_ready: Callable[[], None] = lambda: None,
        sources: AllowedSources = AllowedSources([""]),  # noqa: B008  it is immutable
        functions: NodeFunctions | None = None,
        keep_orphans_s: float = math.inf,
        scratch: Scratch | None = None,
    ) -> None:
        self._store = store
        self._orphans = Orphans(keep_orphans_s)
        self._link = link
        self.description = description
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._states: dict[VersionKey, VersionState] = {}
        self._reports = ReaderReports(self._require_seen)
        self._joined, self._is_ready = threading.Event(), False
        self._encoder, self._decoder = ReportEncoder(), DesiredDecoder()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._memory = LoadMemory(memory, self._desired_bytes)
        self._room = RoomRequests(self.wake)
        self._known = known = KnownTombstones(lambda dataset: link.tombstones(dataset))
        store.left_out = known.left_out
        self._threads = LoadThreads(
            load_threads,
            store,
            self._memory,
            credentials,
            sources,
            functions,
            self._room.ask,
            known.require,
            description.id,
            self._lock,
            self._stop,
            self.wake,
        )
        all_bytes = MACHINE_BYTES if memory is None else memory.all_bytes
        expressions = expression_memory(all_bytes, load_threads)
        self.row_values = RowValues(store.free_bytes, expressions, functions, self._plan_of)
        self.scratch = scratch or Scratch(store.scratch / "orders", None, all_bytes)
        self._forgetting = Forgetting(
            store, self._states, self._lock, self.row_values, known, self._forget
        )
        self._beats, self._leaving = threading.Condition(), Leaving()
        self._begun = self._answered = 0  # heartbeats
        schemas, room, stop = WriteSchemas(link.write_schema), self._room.ask, self._stop
        self._puts = Puts(
            store, self._memory, schemas, description.id, self._beat, room, stop, known.require
        )
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.coordinator = pb.CoordinatorEndpoints()

    def start(self) -> None:
        """Starts the heartbeat loop."""
        self._thread.start()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Tells the loop and the loads to end, without waiting. Reads still work."""
        self._stop.set()
        self._wake.set()
        with self._beats:
            self._beats.notify_all()
        with self._lock:
            self._threads.stop()
            for load in self._loads():
                load.job.cancelled.set()

    def leave(self, timeout_s: float) -> str:
        """Asks the coordinator to move the shards of this node away, and waits for it.

        Meanwhile the node serves as before. Ends early when `stop` is called.

        Args:
            timeout_s: for all of it.

        Returns:
            Why shards are still only here; empty: none is.
        """
        self.description.leaving = True
        self.wake()
        return self._leaving.wait(timeout_s, self._stop.is_set)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stops, and waits until nothing writes. Sealed shards stay on disk.

        A load checks for cancellation between batches. A source that hangs can block it forever.

        Args:
            timeout_s: None waits without a limit.

        Returns:
            Whether the loop and every load ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._lock:
            # `wait` never returns for futures that were cancelled before they began.
            futures = [load.future for load in self._loads() if not load.future.done()]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        _, running = wait(futures, left)
        self.scratch.close()
        if not running:
            self._memory.close()
        return not running and not self._thread.is_alive()

    def _loads(self) -> list[Load]:
        return [load for state in self._states.values() for load in state.loads.values()]

    def wait_until_joined(self, timeout_s: float) -> bool:
        """Waits until the coordinator has answered once; returns whether it did."""
        return self._joined.wait(timeout_s)

    def wake(self) -> None:
        """Sends the next heartbeat now."""
        self._wake.set()

    def _beat(self) -> None:
        """Sends a heartbeat that reports everything until now; returns after its answer.

        Raises:
            NodeUnavailableError: the coordinator does not answer, or the node stops.
        """
        with self._beats:
            wanted = self._begun + 1
        self.wake()
        with self._beats:
            self._beats.wait_for(
                lambda: self._answered >= wanted or self._stop.is_set(), timeout=_BEAT_S
            )
            if self._answered < wanted:
                raise NodeUnavailableError(
                    f"node {self.description.id} stops, or its coordinator did not answer within "
                    f"{_BEAT_S:g} s"
                )

    def _plan_of(self, key: VersionKey) -> LoadPlan | None:
        state = self._states.get(key)
        return state.desired.plan if state else None

    # -- reading -------------------------------------------------------------------------------

    def rows(
        self, dataset: str, fingerprint: str, viewer: Viewer = EVERYTHING, *, by_shard: bool = False
    ) -> ResidentRows:
        """The rows of one version that this node serves now, to a viewer that may read them.

        Args:
            by_shard: those of all sealed shards, numbered by shard; see `ROWS_OF_A_SHARD`. They are
                there before row ids are known.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError.
        """
        dataset = viewer.resolve(dataset)
        with self._lock:
            state = self._states.get(VersionKey(dataset, fingerprint))
            if state is not None and not state.is_retired and state.is_seen_by(viewer):
                rows = self._sealed_rows(state) if by_shard else state.rows
                if rows is None:
                    raise NotReadyError(f"dataset {dataset!r} is loading")
                state.last_read = time.monotonic()
                return rows
            if not self._joined.is_set():
                raise NotReadyError("this node has not reached its coordinator yet")
            kept = [k for k, s in self._states.items() if not s.is_retired and s.is_seen_by(viewer)]
            others = [key.fingerprint for key in kept if key.dataset == dataset]
            if others:
                raise StaleVersionError(
                    f"dataset {dataset!r} has fingerprint {some_of(others)}, not {fingerprint}"
                )
            names = sorted({viewer.shown(key.dataset) for key in kept})
        raise DatasetNotFoundError(
            f"no dataset {dataset!r} on this node; datasets: {some_of(names, like=dataset)}"
        )

    def _sealed_rows(self, state: VersionState) -> ResidentRows:
        """The sealed shards of a version, with rows numbered by shard."""
        if state.sealed_rows is None:
            plan = state.desired.plan
            shards = {
                index: shard
                for index, shard in self._store.shards(plan.key).items()
                if index not in state.erasing
            }
            state.sealed_rows = ResidentRows(
                plan.key,
                plan.layout,
                (max(shards, default=0) + 1) * ROWS_OF_A_SHARD,
                {index * ROWS_OF_A_SHARD: shard for index, shard in shards.items()},
                partial(self.drop_damaged, plan.key),
            )
        return state.sealed_rows

    def shard_file(self, key: VersionKey, index: int, max_bytes: int) -> Iterator[pa.Buffer]:
        """The bytes of a sealed shard's file, even before its rows are served.

        A damaged or removed file is dropped and made again. The caller must compare the checksum.

        Args:
            max_bytes: of each piece.

        Raises:
            NotReadyError: this node does not have the shard.
        """
        shard = self._store.shards(key).get(index)
        if shard is None:
            raise NotReadyError(f"shard {index} of {key.dataset!r} is not on this node")
        return file_bytes(key, shard, max_bytes, self.drop_damaged)

    def held(self, keys: Iterable[VersionKey]) -> list[pb.ActualDataset]:
        """The shards of versions and puts whose files this node has at this moment."""
        return [heartbeat_messages.held_shards(key, self._store.shards(key)) for key in keys]

    def find_rows(self, request: pb.FindRowsRequest) -> pb.FindRowsResponse:
        """The rows of a shard that fulfil conditions, with their tombstones.

        Raises:
            CacheError: as `RowValues.answer`.
        """
        return self._forgetting.find(self.rows(request.dataset, request.fingerprint), request)

    def drop_damaged(self, key: VersionKey, shard: MappedShard) -> bool:
        """Drops a shard, which is then made again; returns whether it was still there."""
        dropped = self._store.drop_this(key, shard)
        if dropped:
            logger.error("shard damaged dataset=%s path=%s", key.dataset, shard.path)
            self.wake()
        return dropped

    def describe(
        self,
        dataset: str,
        fingerprint: str = "",
        viewer: Viewer = EVERYTHING,
        follow: pb.EpochOfJob | None = None,
    ) -> pb.DatasetInfo:
        """One dataset, from the coordinator, leased because its rows are about to be read."""
        return self._link.get(dataset, fingerprint, lease=True, viewer=viewer, follow=follow)

    def datasets(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """Every dataset that a viewer sees, from the coordinator."""
        return self._link.datasets(viewer)

    def put(
        self,
        request: pb.PutRequest,
        schema: pa.Schema,
        messages: Iterator[PutMessage],
        by: Principal = ANYONE,
    ) -> pb.PutResult:
        """Seals the rows of one attempt at a partition of a write; see `Puts.put`."""
        return self._puts.put(request, schema, messages, by)

    def take_report(self, report: pb.ReaderReport, by: Principal) -> pb.Disagreement | None:
        """Sends a report of a reader on with the next heartbeat; see `ReaderReports.put`."""
        return self._reports.put(report, by)

    def _require_seen(self, dataset: str, viewer: Viewer) -> None:
        """Refuses a dataset that does not exist for a viewer; see `CoordinatorLink.get`."""
        full = viewer.resolve(dataset)
        with self._lock:
            for key, state in self._states.items():
                if key.dataset == full and not state.is_retired and state.is_seen_by(viewer):
                    return
        self._link.get(dataset, viewer=viewer)

    def versions(self, viewer: Viewer = EVERYTHING) -> tuple[VersionStatus, ...]:
        """Every version that this node should hold or still stores, and a viewer sees, by name.

        All puts of a write are shown as one.
        """
        stored = self._store.versions()
        with self._lock:
            return version_statuses(stored, self._states, viewer)

    def is_ready(self) -> bool:
        """Whether this node can serve: since its start, it once served all that it should.

        A load or a copy that begins later does not change that.
        """
        with self._lock:
            return self._is_ready

    @property
    def is_loading(self) -> bool:
        """Whether a load, a copy or a put is running."""
        with self._lock:
            return self._threads.are_running or self._puts.are_running

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        failed = 0  # consecutive heartbeats
        log = HeartbeatLog()
        while not self._stop.is_set():
            self._wake.clear()
            begun, begun_s = time.perf_counter(), time.monotonic()
            with self._beats:
                self._begun += 1
            try:
                request = self._report()
                response = self._link.heartbeat(request)
                self._encoder.apply(response)
                if response.resend:
                    self._stop.wait(0.0 if request.since else _RETRY_S)
                    continue
                self._reports.take_answer(response.disagreements)
                desired = self._decoder.decode(response)
            except CacheError as error:
                if not isinstance(error, NodeUnavailableError):  # a report may be the reason
                    self._reports.drop_taken()
                log.record_failure(error, joined=self._joined.is_set())
                failed += 1
                self._leaving.note_failure(begun_s)
                interval = pause_s(failed, _FIRST_RETRY_S, _LONGEST_RETRY_S)
            except Exception:  # from a coordinator in this process, for example of a full disk
                logger.exception("heartbeat failed, will be tried again")
                self._reports.drop_taken()
                interval = _RETRY_S
            else:
                log.record_answer()
                failed, interval = 0, response.interval_s
                if not 0 <= interval <= _LONGEST_INTERVAL_S:  # also for a NaN
                    interval = _RETRY_S
                self.coordinator = response.coordinator
                try:
                    news = self._reconcile(desired)
                except Exception:  # for example no new thread: heartbeats must continue
                    logger.exception("reconcile failed, will be tried again")
                    news = False
                else:
                    self._room.answer(response.no_room, may_come=desired.retry_no_room)
                    self._leaving.take(response.drain)
                    with self._beats:
                        self._answered = self._begun
                        self._beats.notify_all()
                if news:
                    continue  # report it at once
                if sum(len(dataset.shards) for dataset in request.datasets) > _FEW_SHARDS:
                    self._stop.wait(rest_s(time.perf_counter() - begun))
            self._wake.wait(interval)

    def _snapshot(self) -> tuple[dict[VersionKey, ActualVersion], SealedShards]:
        """Every version on this node, and its sealed shards."""
        # Loads and `num_shards` first: a shard that is sealed in between counts as loading and
        # sealed, never as neither, and a node that reports `num_shards` lists every shard.
        unfinished = {key: state.unfinished() for key, state in self._states.items()}
        rows = {
            key: {index: load.job.rows for index, load in loads.items()}
            for key, loads in unfinished.items()
        }
        with self._lock:
            actual = {}
            for key, state in self._states.items():
                state.loads = unfinished[key]
                actual[key] = state.snapshot(rows[key])
        put = self._puts.complete()
        sealed = self._store.versions()
        for key, shards in sealed.items():
            erased = {i: s.sealed.erased for i, s in shards.items() if s.sealed.erased}
            version = actual.get(key, ActualVersion())
            actual[key] = replace(version, sealed=shards.keys(), erased=erased)
        for key, num_shards in put.items():
            actual[key] = replace(actual.get(key, ActualVersion()), num_shards=num_shards)
        return actual, sealed

    def _report(self) -> pb.HeartbeatRequest:
        self._forgetting.note()
        actual, sealed = self._snapshot()
        for key, state in self._states.items():
            if actual[key].sealed != state.reported:
                with self._lock:  # what is reported can be read
                    state.sealed_rows = None
            state.reported = actual[key].sealed
        request = self._encoder.encode(self.description, actual, sealed)
        request.answer = self._decoder.answer
        request.reports.extend(self._reports.take())
        request.lacks.extend(self._room.take())
        return request

    def _reconcile(self, desired: DesiredState) -> bool:
        """Acts on an answer; returns whether there is something new to report.

        Every gather takes the lock, so it is not held while files are removed.
        """
        if self._stop.is_set():
            return False
        self._puts.update(desired.writes)
        self._known.update(desired)
        actual, sealed = self._snapshot()
        orphans = (key for key in desired.orphans if key in actual)
        result = reconcile(desired, actual, self._orphans.expired(orphans, time.monotonic()))
        for action in result.actions:
            self._act(action, sealed)
        with self._lock:
            self._threads.retry_no_room = desired.retry_no_room
            self._joined.set()
            becomes_ready = result.is_ready and not self._is_ready
            self._is_ready |= result.is_ready
        self.row_values.trim()
        self.scratch.trim({key for key, each in self._states.items() if not each.is_retired})
        if becomes_ready:
            self._on_ready()
        return any(isinstance(action, Publish | Erase | StartLoads) for action in result.actions)

    def _act(self, action: Action, sealed: SealedShards) -> None:
        match action:
            case Retire(key):
                with self._lock:
                    self._states[key].retire()
                self._forget(key)
                # The next version may need the room before the last load has ended.
                self._store.drop(key, *self._store.shards(key))
            case Remove(key):
                with self._lock:
                    state = self._states.pop(key, None)
                if state is not None:
                    state.tables.close()
                self._forget(key)
                self._store.drop_version(key)
            case Update(desired):
                self._update(desired)
            case Forget(key, indices):
                with self._lock:
                    self._states[key].forget(indices)
            case Cancel(key, indices):
                self._states[key].cancel(indices)
            case Publish(key, row_starts):
                self._publish(key, row_starts, sealed.get(key, {}))
            case Erase(key, places):
                self._forgetting.erase(key, places)
            case DropShards(key, indices):
                self._store.drop(key, *indices)
            case CloseTables(key):
                self._states[key].tables.close()
            case StartLoads(key, shards):
                for shard in shards:
                    self._threads.start(self._states[key], shard)
            case StartWholeQuery(key, missing):
                self._threads.start(self._states[key], missing=missing)

    def _forget(self, key: VersionKey) -> None:
        self.row_values.forget(key)
        self.scratch.forget(key)

    def _update(self, desired: DesiredVersion) -> None:
        key = desired.plan.key
        with self._lock:
            if key not in self._states:
                # A random name: two datasets may have the same fingerprint.
                tables = SpooledTables(self._store.scratch / uuid.uuid4().hex)
                self._states[key] = VersionState(desired, tables)
            self._states[key].update(desired)

    def _publish(
        self, key: VersionKey, row_starts: Mapping[int, int], sealed: Mapping[int, MappedShard]
    ) -> None:
        desired = self._states[key].desired
        # A shard without rows starts where the next one does.
        shards = {
            start: sealed[index]
            for index, start in row_starts.items()
            if sealed[index].sealed.num_rows
        }
        damaged = partial(self.drop_damaged, key)
        rows = ResidentRows(key, desired.plan.layout, desired.num_rows, shards, damaged)
        with self._lock:
            state = self._states[key]
            if state.rows is not None and len(row_starts) < len(state.row_starts or ()):
                state.old_rows.append(state.rows)  # what goes may be overwritten
            state.rows, state.row_starts = rows, row_starts

    def _desired_bytes(self) -> int:
        with self._lock:
            desired = [s.desired for s in self._states.values() if not s.is_retired]
        return sum(version.estimated_bytes for version in desired)
