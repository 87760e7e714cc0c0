"""The groups of sealed shards of a version that loads, and the slots of its first epoch. Pure.

The coordinator writes the log, and it only grows. Slots count the rows in the order of the log, so
a slot has the same row for every rank, at every time. A row is named by its shard and its place
there, because row ids are known only at the end of the load.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final

import numpy as np

from cache_client.permutation import MAX_ROWS, Int64Array
from cache_client.views.view import Epochs, Samples
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
class LoadLog:
    """The log of a load, as far as it is known.

    Args:
        log_id: names the log: another load of the same rows has another one.
        groups: in the order of the log.
        closed: no group follows.
        total: rows of the version; None while that is not known.
    """

    log_id: str
    groups: tuple[LoggedGroup, ...]
    closed: bool
    total: int | None

    @cached_property
    def rows_of_groups(self) -> tuple[int, ...]:
        """Rows of each group."""
        return tuple(sum(group.num_rows) for group in self.groups)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(self.rows_of_groups)

    @property
    def rows_of_shards(self) -> list[int]:
        """Rows of each shard that has some, by index."""
        pairs = (zip(each.shards, each.num_rows, strict=True) for each in self.groups)
        return [rows for _, rows in sorted(chain.from_iterable(pairs)) if rows]

    @property
    def num_slots(self) -> int:
        """Rows of the version; `UNKNOWN_ROWS` while that is not known."""
        return UNKNOWN_ROWS if self.total is None else self.total

    def numbers_by_shard(self, slots: Int64Array) -> Int64Array:
        """The rows of slots in ``[0, num_rows)``, numbered by shard; see `ROWS_OF_A_SHARD`."""
        starts, firsts = self._shards
        shard_of = np.searchsorted(starts, slots, side="right") - 1
        found: Int64Array = np.take(firsts - starts, shard_of) + slots
        return found

    @cached_property
    def _shards(self) -> tuple[Int64Array, Int64Array]:
        """The first slot of each shard, and the number of its first row."""
        shards = [index for group in self.groups for index in group.shards]
        num_rows = [rows for group in self.groups for rows in group.num_rows]
        starts = np.cumsum([0, *num_rows], dtype=np.int64)[:-1]
        return starts, np.array(shards, np.int64) * ROWS_OF_A_SHARD


@dataclass(frozen=True)
class LoggedView:
    """Slot i has the i-th row of the log.

    Args:
        log: as far as it is known.
    """

    log: LoadLog
    num_bytes: int = 0
    orders_rows: bool = False
    epochs: Epochs = "same rows"
    rows_per_slot: float = 1.0

    @property
    def identity(self) -> str:
        """Names the log."""
        return f"log {self.log.log_id}"

    def num_slots(self, epoch: int) -> int:
        """Rows of the version; `UNKNOWN_ROWS` while that is not known."""
        return self.log.num_slots

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots of known groups."""
        return Samples(self.log.numbers_by_shard(slots))
