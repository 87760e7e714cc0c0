"""Views of some rows of a version, one a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_client.order.erased import Rest
from cache_client.order.permutation import Int64Array
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import Epochs, Samples
from cache_protocol.storage.row_index import RowIndex

_MOST_ROWS_OF_ONE_BLOCK = 2**32  # numbers have 32 bits


@dataclass(frozen=True)
class RestView:
    """Slot i has the i-th row that was not erased.

    Args:
        rest: the rows of the version that are left.
        identity: see `SlotView`.
    """

    rest: Rest
    identity: str
    orders_rows: bool = field(default=False, init=False)
    epochs: Epochs = field(default="same rows", init=False)
    rows_per_slot: float = field(default=1.0, init=False)

    @property
    def num_bytes(self) -> int:
        """16 bytes for each erased row."""
        return 2 * self.rest.out.values.nbytes

    def num_slots(self, epoch: int) -> int:
        """The rows that are left."""
        return len(self.rest)

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of these slots."""
        return Samples(self.rest.take(slots))


@dataclass(frozen=True)
class RowsView:
    """Slot i has the i-th of some rows.

    A row id is a number and the first row id of its block: a shard, or the whole version where its
    row ids have 32 bits. So a row takes 4 bytes.

    Args:
        identity: see `SlotView`.
        numbers: of all slots.
        firsts: the first row id of each block; int64.
        starts: the first slot of each block; int64, strictly ascending.
    """

    identity: str
    numbers: SharedArray
    firsts: Int64Array
    starts: Int64Array
    orders_rows: bool = field(default=False, init=False)
    epochs: Epochs = field(default="same rows", init=False)
    rows_per_slot: float = field(default=1.0, init=False)
    _index: RowIndex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", RowIndex(self.starts, len(self.numbers)))

    @property
    def num_bytes(self) -> int:
        """4 bytes a row; 8 for a list of rows of a version of more than 2**32 rows."""
        return self.numbers.values.nbytes

    def num_slots(self, epoch: int) -> int:
        """The number of rows."""
        return len(self.numbers)

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of these slots."""
        rows = np.take(self.numbers.values, slots).astype(np.int64)
        if len(self.firsts) > 1:
            rows += np.take(self.firsts, self._index.find(slots))
        elif self.firsts[0]:
            rows += self.firsts[0]
        return Samples(rows)

    def contains(self, row_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each row is in the view, whose rows must ascend."""
        found = np.zeros(len(row_ids), bool)
        ends = [*self.starts[1:].tolist(), len(self.numbers)]
        block_of = np.searchsorted(self.firsts, row_ids, side="right") - 1
        for block, (start, stop) in enumerate(zip(self.starts.tolist(), ends, strict=True)):
            rows = self.numbers.values[start:stop]
            asked = np.flatnonzero(block_of == block)
            numbers = row_ids[asked] - self.firsts[block]
            at = np.searchsorted(rows, numbers)
            is_inside = at < len(rows)
            found[asked[is_inside]] = rows[at[is_inside]] == numbers[is_inside]
        return found


def rows_of_shards(
    identity: str,
    numbers: Sequence[npt.NDArray[np.unsignedinteger[Any]]],
    firsts: Int64Array,
    num_rows: int,
    *,
    most_rows_of_one_block: int = _MOST_ROWS_OF_ONE_BLOCK,
) -> RowsView:
    """A view of rows in ascending order.

    Args:
        identity: see `SlotView`.
        numbers: of each shard: its rows, counted from its first one; ascending, uint32.
        firsts: the first row id of each shard; int64.
        num_rows: of the version.
    """
    counts = np.array([len(each) for each in numbers], np.int64)
    used = np.flatnonzero(counts)
    joined = np.empty(int(counts.sum()), np.uint32)
    ends = np.cumsum(counts)
    starts = ends - counts
    is_one_block = num_rows <= most_rows_of_one_block or not len(used)
    for shard in used.tolist():
        part = joined[starts[shard] : ends[shard]]
        part[:] = numbers[shard]
        if is_one_block:
            part += np.uint32(firsts[shard])
    if is_one_block:
        return RowsView(identity, SharedArray(joined), np.zeros(1, np.int64), np.zeros(1, np.int64))
    return RowsView(identity, SharedArray(joined), firsts[used], starts[used])


def rows_in_order(identity: str, row_ids: Int64Array, num_rows: int) -> RowsView:
    """A view of rows in any order; rows may repeat."""
    dtype = np.uint32 if num_rows <= _MOST_ROWS_OF_ONE_BLOCK else np.int64
    numbers = SharedArray(row_ids.astype(dtype))
    return RowsView(identity, numbers, np.zeros(1, np.int64), np.zeros(1, np.int64))
