import datetime
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import Layout, schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.plan.pinned_version import (
    PinnedVersion,
    split_from_proto,
    split_to_proto,
    table_from_proto,
)
from cache_server.plan.pinned_version import plan_version as plan_with_pins
from cache_server.shards.packing import ShardBuilder, logical_schema
from cache_server.source.pinned import SourceFile, Split
from cache_server.sql import loader
from cache_server.sql.local_tables import LocalFile


def table_of(num_rows: int) -> pa.Table:
    row = np.arange(num_rows)
    text = pa.array([f"row {number}" for number in row], pa.string())
    return pa.table({"row": row, "half": row / 2, "text": text})


def write(path: Path, num_rows: int = 1000, group: int = 100) -> Path:
    pq.write_table(table_of(num_rows), path, row_group_size=group)
    return path


def plan_version(spec: DatasetSpec) -> PinnedVersion:
    return plan_with_pins(spec).version


def load(plan: PinnedVersion) -> pa.RecordBatch:
    """The logical rows of all shards, as one shard."""
    builder = ShardBuilder(plan.logical)
    (table,) = plan.tables
    for shard in plan.shards or ():
        for split in shard.splits:
            file = LocalFile(Path(split.file.path), table.format, split)
            for batch in loader.read_split(file, plan.sql, table):
                builder.append(batch)
    stored = builder.finish()
    return Layout.of_stored(stored.schema).unpack(stored)


def rows_of(*source: Path, **options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = load(plan_version(DatasetSpec("t", source, **options))).to_pylist()
    return rows


def fingerprint(*source: Path, **options: Any) -> str:
    return plan_version(DatasetSpec("t", source, **options)).key.fingerprint


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_says_how_to_load_every_row_once(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")

    plan = plan_version(DatasetSpec("t", tmp_path, target_shard_bytes=8000))

    assert plan.key.dataset == "t"
    assert [table.format for table in plan.tables] == ["parquet"]
    assert plan.logical.equals(logical_schema(table_of(0).schema))
    assert len(plan.shards) > 2
    assert (plan.keeps_every_row, plan.max_rows) == (True, 1000)
    assert load(plan).to_pylist() == table_of(1000).to_pylist()


@pytest.mark.parametrize(
    ("options", "keeps", "max_rows"),
    [
        ({}, True, 1000),
        ({"columns": ["text"]}, True, 1000),
        ({"sql": "SELECT row + 1 AS next FROM source"}, True, 1000),
        ({"filter": "row < 10"}, False, 1000),
        ({"filter": "row < 0"}, False, 1000),
        ({"sql": "SELECT unnest([row, row]) AS row FROM source"}, False, 0),
    ],
)
def test_the_rows_are_known_beforehand_unless_the_query_changes_them(
    tmp_path: Path, options: dict[str, Any], keeps: bool, max_rows: int
) -> None:
    plan = plan_version(DatasetSpec("t", write(tmp_path / "a.parquet"), **options))

    assert (plan.keeps_every_row, plan.max_rows) == (keeps, max_rows)


def test_an_unnest_makes_more_rows_than_the_footer_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 100)

    rows = rows_of(path, sql="SELECT unnest([row, -row]) AS row FROM source")

    assert [row["row"] for row in rows] == [n for i in range(100) for n in (i, -i)]


@pytest.mark.parametrize("filter", ["row < 0", "1 = 0", "NULL", "row > 5 AND row < 3"])
@pytest.mark.parametrize("target", [1000, 10**9])
def test_a_filter_that_keeps_nothing_gives_no_rows(
    tmp_path: Path, filter: str, target: int
) -> None:
    path = write(tmp_path / "a.parquet")

    assert rows_of(path, filter=filter, target_shard_bytes=target) == []


def test_a_file_without_rows_is_a_version_without_shards(tmp_path: Path) -> None:
    plan = plan_version(DatasetSpec("t", write(tmp_path / "a.parquet", 0)))

    assert (plan.shards, plan.max_rows, plan.keeps_every_row) == ((), 0, True)
    assert plan.logical.names == ["row", "half", "text"]


def test_many_small_files_share_shards(tmp_path: Path) -> None:
    for index in range(10):
        write(tmp_path / f"{index}.parquet", 10)

    plan = plan_version(DatasetSpec("t", tmp_path, target_shard_bytes=1000))

    assert 1 < len(plan.shards) < 10
    assert plan.max_rows == 100


def test_a_bad_query_and_a_bad_source_are_refused_before_any_load(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")

    with pytest.raises(RequestError, match="nope"):
        plan_version(DatasetSpec("t", path, columns=["nope"]))
    with pytest.raises(LoadError, match="does not exist"):
        plan_version(DatasetSpec("t", tmp_path / "b.parquet"))


# -- formats ---------------------------------------------------------------------------------------


def write_csv(path: Path, names: str, *rows: str) -> Path:
    path.write_text("\n".join([names, *rows]) + "\n")
    return path


def write_arrow(path: Path, table: pa.Table) -> Path:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def test_csv_files_come_one_after_the_other(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "1.csv", "a,b", "1,x", "2,y")
    second = write_csv(tmp_path / "2.csv", "a,b", "3,z")

    plan = plan_version(DatasetSpec("t", [second, first]))

    assert (plan.tables[0].format, plan.keeps_every_row, plan.max_rows) == ("csv", False, 0)
    assert load(plan).to_pylist() == [
        {"a": 3, "b": "z"},
        {"a": 1, "b": "x"},
        {"a": 2, "b": "y"},
    ]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("b,a", "they stand as b, a instead of a, b"),
        ("a,c", "b is missing instead of int64; c is int64 instead of absent"),
        ("a,b,c", "c is int64 instead of absent"),
        ("a,B", "B is int64 instead of absent"),
    ],
)
def test_a_csv_that_names_other_columns_is_refused(tmp_path: Path, names: str, reason: str) -> None:
    first = write_csv(tmp_path / "1.csv", "a,b", "1,2")
    second = write_csv(tmp_path / "2.csv", names, "3,4,5"[: len(names)])

    with pytest.raises(LoadError) as caught:
        plan_version(DatasetSpec("t", tmp_path))
    assert f"{second} has other columns than {first}: " in str(caught.value)
    assert reason in str(caught.value)


def test_an_arrow_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    first = write_arrow(tmp_path / "1.arrow", pa.table({"a": [1], "b": [2]}))
    second = write_arrow(tmp_path / "2.arrow", pa.table({"b": [1], "c": [2]}))

    with pytest.raises(LoadError) as caught:
        plan_version(DatasetSpec("t", tmp_path))
    assert f"{first} has other columns than {second}: c missing" in str(caught.value)


def test_json_is_read_by_name_and_a_missing_name_is_null(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"a": 0.5, "b": "x"}\n{"b": "y", "a": 1}\n')
    (tmp_path / "2.json").write_text('{"b": "z", "a": 2}\n{"a": 3, "more": 0.5}')

    assert rows_of(tmp_path) == [
        *({"a": 0.5, "b": "x", "more": None}, {"a": 1.0, "b": "y", "more": None}),
        *({"a": 2.0, "b": "z", "more": None}, {"a": 3.0, "b": None, "more": 0.5}),
    ]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [{"a": 1, "day": 1, "land": None}, {"a": 2, "day": 2, "land": "de"}]),
        ({"filter": "day > 1"}, [{"a": 2, "day": 2, "land": "de"}]),
        ({"columns": ["land"]}, [{"land": None}, {"land": "de"}]),
        ({"sql": "SELECT a + day AS sum FROM source"}, [{"sum": 2}, {"sum": 4}]),
    ],
)
def test_json_has_the_columns_in_the_names_of_its_directories(
    tmp_path: Path, options: dict[str, Any], wanted: list[dict[str, Any]]
) -> None:
    for day, land in ((1, "__HIVE_DEFAULT_PARTITION__"), (2, "de")):
        folder = tmp_path / f"day={day}" / f"land={land}"
        folder.mkdir(parents=True)
        (folder / "a.json").write_text(f'{{"a": {day}}}\n')

    assert rows_of(tmp_path, **options) == wanted


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_the_types_of_a_spec_are_those_of_the_table(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text("zip,n\n01234,1\n" if suffix == "csv" else '{"zip": "01234", "n": 1}\n')
    types = {"zip": "string", "n": "int16"}

    plan = plan_version(DatasetSpec("t", path, types=types, filter="zip LIKE '0%'"))

    assert plan.tables[0].schema.types == [pa.string(), pa.int16()]
    assert rows_of(path, types=types, filter="zip LIKE '0%'") == [{"zip": "01234", "n": 1}]


@pytest.mark.parametrize(
    ("name", "types", "reason"),
    [
        ("a.csv", {"zap": "string"}, "names the column 'zap', .* columns: zip, n$"),
        ("a.csv", {"year": "string"}, "names the column 'year', .* columns: zip, n$"),
        ("a.csv", {"n": "list<int8>"}, "types.n: list<item: int8> is for json, not csv"),
        ("b.parquet", {"row": "int8"}, "got {'row': 'int8'}, is for csv and json, not for parquet"),
        ("t.metadata.json", {"a": "int8"}, "types and escape are for files, not for iceberg"),
    ],
)
def test_types_that_the_table_cannot_have_are_refused(
    tmp_path: Path, name: str, types: dict[str, str], reason: str
) -> None:
    folder = tmp_path / "year=2024"
    folder.mkdir()
    (folder / "a.csv").write_text("zip,n\n01234,1\n")
    write(folder / "b.parquet")

    with pytest.raises(RequestError, match=reason):
        plan_version(DatasetSpec("t", folder / name, types=types))


@pytest.mark.parametrize("format", ["csv", "json"])
def test_empty_files_among_others_hold_no_rows(tmp_path: Path, format: str) -> None:
    text = {"csv": "a\n7\n", "json": '{"a": 7}\n'}[format]
    for name, content in (("1", ""), ("2", text), ("3", ""), ("4", text)):
        (tmp_path / f"{name}.{format}").write_text(content)

    assert rows_of(tmp_path) == [{"a": 7}, {"a": 7}]


@pytest.mark.parametrize("format", ["csv", "json", "arrow"])
def test_a_source_of_nothing_but_empty_files_is_named(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{format}"
    path.touch()

    with pytest.raises(LoadError, match="is empty") as caught:
        plan_version(DatasetSpec("t", path))
    assert str(path) in str(caught.value)


DAY = datetime.date(2024, 2, 29)
COLUMNS = {
    **{
        str(dtype): pa.array([1, 2, 3], dtype)
        for dtype in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float32(), pa.float64(), pa.date32()),
            *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
            *(pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns")),
            *(pa.timestamp("us", "UTC"), pa.timestamp("ns", "Europe/Berlin")),
            *(pa.duration("s"), pa.duration("us")),
        )
    },
    "date64": pa.array([DAY, DAY, DAY], pa.date64()),
    "float16": pa.array(np.array([1, 2, 3], np.float16)),
    "bool": pa.array([True, False, True]),
    "decimal128": pa.array([Decimal("1.5"), None, Decimal(2)], pa.decimal128(10, 2)),
    "decimal256": pa.array([Decimal("1.5"), None, Decimal(2)], pa.decimal256(50, 2)),
    "string": pa.array(["a", None, "ü"]),
    "large_string": pa.array(["a", None, "ü"], pa.large_string()),
    "string_view": pa.array(["a", None, "ü"], pa.string_view()),
    "binary": pa.array([b"a", None, b"\0"]),
    "large_binary": pa.array([b"a", None, b"\0"], pa.large_binary()),
    "fixed_size_binary": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "dictionary of string": pa.array(["a", None, "a"]).dictionary_encode(),
    "dictionary of int": pa.array([1, 2, 1]).dictionary_encode(),
    "dictionary of date": pa.array([DAY, DAY, DAY], pa.date32()).dictionary_encode(),
    "dictionary of time": pa.array([1, 2, 1], pa.timestamp("us", "UTC")).dictionary_encode(),
    "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
    "large_list": pa.array([["a", None], None, []], pa.large_list(pa.string())),
    "list of date": pa.array([[DAY], None, []], pa.list_(pa.date32())),
    "image": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint8(), 2)),
    "embedding": pa.array([[1, None], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
    "nested": pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int16(), 2), 1)),
    "list of points": pa.array([[[1, 2]], None, []], pa.list_(pa.list_(pa.float32(), 2))),
}


def packed(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    builder = ShardBuilder(logical_schema(batch.schema))
    builder.append(batch)
    stored = builder.finish()
    return Layout.of_stored(stored.schema).unpack(stored)


@pytest.mark.parametrize("filter", [None, '"x" IS NOT NULL OR 1 = 1'])
@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_a_parquet_column_is_loaded_as_pyarrow_reads_it(
    tmp_path: Path, column: pa.Array, filter: str | None
) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")

    plan = plan_version(DatasetSpec("t", tmp_path, filter=filter))
    expected = packed(pq.read_table(tmp_path / "a.parquet"))

    assert plan.logical.equals(expected.schema, check_metadata=True)
    assert repr(load(plan).to_pylist()) == repr(expected.to_pylist())


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_an_arrow_column_is_loaded_as_it_is(tmp_path: Path, column: pa.Array) -> None:
    table = pa.table({"x": column})
    write_arrow(tmp_path / "a.arrow", table)

    plan = plan_version(DatasetSpec("t", tmp_path))

    assert plan.logical.equals(packed(table).schema, check_metadata=True)
    assert repr(load(plan).to_pylist()) == repr(packed(table).to_pylist())


# -- fingerprints ----------------------------------------------------------------------------------


def test_the_same_spec_of_the_same_source_is_the_same_version(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")

    assert fingerprint(path) == fingerprint(path)
    assert fingerprint(path) == fingerprint(path, replicas=3)
    assert fingerprint(path) == fingerprint(tmp_path / "*.parquet")
    assert fingerprint(path) == fingerprint(path, sql="SELECT * FROM source")
    assert len(fingerprint(path)) == 32


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def age(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 1))


def add(path: Path) -> None:
    write(path.with_name("z.parquet"))


@pytest.mark.parametrize("change", [age, add])
def test_a_changed_source_is_another_version(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "a.parquet")
    before = fingerprint(tmp_path)

    change(path)

    assert fingerprint(tmp_path) != before


def test_a_grown_file_of_the_same_mtime_is_another_version(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", "a", "1")
    before, mtime = fingerprint(path), path.stat().st_mtime_ns

    grow(path)
    os.utime(path, ns=(0, mtime))

    assert fingerprint(path) != before


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["row"]},
        {"filter": "row > 1"},
        {"sql": "SELECT text FROM source"},
        {"target_shard_bytes": 1000},
    ],
)
def test_what_changes_the_stored_bytes_is_another_version(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.parquet")

    assert fingerprint(path, **options) != fingerprint(path)


def test_types_are_part_of_the_version_where_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,n\n01234,1\n")
    plain = fingerprint(tmp_path)
    as_text = fingerprint(tmp_path, types={"zip": "string"})

    assert fingerprint(tmp_path, types={}) == plain
    assert fingerprint(tmp_path, types={"zip": "utf8"}) == as_text
    assert len({plain, as_text, fingerprint(tmp_path, types={"zip": "int32"})}) == 3


def test_the_order_of_the_sources_is_part_of_the_version(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet")

    assert fingerprint(a, b) != fingerprint(b, a)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [None, 0, 7])
def test_a_split_keeps_what_it_knows_over_the_wire(num_rows: int | None) -> None:
    split = Split(SourceFile("/data/ü.parquet", 2**40, 2**61), 3, 5, num_rows, 2**35, "", 2**36)

    message = pb.Split.FromString(split_to_proto(split).SerializeToString())

    assert split_from_proto(message) == split


def test_a_load_plan_is_enough_to_load_from(tmp_path: Path) -> None:
    plan = plan_version(DatasetSpec("t", write(tmp_path / "a.parquet"), filter="row > 990"))

    message = pb.LoadPlan.FromString(plan.to_load_plan(attempt=2).SerializeToString())

    assert (message.dataset, message.fingerprint) == ("t", plan.key.fingerprint)
    assert (message.tables[0].format, message.sql, message.attempt) == ("parquet", plan.sql, 2)
    assert table_from_proto(message.tables[0]) == plan.tables[0]
    logical = schema_from_bytes(message.logical_schema)
    assert logical.equals(plan.logical, check_metadata=True)
