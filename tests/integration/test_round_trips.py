"""Tables of every Arrow type, by every way in and out: they come out as they went in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_protocol.storage.nested_values import without_codes
from cache_server import LocalCluster
from tests import arrow_values
from tests.flight_clients import connect
from tests.load_here import load_here
from tests.same_tables import check, values_in, values_of

ROWS, SEEDS = 9, range(12)
Write = Callable[[Path, pa.Table], None]


def parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path / "a.parquet", row_group_size=4)


def arrow(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(str(path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def fits_parquet(column: pa.Array) -> bool:
    """Whether Arrow writes and reads a column as Parquet; it ends the process for empty lists."""
    if "[0]" in str(column.type) or "-3)" in str(column.type):  # and for some negative scales
        return False
    try:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table([column], names=["x"]), sink, row_group_size=4)
        pq.read_table(pa.BufferReader(sink.getvalue()))
    except (pa.ArrowException, NotImplementedError):
        return False
    return True


def fits_write(column: pa.Array) -> bool:
    """Whether its rows take bytes, which a put must have."""
    text = str(column.type)
    return fits_arrow(column) and not any(name in text for name in ("null", "[0]", "<>"))


def fits_arrow(column: pa.Array) -> bool:
    """Whether it is no type that the guide says Arrow cannot take from lists."""
    is_encoded = any(name in str(column.type) for name in ("run_end", "view"))
    return not (is_encoded and pa.types.is_nested(column.type))


def table_of(seed: int, depth: int, fits: Callable[[pa.Array], bool]) -> pa.Table:
    """Columns of random types beside the numbers of the rows."""
    rng = np.random.default_rng(seed)
    fields, columns = [pa.field("row", pa.int64())], [pa.array(range(ROWS))]
    while len(fields) < 8:
        field = pa.field(f"c{len(fields)}", arrow_values.random_type(rng, depth))
        column = arrow_values.array_of(field, ROWS, rng)
        if fits(column):
            fields.append(field)
            columns.append(column)
    return pa.table(columns, schema=pa.schema(fields))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sql", [None, "SELECT * FROM source"])
@pytest.mark.parametrize("write", [parquet, arrow], ids=["parquet", "arrow"])
def test_a_loaded_file_is_the_table_that_was_written(
    tmp_path: Path, write: Write, sql: str | None, seed: int, depth: int
) -> None:
    table = table_of(seed, depth, fits_parquet if write is parquet else fits_arrow)
    (tmp_path / "source").mkdir()
    write(tmp_path / "source", table)
    if write is parquet:  # which has no type of its own for all of them
        table = pq.read_table(tmp_path / "source")
    spec = DatasetSpec("t", tmp_path / "source", sql=sql, target_shard_bytes=1)

    check(load_here(spec, tmp_path / "cache"), table)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        yield running


@pytest.fixture(scope="module")
def written(cluster: LocalCluster) -> pa.Table:
    """A table that was written, and appended to."""
    table = table_of(1, 3, fits_write)
    client = CacheClient(cluster.endpoint)
    client.write("t", table.slice(0, 4))
    client.write("t", table.slice(4), append=True)
    return table


def test_a_written_table_is_read_in_its_order(cluster: LocalCluster, written: pa.Table) -> None:
    check(CacheClient(cluster.endpoint).read("t").read_all(), written)
    assert CacheClient(cluster.endpoint).describe("t").schema.names == written.schema.names


@pytest.mark.parametrize("local", [True, False], ids=["local", "flight"])
def test_a_written_table_is_read_shuffled(
    cluster: LocalCluster, written: pa.Table, local: bool
) -> None:
    connection = Connection(cluster.endpoint, local=local)
    dataset = CacheIterableDataset(
        "t", batch_size=4, shuffle=True, batch_format="arrow", cache=connection
    )
    found = pa.Table.from_batches(list(dataset))
    order = found.column("row").to_numpy()

    assert sorted(order) == list(range(ROWS))
    check(found, values_in(written, order))


def test_any_client_of_flight_gets_the_values(cluster: LocalCluster, written: pa.Table) -> None:
    with connect(cluster.endpoint) as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_path("t"))
        tables = [
            connect(part.locations[0]).do_get(part.ticket).read_all() for part in info.endpoints
        ]
    found = pa.concat_tables(tables)

    assert found.schema.equals(info.schema)
    assert found.schema.equals(without_codes(written.schema))
    assert values_of(found).equals(values_of(written))
