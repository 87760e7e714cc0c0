import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.storage import mapped_table, virtual_memory
from cache_protocol.storage.disk_reads import DiskReads
from cache_protocol.storage.layout import Layout, numpy_dtype
from cache_protocol.storage.mapped_table import MAPS_PER_COLUMN, MappedTable
from cache_protocol.storage.shard_files import MappedShard, SealedShard, Selection
from cache_server.shards.packing import ShardBuilder
from tests.stored_rows import LAYOUT, expected, logical, mapped

TYPES = (pa.int8(), pa.uint16(), pa.float32(), pa.float64(), pa.int64())


@st.composite
def schemas(draw: st.DrawFn) -> pa.Schema:
    """Columns with rows of odd sizes, of powers of two, and of more than a page."""
    fields = []
    for index in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(TYPES))
        width = draw(st.sampled_from([0, 0, 1, 3, 8, 32, 768, 1024, 5000]))
        fields.append(pa.field(f"c{index}", pa.list_(dtype, width) if width else dtype))
    return pa.schema(fields)


def shard_of(path: Path, index: int, batch: pa.RecordBatch) -> tuple[Layout, MappedShard]:
    builder = ShardBuilder(batch.schema)
    builder.append(batch)
    stored = builder.finish()
    with pa.ipc.new_file(str(path), stored.schema) as writer:
        writer.write_batch(stored)
    return builder.layout, MappedShard(
        SealedShard(index, len(batch), path.stat().st_size, ""), path
    )


def rows_of(schema: pa.Schema, start: int, stop: int) -> pa.RecordBatch:
    """Rows of which each value says the row and the place in it, as far as the type goes."""
    arrays = []
    for field in schema:
        width = max(1, getattr(field.type, "list_size", 1))
        dtype = getattr(field.type, "value_type", field.type)
        values = (np.arange(start, stop)[:, None] * 7 + np.arange(width)) % 121
        flat = pa.array(values.ravel().astype(numpy_dtype(dtype)))
        is_list = pa.types.is_fixed_size_list(field.type)
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if is_list else flat)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@pytest.mark.parametrize("huge_page", [mmap.PAGESIZE, 4 * mmap.PAGESIZE])
@settings(max_examples=40)
@given(schemas(), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_rows_of_any_layout_come_from_all_shards_in_the_order_wanted(
    tmp_path_factory: pytest.TempPathFactory,
    huge_page: int,
    schema: pa.Schema,
    sizes: list[int],
    data: st.DataObject,
) -> None:
    directory = tmp_path_factory.mktemp("mapped")
    starts = np.cumsum([0, *sizes])
    shards = [
        shard_of(directory / f"{i}.arrow", i, rows_of(schema, starts[i], starts[i + 1]))
        for i in range(len(sizes))
    ]
    layout = shards[0][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cache_protocol.storage.mapped_table.huge_page_bytes", lambda: huge_page)
        table = MappedTable(layout, starts[:-1], sizes)
    for position in data.draw(st.permutations(range(len(sizes)))):
        table.attach(position, shards[position][1])
    ids = np.array(data.draw(st.lists(st.integers(0, int(starts[-1]) - 1), max_size=50)), np.int64)
    if not len(ids):
        return
    shard_index = np.searchsorted(starts, ids, side="right") - 1

    batch = table.gather(ids, shard_index, Selection(layout, []))

    every = rows_of(schema, 0, int(starts[-1]))
    assert layout.unpack(batch).equals(every.take(pa.array(ids)))


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([2, 2, 2, 3, None])), min_size=1),
    st.sampled_from([pa.list_(pa.int32()), pa.large_list(pa.float64())]),
    st.data(),
)
def test_lists_come_from_all_shards_whether_they_have_one_length_or_not(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[tuple[int, int | None]],
    dtype: pa.DataType,
    data: st.DataObject,
) -> None:
    directory = tmp_path_factory.mktemp("lists")
    starts = np.cumsum([0, *(rows for rows, _ in shards)])
    schema, batches = pa.schema([("some", dtype)]), []
    for start, (rows, width) in zip(starts.tolist(), shards, strict=False):
        ids = range(start, start + rows)
        lists = [None if width is None and n % 3 == 0 else [n] * (width or n % 4) for n in ids]
        batches.append(pa.RecordBatch.from_arrays([pa.array(lists, dtype)], schema=schema))
    opened = [shard_of(directory / f"{i}.arrow", i, batch) for i, batch in enumerate(batches)]
    table = MappedTable(opened[0][0], starts[:-1], [rows for rows, _ in shards])
    for position, (_, shard) in enumerate(opened):
        table.attach(position, shard)
    last = int(starts[-1]) - 1
    ids = np.array(data.draw(st.lists(st.integers(0, last), min_size=1, max_size=50)), np.int64)
    shard_index = np.searchsorted(starts, ids, side="right") - 1

    batch = table.gather(ids, shard_index, Selection(opened[0][0], []))

    every = pa.concat_batches(batches)
    assert batch.column(0).to_pylist() == [every.column(0)[n].as_py() for n in ids.tolist()]
    batch.validate(full=True)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[MappedShard]]:
    """Of 10 rows each, with every kind of column."""
    yield [mapped(tmp_path, i, range(10 * i, 10 * i + 10)) for i in range(6)]


def attached(shards: Sequence[MappedShard]) -> MappedTable:
    table = MappedTable(LAYOUT, np.arange(0, 60, 10), [10] * 6)
    for position, shard in enumerate(shards):
        table.attach(position, shard)
    return table


def gathered(table: MappedTable, ids: Sequence[int], columns: Sequence[str]) -> list[object]:
    selection = Selection(LAYOUT, columns)
    rows = np.array(ids, np.int64)
    return list(logical(table.gather(rows, rows // 10, selection), selection))


def test_columns_that_are_not_read_are_not_mapped(shards: list[MappedShard]) -> None:
    selection = Selection(LAYOUT, ["wide"])
    maps = Path("/proc/self/maps")
    before = len(maps.read_text().splitlines())
    table = MappedTable(
        LAYOUT, np.arange(0, 60, 10), [10] * 6, only=[index for index, _ in selection.picks]
    )
    for position, shard in enumerate(shards):
        table.attach(position, shard)

    assert len(maps.read_text().splitlines()) - before < 2 * MAPS_PER_COLUMN * len(shards)
    assert gathered(table, [3, 58], ["wide"]) == expected([3, 58], ["wide"])


def test_only_the_columns_asked_for_come(shards: list[MappedShard]) -> None:
    ids = [59, 0, 10, 9, 33, 33]
    assert gathered(attached(shards), ids, ["wide", "text"]) == expected(ids, ["wide", "text"])


def test_shards_may_be_attached_in_any_order_while_others_are_read(
    shards: list[MappedShard],
) -> None:
    table = MappedTable(LAYOUT, np.arange(0, 60, 10), [10] * 6)
    table.attach(4, shards[4])
    ids = [45, 40, 49] * 200
    with ThreadPoolExecutor(2) as pool:
        readings = [pool.submit(gathered, table, ids, ["a", "row"]) for _ in range(20)]
        for position in (0, 5, 2, 1, 3):
            table.attach(position, shards[position])
    assert all(reading.result() == expected(ids, ["a", "row"]) for reading in readings)
    assert gathered(table, [0, 59, 25], ["row"]) == expected([0, 59, 25], ["row"])


def test_gathered_rows_are_copies_that_outlive_the_files(
    shards: list[MappedShard], tmp_path: Path
) -> None:
    table = attached(shards)
    for path in tmp_path.iterdir():
        path.unlink()
    shards.clear()
    assert gathered(table, [3, 58], ["a", "tags"]) == expected([3, 58], ["a", "tags"])


def test_strings_of_consecutive_rows_are_views_and_outlive_the_files(
    shards: list[MappedShard], tmp_path: Path
) -> None:
    table = attached(shards)
    selection = Selection(LAYOUT, ["text", "tags"])
    rows = np.arange(12, 18)
    batch = table.gather(rows, rows // 10, selection)
    text = shards[1].batch.column(LAYOUT.place("text")[0])
    assert batch.column("text").buffers()[2].address == text.buffers()[2].address

    del table, text
    for path in tmp_path.iterdir():
        path.unlink()
    shards.clear()
    assert logical(batch, selection) == expected(rows.tolist(), ["text", "tags"])


def test_shards_without_rows_and_those_that_are_elsewhere_take_no_addresses(
    tmp_path: Path,
) -> None:
    table = MappedTable(LAYOUT, np.array([0, 0, 4, 10]), [0, 4, 0, 3])
    table.attach(0, mapped(tmp_path, 0, []))
    table.attach(1, mapped(tmp_path, 1, range(4)))
    table.attach(3, mapped(tmp_path, 3, range(10, 13)))
    selection = Selection(LAYOUT, [])

    batch = table.gather(np.array([12, 2]), np.array([3, 1], np.int8), selection)

    assert logical(batch, selection) == expected([12, 2])


class Shifted(MappedShard):
    """A file whose columns lie a byte further than the layout would have them."""

    def offset(self, index: int) -> int:
        return super().offset(index) + 1


def test_a_file_whose_columns_have_other_offsets_is_refused(tmp_path: Path) -> None:
    first = mapped(tmp_path, 0, range(10))
    second = mapped(tmp_path, 1, range(10, 20))
    table = MappedTable(LAYOUT, np.array([0, 10]), [10, 10])
    table.attach(0, first)

    with pytest.raises(ValueError, match=r"a column at byte \d+ of a page cannot be mapped beside"):
        table.attach(1, Shifted(second.sealed, second.path))


def test_more_rows_than_there_are_addresses_for_are_an_error() -> None:
    rows = 2**62 // mmap.PAGESIZE
    with pytest.raises(OSError, match="cannot map"):
        MappedTable(LAYOUT, np.array([0]), [rows])


_PAIRS = [[("a", 1)], [], None, [("bc", 2), ("d", 3)], [("e", 4)]]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(_PAIRS, pa.map_(pa.string(), pa.int64())),
        pa.array([[{"t": "a", "n": [1]}], [], None, [{"t": "bc", "n": []}], [{"t": "", "n": [2]}]]),
        pa.array(
            [[["a", "b"]], [], None, [["c", "d"], None], []], pa.list_(pa.list_(pa.string(), 2))
        ),
        pa.nulls(5),
    ],
    ids=lambda column: str(column.type),
)
def test_nested_rows_with_gaps_between_them_are_gathered(tmp_path: Path, column: pa.Array) -> None:
    batch = pa.record_batch([column], ["c"])
    layout, shard = shard_of(tmp_path / "shard", 0, batch)
    table = MappedTable(layout, np.array([0]), [len(batch)])
    table.attach(0, shard)
    rows = np.array([4, 0, 3, 0])
    found = table.gather(rows, np.zeros(4, np.intp), Selection(layout, ["c"]))
    assert layout.unpack(found).column(0).equals(column.take(pa.array(rows)))


def test_rows_of_a_large_table_come_by_their_pages_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema([("wide", pa.list_(pa.float32(), 34))])
    sizes = [5000, 4000]
    starts = np.cumsum([0, *sizes])
    shards = [
        shard_of(tmp_path / f"{i}.arrow", i, rows_of(schema, starts[i], starts[i + 1]))
        for i in range(2)
    ]
    layout = shards[0][0]
    table = MappedTable(layout, starts[:-1], sizes, disk=DiskReads(10**9, 9000, 10**6))
    for position, (_, shard) in enumerate(shards):
        table.attach(position, shard)
    asked: list[int] = []

    def bring(runs: np.ndarray) -> None:
        asked.append(int(runs[:, 1].sum()))
        virtual_memory.bring(runs)

    monkeypatch.setattr(mapped_table, "bring", bring)
    ids = np.array([8999, 0, 4999, 5000, 2500], np.int64)
    shard_index = np.searchsorted(starts, ids, side="right") - 1

    batch = table.gather(ids, shard_index, Selection(layout, []))

    assert layout.unpack(batch).equals(rows_of(schema, 0, 9000).take(pa.array(ids)))
    (num_bytes,) = asked
    assert len(ids) * 136 < num_bytes <= 2 * len(ids) * mmap.PAGESIZE

    run = np.arange(4900, 5300)  # of two shards; left to the read-ahead of the kernel
    batch = table.gather(run, np.searchsorted(starts, run, side="right") - 1, Selection(layout, []))
    assert layout.unpack(batch).equals(rows_of(schema, 4900, 5300))
    assert len(asked) == 1


def test_the_parts_of_rows_from_a_disk_are_small_and_join_to_all_of_them(tmp_path: Path) -> None:
    disk = DiskReads(10**9, 10, 10**6)
    table = MappedTable(LAYOUT, np.array([0]), [10], disk=disk)
    table.attach(0, mapped(tmp_path, 0, range(10)))
    disk.note(1000, 1000 * mmap.PAGESIZE, 100.0)  # ten rows a second
    ids = np.array([7, 3, 9, 0, 1, 2], np.int64)
    selection = Selection(LAYOUT, [])

    parts = [*table.parts(ids, np.zeros(6, np.int64), selection, 4)]

    assert max(part.num_rows for part in parts) <= 4
    assert parts[0].num_rows == 2  # 0.25 s
    assert [row for part in parts for row in logical(part, selection)] == expected(ids.tolist())


@pytest.mark.parametrize("handle", [None, -1])
def test_pages_are_brought_by_one_call_or_where_the_kernel_refuses_it_by_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handle: int | None
) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(range(256)) * 16 * 64)
    with path.open("rb") as file:
        whole = virtual_memory.MappedFile(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    addresses = virtual_memory.AddressRange(whole.size)
    addresses.map_file(0, whole, 0, whole.size)
    addresses.without_read_ahead()
    if handle is not None:
        monkeypatch.setattr(virtual_memory, "_handle_of", lambda pid: handle)
    pages = np.arange(0, 64, 2) * mmap.PAGESIZE
    runs = np.stack([addresses.start + pages, np.full(len(pages), mmap.PAGESIZE)], axis=1)
    before = virtual_memory.bytes_from_disk()

    virtual_memory.bring(runs)

    assert virtual_memory.bytes_from_disk() - before <= runs[:, 1].sum()
    rows = addresses.rows(0, 256, np.dtype(np.uint8))
    assert (rows == np.arange(256, dtype=np.uint8)).all()
