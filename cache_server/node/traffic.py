"""Counters of a node: rows and bytes served, and calls that failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Read(NamedTuple):
    """Dataset and verb: ``exchange`` (rows by id), ``get`` (a range) or ``file`` (a copy)."""

    dataset: str
    verb: str


class Way(NamedTuple):
    """From one zone to another one, or to the same."""

    from_zone: str
    to_zone: str


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
        zones: bytes that went from one zone to another, or within one, where both are known.
    """

    served: Mapping[Read, Served]
    errors: Mapping[str, int]
    zones: Mapping[Way, int] = field(default_factory=dict)

    def of(self, datasets: Collection[str]) -> Counts:
        """Without the reads of other datasets."""
        served = {read: sums for read, sums in self.served.items() if read.dataset in datasets}
        return replace(self, served=served)


_MOST_WAYS = 64  # callers name their zones: more are counted together
_OTHER = "other"


class Traffic:
    """The counters. Thread-safe. Each message costs a lock and a few additions.

    Args:
        zone: of this node; empty: it has none.
    """

    def __init__(self, zone: str = "") -> None:
        self._zone = zone
        self._zones: Counter[Way] = Counter()
        self._lock = threading.Lock()
        self._rows: Counter[Read] = Counter()
        self._bytes: Counter[Read] = Counter()
        self._errors: Counter[str] = Counter()

    def count(self, read: Read, *, rows: int, num_bytes: int, to_zone: str = "") -> None:
        """Adds rows and bytes that were sent to a caller in a zone."""
        with self._lock:
            self._rows[read] += rows
            self._bytes[read] += num_bytes
            if self._zone and to_zone:
                self._add(Way(self._zone, to_zone), num_bytes)

    def count_received(self, num_bytes: int, from_zone: str) -> None:
        """Adds bytes of rows that a caller in a zone has put here."""
        if self._zone and from_zone:
            with self._lock:
                self._add(Way(from_zone, self._zone), num_bytes)

    def _add(self, way: Way, num_bytes: int) -> None:
        if way not in self._zones and len(self._zones) >= _MOST_WAYS:
            way = Way(*(zone if zone == self._zone else _OTHER for zone in way))
        self._zones[way] += num_bytes

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
            return Counts(served, dict(self._errors), dict(self._zones))
