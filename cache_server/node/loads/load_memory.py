"""The memory that the loads of a node share.

The kernel kills a process that outgrows its container. So each load estimates its memory, and waits
in a queue until there is enough. This module knows neither shards nor queries.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from operator import attrgetter
from typing import Protocol, TypeVar

from cache_protocol.cli.output import size
from cache_protocol.errors import LoadError
from cache_protocol.storage.memory_budget import NodeMemory, min_load_bytes
from cache_server.node.loads.loading import Job, memory_bytes
from cache_server.source.pinned import Split

T = TypeVar("T")

_CHECK_S = 0.2  # longest time that a cancelled load holds up the queue

_MIN_QUERY_BYTES = 64 << 20
_NO_SHARES: Mapping[str, float] = {}


class Waiting(Protocol):
    """What waits for memory; equal only to itself."""

    def check_wanted(self) -> None:
        """Raises an error when it must wait no longer."""


class LoadMemory:
    """A queue of loads for the memory of a node. Thread-safe.

    Args:
        memory: of the node; None: loads begin at once.
        shard_bytes: answers the bytes of all shards of this node once they are loaded.
    """

    def __init__(self, memory: NodeMemory | None, shard_bytes: Callable[[], int]) -> None:
        self._memory = memory
        self._shard_bytes = shard_bytes
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._held_bytes = 0
        self._held_by: Counter[str] = Counter()  # of those with a share
        # DataFusion's allocator keeps freed memory for each thread that ever read. So the thread
        # that ended last is used first.
        self._idle: list[ThreadPoolExecutor] = []

    @property
    def query_bytes(self) -> int | None:
        """Memory of a query over whole tables, half of that of all loads; None: no limit.

        The other half is for its result, and for what DataFusion does not count.
        """
        if self._memory is None:
            return None
        return max(_MIN_QUERY_BYTES, self._memory.loading_bytes // 2)

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        with self._changed:
            return len(self._queue)

    def run(self, job: Job, read: Callable[[], T]) -> T:
        """Runs ``read`` when the job is first in the queue and its memory is free.

        A job that needs more than the whole limit runs alone. With a limit, ``read`` runs in
        another thread, in the context of this one.

        Raises:
            LoadError: this node never has the memory for it; or what ``read`` raises.
            CancelledError: the job was cancelled while it waited.
        """
        if self._memory is None:
            return read()
        with self._hold(job, self._memory):
            with self._changed:
                reader = self._idle.pop() if self._idle else ThreadPoolExecutor(1, "read")
            try:
                return reader.submit(copy_context().run, read).result()
            finally:
                with self._changed:
                    self._idle.append(reader)

    def close(self) -> None:
        """Ends the threads. Call it after the last `run`."""
        for reader in self._idle:
            reader.shutdown()

    @contextmanager
    def _hold(self, job: Job, memory: NodeMemory) -> Iterator[None]:
        if splits := [*job.splits, *job.whole_splits]:
            largest = max(splits, key=attrgetter("group_bytes"))
            self._refuse_if_too_large(largest, memory)
        with self.hold(job, memory_bytes(job)):
            yield

    @contextmanager
    def hold(
        self, job: Waiting, num_bytes: int, shares: Mapping[str, float] = _NO_SHARES
    ) -> Iterator[None]:
        """Holds so much memory, once the job is first in the queue and the memory is free.

        Args:
            shares: for whom it holds, and the most that each may hold, as a share of all. One job
                of each may run in any case. The others wait outside the queue.

        Raises:
            What ``job.check_wanted`` raises while it waits.
        """
        if self._memory is None:
            yield
            return
        limit_bytes = self._memory.loading_bytes
        with self._changed:
            while any(
                held and held + num_bytes > share * limit_bytes
                for name, share in shares.items()
                for held in [self._held_by[name]]
            ):
                job.check_wanted()
                self._changed.wait(_CHECK_S)
            self._held_by.update(dict.fromkeys(shares, num_bytes))
        try:
            self._wait(job, num_bytes, limit_bytes)
            try:
                yield
            finally:
                with self._changed:
                    self._held_bytes -= num_bytes
        finally:
            with self._changed:
                self._held_by.subtract(dict.fromkeys(shares, num_bytes))
                self._held_by += Counter()  # without those that hold nothing
                self._changed.notify_all()

    def _wait(self, job: Waiting, num_bytes: int, limit_bytes: int) -> None:
        with self._changed:
            self._queue.append(job)
            try:
                while self._queue[0] is not job or (
                    self._held_bytes and self._held_bytes + num_bytes > limit_bytes
                ):
                    job.check_wanted()
                    self._changed.wait(_CHECK_S)
                self._held_bytes += num_bytes
            finally:
                self._queue.remove(job)
                self._changed.notify_all()

    def _refuse_if_too_large(self, split: Split, memory: NodeMemory) -> None:
        """Raises a `LoadError` for a row group that would exhaust the memory of the node."""
        needed = min_load_bytes(split.group_bytes)
        if needed <= memory.loading_bytes:
            return
        shards = min(self._shard_bytes(), memory.most_shard_bytes)
        left = max(0, memory._replace(most_shard_bytes=shards).loading_bytes)
        if needed > left:
            raise LoadError(
                f"cannot load {split}: a row group of {size(split.group_bytes)} needs at least "
                f"{size(needed)} of memory, and the node of {size(memory.all_bytes)} leaves "
                f"{size(left)} beside the shards: give it more memory, or write smaller row groups"
            )
