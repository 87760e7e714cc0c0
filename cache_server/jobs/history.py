"""Samples of the last hour, in little memory. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

HISTORY_S: Final = 3600.0
_FIRST_STRIDE_S: Final = 2.0


class Ring:
    """The samples of the last hour, evenly spread. Old ones are thinned.

    Args:
        width: numbers of a sample.
        most: samples that are kept.
    """

    def __init__(self, width: int, most: int) -> None:
        self._times = array("d")
        self._columns = [array("f") for _ in range(width)]
        self._most = most
        self._stride_s = _FIRST_STRIDE_S

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next sample."""
        return not self._times or now - self._times[-1] >= self._stride_s

    def add(self, now: float, *sample: float) -> None:
        """Adds a sample."""
        self._times.append(now)
        for column, value in zip(self._columns, sample, strict=True):
            column.append(value)
        if len(self._times) <= self._most:
            return
        if now - self._times[0] < HISTORY_S:
            self._times = self._times[::2]
            self._columns = [column[::2] for column in self._columns]
            self._stride_s *= 2
        else:
            for values in (self._times, *self._columns):
                del values[0]

    def since(self, oldest: float) -> Sequence[tuple[float, ...]]:
        """The samples from then on: the time, then the numbers."""
        first = bisect_left(self._times, oldest)
        columns = (column[first:] for column in (self._times, *self._columns))
        return list(zip(*columns, strict=True))
