"""Finds shard files that rot: reads every sealed file again, slowly, and compares its checksum.

A damaged shard is dropped. Then it is made again, from a replica or from its source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from cache_protocol.storage.shard_files import MappedShard
from cache_server.secrets import error_text
from cache_server.shards.checksums import file_checksum
from cache_server.shards.stoppable_thread import StoppableThread
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_MAX_BYTES_PER_S = 256 << 20  # a few percent of one processor


class Scrub(StoppableThread):
    """Checks the shards in a thread, from `start` to `close`.

    Every second it looks for files that were changed in place. Every ``interval_s`` it reads all of
    them.

    Args:
        versions: returns the sealed shards.
        drop: drops a damaged shard; returns whether it was still there.
        interval_s: between the starts of two passes; 0: no file is read.

    Attributes:
        num_bytes: read so far.
        num_damaged: shards found so far.
    """

    def __init__(
        self,
        versions: Callable[[], Mapping[VersionKey, Mapping[int, MappedShard]]],
        drop: Callable[[VersionKey, MappedShard], bool],
        interval_s: float,
    ) -> None:
        super().__init__("scrub")
        self._versions = versions
        self._drop = drop
        self._interval_s = interval_s
        self.num_bytes = self.num_damaged = 0

    def _run(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._stop.wait(_LOOK_EVERY_S):
            try:
                self.look()
                if self._interval_s and time.monotonic() >= due:
                    due = time.monotonic() + self._interval_s
                    self.read_all()
            except error_text.EXITS:
                raise
            except Exception:  # the next pass may succeed
                logger.exception("scrub failed, will be tried again")

    def look(self) -> None:
        """Drops the shards whose files were changed in place."""
        for key, shards in self._versions().items():
            for shard in shards.values():
                if not shard.is_unchanged():
                    self._found(key, shard)

    def read_all(self) -> None:
        """Reads every file, and drops the shards with another checksum."""
        for key, shards in self._versions().items():
            for shard in shards.values():
                if self._stop.is_set():
                    return
                start = time.monotonic()
                try:
                    is_sound = file_checksum(shard.path) == shard.sealed.checksum
                except OSError:  # it was removed, or ends too early
                    is_sound = False
                self.num_bytes += shard.sealed.num_bytes
                if not is_sound:
                    self._found(key, shard)
                taken_s = time.monotonic() - start
                self._stop.wait(max(0.0, shard.sealed.num_bytes / _MAX_BYTES_PER_S - taken_s))

    def _found(self, key: VersionKey, shard: MappedShard) -> None:
        if self._drop(key, shard):
            self.num_damaged += 1
