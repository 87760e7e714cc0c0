"""Rows of a relation -> ranges of a key that hold about equally many. Pure: makes SQL, runs none.

Ranges are half-open, the first has no start and the last no stop, so that they cover every value
there is or will be; rows without a key are a range of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from cache_server.sql.quoting import literal

CTID = "q.ctid"  # where a row lies: (block, line)


@dataclass(frozen=True)
class KeyRange:
    """Rows whose key lies in ``[start, stop)``.

    Attributes:
        key: an SQL expression; empty: all rows.
        start: the text of a value; None: from the first one.
        stop: the text of a value; None: to the last one.
        nulls: instead, the rows whose key is null.
    """

    key: str = ""
    start: str | None = None
    stop: str | None = None
    nulls: bool = False

    def condition(self) -> str:
        """SQL that holds for these rows and no others."""
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
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def block_bounds(num_blocks: int, num_buckets: int) -> list[str]:
    """Row addresses between up to ``num_buckets`` equal runs of blocks."""
    buckets = max(1, min(num_blocks, num_buckets))
    return [f"({num_blocks * i // buckets},0)" for i in range(1, buckets)]


def quantiles(num_buckets: int) -> list[float]:
    """The fractions between ``num_buckets`` equal parts."""
    return [i / num_buckets for i in range(1, num_buckets)]


def distinct(bounds: Iterable[str]) -> list[str]:
    """Bounds in their order, each once: a value that many rows share comes up several times."""
    return list(dict.fromkeys(bounds))


def even_ranges(
    key: str, bounds: Sequence[str], counts: Sequence[int], num_ranges: int
) -> list[tuple[KeyRange, int]]:
    """Up to ``num_ranges`` runs of buckets with about equally many rows, and their rows.

    Args:
        bounds: between the buckets, ascending.
        counts: rows of each bucket; one more than bounds.
    """
    share = max(1, -(-sum(counts) // max(1, num_ranges)))
    ranges: list[tuple[KeyRange, int]] = []
    start: str | None = None
    rows = 0
    for index, count in enumerate(counts):
        # Whichever end is nearer to the even share: before this bucket or after it.
        if rows and rows + count - share > share - rows:
            ranges.append((KeyRange(key, start, bounds[index - 1]), rows))
            start, rows = bounds[index - 1], 0
        rows += count
    ranges.append((KeyRange(key, start, None), rows))
    return ranges
