import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from cache_protocol.errors import LoadError, RequestError
from cache_server.tables import delta
from tests.delta_logs import commit, delete_by_vector, protocol
from tests.lake_formats import delta_rows, delta_spec, evolved_delta
from tests.lake_tables import (
    assert_same_rows,
    pinned_table,
    read_table,
)


def test_a_place_with_a_space_is_the_same_table_as_its_address(tmp_path: Path) -> None:
    uri = str(tmp_path / "a table")
    assert evolved_delta(uri).version() == 3
    spec = delta_spec(uri)
    pin = delta.pin(spec)
    assert_same_rows(read_table(spec, pin), DeltaTable(uri).to_pyarrow_table())
    assert delta.pin(delta_spec(uri, snapshot=3)).content == pin.content
    assert delta.pin(delta_spec(f"file://{tmp_path}/a%20table")).content == pin.content


def test_the_schema_is_plain(tmp_path: Path) -> None:
    evolved_delta(str(tmp_path / "t"))
    schema = delta.pin(delta_spec(str(tmp_path / "t"))).schema
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


def test_rows_are_counted_where_the_log_does_not_tell(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(
        str(uri), delta_rows(0, 9), configuration={"delta.dataSkippingNumIndexedCols": "0"}
    )
    _rewrite_log(uri, 0, lambda action: action.get("add", {}).update(stats=None))
    assert pa.table(DeltaTable(str(uri)).get_add_actions()).column("num_records").null_count == 1
    (split,) = delta.pin(delta_spec(str(uri))).cut(pa.schema([]), 1)
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
        delta.pin(delta_spec(str(tmp_path)))


def test_deletion_vectors_are_honoured(tmp_path: Path) -> None:
    uri = tmp_path / "a table"
    rows = pa.table({"id": range(10), "part": ["a b%"] * 10})
    write_deltalake(str(uri), rows, partition_by=["part"])
    before = delta.pin(delta_spec(str(uri)))
    delete_by_vector(uri, [1, 3, 4])
    spec = delta_spec(str(uri))
    pin = delta.pin(spec)
    assert read_table(spec, pin).column("id").to_pylist() == [0, 2, 5, 6, 7, 8, 9]
    assert read_table(spec, pin, ("part",)).num_rows == 7
    assert before.exact_rows and not pin.exact_rows
    assert [split.num_rows for split in pin.cut(pa.schema([]), 1)] == [10]
    assert pin.content != before.content
    old = delta_spec(str(uri), snapshot=0)
    assert read_table(old, delta.pin(old)).num_rows == 10


def test_deletion_vectors_span_batches(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), pa.table({"id": range(300_000)}))
    gone = [0, 7, 60_000]
    delete_by_vector(uri, gone)
    spec = delta_spec(str(uri))
    found = read_table(spec, delta.pin(spec))
    assert found.num_rows == 300_000 - len(gone)
    assert found.column("id").to_pylist() == [i for i in range(300_000) if i not in gone]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_column_mapping_is_refused_by_name(tmp_path: Path, mode: str) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), delta_rows(0, 3))

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
        delta.pin(delta_spec(str(uri)))


@pytest.mark.parametrize("feature", ["typeWidening", "vacuumProtocolCheck", "variantType"])
def test_other_reader_features_are_refused_by_name(tmp_path: Path, feature: str) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), delta_rows(0, 3))
    commit(uri, 1, protocol(feature))
    with pytest.raises(RequestError, match=f"features that are not honoured here: {feature}$"):
        delta.pin(delta_spec(str(uri)))


def test_a_widened_column_is_cast(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), pa.table({"id": pa.array([1, 2], pa.int64())}))
    (file,) = uri.glob("*.parquet")
    pq.write_table(pa.table({"id": pa.array([1, 2], pa.int32())}), file)
    size = file.stat().st_size
    _rewrite_log(uri, 0, lambda action: action.get("add", {}).update(size=size))
    spec = delta_spec(str(uri))
    assert read_table(spec, delta.pin(spec)).column("id").to_pylist() == [1, 2]


def test_a_column_is_found_whatever_the_case_of_its_name_in_the_file(tmp_path: Path) -> None:
    names = ["Id", "Text"]
    write_deltalake(str(tmp_path), pa.table([[1, 2], ["a", "bc"]], names=names))
    (file,) = tmp_path.glob("*.parquet")
    pq.write_table(pa.table({"ID": [1, 2], "text": ["a", "bc"]}), file)
    size = file.stat().st_size
    _rewrite_log(tmp_path, 0, lambda action: action.get("add", {}).update(size=size))
    spec = delta_spec(str(tmp_path))
    pin = delta.pin(spec)
    assert read_table(spec, pin).to_pydict() == {"Id": [1, 2], "Text": ["a", "bc"]}
    (split,) = pin.cut(pa.schema([("Text", pa.string())]), 1)
    assert split.estimated_bytes == 2 * 4 + len("abc")


def test_a_version_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no snapshot 'v1': its versions have numbers"):
        delta.pin(delta_spec(str(tmp_path), snapshot="v1"))


def test_a_version_of_which_the_log_was_cleaned_up_is_named(tmp_path: Path) -> None:
    for n in range(3):
        write_deltalake(str(tmp_path), pa.table({"id": [n]}), mode="append")
    DeltaTable(str(tmp_path)).create_checkpoint()
    for version in range(2):
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()

    assert delta.pin(delta_spec(str(tmp_path))).exact_rows
    with pytest.raises(LoadError, match="the log of version 1 is gone or unreadable"):
        delta.pin(delta_spec(str(tmp_path), snapshot=1))


def test_the_planner_names_a_file_that_was_vacuumed_where_it_needs_its_footer(
    tmp_path: Path,
) -> None:
    write_deltalake(str(tmp_path), pa.table({"id": [1], "text": ["a"]}))
    write_deltalake(str(tmp_path), pa.table({"id": [2], "text": ["b"]}), mode="overwrite")
    table = DeltaTable(str(tmp_path))
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    pin = delta.pin(delta_spec(str(tmp_path), snapshot=0))

    with pytest.raises(LoadError, match=r"file file://.*\.parquet of Delta table"):
        pin.cut(pa.schema([("text", pa.string())]), 1)


def test_another_table_at_the_same_place_is_refused(tmp_path: Path) -> None:
    uri = tmp_path / "t"
    write_deltalake(str(uri), delta_rows(0, 3))
    spec = delta_spec(str(uri))
    pin = delta.pin(spec)
    (split,) = pin.cut(pa.schema([]), 1)
    (uri / "_delta_log" / f"{0:020}.json").unlink()
    write_deltalake(str(uri), delta_rows(0, 3))
    with pytest.raises(LoadError, match="changed since the dataset was planned"):
        list(delta.read(pinned_table(spec, pin), split, {}))


def test_options_of_a_writer_are_let_through(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), delta_rows(0, 3))
    of_a_writer = {"AWS_S3_ALLOW_UNSAFE_RENAME": "true", "AWS_REGION": "us-east-1"}
    assert delta.pin(delta_spec(str(tmp_path), storage_options=of_a_writer)).exact_rows


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
            delta.pin(delta_spec(str(tmp_path), snapshot=snapshot))
    assert delta.pin(delta_spec(str(tmp_path), snapshot=0)).exact_rows


def test_a_damaged_log_is_told_without_the_stack_of_the_library(tmp_path: Path) -> None:
    for n in range(2):
        write_deltalake(str(tmp_path), pa.table({"id": [n]}), mode="append")
    (tmp_path / "_delta_log" / f"{1:020}.json").write_text("{bad")
    with pytest.raises(LoadError, match=r"Json error: .*whilst parsing object$"):
        delta.pin(delta_spec(str(tmp_path)))
