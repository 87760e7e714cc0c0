"""Parquet: the schema that files share, the splits they are cut into, and what is read of each."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.shards.packing import logical_schema
from cache_server.source.pinned import SourceFile, Split
from cache_server.tables import parquet
from cache_server.tables.footers import read_footers
from tests.table_files import ALL, find, pinned, read, table_of, table_spec


def parquet_schema(
    files: Sequence[SourceFile], missing: str = "refuse"
) -> tuple[pa.Schema, tuple[pq.FileMetaData, ...]]:
    found = read_footers(files, table_spec("/"))
    return (
        parquet.common_schema(files, parquet.schemas_of(found), missing=missing, widen=False),
        found,
    )


def write_groups(path: Path, groups: Sequence[int], **options: Any) -> pa.Table:
    """A Parquet file with row groups of these sizes."""
    table = table_of(sum(groups))
    start = 0
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for size in groups:
            writer.write_table(table.slice(start, size), row_group_size=max(1, size))
            start += size
    return table


def plan_parquet(path: Path, target_bytes: int) -> tuple[pa.Schema, tuple[Split, ...]]:
    files = (pinned(path),)
    schema, footers = parquet_schema(files)
    stored = logical_schema(pa.schema([f for f in schema if not pa.types.is_struct(f.type)]))
    return schema, parquet.cut(files, footers, stored, target_bytes)


# -- schemas ---------------------------------------------------------------------------------------


def test_the_files_share_one_schema_and_keep_their_footers(tmp_path: Path) -> None:
    for index, rows in enumerate([3, 5]):
        pq.write_table(table_of(rows), tmp_path / f"{index}.parquet")
    _, files = find(tmp_path)

    schema, footers = parquet_schema(files)

    assert schema.equals(table_of(0).schema)
    assert [footer.num_rows for footer in footers] == [3, 5]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"a": pa.array([1]), "b": pa.array(["x"])}, "b is string instead of double"),
        ({"a": pa.array([1])}, "b missing; missing_columns: null makes them null"),
    ],
)
def test_a_file_with_other_columns_is_named_with_what_differs(
    tmp_path: Path, other: dict[str, pa.Array], reason: str
) -> None:
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pq.write_table(pa.table({"a": [1], "b": [0.5]}), first)
    pq.write_table(pa.table(other), second)

    with pytest.raises(LoadError) as caught:
        parquet_schema([pinned(first), pinned(second)])
    assert f"{second} has other columns than {first}: {reason}" in str(caught.value)


def test_a_column_that_an_earlier_file_lacks_names_that_file(tmp_path: Path) -> None:
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pq.write_table(pa.table({"a": [1]}), first)
    pq.write_table(pa.table({"a": [1], "c": pa.array([1], pa.int8())}), second)

    with pytest.raises(LoadError, match="c missing") as caught:
        parquet_schema([pinned(first), pinned(second)])
    assert f"{first} has other columns than {second}" in str(caught.value)


def test_columns_are_found_by_name_and_missing_ones_are_null_where_the_spec_says_so(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"a": [1], "b": [0.5]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": [1.5], "a": [2]}), tmp_path / "2.parquet")
    pq.write_table(pa.table({"c": ["x"], "a": [3]}), tmp_path / "3.parquet")
    files = find(tmp_path)[1]

    schema, footers = parquet_schema(files, "null")
    splits = parquet.cut(files, footers, logical_schema(schema), 10**9)

    assert schema.names == ["a", "b", "c"]
    assert [row for split in splits for row in read(split, "parquet", schema)] == [
        {"a": 1, "b": 0.5, "c": None},
        {"a": 2, "b": 1.5, "c": None},
        {"a": 3, "b": None, "c": "x"},
    ]


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_a_file_without_a_sound_footer_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(100), path)
    sound = path.read_bytes()
    path.write_bytes({"truncated": sound[:-50], "empty": b"", "other": b"row,half\n" * 50}[damage])

    with pytest.raises(LoadError, match="cannot read the Parquet footer of") as caught:
        parquet_schema([pinned(path)])
    assert str(path) in str(caught.value)


INT96_TYPE = pa.timestamp("us")
FAR = [dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(1, 1, 1), dt.datetime(2020, 1, 1)]
NESTED = {
    "plain": (INT96_TYPE, FAR),
    "list": (pa.list_(INT96_TYPE), [[far] for far in FAR]),
    "map": (pa.map_(pa.string(), INT96_TYPE), [[("a", far)] for far in FAR]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.list_(INT96_TYPE)), ("c", pa.string())]),
        [{"a": 1, "b": [far], "c": "x"} for far in FAR],
    ),
}


@pytest.mark.parametrize("by_arrow", [True, False])
@pytest.mark.parametrize("kind", NESTED)
def test_timestamps_of_96_bits_keep_far_dates(tmp_path: Path, kind: str, by_arrow: bool) -> None:
    dtype, values = NESTED[kind]
    path = tmp_path / "a.parquet"
    table = pa.table({"i": [1, 2, 3], "t": pa.array(values, dtype), "s": ["x", "y", "z"]})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=by_arrow)

    files = (pinned(path),)
    schema, footers = parquet_schema(files)
    (split,) = parquet.cut(files, footers, logical_schema(pa.schema([schema.field("i")])), 1)

    assert schema.field("t").type == dtype
    rows = read(split, "parquet", schema, "SELECT t FROM source")
    assert [row["t"] for row in rows] == values


def test_timestamps_of_96_bits_are_found_by_their_date(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"t": pa.array(FAR, INT96_TYPE)})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    schema, splits = plan_parquet(path, 1)

    sql = "SELECT t FROM source WHERE t > '2019-01-01'"

    assert [row["t"] for row in read(splits[0], "parquet", schema, sql)] == [FAR[0], FAR[2]]


def test_timestamps_of_nanoseconds_keep_them(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"t": pa.array([1], pa.timestamp("ns"))}), path)

    assert plan_parquet(path, 1)[0].field("t").type == pa.timestamp("ns")


# -- splits: the byte-range rule of DataFusion -----------------------------------------------------


@settings(max_examples=25)
@given(
    groups=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    target_bytes=st.sampled_from([1, 100, 1_000, 5_000, 20_000, 10**9]),
    compression=st.sampled_from(["none", "zstd"]),
    dictionary=st.booleans(),
)
def test_each_split_reads_the_rows_that_its_footer_promises(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[int],
    target_bytes: int,
    compression: str,
    dictionary: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "groups.parquet"
    table = write_groups(path, groups, compression=compression, use_dictionary=dictionary)

    schema, splits = plan_parquet(path, target_bytes)
    rows = [read(split, "parquet", schema) for split in splits]

    assert [len(part) for part in rows] == [split.num_rows for split in splits]
    assert [row for part in rows for row in part] == table.to_pylist()


@pytest.mark.parametrize("sql", [ALL, "SELECT 1 AS one FROM source", "SELECT text FROM source"])
def test_a_large_file_is_cut_like_a_small_one(tmp_path: Path, sql: str) -> None:
    table = write_groups(tmp_path / "a.parquet", [5_000] * 6)

    schema, splits = plan_parquet(tmp_path / "a.parquet", 200_000)
    counts = [len(read(split, "parquet", schema, sql)) for split in splits]

    assert len(splits) > 2
    assert counts == [split.num_rows for split in splits]
    assert sum(counts) == len(table)


def test_the_target_decides_how_many_row_groups_a_split_has(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [100] * 10)

    _, whole = plan_parquet(tmp_path / "a.parquet", 10**9)
    _, halves = plan_parquet(tmp_path / "a.parquet", whole[0].estimated_bytes // 2 + 1)
    _, groups = plan_parquet(tmp_path / "a.parquet", 1)

    assert [split.num_rows for split in whole] == [1000]
    assert len(halves) == 2
    assert len(groups) > 5
    for splits in (halves, groups):
        assert sum(split.num_rows or 0 for split in splits) == 1000
        assert sum(split.estimated_bytes for split in splits) == whole[0].estimated_bytes


def test_a_row_group_that_begins_outside_its_file_is_refused(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [100] * 3)
    file = replace(pinned(tmp_path / "a.parquet"), size=1000)
    _, footers = parquet_schema((file,))

    with pytest.raises(LoadError, match=rf"{file.path}: a row group begins at byte \d+ of 1000"):
        parquet.cut((file,), footers, pa.schema([]), 100)


def test_many_tiny_row_groups_are_cut_as_datafusion_counts(tmp_path: Path) -> None:
    # More ranges than the square root of the size: their number is not always the one asked for.
    pq.write_table(pa.table({"a": range(300)}), tmp_path / "a.parquet", row_group_size=1)

    schema, splits = plan_parquet(tmp_path / "a.parquet", 8)

    assert len(splits) > 100
    for split in splits[:: len(splits) // 10]:
        assert len(read(split, "parquet", schema)) == split.num_rows


def test_a_file_without_rows_has_no_splits(tmp_path: Path) -> None:
    pq.write_table(table_of(0), tmp_path / "none.parquet")
    write_groups(tmp_path / "zero.parquet", [0])

    assert plan_parquet(tmp_path / "none.parquet", 10)[1] == ()
    assert plan_parquet(tmp_path / "zero.parquet", 10)[1] == ()


def test_the_decoded_size_is_exact_for_fixed_width_columns(tmp_path: Path) -> None:
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(784 * 50, np.uint8)), 784)
    table = pa.table({"image": zeros, "label": pa.array([1] * 50, pa.int16())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000

    _, splits = plan_parquet(tmp_path / "a.parquet", 10 * 800)

    assert sum(split.estimated_bytes for split in splits) == 50 * (784 + 2)
    assert len(splits) > 1


def test_only_the_columns_that_are_kept_count(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [1000])
    files = (pinned(tmp_path / "a.parquet"),)
    schema, footers = parquet_schema(files)

    def size_of(*fields: pa.Field) -> int:
        (split,) = parquet.cut(files, footers, pa.schema(fields), 10**9)
        return split.estimated_bytes

    assert size_of(schema.field("row")) == 8_000
    assert size_of(pa.field("made", pa.float32())) == 4_000
    assert size_of(schema.field("text")) > 5_000
    assert size_of(schema.field("row"), schema.field("text")) == 8_000 + size_of(
        schema.field("text")
    )


def dotted_table(num_rows: int) -> pa.Table:
    """Names with dots beside structures whose fields have the same paths."""
    return pa.table(
        {
            "a.b": [f"text {i}" for i in range(num_rows)],
            "a": [{"b": i, "c": "x"} for i in range(num_rows)],
            "row": range(num_rows),
            "v.1": np.arange(num_rows) / 2,
            "tags": [[i] for i in range(num_rows)],
        }
    )


@pytest.mark.parametrize(
    ("columns", "leaves"),
    [
        (["a.b"], [0, 1]),  # the field b of a cannot be told from it, and may be read too
        (["a"], [0, 1, 2]),
        (["v.1", "row"], [3, 4]),
        (["tags"], [5]),
        ([], []),
        (None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_bytes_of_a_column_are_found_whatever_its_name(
    tmp_path: Path, columns: list[str] | None, leaves: list[int]
) -> None:
    pq.write_table(dotted_table(100), tmp_path / "a.parquet", use_dictionary=False)
    (split,) = plan_parquet(tmp_path / "a.parquet", 10**9)[1]
    footer = pq.read_metadata(tmp_path / "a.parquet")
    chunks = [footer.row_group(0).column(i) for i in range(6)]
    ends = [(c.data_page_offset, c.data_page_offset + c.total_compressed_size) for c in chunks]

    found = parquet.ranges(footer, split, columns)

    assert found == [*(ends[leaf] for leaf in leaves), (ends[-1][1], split.file.size)]


def test_the_strings_of_a_column_with_a_dot_in_its_name_count(tmp_path: Path) -> None:
    texts = pa.table({"a.b": ["x" * 1000] * 100, "c": ["y" * 1000] * 100})
    pq.write_table(texts, tmp_path / "a.parquet")

    (split,) = plan_parquet(tmp_path / "a.parquet", 10**9)[1]

    assert split.estimated_bytes == 2 * 100 * (1000 + 4)


# -- what is held of a file at once ----------------------------------------------------------------


def grouped(path: Path, groups: Sequence[int], target_bytes: int) -> tuple[pq.FileMetaData, Any]:
    """The footer of a file of two columns, and its splits with what of column ``b`` is held."""
    with pq.ParquetWriter(path, pa.schema([("a", pa.int64()), ("b", pa.float64())])) as writer:
        for rows in groups:
            values = np.random.default_rng(rows).random(rows)
            writer.write_table(pa.table({"a": np.arange(rows), "b": values}), row_group_size=rows)
    files = (pinned(path),)
    schema, footers = parquet_schema(files)
    splits = parquet.cut(files, footers, logical_schema(schema), target_bytes)
    return footers[0], parquet.with_group_bytes(splits, files, footers, ["b"])


def test_a_split_knows_what_its_largest_row_group_takes_of_the_columns_read(
    tmp_path: Path,
) -> None:
    groups = [100_000, 500_000, 200_000, 300_000]
    footer, (split,) = grouped(tmp_path / "a.parquet", groups, 10**9)

    assert split.file.size > 8 << 20
    assert split.group_bytes == footer.row_group(1).column(1).total_compressed_size
    assert split.group_bytes < footer.row_group(1).total_byte_size


def test_each_split_has_the_size_of_its_largest_row_group(tmp_path: Path) -> None:
    footer, splits = grouped(tmp_path / "a.parquet", [600_000, 200_000, 300_000], 6_000_000)

    chunks = [footer.row_group(index).column(1).total_compressed_size for index in range(3)]
    assert len(splits) > 1
    assert {split.group_bytes for split in splits} <= set(chunks)
    assert splits[0].group_bytes == chunks[0]


def test_of_a_small_file_the_row_groups_are_its_size(tmp_path: Path) -> None:
    _, (split,) = grouped(tmp_path / "a.parquet", [1000], 10**9)

    assert split.group_bytes == split.file.size
