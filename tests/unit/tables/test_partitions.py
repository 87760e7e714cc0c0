"""Columns in the names of directories, and what counts as the root of a table."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_server.plan.pinned_version import plan_version
from cache_server.shards.packing import logical_schema
from cache_server.tables import files as sources
from cache_server.tables import local_files
from tests.table_files import read, table_spec, touch


def write_partitions(root: Path) -> Path:
    for day in (1, 2, 3):
        for land in ("de", "fr", "__HIVE_DEFAULT_PARTITION__"):
            folder = root / f"day={day}" / f"land={land}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table({"n": [day * 10, day * 10 + 1]}), folder / "x.parquet")
    return root


def test_the_columns_in_the_names_of_directories_appear_with_their_types(tmp_path: Path) -> None:
    _, pin = sources.pin(table_spec(write_partitions(tmp_path)))
    splits = pin.cut(logical_schema(pin.schema), 10**9)

    rows = [row for split in splits for row in read(split, "parquet", pin.schema)]

    assert [(f.name, str(f.type)) for f in pin.schema] == [
        ("n", "int64"), ("day", "int64"), ("land", "string"),
    ]  # fmt: skip
    assert rows[:4] == [
        {"n": 10, "day": 1, "land": None},
        {"n": 11, "day": 1, "land": None},
        {"n": 10, "day": 1, "land": "de"},
        {"n": 11, "day": 1, "land": "de"},
    ]
    assert len(rows) == 18


def test_keys_that_begin_with_an_underscore_are_columns_as_in_spark_and_duckdb(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        folder = tmp_path / f"day={number}" / f"_hour={number}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"n": [number]}), folder / "x.parquet")
    touch(tmp_path / "_temporary" / "day=1" / "_hour=1" / "y.parquet")

    _, pin = sources.pin(table_spec(tmp_path))
    splits = pin.cut(logical_schema(pin.schema), 10**9)

    rows = [row for split in splits for row in read(split, "parquet", pin.schema)]
    assert rows == [{"n": number, "day": number, "_hour": number} for number in (1, 2)]


@pytest.mark.parametrize(
    ("filter", "left"),
    [
        ("day >= 2 AND land = 'fr'", ["day=2/land=fr", "day=3/land=fr"]),
        ("day IN (1, 7) AND land IS NOT NULL", ["day=1/land=de", "day=1/land=fr"]),
        ("day = 2 OR n = 30", None),
        ("day > 9", []),
    ],
)
def test_partitions_that_no_row_can_come_from_are_never_looked_at(
    tmp_path: Path, filter: str, left: list[str] | None
) -> None:
    write_partitions(tmp_path)

    plan = plan_version(DatasetSpec("t", tmp_path, filter=filter)).version

    splits = [split for shard in plan.shards or () for split in shard.splits]
    found = [str(Path(split.file.path).parent.relative_to(tmp_path)) for split in splits]
    assert found == left if left is not None else len(found) == 9


def test_directories_above_the_source_and_keys_that_not_all_files_have_are_no_columns(
    tmp_path: Path,
) -> None:
    root = write_partitions(tmp_path / "year=2024")

    assert sources.pin(table_spec(root / "day=1"))[1].schema.names == ["n", "land"]
    (root / "day=1" / "other").mkdir()
    pq.write_table(pa.table({"n": [1]}), root / "day=1" / "other" / "y.parquet")
    assert sources.pin(table_spec(root))[1].schema.names == ["n", "day"]


def test_a_source_that_is_a_file_has_no_columns_of_the_directories_above(tmp_path: Path) -> None:
    root = write_partitions(tmp_path / "year=2024")
    file = root / "day=1" / "land=de" / "x.parquet"

    for source in (file, file.as_uri(), tmp_path / "year=2024/day=1/land=de" / "[x].parquet"):
        assert local_files.find_files(table_spec(source))[2] == ("x.parquet",)
        assert sources.pin(table_spec(source))[1].schema.names == ["n"]


def test_brackets_in_the_name_of_a_directory_do_not_move_the_source_up(tmp_path: Path) -> None:
    root = write_partitions(tmp_path / "set[1]" / "year=2024")

    assert sources.pin(table_spec(root))[1].schema.names == ["n", "day", "land"]


@pytest.mark.parametrize("source", ["//year=2024//", "//year=2024/./day=*"])
def test_a_uri_with_slashes_to_spare_finds_the_same_columns(tmp_path: Path, source: str) -> None:
    write_partitions(tmp_path / "year=2024")
    uri = f"file://{tmp_path}{source}" + ("/*/*.parquet" if "*" in source else "")

    assert sources.pin(table_spec(uri))[1].schema.names == ["n", "day", "land"]


def test_patterns_to_ignore_are_over_paths_below_the_source(tmp_path: Path) -> None:
    kept = touch(tmp_path / "old" / "new" / "a.parquet")
    touch(tmp_path / "old" / "new" / "old" / "b.parquet")

    for source in (tmp_path / "old" / "new", f"file://{tmp_path}/old//new"):
        _, files, relative = local_files.find_files(table_spec(source, ignore=["old/*"]))
        assert ([file.path for file in files], relative) == ([kept], ("a.parquet",))
