"""Weights, classes, epoch lengths: rows that come more or less often than once. Pure.

All of them compute the row of a slot by random access. Classes and short epochs continue where the
epoch before ended, so that no row is left out for long.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array, Permutation, splitmix64
from cache_client.views.successive import successive_sample
from cache_client.views.view import Epochs, Numbers, Samples, Shuffle, SlotView

Weights = npt.NDArray[Any]
"""Doubles, or integers of any width."""

_SUM_BITS: Final = 61  # of all weights, about: they are whole numbers, so that sums are exact
_MOST_CYCLES: Final = 2**61  # runs of classes in all epochs; then they begin anew
_EPOCHS_KEPT: Final = 2
# Streams of `Permutation`; `cache_client.order.order` has others.
_STREAM_CLASSES, _STREAM_CLASS_ROWS = 16, 17


@dataclass(frozen=True)
class EpochRowsView:
    """Epochs of another length than the table: the passes over the rows are joined, and then cut.

    Slot i of epoch e is place ``t = e * epoch_rows + i`` of all passes: row ``t mod n`` in the
    order of pass ``t // n``. So no row is repeated before all n were read.

    Args:
        inner: rows, one a slot.
        epoch_rows: slots of an epoch, at least 1.
        shuffle: of each pass.
    """

    inner: SlotView
    epoch_rows: int
    shuffle: Shuffle
    orders_rows: bool = True
    epochs: Epochs = "same size"
    rows_per_slot: float = 1.0

    @property
    def identity(self) -> str:
        """Of the inner view, and the length."""
        return f"{self.inner.identity} epoch_rows={self.epoch_rows}"

    @property
    def num_bytes(self) -> int:
        """Of the inner view."""
        return self.inner.num_bytes

    def num_slots(self, epoch: int) -> int:
        """``epoch_rows``; 0 where there is no row."""
        return self.epoch_rows if self.inner.num_slots(epoch) else 0

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots."""
        size = self.inner.num_slots(epoch)
        first, before = divmod(epoch * self.epoch_rows, max(size, 1))  # may exceed 64 bits
        passes, at = np.divmod(slots + before, max(size, 1))
        for number in np.unique(passes).tolist():
            of_pass = passes == number
            at[of_pass] = self.shuffle.order(self.inner, first + number).row_ids(at[of_pass])
        return self.inner.samples(at, epoch)


@dataclass(frozen=True)
class BalancedView:
    """Each class equally often, in every run of as many slots as there are classes.

    The classes are permuted in each run. A class takes its rows in a permuted order, and all of
    them before one is repeated, over epochs too.

    Args:
        inner: rows, one a slot.
        rows: the slots of the inner view, class by class; see `class_table`.
        starts: where each class begins among them, and their number at the end.
        name: of the label, for the identity.
        epoch_rows: slots of an epoch; the rest of a division by the number of classes is left out.
        shuffle: whether classes and rows are permuted.
    """

    inner: SlotView
    rows: Numbers = field(repr=False)
    starts: Numbers = field(repr=False)
    name: str
    epoch_rows: int
    shuffle: Shuffle
    orders_rows: bool = True
    epochs: Epochs = "same size"
    rows_per_slot: float = 1.0

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.starts) - 1

    @property
    def identity(self) -> str:
        """Of the inner view, the label and the length."""
        return f"{self.inner.identity} per_class={self.name!r} epoch_rows={self.epoch_rows}"

    @property
    def num_bytes(self) -> int:
        """Four bytes a row, and those of the inner view."""
        return self.inner.num_bytes + self.rows.values.nbytes + self.starts.values.nbytes

    def num_slots(self, epoch: int) -> int:
        """The largest multiple of the number of classes that is at most ``epoch_rows``."""
        return self._cycles * self.num_classes

    @property
    def _cycles(self) -> int:
        return self.epoch_rows // self.num_classes if self.num_classes else 0

    def first_cycle(self, epoch: int) -> int:
        """The runs of all classes that the epochs before have given."""
        return epoch * self._cycles % _MOST_CYCLES

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots."""
        cycles, classes = np.divmod(slots, max(self.num_classes, 1))
        cycles += self.first_cycle(epoch)
        if self.shuffle.shuffle and len(slots):
            order = Permutation(
                self.num_classes, seed=self.shuffle.seed, epoch=0, stream=_STREAM_CLASSES
            )
            classes = order.apply(classes, cycles)
        starts = self.starts.values[classes]
        sizes = self.starts.values[classes + 1] - starts
        passes, at = np.divmod(cycles, sizes)
        if self.shuffle.shuffle:
            at = self._permuted(at, passes, classes, sizes)
        return self.inner.samples(self.rows.values[starts + at].astype(np.int64), epoch)

    def _permuted(
        self, at: Int64Array, passes: Int64Array, classes: Int64Array, sizes: Int64Array
    ) -> Int64Array:
        """Permutes places inside classes.

        Classes whose sizes have equally many bits share a keyed permutation of a power of two;
        places beyond a class are permuted again, as in `Permutation`.
        """
        tweaks = passes * self.num_classes + classes
        bits = np.frexp((sizes - 1).astype(np.float64))[1]
        for width in np.unique(bits).tolist():
            order = Permutation(
                1 << width, seed=self.shuffle.seed, epoch=0, stream=_STREAM_CLASS_ROWS
            )
            lanes = np.flatnonzero(bits == width)
            while lanes.size:
                at[lanes] = order.apply(at[lanes], tweaks[lanes])
                lanes = lanes[at[lanes] >= sizes[lanes]]
        return at


@dataclass(frozen=True)
class SetTable:
    """The weights that hold from an epoch on, as training set them.

    Args:
        epoch: the first.
        digest: names all weights that were set until then.
        table, epoch_rows: see `WeightedView`.
    """

    epoch: int
    digest: str
    table: Numbers = field(repr=False, compare=False)
    epoch_rows: int


@dataclass(frozen=True)
class WeightedView:
    """Rows as often as their weights say.

    With replacement, each slot draws a row anew, with a probability that is proportional to its
    weight. Without, each epoch draws its rows anew, one after the other and none twice, each in
    proportion to the weights of those left: see `successive_sample`. They are numbered in the order
    of the inner view, and the job shuffles them.

    Its memory is 8 bytes a row. Without replacement it is 4 bytes more for each row of the last two
    epochs, in each process that reads, and the first slot of an epoch takes a pass over all rows.

    Args:
        inner: rows, one a slot.
        table: see `weight_table`; empty where there is no row.
        name: of the weights, for the identity.
        replacement: whether an epoch may take a row again.
        epoch_rows: slots of an epoch; without replacement at most the number of weights above 0.
        seed: of the draws.
        later: weights that training set, ascending by epoch; tables of earlier epochs are left out.
        first_epoch: the first one whose weights are known.

    Thread-safety: immutable, but for a cache. Threads may draw the same epoch twice.
    """

    inner: SlotView
    table: Numbers = field(repr=False)
    name: str
    replacement: bool
    epoch_rows: int
    seed: int
    epochs: Epochs = "same size"
    rows_per_slot: float = 1.0
    later: tuple[SetTable, ...] = ()
    first_epoch: int = 0
    _drawn: dict[int, npt.NDArray[np.unsignedinteger[Any]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": {}}

    @property
    def identity(self) -> str:
        """Of the inner view, the weights and how they are used."""
        how = "drawn" if self.replacement else "drawn once"  # other words for other draws
        told = f" set={self.later[-1].epoch}:{self.later[-1].digest}" if self.later else ""
        rows = f"epoch_rows={self.epoch_rows}"
        return f"{self.inner.identity} weights={self.name!r} {how} {rows}{told}"

    @property
    def orders_rows(self) -> bool:
        """With replacement: a draw has no order."""
        return self.replacement

    @property
    def num_bytes(self) -> int:
        """Eight bytes a row, those of the epochs that are kept, and those of the inner view."""
        drawn = sum(rows.nbytes for rows in list(self._drawn.values()))
        tables = (self.table, *(each.table for each in self.later))
        return self.inner.num_bytes + sum(each.values.nbytes for each in tables) + drawn

    def num_slots(self, epoch: int) -> int:
        """``epoch_rows``; 0 where there is no row."""
        return self._of(epoch)[1] if len(self.table) else 0

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots."""
        if not len(slots):
            return self.inner.samples(slots, epoch)
        if not self.replacement:
            return self.inner.samples(np.take(self._rows(epoch), slots).astype(np.int64), epoch)
        sums = self._of(epoch)[0].values
        words = splitmix64(slots.astype(np.uint64) + np.uint64(1), self._key(epoch))
        at = np.searchsorted(sums, _below(words, int(sums[-1])), side="right")
        return self.inner.samples(at, epoch)

    def _of(self, epoch: int) -> tuple[Numbers, int]:
        """The table of an epoch, and its slots."""
        for each in reversed(self.later):
            if each.epoch <= epoch:
                return each.table, each.epoch_rows
        return self.table, self.epoch_rows

    def _rows(self, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The slots of the inner view that an epoch without replacement has, ascending."""
        rows = self._drawn.get(epoch)
        if rows is None:
            table, count = self._of(epoch)
            rows = successive_sample(table.values, count, self._key(epoch))
            self._drawn[epoch] = rows
            for old in list(self._drawn)[:-_EPOCHS_KEPT]:
                self._drawn.pop(old, None)
        return rows

    def _key(self, epoch: int) -> int:
        text = f"weights seed={self.seed} epoch={epoch}"
        digest = hashlib.blake2b(text.encode("ascii"), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def class_table(
    labels: npt.NDArray[np.integer[Any]],
) -> tuple[npt.NDArray[np.unsignedinteger[Any]], Int64Array]:
    """The slots of each class, one class after the other, and where each class begins.

    Args:
        labels: class of each slot, from 0 up to the number of classes; shape ``(n,)``.

    Returns:
        Slots in 4 bytes (8 from 2**32 slots), shape ``(n,)``; starts, shape ``(classes + 1,)``.
    """
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels) if len(labels) else np.empty(0, np.int64)
    rows: npt.NDArray[np.unsignedinteger[Any]] = order.astype(
        np.uint32 if len(labels) < 2**32 else np.uint64
    )
    return rows, np.concatenate([[0], np.cumsum(counts)])


def weight_table(weights: Weights, *, replacement: bool) -> tuple[Int64Array, int, int]:
    """What a `WeightedView` draws by, and how many rows an epoch may have without replacement.

    Args:
        weights: of each slot; finite, at least 0, not all 0; shape ``(n,)``. Shares of the sum are
            exact to 2**-60.
        replacement: True: the table has the sums of the weights. False: it has the weights.

    Returns:
        The table: whole numbers, shape ``(n,)``. The sum of the weights by the largest one: of so
        many rows, each could have its share. And the number of weights above 0.
    """
    whole = _whole_weights(weights)
    if not len(whole):
        return whole, 0, 0
    even, positive = int(whole.sum()) // int(whole.max()), int(np.count_nonzero(whole))
    return np.cumsum(whole) if replacement else whole, even, positive


def _whole_weights(weights: Weights) -> Int64Array:
    """Weights as whole numbers with a sum below 2**63; those above 0 stay above 0.

    They are the weights, if these are whole and their sum is below 2**61. Others are scaled by a
    power of two.
    """
    if not len(weights):
        return np.empty(0, np.int64)
    if weights.dtype.kind in "iu" and weights.dtype.itemsize < 8:
        weights = weights.astype(np.int64)
    largest = float(weights.max())
    if weights.dtype.kind == "f" and largest < 2.0**53 and (weights == np.floor(weights)).all():
        weights = weights.astype(np.int64)
    # The sum, as weights of at most 31 bits have it.
    first = _SUM_BITS // 2 + 1 - math.frexp(largest)[1]
    bits = int(_scaled(weights, first).sum()).bit_length()
    shift = first + _SUM_BITS - bits
    if weights.dtype.kind != "f" and shift >= 0:
        return weights.astype(np.int64)
    whole: Int64Array = np.maximum(_scaled(weights, shift), weights > 0)
    return whole


def _scaled(weights: Weights, shift: int) -> Int64Array:
    """Weights times ``2**shift``, rounded down."""
    if weights.dtype.kind == "f":
        found = np.ldexp(weights, shift)
    else:
        found = weights << shift if shift >= 0 else weights >> -shift
    whole: Int64Array = found.astype(np.int64)
    return whole


def _below(words: npt.NDArray[np.uint64], bound: int) -> Int64Array:
    """Random words as numbers in ``[0, bound)``: the high halves of their products with it.

    Args:
        bound: at most 2**63.
    """
    half, mask = np.uint64(32), np.uint64(2**32 - 1)
    bound_high, bound_low = np.uint64(bound >> 32), np.uint64(bound & (2**32 - 1))
    high, low = words >> half, words & mask
    middle = low * bound_high
    middle += (low * bound_low) >> half
    carried = (high * bound_low + (middle & mask)) >> half
    found: Int64Array = (high * bound_high + (middle >> half) + carried).astype(np.int64)
    return found
