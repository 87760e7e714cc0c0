"""The order of an epoch: which rows each rank trains on in which step. Pure.

The cache serves random rows by id, so there is no shuffle buffer and no stored permutation: a row
id is computed from its position. Everything here depends only on ``(num_rows, seed, epoch)`` and on
the caller's rank and step. So every process of a job computes the same order without communication,
and a state of constant size resumes it with another world size, batch size or number of workers.

This module knows nothing about datasets, nodes, tensors, processes or the environment. It does no
I/O. Every class is immutable, so instances may be shared between threads, pickled and compared.

Words: a *position* is a place in the order of the epoch, a *row id* a place in the dataset version;
both are int64 in ``[0, num_rows)``. Ranges are half-open.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cache_client.order.permutation import (
    MAX_ROWS,
    Int64Array,
    Permutation,
    checked_integer,
    checked_positions,
)

SHUFFLE_WINDOW_BLOCKS: Final = 32
"""Blocks whose rows are mixed with one another when ``shuffle_block_size`` is given."""

_STREAM_BLOCKS: Final = 1
_STREAM_WINDOWS: Final = 2

_Move = Callable[[Permutation, Int64Array, Int64Array], Int64Array]
"""`Permutation.apply` or `Permutation.invert`, with tweaks."""


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch: position p -> row id pi(p), a bijection on ``[0, num_rows)``.

    Without ``shuffle`` it is the identity. With it, pi is a `Permutation` of all rows. With
    ``shuffle_block_size=b`` the rows are cut into blocks of b consecutive row ids (the last may be
    short), the blocks are permuted into slots, and the rows of every `SHUFFLE_WINDOW_BLOCKS`
    consecutive slots are permuted among themselves. A reader then touches few blocks at a time: for
    datasets on disk.

    Args:
        num_rows: rows N of the dataset version, ``0 <= N <= 2**62``.
        shuffle: whether the order is permuted.
        shuffle_block_size: rows b in a block, at least 1, or None for a shuffle of single rows.
        seed: any integer.
        epoch: any integer, at least 0.
        skipped: half-open runs of positions to leave out, ascending, without overlaps. The other
            positions are numbered anew, so `row_ids` takes those in ``[0, num_left)``.
        groups: rows of each group of consecutive rows, which are all rows: the rows of a group are
            permuted among themselves, and the groups keep their order. So more groups at the end
            change nothing before them. Empty: all rows are one group.

    Raises:
        ValueError: an argument is out of range, or a block size or groups without ``shuffle``;
            quotes it.

    Thread-safety: immutable.
    """

    num_rows: int
    shuffle: bool = field(kw_only=True)
    shuffle_block_size: int | None = field(kw_only=True, default=None)
    seed: int = field(kw_only=True, default=0)
    epoch: int = field(kw_only=True, default=0)
    skipped: tuple[tuple[int, int], ...] = field(kw_only=True, default=())
    groups: tuple[int, ...] = field(kw_only=True, default=())
    _mapping: "_Mapping | None" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_rows = checked_integer("num_rows", self.num_rows, 0, MAX_ROWS)
        seed, epoch = checked_integer("seed", self.seed), checked_integer("epoch", self.epoch, 0)
        block_size = checked_shuffle(self.shuffle, self.shuffle_block_size)
        before = 0
        for start, stop in self.skipped:
            if not before <= start < stop <= num_rows:
                raise ValueError(f"skipped must be ascending runs of positions, got {self.skipped}")
            before = stop
        if self.groups and (not self.shuffle or sum(self.groups) != num_rows):
            raise ValueError(
                f"groups need shuffle=True and num_rows={num_rows} rows in all, got {self.groups}"
            )
        mapping: _Mapping | None = None
        if self.groups:
            mapping = _GroupShuffle(self.groups, block_size, seed=seed, epoch=epoch)
        elif block_size is not None and num_rows:
            mapping = _BlockShuffle(num_rows, block_size, seed=seed, epoch=epoch)
        elif self.shuffle:
            mapping = Permutation(num_rows, seed=seed, epoch=epoch)
        object.__setattr__(self, "_mapping", mapping)

    @property
    def num_left(self) -> int:
        """Rows without the skipped ones."""
        return self.num_rows - sum(stop - start for start, stop in self.skipped)

    def in_epoch(self, positions: Int64Array) -> Int64Array:
        """Return where positions in ``[0, num_left)`` are among all positions of the epoch."""
        if not self.skipped:
            return positions
        runs = np.array(self.skipped, np.int64)
        gaps = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
        index = np.searchsorted(runs[:, 0] - gaps[:-1], positions, side="right")
        found: Int64Array = positions + gaps[index]
        return found

    def row_ids(self, positions: Int64Array) -> Int64Array:
        """Return pi of every position.

        Args:
            positions: integers in ``[0, num_left)``, shape ``(k,)``, in any order; not modified.

        Returns:
            A new int64 array of shape ``(k,)``.

        Raises:
            ValueError: wrong dtype or shape, or a position outside ``[0, num_left)``; quotes it.
        """
        if self.skipped:
            positions = self.in_epoch(checked_positions(positions, self.num_left))
        if self._mapping is None:
            return checked_positions(positions, self.num_rows).copy()
        return self._mapping.apply(positions)

    def positions(self, row_ids: Int64Array) -> Int64Array:
        """Return where rows are among all positions of the epoch, the skipped ones too.

        The inverse of `row_ids`: ``positions(row_ids(p)) == in_epoch(p)``.

        Args:
            row_ids: integers in ``[0, num_rows)``, shape ``(k,)``, in any order; not modified.

        Returns:
            A new int64 array of shape ``(k,)``.

        Raises:
            ValueError: wrong dtype or shape, or a row outside ``[0, num_rows)``; quotes it.
        """
        if self._mapping is None:
            return checked_positions(row_ids, self.num_rows).copy()
        return self._mapping.invert(row_ids)


class _GroupShuffle:
    """Groups of consecutive rows; the rows of each are permuted among themselves."""

    def __init__(
        self, groups: tuple[int, ...], block_size: int | None, *, seed: int, epoch: int
    ) -> None:
        self._starts = np.cumsum([0, *groups], dtype=np.int64)
        # Another seed for each group; those of two seeds below 2**32 never meet.
        self._orders = [
            EpochOrder(
                checked_integer("groups", size, 0, MAX_ROWS),
                shuffle=True,
                shuffle_block_size=block_size,
                seed=(seed << 32) + number,
                epoch=epoch,
            )
            for number, size in enumerate(groups)
        ]

    def apply(self, positions: Int64Array) -> Int64Array:
        return self._in_groups(positions, EpochOrder.row_ids)

    def invert(self, row_ids: Int64Array) -> Int64Array:
        return self._in_groups(row_ids, EpochOrder.positions)

    def _in_groups(
        self, values: Int64Array, move: Callable[["EpochOrder", Int64Array], Int64Array]
    ) -> Int64Array:
        values = checked_positions(values, int(self._starts[-1]))
        group_of = np.searchsorted(self._starts, values, side="right") - 1
        found = np.empty(values.shape, np.int64)
        for group in np.unique(group_of).tolist():
            lanes, start = group_of == group, self._starts[group]
            found[lanes] = move(self._orders[group], values[lanes] - start) + start
        return found


class _BlockShuffle:
    """Blocks permuted into slots, then rows permuted inside windows of slots. ``num_rows >= 1``.

    Slot j holds block sigma(j). All slots are b rows wide but one: the last block, if short, sits
    in slot s = sigma^-1(last), and positions behind it are shifted by the ``gap`` of rows it lacks.
    Windows of one length share a `Permutation`, tweaked by the window's number, so the cost of a
    call hardly depends on how many windows it touches.
    """

    def __init__(self, num_rows: int, block_size: int, *, seed: int, epoch: int) -> None:
        self._num_rows = num_rows
        self._block_size = min(block_size, num_rows)
        num_blocks = -(-num_rows // self._block_size)
        self._gap = num_blocks * self._block_size - num_rows
        self._slots = Permutation(num_blocks, seed=seed, epoch=epoch, stream=_STREAM_BLOCKS)
        self._short_slot = int(self._slots.invert(np.array([num_blocks - 1]))[0])
        # Capped so that it fits int64 for every block size; one window then holds everything.
        self._window_rows = min(SHUFFLE_WINDOW_BLOCKS, num_blocks) * self._block_size

        def rows_of(window: int) -> Permutation:
            stop = min((window + 1) * SHUFFLE_WINDOW_BLOCKS, num_blocks)
            size = self._slot_start(stop) - self._slot_start(window * SHUFFLE_WINDOW_BLOCKS)
            return Permutation(size, seed=seed, epoch=epoch, stream=_STREAM_WINDOWS)

        # All windows have the same length, except the one with the short slot and the last one.
        irregular = {self._short_slot // SHUFFLE_WINDOW_BLOCKS} if self._gap else set()
        if num_blocks % SHUFFLE_WINDOW_BLOCKS:
            irregular.add(num_blocks // SHUFFLE_WINDOW_BLOCKS)
        self._irregular = {window: rows_of(window) for window in sorted(irregular)}
        regular_rows = min(self._window_rows, num_rows)  # above num_rows, no window is regular
        self._regular = Permutation(regular_rows, seed=seed, epoch=epoch, stream=_STREAM_WINDOWS)

    def apply(self, positions: Int64Array) -> Int64Array:
        positions = checked_positions(positions, self._num_rows)
        if not positions.size:
            return positions.copy()
        in_slots = self._in_slots(self._in_windows(positions, Permutation.apply))
        slot = in_slots // self._block_size
        in_slots -= slot * self._block_size
        block = self._blocks_in(slot)
        block *= self._block_size
        block += in_slots
        return block

    def invert(self, row_ids: Int64Array) -> Int64Array:
        row_ids = checked_positions(row_ids, self._num_rows)
        if not row_ids.size:
            return row_ids.copy()
        block = row_ids // self._block_size
        slot = self._slots.invert(block)
        mixed = slot * self._block_size
        mixed += row_ids - block * self._block_size
        if self._gap:
            mixed[slot > self._short_slot] -= self._gap
        return self._in_windows(mixed, Permutation.invert)

    def _in_windows(self, positions: Int64Array, move: _Move) -> Int64Array:
        """Move positions inside their windows; a new array."""
        window = self._in_slots(positions)
        window //= self._window_rows
        start = window * self._window_rows
        if self._gap:
            start[window * SHUFFLE_WINDOW_BLOCKS > self._short_slot] -= self._gap
        moved = self._mix_rows(positions - start, window, move)
        moved += start
        return moved

    def _slot_start(self, slot: int) -> int:
        return slot * self._block_size - (self._gap if slot > self._short_slot else 0)

    def _in_slots(self, positions: Int64Array) -> Int64Array:
        """Positions on an axis where every slot is a full block wide; a new array."""
        shifted = positions.copy()
        if self._gap:
            stop = self._short_slot * self._block_size + self._block_size - self._gap
            shifted[positions >= stop] += self._gap
        return shifted

    def _mix_rows(self, offsets: Int64Array, window: Int64Array, move: _Move) -> Int64Array:
        """Move each offset within its window."""
        first, last = int(window.min()), int(window.max())
        met = [number for number in self._irregular if first <= number <= last]
        if not met:
            return move(self._regular, offsets, window)
        if first == last:
            return move(self._irregular[first], offsets, window)
        mixed = np.empty_like(offsets)
        regular = np.ones(offsets.shape, np.bool_)
        for number in met:
            lanes = window == number
            mixed[lanes] = move(self._irregular[number], offsets[lanes], window[lanes])
            regular &= ~lanes
        mixed[regular] = move(self._regular, offsets[regular], window[regular])
        return mixed

    def _blocks_in(self, slot: Int64Array) -> Int64Array:
        """The block in each slot. Neighbouring positions share slots, so compute each slot once."""
        first, last = int(slot.min()), int(slot.max())
        if last - first >= slot.size:
            return self._slots.apply(slot)
        return self._slots.apply(np.arange(first, last + 1, dtype=np.int64))[slot - first]


_Mapping = Permutation | _BlockShuffle | _GroupShuffle


@dataclass(frozen=True)
class StepPlan:
    """Which positions each rank takes in each step of an epoch, or of the rest of it.

    With G = world_size * batch_size and C = rows_consumed, step t covers positions
    ``[C + t*G, min(C + (t+1)*G, N))``. Every rank has the same number of steps.

    Args:
        num_rows: rows N of the dataset version.
        world_size: number of ranks W, at least 1.
        batch_size: rows B of a rank in a full step, at least 1.
        drop_last: leave out the last step if it has fewer than G rows.
        pad: give every rank B positions in the last step too; see `positions` and `num_padded`.
        rows_consumed: rows C of this epoch that all ranks together have consumed before step 0.

    Raises:
        ValueError: an argument is out of range; quotes it.

    Thread-safety: immutable.
    """

    num_rows: int
    world_size: int
    batch_size: int
    drop_last: bool = field(kw_only=True, default=False)
    pad: bool = field(kw_only=True, default=False)
    rows_consumed: int = field(kw_only=True, default=0)

    def __post_init__(self) -> None:
        set_integer(self, "num_rows", 0, MAX_ROWS)
        set_integer(self, "world_size", 1)
        set_integer(self, "batch_size", 1)
        _boolean("drop_last", self.drop_last)
        _boolean("pad", self.pad)
        set_integer(self, "rows_consumed", 0)
        if self.rows_consumed > self.num_rows:
            raise ValueError(
                f"rows_consumed must be at most num_rows={self.num_rows}, got {self.rows_consumed}"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows G of all ranks together in a full step."""
        return self.world_size * self.batch_size

    @property
    def num_steps(self) -> int:
        """Steps left in this epoch, the same for every rank."""
        rows = self.num_rows - self.rows_consumed
        return rows // self.rows_per_step if self.drop_last else -(-rows // self.rows_per_step)

    def positions(self, step: int, rank: int) -> range:
        """Return the run of positions that a rank trains on in a step; not empty without ``pad``.

        In a full step, rank r takes the r-th run of B. In the last, short step of R rows it takes
        ``[R*r//W, R*(r+1)//W)`` of the step; if that is empty (possible only if R < W), position
        ``r mod R`` of the step, the only rows an epoch ever repeats.

        With ``pad`` rank r takes the r-th run of B in the last step as well, as far as there are
        rows. The rest of its batch are repeated rows, which `window` adds.

        Raises:
            ValueError: step outside ``[0, num_steps)``, or rank outside ``[0, world_size)``.
        """
        if not 0 <= checked_integer("step", step) < self.num_steps:
            raise ValueError(f"step must be in [0, {self.num_steps}), got {step}")
        if not 0 <= checked_integer("rank", rank) < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank}")
        start = self.rows_consumed + step * self.rows_per_step
        rows = min(self.rows_per_step, self.num_rows - start)
        if self.pad:
            first = min(rank * self.batch_size, rows)
            return range(start + first, start + min(first + self.batch_size, rows))
        # The rule for the short step gives runs of exactly B in a full one.
        first = rows * rank // self.world_size
        last = rows * (rank + 1) // self.world_size
        if first == last:
            first = rank % rows
            last = first + 1
        return range(start + first, start + last)

    def places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the step and the rank that take each position: the inverse of `positions`.

        A row that a short step repeats counts where it comes first.

        Args:
            positions: in ``[rows_consumed, num_rows)``, shape ``(k,)``.

        Returns:
            Two int64 arrays of shape ``(k,)``; -1 in both for rows that ``drop_last`` leaves out.
        """
        steps, within = np.divmod(positions - self.rows_consumed, self.rows_per_step)
        ranks = within // self.batch_size
        left = (self.num_rows - self.rows_consumed) % self.rows_per_step
        is_last = steps == (self.num_rows - self.rows_consumed) // self.rows_per_step
        if not self.pad and left:
            ranks[is_last] = ((within[is_last] + 1) * self.world_size - 1) // left
        if self.drop_last:
            steps[is_last] = ranks[is_last] = -1
        return steps, ranks

    def rows_consumed_after(self, steps: int) -> int:
        """Return the rows of the epoch that are consumed after the first ``steps`` steps.

        After the last step these are all ``num_rows``, also where ``drop_last`` leaves rows over
        and where the plan has no steps at all: nothing of the epoch is left.

        Raises:
            ValueError: ``steps`` outside ``[0, num_steps]``; quoted.
        """
        if not 0 <= checked_integer("steps", steps) <= self.num_steps:
            raise ValueError(f"steps must be in [0, {self.num_steps}], got {steps}")
        if steps == self.num_steps:
            return self.num_rows
        return self.rows_consumed + steps * self.rows_per_step

    def window(self, steps: range, rank: int) -> tuple[Int64Array, list[int]]:
        """Return the positions of a rank in several steps, joined, and how many each step has.

        With ``pad``, each step has B. The missing ones are the first of the epoch's order again.

        Raises:
            ValueError: as `positions`.
        """
        if not steps:
            return np.empty(0, np.int64), []
        last = self.positions(steps[-1], rank)  # the only one that may be short
        if self.pad:
            return self._padded_window(steps, rank, len(last))
        if len(steps) == 1:  # a batch may be longer than memory where no step is full
            return np.arange(last.start, last.stop, dtype=np.int64), [len(last)]
        first = self.positions(steps[0], rank).start
        starts = first + np.arange(len(steps) - 1, dtype=np.int64) * (
            steps.step * self.rows_per_step
        )
        full = starts[:, None] + np.arange(self.batch_size, dtype=np.int64)
        joined = np.concatenate([full.reshape(-1), np.arange(last.start, last.stop)])
        return joined, [self.batch_size] * (len(steps) - 1) + [len(last)]

    def num_padded(self, step: int, rank: int) -> int:
        """Return how many repeated rows end the batch of a rank in a step; 0 without ``pad``."""
        return self.batch_size - len(self.positions(step, rank)) if self.pad else 0

    def _padded_window(self, steps: range, rank: int, in_last: int) -> tuple[Int64Array, list[int]]:
        starts = self.rows_consumed + np.array(steps, np.int64) * self.rows_per_step
        batches = starts[:, None] + np.arange(self.batch_size) + rank * self.batch_size
        if in_last < self.batch_size:
            repeated = np.arange(self.batch_size - in_last, dtype=np.int64) % self.num_rows
            batches[-1, in_last:] = repeated
        return batches.reshape(-1), [self.batch_size] * len(steps)


def worker_steps(num_steps: int, worker: int, num_workers: int) -> range:
    """Return the steps that DataLoader worker ``worker`` of ``num_workers`` yields.

    Worker w of n yields steps w, w + n, w + 2n, ... The DataLoader takes batches from the workers
    round-robin, which restores the order of the steps.

    Raises:
        ValueError: an argument is out of range; quotes it.
    """
    checked_integer("num_steps", num_steps, 0)
    checked_integer("num_workers", num_workers, 1)
    if not 0 <= checked_integer("worker", worker) < num_workers:
        raise ValueError(f"worker must be in [0, {num_workers}), got {worker}")
    return range(worker, num_steps, num_workers)


def step_windows(steps: range, size: int | Callable[[], int]) -> Iterator[range]:
    """Cut steps into runs of ``size``, or of what it says each time; the last may be shorter."""
    while steps:
        stop = size if isinstance(size, int) else size()
        yield steps[:stop]
        steps = steps[stop:]


def runs_of_steps(steps: Iterable[int], plan: StepPlan) -> tuple[tuple[int, int], ...]:
    """Return the positions of steps of a whole epoch, as joined runs.

    Raises:
        ValueError: a step outside ``[0, plan.num_steps)``; quoted.
    """
    runs: list[tuple[int, int]] = []
    for step in sorted({checked_integer("step", step, 0, plan.num_steps - 1) for step in steps}):
        start = step * plan.rows_per_step
        stop = min(start + plan.rows_per_step, plan.num_rows)
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return tuple(runs)


def set_integer(
    instance: object, name: str, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Check an integer field of a frozen instance; set and return it as an int."""
    number = checked_integer(name, getattr(instance, name), minimum, maximum)
    object.__setattr__(instance, name, number)
    return number


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def checked_shuffle(shuffle: object, block_size: object) -> int | None:
    """Check the two options together; return the block size."""
    if block_size is None:
        _boolean("shuffle", shuffle)
        return None
    checked = checked_integer("shuffle_block_size", block_size, 1)
    if not _boolean("shuffle", shuffle):
        raise ValueError(f"shuffle_block_size needs shuffle=True, got {checked} with shuffle=False")
    return checked
