"""Rows of one group, such as a session or a sensor, as one sample. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_client.order.permutation import Int64Array
from cache_client.views.view import Epochs, Numbers, Samples, joined_ranges

_MAX_INT32 = 2**31 - 1


def group_table(
    row_ids: Int64Array, keys: pa.Array, times: pa.Array | None
) -> tuple[npt.NDArray[np.integer[Any]], Int64Array]:
    """Groups rows by a key.

    Groups are in the order in which they first appear in the rows. Rows without a key are a group,
    as in SQL. The rows of a group are in the order of their times. Those of one time keep the order
    in which they are given, and so do those without one, which are last.

    Args:
        row_ids: in any order; rows may repeat; shape ``(k,)``.
        keys: of these rows; any type that Arrow can make a dictionary of.
        times: of these rows; any type that Arrow can sort. None: the order in which they are given.

    Returns:
        The row ids of all groups, one group after the other; int32 if all fit, else int64. And the
        offsets of the groups among them, shape ``(groups + 1,)``.
    """
    encoded = pc.dictionary_encode(keys, null_encoding="encode")
    groups = encoded.indices.to_numpy()
    if times is None:
        order = np.argsort(groups, kind="stable")
    else:
        by_time = pc.array_sort_indices(times).to_numpy().astype(np.int64)
        order = by_time[np.argsort(groups[by_time], kind="stable")]
    counts = np.bincount(groups, minlength=len(encoded.dictionary))
    small = int(row_ids.max(initial=0)) <= _MAX_INT32
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return row_ids[order].astype(np.int32 if small else np.int64), offsets


def joint_key(columns: Sequence[pa.Array]) -> pa.Array:
    """One key of several columns: the same for rows that agree in all of them, nulls included.

    Args:
        columns: at least one; all of one length, of any type that Arrow can make a dictionary of.
    """
    key, *others = columns
    for each in others:
        joined = pc.dictionary_encode(key, null_encoding="encode").indices.to_numpy()
        encoded = pc.dictionary_encode(each, null_encoding="encode")
        both = joined.astype(np.int64) * len(encoded.dictionary) + encoded.indices.to_numpy()
        key = pa.array(both)
    return key


def window_ends(offsets: Int64Array, window: tuple[int, int]) -> Int64Array:
    """The number of windows up to the end of each group; shape ``(groups,)``.

    Args:
        offsets: as `group_table` makes them.
        window: pair of length and stride in rows, each at least 1.
    """
    length, stride = window
    counts = (np.diff(offsets) - length) // stride + 1
    return np.cumsum(np.maximum(counts, 0))


@dataclass(frozen=True)
class GroupsView:
    """Slot i has the rows of group i; with a window, those of the i-th window.

    Windows begin every ``stride`` rows of a group, and those that are not full are left out. They
    are numbered group by group.

    Its memory is 4 or 8 bytes a row and 8 bytes a group, and 8 more with a window.

    Args:
        row_ids, offsets: as `group_table` makes them.
        identity: which rows are grouped, and how.
        window: pair of length and stride in rows, each at least 1; None: whole groups.
        ends: as `window_ends` makes them; None: whole groups.

    Thread-safety: immutable.
    """

    row_ids: Numbers
    offsets: Numbers
    identity: str
    window: tuple[int, int] | None = None
    ends: Numbers | None = None
    orders_rows: bool = field(init=False, default=False)
    epochs: Epochs = field(init=False, default="same rows")

    @property
    def num_bytes(self) -> int:
        """Bytes of the row ids, and of the offsets of groups and windows."""
        windows = 0 if self.ends is None else self.ends.values.nbytes
        return self.row_ids.values.nbytes + self.offsets.values.nbytes + windows

    @property
    def rows_per_slot(self) -> float:
        """Rows of a window, or of a group on average."""
        if self.window is not None:
            return float(self.window[0])
        return len(self.row_ids) / max(1, len(self.offsets) - 1)

    def num_slots(self, epoch: int) -> int:
        """Windows, or groups."""
        if self.ends is None:
            return len(self.offsets) - 1
        return int(self.ends.values[-1]) if len(self.ends) else 0

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of each window or group."""
        offsets = self.offsets.values
        if self.ends is None or self.window is None:
            starts = offsets[slots]
            lengths = offsets[slots + 1] - starts
        else:
            ends, (length, stride) = self.ends.values, self.window
            groups = np.searchsorted(ends, slots, side="right")
            of_group = offsets[groups + 1] - offsets[groups]
            first_slots = ends[groups] - ((of_group - length) // stride + 1)
            starts = offsets[groups] + (slots - first_slots) * stride
            lengths = np.full(len(slots), length)
        rows = self.row_ids.values[joined_ranges(starts.astype(np.int64, copy=False), lengths)]
        return Samples(rows.astype(np.int64), lengths)
