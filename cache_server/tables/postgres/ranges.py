"""Cuts a relation into key ranges of about equally many rows. Pure: makes SQL, runs none.

Ranges are half-open. The first has no start and the last no stop, so they cover every value. Rows
without a key form another range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from cache_server.sql.quoting import literal

CTID = "q.ctid"  # the address of a row: (block, line)


@dataclass(frozen=True)
class KeyRange:
    """Rows whose key is in ``[start, stop)``.

    Attributes:
        key: an SQL expression; empty: all rows.
        start: a value as a string; None: from the first one.
        stop: a value as a string; None: to the last one.
        nulls: instead, the rows whose key is null.
    """

    key: str = ""
    start: str | None = None
    stop: str | None = None
    nulls: bool = False

    def condition(self) -> str:
        """SQL that is true for exactly these rows."""
        if self.nulls:
            return f"{self.key} IS NULL"
        terms = []
        if self.start is not None:
            terms.append(f"{self.key} >= {literal(self.start)}")
        if self.stop is not None:
            terms.append(f"{self.key} < {literal(self.stop)}")
        if not terms:
            return f"{self.key} IS NOT NULL" if self.key else "true"
        return " AND ".join(terms)

    def to_json(self) -> str:
        """For `Split.piece`."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> KeyRange:
        """The range that `to_json` wrote."""
        return cls(**json.loads(text))


def block_bounds(num_blocks: int, num_buckets: int) -> list[str]:
    """Row addresses between up to ``num_buckets`` equal runs of blocks."""
    buckets = max(1, min(num_blocks, num_buckets))
    return [f"({num_blocks * i // buckets},0)" for i in range(1, buckets)]


def quantiles(num_buckets: int) -> list[float]:
    """The fractions between ``num_buckets`` equal parts."""
    return [i / num_buckets for i in range(1, num_buckets)]


def distinct(bounds: Iterable[str]) -> list[str]:
    """Bounds in order, without repeats: frequent values come several times."""
    return list(dict.fromkeys(bounds))


def even_ranges(
    key: str, bounds: Sequence[str], counts: Sequence[int], num_ranges: int
) -> list[tuple[KeyRange, int]]:
    """Up to ``num_ranges`` runs of buckets with about equally many rows, and their counts.

    Args:
        bounds: between the buckets, ascending.
        counts: rows of each bucket; one more than bounds.
    """
    share = max(1, -(-sum(counts) // max(1, num_ranges)))
    ranges: list[tuple[KeyRange, int]] = []
    start: str | None = None
    rows = 0
    for index, count in enumerate(counts):
        # End before or after this bucket, whichever is nearer to the even share.
        if rows and rows + count - share > share - rows:
            ranges.append((KeyRange(key, start, bounds[index - 1]), rows))
            start, rows = bounds[index - 1], 0
        rows += count
    ranges.append((KeyRange(key, start, None), rows))
    return ranges
