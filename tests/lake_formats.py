"""A table of each lake format with a history, and what the format's own library reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    DoubleType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
)

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_server.tables import delta, iceberg
from tests.iceberg_tables import opened_catalog
from tests.lake_tables import BUCKET, SECRET, s3_options

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "part", StringType(), required=False),
    NestedField(3, "score", DoubleType(), required=False),
    NestedField(4, "tags", ListType(9, StringType(), element_required=False), required=False),
)
BY_PART = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))


@dataclass(frozen=True)
class File:
    """A data file, as the library has it."""

    path: str
    size: int
    num_rows: int
    part: str


def delta_rows(start: int, count: int, **more: list[Any]) -> pa.Table:
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


def evolved_delta(uri: str, storage: dict[str, str] | None = None) -> DeltaTable:
    """Two partition columns; versions 0 to 3: a write, an append, an added column, deletes."""
    options = {"storage_options": storage, "mode": "append"}
    write_deltalake(uri, delta_rows(0, 30), partition_by=["part", "day"], **options)
    write_deltalake(uri, delta_rows(100, 7), **options)
    extra = pa.array([None, 1, 2, 3], pa.int32())
    write_deltalake(uri, delta_rows(200, 4, extra=extra), schema_mode="merge", **options)
    table = DeltaTable(uri, storage_options=storage)
    table.delete("id >= 5 and id < 11")
    return table


def delta_spec(source: str, **arguments: Any) -> TableSpec:
    return DatasetSpec("d", source, format="delta", **arguments).tables[0]


def iceberg_rows(start: int, count: int, **more: list[Any]) -> pa.Table:
    ids = range(start, start + count)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "part": pa.array([f"p{i % 3}" for i in ids]),
        "score": pa.array([i / 2 if i % 4 else None for i in ids], pa.float64()),
        "tags": pa.array([[f"t{i}"] * (i % 3) for i in ids], pa.list_(pa.string())),
    }
    return pa.table({**columns, **more})


def evolved_iceberg(catalog: SqlCatalog, name: str = "ns.t") -> Table:
    """Three partitions; an append, an added column, deletes, a renamed column."""
    table = catalog.create_table(name, SCHEMA, partition_spec=BY_PART)
    table.append(iceberg_rows(0, 30))
    with table.update_schema() as update:
        update.add_column("extra", IntegerType())
    table.append(iceberg_rows(100, 9, extra=pa.array(range(9), pa.int32())))
    table.delete("id >= 5 and id < 11")
    with table.update_schema() as update:
        update.rename_column("score", "points")
    renamed = iceberg_rows(200, 4, extra=pa.array([None, 1, 2, 3], pa.int32()))
    table.append(renamed.rename_columns(["id", "part", "points", "tags", "extra"]))
    return table


def iceberg_spec(source: str, **arguments: Any) -> TableSpec:
    return DatasetSpec("d", source, format="iceberg", **arguments).tables[0]


class DeltaLake:
    """An evolved Delta table.

    Attributes:
        module: reads the format. opens: the name of its function that opens a pinned version.
        finds: the name of its function that asks the library for a table.
    """

    name, format, module = "Delta", "delta", delta
    opens, finds = "_reopen", "_open"
    absent: ClassVar = ("none", "none")  # below a bucket that is there, below one that is not
    unknown: ClassVar = (9, r"no version 9; its versions go up to 3")
    stored: ClassVar = pa.schema(
        [("id", pa.int64()), ("score", pa.float32()), ("part", pa.string())]
    )

    def __init__(self, table: DeltaTable, uri: str) -> None:
        self._table, self.source = table, uri

    @classmethod
    @contextmanager
    def at(cls, place: Path) -> Iterator[DeltaLake]:
        uri = str(place / "t")
        yield cls(evolved_delta(uri), uri)

    @classmethod
    @contextmanager
    def in_s3(cls, endpoint: str, place: Path) -> Iterator[DeltaLake]:
        storage = {**s3_options(endpoint), "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
        uri = f"s3://{BUCKET}/{place.name}/a table"
        yield cls(evolved_delta(uri, {**storage, "aws_conditional_put": "etag"}), uri)

    def rows(self, columns: tuple[str, ...] | None = None) -> pa.Table:
        return self._table.to_pyarrow_table(columns=list(columns) if columns else None)

    def versions(self) -> Mapping[int, pa.Table]:
        latest = range(self._table.version() + 1)
        return {v: DeltaTable(self.source, version=v).to_pyarrow_table() for v in latest}

    def append(self) -> None:
        write_deltalake(self.source, delta_rows(300, 3), mode="append", schema_mode="merge")

    def files(self) -> list[File]:
        """In the order in which they were written."""
        adds = pa.table(self._table.get_add_actions()).to_pylist()
        adds.sort(key=lambda add: (add["modification_time"], add["path"]))
        return [
            File(
                f"file://{self.source}/{add['path']}", add["size_bytes"], add["num_records"],
                add["partition"]["part"] or "",
            )
            for add in adds
        ]  # fmt: skip


class IcebergLake:
    """An evolved Iceberg table; attributes as those of `DeltaLake`."""

    name, format, module = "Iceberg", "iceberg", iceberg
    opens, finds = "_make_plan", "find"
    absent: ClassVar = ("none.metadata.json", "v1.metadata.json")
    unknown: ClassVar = (77, r"no snapshot 77; there are: .*\d{9}")
    stored: ClassVar = pa.schema(
        [("id", pa.int64()), ("points", pa.float64()), ("part", pa.string())]
    )

    def __init__(self, table: Table) -> None:
        self._table = table

    @classmethod
    @contextmanager
    def at(cls, place: Path) -> Iterator[IcebergLake]:
        with opened_catalog(place) as catalog:
            yield cls(evolved_iceberg(catalog))

    @classmethod
    @contextmanager
    def in_s3(cls, endpoint: str, place: Path) -> Iterator[IcebergLake]:
        with closing(s3_catalog(place, endpoint)) as catalog:
            catalog.create_namespace("ns")
            yield cls(evolved_iceberg(catalog))

    @property
    def source(self) -> str:
        return self._table.metadata_location

    def rows(self, columns: tuple[str, ...] | None = None) -> pa.Table:
        return self._table.scan(selected_fields=columns or ("*",)).to_arrow()

    def versions(self) -> Mapping[int, pa.Table]:
        snapshots = [snapshot.snapshot_id for snapshot in self._table.metadata.snapshots]
        return {found: self._table.scan(snapshot_id=found).to_arrow() for found in snapshots}

    def append(self) -> None:
        self._table.append(iceberg_rows(300, 3).select(["id", "part"]))

    def files(self) -> list[File]:
        """In the order in which they were added."""
        entries = self._table.inspect.entries().to_pylist()
        added = {e["data_file"]["file_path"]: e["file_sequence_number"] for e in entries}
        files = [task.file for task in self._table.scan().plan_files()]
        files.sort(key=lambda file: (added[file.file_path], file.file_path))
        assert len({added[file.file_path] for file in files}) > 2
        return [File(f.file_path, f.file_size_in_bytes, f.record_count, "p0") for f in files]


Lake = DeltaLake | IcebergLake
LAKES: tuple[type[DeltaLake] | type[IcebergLake], ...] = (DeltaLake, IcebergLake)


def s3_catalog(place: Path, endpoint: str) -> SqlCatalog:
    """A catalogue below a folder of this machine; its tables are in the bucket."""
    return SqlCatalog(
        "default",
        **{
            "uri": f"sqlite:///{place}/s3.db",
            "warehouse": f"s3://{BUCKET}/{place.name}",
            "s3.endpoint": endpoint,
            "s3.access-key-id": "access",
            "s3.secret-access-key": SECRET,
            "s3.region": "us-east-1",
        },
    )
