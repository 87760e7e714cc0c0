"""Rows of a version that were erased, and the rows that are left. Pure.

A version keeps its row ids when rows are erased: it gains *acts*, each with the ids of some rows. A
job reads with the first so many acts: it leaves these rows out as a ``where`` would. A state has
this number, never the ids.

The values of erased rows are gone. So what a condition said of rows that were erased later must be
noted while the job still knows it: one bit for each of them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array
from cache_protocol.storage.row_sets import among

NO_ROWS: Final[Int64Array] = np.empty(0, np.int64)

Notes = Mapping[str, Mapping[int, str]]
"""Digest of a condition -> number of an act -> for which of its rows it held, see `noted`."""


class Listed(Protocol):
    """Row ids in any order; they may repeat.

    Attributes:
        values: integers, shape ``(n,)``.
    """

    values: npt.NDArray[np.integer[Any]]

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Rest:
    """The rows of a range without some, ascending.

    Args:
        rows: the range.
        out: rows of it that are left out, ascending, int64.
        share: makes a list that the processes of a job share.
    """

    rows: range
    out: Listed = field(repr=False, compare=False)
    share: Callable[[Int64Array], Listed] = field(repr=False, compare=False)
    _ahead: Listed = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # How many rows are left before each one that is left out.
        before = self.left_out - self.rows.start - np.arange(len(self.out))
        object.__setattr__(self, "_ahead", self.share(before))

    def __len__(self) -> int:
        return len(self.rows) - len(self.out)

    @property
    def left_out(self) -> Int64Array:
        """Rows of the range that it does not have."""
        return self.out.values.view(np.int64)

    def take(self, items: Int64Array) -> Int64Array:
        """The rows at these places."""
        ahead = self._ahead.values.view(np.int64)
        return items + self.rows.start + count_at_most(ahead, items)

    def find(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Which of some ascending rows it has, and their places."""
        first, last = np.searchsorted(rows, [self.rows.start, self.rows.stop])
        which = np.arange(first, last, dtype=np.int64)
        which = which[~among(rows[first:last], self.left_out)]
        found = rows[which]
        return which, found - self.rows.start - np.searchsorted(self.left_out, found)

    def listed(self) -> Int64Array:
        """All rows."""
        return self.take(np.arange(len(self), dtype=np.int64))


def count_at_most(ascending: Int64Array, values: Int64Array) -> Int64Array:
    """For each value, how many of an ascending list are at most that.

    Values of a window are near each other, so a part of the list is searched.
    """
    if not len(ascending) or not len(values):
        return np.zeros(len(values), np.int64)
    first, last = np.searchsorted(ascending, [values.min(), values.max() + 1])
    found: Int64Array = np.searchsorted(ascending[first:last], values, side="right") + first
    return found


@dataclass(frozen=True)
class Erased:
    """The rows of a version that were erased, as a view reads it. Immutable.

    Args:
        acts: number of the act -> the row ids that it erased, ascending, int64; ascending numbers.
            No two have a row in common. The numbers are those of the cache, the same for versions
            that share rows.
        until: the last act whose rows a view leaves out; 0: none. The view was made before the
            others.
        notes: what conditions said of rows that the other acts erased.
    """

    acts: Mapping[int, Int64Array] = field(default_factory=dict, repr=False, compare=False)
    until: int = 0
    notes: Notes = field(default_factory=dict, repr=False, compare=False)

    @property
    def last(self) -> int:
        """Number of the last act; 0: there is none."""
        return max(self.acts, default=0)

    @property
    def left_out(self) -> Int64Array:
        """Rows that a view leaves out, ascending."""
        return joined_rows([rows for number, rows in self.acts.items() if number <= self.until])

    @property
    def gone(self) -> Int64Array:
        """Rows that a view has, and whose values are gone; ascending."""
        return joined_rows([rows for number, rows in self.acts.items() if number > self.until])

    def first(self, num_rows: int) -> Erased:
        """The same acts, of the first rows of the version."""
        acts = self.acts.items()
        return replace(self, acts={n: ids[: np.searchsorted(ids, num_rows)] for n, ids in acts})

    def chosen(self, condition: str, num_rows: int) -> Int64Array:
        """The rows among `gone` for which a condition held, ascending.

        Args:
            num_rows: of the version, or of its first rows that are read.

        Raises:
            ValueError: for some of them this was not noted.
        """
        notes = self.notes.get(digest_of(condition, num_rows), {})
        found: list[Int64Array] = []
        for number, rows in self.acts.items():
            if number <= self.until or not len(rows):
                continue
            if number not in notes:
                raise ValueError(f"what it said of {len(rows):,} erased rows was not noted")
            found.append(rows[bits_of(notes[number], len(rows))])
        return joined_rows(found)


def joined_rows(lists: Sequence[Int64Array]) -> Int64Array:
    """The rows of lists, ascending."""
    return np.sort(np.concatenate([NO_ROWS, *lists]))


def digest_of(condition: str, num_rows: int) -> str:
    """The key of a condition on the first rows of a version, in notes."""
    return hashlib.sha256(f"{num_rows} {condition}".encode()).hexdigest()[:12]


def noted(held: npt.NDArray[np.bool_]) -> str:
    """Bits as a short text."""
    if held.all() or not held.any():
        return "all" if held.all() else "none"
    return base64.b85encode(np.packbits(held).tobytes()).decode("ascii")


def bits_of(text: str, count: int) -> npt.NDArray[np.bool_]:
    """Reads what `noted` wrote of so many bits.

    Raises:
        ValueError: it is nothing of that kind; quotes it.
    """
    if text in ("all", "none"):
        return np.full(count, text == "all")
    try:
        packed = np.frombuffer(base64.b85decode(text), np.uint8)
        if len(packed) != -(-count // 8):
            raise ValueError(f"{len(packed)} bytes")
        return np.unpackbits(packed, count=count).astype(np.bool_)
    except ValueError as error:
        raise ValueError(f"bad bits of {count} erased rows: {error}") from None
