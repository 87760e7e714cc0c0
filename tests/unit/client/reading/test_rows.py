from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.reading import rows as reading_rows
from cache_protocol.errors import ConfigError
from cache_protocol.storage.layout import Layout, from_matrix, with_large_offsets

LAYOUT = Layout(
    pa.schema(
        [
            pa.field("a", pa.int64(), nullable=False),
            pa.field("b", pa.int64(), nullable=False),
            pa.field("text", pa.string()),
        ]
    )
)


def stored(numbers: list[int]) -> pa.RecordBatch:
    column = np.array([[n, -n] for n in numbers], np.int64).reshape(-1, 2)
    return pa.RecordBatch.from_arrays(
        [from_matrix(column, LAYOUT.columns[0].field), pa.array([str(n) for n in numbers])],
        schema=LAYOUT.schema,
    )


def numbers_of(rows: reading_rows.Rows) -> list[int]:
    batch = rows.to_batch()
    found: list[int] = batch.column("a").to_pylist()
    assert batch.column("b").to_pylist() == [-n for n in found]
    assert batch.column("text").to_pylist() == [str(n) for n in found]
    assert rows.num_rows == len(found)
    return found


def pieces_of(*parts: list[int]) -> list[reading_rows.Rows]:
    return [reading_rows.Rows.of_batch(LAYOUT, stored(part)) for part in parts]


def test_an_answer_that_is_the_whole_window_is_a_piece_a_message_without_a_copy() -> None:
    batches = [stored([1, 2]), stored([3])]
    pieces = reading_rows.in_order(LAYOUT, 3, [reading_rows.Answer(None, batches)])
    assert [numbers_of(piece) for piece in pieces] == [[1, 2], [3]]
    values = batches[0].column(0).values.buffers()[1]
    assert pieces[0].matrices[0].ctypes.data == values.address


def test_received_rows_are_writable() -> None:
    (piece,) = pieces_of([1, 2])
    piece.matrices[0][0, 0] = 7
    assert piece.matrices[0][:, 0].tolist() == [7, 2]


@given(data=st.data())
def test_the_answers_of_several_nodes_are_put_in_order(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 99), max_size=30))
    owner = np.array([data.draw(st.integers(0, 2)) for _ in numbers], np.int64)
    answers = []
    for node in {*owner.tolist()}:
        positions = np.flatnonzero(owner == node)
        mine = [numbers[at] for at in positions]
        middle = data.draw(st.integers(0, len(mine)))
        answers.append(
            reading_rows.Answer(positions, [stored(mine[:middle]), stored(mine[middle:])])
        )

    rows = reading_rows.join(reading_rows.in_order(LAYOUT, len(numbers), answers))

    assert numbers_of(rows) == numbers


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([2, 2, 3, None])), min_size=1))
def test_lists_of_several_nodes_are_put_in_order(rows: list[tuple[int, int | None]]) -> None:
    layout = Layout(pa.schema([("some", pa.list_(pa.int32()))]))
    lists = [None if width is None else [at] * width for at, (_, width) in enumerate(rows)]
    answers = []
    for node in {node for node, _ in rows}:
        positions = np.array([at for at, (owner, _) in enumerate(rows) if owner == node])
        mine = pa.array([lists[at] for at in positions], pa.list_(pa.int32()))
        batch = pa.RecordBatch.from_arrays([mine], schema=layout.schema)
        answers.append(reading_rows.Answer(positions, [batch, batch.slice(0, 0)]))

    ordered = reading_rows.join(reading_rows.in_order(layout, len(rows), answers))

    assert ordered.arrays[0].to_pylist() == lists


def test_an_answer_without_positions_beside_another_is_a_defect() -> None:
    with pytest.raises(ValueError, match="all rows of the window"):
        reading_rows.in_order(
            LAYOUT,
            2,
            [
                reading_rows.Answer(None, [stored([1])]),
                reading_rows.Answer(np.array([1]), [stored([2])]),
            ],
        )


@given(data=st.data())
def test_pieces_are_cut_at_any_place(data: st.DataObject) -> None:
    numbers = list(range(data.draw(st.integers(0, 40))))

    def sizes_of(count: int) -> list[int]:
        bounds = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
        return np.diff([0, *bounds, count]).tolist()

    ends = np.cumsum([0, *sizes_of(len(numbers))])
    pieces = pieces_of(*(numbers[a:b] for a, b in itertools.pairwise(ends)))
    sizes = sizes_of(len(numbers))

    runs = [numbers_of(run) for run in reading_rows.cut(pieces, sizes)]

    assert [len(run) for run in runs] == sizes
    assert [number for run in runs for number in run] == numbers


def test_a_run_inside_a_piece_is_a_view() -> None:
    (piece,) = pieces_of([1, 2, 3, 4])
    first, second = reading_rows.cut([piece], [2, 2])
    assert np.shares_memory(first.matrices[0], piece.matrices[0])
    assert np.shares_memory(second.matrices[0], piece.matrices[0])


def test_pieces_are_joined() -> None:
    assert numbers_of(reading_rows.join(pieces_of([1], [], [2, 3]))) == [1, 2, 3]


def test_a_column_above_2_gib_is_refused_by_name_with_the_remedy() -> None:
    """Pages of the data that nobody touches take no memory."""
    data = pa.py_buffer(np.zeros(2**30 + 1, np.uint8))
    offsets = pa.array([0, 2**30 + 1], pa.int32()).buffers()[1]
    half = pa.StringArray.from_buffers(1, offsets, data)
    with pytest.raises(ConfigError, match="column 'text' has 2,147,483,6") as caught:
        reading_rows.concat(pa.field("text", pa.string()), [half, half])
    assert "2 rows that are read together" in str(caught.value)
    assert "use a smaller batch_size" in str(caught.value)


def test_a_batch_above_2_gib_of_a_column_with_64_bit_offsets_is_refused_by_name() -> None:
    """Nulls without a type take no memory."""
    logical = pa.schema([("id", pa.list_(pa.null())), ("docs", pa.list_(pa.null()))])
    layout = Layout(with_large_offsets(logical))
    few, many = (
        pa.LargeListArray.from_arrays(pa.array([0, size], pa.int64()), pa.nulls(size))
        for size in (3, 2**31)
    )
    short = reading_rows.Rows(layout, {}, {0: few, 1: few}, 1)

    assert short.to_batch().schema.equals(logical)
    with pytest.raises(ConfigError, match=r"column 'docs' has .*list<item: null> ends at 2 GiB"):
        reading_rows.Rows(layout, {}, {0: few, 1: many}, 1).to_batch()
