"""The rows of a version that were forgotten, by act, and where they lie in its shards. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cache_protocol.storage.row_sets import RowIds, decode_rows, encode_rows, union


@dataclass(frozen=True)
class ErasedRows:
    """What one act erased of a version.

    Attributes:
        number: of the act.
        rows: a row set of row ids.
    """

    number: int
    rows: bytes


class Erasures:
    """The acts of a version. They only become more. One thread at a time.

    Args:
        acts: in their order; no two have a row in common.
        starts: first row id of each shard, and the total; needed if there are acts.

    Attributes:
        acts: in their order.
        places: shard -> a row set of all rows that are to be erased in it. Until every shard is
            sealed, they are in no act: a load left them out.
        num_rows: of all acts.
        has_noted: places may be in no act yet.
    """

    def __init__(self, acts: Iterable[ErasedRows] = (), starts: Sequence[int] = ()) -> None:
        self.acts: tuple[ErasedRows, ...] = ()
        self.places: dict[int, bytes] = {}
        self.num_rows = 0
        self.has_noted = False
        for act in acts:
            self._append(act, starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Erasures) and (self.acts, self.places) == (
            other.acts,
            other.places,
        )

    __hash__ = None  # type: ignore[assignment]

    def has(self, index: int, erased: bytes) -> bool:
        """Whether a file in which these places are erased has all that must be."""
        wanted = self.places.get(index, b"")
        return erased == wanted or union(wanted, erased) == erased

    def note(self, index: int, erased: bytes) -> None:
        """Notes the rows that a load left out of a shard."""
        if erased and self.places.get(index) != erased:
            self.has_noted = True
            self.places[index] = union(self.places.get(index, b""), erased)

    def with_act(self, number: int, rows: RowIds, starts: Sequence[int]) -> Erasures:
        """These with the rows of one more act that no act has yet; the same if there are none."""
        known = self.rows()
        new = np.setdiff1d(rows, known, assume_unique=True)
        if not len(new):
            return self
        return Erasures((*self.acts, ErasedRows(number, encode_rows(new))), starts)

    def with_noted(self, number: int, starts: Sequence[int]) -> Erasures:
        """These with what loads left out, as the rows of an act; for a version with all shards."""
        noted = [decode_rows(places) + starts[index] for index, places in self.places.items()]
        return self.with_act(number, np.sort(np.concatenate([*noted, _NONE])), starts)

    def rows(self) -> RowIds:
        """The row ids of all acts, ascending."""
        return np.sort(np.concatenate([_NONE, *(decode_rows(act.rows) for act in self.acts)]))

    def _append(self, act: ErasedRows, starts: Sequence[int]) -> None:
        rows = decode_rows(act.rows)
        self.acts += (act,)
        self.num_rows += len(rows)
        for index, places in _by_shard(rows, starts).items():
            self.places[index] = union(self.places.get(index, b""), places)


_NONE: RowIds = np.empty(0, np.int64)


def _by_shard(rows: RowIds, starts: Sequence[int]) -> Mapping[int, bytes]:
    """Shard -> a row set of the places of rows in it."""
    shards = np.searchsorted(np.asarray(starts, np.int64), rows, side="right") - 1
    found = {}
    for index in np.unique(shards).tolist():
        found[index] = encode_rows(rows[shards == index] - starts[index])
    return found
