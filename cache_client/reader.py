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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from cache_client.node_health import NodeHealth
from cache_client.node_streams import CLOSED, NodeStreams, NotAskedError
from cache_client.routing import NodeRef, Part, Router, ShardMap
from cache_client.rows import Answer, Rows, in_order
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from cache_protocol.storage.row_index import Ids
from cache_protocol.wire.backoff import backoff

logger = logging.getLogger(__name__)

_RENEWALS, _BACKGROUND_TIMEOUT_S = 4, 2.0  # of a lease in its time, and of a call in the background
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0

# That a version is gone is final when the coordinator says so, not a node that has just started.
_WORTH_RETRYING = (NodeUnavailableError, NotReadyError, StaleVersionError, DatasetNotFoundError)


class _IncompleteError(Exception):
    """Some rows are still missing; worth another try."""


@dataclass(frozen=True)
class _Request:
    """A part that one node was asked for."""

    part: Part
    node: NodeRef
    stream: GatherStream


@dataclass
class _Round:
    """What came of asking for some parts once.

    Attributes:
        note_failure: remembers that a node failed, and returns why.
        answers, failed: of the parts, and those without one.
        trouble: why a node failed; empty: none did.
    """

    note_failure: Callable[[NodeRef, CacheError], str]
    answers: list[Answer] = field(default_factory=list)
    failed: list[Part] = field(default_factory=list)
    trouble: str = ""
    _waited_in_vain: bool = False

    def opened(
        self, parts: Sequence[tuple[Part, NodeRef]], streams: Sequence[GatherStream | CacheError]
    ) -> list[_Request]:
        """The requests for which there is a stream; every node without one has failed."""
        requests: list[_Request] = []
        for (part, node), stream in zip(parts, streams, strict=True):
            if isinstance(stream, GatherStream):
                requests.append(_Request(part, node, stream))
            elif isinstance(stream, _WORTH_RETRYING):
                self.trouble = self.note_failure(node, stream) or self.trouble
                self.failed.append(part)
            else:
                raise stream
        self._waited_in_vain = any(isinstance(s, NodeUnavailableError) for s in streams)
        return requests

    def tries(self, request: _Request, step: Callable[[_Request], object]) -> bool:
        """Whether a step of a request came off; where not, its node may have failed."""
        try:
            step(request)
        except _WORTH_RETRYING as error:
            self.failed.append(request.part)
            # After a node that was waited for in vain, the time of the others may be over.
            if not self._waited_in_vain:
                self.trouble = self.note_failure(request.node, error) or self.trouble
            self._waited_in_vain |= isinstance(error, NodeUnavailableError)
            return False
        return True

    def receive(self, request: _Request) -> None:
        """Waits for the answer to a request."""
        part = request.part
        self.answers.append(Answer(part.positions, request.stream.receive(len(part.row_ids))))


def _send(request: _Request) -> None:
    request.stream.send(request.part.row_ids)


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
        known: NodeHealth | None = None,
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
        self._known = known or NodeHealth(shards)
        self._router = self._newest_router()
        self._threads: dict[str, threading.Thread] = {}  # by name, the last that was begun
        self._streams = NodeStreams(self._open_stream, timeout_s=self._request_timeout_s)
        self._process = os.getpid()
        self._renew_every_s = shards.lease_s / _RENEWALS
        now = time.monotonic()
        # Whoever asks nodes for rows is about to use the version, whenever its shard map was read.
        leased_at = now if local is None else local.leased_at
        # Of another machine, or from before a restart of it, the time may be still to come.
        self._renew_at = now if leased_at > now else leased_at + self._renew_every_s
        _readers.add(self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_nodes(self) -> int:
        """Nodes that a window may be cut into requests to."""
        return self._router.num_nodes

    def close(self) -> None:
        """Closes every connection; running fetches fail. In a child of a fork: nothing is open."""
        if os.getpid() != self._process:
            return  # a thread that is not here may hold the lock
        self._streams.close()

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
                    this = self._ask(missing)
                    answers += this.answers
                    missing, trouble = this.failed, this.trouble or trouble
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
        if time.monotonic() >= self._renew_at:
            self._begin_alone("cache-lease", self._renew_lease, self._router.shards)

    def _begin_alone(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Calls ``function`` in a thread of this name, unless the one before is still there."""
        with self._lock:
            before = self._threads.get(name)
            if self._streams.is_closed or (before is not None and before.is_alive()):
                return
            thread = self._threads[name] = threading.Thread(target=function, args=args, name=name)
            thread.start()

    def _renew_lease(self, shards: ShardMap) -> None:
        asked_at = time.monotonic()
        self._renew_at = asked_at + self._renew_every_s
        trouble = self._ask_for_lease(shards)
        if not trouble and self._local is not None:
            self._local.leased_at = asked_at
        # What is mapped stays readable; a fetch that needs the cache will say what is wrong.
        if trouble and not self._streams.is_closed:
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
                self._streams.connection(location).renew_lease(
                    shards.dataset, shards.fingerprint, timeout_s
                )
                return ""
            except NodeUnavailableError as error:
                trouble = trouble or str(error)
            except CacheError as error:
                return str(error)
        return trouble

    # -- requests ------------------------------------------------------------------------------

    def _ask(self, parts: list[Part]) -> _Round:
        """Sends every part, then receives every answer: the nodes work at the same time."""
        this = _Round(self._note_failure)
        remote = [(part, part.node) for part in parts if part.node is not None]
        streams = self._streams.take([node.location for _, node in remote])
        unanswered = {stream for stream in streams if isinstance(stream, GatherStream)}
        try:
            opened = this.opened(remote, streams)
            sent = [request for request in opened if this.tries(request, _send)]
            for part in parts:  # while the nodes work
                if part.node is None:
                    self._gather_here(this, part)
            for request in sent:
                if this.tries(request, this.receive):
                    unanswered.discard(request.stream)
                    self._give_back(request)
        finally:
            for stream in unanswered:  # broken, or left by an interrupt
                self._streams.discard(stream)
        return this

    def _gather_here(self, this: _Round, part: Part) -> None:
        try:
            assert self._local is not None
            this.answers.append(Answer(part.positions, [self._local.gather(part.row_ids)]))
        except ShardFileLostError as error:
            this.trouble = str(error)
            this.failed.append(part)

    def _give_back(self, request: _Request) -> None:
        self._known.forget(request.node.location)
        self._renew_at = time.monotonic() + self._renew_every_s
        self._streams.give_back(request.node.location, request.stream)

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
        if locations := self._known.to_try():
            self._begin_alone("cache-nodes", self._look, locations)

    def _look(self, locations: set[str]) -> None:
        try:
            # Short: a program that ends waits for it.
            fresh = self._fresh_map(time.monotonic() + _BACKGROUND_TIMEOUT_S)
            shards = self._known.shards = fresh or self._known.shards
            there = {node.location for node in shards.nodes}
            for location in locations:
                if self._streams.is_closed:
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
            if not self._streams.is_closed:
                for location in locations:
                    self._known.note(location)

    def _answers(self, location: str, shards: ShardMap) -> bool:
        timeout_s = min(_BACKGROUND_TIMEOUT_S, self._request_timeout_s)
        try:
            self._streams.connection(location).renew_lease(
                shards.dataset, shards.fingerprint, timeout_s
            )
        except (NodeUnavailableError, NotReadyError):
            self._streams.drop(location)
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
                return self._streams.connection(location).read_plan(
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
        """Remembers that a node failed; returns why, or nothing where it is not to blame."""
        if self._streams.is_closed:
            raise CacheError(CLOSED)
        if isinstance(error, ConnectionClosedError | NotAskedError):
            return ""
        first = self._known.note(node.location)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "node failed node=%s reason=%s", node, error)
        if isinstance(error, NodeUnavailableError):
            self._streams.drop(node.location)
        return str(error)

    def _open_stream(self, connection: Connection) -> GatherStream:
        shards = self._router.shards
        return connection.open_gather(
            shards.dataset,
            shards.fingerprint,
            self._columns,
            self._request_timeout_s,
            rows_per_message=self._rows_per_message,
        )


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
