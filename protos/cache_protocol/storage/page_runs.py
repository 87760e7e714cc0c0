"""Which pages of a file some rows lie on, as few long reads. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]

PAGE_BYTES = 4096
_GAP_BYTES = 8 * 1024  # read with its neighbours: that takes no longer than another request


def page_runs(starts: Addresses, stops: Addresses | int, page: int = PAGE_BYTES) -> Addresses:
    """The pages of some byte ranges, without repeats: ``[runs, 2]`` of first byte and bytes.

    Ranges that are close to each other are one run.

    Args:
        starts: of the ranges, in any order.
        stops: of the ranges; an integer: the bytes of each.
        page: size of a page.
    """
    if not len(starts):
        return np.empty((0, 2), np.int64)
    if isinstance(stops, int):
        starts = np.sort(starts)
        stops = starts + stops
    else:
        order = np.argsort(starts)
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
    first = starts // page * page
    last = -(-stops // page) * page
    breaks = np.flatnonzero(first[1:] > last[:-1] + _GAP_BYTES)
    runs = np.empty((len(breaks) + 1, 2), np.int64)
    runs[:, 0] = first[np.append(0, breaks + 1)]
    runs[:, 1] = last[np.append(breaks, len(last) - 1)] - runs[:, 0]
    return runs
