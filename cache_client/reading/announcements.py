"""Tells nodes in which order rows will be asked for, so that they lay them out on their disks.

A hint: it changes no result. What is refused or fails is logged once, and rows come as without it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cache_client.flight.connections import NodeConnection
from cache_client.flight.routing import NodeRef, ShardMap
from cache_client.reading.background_task import CALL_TIMEOUT_S, BackgroundTask
from cache_client.views.buckets import EpochBuckets
from cache_protocol.errors import CacheError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import Credentials

logger = logging.getLogger(__name__)

_LOOK_S, _LOOK_AT_NEXT_S = 0.1, 2.0
_PACE_S = 1.0
_RUN_S = 1.0  # of what is sent at once: a program that ends waits for it
_SAY_EVERY_S = 30.0
_NOBODY_S = 10.0  # without progress: nobody announces, or a node hangs
_LEASE_S = 600.0

_said: set[tuple[str, str]] = set()


@dataclass
class _Told:
    """What a node said of an order.

    Attributes:
        prepared: the share that is.
        wants: it has not all buckets.
        refused: why it does not prepare it.
        begun: it knows that a pass begins.
    """

    prepared: float = 0.0
    wants: bool = True
    refused: str = ""
    begun: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether rows come from buckets, or never will."""
        return bool(self.refused) or self.prepared >= 1


class Announcements:
    """The order that a pass reads, and the one after it, announced to nodes.

    Args:
        nodes: that prepare orders.
        shards: the version.
        credentials: of this process.
        now: the order of the pass.
        following: the order of the next pass; None: there is none.
        sends: whether this process sends the buckets; the others of its job wait.

    Thread-safety: use it from one thread.
    """

    def __init__(
        self,
        nodes: Sequence[NodeRef],
        shards: ShardMap,
        credentials: Credentials,
        now: EpochBuckets,
        following: EpochBuckets | None,
        *,
        sends: bool,
    ) -> None:
        self._nodes, self._shards, self._credentials = nodes, shards, credentials
        self._now, self._following, self._sends = now, following, sends
        self._told = {node: _Told() for node in nodes}
        self._next = {node: _Told() for node in nodes}
        self._connections: dict[NodeRef, NodeConnection] = {}
        self._looked = threading.Event()
        self._task = BackgroundTask("cache-announce", self._look)
        self._due_at = 0.0
        self._num_sent = 0
        self._closed = False

    def wait(self) -> bool:
        """Waits until the rows of the pass come from buckets.

        Returns:
            Whether those of a node do. If not, each has refused, or nothing happened for a while.
        """
        changed_at = said_at = time.monotonic()
        before = (0.0, 0)
        while not all(told.is_decided for told in self._told.values()):
            self._looked.clear()
            self._task.start()
            self._looked.wait(_RUN_S)
            now, share = time.monotonic(), sum(told.prepared for told in self._told.values())
            if (share, self._num_sent) != before:
                before, changed_at = (share, self._num_sent), now
            if now - said_at > _SAY_EVERY_S:
                said_at = now
                logger.info(
                    "nodes prepare the order of %r: %.0f %%",
                    self._shards.dataset, 100 * share / len(self._told),
                )  # fmt: skip
            if now - changed_at > _NOBODY_S:
                logger.warning("the order of %r is not prepared in time", self._shards.dataset)
                break
            if not all(told.is_decided for told in self._told.values()):
                time.sleep(_LOOK_S)
        return any(told.prepared >= 1 for told in self._told.values())

    def go_on(self, share: float) -> None:
        """Announces the next order in the background, where that is due.

        Waits up to a second while the next order is not prepared so far: the disk is shared by
        both, so what is read sooner now would be waited for when the next pass begins.

        Args:
            share: of the pass that was read.
        """
        deadline = time.monotonic() + _PACE_S
        while self._sends and self._following is not None:
            behind = any(0 < told.prepared < min(share, 1) for told in self._next.values())
            if time.monotonic() >= self._due_at or behind:
                self._due_at = time.monotonic() + _LOOK_S
                self._task.start()
            if not behind or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Ends it; nodes keep what they were told for as long as a lease."""
        self._closed = True
        for connection in [*self._connections.values()]:
            connection.close()

    def _look(self) -> None:
        """Asks every node, and sends what it wants; in a thread, for about a second."""
        deadline = time.monotonic() + _RUN_S
        try:
            for node in self._nodes:
                told = self._told[node]
                if not told.is_decided:
                    self._tell(node, self._now, told, "", deadline)
                elif self._following is not None and self._sends:
                    self._tell(node, self._following, self._next[node], self._now.name, deadline)
        finally:
            if not any(told.wants for told in self._next.values()):
                self._due_at = time.monotonic() + _LOOK_AT_NEXT_S
            self._looked.set()

    def _tell(
        self, node: NodeRef, order: EpochBuckets, told: _Told, after: str, deadline: float
    ) -> None:
        lease_s = self._shards.lease_s
        request = pb.Announcement(
            dataset=self._shards.dataset,
            fingerprint=self._shards.fingerprint,
            order=order.name,
            num_rows=order.num_rows,
            start=order.start,
            lease_s=lease_s if math.isfinite(lease_s) else _LEASE_S,
            after=after,
            query=not self._sends,
            begins=self._sends and not after and not told.begun,
        )
        try:
            while True:
                answer = self._ask(node, request)
                told.refused, told.prepared, told.begun = answer.refused, answer.prepared, True
                told.wants = answer.HasField("wanted")
                if not (told.wants and self._sends and time.monotonic() < deadline):
                    break
                rows = range(answer.wanted.start, answer.wanted.stop)
                request.begins, request.first_row = False, rows.start
                request.buckets = order.numbers(rows, answer.num_buckets)
                self._num_sent += len(rows)
            if not told.wants:
                order.forget()
        except RequestError as error:  # such as a node of an older release
            told.refused, told.wants = str(error), False
        except CacheError as error:
            logger.debug("order not announced node=%s reason=%s", node, error)
        if told.refused and not self._closed and (said := (node.id, told.refused)) not in _said:
            _said.add(said)
            logger.warning(
                "node %s does not prepare the order of %r, so its rows are read at random: %s",
                node, self._shards.dataset, told.refused,
            )  # fmt: skip

    def _ask(self, node: NodeRef, request: pb.Announcement) -> pb.AnnouncementAnswer:
        connection = self._connections.get(node)
        if connection is None or connection.is_closed:
            if self._closed:
                raise CacheError("the pass is over")
            connection = NodeConnection(node.location, self._credentials)
            self._connections[node] = connection
        return connection.announce(request, CALL_TIMEOUT_S)
