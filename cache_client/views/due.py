"""What an epoch of each view owes, and the rows of its steps. Pure.

`due_of` says how often rows come; a test compares it with all slots of every view. `samples_of` is
the order in which they come: training and ``cachectl rows`` both call it.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_client.order.due import MOST_SHARES, Due, Share
from cache_client.order.erased import NO_ROWS
from cache_client.order.order import EpochOrder, StepPlan
from cache_client.order.permutation import Int64Array
from cache_client.views.amended import AmendedView
from cache_client.views.filled import FilledView
from cache_client.views.groups import GroupsView
from cache_client.views.length_buckets import LengthBucketsView
from cache_client.views.mixture_view import MixtureView
from cache_client.views.packing import PackingView
from cache_client.views.rows_view import RestView, RowsView
from cache_client.views.sampling import BalancedView, EpochRowsView, WeightedView
from cache_client.views.view import LoggedView, PlainView, Samples, SlotView

_MANY = 4  # times as many rows as are listed: then counting takes more memory than sorting


def samples_of(
    view: SlotView,
    plan: StepPlan,
    order: EpochOrder,
    steps: range,
    rank: int,
    left_out: Int64Array = NO_ROWS,
) -> tuple[Int64Array, list[int], Samples, list[int]]:
    """What a rank is given in some steps.

    Args:
        view: of the job.
        plan, order: of the pass.
        left_out: rows that were erased since the view was made; ascending.

    Returns:
        The slots of all steps, joined; slots of each step; the rows of these slots, and how many
        slots of each step have rows.
    """
    positions, sizes = plan.window(steps, rank)
    slots = order.row_ids(positions)
    samples, left = view.samples(slots, order.epoch), sizes
    if len(left_out):
        samples, left = samples.without(left_out, sizes)
    return slots, sizes, samples.shared(left), left


@singledispatch
def due_of(view: SlotView, epoch: int, num_rows: int) -> Due:
    """What an epoch owes.

    Args:
        view: of the job.
        epoch: at least 0.
        num_rows: of the version; of a mixture, each source knows its own.
    """
    raise TypeError(f"what {type(view).__name__} owes is not known")


@due_of.register
def _(view: PlainView, epoch: int, num_rows: int) -> Due:
    return Due(rows=num_rows, of=num_rows)


@due_of.register
def _(view: RestView, epoch: int, num_rows: int) -> Due:
    return Due(rows=len(view.rest), of=num_rows)


@due_of.register
def _(view: LoggedView, epoch: int, num_rows: int) -> Due:
    return Due(of=view.log.total)  # None while the load does not know it


@due_of.register
def _(view: FilledView, epoch: int, num_rows: int) -> Due:
    inner, size = due_of(view.inner, epoch, num_rows), view.num_slots(epoch)
    return Due(rows=size, of=num_rows) if inner.is_distinct else _counted(view, epoch, num_rows)


@due_of.register
def _(view: AmendedView, epoch: int, num_rows: int) -> Due:
    if epoch != view.epoch:
        return due_of(view.latest, epoch, num_rows)
    if view.is_distinct:
        return Due(rows=view.num_slots(epoch), of=num_rows)
    return _counted(view, epoch, num_rows)


def _counted(view: SlotView, epoch: int, num_rows: int) -> Due:
    size = view.num_slots(epoch)
    rows, least, most = _listed(view.samples(np.arange(size, dtype=np.int64), epoch).row_ids)
    return Due(unit="sample", rows=rows, of=num_rows, least=least, most=most)


@due_of.register
def _(view: RowsView, epoch: int, num_rows: int) -> Due:
    rows, least, most = len(view.numbers), 1, 1
    if len(view.firsts) <= 1:  # else the rows ascend
        rows, least, most = _listed(view.numbers.values)
    unit = "row" if most == 1 else "sample"
    return Due(unit=unit, rows=rows, of=num_rows, least=least, most=most)


@due_of.register
def _(view: EpochRowsView, epoch: int, num_rows: int) -> Due:
    size, count = view.inner.num_slots(epoch), view.num_slots(epoch)
    least, most = (0, 0) if not count else _times(epoch * count, count, size)
    if count and not view.shuffle.shuffle and not view.inner.orders_rows:
        least, most = count // size, -(-count // size)  # passes have one order
    return due_of(view.inner, epoch, num_rows).times(least, most, "sample")


@due_of.register
def _(view: BalancedView, epoch: int, num_rows: int) -> Due:
    inner = due_of(view.inner, epoch, num_rows)
    cycles = view.num_slots(epoch) // max(1, view.num_classes)
    if not cycles:
        return inner.times(0, 0, "sample")
    sizes = np.unique(np.diff(view.starts.values)).tolist()
    found = [_times(view.first_cycle(epoch), cycles, size) for size in sizes if size]
    return inner.times(min(each[0] for each in found), max(each[1] for each in found), "sample")


@due_of.register
def _(view: WeightedView, epoch: int, num_rows: int) -> Due:
    inner = due_of(view.inner, epoch, num_rows)
    return inner.times(0, None if view.replacement else 1, "draw")


@due_of.register
def _(view: LengthBucketsView, epoch: int, num_rows: int) -> Due:
    return due_of(view.inner, epoch, num_rows)


@due_of.register
def _(view: PackingView, epoch: int, num_rows: int) -> Due:
    least = 0 if view.long == "drop" else 1
    return due_of(view.inner, epoch, num_rows).times(least, 1, "sequence")


@due_of.register
def _(view: GroupsView, epoch: int, num_rows: int) -> Due:
    rows, least, most = _listed(view.row_ids.values)
    found = Due(unit="group", rows=rows, of=num_rows, least=least, most=most)
    if view.window is None:
        return found
    length, stride = view.window
    return found.times(0, -(-length // stride), "window")


@due_of.register
def _(view: MixtureView, epoch: int, num_rows: int) -> Due:
    mixing = view.mixing
    starts = mixing.counts(mixing.epoch_start(epoch))
    stops = mixing.counts(mixing.epoch_start(epoch + 1))
    shares = []
    for source, size, start, stop in zip(view.sources, mixing.rows, starts, stops, strict=True):
        least, most = (0, 0) if start == stop else _times(start, stop - start, size)
        of_pass = due_of(source.view, start // size, source.num_rows)
        shares.append(Share(source.name, stop - start, of_pass.times(least, most)))
    rows = sum(source.num_rows for source in view.sources)
    named = tuple(shares) if len(shares) <= MOST_SHARES else ()
    return Due(unit="sample", rows=rows, of=rows, least=0, most=None, shares=named)


def _times(start: int, count: int, size: int) -> tuple[int, int]:
    """How often each of ``size`` slots comes, at least and at most, in a part of joined passes.

    Args:
        start, count: of the part; at least one slot.
        size: of a pass; each has another order.
    """
    before, after = start % size, -(start + count) % size
    passes = (before + count + after) // size
    whole = passes - bool(before) - bool(after) if passes > 1 else int(count == size)
    return whole, passes


def _listed(numbers: npt.NDArray[np.integer[Any]]) -> tuple[int, int, int]:
    """How many different numbers a list has; how often each comes, at least and at most."""
    if not len(numbers):
        return 0, 1, 1
    if bool((numbers[1:] > numbers[:-1]).all()):
        return len(numbers), 1, 1
    if int(numbers.max()) < _MANY * len(numbers):
        counts = np.bincount(numbers)
        counts = counts[counts > 0]
    else:
        counts = np.unique(numbers, return_counts=True)[1]
    return len(counts), int(counts.min()), int(counts.max())
