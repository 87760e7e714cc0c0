"""One attempt to get the rows of a window: sends every request, later takes every answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_client.connections import GatherStream
from cache_client.counts import ReadCounts
from cache_client.local_shards import LocalShards, ShardFileLostError
from cache_client.node_streams import NodeStreams, OrderedStreams
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
        num_bytes = sum(batch.nbytes for batch in batches)
        self.counts.add_answer(request.node.id, len(part.row_ids), num_bytes, wait_ns)
        self.answers.append(Answer(part.positions, batches))
        return True

    def _gather_here(self, part: Part) -> None:
        try:
            assert self.local is not None
            batch = self.local.gather(part.row_ids)
            self.counts.add_local(batch.num_rows, batch.nbytes)
            self.answers.append(Answer(part.positions, [batch]))
        except ShardFileLostError as error:
            self.last_error = str(error)
            self.failed.append(part)
