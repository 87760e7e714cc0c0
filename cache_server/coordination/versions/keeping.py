"""What is known of a dataset beside its versions: pins, priorities, and when it was read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.versions.eviction import MOST_READS

logger = logging.getLogger(__name__)

_NOTICED_S = 1.0  # shorter times since the last read make no difference
SAME_READ_S = 600.0  # a dataset that was not read for longer is read anew
_WRITE_EVERY_S = 5.0


@dataclass(frozen=True)
class Keeping:
    """What decides how long a dataset is kept.

    Attributes:
        pinned: it is never evicted.
        priority: those of lower priority go first.
        reads: when its last reads began, in seconds since 1970, the oldest first.
        last_read: seconds since 1970; None: it was never read.
    """

    pinned: bool = False
    priority: int = 0
    reads: tuple[float, ...] = ()
    last_read: float | None = None


class Keepings:
    """The `Keeping` of every dataset, by its full name. One thread at a time.

    Args:
        catalogue: keeps them over a restart.
        now: seconds since 1970.
    """

    def __init__(self, catalogue: Catalogue, now: Callable[[], float]) -> None:
        self._catalogue = catalogue
        self._now = now
        self._of = {name: Keeping(*values) for name, values in catalogue.read_keepings().items()}
        self._is_changed = False
        self._written_at = now()

    def of(self, dataset: str) -> Keeping:
        """That of one dataset."""
        return self._of.get(dataset, Keeping())

    def note_read(self, dataset: str, age_s: float = 0.0) -> None:
        """Notes that a dataset was read so long ago."""
        known, at = self.of(dataset), self._now() - age_s
        if known.last_read is not None and at < known.last_read + _NOTICED_S:
            return
        reads = known.reads
        if known.last_read is None or at - known.last_read > SAME_READ_S:
            reads = (*reads, at)[-MOST_READS:]
            self._is_changed = True
        self._of[dataset] = replace(known, reads=reads, last_read=at)

    def set(self, dataset: str, *, pinned: bool | None, priority: int | None) -> None:
        """Sets what is not None.

        Raises:
            OSError: it cannot be written. Then nothing has changed.
        """
        known = self.of(dataset)
        self._of[dataset] = replace(
            known,
            pinned=known.pinned if pinned is None else pinned,
            priority=known.priority if priority is None else priority,
        )
        try:
            self._write()
        except OSError:
            self._of[dataset] = known
            raise

    def forget(self, dataset: str) -> None:
        """Forgets a dataset that was dropped."""
        self._is_changed |= self._of.pop(dataset, None) is not None

    def write_if_due(self) -> None:
        """Writes what changed, not too often: reads that are lost matter little."""
        if self._is_changed and self._now() - self._written_at >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Writes what changed."""
        if self._is_changed:
            try:
                self._write()
            except OSError as error:  # matters only after a restart
                logger.error("reads of datasets not written reason=%s", error.strerror)

    def _write(self) -> None:
        self._written_at = self._now()
        self._catalogue.write_keepings(
            {
                name: (each.pinned, each.priority, each.reads, each.last_read)
                for name, each in self._of.items()
            }
        )
        self._is_changed = False
