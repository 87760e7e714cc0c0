"""Counters of a node: rows and bytes served, and calls that failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Read(NamedTuple):
    """Dataset and verb: ``exchange`` (rows by id), ``get`` (a range) or ``file`` (a copy)."""

    dataset: str
    verb: str


@dataclass(frozen=True)
class Served:
    """Sums since the node holds the dataset; ``rows`` is 0 for files."""

    rows: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Counts:
    """The counters at one moment.

    Attributes:
        served: by dataset and verb.
        errors: number of failed calls, by name in `cache_protocol.errors`.
    """

    served: Mapping[Read, Served]
    errors: Mapping[str, int]

    def of(self, datasets: Collection[str]) -> Counts:
        """Without the reads of other datasets."""
        served = {read: sums for read, sums in self.served.items() if read.dataset in datasets}
        return Counts(served, self.errors)


class Traffic:
    """The counters. Thread-safe. Each message costs a lock and two additions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: Counter[Read] = Counter()
        self._bytes: Counter[Read] = Counter()
        self._errors: Counter[str] = Counter()

    def count(self, read: Read, *, rows: int, num_bytes: int) -> None:
        """Adds rows and bytes that were sent."""
        with self._lock:
            self._rows[read] += rows
            self._bytes[read] += num_bytes

    def count_error(self, name: str) -> None:
        """Adds a failed call."""
        with self._lock:
            self._errors[name] += 1

    def counts(self, datasets: Collection[str]) -> Counts:
        """The sums so far. Counters of other datasets than these are removed.

        Otherwise a monitor would keep a series for every dataset that ever existed.
        """
        with self._lock:
            for read in [read for read in self._bytes if read.dataset not in datasets]:
                del self._rows[read], self._bytes[read]
            served = {
                read: Served(self._rows[read], num_bytes) for read, num_bytes in self._bytes.items()
            }
            return Counts(served, dict(self._errors))
