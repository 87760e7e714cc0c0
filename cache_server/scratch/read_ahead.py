"""Buckets in memory: read whole, ahead of use, within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from cache_server.scratch.bucket_files import Bucket
from cache_server.scratch.order import Order

_WAIT_S = 30.0  # for a bucket; its rows would take longer at random
_LEAST_KEPT = 2  # the one that is read, and the next

_Key = tuple[int, int]


class ReadAhead:
    """Reads buckets in one thread, in the order in which they are wanted. Thread-safe.

    Args:
        most_bytes: of buckets in memory; those that were not used for longest go.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._buckets: OrderedDict[_Key, Future[Bucket]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "bucket-reads")
        self._room: list[bytearray] = []
        self.num_waiting = 0  # buckets that are being read or wait for it

    def get(self, order: Order, bucket: int, *, load: bool) -> Bucket | None:
        """A bucket; None if it is not in memory, or cannot be read in time.

        Args:
            load: reads it, if it is not in memory.
        """
        future = self._wanted(order, bucket, load=load)
        try:
            return None if future is None else future.result(_WAIT_S)
        except (OSError, ValueError, CancelledError):  # also a TimeoutError, and errors of Arrow
            return None

    def begin(self, order: Order, bucket: int) -> None:
        """Begins to read a bucket."""
        self._wanted(order, bucket, load=True)

    def _wanted(self, order: Order, bucket: int, *, load: bool) -> Future[Bucket] | None:
        key = (id(order), bucket)
        with self._lock:
            future = self._buckets.get(key)
            if future is None and load and not order.is_over:
                try:
                    future = self._pool.submit(self._read, order, bucket)
                except RuntimeError:  # closed
                    return None
                self._buckets[key] = future
                self.num_waiting += 1
            if future is not None:
                self._buckets.move_to_end(key)
            return future

    def _read(self, order: Order, bucket: int) -> Bucket:
        try:
            found = order.files.read(bucket, self._room)
        except (OSError, ValueError) as error:
            if not order.is_over:
                order.lose(bucket, error)
            raise
        finally:
            with self._lock:
                self.num_waiting -= 1
        self._make_room(found.num_bytes)
        return found

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            sizes = {
                key: future.result().num_bytes
                for key, future in self._buckets.items()
                if future.done() and not future.cancelled() and future.exception() is None
            }
            held = sum(sizes.values()) + num_bytes
            for key in [*sizes][: max(0, len(sizes) + 1 - _LEAST_KEPT)]:
                if held <= self._most_bytes:
                    return
                del self._buckets[key]
                held -= sizes[key]

    def drop(self, order: Order, bucket: int | None = None) -> None:
        """Forgets a bucket of an order; None: all of them."""
        with self._lock:
            keys = [
                key for key in self._buckets if key[0] == id(order) and bucket in (None, key[1])
            ]
            for key in keys:
                if self._buckets.pop(key).cancel():
                    self.num_waiting -= 1

    def close(self) -> None:
        """Reads no more."""
        self._pool.shutdown(cancel_futures=True)
