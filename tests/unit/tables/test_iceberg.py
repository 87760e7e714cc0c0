import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    clear_manifest_cache,
)
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
    UUIDType,
)
from pyroaring import BitMap

from cache_protocol.datasets.dataset_spec import TableSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server.source.pinned import Condition, source_type
from cache_server.tables import iceberg, iceberg_catalogs, iceberg_lookup
from tests.iceberg_tables import described_file, opened_catalog, with_deletes
from tests.lake_formats import (
    BY_PART,
    SCHEMA,
    evolved_iceberg,
    iceberg_rows,
    iceberg_spec,
    s3_catalog,
)
from tests.lake_tables import (
    SECRET,
    assert_same_rows,
    lake_bucket,
    loaded_splits,
    pinned_table,
    read_table,
    s3_options,
)
from tests.store_stubs import Served


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    with opened_catalog(tmp_path) as opened:
        yield opened


def test_the_current_state_has_the_current_columns(catalog: SqlCatalog) -> None:
    table = evolved_iceberg(catalog)
    with table.update_schema() as update:
        update.add_column("later", StringType())
        update.update_column("extra", LongType())
        update.delete_column("tags")
    spec = iceberg_spec(table.metadata_location)
    pin = iceberg.pin(spec)
    assert pin.schema.names == ["id", "part", "points", "extra", "later"]
    assert pin.schema.field("extra").type == pa.int64()
    assert_same_rows(read_table(spec, pin), table.scan().to_arrow())


def test_a_tag_is_its_snapshot_and_a_branch_moves(catalog: SqlCatalog) -> None:
    table = evolved_iceberg(catalog)
    first, last = table.metadata.snapshots[0].snapshot_id, table.metadata.current_snapshot_id
    assert last is not None
    table.manage_snapshots().create_tag(first, "v1").create_branch(first, "audit").commit()

    tagged = iceberg_spec(table.metadata_location, snapshot="v1")
    pin = iceberg.pin(tagged)
    assert pin.content == iceberg.pin(iceberg_spec(table.metadata_location, snapshot=first)).content
    assert_same_rows(read_table(tagged, pin), table.scan(snapshot_id=first).to_arrow())

    branch = iceberg_spec(table.metadata_location, snapshot="audit")
    before = iceberg.pin(branch)
    assert before.schema.names == ["id", "part", "points", "tags", "extra"]  # those of today
    rows = read_table(branch, before)
    assert rows.column("id").to_pylist() == read_table(tagged, pin).column("id").to_pylist()

    table.manage_snapshots().create_branch(last, "audit").commit()
    moved = iceberg_spec(table.metadata_location, snapshot="audit")
    after = iceberg.pin(moved)
    assert after.content != before.content
    assert_same_rows(read_table(moved, after), table.scan().to_arrow())
    assert read_table(branch, before).equals(rows)
    for snapshot in (None, "main"):
        current = iceberg_spec(table.metadata_location, snapshot=snapshot)
        assert iceberg.pin(current).content == after.content


def test_an_unknown_tag_or_branch_is_refused_with_the_known_ones(catalog: SqlCatalog) -> None:
    table = evolved_iceberg(catalog)
    table.manage_snapshots().create_tag(table.metadata.snapshots[0].snapshot_id, "v1").commit()
    with pytest.raises(RequestError, match="no tag or branch 'v2'; there are: main, v1"):
        iceberg.pin(iceberg_spec(table.metadata_location, snapshot="v2"))


def test_data_files_that_no_row_can_come_from_are_pruned(catalog: SqlCatalog) -> None:
    table = evolved_iceberg(catalog)
    spec = iceberg_spec(table.metadata_location)
    pin = iceberg.pin(spec)
    assert pin.prune is not None

    by_partition = pin.prune([Condition("part", "=", "p1")])
    by_bounds = pin.prune([Condition("id", ">=", 200)])

    every = pin.cut(pin.schema, 1)
    assert 0 < len(by_partition.cut(pin.schema, 1)) < len(every)
    assert all("part=p1" in split.file.path for split in by_partition.cut(pin.schema, 1))
    assert 0 < len(by_bounds.cut(pin.schema, 1)) < len(every)
    kept = read_table(spec, by_bounds).column("id").to_pylist()
    assert {n for n in kept if n >= 200} == {200, 201, 202, 203}
    assert by_bounds.content == pin.content


def test_names_of_another_time_prune_nothing(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.swapped", SCHEMA, partition_spec=BY_PART)
    table.append(iceberg_rows(0, 9))
    first = table.metadata.current_snapshot_id
    with table.update_schema() as update:
        update.rename_column("id", "was_id")
    with table.update_schema() as update:
        update.add_column("id", LongType())
    spec = iceberg_spec(table.metadata_location, snapshot=first)
    pin = iceberg.pin(spec)
    assert pin.prune is not None

    pruned = pin.prune([Condition("id", "=", 3)])

    assert 3 in read_table(spec, pruned).column("id").to_pylist()


def test_a_sql_catalogue_finds_the_table(catalog: SqlCatalog, tmp_path: Path) -> None:
    table = evolved_iceberg(catalog)
    arguments = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    for snapshot in (None, table.metadata.snapshots[1].snapshot_id):
        spec = iceberg_spec("ns.t", catalog=arguments, snapshot=snapshot)
        pin = iceberg.pin(spec)
        assert_same_rows(read_table(spec, pin), table.scan(snapshot_id=snapshot).to_arrow())
        static = iceberg_spec(table.metadata_location, snapshot=snapshot)
        assert iceberg.pin(static).content == pin.content
    with pytest.raises(LoadError, match=r"Iceberg table ns\.absent: .*ns\.absent"):
        iceberg.pin(iceberg_spec("ns.absent", catalog=arguments))


def _names_of_decoded_files(spec: TableSpec, columns: tuple[str, ...] | None = None) -> set[str]:
    """The data files that a load does not read as they are."""
    pin = iceberg.pin(spec)
    splits = pin.cut(pa.schema([("id", pa.int64())]), 1)
    loaded = loaded_splits(spec, pinned_table(spec, pin, columns), splits)
    return {Path(file.split.file.path).name for _, file in loaded if file.is_staged}


def test_a_load_decodes_only_files_whose_rows_are_not_those_of_the_table(
    catalog: SqlCatalog,
) -> None:
    table = catalog.create_table("ns.plain", SCHEMA)
    table.append(iceberg_rows(0, 9))
    (old,) = (Path(task.file.file_path).name for task in table.scan().plan_files())
    assert not _names_of_decoded_files(iceberg_spec(table.metadata_location))

    with table.update_schema() as update:
        update.add_column("extra", IntegerType())
        update.rename_column("score", "points")
    rows = iceberg_rows(9, 3, extra=pa.array([1, 2, 3], pa.int32()))
    table.append(rows.rename_columns({"score": "points"}))
    spec = iceberg_spec(table.metadata_location)
    assert _names_of_decoded_files(spec) == {old}
    assert not _names_of_decoded_files(spec, ("tags", "id"))
    assert _names_of_decoded_files(spec, ("id", "points")) == {old}
    assert not _names_of_decoded_files(spec, ("id", "extra"))  # null in the older file
    assert_same_rows(read_table(spec, iceberg.pin(spec)), table.scan().to_arrow())
    with table.update_schema() as update:
        update.update_column("extra", LongType())
        update.delete_column("part")
    with table.update_schema() as update:
        update.add_column("part", LongType())  # not the strings of that name in the files
    spec = iceberg_spec(table.metadata_location)
    assert len(_names_of_decoded_files(spec, ("extra",))) == 1  # as int32 in the newer file
    assert not _names_of_decoded_files(spec, ("id", "part"))
    assert_same_rows(read_table(spec, iceberg.pin(spec)), table.scan().to_arrow())


def test_a_filter_keeps_the_same_rows_of_files_of_every_time(catalog: SqlCatalog) -> None:
    table = evolved_iceberg(catalog)
    spec = iceberg_spec(table.metadata_location)
    pin = iceberg.pin(spec)
    splits = pin.cut(pa.schema([("id", pa.int64())]), 1)
    for where in (
        "extra IS NULL",
        "part = 'p1'",
        "points > 3 AND extra >= 1",
        "id >= 200 OR id < 2",
    ):
        loaded = loaded_splits(spec, pinned_table(spec, pin), splits, where)
        found = pa.Table.from_batches(batch for rows, _ in loaded for batch in rows)
        assert_same_rows(found, table.scan(row_filter=where).to_arrow())


def test_a_file_with_larger_row_groups_than_planned_is_decoded(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.large", SCHEMA)
    table.append(iceberg_rows(0, 9))
    spec = iceberg_spec(table.metadata_location)
    pin = iceberg.pin(spec)
    (split,) = pin.cut(pa.schema([("id", pa.int64())]), 1)
    assert 0 < split.group_bytes <= split.file.size
    loaded = loaded_splits(spec, pinned_table(spec, pin), [replace(split, group_bytes=9)])
    assert [file.is_staged for _, file in loaded] == [True]


def test_types_come_with_small_offsets_and_without_metadata(catalog: SqlCatalog) -> None:
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "at", TimestamptzType(), required=False),
        NestedField(3, "price", DecimalType(9, 2), required=False),
        NestedField(4, "blob", BinaryType(), required=False),
        NestedField(5, "key", UUIDType(), required=False),
        NestedField(
            6,
            "pair",
            StructType(
                NestedField(7, "s", StringType(), required=True),
                NestedField(8, "n", ListType(9, StringType(), True), required=False),
            ),
            required=False,
        ),
        NestedField(
            10, "m", MapType(11, StringType(), 12, StringType(), value_required=False), False
        ),
    )
    table = catalog.create_table("ns.types", schema)
    rows = [
        {
            "id": i,
            "blob": b"b" * i,
            "key": bytes(range(16)),
            "pair": {"s": "x", "n": ["y", "z"]},
            "m": [("k", "v")],
        }
        for i in range(3)
    ]
    table.append(pa.Table.from_pylist(rows, table.schema().as_arrow()))
    spec = iceberg_spec(table.metadata_location)
    pin = iceberg.pin(spec)
    assert pin.schema.types == [
        pa.int64(),
        pa.timestamp("us", "UTC"),
        pa.decimal128(9, 2),
        pa.binary(),
        pa.binary(16),
        pa.struct([("s", pa.string()), ("n", pa.list_(pa.field("element", pa.string())))]),
        pa.map_(pa.string(), pa.string()),
    ]
    assert {field.name: source_type(field) for field in pin.schema if field.metadata} == {
        "key": pa.uuid()
    }
    assert not pin.schema.metadata
    found = read_table(spec, pin)
    assert found.column("pair").to_pylist() == [row["pair"] for row in rows]
    assert found.column("key").to_pylist() == [row["key"] for row in rows]
    assert found.column("m").to_pylist() == [row["m"] for row in rows]


@pytest.mark.parametrize("snapshot", [None, "main"])
def test_a_table_without_a_snapshot_has_no_rows(catalog: SqlCatalog, snapshot: str | None) -> None:
    table = catalog.create_table("ns.empty", SCHEMA)
    spec = iceberg_spec(table.metadata_location, snapshot=snapshot)
    pin = iceberg.pin(spec)
    assert pin.schema.names == ["id", "part", "score", "tags"]
    assert pin.cut(pin.schema.empty_table().select(["id"]).schema, 1) == ()
    assert read_table(spec, pin).num_rows == 0


def test_a_source_that_is_no_metadata_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither the location of a metadata file"):
        iceberg.pin(iceberg_spec(str(tmp_path)))
    (tmp_path / "bad.metadata.json").write_text("{}")
    with pytest.raises(LoadError, match=r"cannot read Iceberg table .*bad\.metadata\.json"):
        iceberg.pin(iceberg_spec(str(tmp_path / "bad.metadata.json")))


def _delete_file(table: Table, content: DataFileContent, rows: pa.Table, part: str) -> DataFile:
    path = Path(table.location().removeprefix("file://"), f"data/{content.name}-{part}.parquet")
    pq.write_table(rows, path)
    keys = [1] if content == DataFileContent.EQUALITY_DELETES else None
    return described_file(path, rows.num_rows, content, partition=Record(part), equality_ids=keys)


def test_positional_deletes_are_honoured(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.mor", SCHEMA, partition_spec=BY_PART)
    table.append(iceberg_rows(0, 30))
    table.append(iceberg_rows(30, 12))
    tasks = {task.file.partition[0]: task.file for task in table.scan().plan_files()}
    gone = pa.table(
        {
            "file_path": pa.array([tasks["p1"].file_path] * 2),
            "pos": pa.array([0, 2], pa.int64()),
        }
    )
    before = iceberg.pin(iceberg_spec(table.metadata_location))
    deletes = _delete_file(table, DataFileContent.POSITION_DELETES, gone, "p1")
    location, _ = with_deletes(table, [deletes])
    spec = iceberg_spec(location)
    pin = iceberg.pin(spec)
    found = read_table(spec, pin)
    assert_same_rows(found, StaticTable.from_metadata(location).scan().to_arrow())
    assert found.num_rows == 42 - 2
    assert before.exact_rows and not pin.exact_rows
    assert sum(s.num_rows or 0 for s in pin.cut(pa.schema([]), 1)) == 42  # before the deletes
    assert deletes.file_path in json.dumps(pin.content)


def test_deletion_vectors_are_honoured(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.dv", SCHEMA)
    table.append(iceberg_rows(0, 10))
    (task,) = table.scan().plan_files()
    bitmaps = struct.pack("<QI", 1, 0) + BitMap([0, 3, 9]).serialize()
    framed = b"\xd1\xd3\x39\x64" + bitmaps
    blob = struct.pack(">I", len(framed)) + framed + struct.pack(">I", zlib.crc32(framed))
    described = {
        "type": "deletion-vector-v1",
        "fields": [],
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": 4,
        "length": len(blob),
        "properties": {"referenced-data-file": task.file.file_path, "cardinality": "3"},
    }
    footer = json.dumps({"blobs": [described]}).encode()
    path = Path(table.location().removeprefix("file://")) / "data" / "deletes.puffin"
    path.write_bytes(
        b"PFA1" + blob + b"PFA1" + footer + struct.pack("<I", len(footer)) + bytes(4) + b"PFA1"
    )
    deletes = described_file(path, 3, DataFileContent.POSITION_DELETES, format=FileFormat.PUFFIN)
    location, _ = with_deletes(table, [deletes])
    spec = iceberg_spec(location)
    pin = iceberg.pin(spec)
    assert read_table(spec, pin).column("id").to_pylist() == [1, 2, 4, 5, 6, 7, 8]
    assert not pin.exact_rows


def test_equality_deletes_are_refused_by_name(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.eq", SCHEMA, partition_spec=BY_PART)
    table.append(iceberg_rows(0, 30))
    gone = pa.table({"id": pa.array([1], pa.int64())})
    deletes = _delete_file(table, DataFileContent.EQUALITY_DELETES, gone, "p1")
    location, snapshot = with_deletes(table, [deletes])
    with pytest.raises(RequestError) as caught:
        iceberg.pin(iceberg_spec(location))
    message = str(caught.value)
    assert "equality deletes" in message and location in message
    assert str(snapshot) in message and deletes.file_path in message


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with lake_bucket() as endpoint:
        yield endpoint


def test_files_in_s3_are_staged_as_they_are(tmp_path: Path, s3: str) -> None:
    with closing(s3_catalog(tmp_path, s3)) as catalog:
        catalog.create_namespace("ns")
        table = evolved_iceberg(catalog)
        location = table.metadata_location.replace("s3://", "s3a://")
        spec = iceberg_spec(location, storage_options=s3_options(s3))
        pin = iceberg.pin(spec)
        parts = pin.cut(pa.schema([("part", pa.string())]), 1)
        for _, file in loaded_splits(spec, pinned_table(spec, pin, ("id",)), parts):
            assert file.format == "parquet" and file.path.name == "000000.parquet"


def test_a_line_break_in_a_variable_of_s3_does_not_matter_to_tables_on_a_disk(
    catalog: SqlCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = evolved_iceberg(catalog)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}\n")
    by_name = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    for spec in (iceberg_spec(table.metadata_location), iceberg_spec("ns.t", catalog=by_name)):
        assert_same_rows(read_table(spec, iceberg.pin(spec)), table.scan().to_arrow())


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_SAS_TOKEN"])
def test_a_secret_of_the_environment_in_a_message_of_the_library_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, SECRET)
    with (
        patch.object(iceberg, "find", side_effect=ValueError(f"denied for {SECRET}")),
        pytest.raises(LoadError, match=r": denied for \*\*\*$"),
    ):
        iceberg.pin(iceberg_spec(str(tmp_path / "v1.metadata.json")))


@pytest.mark.parametrize("status", [200, 400, 403, 503])
@pytest.mark.parametrize(
    "given",
    [
        {"token": "hush/hush+"},
        {"credential": "user:hush/hush+"},
        {"header.Authorization": "Custom hush/hush+"},
    ],
)
def test_a_catalogue_that_says_what_it_was_asked_shows_no_secret(
    given: dict[str, str], status: int
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            message = f"{asked} {self.headers['Authorization']}"
            error = {"message": message, "type": "Denied", "code": status}
            body = json.dumps({"error": error}) if status != 200 else message
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with Served(Handler) as uri:
        catalog = {"type": "rest", "uri": uri, "oauth2-server-uri": f"{uri}/tokens", **given}
        spec = iceberg_spec("ns.t", catalog=catalog)
        with pytest.raises(LoadError, match=r"cannot read Iceberg table ns\.t: ") as caught:
            iceberg.pin(spec)
    assert "hush" not in str(caught.value)


def test_a_rest_catalogue_lends_its_credentials(tmp_path: Path, s3: str) -> None:
    with closing(s3_catalog(tmp_path, s3)) as catalog:
        catalog.create_namespace("ns")
        table = evolved_iceberg(catalog)
        expected = table.scan().to_arrow()
    answers = {
        "/v1/config": {"defaults": {}, "overrides": {}},
        "/v1/namespaces/ns/tables/t": {
            "metadata-location": table.metadata_location,
            "metadata": json.loads(table.metadata.model_dump_json()),
            "config": {
                "s3.endpoint": s3,
                "s3.access-key-id": "lent",
                "s3.secret-access-key": SECRET,
                "s3.region": "us-east-1",
            },
        },
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            arguments = {"type": "rest", "uri": f"http://127.0.0.1:{server.server_port}"}
            spec = iceberg_spec("ns.t", catalog={**arguments, "token": "rest-token"})
            pin = iceberg.pin(spec)
            assert_same_rows(read_table(spec, pin), expected)
        finally:
            server.shutdown()
            serving.join()
    assert SECRET not in pin.snapshot + json.dumps(pin.content)
    assert "rest-token" not in pin.snapshot + json.dumps(pin.content)


def test_a_catalogue_that_hangs_is_waited_for_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iceberg_lookup, "_CATALOG_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LoadError) as caught:
            iceberg.pin(iceberg_spec("ns.t", catalog={"type": "rest", "uri": uri}))
    assert str(caught.value) == (
        "cannot read Iceberg table ns.t: the catalog did not answer within 0.1 s"
    )


def test_options_of_the_library_are_let_through(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.options", SCHEMA)
    own = {"client.region": "us-east-1", "AWS_REGION": "us-east-1"}
    assert iceberg.pin(iceberg_spec(table.metadata_location, storage_options=own)).exact_rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format-version": 4}, "it is of format version 4; those that are read are 1 to 3"),
        ({"format-version": None}, "does not say which format version it is of"),
        ({"location": None}, r"not that of a table: 2\.location: Field required"),
        ([1], "not that of a table: Input should be an object"),
        ("", "not that of a table: Invalid JSON: EOF while parsing a value"),
    ],
)
def test_wrong_metadata_is_told_in_one_line(
    catalog: SqlCatalog, tmp_path: Path, change: Any, reason: str
) -> None:
    table = catalog.create_table("ns.wrong", SCHEMA)
    if isinstance(change, dict):
        metadata = {**json.loads(table.metadata.model_dump_json()), **change}
        change = {key: value for key, value in metadata.items() if value is not None}
    path = tmp_path / "v1.metadata.json"
    path.write_text(json.dumps(change) if change else "")
    with pytest.raises(LoadError, match=reason) as caught:
        iceberg.pin(iceberg_spec(str(path)))
    message = str(caught.value)
    assert str(path) in message and "pydantic" not in message and "input_" not in message


def test_a_manifest_that_ends_early_is_refused(catalog: SqlCatalog) -> None:
    """It would be read as one of fewer data files."""
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(iceberg_rows(0, 3))
    (manifest,) = Path(table.metadata_location.removeprefix("file://")).parent.glob("*-m0.avro")
    sound = manifest.read_bytes()
    for length in (0, 2, 100, *range(len(sound) - 40, len(sound), 3)):
        manifest.write_bytes(sound[:length])
        clear_manifest_cache()
        with pytest.raises(LoadError, match="cannot read Iceberg table "):
            iceberg.pin(iceberg_spec(table.metadata_location))


VARIANT = {"id": 8, "name": "doc", "type": "variant", "required": False}
VARIANTS = {
    "doc": VARIANT,
    "box.doc": {**VARIANT, "id": 9, "name": "box", "type": {"type": "struct", "fields": [VARIANT]}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_column_of_a_type_that_is_not_read_is_refused_by_name(
    catalog: SqlCatalog, tmp_path: Path, name: str
) -> None:
    metadata = json.loads(catalog.create_table("ns.t", SCHEMA).metadata.model_dump_json())
    metadata["schemas"][0]["fields"].append(VARIANTS[name])
    path = tmp_path / "v3.metadata.json"
    path.write_text(json.dumps({**metadata, "format-version": 3, "next-row-id": 0}))
    with pytest.raises(LoadError, match=f"column '{name}' is of type variant, .*: write them"):
        iceberg.pin(iceberg_spec(str(path)))


def test_an_unknown_type_of_a_catalogue_is_refused_by_name(tmp_path: Path) -> None:
    for kind in ("sqll", f"postgresql://reader:{SECRET}@host/shop"):
        catalogue = {"type": kind, "uri": f"sqlite:///{tmp_path}/catalog.db"}
        with pytest.raises(RequestError, match=r"one of rest, .*, got '") as caught:
            iceberg.pin(iceberg_spec("ns.t", catalog=catalogue))
        assert SECRET not in str(caught.value)


def test_the_type_of_a_catalogue_may_be_in_capitals() -> None:
    for given, kind in (
        ({"type": "REST", "uri": "http://h"}, "rest"),
        ({"type": "Sql", "uri": "sqlite:////tmp/x.db"}, "sql"),
        ({"uri": "postgresql+psycopg2://u:p%40w@h:1/db"}, "sql"),
    ):
        options = {f"catalog.{name}": value for name, value in given.items()}
        settings = iceberg_catalogs.settings_of(options, {})
        assert (settings.kind, settings.catalog["uri"]) == (kind, given["uri"])
