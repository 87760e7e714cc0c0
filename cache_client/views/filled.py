"""Epochs in an order that was, without some rows: later rows move up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_client.order.erased import count_at_most
from cache_client.order.permutation import Int64Array
from cache_client.views.given import positions_of
from cache_client.views.view import Epochs, Numbers, Samples, Shuffle, SlotView

_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class FilledView:
    """Slot i of an epoch has the i-th position of the inner view's order that is not left out.

    Args:
        inner: slots of one row each.
        shuffle: of the job.
        rows: that are left out, ascending, int64.
        until: names them: the last act that erased some of them.

    Thread-safety: immutable, but for a cache of the positions of the last epochs.
    """

    inner: SlotView
    shuffle: Shuffle
    rows: Numbers = field(repr=False)
    until: int
    orders_rows: bool = field(default=True, init=False)
    epochs: Epochs = field(default="any size", init=False)
    rows_per_slot: float = field(default=1.0, init=False)
    _found: dict[int, Int64Array] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": {}}

    @property
    def identity(self) -> str:
        """Of the inner view, and what is left out."""
        return f"{self.inner.identity} filled={self.until}"

    @property
    def num_bytes(self) -> int:
        """Of the inner view, and 8 bytes for each row, in each epoch that is kept."""
        kept = sum(each.nbytes for each in list(self._found.values()))
        return self.inner.num_bytes + self.rows.values.nbytes + kept

    def num_slots(self, epoch: int) -> int:
        """The positions that are left."""
        return self.inner.num_slots(epoch) - len(self._out(epoch))

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots."""
        out = self._out(epoch)
        positions = slots + count_at_most(out - np.arange(len(out)), slots)
        order = self.shuffle.order(self.inner, epoch)
        return self.inner.samples(order.row_ids(positions), epoch)

    def _out(self, epoch: int) -> Int64Array:
        """The positions of the epoch that are left out, ascending."""
        found = self._found.get(epoch)
        if found is None:
            order = self.shuffle.order(self.inner, epoch)
            found = positions_of(self.inner, order, self.rows.values.view(np.int64))[1]
            self._found[epoch] = found
            for old in list(self._found)[:-_EPOCHS_KEPT]:
                self._found.pop(old, None)
        return found
