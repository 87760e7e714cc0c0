"""Offsets of strings and lists: every bit of every offset is flipped; an oracle says the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.storage.offsets import Level, levels_of, rows_are_sound, run_is_sound

_TEXTS = ["ab", "", None, "four", "é", "", "x" * 9]
_TEXT = pa.large_string()
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
    pa.array([[("a", 1), ("bc", 2)], [], None, [("d", 3)]], pa.map_(pa.string(), pa.int64())),
    pa.array([[("a", ["b"])], [], [("cd", ["e", "f"])]], pa.map_(pa.string(), pa.list_(_TEXT))),
    pa.array([[{"a": "b", "c": [1]}], [], [{"a": "de", "c": [2, 3]}]]),
]


def touched(levels: Sequence[Level], rows: list[int]) -> bool:
    """Whether every offset that Arrow follows for these rows is within bounds: the oracle."""
    for offsets, limit, inner in levels:
        pairs = [(int(offsets[row]), int(offsets[row + 1])) for row in rows]
        if not all(0 <= start <= stop <= limit for start, stop in pairs):
            return False
        if not touched(inner, [row for start, stop in pairs for row in range(start, stop)]):
            return False
    return True


def ends_are_within(levels: Sequence[Level]) -> bool:
    return all(
        0 <= offsets[0] <= offsets[-1] <= limit and ends_are_within(inner)
        for offsets, limit, inner in levels
    )


def flips(levels: tuple[Level, ...]) -> Iterator[tuple[Level, ...]]:
    """The levels of a column, with one bit of one offset flipped."""
    for at, level in enumerate(levels):
        before, after = levels[:at], levels[at + 1 :]
        for bit in range(level.offsets.nbytes * 8):
            raw = bytearray(level.offsets.tobytes())
            raw[bit // 8] ^= 1 << bit % 8
            changed = np.frombuffer(raw, level.offsets.dtype)
            yield (*before, level._replace(offsets=changed), *after)
        for inner in flips(level.inner):
            yield (*before, level._replace(inner=inner), *after)


@pytest.mark.parametrize("column", _COLUMNS, ids=lambda column: str(column.type))
def test_each_flipped_offset_outside_of_its_column_is_found_before_it_is_followed(
    column: pa.Array,
) -> None:
    rows = [len(column) - 1, 0, 1, 0]
    assert rows_are_sound(levels_of(column), np.array(rows))
    assert run_is_sound(levels_of(column), 0, len(column))
    found = 0
    for levels in flips(levels_of(column)):
        expected = touched(levels, rows)
        found += not expected
        assert rows_are_sound(levels, np.array(rows)) is expected
        inner = all(ends_are_within(level.inner) for level in levels)
        for start in (0, 1):
            run = list(range(start, len(column)))
            assert run_is_sound(levels, start, len(column)) is (inner and touched(levels, run))
    assert found


def test_a_column_without_rows_and_a_column_of_numbers_are_sound() -> None:
    for empty in (pa.array([], pa.string()), pa.array([], pa.list_(pa.string()))):
        assert run_is_sound(levels_of(empty), 0, 0)
        assert rows_are_sound(levels_of(empty), np.array([], np.int64))
    assert levels_of(pa.array([1, 2])) == ()
    assert levels_of(pa.array([[[1, 2]]], pa.list_(pa.list_(pa.int8(), 2))))[0].inner == ()


def test_texts_in_lists_of_one_length_are_looked_at() -> None:
    column = pa.array([[["a", "bc"]], [], [["d", "e"]]], pa.list_(pa.list_(pa.string(), 2)))
    ((_, _, (fixed,)),) = levels = levels_of(column)
    assert rows_are_sound(levels, np.array([2, 0])) and run_is_sound(levels, 0, 3)
    (texts,) = fixed.inner
    bad = texts._replace(offsets=np.array([0, 1, 3, 4, 99], np.int32))
    wrong = (levels[0]._replace(inner=(fixed._replace(inner=(bad,)),)),)
    assert not rows_are_sound(wrong, np.array([2])) and rows_are_sound(wrong, np.array([0]))
    assert levels_of(pa.array([None, None], pa.string()))[0].limit == 0
