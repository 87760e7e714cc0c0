"""Which version the ranks of a job read in an epoch: the first to ask decides for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

_MOST = 10_000  # remembered choices


class EpochVersions:
    """The choices of the last minutes. One thread at a time.

    A later start of the same job may choose anew, so a choice does not last longer than the ranks
    of one start are apart.

    Args:
        keep_s: how long a choice holds; the version must be kept as long.
        clock: monotonic seconds.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._chosen: dict[Hashable, tuple[str, float]] = {}  # the oldest first

    def choose(self, asked: Hashable, newest: str, ready: Collection[str]) -> str:
        """The fingerprint for a job and an epoch.

        Args:
            asked: names the job, the epoch and the dataset.
            newest: the choice of the first who asks.
            ready: the versions that can be read.
        """
        now = self._clock()
        fingerprint, chosen_at = self._chosen.pop(asked, ("", now))
        if fingerprint not in ready or now - chosen_at > self._keep_s:
            fingerprint, chosen_at = newest, now
        self._chosen[asked] = fingerprint, chosen_at
        if len(self._chosen) > _MOST:
            del self._chosen[next(iter(self._chosen))]
        return fingerprint
