"""Offsets of strings and lists: every bit of every offset is flipped; an oracle says the rest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.storage.offsets import Level, levels_of, rows_are_sound, run_is_sound

_TEXTS = ["ab", "", None, "four", "é", "", "x" * 9]
_COLUMNS = [
    pa.array(_TEXTS, pa.string()),
    pa.array(_TEXTS, pa.large_string()),
    pa.array([b"1", b"", None, b"234"], pa.binary()),
    pa.array([b"1", b"", None, b"234"], pa.large_binary()),
    pa.array([[1, 2], [], None, [3]], pa.list_(pa.int64())),
    pa.array([[1.5], [], [2.5, 3.5]], pa.large_list(pa.float32())),
    pa.array([["a", "bc"], [], None, ["d"]], pa.list_(pa.string())),
    pa.array([[[1], [2, 3]], [], [[]]], pa.large_list(pa.list_(pa.int8()))),
    pa.array([[["a"], []], [["bc", "d"]]], pa.list_(pa.list_(pa.large_string()))),
]


def touched(levels: list[Level], rows: list[int]) -> bool:
    """Whether every offset that Arrow follows for these rows is within bounds: the oracle."""
    for offsets, limit in levels:
        pairs = [(int(offsets[row]), int(offsets[row + 1])) for row in rows]
        if not all(0 <= start <= stop <= limit for start, stop in pairs):
            return False
        rows = [row for start, stop in pairs for row in range(start, stop)]
    return True


def flips(column: pa.Array) -> Iterator[list[Level]]:
    """The levels of a column, with one bit of one offset flipped."""
    levels = levels_of(column)
    for depth, (offsets, limit) in enumerate(levels):
        for bit in range(offsets.nbytes * 8):
            raw = bytearray(offsets.tobytes())
            raw[bit // 8] ^= 1 << bit % 8
            changed = np.frombuffer(raw, offsets.dtype)
            yield [*levels[:depth], Level(changed, limit), *levels[depth + 1 :]]


@pytest.mark.parametrize("column", _COLUMNS, ids=lambda column: str(column.type))
def test_each_flipped_offset_outside_of_its_column_is_found_before_it_is_followed(
    column: pa.Array,
) -> None:
    rows = [len(column) - 1, 0, 1, 0]
    assert rows_are_sound(levels_of(column), np.array(rows))
    assert run_is_sound(levels_of(column), 0, len(column))
    found = 0
    for levels in flips(column):
        expected = touched(levels, rows)
        found += not expected
        assert rows_are_sound(levels, np.array(rows)) is expected
        inner = all(0 <= offsets[0] <= offsets[-1] <= limit for offsets, limit in levels[1:])
        for start in (0, 1):
            run = list(range(start, len(column)))
            assert run_is_sound(levels, start, len(column)) is (inner and touched(levels, run))
    assert found


def test_a_column_without_rows_and_a_column_of_numbers_are_sound() -> None:
    for empty in (pa.array([], pa.string()), pa.array([], pa.list_(pa.string()))):
        assert run_is_sound(levels_of(empty), 0, 0)
        assert rows_are_sound(levels_of(empty), np.array([], np.int64))
    assert levels_of(pa.array([1, 2])) == ()
    assert levels_of(pa.array([None, None], pa.string()))[0].limit == 0
