"""Parts of a version by a hash of each row, or of key columns. Pure.

A row is in a part if its hash lies in the range of the part: a function of the row alone, which
appended rows do not change. A hash has 64 bits:

- of a row id: splitmix64 (Steele, Lea and Flood, 2014) of the row id and a constant;
- of key columns: the first 8 bytes, big-endian, of the MD5 of a text: ``split:`` or ``fold:``, then
  for each key its number of characters, ``:``, its text and ``,``; for a null ``-``. Zeros have no
  sign: ``-0.0`` counts as ``0.0``.

So ``int(hashlib.md5(b"split:4:anna,").hexdigest()[:16], 16)`` is the hash of the key ``anna``. The
hash of a fold is another one than that of a split, so that folds divide the rows of a split evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

import numpy as np

from cache_client.order.permutation import Int64Array, splitmix64
from cache_client.views.view import quoted

NUM_HASHES: Final = 2**64
_SALTS: Final = {"split": 0x2545F4914F6CDD1D, "fold": 0x9E6C63D0876A9A35}  # any odd numbers
_ROUNDING: Final = Fraction(1, 10**9)
MOST_FOLDS: Final = 1_000_000


@dataclass(frozen=True)
class HashRange:
    """The rows whose hash lies in ``[start, stop)``, or in none of it.

    Attributes:
        kind: which hash.
        inside: False for the rows whose hash lies outside.
    """

    kind: Literal["split", "fold"]
    start: int
    stop: int
    inside: bool = True

    @property
    def identity(self) -> str:
        """The range as a short text."""
        return f"{self.kind}={'' if self.inside else 'not '}[{self.start:x},{self.stop:x})"

    def holds(self, row_ids: Int64Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether each row is in the range, by the hash of its id."""
        hashes = row_hashes(row_ids, self.kind)
        found = hashes >= np.uint64(self.start)
        if self.stop < NUM_HASHES:
            found &= hashes < np.uint64(self.stop)
        return found if self.inside else ~found

    def condition(self, keys: Sequence[str]) -> str:
        """SQL of the condition that a row is in the range, by the hash of these columns."""
        texts = ", ".join(map(_key_text, keys))
        between = f"{'' if self.inside else 'NOT '}BETWEEN"
        bounds = f"'{self.start:016x}' AND '{self.stop - 1:016x}'"
        return f"left(md5(concat('{self.kind}:', {texts})), 16) {between} {bounds}"


def row_hashes(row_ids: Int64Array, kind: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The hash of each row id."""
    return splitmix64(row_ids.astype(np.uint64) ^ np.uint64(_SALTS[kind]))


def part_of(fractions: Mapping[str, float], part: str) -> HashRange:
    """The range of a part, where the parts follow one another in the order of the mapping."""
    shares = [as_fraction(fraction) for fraction in fractions.values()]
    at = list(fractions).index(part)
    start, stop = sum(shares[:at], Fraction(0)), sum(shares[: at + 1], Fraction(0))
    is_end = at == len(shares) - 1 and is_whole(fractions)
    return HashRange("split", _bound(start), NUM_HASHES if is_end else _bound(stop))


def fold_of(index: int, count: int, *, inside: bool = True) -> HashRange:
    """The range of fold ``index`` of ``count``, or what is outside of it."""
    start, stop = Fraction(index, count), Fraction(index + 1, count)
    return HashRange("fold", _bound(start), _bound(stop), inside)


def is_whole(fractions: Mapping[str, float]) -> bool:
    """Whether the parts together are all rows, but for the rounding of thirds."""
    total = sum((as_fraction(fraction) for fraction in fractions.values()), Fraction(0))
    return abs(total - 1) <= _ROUNDING


def as_fraction(number: float) -> Fraction:
    """A fraction as it is written: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


def _bound(fraction: Fraction) -> int:
    return min(int(fraction * NUM_HASHES), NUM_HASHES)


def _key_text(name: str) -> str:
    column = quoted(name)
    text = f"CAST({column} AS VARCHAR)"
    length = f"CAST(character_length({text}) AS VARCHAR)"
    return (
        f"CASE WHEN {column} IS NULL THEN '-' WHEN {text} = '-0.0' THEN '3:0.0,' "
        f"WHEN {text} = '-0' THEN '1:0,' "  # of 16 bits
        f"ELSE concat({length}, ':', {text}, ',') END"
    )
