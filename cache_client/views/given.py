"""Where rows stand in an epoch: the inverse of a view and its order. Pure."""

from __future__ import annotations

import numpy as np

from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array
from cache_client.views.amended import AmendedView
from cache_client.views.rows_view import RestView
from cache_client.views.view import PlainView, SlotView

_AT_ONCE = 2**20  # slots


def positions_of(
    view: SlotView, order: EpochOrder, rows: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Where rows stand in an epoch, as often as it has them.

    For the plain read and for amended epochs it costs a permutation of each row; for other views a
    pass over all slots.

    Args:
        view: of the job.
        order: of the epoch.
        rows: ascending, none twice.

    Returns:
        Which of the rows, and its position, which does not count skipped ones; by position.
        A sample of several rows has each at its own position.
    """
    if isinstance(view, AmendedView) and view.epoch == order.epoch:
        which, positions = view.positions(rows)
    elif isinstance(view, PlainView):
        which = np.flatnonzero(rows < view.num_rows)
        positions = order.positions(rows[which])
    elif isinstance(view, RestView):
        which, items = view.rest.find(rows)
        positions = order.positions(items)
    else:
        which, slots = _slots_of(view, order.epoch, rows)
        positions = order.positions(slots)
    if order.skipped:
        runs = np.array(order.skipped, np.int64)
        before = np.searchsorted(runs[:, 0], positions, side="right")
        ends = np.concatenate([[0], runs[:, 1]])
        kept = positions >= ends[before]
        left_out = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
        which, positions = which[kept], (positions - left_out[before])[kept]
    by_position = np.argsort(positions, kind="stable")
    return which[by_position], positions[by_position]


def _slots_of(view: SlotView, epoch: int, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    whichs, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    size = view.num_slots(epoch)
    for start in range(0, size, _AT_ONCE):
        own = np.arange(start, min(start + _AT_ONCE, size), dtype=np.int64)
        samples = view.samples(own, epoch)
        own = own if samples.lengths is None else np.repeat(own, samples.lengths)
        hits = np.flatnonzero(np.isin(samples.row_ids, rows))
        whichs.append(np.searchsorted(rows, samples.row_ids[hits]))
        slots.append(own[hits])
    return np.concatenate(whichs), np.concatenate(slots)
