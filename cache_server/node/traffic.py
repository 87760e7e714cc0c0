"""What a node has served of the datasets it holds, and refused: plain counters, to be watched."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Read(NamedTuple):
    """Of whom, and how: ``exchange`` (rows by number), ``get`` (a range), ``file`` (a copy)."""

    dataset: str
    verb: str


@dataclass(frozen=True)
class Served:
    """Sums since the node began to hold the dataset; ``rows`` is 0 of files."""

    rows: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Counts:
    """The counters at one moment.

    Attributes:
        served: by dataset and verb.
        errors: how often a call ended in an error, by its name in `cache_protocol.errors`.
    """

    served: Mapping[Read, Served]
    errors: Mapping[str, int]


class Traffic:
    """Thread-safe. Counting costs a lock and two additions a message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: Counter[Read] = Counter()
        self._bytes: Counter[Read] = Counter()
        self._errors: Counter[str] = Counter()

    def count(self, read: Read, *, rows: int, num_bytes: int) -> None:
        """Adds what was handed to the wire."""
        with self._lock:
            self._rows[read] += rows
            self._bytes[read] += num_bytes

    def count_error(self, name: str) -> None:
        """Adds a call that ended in an error."""
        with self._lock:
            self._errors[name] += 1

    def counts(self, datasets: Collection[str]) -> Counts:
        """The sums so far; those of any other than these datasets are forgotten.

        Datasets come and go for as long as a node lives; whoever watches it would keep a series of
        each.
        """
        with self._lock:
            for read in [read for read in self._bytes if read.dataset not in datasets]:
                del self._rows[read], self._bytes[read]
            served = {
                read: Served(self._rows[read], num_bytes) for read, num_bytes in self._bytes.items()
            }
            return Counts(served, dict(self._errors))
