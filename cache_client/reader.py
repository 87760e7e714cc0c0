"""A window of row ids -> its rows, in order, from any replica that answers.

The order of arrival decides nothing. It knows row ids and nodes; it knows neither epochs nor ranks.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook at exit must follow the one below
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from types import TracebackType

import numpy as np
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
)

from cache_client.connections import (
    REQUEST_TIMEOUT_S,
    Connection,
    ConnectionClosedError,
    GatherStream,
)
from cache_client.local_shards import LocalShards, ShardFileLostError
from cache_client.routing import NodeRef, Part, Router, ShardMap
from cache_client.rows import Answer, Rows, in_order
from cache_client.whereabouts import Whereabouts
from protos.backoff import backoff
from protos.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from protos.row_index import Ids

logger = logging.getLogger(__name__)

_RENEWALS, _BACKGROUND_TIMEOUT_S = 4, 2.0  # of a lease in its time, and of a call in the background
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0

# That a version is gone is final when the coordinator says so, not a node that has just started.
_WORTH_RETRYING = (NodeUnavailableError, NotReadyError, StaleVersionError, DatasetNotFoundError)


class _IncompleteError(Exception):
    """Some rows are still missing; worth another try."""


class Reader:
    """Fetches rows by id. Thread-safe; opens its connections when first used.

    Args:
        endpoint: of any node, asked for a fresh shard map when one does not answer.
        shards: the shard map to start with.
        columns: to read, empty for all; those of ``shards.logical``.
        turn: which replica to prefer; see `Router`.
        rows_per_message: the most rows of one message of a node; 0: each answer is one message.
        deadline_s: how long a window may wait for nodes that do not answer.
        local: shards to read from files of this machine, without their node; may be shared.
        known: what earlier readers of the version found, in place of ``shards``; may be shared.
    """

    def __init__(
        self,
        endpoint: str,
        shards: ShardMap,
        *,
        columns: tuple[str, ...] = (),
        turn: int = 0,
        rows_per_message: int = 0,
        deadline_s: float = 60.0,
        local: LocalShards | None = None,
        known: Whereabouts | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._columns = columns
        self._turn = turn
        self._rows_per_message = rows_per_message
        self._deadline_s = deadline_s
        # After one to two of these a node that hangs counts as failed. Four of them fit, so that
        # another replica is asked before the deadline.
        self._request_timeout_s = min(REQUEST_TIMEOUT_S, deadline_s / 4)
        self._lock = threading.Lock()
        self._layout = shards.layout
        self._local = local
        self._known = known or Whereabouts(shards)
        self._router = self._newest_router()
        self._looking = False
        self._connections: dict[str, Connection] = {}
        self._idle: dict[str, list[GatherStream]] = {}
        self._busy: set[GatherStream] = set()
        self._closed = False
        self._process = os.getpid()
        self._renew_every_s = shards.lease_s / _RENEWALS
        now = time.monotonic()
        # Whoever asks nodes for rows is about to use the version, whenever its shard map was read.
        leased_at = now if local is None else local.leased_at
        # Of another machine, or from before a restart of it, the time may be still to come.
        self._renew_at = now if leased_at > now else leased_at + self._renew_every_s
        self._renewing = False
        _readers.add(self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_nodes(self) -> int:
        """Nodes that a window may be cut into requests to."""
        return self._router.num_nodes

    def close(self) -> None:
        """Closes every connection; running fetches fail. In a child of a fork: nothing is open."""
        if os.getpid() != self._process:
            return  # a thread that is not here may hold the lock
        with self._lock:
            self._closed = True
            streams = [*self._busy, *(s for streams in self._idle.values() for s in streams)]
            connections = list(self._connections.values())
            self._idle.clear()
            self._connections.clear()
        for stream in streams:
            stream.close()
        for connection in connections:
            connection.close()

    def fetch(self, row_ids: Ids) -> list[Rows]:
        """The rows of these ids, in this order, in one or more pieces.

        Raises:
            NodeUnavailableError: a row's nodes did not answer before the deadline; names them.
            StaleVersionError: the version is gone.
            RequestError: a node refused the request for good; a dataset that is not there, the
                coordinator.
        """
        self.keep_lease()
        self._look_for_nodes()
        answers: list[Answer] = []
        missing: list[Part] = self._router.route(row_ids)
        trouble = ""
        deadline = time.monotonic() + self._deadline_s
        attempts = Retrying(
            retry=retry_if_exception_type(_IncompleteError),
            stop=stop_after_delay(self._deadline_s),
            wait=backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            reraise=True,
        )
        try:
            for attempt in attempts:
                with attempt:
                    if trouble:
                        missing = self._reroute(missing, deadline)
                    answers_now, missing, reason = self._ask(missing)
                    answers += answers_now
                    trouble = reason or trouble
                    if missing:
                        raise _IncompleteError
        except _IncompleteError:
            nodes = sorted({str(part.node or "of this machine's files") for part in missing})
            raise NodeUnavailableError(
                f"node {', '.join(nodes)} did not bring its rows of dataset "
                f"{self._router.shards.dataset!r} within {self._deadline_s:g} s: {trouble}"
            ) from None
        return in_order(self._layout, len(row_ids), answers)

    def keep_lease(self) -> None:
        """Says now and then that the version is in use: reading its files tells no node so.

        To be called also between fetches, which may be far apart: a window can last for longer
        than a lease. In a thread of its own: rows of files need wait for no node.
        """
        now = time.monotonic()
        if now < self._renew_at:
            return
        with self._lock:
            if self._closed or self._renewing:
                return
            self._renew_at, self._renewing = now + self._renew_every_s, True
        shards = self._router.shards
        threading.Thread(target=self._renew_lease, args=(shards,), name="cache-lease").start()

    def _renew_lease(self, shards: ShardMap) -> None:
        asked_at = time.monotonic()
        try:
            trouble = self._ask_for_lease(shards)
        finally:
            with self._lock:
                self._renewing = False
        if not trouble and self._local is not None:
            self._local.leased_at = asked_at
        # What is mapped stays readable; a fetch that needs the cache will say what is wrong.
        if trouble and not self._closed:
            logger.warning("lease not renewed dataset=%s reason=%s", shards.dataset, trouble)

    def _ask_for_lease(self, shards: ShardMap) -> str:
        """Asks one node after the other; returns why none renewed it, empty where one did."""
        deadline, trouble = time.monotonic() + self._deadline_s, ""
        for location in self._locations(shards):
            # Short: a program that ends waits for it.
            timeout_s = min(
                _BACKGROUND_TIMEOUT_S, self._request_timeout_s, deadline - time.monotonic()
            )
            if timeout_s <= 0:
                break
            try:
                self._connection(location).renew_lease(
                    shards.dataset, shards.fingerprint, timeout_s
                )
                return ""
            except NodeUnavailableError as error:
                trouble = trouble or str(error)
            except CacheError as error:
                return str(error)
        return trouble

    # -- requests ------------------------------------------------------------------------------

    def _ask(self, parts: list[Part]) -> tuple[list[Answer], list[Part], str]:
        """Sends every part, then receives every answer: the nodes work at the same time.

        Returns:
            The answers, the parts without one, and why a node failed (empty: none did).
        """
        answers: list[Answer] = []
        failed: list[Part] = []
        trouble = ""
        sent: list[tuple[Part, NodeRef, GatherStream]] = []
        waited_in_vain = False
        for part in parts:
            if part.node is None:
                continue
            try:
                sent.append((part, part.node, self._send(part.node, part.row_ids)))
            except _WORTH_RETRYING as error:
                trouble = self._note_failure(part.node, error) or trouble
                failed.append(part)
                waited_in_vain = waited_in_vain or isinstance(error, NodeUnavailableError)
        for part in parts:  # while the nodes work
            if part.node is None:
                try:
                    assert self._local is not None
                    answers.append(Answer(part.positions, [self._local.gather(part.row_ids)]))
                except ShardFileLostError as error:
                    trouble = str(error)
                    failed.append(part)
        for part, node, stream in sent:
            try:
                answers.append(Answer(part.positions, stream.receive(len(part.row_ids))))
            except _WORTH_RETRYING as error:
                self._discard(stream)
                failed.append(part)
                # After a node that was waited for in vain, the time of the others may be over.
                if not waited_in_vain:
                    trouble = self._note_failure(node, error) or trouble
                waited_in_vain = waited_in_vain or isinstance(error, NodeUnavailableError)
            else:
                self._give_back(node, stream)
        return answers, failed, trouble

    def _send(self, node: NodeRef, row_ids: Ids) -> GatherStream:
        stream = self._take_stream(node)
        try:
            stream.send(row_ids)
        except CacheError:
            self._discard(stream)
            raise
        return stream

    def _reroute(self, parts: list[Part], deadline: float) -> list[Part]:
        """Cuts what is missing anew: to other replicas, by a fresh shard map where none is left."""
        avoid = self._known.avoided()
        router = self._router = self._newest_router()
        missing = np.concatenate([part.row_ids for part in parts])
        parts_now = router.route(missing)
        if any(part.node is not None and part.node.location in avoid for part in parts_now):
            self._known.shards = self._fresh_map(deadline) or self._known.shards
            router = self._router = self._newest_router()
        return [
            new
            for part in parts
            for new in router.route(
                part.row_ids,
                np.arange(len(part.row_ids)) if part.positions is None else part.positions,
            )
        ]

    def _newest_router(self) -> Router:
        """By the newest shard map, past the nodes that did not answer."""
        shards, avoid = self._known.shards, self._known.avoided()
        indices = {index for index, node in enumerate(shards.nodes) if node.location in avoid}
        local = self._local.shards if self._local is not None else ()
        return Router(shards, self._turn, indices, local)

    def _look_for_nodes(self) -> None:
        """Finds out whether nodes that were passed over for long enough answer again.

        In a thread of its own, so that no window waits for one that does not.
        """
        locations = self._known.to_try()
        if not locations:
            return
        with self._lock:
            if self._closed or self._looking:
                return
            self._looking = True
        threading.Thread(target=self._look, args=(locations,), name="cache-nodes").start()

    def _look(self, locations: set[str]) -> None:
        try:
            # Short: a program that ends waits for it.
            fresh = self._fresh_map(time.monotonic() + _BACKGROUND_TIMEOUT_S)
            shards = self._known.shards = fresh or self._known.shards
            there = {node.location for node in shards.nodes}
            for location in locations:
                if self._closed:
                    return
                if location not in there:  # its rows are elsewhere now
                    self._known.forget(location)
                elif self._answers(location, shards):
                    self._known.let_try(location)
                else:
                    self._known.note(location)
            self._router = self._newest_router()
        except CacheError as error:  # a fetch that needs the cache will say what is wrong
            logger.debug("nodes not looked for dataset=%s %s", self._known.shards.dataset, error)
            if not self._closed:
                for location in locations:
                    self._known.note(location)
        finally:
            with self._lock:
                self._looking = False

    def _answers(self, location: str, shards: ShardMap) -> bool:
        timeout_s = min(_BACKGROUND_TIMEOUT_S, self._request_timeout_s)
        try:
            self._connection(location).renew_lease(shards.dataset, shards.fingerprint, timeout_s)
        except (NodeUnavailableError, NotReadyError):
            self._drop_connection(location)
            return False
        return True

    def _fresh_map(self, deadline: float) -> ShardMap | None:
        """The shard map as it is now; None when it is not to be had, so the old one is as good."""
        current = self._router.shards
        for location in self._locations(current):
            timeout_s = min(self._request_timeout_s, deadline - time.monotonic())
            if timeout_s <= 0:
                return None
            try:
                return self._connection(location).read_plan(
                    current.dataset, current.fingerprint, self._columns, timeout_s
                )
            except NodeUnavailableError:
                continue
            except NotReadyError:
                return None  # some shard is nowhere just now
        return None

    def _locations(self, shards: ShardMap) -> Iterable[str]:
        """Whom to ask about the version, one after the other: any node can answer."""
        return dict.fromkeys((self._endpoint, *(node.location for node in shards.nodes)))

    def _note_failure(self, node: NodeRef, error: CacheError) -> str:
        """Remembers that a node failed; returns why, or nothing when this process let go of it."""
        with self._lock:
            if self._closed:
                raise error
            if isinstance(error, ConnectionClosedError):
                return ""
        first = self._known.note(node.location)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "node failed node=%s reason=%s", node, error)
        if isinstance(error, NodeUnavailableError):
            self._drop_connection(node.location)
        return str(error)

    # -- connections ---------------------------------------------------------------------------

    def _connection(self, location: str) -> Connection:
        with self._lock:
            if self._closed:
                raise CacheError("the reader is closed")
            connection = self._connections.get(location)
            if connection is None or connection.is_closed:
                connection = self._connections[location] = Connection(location)
            return connection

    def _drop_connection(self, location: str) -> None:
        with self._lock:
            connection = self._connections.pop(location, None)
            streams = self._idle.pop(location, [])
        for stream in streams:
            stream.close()
        if connection is not None:
            connection.close()

    def _take_stream(self, node: NodeRef) -> GatherStream:
        with self._lock:
            idle = self._idle.get(node.location, [])
            stream = idle.pop() if idle else None
        if stream is not None and not stream.is_fresh:
            stream.close()
            stream = None
        if stream is None:
            shards = self._router.shards
            stream = self._connection(node.location).open_gather(
                shards.dataset,
                shards.fingerprint,
                self._columns,
                self._request_timeout_s,
                rows_per_message=self._rows_per_message,
            )
        with self._lock:
            self._busy.add(stream)
        return stream

    def _give_back(self, node: NodeRef, stream: GatherStream) -> None:
        self._known.forget(node.location)
        with self._lock:
            self._renew_at = time.monotonic() + self._renew_every_s
            self._busy.discard(stream)
            if not self._closed:
                self._idle.setdefault(node.location, []).append(stream)
                return
        stream.close()

    def _discard(self, stream: GatherStream) -> None:
        with self._lock:
            self._busy.discard(stream)
        stream.close()


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()
# A forked child has none of the threads that may hold a reader's lock.
os.register_at_fork(after_in_child=_readers.clear)


def _close_all() -> None:
    """Closes every reader of a program that ends, so that no fetch waits for a node."""
    for reader in list(_readers):
        try:
            reader.close()
        except Exception:  # the other hooks are to run, too
            logger.exception("a reader was not closed")


# Before the threads of pools are awaited: hooks run in the reverse of their order, and that of
# `concurrent.futures` is there already. Where Python has no such hook any more, after that.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
