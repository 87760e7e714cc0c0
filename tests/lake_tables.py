"""What the tests of lake tables share, whatever the format: a bucket, and reads as a node does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import boto3
import pyarrow as pa
from moto.server import ThreadedMotoServer

from cache_protocol.spec.dataset_spec import TableSpec
from cache_server import tables
from cache_server.node import staging
from cache_server.source.pinned import Pin, PinnedTable, Split
from cache_server.sql import loader
from cache_server.sql.loader import LocalFile
from cache_server.sql.quoting import identifier

ACCESS_KEY_ID = "access"
SECRET = "hush-hush-key"
BUCKET = "lake"


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
    """All rows, a split after the other; a load reads the same ones."""
    pinned = pinned_table(table, pin, columns)
    splits = pin.cut(pa.schema([("id", pa.int64())]), 1 << 20)
    batches = []
    for split in splits:
        rows = list(tables.read(pinned, split, table.secrets))
        assert split.num_rows is not None
        assert sum(batch.num_rows for batch in rows) <= split.num_rows
        batches += rows
    found = pa.Table.from_batches(batches, pinned.read_schema)
    if splits and found.column_names:
        loaded = [batch for batches, _ in loaded_splits(table, pinned, splits) for batch in batches]
        rows = [row for batch in loaded for row in batch.to_pylist()]
        assert repr(rows) == repr(found.to_pylist())
    return found


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
