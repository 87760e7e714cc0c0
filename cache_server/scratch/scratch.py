"""The orders that readers announced to a node: within a limit, prepared one after the other.

A hint changes no result: rows whose bucket is not here come from their shards. Nothing is kept for
the next process.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cache_protocol.cli.output import size
from cache_protocol.errors import RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.scratch.order import Order
from cache_server.scratch.read_ahead import ReadAhead
from cache_server.scratch.sizes import Sizes
from cache_server.shards.disk import remove
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_MOST_ORDERS, _MOST_OF_NAME = 64, 64
_LEAST_LEASE_S, _LONGEST_LEASE_S = 1.0, 3600.0
_ROW_ID_BYTES, _NUMBER_BYTES = 8, 2  # of a row: in its bucket, and in the announcement
_CHUNK_WAITS_S, _LOOK_S = 0.5, 0.01
_TAKEN_OVER = 1 / 16  # of an order that was read: nobody reads the one before it


class Counts(NamedTuple):
    """Sums of a node.

    Attributes:
        num_rows: that came from buckets.
        num_bytes: of bucket files now.
        num_prepared, num_failed: orders.
    """

    num_rows: int = 0
    num_bytes: int = 0
    num_prepared: int = 0
    num_failed: int = 0


class _Plan(NamedTuple):
    """What an order takes."""

    num_buckets: int
    reserved_bytes: int


class Scratch:
    """Announced orders of the versions of a node. Thread-safe.

    Args:
        folder: for bucket files alone; what an earlier process left in it is removed.
        limit_bytes: of all of them; None: no order is prepared.
        memory_bytes: of the node.
    """

    def __init__(self, folder: Path, limit_bytes: int | None, memory_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self.sizes = Sizes(memory_bytes)
        self._lock = threading.Lock()
        self._orders: dict[tuple[VersionKey, str], Order] = {}
        self._ended = Counts()  # of orders that are no more
        self._loads = ReadAhead(self.sizes.loaded_bytes)
        self._pool = ThreadPoolExecutor(1, "scatter")
        remove(folder)

    def close(self) -> None:
        """Ends all preparing, and removes all files."""
        with self._lock:
            orders, self._orders = [*self._orders.values()], {}
        for order in orders:
            order.drop()
        self._loads.close()
        self._pool.shutdown(cancel_futures=True)
        remove(self._folder)

    @property
    def counts(self) -> Counts:
        """The sums so far."""
        with self._lock:
            orders, ended = [*self._orders.values()], self._ended
        for order in orders:
            ended = _with(ended, order)
        return ended._replace(num_bytes=sum(order.files.num_bytes for order in orders))

    # -- announcements -------------------------------------------------------------------------

    def announce(self, rows: ResidentRows, asked: pb.Announcement) -> pb.AnnouncementAnswer:
        """Takes a part of an announcement, and says what to send next.

        Args:
            rows: of the version, that this node serves.

        Raises:
            RequestError: it is no announcement of this version.
        """
        if not 0 < len(asked.order) <= _MOST_OF_NAME or not 0 <= asked.start <= 1:
            raise RequestError(
                f"an announcement has a name of 1 to {_MOST_OF_NAME} letters and a start from 0 "
                f"to 1, got {asked.order[:_MOST_OF_NAME]!r} and {asked.start}"
            )
        key = (rows.key, asked.order)
        with self._lock:
            order = self._orders.get(key)
            if order is not None and asked.begins and not order.has(_first(asked, order)):
                self._end(order)
                order = None
            if order is None:
                plan = self._plan(rows, asked)
                if isinstance(plan, str):
                    return pb.AnnouncementAnswer(refused=plan)
                if not asked.query:
                    try:
                        order = self._orders[key] = self._made(rows, asked, plan)
                    except OSError as error:
                        return pb.AnnouncementAnswer(refused=_disk(error))
        if order is None:
            return pb.AnnouncementAnswer()
        order.lasts(min(max(asked.lease_s, _LEAST_LEASE_S), _LONGEST_LEASE_S))
        try:
            if asked.buckets and order.receive(asked.first_row, asked.buckets):
                self._pool.submit(order.prepare, self._wait_to_prepare)
        except OSError as error:
            order.fail(_disk(error))
        if order.state == "failed":
            return pb.AnnouncementAnswer(refused=order.reason)
        answer = pb.AnnouncementAnswer(num_buckets=order.num_buckets, prepared=order.prepared)
        if (wanted := order.wanted) is not None:
            answer.wanted.start, answer.wanted.stop = wanted
        return answer

    def _plan(self, rows: ResidentRows, asked: pb.Announcement) -> _Plan | str:
        """What an order takes, or why it is refused. Needs the lock."""
        if self._limit_bytes is None:
            return "the node has no scratch disk: start it with --scratch-limit"
        share = min(1.0, asked.num_rows / max(1, rows.num_rows))
        num_bytes = int(share * (rows.num_bytes + _ROW_ID_BYTES * rows.num_held))
        reserved = num_bytes + _NUMBER_BYTES * rows.num_rows
        num_buckets = self.sizes.num_buckets(num_bytes)
        if num_buckets is None:
            needs, memory = size(num_bytes), size(self.sizes.memory_bytes)
            return f"an order of {needs} needs more memory than the {memory} of the node"
        used = sum(order.held_bytes for order in self._orders.values())
        if used + reserved > self._limit_bytes or len(self._orders) >= _MOST_ORDERS:
            return (
                f"the order needs {size(reserved)}, and {len(self._orders)} orders have "
                f"{size(used)} of the {size(self._limit_bytes)} of --scratch-limit"
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            return _disk(error)
        if reserved > free:
            return f"the order needs {size(reserved)}, and the scratch disk has {size(free)} free"
        return _Plan(num_buckets, reserved)

    def _made(self, rows: ResidentRows, asked: pb.Announcement, plan: _Plan) -> Order:
        return Order(
            rows,
            asked.order,
            after=asked.after,
            num_buckets=plan.num_buckets,
            first=int(asked.start * plan.num_buckets),
            reserved_bytes=plan.reserved_bytes,
            folder=self._folder / uuid.uuid4().hex,
            sizes=self.sizes,
            loads=self._loads,
        )

    def find(self, rows: ResidentRows, name: str) -> Order | None:
        """The order of this name, if rows come from its buckets."""
        order = self._orders.get((rows.key, name))
        if order is None or order.state != "ready":
            return None
        if not order.files.layout.schema.equals(rows.layout.schema):
            return None  # other shards came, with nulls in other columns
        order.lasts()
        if order.after and order.read_share > _TAKEN_OVER:
            with self._lock:
                if (before := self._orders.get((rows.key, order.after))) is not None:
                    self._end(before)
        return order

    # -- ends ----------------------------------------------------------------------------------

    def forget(self, key: VersionKey) -> None:
        """Removes all that is kept of rows of a version."""
        with self._lock:
            for order in [each for each in self._orders.values() if each.key == key]:
                self._end(order)

    def trim(self, served: Container[VersionKey]) -> None:
        """Ends the orders whose lease is over, and those of versions that are served no more.

        An announcement may have come while its version went.
        """
        now = time.monotonic()
        with self._lock:
            for order in [*self._orders.values()]:
                if order.ends_at < now or order.key not in served:
                    self._end(order)

    def _end(self, order: Order) -> None:
        """Needs the lock."""
        self._orders.pop((order.key, order.name), None)
        self._ended = _with(self._ended, order)
        order.drop()

    def _wait_to_prepare(self, order: Order) -> None:
        """Lets buckets be read first, unless their order is further than this one."""
        deadline = time.monotonic() + _CHUNK_WAITS_S
        before = self._orders.get((order.key, order.after))
        while (
            self._loads.num_waiting
            and (before is None or order.prepared > before.read_share)
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_S)


def _disk(error: OSError) -> str:
    return f"the scratch disk: {error.strerror or error}"


def _first(asked: pb.Announcement, order: Order) -> int:
    return int(asked.start * order.num_buckets)


def _with(counts: Counts, order: Order) -> Counts:
    return Counts(
        counts.num_rows + order.num_served,
        counts.num_bytes,
        counts.num_prepared + order.was_prepared,
        counts.num_failed + (order.state == "failed"),
    )
