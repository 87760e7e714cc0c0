"""The rows of Iceberg tables, beside values that were worked out by hand: nested, far, pruned."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFileContent
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.typedef import Record
from pyiceberg.types import (
    DateType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_server.source.pinned import Condition
from cache_server.tables import iceberg
from tests.iceberg_tables import (
    append_files,
    described_file,
    opened_catalog,
    with_deletes,
    written_file,
)
from tests.lake_tables import read_table

ID = NestedField(1, "id", LongType(), required=False)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    with opened_catalog(tmp_path) as opened:
        yield opened


def _optional(number: int, name: str, dtype: Any) -> NestedField:
    return NestedField(number, name, dtype, required=False)


def _rows_of(table: Table, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema_to_pyarrow(table.schema(), include_field_ids=True))


def _read(location: str, columns: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    spec = DatasetSpec("d", location, format="iceberg").tables[0]
    return list(read_table(spec, iceberg.pin(spec), columns).to_pylist())


def _boxes(first: int, name: str) -> StructType:
    return StructType(_optional(first, name, LongType()))


def test_lists_and_maps_keep_their_nulls_and_follow_renamed_fields(catalog: SqlCatalog) -> None:
    schema = Schema(
        ID,
        _optional(2, "list", ListType(3, _boxes(4, "a"), element_required=False)),
        _optional(5, "map", MapType(6, StringType(), 7, _boxes(8, "a"), value_required=False)),
        _optional(
            9, "lists", ListType(10, ListType(11, _boxes(12, "a"), False), element_required=False)
        ),
        _optional(
            13, "in_map", MapType(14, StringType(), 15, ListType(16, _boxes(17, "a"), False), False)
        ),
    )
    table = catalog.create_table("ns.nested", schema)
    absent = dict.fromkeys(("list", "map", "lists", "in_map"))
    full = {
        "list": [{"a": 1}, None, {"a": None}],
        "map": [("k", {"a": 1}), ("l", None)],
        "lists": [[{"a": 1}, None], None, []],
        "in_map": [("k", [{"a": 1}]), ("l", None)],
    }
    empty: dict[str, Any] = {"list": [], "map": [], "lists": [], "in_map": []}
    rows = [{"id": i, **value} for i, value in enumerate((full, absent, empty, full))]
    append_files(table, written_file(table, "f.parquet", _rows_of(table, rows)))
    assert _read(table.metadata_location) == rows

    with table.update_schema() as update:
        for path in ("list.element", "map.value", "lists.element.element", "in_map.value.element"):
            update.rename_column(f"{path}.a", "b")
    renamed = {
        "list": [{"b": 1}, None, {"b": None}],
        "map": [("k", {"b": 1}), ("l", None)],
        "lists": [[{"b": 1}, None], None, []],
        "in_map": [("k", [{"b": 1}]), ("l", None)],
    }
    values = (renamed, absent, empty, renamed)
    assert _read(table.metadata_location) == [{"id": i, **v} for i, v in enumerate(values)]


def test_null_lists_are_kept_in_each_batch_of_a_row_group(catalog: SqlCatalog) -> None:
    schema = Schema(ID, _optional(2, "list", ListType(3, _boxes(4, "a"), element_required=False)))
    table = catalog.create_table("ns.batches", schema)
    arrow = schema_to_pyarrow(schema, include_field_ids=True)
    values: list[Any] = [None, [], [{"a": 1}], [{"a": 2}, None]]
    few = pa.array(values, arrow.field("list").type)
    count = 140_000  # more than pyarrow has in a batch
    lists = few.take(pa.array([i % 4 for i in range(count)]))
    rows = pa.table([pa.array(range(count)), lists], schema=arrow)
    append_files(table, written_file(table, "f.parquet", rows))
    spec = DatasetSpec("d", table.metadata_location, format="iceberg").tables[0]
    found = read_table(spec, iceberg.pin(spec)).column("list")
    assert found.num_chunks > 1
    assert found.combine_chunks().equals(lists.cast(found.type))


def test_far_timestamps_of_96_bits_are_what_they_were(catalog: SqlCatalog) -> None:
    fields = ID, _optional(2, "at", TimestampType()), _optional(3, "zone", TimestamptzType())
    table = catalog.create_table("ns.int96", Schema(*fields))
    rows = [
        {"id": 0, "at": datetime(9999, 12, 31), "zone": datetime(1, 1, 1, tzinfo=UTC)},
        {"id": 1, "at": datetime(2024, 1, 2, 3, 4, 5, 6), "zone": None},
    ]
    file = written_file(
        table,
        "f.parquet",
        _rows_of(table, rows),
        use_deprecated_int96_timestamps=True,
        store_schema=False,
    )
    append_files(table, file)
    assert _read(table.metadata_location) == rows


def test_deletes_apply_where_the_file_has_no_column_that_is_read(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ns.absent", Schema(ID))
    file = written_file(table, "f.parquet", _rows_of(table, [{"id": i} for i in range(5)]))
    append_files(table, file)
    with table.update_schema() as update:
        update.add_column("later", StringType())
    gone = pa.table({"file_path": [file.file_path] * 2, "pos": pa.array([0, 3], pa.int64())})
    path = Path(table.location().removeprefix("file://"), "data", "deletes.parquet")
    pq.write_table(gone, path)
    deletes = described_file(path, 2, DataFileContent.POSITION_DELETES)
    location, _ = with_deletes(table, [deletes])
    assert _read(location, ("later",)) == [{"later": None}] * 3
    assert [row["id"] for row in _read(location)] == [1, 2, 4]


_INTEGERS = [None, -11, -10, -1, 0, 9, 10]
_TEXTS = [None, "", "a", "ab", "abc", "é", "\U0010ffff"]
_DATES = [None, *(date(*d) for d in ((1, 1, 1), (1969, 12, 31), (1970, 1, 1), (9999, 12, 31)))]
_TIMES = [None, datetime(1969, 12, 31, 23, 59, 59, 999999), datetime(1970, 1, 1)]


@pytest.mark.parametrize(
    ("transform", "dtype", "values"),
    [
        (BucketTransform(3), IntegerType(), _INTEGERS),
        (BucketTransform(3), StringType(), _TEXTS),
        (BucketTransform(3), DateType(), _DATES),
        (TruncateTransform(10), IntegerType(), _INTEGERS),
        (TruncateTransform(2), StringType(), _TEXTS),
        (YearTransform(), DateType(), _DATES),
        (MonthTransform(), DateType(), _DATES),
        (DayTransform(), DateType(), _DATES),
        (DayTransform(), TimestampType(), _TIMES),
        (HourTransform(), TimestampType(), _TIMES),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
)
def test_no_row_that_passes_is_pruned_whatever_the_table_is_partitioned_by(
    catalog: SqlCatalog, transform: Transform[Any, Any], dtype: PrimitiveType, values: list[Any]
) -> None:
    by = PartitionSpec(PartitionField(2, 1000, transform, "part"))
    table = catalog.create_table("ns.t", Schema(ID, _optional(2, "x", dtype)), partition_spec=by)
    to_partition = transform.transform(dtype)
    files = []
    for number, value in enumerate(values):
        rows = _rows_of(table, [{"id": number, "x": value}])
        plain = rows.column("x").combine_chunks()
        if isinstance(dtype, DateType | TimestampType):
            plain = plain.cast(pa.int32() if isinstance(dtype, DateType) else pa.int64())
        part = Record(to_partition(plain[0].as_py()))
        files.append(written_file(table, f"{number}.parquet", rows, part))
    append_files(table, *files)
    spec = DatasetSpec("d", table.metadata_location, format="iceberg").tables[0]
    pin = iceberg.pin(spec)
    assert [row["x"] for row in read_table(spec, pin).to_pylist()] == values
    assert pin.prune is not None
    if isinstance(dtype, TimestampType):  # a query compares it with timestamps, which prune nothing
        return
    pruned = 0
    for wanted in values[1:]:
        for operator, passes in {
            "=": lambda x, y: x == y,
            "<": lambda x, y: x < y,
            "<=": lambda x, y: x <= y,
            ">": lambda x, y: x > y,
            ">=": lambda x, y: x >= y,
        }.items():
            kept = read_table(spec, pin.prune([Condition("x", operator, wanted)])).column("x")
            found = kept.to_pylist()
            assert {x for x in values[1:] if passes(x, wanted)} <= set(found), (operator, wanted)
            pruned += len(found) < len(values)
    assert pruned
