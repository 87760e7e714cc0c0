import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import (
    InvalidRowsError,
    NodeUnavailableError,
    NotReadyError,
)
from cache_protocol.storage.row_index import RowRuns, row_starts
from cache_protocol.storage.shard_files import Selection, empty_batch
from cache_server.shards.resident_rows import ResidentRows, runs_of_rows
from tests.stored_rows import COLUMNS, KEY, LAYOUT, expected, gather, logical, mapped


def resident(directory: Path, sizes: Sequence[int], without: Sequence[int] = ()) -> ResidentRows:
    """Shards of these sizes, ids from 0 on; the indices of ``without`` are on another node."""
    directory.mkdir(parents=True, exist_ok=True)
    starts = row_starts(sizes)
    shards = {
        start: mapped(directory, index, range(start, start + size))
        for index, (start, size) in enumerate(zip(starts, sizes, strict=False))
        if index not in without
    }
    return ResidentRows(KEY, LAYOUT, starts[-1], shards)


SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
COLUMN_LISTS = st.one_of(
    st.just([]), st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=7, unique=True)
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes of shards, and ids in any order with repeats: single ones, runs, or both."""
    sizes = draw(SIZES)
    last = sum(sizes) - 1
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 25))):
        start = draw(st.integers(0, last))
        length = draw(st.sampled_from([1, 1, 1, 3, 30]))
        ids += range(start, min(start + length, last + 1))
    return sizes, ids


@settings(max_examples=80)
@given(requests(), COLUMN_LISTS)
def test_gathered_rows_are_those_of_the_ids_in_their_order(
    tmp_path_factory: pytest.TempPathFactory,
    request: tuple[list[int], list[int]],
    columns: list[str],
) -> None:
    sizes, ids = request
    rows = resident(tmp_path_factory.mktemp("gather"), sizes)

    assert gather(rows, ids, columns) == expected(ids, columns or COLUMNS)


@settings(max_examples=80)
@given(requests(), st.integers(1, 40), st.sampled_from([1, 3, 64]))
def test_an_answer_is_cut_into_messages_of_no_more_rows_than_asked_for(
    tmp_path_factory: pytest.TempPathFactory,
    request: tuple[list[int], list[int]],
    rows_per_message: int,
    rows_per_shard: int,
) -> None:
    sizes, ids = request
    rows, selection = resident(tmp_path_factory.mktemp("gather"), sizes), Selection(LAYOUT, [])

    with pytest.MonkeyPatch.context() as patch:  # of how many rows at once each shard is worth
        patch.setattr("cache_server.shards.resident_rows._ROWS_PER_SHARD", rows_per_shard)
        batches = list(rows.gather(np.array(ids, np.int64), selection, rows_per_message))

    assert all(batch.num_rows <= rows_per_message for batch in batches)
    assert [row for batch in batches for row in logical(batch, selection)] == expected(ids)


def test_whole_messages_of_rows_in_any_order_are_full_but_the_last(tmp_path: Path) -> None:
    rows = resident(tmp_path, [10, 10])
    ids = np.array([19, 0, 7, 12, 3, 15, 9], np.int64)
    batches = list(rows.gather(ids, Selection(LAYOUT, []), 3))
    assert [batch.num_rows for batch in batches] == [3, 3, 1]


@settings(max_examples=40)
@given(SIZES, st.data())
def test_slices_are_the_rows_of_the_range_in_pieces(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    rows = resident(tmp_path_factory.mktemp("slices"), sizes)
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    max_rows = data.draw(st.integers(1, 20))
    columns = data.draw(COLUMN_LISTS)
    selection = Selection(LAYOUT, columns)

    rows.check_range(start, stop)
    pieces = [logical(piece, selection) for piece in rows.slices(start, stop, max_rows, selection)]

    assert [row for piece in pieces for row in piece] == expected(
        range(start, stop), columns or COLUMNS
    )
    assert all(1 <= len(piece) <= max_rows for piece in pieces)


def test_many_short_runs_over_many_shards_come_in_order(tmp_path: Path) -> None:
    rows = resident(tmp_path, [50, 0, 70, 1, 60])
    ids = np.random.default_rng(0).integers(0, 181, 2000).tolist()

    assert gather(rows, ids) == expected(ids)
    assert gather(rows, ids, ["wide", "b"]) == expected(ids, ["wide", "b"])


def test_more_than_256_shards_are_told_apart(tmp_path: Path) -> None:
    rows = resident(tmp_path, [1, 2] * 150)
    ids = np.random.default_rng(0).permutation(450).tolist() * 4

    assert [row["row"] for row in gather(rows, ids, ["row"])] == ids


def test_a_node_that_cannot_map_its_shards_says_why_and_what_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = resident(tmp_path, [3, 4])

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("cache_protocol.storage.virtual_memory.AddressRange.map_file", refuse)
        with pytest.raises(NodeUnavailableError, match=r"cannot map 2 .* 'table': .*max_map_count"):
            gather(rows, [5, 1])

    assert gather(rows, [5, 1]) == expected([5, 1])


def test_no_ids_are_no_rows_of_the_selection(tmp_path: Path) -> None:
    rows = resident(tmp_path, [5])
    selection = Selection(LAYOUT, ["text", "row"])

    (batch,) = rows.gather(np.array([], np.int64), selection)

    assert batch.num_rows == 0
    assert batch.schema.equals(selection.layout.schema)
    assert empty_batch(LAYOUT).schema.equals(LAYOUT.schema)


def memory_of(batch: pa.RecordBatch) -> set[int]:
    """Where the buffers of the columns begin."""
    return {buffer.address for array in batch.columns for buffer in array.buffers() if buffer}


@pytest.mark.parametrize("columns", [[], ["row", "wide", "text"], ["image"]])
def test_consecutive_ids_of_a_shard_are_a_view_of_the_file(
    tmp_path: Path, columns: list[str]
) -> None:
    shard = mapped(tmp_path, 0, range(1000))
    rows = ResidentRows(KEY, LAYOUT, 1000, {0: shard})
    selection = Selection(LAYOUT, columns)

    (batch,) = rows.gather(np.arange(100, 900), selection)
    (piece,) = rows.slices(100, 900, 1000, selection)

    assert memory_of(batch) == memory_of(piece) <= memory_of(shard.batch)
    assert logical(batch, selection) == expected(range(100, 900), columns or COLUMNS)
    assert piece.equals(batch)


def test_ids_with_a_gap_are_not_taken_for_consecutive(tmp_path: Path) -> None:
    rows = resident(tmp_path, [10])

    for ids in ([0, 2, 1, 3], [3, 3, 5, 6], [2, 1], [0, 1, 1, 3]):
        assert gather(rows, ids) == expected(ids)


@pytest.mark.parametrize("bad", [-1, 20, 2**62, -(2**62)])
def test_an_id_outside_of_the_dataset_is_quoted(tmp_path: Path, bad: int) -> None:
    rows = resident(tmp_path, [10, 10])

    with pytest.raises(InvalidRowsError, match=rf"row id {bad} .*'table'.*\[0, 20\)"):
        gather(rows, [3, bad, 15])


def test_no_id_is_in_a_dataset_without_rows(tmp_path: Path) -> None:
    rows = resident(tmp_path, [0, 0])

    assert gather(rows, []) == []
    with pytest.raises(InvalidRowsError, match=r"row id 0 .*\[0, 0\)"):
        gather(rows, [0])


@pytest.mark.parametrize(
    ("without", "ids", "missing"),
    [
        ([0], [5], 5),
        ([0], [25, 5, 26], 5),
        ([1], [5, 15], 15),
        ([1], [29, 10, 0], 10),
        ([2], [0, 29], 29),
        ([0, 2], [15, 3], 3),
        ([0, 1, 2], [4], 4),
    ],
)
def test_a_row_that_is_not_on_this_node_is_named(
    tmp_path: Path, without: list[int], ids: list[int], missing: int
) -> None:
    rows = resident(tmp_path, [10, 10, 10], without)

    with pytest.raises(NotReadyError, match=f"row {missing} of 'table' is not on this node"):
        gather(rows, ids)


def test_rows_that_are_on_this_node_are_served_without_the_others(tmp_path: Path) -> None:
    rows = resident(tmp_path, [10, 10, 10], without=[1])
    ids = [29, 0, 9, 20, 5, 5]

    assert gather(rows, ids) == expected(ids)
    rows.check_range(0, 10)
    rows.check_range(20, 30)
    with pytest.raises(NotReadyError, match="row 10 of 'table'"):
        rows.check_range(5, 25)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, 21), (7, 3), (21, 21)])
def test_a_range_outside_of_the_dataset_is_quoted(tmp_path: Path, start: int, stop: int) -> None:
    rows = resident(tmp_path, [10, 10])

    with pytest.raises(InvalidRowsError, match=rf"\[{start}, {stop}\) are outside"):
        rows.check_range(start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (0, 0), (20, 20), (9, 11)])
def test_a_range_inside_of_the_dataset_passes(tmp_path: Path, start: int, stop: int) -> None:
    resident(tmp_path, [10, 0, 10]).check_range(start, stop)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 400), max_size=60), st.integers(0, 30), st.integers(1, 500))
def test_runs_of_rows_are_as_long_as_wanted_also_where_rows_are_longer(
    lengths: list[int], fixed_row_bytes: int, run_bytes: int
) -> None:
    column = pa.array([b"x" * length for length in lengths], pa.binary())

    runs = list(runs_of_rows([column], len(column), fixed_row_bytes, run_bytes))

    assert [row for run in runs for row in range(*run)] == list(range(len(column)))
    for start, stop in runs:
        size = column.slice(start, stop - start).nbytes + (stop - start) * fixed_row_bytes
        assert stop - start == 1 or size <= 5 * run_bytes


def test_the_mean_bytes_of_a_row_are_those_of_its_values(tmp_path: Path) -> None:
    rows = resident(tmp_path, [12] * 200)
    numbers = Selection(LAYOUT, ["a", "image"])
    assert rows.mean_row_bytes(numbers) == 4 + 3
    texts = sum(len(text or "") for text in (row["text"] for row in expected(range(2400))))
    mean = 4 + texts / 2400  # a value and its offset
    assert mean <= rows.mean_row_bytes(Selection(LAYOUT, ["text"])) < mean + 2


@pytest.mark.parametrize("max_rows", [1, 4, 7, 30])
@pytest.mark.parametrize(("length", "stride"), [(0, 0), (1, 3), (2, 2), (3, 8), (9, 20)])
def test_runs_are_their_rows_in_messages_of_no_more_rows_than_asked_for(
    tmp_path: Path, length: int, stride: int, max_rows: int
) -> None:
    rows, selection = resident(tmp_path, [11, 0, 7, 23]), Selection(LAYOUT, ["b", "text", "row"])
    runs = RowRuns(2, length, stride)
    ids = [row for first, last in runs.within(38) for row in range(first, last)]
    batches = list(rows.runs(runs, 38, max_rows, selection))
    assert [row for batch in batches for row in logical(batch, selection)] == expected(
        ids, ["b", "text", "row"]
    )
    assert all(1 <= batch.num_rows <= max_rows for batch in batches)


def test_messages_after_the_end_of_a_shard_begin_where_they_would_without_it(
    tmp_path: Path,
) -> None:
    rows = resident(tmp_path, [10, 20])
    sizes = [batch.num_rows for batch in rows.slices(0, 30, 4, Selection(LAYOUT, []))]
    assert sizes == [4, 4, 2, 2, 4, 4, 4, 4, 2]  # so that batches of 4 are views again
