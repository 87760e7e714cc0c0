"""The groups of sealed shards of a version that loads, and the slots of its first epoch. Pure.

The coordinator writes the log, and it only grows. Slots count the rows in the order of the log, so
a slot has the same row for every rank, at every time. A row is named by its shard and its place
there, because row ids are known only at the end of the load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from cache_client.order.permutation import MAX_ROWS, Int64Array
from cache_protocol.storage.row_index import ROWS_OF_A_SHARD

UNKNOWN_ROWS: Final = MAX_ROWS
"""Stands for the slots of an epoch whose end is not known yet."""


@dataclass(frozen=True)
class LoggedGroup:
    """Shards that were logged together.

    Attributes:
        shards: their indices, ascending.
        num_rows: of each of them.
    """

    shards: tuple[int, ...]
    num_rows: tuple[int, ...]


@dataclass(frozen=True)
class GroupLog:
    """The log of a load, as far as it is known. Immutable.

    Args:
        log_id: names the log: another load of the same rows has another one.
        groups: in the order of the log.
        closed: no group follows.
        total: rows of the version; None while that is not known.

    Attributes:
        rows_of_groups: rows of each group.
        num_rows: rows of all groups.
    """

    log_id: str
    groups: tuple[LoggedGroup, ...]
    closed: bool
    total: int | None
    rows_of_groups: tuple[int, ...] = field(init=False, repr=False, compare=False)
    num_rows: int = field(init=False, repr=False, compare=False)
    _starts: Int64Array = field(init=False, repr=False, compare=False)  # first slot of each shard
    _shifts: Int64Array = field(init=False, repr=False, compare=False)  # slot -> number by shard

    def __post_init__(self) -> None:
        rows_of_groups = tuple(sum(group.num_rows) for group in self.groups)
        shards = np.array([i for group in self.groups for i in group.shards], np.int64)
        num_rows = [rows for group in self.groups for rows in group.num_rows]
        starts = np.cumsum([0, *num_rows], dtype=np.int64)[:-1]
        object.__setattr__(self, "rows_of_groups", rows_of_groups)
        object.__setattr__(self, "num_rows", sum(rows_of_groups))
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_shifts", shards * ROWS_OF_A_SHARD - starts)

    @property
    def num_slots(self) -> int:
        """Rows of the version; `UNKNOWN_ROWS` while that is not known."""
        return UNKNOWN_ROWS if self.total is None else self.total

    @property
    def rows_of_shards(self) -> list[int]:
        """Rows of each shard that has some, by index."""
        pairs = (zip(each.shards, each.num_rows, strict=True) for each in self.groups)
        return [rows for _, rows in sorted(chain.from_iterable(pairs)) if rows]

    def numbers_by_shard(self, slots: Int64Array) -> Int64Array:
        """The rows of slots in ``[0, num_rows)``, numbered by shard; see `ROWS_OF_A_SHARD`."""
        shard_of = np.searchsorted(self._starts, slots, side="right") - 1
        found: Int64Array = np.take(self._shifts, shard_of) + slots
        return found

    def row_ids(self, slots: Int64Array) -> Int64Array:
        """The row ids of slots in ``[0, num_rows)``, of a log whose groups are all known."""
        pairs = (zip(each.shards, each.num_rows, strict=True) for each in self.groups)
        sizes = dict(chain.from_iterable(pairs))
        rows = [sizes.get(shard, 0) for shard in range(max(sizes, default=-1) + 1)]
        firsts = np.cumsum([0, *rows], dtype=np.int64)
        numbers = self.numbers_by_shard(slots)
        found: Int64Array = np.take(firsts, numbers // ROWS_OF_A_SHARD) + numbers % ROWS_OF_A_SHARD
        return found
