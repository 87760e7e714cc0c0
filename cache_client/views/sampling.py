"""Weights, classes, epoch lengths: rows that come more or less often than once. Pure.

All of them compute the row of a slot by random access. Classes and short epochs continue where the
epoch before ended, so that no row is left out for long.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array, Permutation, splitmix64
from cache_client.views.view import Epochs, Numbers, Samples, Shuffle, SlotView

# Of the largest weight, and of the sum: weights are whole numbers, so that sums are exact.
_WEIGHT_BITS: Final = 31
_MAX_SUM_BITS: Final = 61
_MOST_CYCLES: Final = 2**61  # runs of classes in all epochs; then they begin anew
# Streams of `Permutation` and of random words; `cache_client.order.order` has others.
_STREAM_CLASSES, _STREAM_CLASS_ROWS, _STREAM_WEIGHTS = 16, 17, 18


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
class WeightedView:
    """Rows as often as their weights say.

    With replacement, each slot draws a row anew, with a probability that is proportional to its
    weight. Without, an epoch takes each row at most once: systematic sampling (Madow, 1949), which
    makes the probability that an epoch has a row exactly proportional to its weight. The rows lie
    side by side on a line, in a permuted order and as long as their weights. The epoch takes the
    rows at ``epoch_rows`` points of equal distance; the first point is random.

    Args:
        inner: rows, one a slot.
        ends: sums of the weights, see `weight_table`; empty where there is no row.
        name: of the weights, for the identity.
        replacement: whether an epoch may take a row again.
        epoch_rows: slots of an epoch; without replacement at most what `weight_table` says.
        seed: of the draws, and of the order in which the rows lie.
    """

    inner: SlotView
    ends: Numbers = field(repr=False)
    name: str
    replacement: bool
    epoch_rows: int
    seed: int
    epochs: Epochs = "same size"
    rows_per_slot: float = 1.0

    @property
    def identity(self) -> str:
        """Of the inner view, the weights and how they are used."""
        return (
            f"{self.inner.identity} weights={self.name!r} replacement={self.replacement} "
            f"epoch_rows={self.epoch_rows}"
        )

    @property
    def orders_rows(self) -> bool:
        """With replacement: a draw has no order."""
        return self.replacement

    @property
    def num_bytes(self) -> int:
        """Eight bytes a row, and those of the inner view."""
        return self.inner.num_bytes + self.ends.values.nbytes

    def num_slots(self, epoch: int) -> int:
        """``epoch_rows``; 0 where there is no row."""
        return self.epoch_rows if len(self.ends) else 0

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots."""
        if not len(slots):
            return self.inner.samples(slots, epoch)
        total = int(self.ends.values[-1])
        if self.replacement:
            points = (_uniform(slots, self.seed, epoch) * total).astype(np.int64)
            np.minimum(points, total - 1, out=points)
        else:
            # floor((slot * total + first) / epoch_rows), whose product would not fit 64 bits
            distance, rest = divmod(total, self.epoch_rows)
            first = int(_uniform(np.zeros(1, np.int64), self.seed, epoch)[0] * total)
            points = slots * distance + (slots * rest + first) // self.epoch_rows
        at = np.searchsorted(self.ends.values, points, side="right")
        if not self.replacement:
            at = _row_order(len(self.ends), self.seed).apply(at)
        return self.inner.samples(at, epoch)


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


def weight_table(
    weights: npt.NDArray[np.float64], *, replacement: bool, seed: int
) -> tuple[Int64Array, int]:
    """The sums of whole weights, and the most rows of an epoch without replacement.

    Args:
        weights: of each slot; finite, at least 0, not all 0; shape ``(n,)``. Their ratios are exact
            to 2**-31 of the largest one.
        replacement: False: the slots are permuted first.
        seed: of the permutation.
    """
    whole = _whole_weights(weights)
    if not len(whole):
        return whole, 0
    if not replacement:
        whole = whole[_row_order(len(whole), seed).apply(np.arange(len(whole)))]
    return np.cumsum(whole), int(whole.sum()) // int(whole.max())


def _row_order(size: int, seed: int) -> Permutation:
    return Permutation(size, seed=seed, epoch=0, stream=_STREAM_WEIGHTS)


def _whole_weights(weights: npt.NDArray[np.float64]) -> Int64Array:
    """Weights as whole numbers, whose sums are exact; those above 0 stay above 0."""
    if not len(weights):
        return np.empty(0, np.int64)
    largest = float(weights.max())
    bits = min(_WEIGHT_BITS, _MAX_SUM_BITS - len(weights).bit_length())
    if largest >= 2.0**bits or not np.array_equal(weights, np.floor(weights)):
        weights = np.where(weights > 0, np.maximum(weights / largest * 2.0**bits, 1.0), 0.0)
    whole: Int64Array = np.rint(weights).astype(np.int64)
    return whole


def _uniform(slots: Int64Array, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """A random number in [0, 1) for each slot."""
    text = f"weights seed={seed} epoch={epoch}"
    key = hashlib.blake2b(text.encode("ascii"), digest_size=8).digest()
    words = splitmix64(slots.astype(np.uint64) + np.uint64(1), int.from_bytes(key, "little"))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
