"""Runs the loads of a node in threads, and says what becomes of each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cache_protocol.errors import CacheError, NodeUnavailableError, TransientLoadError
from cache_protocol.wire import tracing
from cache_protocol.wire.credentials import Credentials
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.node.desired import DesiredShard
from cache_server.node.links.heartbeat_messages import encode_secrets
from cache_server.node.links.room_requests import AskRoom, RoomAnswer
from cache_server.node.loads import loading
from cache_server.node.loads.load_functions import NodeFunctions
from cache_server.node.loads.load_memory import LoadMemory
from cache_server.node.loads.loading import CancelledError, Job
from cache_server.node.loads.version_state import Load, VersionState
from cache_server.secrets import error_text
from cache_server.shards.store import NoRoomError, ShardStore
from cache_server.sql.function_runs import running

logger = logging.getLogger(__name__)

_RETRY_S = 0.5  # after a failure
_MADE_S = 0.05  # after room was made


class LoadThreads:
    """The threads that load shards, run whole queries, copy and move files. Thread-safe.

    Args:
        num_threads: shards loaded at once.
        store: takes the shards.
        memory: says which loads fit beside each other.
        credentials: of this node, for copies from other nodes.
        sources: that it may read.
        functions: that SQL may call.
        ask_room: see `RoomRequests.ask`.
        require_tombstones: see `KnownTombstones.require`.
        node_id: of this node, for messages.
        lock: of the states of the versions.
        stopped: ends pauses; set before `stop`.
        wake: called when there is something to report.

    Attributes:
        retry_no_room: a load without room waits for a lost node. Changed inside the lock.
    """

    def __init__(
        self,
        num_threads: int,
        store: ShardStore,
        memory: LoadMemory,
        credentials: Credentials,
        sources: AllowedSources,
        functions: NodeFunctions | None,
        ask_room: AskRoom,
        require_tombstones: Callable[[str, int], None],
        node_id: str,
        lock: threading.Lock,
        stopped: threading.Event,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._memory = memory
        self._credentials = credentials
        self._sources = sources
        self._functions = functions
        self._ask_room = ask_room
        self._require_tombstones = require_tombstones
        self._node_id = node_id
        self._lock = lock
        self._stopped = stopped
        self._wake = wake
        self._running: set[Job] = set()  # those that have a thread; others wait for one
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load")
        self.retry_no_room = False

    def stop(self) -> None:
        """Starts no job any more; inside the lock."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def are_running(self) -> bool:
        """Whether a job has a thread; inside the lock."""
        return bool(self._running)

    def start(
        self,
        state: VersionState,
        shard: DesiredShard | None = None,
        missing: frozenset[int] = frozenset(),
    ) -> None:
        """Begins a job when a thread is free; after `stop`, nothing happens.

        Args:
            shard, missing: see `Job`.
        """
        desired, query_bytes = state.desired, self._memory.query_bytes
        job = Job(
            desired.plan, shard, missing, query_bytes,
            notes=state.notes, traceparent=desired.traceparent,
        )  # fmt: skip
        try:
            future = self._pool.submit(self._run_traced, state, job)
        except RuntimeError:
            if self._stopped.is_set():
                return
            raise
        with self._lock:
            state.loads[job.index] = Load(future, job, desired.tombstones)
            if self._stopped.is_set():  # `stop` may have missed this job
                job.cancelled.set()

    def _run_traced(self, state: VersionState, job: Job) -> None:
        """`_run_job`, whose log has the ids of its span."""
        span = tracing.begin_below(
            job.traceparent, "cache.shard", dataset=job.key.dataset, shard=str(job)
        )
        with tracing.current(span):
            self._run_job(state, job, span)

    def _run_job(self, state: VersionState, job: Job, span: Any) -> None:
        """Runs a job to its end, and ends its span. The next heartbeat reports a failure."""
        with self._lock:
            self._running.add(job)
            running = list(self._running)
        self._wake()  # if this process ends now, the coordinator knows by which load
        waits = False
        try:
            if not job.cancelled.is_set():
                with tracing.ending(span):
                    self._load(state, job)
        except CancelledError:
            return
        except NodeUnavailableError as error:
            logger.warning("load tried again dataset=%s %s %s", job.key.dataset, job, error)
            self._stopped.wait(_RETRY_S)
        except CacheError as error:
            why_not: str | None = ""
            if isinstance(error, NoRoomError):
                frees_room = any(other.cancelled.is_set() for other in running)
                why_not = self._find_room(state, job, error, frees_room=frees_room)
                waits = why_not is None
            if not waits:
                reason = f"{error}; {why_not}" if why_not else str(error)
                logger.error("load failed dataset=%s %s %s", job.key.dataset, job, reason)
                self._fail(state, job, reason, may_pass=isinstance(error, TransientLoadError))
        except error_text.EXITS:
            raise
        except BaseException as error:
            secrets = encode_secrets(job.plan.secrets)
            reason, trace = error_text.reason(error, secrets), error_text.trace(error, secrets)
            logger.error("load failed dataset=%s %s\n%s", job.key.dataset, job, trace)
            self._fail(state, job, f"cannot load {job}: {reason}")
        finally:
            with self._lock:
                self._running.discard(job)
                if not waits:
                    state.waits.pop(job.index, None)
            self._wake()

    def _load(self, state: VersionState, job: Job) -> None:
        if job.shard is not None and job.shard.copy:
            try:
                loading.copy_shard(self._store, job, self._credentials)
                return
            except NodeUnavailableError as error:
                if not job.splits:
                    raise
                logger.warning("read again dataset=%s %s", job.key.dataset, error)
        if job.plan.is_written:
            loading.move_put(self._store, job)
            return
        with self._lock:
            last_act = state.desired.tombstones
        self._require_tombstones(job.key.dataset, last_act)
        splits = (*job.splits, *job.whole_splits)
        self._sources.check_splits(job.plan.tables, splits, job.plan.secrets)
        num_files = len({split.file.path for split in splits})
        with self._lock:  # before the shard is sealed: a report has both or none
            state.files_read += num_files
        try:
            with running(None if self._functions is None else self._functions.run_for(job)):
                if job.shard is None:
                    num_shards = self._memory.run(job, lambda: loading.run_whole(self._store, job))
                    with self._lock:
                        state.num_shards = num_shards
                else:
                    self._memory.run(
                        job, lambda: loading.load_shard(self._store, job, state.tables)
                    )
        except BaseException:
            with self._lock:
                state.files_read -= num_files
            raise

    def _find_room(
        self, state: VersionState, job: Job, error: NoRoomError, *, frees_room: bool
    ) -> str | None:
        """Asks the coordinator for room, or waits for some that may come without it.

        Returns:
            None if the load is to be tried again; else why there is no room.
        """
        answer = RoomAnswer("", self.retry_no_room)
        if not frees_room:
            answer = self._ask_room(
                job.key.dataset,
                error.num_bytes,
                lambda: job.cancelled.is_set() or self._stopped.is_set(),
            )
            if not answer.why_not:
                self._stopped.wait(_MADE_S)
                return None
        if frees_room or answer.may_come or self.retry_no_room:
            self._wait_for_room(state, job, error, answer, frees_room=frees_room)
            return None
        return answer.why_not

    def _wait_for_room(
        self,
        state: VersionState,
        job: Job,
        error: CacheError,
        answer: RoomAnswer,
        *,
        frees_room: bool,
    ) -> None:
        """Pauses before the load is tried again; logs the reason once."""
        until = "a cancelled load has ended" if frees_room else "a lost node may be back"
        if answer.why_not:
            until += ", or others make room"
        why_not = f"; {answer.why_not}" if answer.why_not else ""
        reason = f"{job} waits on node {self._node_id} until {until}: {error}{why_not}"
        with self._lock:
            known, state.waits[job.index] = state.waits.get(job.index), reason
        if known is None:
            logger.warning("load waits dataset=%s %s", job.key.dataset, reason)
        self._stopped.wait(_RETRY_S)

    def _fail(self, state: VersionState, job: Job, reason: str, *, may_pass: bool = False) -> None:
        with self._lock:
            state.fail(job.index, f"{reason} (on node {self._node_id})", may_pass=may_pass)
