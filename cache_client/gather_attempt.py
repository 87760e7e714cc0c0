"""One attempt to get the rows of a window: sends every request, then takes every answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_client.connections import GatherStream
from cache_client.counts import ReadCounts
from cache_client.local_shards import LocalShards, ShardFileLostError
from cache_client.node_streams import NodeStreams
from cache_client.routing import NodeRef, Part
from cache_client.rows import Answer
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)

# Only the coordinator can say for good that a version is gone: a node may have just started.
WORTH_RETRYING = (NodeUnavailableError, NotReadyError, StaleVersionError, DatasetNotFoundError)


@dataclass(frozen=True)
class _Request:
    """A part that one node was asked for."""

    part: Part
    node: NodeRef
    stream: GatherStream

    def send(self) -> None:
        self.stream.send(self.part.row_ids)


@dataclass
class GatherAttempt:
    """Asks for some parts of a window once. Used by one thread.

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

    streams: NodeStreams
    local: LocalShards | None
    on_answer: Callable[[NodeRef], None]
    on_failure: Callable[[NodeRef, CacheError], str]
    counts: ReadCounts = field(default_factory=ReadCounts)
    patience_s: float = math.inf
    answers: list[Answer] = field(default_factory=list)
    failed: list[Part] = field(default_factory=list)
    last_error: str = ""
    _timed_out: bool = False

    def run(self, parts: Sequence[Part]) -> None:
        """Asks for every part; all nodes work at the same time.

        Raises:
            CacheError: a node refused its request for good.
        """
        remote = [(part, part.node) for part in parts if part.node is not None]
        streams = self.streams.take([node.location for _, node in remote], self.patience_s)
        unanswered = {stream for stream in streams if isinstance(stream, GatherStream)}
        try:
            requests = self._requests(remote, streams)
            sent = [request for request in requests if self._succeeds(request, _Request.send)]
            for part in parts:  # while the nodes work
                if part.node is None:
                    self._gather_here(part)
            for request in sent:
                if self._succeeds(request, self._receive):
                    unanswered.discard(request.stream)
                    self.streams.give_back(request.node.location, request.stream)
                    self.on_answer(request.node)
        finally:
            for stream in unanswered:  # broken, or left by an interrupt
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

    def _succeeds(self, request: _Request, step: Callable[[_Request], object]) -> bool:
        """Runs one step of a request; returns whether it succeeded."""
        try:
            step(request)
        except WORTH_RETRYING as error:
            self.failed.append(request.part)
            # After one node timed out, the streams of the others may have timed out, too.
            if not self._timed_out:
                self.last_error = self.on_failure(request.node, error) or self.last_error
            self._timed_out |= isinstance(error, NodeUnavailableError)
            return False
        return True

    def _receive(self, request: _Request) -> None:
        part = request.part
        asked_ns = time.perf_counter_ns()
        batches = request.stream.receive(len(part.row_ids))
        wait_ns = time.perf_counter_ns() - asked_ns
        num_bytes = sum(batch.nbytes for batch in batches)
        self.counts.add_answer(request.node.id, len(part.row_ids), num_bytes, wait_ns)
        self.answers.append(Answer(part.positions, batches))

    def _gather_here(self, part: Part) -> None:
        try:
            assert self.local is not None
            batch = self.local.gather(part.row_ids)
            self.counts.add_local(batch.num_rows, batch.nbytes)
            self.answers.append(Answer(part.positions, [batch]))
        except ShardFileLostError as error:
            self.last_error = str(error)
            self.failed.append(part)
