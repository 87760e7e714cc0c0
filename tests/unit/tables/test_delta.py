import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import Layout
from cache_server.tables import delta
from tests.checked_network import checked_network
from tests.delta_logs import commit, delete_by_vector, protocol
from tests.lake_tables import (
    SECRET,
    assert_same_rows,
    lake_bucket,
    loaded_splits,
    pinned_table,
    read_table,
    s3_options,
)


def _rows(start: int, count: int, **more: list[Any]) -> pa.Table:
    ids = range(start, start + count)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "part": pa.array([(None, "a b", "c/d%é")[i % 3] for i in ids]),
        "day": pa.array([date(2024, 1, 1 + i % 2) for i in ids]),
        "score": pa.array([i / 2 if i % 4 else None for i in ids], pa.float32()),
        "tags": pa.array([[f"t{i}"] * (i % 3) for i in ids], pa.list_(pa.string())),
        "at": pa.array([datetime(2024, 1, 1, tzinfo=UTC)] * count, pa.timestamp("us", "UTC")),
    }
    return pa.table({**columns, **more})


def _evolve(uri: str, storage: dict[str, str] | None = None) -> DeltaTable:
    """Two partition columns; versions 0 to 3: a write, an append, an added column, deletes."""
    options = {"storage_options": storage, "mode": "append"}
    write_deltalake(uri, _rows(0, 30), partition_by=["part", "day"], **options)
    write_deltalake(uri, _rows(100, 7), **options)
    extra = pa.array([None, 1, 2, 3], pa.int32())
    write_deltalake(uri, _rows(200, 4, extra=extra), schema_mode="merge", **options)
    table = DeltaTable(uri, storage_options=storage)
    table.delete("id >= 5 and id < 11")
    return table


def _spec(source: str, **arguments: Any) -> TableSpec:
    return DatasetSpec("d", source, format="delta", **arguments).tables[0]


def test_each_version_is_what_deltalake_reads(tmp_path: Path) -> None:
    uri = str(tmp_path / "a table")
    latest = _evolve(uri).version()
    assert latest == 3
    for version in range(latest + 1):
        spec = _spec(uri, snapshot=version)
        pin = delta.pin(spec)
        found = read_table(spec, pin)
        assert_same_rows(found, DeltaTable(uri, version=version).to_pyarrow_table())
        assert found.equals(read_table(spec, delta.pin(spec)))  # in the same order
        assert pin.exact_rows and pin.comparable and json.dumps(pin.content)
        rows = sum(split.num_rows or 0 for split in pin.cut(pa.schema([]), 1))
        assert rows == found.num_rows
    assert delta.pin(_spec(uri)).content == pin.content
    assert delta.pin(_spec(f"file://{tmp_path}/a%20table")).content == pin.content


def test_the_schema_is_plain(tmp_path: Path) -> None:
    _evolve(str(tmp_path / "t"))
    schema = delta.pin(_spec(str(tmp_path / "t"))).schema
    assert dict(zip(schema.names, schema.types, strict=True)) == {
        "id": pa.int64(),
        "part": pa.string(),
        "day": pa.date32(),
        "score": pa.float32(),
        "tags": pa.list_(pa.field("element", pa.string())),
        "at": pa.timestamp("us", "UTC"),
        "extra": pa.int32(),
    }
    assert not schema.metadata and not any(field.metadata for field in schema)


def test_splits_are_the_files_as_they_were_written(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    table = _evolve(uri)
    stored = pa.schema([("id", pa.int64()), ("score", pa.float32()), ("part", pa.string())])
    splits = delta.pin(_spec(uri)).cut(stored, 1)
    adds = {add["path"]: add for add in pa.table(table.get_add_actions()).to_pylist()}
    written = sorted(adds, key=lambda path: (adds[path]["modification_time"], path))
    assert [split.file.path for split in splits] == [f"file://{uri}/{path}" for path in written]
    for split in splits:
        add = adds[split.file.path.removeprefix(f"file://{uri}/")]
        assert (split.file.size, split.num_rows) == (add["size_bytes"], add["num_records"])
        assert (split.part, split.parts) == (0, 1)
        part = add["partition"]["part"] or ""
        row_bytes = Layout(stored).fixed_row_bytes + 4 + len(part.encode())
        assert split.estimated_bytes == add["num_records"] * row_bytes


def test_only_the_columns_of_the_query_are_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    table = _evolve(uri)
    spec = _spec(uri)
    pin = delta.pin(spec)
    for columns in (("part", "extra"), ("day",), ("id",)):
        assert_same_rows(
            read_table(spec, pin, columns), table.to_pyarrow_table(columns=list(columns))
        )
    splits = pin.cut(pa.schema([]), 1)
    loaded = loaded_splits(spec, pinned_table(spec, pin), splits)
    assert not any(file.is_staged for _, file in loaded)
    pinned = pinned_table(spec, pin, ())
    counted = sum(b.num_rows for split in splits for b in delta.read(pinned, split, {}))
    assert counted == table.count()


def test_a_pinned_table_stays_as_it_was(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    expected = _evolve(uri).to_pyarrow_table()
    spec = _spec(uri)
    pin = delta.pin(spec)
    write_deltalake(uri, _rows(300, 3), mode="append", schema_mode="merge")
    assert_same_rows(read_table(spec, pin), expected)
    assert delta.pin(spec).content != pin.content


def test_splits_are_read_at_once_and_the_log_once(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    expected = _evolve(uri).to_pyarrow_table()
    spec = _spec(uri)
    pin = delta.pin(spec)
    pinned = pinned_table(spec, pin)
    splits = pin.cut(pa.schema([]), 1)
    with (
        patch.object(delta, "_reopen", wraps=delta._reopen) as reopened,
        ThreadPoolExecutor(4) as pool,
    ):
        parts = list(pool.map(lambda split: list(delta.read(pinned, split, {})), splits * 2))
    assert reopened.call_count == 1
    assert_same_rows(
        pa.Table.from_batches([b for part in parts[: len(splits)] for b in part]), expected
    )


def test_rows_are_counted_where_the_log_does_not_tell(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), _rows(0, 9), configuration={"delta.dataSkippingNumIndexedCols": "0"})
    _rewrite_log(uri, 0, lambda action: action.get("add", {}).update(stats=None))
    assert pa.table(DeltaTable(str(uri)).get_add_actions()).column("num_records").null_count == 1
    (split,) = delta.pin(_spec(str(uri))).cut(pa.schema([]), 1)
    assert split.num_rows == 9


def _rewrite_log(uri: Path, version: int, change: Any) -> None:
    path = uri / "_delta_log" / f"{version:020}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        change(action)
    path.write_text("\n".join(map(json.dumps, actions)))


def test_a_binary_partition_is_refused_by_name(tmp_path: Path) -> None:
    rows = pa.table({"id": [0, 1], "key": pa.array([b"a", b"\xff"])})
    write_deltalake(str(tmp_path), rows, partition_by=["key"])

    with pytest.raises(RequestError, match="is partitioned by key, which is binary"):
        delta.pin(_spec(str(tmp_path)))


def test_deletion_vectors_are_honoured(tmp_path: Path) -> None:
    uri = tmp_path / "a table"
    rows = pa.table({"id": range(10), "part": ["a b%"] * 10})
    write_deltalake(str(uri), rows, partition_by=["part"])
    before = delta.pin(_spec(str(uri)))
    delete_by_vector(uri, [1, 3, 4])
    spec = _spec(str(uri))
    pin = delta.pin(spec)
    assert read_table(spec, pin).column("id").to_pylist() == [0, 2, 5, 6, 7, 8, 9]
    assert read_table(spec, pin, ("part",)).num_rows == 7
    assert before.exact_rows and not pin.exact_rows
    assert [split.num_rows for split in pin.cut(pa.schema([]), 1)] == [10]
    assert pin.content != before.content
    old = _spec(str(uri), snapshot=0)
    assert read_table(old, delta.pin(old)).num_rows == 10


def test_deletion_vectors_span_batches(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), pa.table({"id": range(300_000)}))
    gone = [0, 7, 60_000]
    delete_by_vector(uri, gone)
    spec = _spec(str(uri))
    found = read_table(spec, delta.pin(spec))
    assert found.num_rows == 300_000 - len(gone)
    assert found.column("id").to_pylist() == [i for i in range(300_000) if i not in gone]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_column_mapping_is_refused_by_name(tmp_path: Path, mode: str) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), _rows(0, 3))

    def map_columns(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"]):
                field["metadata"] = {
                    "delta.columnMapping.id": number + 1,
                    "delta.columnMapping.physicalName": f"col-{number}",
                }
            action["metaData"]["schemaString"] = json.dumps(schema)
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": mode}

    _rewrite_log(uri, 0, map_columns)
    with pytest.raises(RequestError, match=rf"version 0 has column mapping \(mode {mode}\)"):
        delta.pin(_spec(str(uri)))


@pytest.mark.parametrize("feature", ["typeWidening", "vacuumProtocolCheck", "variantType"])
def test_other_reader_features_are_refused_by_name(tmp_path: Path, feature: str) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), _rows(0, 3))
    commit(uri, 1, protocol(feature))
    with pytest.raises(RequestError, match=f"features that are not honoured here: {feature}$"):
        delta.pin(_spec(str(uri)))


def test_a_widened_column_is_cast(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), pa.table({"id": pa.array([1, 2], pa.int64())}))
    (file,) = uri.glob("*.parquet")
    pq.write_table(pa.table({"id": pa.array([1, 2], pa.int32())}), file)
    size = file.stat().st_size
    _rewrite_log(uri, 0, lambda action: action.get("add", {}).update(size=size))
    spec = _spec(str(uri))
    assert read_table(spec, delta.pin(spec)).column("id").to_pylist() == [1, 2]


def test_a_column_is_found_whatever_the_case_of_its_name_in_the_file(tmp_path: Path) -> None:
    names = ["Id", "Text"]
    write_deltalake(str(tmp_path), pa.table([[1, 2], ["a", "bc"]], names=names))
    (file,) = tmp_path.glob("*.parquet")
    pq.write_table(pa.table({"ID": [1, 2], "text": ["a", "bc"]}), file)
    size = file.stat().st_size
    _rewrite_log(tmp_path, 0, lambda action: action.get("add", {}).update(size=size))
    spec = _spec(str(tmp_path))
    pin = delta.pin(spec)
    assert read_table(spec, pin).to_pydict() == {"Id": [1, 2], "Text": ["a", "bc"]}
    (split,) = pin.cut(pa.schema([("Text", pa.string())]), 1)
    assert split.estimated_bytes == 2 * 4 + len("abc")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(LoadError, match=f"cannot read Delta table {absent}"):
        delta.pin(_spec(absent))
    assert not Path(absent).exists()
    uri = str(tmp_path / "t")
    _evolve(uri)
    with pytest.raises(RequestError, match="no version 9; its versions go up to 3"):
        delta.pin(_spec(uri, snapshot=9))
    several = DatasetSpec("d", ["/a", "/b"], format="delta").tables[0]
    with pytest.raises(RequestError, match="one source"):
        delta.pin(several)
    with pytest.raises(RequestError, match="no snapshot 'v1': its versions have numbers"):
        delta.pin(_spec(str(tmp_path), snapshot="v1"))


def test_a_version_of_which_the_log_was_cleaned_up_is_named(tmp_path: Path) -> None:
    for n in range(3):
        write_deltalake(str(tmp_path), pa.table({"id": [n]}), mode="append")
    DeltaTable(str(tmp_path)).create_checkpoint()
    for version in range(2):
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()

    assert delta.pin(_spec(str(tmp_path))).exact_rows
    with pytest.raises(LoadError, match="the log of version 1 is gone or unreadable"):
        delta.pin(_spec(str(tmp_path), snapshot=1))


def test_the_planner_names_a_file_that_was_vacuumed_where_it_needs_its_footer(
    tmp_path: Path,
) -> None:
    write_deltalake(str(tmp_path), pa.table({"id": [1], "text": ["a"]}))
    write_deltalake(str(tmp_path), pa.table({"id": [2], "text": ["b"]}), mode="overwrite")
    table = DeltaTable(str(tmp_path))
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    pin = delta.pin(_spec(str(tmp_path), snapshot=0))

    with pytest.raises(LoadError, match=r"file file://.*\.parquet of Delta table"):
        pin.cut(pa.schema([("text", pa.string())]), 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), _rows(0, 3))
    spec = _spec(str(uri))
    pin = delta.pin(spec)
    (split,) = pin.cut(pa.schema([]), 1)
    next(uri.glob("*.parquet")).unlink()
    with pytest.raises(LoadError) as caught:
        list(delta.read(pinned_table(spec, pin), split, {}))
    assert split.file.path in str(caught.value) and "\n" not in str(caught.value)


def test_another_table_at_the_same_place_is_refused(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), _rows(0, 3))
    spec = _spec(str(uri))
    pin = delta.pin(spec)
    (split,) = pin.cut(pa.schema([]), 1)
    (uri / "_delta_log" / f"{0:020}.json").unlink()
    write_deltalake(str(uri), _rows(0, 3))
    with pytest.raises(LoadError, match="changed since the dataset was planned"):
        list(delta.read(pinned_table(spec, pin), split, {}))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with lake_bucket() as endpoint:
        yield endpoint


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_table_in_s3(s3: str, is_checked: bool) -> None:
    storage = {**s3_options(s3), "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    name = f"a table {is_checked}"
    table = _evolve(f"s3://lake/{name}", {**storage, "aws_conditional_put": "etag"})
    with checked_network(f"{s3}/") if is_checked else nullcontext():
        _assert_read(table, name, s3)


def _assert_read(table: DeltaTable, name: str, s3: str) -> None:
    parts = pa.schema([("part", pa.string())])
    for scheme in ("s3", "s3a"):
        spec = _spec(f"{scheme}://lake/{name}", storage_options=s3_options(s3))
        pin = delta.pin(spec)
        assert_same_rows(read_table(spec, pin), table.to_pyarrow_table())
        assert sum(split.estimated_bytes for split in pin.cut(parts, 1)) == sum(
            4 + len((part or "").encode())
            for part in table.to_pyarrow_table().column("part").to_pylist()
        )
        assert SECRET not in pin.snapshot + json.dumps(pin.content) + repr(spec)


def test_the_place_of_the_store_may_come_from_the_environment(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = {**s3_options(s3), "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    table = _evolve("s3://lake/by environment", {**storage, "aws_conditional_put": "etag"})
    for name, value in s3_options(s3).items():
        monkeypatch.setenv(name, value)

    spec = _spec("s3://lake/by environment")

    assert_same_rows(read_table(spec, delta.pin(spec)), pa.table(table.to_pyarrow_table()))


def test_a_line_break_in_a_variable_of_s3_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}\n")
    with pytest.raises(RequestError, match="AWS_SECRET_ACCESS_KEY must have no") as caught:
        delta.pin(_spec("s3://lake/t"))
    assert SECRET not in str(caught.value)


def test_a_missing_object_names_itself_and_no_key(s3: str) -> None:
    for uri in ("s3://lake/none", "s3://absent/t"):
        with pytest.raises(LoadError) as caught:
            delta.pin(_spec(uri, storage_options=s3_options(s3)))
        message = str(caught.value)
        assert uri in message and s3 in message and SECRET not in message and "\n" not in message


def test_a_secret_in_a_message_of_the_library_is_hidden() -> None:
    spec = _spec("s3://lake/t", storage_options=s3_options("http://h"))
    with (
        patch.object(delta, "_open", side_effect=ValueError(f"denied\n  \x1b[31m↳ for {SECRET}")),
        pytest.raises(LoadError, match=r": denied for \*\*\*$"),
    ):
        delta.pin(spec)


def test_an_unknown_option_is_refused_by_its_name_before_anything_is_asked(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), _rows(0, 3))
    options = {**s3_options("http://127.0.0.1:1"), "nope": SECRET}
    with pytest.raises(RequestError, match="the s3 store has no option 'nope'; it has") as caught:
        delta.pin(_spec("s3://lake/t", storage_options=options))
    assert SECRET not in str(caught.value)
    with pytest.raises(RequestError, match="no store has an option 'nope'"):
        delta.pin(_spec(str(tmp_path), storage_options={"nope": "x"}))
    of_a_writer = {"AWS_S3_ALLOW_UNSAFE_RENAME": "true", "AWS_REGION": "us-east-1"}
    assert delta.pin(_spec(str(tmp_path), storage_options=of_a_writer)).exact_rows


@pytest.mark.parametrize(
    ("gone", "lacking"),
    [((2,), "version 2$"), ((1, 2, 3), "version 1 to 3$"), ((3,), "version 3$")],
)
def test_a_gap_in_the_log_is_named_by_the_versions_that_it_lacks(
    tmp_path: Path, gone: tuple[int, ...], lacking: str
) -> None:
    for n in range(5):
        write_deltalake(str(tmp_path), pa.table({"id": [n]}), mode="append")
    for version in gone:
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    for snapshot in (None, 4, gone[0], 9):
        with pytest.raises(LoadError, match=f"{tmp_path}: its log lacks {lacking}"):
            delta.pin(_spec(str(tmp_path), snapshot=snapshot))
    assert delta.pin(_spec(str(tmp_path), snapshot=0)).exact_rows


def test_a_damaged_log_is_told_without_the_stack_of_the_library(tmp_path: Path) -> None:
    for n in range(2):
        write_deltalake(str(tmp_path), pa.table({"id": [n]}), mode="append")
    (tmp_path / "_delta_log" / f"{1:020}.json").write_text("{bad")
    with pytest.raises(LoadError, match=r"Json error: .*whilst parsing object$"):
        delta.pin(_spec(str(tmp_path)))
