"""A window of row ids -> its rows, in order, from any replica that answers.

The order of arrival decides nothing. Knows row ids and nodes, but neither epochs nor ranks.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook at exit must follow the one below
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tenacity import Retrying, retry_if_exception_type

from cache_client.flight.connections import REQUEST_TIMEOUT_S, NodeConnection
from cache_client.flight.routing import NodeRef, Part, Router, ShardMap
from cache_client.flight.shared_handle import ConnectionClosedError
from cache_client.flight.streams import GatherStream, RowStream
from cache_client.reading.counts import FAILOVERS, REFETCHES, ReadCounts
from cache_client.reading.lease import Lease, NodeProbe
from cache_client.reading.local_shards import LocalShards, ShardFileLostError
from cache_client.reading.node_health import NodeHealth
from cache_client.reading.node_streams import CLOSED, NodeStreams, NotAskedError, OrderedStreams
from cache_client.reading.row_streams import RowStreams
from cache_client.reading.rows import Answer, Rows, in_order
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
    some_of,
    without_middle,
)
from cache_protocol.storage.row_index import Ids, Indices, RowRuns
from cache_protocol.wire import tracing
from cache_protocol.wire.channels import backoff
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials

# Only the coordinator can say for good that a version is gone: a node may have just started.
WORTH_RETRYING = (NodeUnavailableError, NotReadyError, StaleVersionError, DatasetNotFoundError)


@dataclass(frozen=True)
class _Request:
    """A part that one node was asked for."""

    part: Part
    node: NodeRef
    stream: GatherStream


@dataclass
class GatherAttempt:
    """Asks for some parts of a window once: `send`, then `receive`, which another thread may call.

    Args:
        streams: to the nodes.
        local: reads the parts that are in files of this machine.
        on_answer: called with the node of each answer.
        on_failure: called with a node and its error; returns the reason, or an empty string if the
            node is not to blame.
        counts: of rows, bytes and waits.
        patience_s: how long to wait for connections to nodes.

    Attributes:
        answers: what was received.
        failed: the parts without an answer.
        last_error: why a node or a file failed; empty if none did.
    """

    streams: NodeStreams | OrderedStreams
    local: LocalShards | None
    on_answer: Callable[[NodeRef], None]
    on_failure: Callable[[NodeRef, CacheError], str]
    counts: ReadCounts = field(default_factory=ReadCounts)
    patience_s: float = math.inf
    answers: list[Answer] = field(default_factory=list)
    failed: list[Part] = field(default_factory=list)
    last_error: str = ""
    _sent: list[_Request] = field(default_factory=list)
    _unanswered: set[GatherStream] = field(default_factory=set)
    _timed_out: bool = False

    def send(self, parts: Sequence[Part]) -> None:
        """Asks for every part; all nodes work at the same time, and files are read meanwhile.

        Raises:
            CacheError: a node refused its request for good.
        """
        remote = [(part, part.node) for part in parts if part.node is not None]
        streams = self.streams.take([node.location for _, node in remote], self.patience_s)
        self._unanswered = {stream for stream in streams if isinstance(stream, GatherStream)}
        try:
            self._sent = self._requests(remote, streams)
            for request in self._sent:
                request.stream.send(request.part.row_ids)
            for part in parts:
                if part.node is None:
                    self._gather_here(part)
        except BaseException:
            self._discard_unanswered()
            raise

    def receive(self) -> None:
        """Takes every answer.

        Raises:
            CacheError: a node refused its request for good.
        """
        try:
            for request in self._sent:
                if self._receive(request):
                    self._unanswered.discard(request.stream)
                    self.streams.give_back(request.node.location, request.stream)
                    self.on_answer(request.node)
        finally:
            self._discard_unanswered()

    def _discard_unanswered(self) -> None:
        """Closes streams that are broken, or left by an interrupt."""
        for stream in self._unanswered:
            self.streams.discard(stream)

    def _requests(
        self, parts: Sequence[tuple[Part, NodeRef]], streams: Sequence[GatherStream | CacheError]
    ) -> list[_Request]:
        """A request for each part whose node opened a stream; the other nodes have failed."""
        requests: list[_Request] = []
        for (part, node), stream in zip(parts, streams, strict=True):
            if isinstance(stream, GatherStream):
                requests.append(_Request(part, node, stream))
            elif isinstance(stream, WORTH_RETRYING):
                self.last_error = self.on_failure(node, stream) or self.last_error
                self.failed.append(part)
            else:
                raise stream
        self._timed_out = any(isinstance(stream, NodeUnavailableError) for stream in streams)
        return requests

    def _receive(self, request: _Request) -> bool:
        """Takes one answer; returns whether there was one."""
        part = request.part
        asked_ns = time.perf_counter_ns()
        try:
            batches = request.stream.receive(len(part.row_ids))
        except WORTH_RETRYING as error:
            self.failed.append(part)
            # After one node timed out, the streams of the others may have timed out, too.
            if not self._timed_out:
                self.last_error = self.on_failure(request.node, error) or self.last_error
            self._timed_out |= isinstance(error, NodeUnavailableError)
            return False
        wait_ns = time.perf_counter_ns() - asked_ns
        num_rows = sum(batch.num_rows for batch in batches)
        num_bytes = sum(batch.nbytes for batch in batches)
        self.counts.add_answer(request.node.id, num_rows, num_bytes, wait_ns)
        if num_rows == len(part.row_ids):
            self.answers.append(Answer(part.positions, batches))
            return True
        came, left = part.divided(num_rows)
        if num_rows:
            self.answers.append(Answer(came.positions, batches))
        self.failed.append(left)
        return False

    def _gather_here(self, part: Part) -> None:
        try:
            assert self.local is not None
            batches = self.local.gather(part.row_ids)
            self.counts.add_local(len(part.row_ids), sum(batch.nbytes for batch in batches))
            self.answers.append(Answer(part.positions, batches))
        except ShardFileLostError as error:
            self.last_error = str(error)
            self.failed.append(part)


logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
# A frozen node accepts connections and says nothing. Another replica is asked before the time limit
# for connecting; if that fails too, every node gets the whole time.
_PATIENCE_S = 1.5


class _IncompleteError(Exception):
    """Some rows are still missing; worth another attempt."""


class Reader:
    """Fetches rows by id. Thread-safe; opens its connections when first used.

    Args:
        endpoint: of any node; asked first for a fresh shard map.
        shards: the shard map to start with.
        columns: to read, of ``shards.logical``; empty for all.
        replica_offset: which replica to prefer; see `Router`.
        rows_per_message: the most rows in one message of a node; 0: each answer is one message.
        deadline_s: about how long a window may wait for nodes that do not answer; the time to send
            its requests is not counted.
        local: reads shards from files of this machine, without a node; may be shared.
        credentials: of this process.
        health: what earlier readers of the version found; used instead of ``shards``; may be
            shared.
        counts: counts rows, bytes, waits and failures; may be shared.
        order: that was announced to nodes, in which rows are asked for.
    """

    def __init__(
        self,
        endpoint: str,
        shards: ShardMap,
        *,
        columns: tuple[str, ...] = (),
        replica_offset: int = 0,
        rows_per_message: int = 0,
        deadline_s: float = 60.0,
        local: LocalShards | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        health: NodeHealth | None = None,
        counts: ReadCounts | None = None,
        order: str = "",
    ) -> None:
        self._columns = columns
        self._order = order
        self._replica_offset = replica_offset
        self._rows_per_message = rows_per_message
        self._deadline_s = deadline_s
        # A node that hangs counts as failed after one to two timeouts. Four fit into the deadline,
        # so that another replica is asked before it.
        self._request_timeout_s = timeout_s = min(REQUEST_TIMEOUT_S, deadline_s / 4)
        self._layout = shards.layout
        self._zone = credentials.zone
        self._local = local
        self._counts = counts or ReadCounts()
        self._health = health or NodeHealth(shards)
        self._streams = NodeStreams(self._open_stream, timeout_s=timeout_s, credentials=credentials)
        self._row_streams = RowStreams(self._open_rows, timeout_s=timeout_s)
        self._ordered_streams = OrderedStreams(self._streams)
        self._lease = Lease(
            self._streams,
            self._health,
            endpoint,
            local=local,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
        )
        self._probe = NodeProbe(
            self._streams,
            self._health,
            endpoint,
            columns=columns,
            timeout_s=timeout_s,
            on_change=self._update_router,
        )
        self._update_router()
        self._process = os.getpid()
        _readers.add(self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_nodes(self) -> int:
        """The most nodes that one window is requested from."""
        return self._router.num_nodes

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._streams.is_closed

    def close(self) -> None:
        """Closes every connection; running fetches fail. In a child of a fork: does nothing."""
        if os.getpid() != self._process:
            return  # a thread of the parent may hold the lock
        self._row_streams.close()
        self._streams.close()

    def fetch(self, row_ids: Ids) -> list[Rows]:
        """The rows of these ids, in this order, in one or more pieces.

        Raises:
            NodeUnavailableError: nodes did not answer before the deadline; names them.
            StaleVersionError: the version is gone.
            RequestError: a node refused the request for good, or the coordinator does not know the
                dataset.
        """
        return in_order(self._layout, len(row_ids), self.ask(row_ids)())

    def request(self, row_ids: Ids) -> Callable[[], list[Rows]]:
        """Asks for rows; the result waits for them, and returns or raises what `fetch` does.

        One thread makes all calls. One other thread calls the results, in the same order.
        """
        answers = self.ask(row_ids, in_order_of_calls=True)
        return lambda: in_order(self._layout, len(row_ids), answers())

    def ask(
        self,
        row_ids: Ids,
        positions: Indices | None = None,
        *,
        in_order_of_calls: bool = False,
    ) -> Callable[[], list[Answer]]:
        """As `request`, before the answers are brought in order.

        Args:
            row_ids: of this version.
            positions: of the rows in a window with other rows; None: they are the window.
            in_order_of_calls: the results are called as those of `request`; else by any thread.
        """
        self._lease.renew_if_due()
        self._probe.start_if_due()
        if self._router.shards is not self._health.shards:
            self._update_router()
        begun = time.monotonic()
        parts, answers = self._router.route(row_ids, positions), list[Answer]()
        if not in_order_of_calls and self._router.shards.log is None:
            answers, parts = self._continue_streams(parts)
        attempt = self._attempt(
            self._ordered_streams if in_order_of_calls else self._streams,
            _PATIENCE_S if self._has_replicas else math.inf,
        )
        attempt.send(parts)

        def wait() -> list[Answer]:
            # What was asked ahead has waited for the requests before it.
            since = time.monotonic() if in_order_of_calls else begun
            return answers + self._answers(attempt, since + self._deadline_s)

        return wait

    def _answers(self, gather: GatherAttempt, deadline: float) -> list[Answer]:
        """The answers to an attempt that was sent; asks again for the rows that fail.

        Args:
            deadline: for the first rows, and then for more of them.
        """
        answers: list[Answer] = []
        missing, last_error = gather.failed, ""
        attempts = Retrying(
            retry=retry_if_exception_type(_IncompleteError),
            stop=lambda _: time.monotonic() >= deadline,
            wait=backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            reraise=True,
        )
        try:
            for attempt in attempts:
                with attempt:
                    if last_error:
                        self._counts.add(REFETCHES, 1)
                    if attempt.retry_state.attempt_number > 1:
                        missing = self._reroute(missing, deadline)
                        gather = self._attempt(self._streams)
                        gather.send(missing)
                    gather.receive()
                    answers += gather.answers
                    if gather.answers:  # a slow node shows progress; only silence is an end
                        deadline = max(deadline, time.monotonic() + self._deadline_s)
                    missing, last_error = gather.failed, gather.last_error or last_error
                    if missing:
                        raise _IncompleteError
        except _IncompleteError:
            nodes = sorted({str(part.node or "of this machine's files") for part in missing})
            raise NodeUnavailableError(
                f"node {some_of(nodes)} did not bring its rows of dataset "
                f"{self._router.shards.dataset!r} within {self._deadline_s:g} s: "
                f"{without_middle(str(last_error), 300)}"
            ) from None
        return answers

    def keep_lease(self) -> None:
        """Renews the lease in the background when it is due.

        Call it also between fetches: a window may last longer than a lease.
        """
        self._lease.renew_if_due()

    def _continue_streams(self, parts: list[Part]) -> tuple[list[Answer], list[Part]]:
        """Takes the parts that follow those of earlier windows from their streams.

        Returns:
            The answers, and the other parts.
        """
        answers: list[Answer] = []
        left: list[Part] = []
        for part in parts:
            if part.node is None:
                left.append(part)
                continue
            asked_ns = time.perf_counter_ns()
            try:
                batches = self._row_streams.receive(part.node, part.row_ids)
            except WORTH_RETRYING as error:
                self._record_failure(part.node, error)
                left += self._update_router().route(part.row_ids, part.positions)
                continue
            if batches is None:
                left.append(part)
                continue
            wait_ns = time.perf_counter_ns() - asked_ns
            num_bytes = sum(batch.nbytes for batch in batches)
            self._counts.add_answer(part.node.id, len(part.row_ids), num_bytes, wait_ns)
            self._record_answer(part.node)
            answers.append(Answer(part.positions, batches))
        return answers, left

    def _attempt(
        self, streams: NodeStreams | OrderedStreams, patience_s: float = math.inf
    ) -> GatherAttempt:
        return GatherAttempt(
            streams,
            self._local,
            self._record_answer,
            self._record_failure,
            self._counts,
            patience_s,
        )

    def _reroute(self, parts: list[Part], deadline: float) -> list[Part]:
        """Routes missing parts to other replicas; reads a fresh shard map if none is left."""
        avoid = self._health.nodes_to_avoid()
        router = self._update_router()
        parts_now = router.route(np.concatenate([part.row_ids for part in parts]))
        if any(part.node is not None and part.node.location in avoid for part in parts_now):
            self._probe.refresh_map(deadline)
            router = self._update_router()
        rerouted = [
            (part, new)
            for part in parts
            for new in router.route(
                part.row_ids,
                np.arange(len(part.row_ids)) if part.positions is None else part.positions,
            )
        ]
        self._counts.add(FAILOVERS, sum(old.node != new.node for old, new in rerouted))
        return [new for _, new in rerouted]

    def _update_router(self) -> Router:
        """Routes by the newest shard map from now on, and avoids the nodes that failed."""
        shards, avoid = self._health.shards, self._health.nodes_to_avoid()
        indices = {index for index, node in enumerate(shards.nodes) if node.location in avoid}
        local = self._local.shards if self._local is not None else ()
        self._has_replicas = any(len(held) > 1 for held in shards.replicas)
        self._router = router = Router(shards, self._replica_offset, indices, local, self._zone)
        return router

    def _record_answer(self, node: NodeRef) -> None:
        self._health.clear_failures(node.location)
        self._lease.record_use()

    def _record_failure(self, node: NodeRef, error: CacheError) -> str:
        """Avoids a node that failed; returns the reason, or "" if the node is not to blame."""
        if self._streams.is_closed:
            raise CacheError(CLOSED)
        if isinstance(error, ConnectionClosedError | NotAskedError):
            return ""
        self._counts.add_failure(node.id)
        is_first = self._health.record_failure(node.location)
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "node failed node=%s reason=%s", node, error)
        if isinstance(error, NodeUnavailableError):
            self._streams.drop(node.location)
        return str(error)

    def _open_rows(self, node: NodeRef, runs: RowRuns) -> RowStream:
        router = self._router
        return self._streams.open_rows(
            node.location,
            tracing.bound(
                lambda connection: connection.open_rows(
                    router.shards.dataset,
                    router.shards.fingerprint,
                    self._columns,
                    self._request_timeout_s,
                    runs,
                    router.end_of_node(runs.start),
                    rows_per_message=self._rows_per_message,
                    null_names=router.shards.layout.nulls.units,
                )
            ),
            _PATIENCE_S if self._has_replicas else math.inf,
        )

    def _open_stream(self, connection: NodeConnection) -> GatherStream:
        shards = self._router.shards
        return connection.open_gather(
            shards.dataset,
            shards.fingerprint,
            self._columns,
            self._request_timeout_s,
            rows_per_message=self._rows_per_message,
            by_shard=shards.log is not None,
            null_names=shards.layout.nulls.units,
            order=self._order,
        )


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()
# A forked child has none of the threads that may hold a reader's lock.
os.register_at_fork(after_in_child=_readers.clear)


def _close_all() -> None:
    """Closes every reader of a program that ends, so that no fetch waits for a node."""
    for reader in list(_readers):
        try:
            reader.close()
        except Exception:  # the other readers must be closed, too
            logger.exception("a reader was not closed")


# Exit hooks run in reverse order. This one must run before that of `concurrent.futures`, which
# waits for the threads of pools. Later versions of Python may lack this private hook.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
