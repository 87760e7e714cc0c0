"""Byte ranges of a file that is elsewhere -> the requests that fetch them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]

_GAP_BYTES = 1024 * 1024  # reading a gap of this size costs less than another request


def requests(ranges: Iterable[Range], most_bytes: int) -> list[Range]:
    """One range for each request: close ranges joined, large ones cut.

    Args:
        ranges: half-open, in any order.
        most_bytes: of one request.
    """
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if joined and start <= joined[-1][1] + _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return [
        (part, min(part + most_bytes, stop))
        for start, stop in joined
        for part in range(start, stop, most_bytes)
    ]
