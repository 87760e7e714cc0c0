"""Moves sealed shards in memory to huge pages, while nothing is loaded.

Each random row is on another page. A processor remembers the addresses of some thousand pages; to
look up another one in gigabytes of small pages takes as long as to fetch the row. There are 512
times fewer huge pages, for the node and for each trainer that maps its files.

A tmpfs has small pages unless it is mounted with ``huge=`` (tmpfs(5)), and a pod cannot choose
that. So the pages of a shard are moved once it is sealed. The file stays the same, and readers that
map it continue. See docs/decisions/0015.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from cache_protocol.storage.machine import is_in_memory
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.storage.virtual_memory import AddressRange, huge_page_bytes
from cache_server.shards.stoppable_thread import StoppableThread

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 60.0  # before small pages are tried again: contiguous memory comes and goes
_PAGES_AT_ONCE = 16  # some tens of milliseconds; moving single pages costs more
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EPERM}  # and never will


class HugePages(StoppableThread):
    """Moves the pages of shards in a thread, from `start` to `close`.

    Args:
        cache_dir: of the shards. Only a tmpfs is handled: the kernel evicts pages of a disk's file.
        shards: returns the sealed shards.
        is_idle: returns whether pages may be moved now. Moving takes processor time from loads: 0.3
            to 4 seconds a GB.
    """

    def __init__(
        self,
        cache_dir: Path,
        shards: Callable[[], Iterable[MappedShard]],
        is_idle: Callable[[], bool],
    ) -> None:
        super().__init__("huge-pages")
        self._cache_dir = cache_dir
        self._shards = shards
        self._is_idle = is_idle
        self._moved: weakref.WeakKeyDictionary[MappedShard, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # of what was moved
        self._again_at = 0.0  # of `time.monotonic`

    @property
    def num_bytes(self) -> int:
        """Bytes of the sealed shards in huge pages."""
        with self._lock:
            return sum(self._moved.get(shard, 0) for shard in self._shards())

    def move_all(self) -> None:
        """Moves every sealed shard that is not moved yet; returns early when the node is busy.

        Pages that could not be moved are tried again after a minute.

        Raises:
            OSError: this system has no huge pages for such files.
        """
        now = time.monotonic()
        again = now >= self._again_at
        if again:
            self._again_at = now + _TRY_AGAIN_S
        with self._lock:
            waiting = [weakref.ref(s) for s in self._shards() if self._is_to_move(s, again)]
        for reference in waiting:  # a dropped one gives its memory back
            shard = reference()
            if shard is None:
                continue
            moved = self._move(shard)
            if moved is None:
                return
            with self._lock:
                self._moved[shard] = moved
            if moved:
                logger.info("huge pages path=%s bytes=%d", shard.path, moved)
            del shard

    def _is_to_move(self, shard: MappedShard, again: bool) -> bool:
        moved = self._moved.get(shard)
        return moved is None or (again and moved < _whole_pages(shard))

    def _run(self) -> None:
        try:
            if not is_in_memory(self._cache_dir):
                logger.info("no huge pages: %s is not in memory", self._cache_dir)
                return
            while not self._stop.wait(_LOOK_EVERY_S):
                self.move_all()
        except OSError as error:
            logger.info("no huge pages: %s", error.strerror)

    def _move(self, shard: MappedShard) -> int | None:
        """Moves a shard; returns its bytes in huge pages, or None if it stopped early.

        Raises:
            OSError: as `move_all`.
        """
        page, size = huge_page_bytes(), _whole_pages(shard)
        if not size:
            return 0
        addresses = AddressRange(size)
        addresses.map_file(0, shard.file, 0, size)
        moved, step = 0, page * _PAGES_AT_ONCE
        for start in range(0, size, step):
            if self._stop.is_set() or not self._is_idle():
                return None
            try:
                moved += _collapse(addresses, start, min(step, size - start))
            except OSError:
                if not moved and not any(self._moved.values()):
                    raise
                # Other pages could be moved, so the cause is in these.
                logger.debug("pages stay small path=%s at=%d", shard.path, start)
        return moved


def _whole_pages(shard: MappedShard) -> int:
    """Bytes of a file that fit in huge pages: all but its end."""
    return shard.file.size // huge_page_bytes() * huge_page_bytes()


def _collapse(addresses: AddressRange, at: int, size: int) -> int:
    """Moves some pages; returns the bytes that were moved.

    Raises:
        OSError: this system cannot move any.
    """
    try:
        addresses.collapse(at, size)
        return size
    except OSError as error:
        if size > huge_page_bytes():  # at least one was not
            pages = range(at, at + size, huge_page_bytes())
            return sum(_collapse(addresses, page, huge_page_bytes()) for page in pages)
        if error.errno in _CANNOT:
            raise
        # The page is in use, such as while it is sent, or no contiguous memory is free.
        logger.debug("a page stays small at=%d reason=%s", at, error.strerror)
        return 0
