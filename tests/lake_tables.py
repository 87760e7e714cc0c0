"""What the tests of lake tables share, whatever the format: a bucket, and reads as a node does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
import pyarrow as pa
from moto.server import ThreadedMotoServer

from cache_protocol.datasets.dataset_spec import TableSpec
from cache_server import tables
from cache_server.node.loads import staging
from cache_server.source.pinned import Pin, PinnedTable, Split
from cache_server.sql import loader
from cache_server.sql.local_tables import LocalFile
from cache_server.sql.quoting import identifier
from cache_server.tables import lake

ACCESS_KEY_ID = "access"
SECRET = "hush-hush-key"
BUCKET = "lake"
_MOST_LOADED = 2  # splits, which a test loads too


@contextmanager
def lake_bucket() -> Iterator[str]:
    """The endpoint of moto's own server with an empty bucket.

    pyarrow uploads in chunks, which `tests.object_store` does not know. Buckets are the process's.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET,
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield endpoint
    finally:
        server.stop()


def s3_options(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def pinned_table(table: TableSpec, pin: Pin, columns: tuple[str, ...] | None = None) -> PinnedTable:
    assert table.format is not None
    return PinnedTable(
        table.name, table.format, pin.schema, table.options, pin.snapshot, columns=columns
    )


def read_table(table: TableSpec, pin: Pin, columns: tuple[str, ...] | None = None) -> pa.Table:
    """All rows, a split after the other; a load reads the same ones of a few splits."""
    pinned = pinned_table(table, pin, columns)
    splits = pin.cut(pa.schema([("id", pa.int64())]), 1 << 20)
    batches = []
    for split in splits:
        rows = list(tables.read(pinned, split, table.secrets))
        assert split.num_rows is not None
        assert sum(batch.num_rows for batch in rows) <= split.num_rows
        batches.append(rows)
    some = lake.evenly(len(splits), _MOST_LOADED)
    loaded = loaded_splits(table, pinned, [splits[index] for index in some])
    for index, (found, _) in zip(some, loaded, strict=True):
        assert repr(_rows_of(found)) == repr(_rows_of(batches[index]))
    return pa.Table.from_batches([batch for rows in batches for batch in rows], pinned.read_schema)


def _rows_of(batches: Sequence[pa.RecordBatch]) -> list[Any]:
    return [row for batch in batches for row in batch.to_pylist()]


def loaded_splits(
    table: TableSpec, pinned: PinnedTable, splits: Sequence[Split], where: str = ""
) -> Iterator[tuple[list[pa.RecordBatch], LocalFile]]:
    """The rows of each split as a load reads them, and the file that it reads them from."""
    names = ", ".join(map(identifier, pinned.read_schema.names))
    sql = f"SELECT {names} FROM {identifier(pinned.name)}"
    sql += f" WHERE {where}" if where else ""
    with TemporaryDirectory() as scratch:
        staged = staging.stage(pinned, splits, table.secrets, Path(scratch))
        with closing(staged):
            for (file,) in staged:
                yield list(loader.read_split(file, sql, pinned)), file


def assert_same_rows(found: pa.Table, expected: pa.Table) -> None:
    """The same columns and rows; the rows in any order."""
    assert found.column_names == expected.column_names
    assert _multiset(found) == _multiset(expected)


def _multiset(table: pa.Table) -> Counter[str]:
    return Counter(repr(row) for row in table.to_pylist())
