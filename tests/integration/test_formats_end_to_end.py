"""Iceberg, Delta and PostgreSQL through real nodes: the rows of one state, whatever happens."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec, Reading
from cache_protocol.errors import LoadError
from cache_server import LocalCluster
from tests.delta_logs import delete_by_vector
from tests.postgres_server import PASSWORD, PostgresServer, database, postgres_server  # noqa: F401
from tests.waiting import wait_until

WAIT_S = 30.0
LEASE_S = 4.0  # longer than a load takes on a busy machine
GATE = 4711  # an advisory lock: who holds it stops the loads that read a gated view


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path_factory.mktemp("cache"), lease_s=LEASE_S) as running:
        yield running


@pytest.fixture
def clean(nodes: LocalCluster) -> Iterator[CacheClient]:
    """A client; whatever it loaded is dropped afterwards, and nothing may be left of it."""
    client = CacheClient(nodes.endpoint)
    yield client
    for info in client.datasets():
        client.drop(info.name)
    wait_until(lambda: not left_behind(nodes), WAIT_S, "nothing left in cache_dir")


def left_behind(cluster: LocalCluster, name: str = "*") -> list[Path]:
    """Shards, manifests and scratch files; a folder that is being removed counts, too."""
    found: list[Path] = []
    for node in cluster.nodes:
        for pattern in (f"{name}/*/*", ".scratch/*"):
            try:
                found += node.cache_dir.glob(pattern)
            except FileNotFoundError:
                found.append(node.cache_dir)
    return found


def rows(client: CacheClient, name: str) -> list[dict[str, Any]]:
    return client.head(name, 10**6).to_pylist()


def multiset(found: list[dict[str, Any]]) -> Counter[str]:
    """A null of a float is stored as NaN."""
    plain = ({key: _plain(value) for key, value in row.items()} for row in found)
    return Counter(map(repr, plain))


def _plain(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(LoadError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and PASSWORD not in text
    return text


# -- Iceberg and Delta -----------------------------------------------------------------------------


@pytest.fixture
def evolved(tmp_path: Path) -> Iterator[Table]:
    """Three partitions; appends, an added column, row deletes, a renamed column."""
    schema = Schema(
        NestedField(1, "id", LongType(), required=False),
        NestedField(2, "part", StringType(), required=False),
        NestedField(3, "score", DoubleType(), required=False),
    )
    parts = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/warehouse"
    with closing(SqlCatalog("default", uri=uri, warehouse=warehouse)) as catalog:
        catalog.create_namespace("ns")
        table = catalog.create_table("ns.t", schema, partition_spec=parts)
        table.append(_numbered(0, 30))
        with table.update_schema() as update:
            update.add_column("extra", DoubleType())
        table.append(_numbered(100, 9).append_column("extra", pa.array(map(float, range(9)))))
        table.delete("id >= 5 and id < 11")
        with table.update_schema() as update:
            update.rename_column("score", "points")
        last = _numbered(200, 4).rename_columns(["id", "part", "points"])
        table.append(last.append_column("extra", pa.array([None, 1.0, 2.0, 3.0])))
        yield table


def _numbered(start: int, count: int) -> pa.Table:
    ids = range(start, start + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "part": pa.array([f"p{i % 3}" for i in ids]),
            "score": pa.array([i / 2 if i % 4 else None for i in ids], pa.float64()),
        }
    )


def test_an_iceberg_table_is_at_each_snapshot_what_pyiceberg_scans(
    clean: CacheClient, evolved: Table
) -> None:
    snapshots = [snapshot.snapshot_id for snapshot in evolved.metadata.snapshots]
    assert len(snapshots) >= 4
    seen = set()
    for snapshot in (*snapshots, None):
        spec = DatasetSpec(
            "iceberg", evolved.metadata_location, snapshot=snapshot, target_shard_bytes=1
        )

        info = clean.load(spec, timeout_s=WAIT_S)

        expected = evolved.scan(snapshot_id=snapshot).to_arrow()
        assert multiset(rows(clean, "iceberg")) == multiset(expected.to_pylist())
        assert info.schema.names == expected.column_names
        seen.add(info.fingerprint)
    assert len(seen) >= len(snapshots)


def test_a_query_over_an_iceberg_table_prunes_and_filters_like_pyiceberg(
    clean: CacheClient, evolved: Table
) -> None:
    sql = "SELECT id, points FROM source WHERE part = 'p1' AND id < 150"

    clean.load(DatasetSpec("iceberg", evolved.metadata_location, sql=sql), timeout_s=WAIT_S)

    scan = evolved.scan("part = 'p1' and id < 150", selected_fields=("id", "points"))
    assert multiset(rows(clean, "iceberg")) == multiset(scan.to_arrow().to_pylist())


def test_an_iceberg_data_file_that_is_gone_fails_the_load_by_name(
    clean: CacheClient, nodes: LocalCluster, evolved: Table
) -> None:
    gone = sorted(task.file.file_path for task in evolved.scan().plan_files())[1]
    Path(gone.removeprefix("file://")).unlink()
    fixed = ["id", "points"]  # of texts the planner would look for its footer
    spec = DatasetSpec("iceberg", evolved.metadata_location, columns=fixed, target_shard_bytes=1)

    text = failure(lambda: clean.load(spec, timeout_s=WAIT_S))

    assert gone in text and evolved.metadata_location in text and "'iceberg'" in text
    assert clean.describe("iceberg").state == "failed"
    wait_until(lambda: not left_behind(nodes, "iceberg"), WAIT_S, "nothing left in cache_dir")


def test_a_delta_table_with_a_deletion_vector_on_two_nodes_each(
    clean: CacheClient, tmp_path: Path
) -> None:
    uri = tmp_path / "trips"
    write_deltalake(str(uri), pa.table({"id": range(10), "part": ["a b%"] * 10}))
    delete_by_vector(uri, [1, 3, 4])
    spec = DatasetSpec("delta", uri, format="delta", replicas=2)

    clean.load(spec, timeout_s=WAIT_S)

    assert [row["id"] for row in rows(clean, "delta")] == [0, 2, 5, 6, 7, 8, 9]
    wait_until(lambda: copies(clean, "delta") == {2}, WAIT_S, "two nodes for each shard")
    clean.load(DatasetSpec("delta", uri, format="delta", snapshot=0), timeout_s=WAIT_S)
    assert [row["id"] for row in rows(clean, "delta")] == [*range(10)]
    assert DeltaTable(uri).version() == 1


def copies(client: CacheClient, name: str) -> set[int]:
    return {len(held) for held in client.describe(name).placement.values()}


# -- PostgreSQL ------------------------------------------------------------------------------------


class Shop:
    """A database, and a view whose rows from 400 on are held up while the gate is closed."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server, self.name = server, name

    def run(self, *statements: str) -> None:
        self.server.run(self.name, *statements)

    def fill(self, num_rows: int = 800) -> None:
        self.run(
            "CREATE TABLE items (id int PRIMARY KEY, price int)",
            f"INSERT INTO items SELECT g, 1 FROM generate_series(0, {num_rows - 1}) g",
            # Not volatile, or the server would call it to look for ranges of ids, too.
            "CREATE FUNCTION gate(id int) RETURNS boolean STABLE LANGUAGE plpgsql AS $$ BEGIN "
            f"IF id >= 400 THEN PERFORM pg_advisory_xact_lock_shared({GATE}); END IF; "
            "RETURN true; END $$",
            "CREATE VIEW gated AS SELECT id, price, gate(id) AS open FROM items",
        )

    def spec(self, dataset: str = "pg", table: str = "items", **more: Any) -> DatasetSpec:
        arguments: dict[str, Any] = {"target_shard_bytes": 800, **more}
        options = {"password": PASSWORD, **arguments.pop("storage_options", {})}
        uri = self.server.uri(self.name, table=table)
        return DatasetSpec(dataset, uri, storage_options=options, **arguments)

    def gated(self, **more: Any) -> DatasetSpec:
        options = {"split_column": "id"}
        return self.spec(table="gated", storage_options=options, **more)

    @contextmanager
    def closed_gate(self) -> Iterator[None]:
        with closing(self.server.connect(self.name)) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_lock({GATE})")
            cursor.fetchall()
            yield

    def held_up(self) -> int:
        """Readers that wait at the gate."""
        query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        return int(str(self.server.rows(self.name, query)[0][0]))

    def no_connection(self) -> None:
        """The transaction that exported the snapshot is closed, and every reader's."""
        wait_until(
            lambda: self.server.num_connections(self.name) == 0, WAIT_S, "every transaction closed"
        )


@pytest.fixture
def shop(postgres_server: PostgresServer, database: str) -> Shop:  # noqa: F811
    shop = Shop(postgres_server, database)
    shop.fill()
    return shop


def test_a_load_beside_a_writer_sees_one_state_on_both_nodes(
    clean: CacheClient, shop: Shop
) -> None:
    stop, written = threading.Event(), threading.Event()

    def write() -> None:
        """Keeps the sum, but moves it between rows that lie in different splits."""
        with closing(shop.server.connect(shop.name)) as connection, connection.cursor() as cursor:
            step = 0
            while not stop.is_set():
                step += 1
                cursor.execute(
                    "UPDATE items SET price = price + CASE WHEN id < 400 THEN 1 ELSE -1 END "
                    f"WHERE id IN ({step % 400}, {step % 400 + 400})"
                )
                if step > 50:
                    written.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert written.wait(WAIT_S)
        info = clean.load(shop.spec(replicas=2), timeout_s=WAIT_S)
    finally:
        stop.set()
        writer.join()

    found = rows(clean, "pg")
    assert info.num_shards > 4
    assert [row["id"] for row in found] == [*range(800)]
    assert sum(row["price"] for row in found) == 800
    assert any(row["price"] != 1 for row in found)
    wait_until(lambda: copies(clean, "pg") == {2}, WAIT_S, "two nodes for each shard")
    shop.no_connection()


def test_the_same_spec_attaches_until_a_refresh_which_readers_of_the_old_version_outlive(
    clean: CacheClient, nodes: LocalCluster, shop: Shop
) -> None:
    old = clean.load(shop.spec(), timeout_s=WAIT_S)
    shop.no_connection()
    shop.run("UPDATE items SET price = 2", "DELETE FROM items WHERE id >= 500")

    assert clean.load(shop.spec(), timeout_s=WAIT_S).fingerprint == old.fingerprint
    assert clean.load(shop.spec(replicas=2), timeout_s=WAIT_S).fingerprint == old.fingerprint
    assert clean.load(shop.spec(), timeout_s=WAIT_S).num_rows == 800

    dataset = CacheIterableDataset(
        "pg",
        cache=nodes.endpoint,
        batch_size=20,
        reading=Reading(prefetch_batches=1, message_bytes=100),
    )
    steps = iter(dataset)
    prices = next(steps)["price"].tolist()
    new = clean.load(shop.spec(), refresh=True, timeout_s=WAIT_S)
    assert (new.num_rows, dataset.fingerprint) == (500, old.fingerprint)
    assert new.fingerprint != old.fingerprint
    prices += [price for step in steps for price in step["price"].tolist()]

    assert prices == [1] * 800
    assert {row["price"] for row in rows(clean, "pg")} == {2}
    wait_until(lambda: on_disk(nodes, "pg") == {new.fingerprint}, WAIT_S, "the old version dropped")
    shop.no_connection()


def on_disk(cluster: LocalCluster, name: str) -> set[str]:
    """The versions that have files somewhere."""
    return {
        Path(folder).name
        for node in cluster.nodes
        for folder, _, files in os.walk(node.cache_dir / name)
        if files
    }


def test_a_refused_null_fails_the_load_and_ends_the_transaction(
    clean: CacheClient, nodes: LocalCluster, shop: Shop
) -> None:
    shop.run("UPDATE items SET price = NULL WHERE id = 777")

    text = failure(lambda: clean.load(shop.spec(nulls="refuse"), timeout_s=WAIT_S))

    assert "public.items (split " in text and "column 'price' holds 1 null" in text
    assert "COALESCE" in text
    assert clean.describe("pg").state == "failed"
    shop.no_connection()
    wait_until(lambda: not left_behind(nodes, "pg"), WAIT_S, "nothing left in cache_dir")
    mended = shop.spec(sql="SELECT id, COALESCE(price, 0) AS price FROM source")
    assert clean.load(mended, timeout_s=WAIT_S).num_rows == 800


def test_a_server_that_ends_every_connection_in_the_middle_fails_the_load_by_name(
    clean: CacheClient, nodes: LocalCluster, shop: Shop
) -> None:
    """What a fast shutdown does to its clients; other tests of this process need the server."""
    with shop.closed_gate():
        clean.load(shop.gated(), wait=False)
        wait_until(shop.held_up, WAIT_S, "a reader at the gate")
        shop.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'cache_server'"
        )

        text = failure(lambda: wait_for(clean, "pg"))

    assert "public.gated (split " in text
    # As the driver finds out: at its next call, or in the middle of one.
    reasons = ("terminating connection", "has ended", "closed the connection unexpectedly")
    assert any(reason in text for reason in reasons)
    shop.no_connection()
    wait_until(lambda: not left_behind(nodes, "pg"), WAIT_S, "nothing left in cache_dir")
    assert clean.load(shop.gated(), timeout_s=WAIT_S).num_rows == 800


def wait_for(client: CacheClient, name: str) -> None:
    """Until it is ready. Raises: LoadError, when it failed."""
    wait_until(lambda: client.describe(name).state != "loading", WAIT_S, f"{name} loaded")
    info = client.describe(name)
    if info.state == "failed":
        raise LoadError(str(info.error))


def test_a_dataset_dropped_while_it_loads_lets_go_of_its_transaction(
    clean: CacheClient, nodes: LocalCluster, shop: Shop
) -> None:
    with shop.closed_gate():
        clean.load(shop.gated(), wait=False)
        wait_until(shop.held_up, WAIT_S, "a reader at the gate")
        holding = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cache_server' "
            "AND state = 'idle in transaction'"
        )
        # Readers are idle, too, while they begin.
        wait_until(
            lambda: shop.server.rows(shop.name, holding) == [(1,)], WAIT_S, "only the snapshot held"
        )

        clean.drop("pg")

        wait_until(
            lambda: shop.server.rows(shop.name, holding) == [(0,)], WAIT_S, "the snapshot let go"
        )
    shop.no_connection()
    wait_until(lambda: not left_behind(nodes, "pg"), WAIT_S, "nothing left in cache_dir")


def test_a_node_killed_in_the_middle_of_a_load_comes_back_and_the_load_completes(
    shop: Shop, tmp_path: Path
) -> None:
    with LocalCluster(2, tmp_path / "cache") as cluster:
        client = CacheClient(cluster.endpoint)
        with shop.closed_gate():
            client.load(shop.gated(), wait=False)
            wait_until(
                lambda: shop.held_up() >= 2 and client.describe("pg").num_bytes,
                WAIT_S,
                "a node at the gate with both its threads, and a shard sealed",
            )
            cluster.nodes[1].kill()
        sealed = client.describe("pg").num_bytes
        cluster.nodes[1].start()

        info = client.load(shop.gated(), timeout_s=WAIT_S)

        assert info.num_bytes > sealed > 0
        assert [row["id"] for row in rows(client, "pg")] == [*range(800)]
        shop.no_connection()


def test_a_lost_shard_of_an_ended_snapshot_asks_for_a_refresh_and_is_mended_by_it(
    shop: Shop, tmp_path: Path
) -> None:
    with LocalCluster(2, tmp_path / "cache", node_timeout_s=1.0) as cluster:
        client = CacheClient(cluster.endpoint)
        old = client.load(shop.spec(), timeout_s=WAIT_S)
        assert len({held for held in old.placement.values()}) == 2
        shop.run("UPDATE items SET price = 2")

        cluster.nodes[1].kill()
        wait_until(lambda: client.describe("pg").state == "failed", WAIT_S, "the loss noticed")

        text = str(client.describe("pg").error)
        assert "public.items" in text and "has ended: load it again with --refresh" in text
        new = client.load(shop.spec(), refresh=True, timeout_s=WAIT_S)
        assert new.fingerprint != old.fingerprint
        assert client.describe("pg").error is None
        assert {row["price"] for row in rows(client, "pg")} == {2}
        shop.no_connection()
