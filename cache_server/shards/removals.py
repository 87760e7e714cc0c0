"""Frees dropped files of a cache directory; large ones in threads.

<cache_dir>/.removed-*/    dropped, soon freed
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from cache_server.shards.disk import remove

logger = logging.getLogger(__name__)

_REMOVED = ".removed-"
_AT_ONCE_BYTES = 256 * 1024 * 1024  # some tens of milliseconds


class Removals:
    """Removes files and folders of one cache directory. Thread-safe.

    Args:
        cache_dir: they are in it.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def are_running(self) -> bool:
        """Whether files are still being freed."""
        with self._lock:
            return any(each.is_alive() for each in self._threads)

    def wait(self) -> None:
        """Waits until all is freed."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def finish_old(self) -> None:
        """Frees what a killed process left."""
        for path in self._cache_dir.glob(f"{_REMOVED}*"):
            remove(path)

    def remove(self, paths: Sequence[Path], num_bytes: int) -> None:
        """Removes files or directories; frees large ones in another thread.

        Freeing takes about a second for a few GiB, and callers hold locks.
        """
        if num_bytes > _AT_ONCE_BYTES:
            removed = self._cache_dir / f"{_REMOVED}{uuid.uuid4().hex}"
            try:
                removed.mkdir()
                for number, path in enumerate(paths):
                    os.replace(path, removed / str(number))
            except OSError as error:  # such as a full disk: removed in place
                logger.warning("cannot move what is removed to %s: %s", removed, error.strerror)
            thread = threading.Thread(target=remove, args=(removed,), name="remove", daemon=True)
            thread.start()
            with self._lock:
                self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        for path in paths:
            remove(path)
