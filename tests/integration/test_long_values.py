"""Texts longer than the rows that are kept, and columns of more than 2 GiB in a shard.

The limits are lowered where the code has one place for them. The trial `large_columns` does not.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from cache_client import CacheClient
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.storage import layout
from cache_server import LocalCluster
from cache_server.node.loads import staging
from cache_server.plan import pinned_version
from cache_server.source.pinned import PinnedTable
from cache_server.sql.loader import read_split
from cache_server.tables import delta, files
from tests.flight_clients import connect
from tests.lake_tables import read_table
from tests.load_here import load_here

ROWS, LONG_BYTES = 240, 100_000
MOST_BYTES = 17 * 1024 * 1024


@pytest.fixture(scope="module")
def long_table() -> pa.Table:
    docs = [chr(97 + row % 26) * LONG_BYTES for row in range(ROWS)]
    return pa.table({"id": range(ROWS), "doc": docs, "docs": [[doc] for doc in docs]})


@pytest.mark.parametrize("condition", ["", " WHERE doc LIKE '%a' OR id >= 0"])
@pytest.mark.parametrize("format", ["parquet", "csv", "arrow"])
def test_batches_are_sized_by_the_columns_that_are_read(
    tmp_path: Path, long_table: pa.Table, format: str, condition: str
) -> None:
    path, table = tmp_path / f"a.{format}", long_table.select(["id", "doc"])
    if format == "csv":
        pa.csv.write_csv(table, path)
    elif format == "arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, 50)
    else:
        pq.write_table(table, path, compression="zstd")
    sql = f"SELECT length(doc) AS n FROM t{condition}"
    (spec,) = DatasetSpec("t", path).tables
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", format, pin.schema)

    splits = pin.cut(pa.schema({"n": pa.int32()}), 10**9)
    groups = staging.stage(pinned, splits, {}, tmp_path / "scratch")
    batches = [b for (file,) in groups for b in read_split(file, sql, pinned)]

    assert [n for batch in batches for n in batch["n"].to_pylist()] == [LONG_BYTES] * ROWS
    assert max(batch.num_rows for batch in batches) * LONG_BYTES < MOST_BYTES


def test_rows_of_lake_tables_come_in_small_batches(tmp_path: Path, long_table: pa.Table) -> None:
    """Also those of lists: Arrow's scanner cannot decode a row group with 2 GiB of them."""
    write_deltalake(tmp_path / "delta", long_table)
    (spec,) = DatasetSpec("t", tmp_path / "delta", format="delta").tables
    pin = delta.pin(spec)

    found = read_table(spec, pin)

    assert found.equals(long_table.cast(pin.schema))
    assert max(len(chunk) for chunk in found["docs"].chunks) * 2 * LONG_BYTES < MOST_BYTES


@pytest.mark.parametrize("format", ["parquet", "csv", "arrow", "delta"])
def test_a_shard_that_may_outgrow_its_offsets_has_longer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    names = [f"row {row}" for row in range(3000)]
    table = pa.table({"id": range(3000), "name": names, "names": [[name] for name in names]})
    if format == "csv":
        table = table.select(["id", "name"])
    source = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(table, source)
    elif format == "csv":
        pa.csv.write_csv(table, source)
    elif format == "delta":
        write_deltalake(source, table)
    else:
        with pa.ipc.new_file(source, table.schema) as writer:
            writer.write_table(table)
    spec = DatasetSpec("t", source, format=format)

    usual = load_here(spec, tmp_path / "cache")
    monkeypatch.setattr(pinned_version, "_LARGE_BYTES", 1000)
    large = load_here(spec, tmp_path / "cache")

    logical = pinned_version.plan_version(spec).version.logical
    stored = {column.name: column.type for column in layout.Layout(logical).plain_fields}
    lists = pa.large_list(pa.large_string())
    wanted = {"name": pa.large_string(), "names": lists}
    assert stored == {name: wanted[name] for name in table.column_names if name != "id"}
    assert large.schema.equals(usual.schema)
    assert large.to_pylist() == usual.to_pylist() == table.to_pylist()


def test_a_flight_message_is_sized_by_the_true_bytes_of_its_rows(
    cluster: LocalCluster,
    client: CacheClient,
    tmp_path: Path,
    dataset_name: str,
    long_table: pa.Table,
) -> None:
    pq.write_table(long_table, tmp_path / "a.parquet")
    client.load(DatasetSpec(dataset_name, tmp_path / "a.parquet", target_shard_bytes=2**30))
    found = []
    with connect(cluster.endpoint) as connection:
        info = connection.get_flight_info(flight.FlightDescriptor.for_path(dataset_name))
    for endpoint in info.endpoints:
        with connect(endpoint.locations[0]) as connection:
            found += [chunk.data for chunk in connection.do_get(endpoint.ticket)]

    assert pa.Table.from_batches(found).to_pylist() == long_table.to_pylist()
    assert max(batch.nbytes for batch in found) < 4 * 1024 * 1024
