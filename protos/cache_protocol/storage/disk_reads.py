"""How the rows of a table come from its disk: whether page by page, and how many at once.

    in memory                 rows are taken, and nothing else is done
    fits, on a disk           the read-ahead of the kernel brings it into memory
    larger than the memory    the pages of some rows are asked for together, and no others

Read-ahead brings a hundred pages for each row of a shuffled table. That is how a table comes into
memory, and a waste where it does not stay there.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cache_protocol.storage.machine import MACHINE_BYTES, is_in_memory, memory_limit_bytes
from cache_protocol.storage.pace import Pace

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 0.75  # of files; the rest is for processes
_TIMES_READ = 2  # what is in memory was read once
_QUIET_TIMES = 256  # rows of one block of an order come together, so a few say nothing
_FIRST_ROWS, _MOST_ROWS = 1024, 16_384
_TARGET_S = 0.25  # for a part of an answer: readers see that it comes
ADVICE = (  # where random rows come slowly
    "Read blocks of rows (shuffle_block_size=1024), or give the cache a scratch disk or more "
    "memory: see docs/large-tables.md"
)
_SAY_AFTER_S, _MANY_TIMES = 5.0, 4  # of gathering; bytes read for each byte of the rows


class DiskReads:
    """How the rows of one table are read. Any thread: a lost note costs some time only.

    Args:
        num_bytes: of the files.
        num_rows: in them.
        memory_bytes: for them.

    Attributes:
        is_cold: rows came from the disk lately, or none were taken yet.
        is_exact: only the pages of the rows are read.
    """

    def __init__(self, num_bytes: int, num_rows: int, memory_bytes: float) -> None:
        self._num_bytes, self._num_rows = num_bytes, max(1, num_rows)
        self.is_cold = True
        self.is_exact = num_bytes > memory_bytes
        self._left = _TIMES_READ * num_bytes  # bytes to read before the table counts as larger
        self._quiet = 0  # times in turn that nothing came from the disk
        self._pace = Pace(_FIRST_ROWS, _TARGET_S)
        self._rows, self._read, self._seconds = 0, 0, 0.0  # that were taken from the disk
        self._is_said = False

    @classmethod
    def of_files(cls, folder: Path, num_bytes: int, num_rows: int) -> DiskReads | None:
        """For files in a folder; None: they are in memory, as on a tmpfs."""
        if is_in_memory(folder):
            return None
        limit = memory_limit_bytes() or MACHINE_BYTES
        return cls(num_bytes, num_rows, limit * _MEMORY_SHARE)

    def rows_at_once(self, most: int) -> int:
        """How many rows to take at once."""
        return self._pace.size(min(most, _MOST_ROWS)) if self.is_cold else most

    def note(self, num_rows: int, num_bytes: int, seconds: float) -> None:
        """Learns what some rows took.

        Args:
            num_bytes: that came from the disk for them.
        """
        if self.is_cold:
            self._pace.note(num_rows, seconds)
            self._say_if_slow(num_rows, num_bytes, seconds)
        self._left -= num_bytes
        self.is_exact |= self._left < 0
        self._quiet = 0 if num_bytes else self._quiet + 1
        self.is_cold = self._quiet < (_QUIET_TIMES if self.is_exact else 1)

    def _say_if_slow(self, num_rows: int, num_bytes: int, seconds: float) -> None:
        """Says once that random rows come from the disk, how fast, and what to do."""
        self._rows += num_rows
        self._read += num_bytes
        self._seconds += seconds
        wanted = self._rows * self._num_bytes / self._num_rows
        if self._is_said or self._seconds < _SAY_AFTER_S or self._read < _MANY_TIMES * wanted:
            return
        self._is_said = True
        logger.warning(
            "rows come from a disk at %s a second, in a random order: their shards have %.1f GB, "
            "and are not in memory. %s",
            f"{self._rows / self._seconds:,.0f}",
            self._num_bytes / 1e9,
            ADVICE,
        )
