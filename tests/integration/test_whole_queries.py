"""Queries with one answer for the whole table: run once, cut into shards, spread over the nodes."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext

from cache_client import CacheClient, DatasetSpec
from cache_protocol.errors import LoadError
from cache_server import LocalCluster
from tests.waiting import files_below, wait_until

WAIT_S = 30.0
NUM_ORDERS, NUM_CUSTOMERS = 3000, 40


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Orders in several files and row groups, and the customers who made them."""
    directory = tmp_path_factory.mktemp("lake")
    rng = np.random.default_rng(7)
    orders = pa.table(
        {
            "id": np.arange(NUM_ORDERS),
            "customer": rng.integers(0, NUM_CUSTOMERS + 10, NUM_ORDERS),
            "price": np.round(rng.uniform(0, 100, NUM_ORDERS)),
            "day": rng.integers(0, 30, NUM_ORDERS).astype(np.int32),
            "note": [f"note {n % 11}" for n in range(NUM_ORDERS)],
        }
    )
    (directory / "orders").mkdir()
    for index, start in enumerate(range(0, NUM_ORDERS, 1000)):
        path = directory / "orders" / f"{index}.parquet"
        pq.write_table(orders.slice(start, 1000), path, row_group_size=250)
    customers = pa.table(
        {
            "customer": np.arange(NUM_CUSTOMERS),
            "segment": [f"segment {n % 4}" for n in range(NUM_CUSTOMERS)],
            "discount": rng.integers(0, 5, NUM_CUSTOMERS),
        }
    )
    pq.write_table(customers, directory / "customers.parquet")
    return directory


@pytest.mark.parametrize("order", ["", " ORDER BY id, value"])
def test_a_join_with_a_function_that_makes_rows_has_them_all(
    client: CacheClient, lake: Path, dataset_name: str, order: str
) -> None:
    sql = f"SELECT id, value FROM source CROSS JOIN generate_series(1, 3){order}"
    spec = DatasetSpec(
        dataset_name, lake / "orders", sql=sql, allow_unordered=not order, target_shard_bytes=4000
    )

    info = client.load(spec)

    rows = client.head(dataset_name, info.num_rows).to_pylist()
    found = [(row["id"], row["value"]) for row in rows]
    wanted = [*itertools.product(range(NUM_ORDERS), range(1, 4))]
    assert (found if order else sorted(found)) == wanted


def test_the_same_join_under_several_names_is_loaded_at_once(
    cluster: LocalCluster, lake: Path
) -> None:
    sql = "SELECT o.id, c.segment FROM orders o JOIN customers c ON o.customer = c.customer"
    client = CacheClient(cluster.endpoint)
    specs = [
        DatasetSpec(
            f"join-{n}", sources=sources(lake), sql=sql, allow_unordered=True,
            target_shard_bytes=4000,
        )
        for n in range(6)
    ]  # fmt: skip
    for spec in specs:
        client.load(spec, wait=False)
    loaded = [client.load(spec) for spec in specs]
    for spec in specs:
        client.drop(spec.name)

    assert len({(info.num_rows, info.fingerprint) for info in loaded}) == 1


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, kind FROM a ORDER BY id DESC",
        "SELECT kind, count(*) AS n FROM a GROUP BY kind ORDER BY kind",
        "SELECT a.id, b.kind FROM a JOIN b USING (id) WHERE a.kind <> 'x' ORDER BY a.id",
        "SELECT a.id, b.kind FROM a LEFT JOIN b USING (id)",
    ],
)
def test_categories_that_differ_between_files_and_row_groups(
    client: CacheClient, tmp_path: Path, dataset_name: str, sql: str
) -> None:
    context = SessionContext()
    for name, parts in {"a": ("xy", "yz", "ux"), "b": ("pq", "qr", "st")}.items():
        for number, kinds in enumerate(parts):
            encoded = [pa.array([kind] * 4).dictionary_encode() for kind in kinds]
            ids = range(number * 8, number * 8 + 8)
            table = pa.table({"id": ids, "kind": pa.chunked_array(encoded)})
            (tmp_path / name).mkdir(exist_ok=True)
            pq.write_table(table, tmp_path / name / f"{number}.parquet", row_group_size=4)
        context.register_parquet(name, str(tmp_path / name))
    wanted = [row for batch in context.sql(sql).collect() for row in batch.to_pylist()]

    client.load(
        DatasetSpec(
            dataset_name,
            sources={name: str(tmp_path / name) for name in "ab" if f" {name} " in f"{sql} "},
            sql=sql,
            allow_unordered=True,
            target_shard_bytes=64,
        )
    )

    assert multiset(cached(client, dataset_name)) == multiset(wanted)


def sources(lake: Path) -> dict[str, object]:
    return {"orders": str(lake / "orders"), "customers": str(lake / "customers.parquet")}


def by_datafusion_alone(lake: Path, sql: str) -> list[dict[str, Any]]:
    context = SessionContext()
    context.register_parquet("orders", str(lake / "orders"))
    context.register_parquet("customers", str(lake / "customers.parquet"))
    return [row for batch in context.sql(sql).collect() for row in batch.to_pylist()]


def cached(client: CacheClient, name: str) -> list[dict[str, Any]]:
    return client.head(name, 10**9).to_pylist()


def multiset(rows: list[dict[str, Any]]) -> Counter[tuple[object, ...]]:
    return Counter(tuple(row.values()) for row in rows)


def queries() -> Iterator[str]:
    """Forty queries, some of each kind, with constants drawn anew for each."""
    rng = random.Random(4)
    for low, day in zip(rng.sample(range(90), 4), rng.sample(range(30), 4), strict=True):
        top = rng.randrange(3, 200)
        yield f"SELECT id, price * 2 AS double, note FROM orders WHERE price > {low}"
        yield (
            "SELECT customer, count(*) AS n, sum(price) AS total FROM orders "
            f"WHERE day < {day} GROUP BY customer HAVING count(*) > 2"
        )
        yield (
            "SELECT o.id, o.price, c.segment FROM orders o JOIN customers c "
            f"ON o.customer = c.customer WHERE o.day >= {day}"
        )
        yield (
            "SELECT o.id, c.segment, COALESCE(c.discount, -1) AS d FROM orders o "
            "LEFT JOIN customers c ON o.customer = c.customer AND c.discount > 1 "
            f"WHERE o.price < {low}"
        )
        yield (
            "SELECT id, day, row_number() OVER (PARTITION BY day ORDER BY price, id) AS place "
            f"FROM orders WHERE price > {low}"
        )
        yield f"SELECT id, price FROM orders ORDER BY price DESC, id LIMIT {top} OFFSET {day}"
        yield f"SELECT DISTINCT customer, day FROM orders WHERE price > {low}"
        yield (
            f"SELECT id FROM orders WHERE price > {low} UNION ALL "
            f"SELECT customer AS id FROM customers WHERE discount < 3"
        )
        yield (
            f"SELECT id FROM orders WHERE customer IN (SELECT customer FROM customers "
            f"WHERE discount = {day % 5}) AND day < {day} "
            "AND price >= (SELECT avg(price) FROM orders)"
        )
        yield (
            "SELECT c.segment, q.day, q.n FROM customers c JOIN (SELECT customer, day, "
            f"count(*) AS n FROM orders WHERE day <> {day} GROUP BY customer, day) q "
            "ON c.customer = q.customer"
        )


def test_there_are_forty_different_queries() -> None:
    assert len(set(queries())) == 40


@pytest.mark.parametrize("number", range(8))
def test_the_cache_gives_the_rows_that_datafusion_alone_gives(
    client: CacheClient, dataset_name: str, lake: Path, number: int
) -> None:
    for sql in itertools.islice(queries(), 5 * number, 5 * number + 5):
        used = {name: at for name, at in sources(lake).items() if f" {name}" in sql}
        info = client.load(
            DatasetSpec(
                dataset_name, sources=used, sql=sql, allow_unordered=True,
                target_shard_bytes="4KiB",
            )
        )  # fmt: skip

        expected = by_datafusion_alone(lake, sql)
        assert multiset(cached(client, dataset_name)) == multiset(expected), sql
        assert info.num_rows == len(expected)


def test_a_sorted_result_keeps_its_order_and_is_spread_over_the_nodes(
    client: CacheClient, cluster: LocalCluster, dataset_name: str, lake: Path
) -> None:
    sql = "SELECT id, price FROM source ORDER BY price DESC, id"

    info = client.load(
        DatasetSpec(dataset_name, lake / "orders", sql=sql, target_shard_bytes="2KiB")
    )

    expected = by_datafusion_alone(lake, sql.replace("source", "orders"))
    assert cached(client, dataset_name) == expected
    assert info.num_shards > 8
    wait_until(
        lambda: (
            {n for ids in client.describe(dataset_name).placement.values() for n in ids}
            == {node.node_id for node in cluster.nodes}
        ),
        WAIT_S,
        "shards on both nodes",
    )
    assert cached(client, dataset_name) == expected


def test_the_same_whole_query_is_the_same_version(
    client: CacheClient, dataset_name: str, lake: Path
) -> None:
    spec = DatasetSpec(dataset_name, lake / "orders", sql="SELECT count(*) AS n FROM source")

    first, again = client.load(spec), client.load(spec)

    assert first.fingerprint == again.fingerprint
    assert cached(client, dataset_name) == [{"n": NUM_ORDERS}]


def test_a_result_without_rows_is_a_ready_dataset(
    client: CacheClient, dataset_name: str, lake: Path
) -> None:
    sql = "SELECT id FROM source WHERE price < -1 ORDER BY id"

    info = client.load(DatasetSpec(dataset_name, lake / "orders", sql=sql))

    assert (info.state, info.num_rows, info.num_shards) == ("ready", 0, 0)


def test_a_whole_query_that_fails_leaves_nothing_behind_and_can_be_tried_again(
    client: CacheClient, cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": [1, 0], "b": ["1", "x"]}), tmp_path / "t.parquet")
    sql = "SELECT a, CAST(b AS BIGINT) AS b FROM source ORDER BY a"
    spec = DatasetSpec(dataset_name, tmp_path / "t.parquet", sql=sql)

    for _ in range(2):
        with pytest.raises(LoadError, match="x"):
            client.load(spec)

    info = client.describe(dataset_name)
    assert info.state == "failed" and info.error is not None and "'x'" in info.error
    wait_until(lambda: not left_behind(cluster, dataset_name), WAIT_S, "nothing left")
    pq.write_table(pa.table({"a": [1, 0], "b": ["1", "7"]}), tmp_path / "t.parquet")
    assert client.load(spec).num_rows == 2


def left_behind(cluster: LocalCluster, dataset: str) -> list[Path]:
    return files_below(
        *(node.cache_dir / name for node in cluster.nodes for name in (dataset, ".scratch"))
    )


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT o.id, c."select" FROM "table" o JOIN "lateral" c ON o.id = c.id',
        'SELECT o.id, c."select" FROM "table" o JOIN "lateral" c ON o.id = c.id ORDER BY o.id',
    ],
)
def test_tables_and_columns_may_be_named_like_words_of_sql(
    client: CacheClient, dataset_name: str, tmp_path: Path, sql: str
) -> None:
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "table.parquet")
    pq.write_table(pa.table({"id": [2, 3], "select": [20, 30]}), tmp_path / "lateral.parquet")
    tables = {name: str(tmp_path / f"{name}.parquet") for name in ("table", "lateral")}

    client.load(DatasetSpec(dataset_name, sources=tables, sql=sql, allow_unordered=True))

    assert multiset(cached(client, dataset_name)) == Counter([(2, 20), (3, 30)])


@pytest.mark.parametrize("order", ["", " ORDER BY id"])
@pytest.mark.parametrize("bad", ["driver", "other"])
def test_an_error_of_a_join_names_the_split_once(
    client: CacheClient,
    cluster: LocalCluster,
    dataset_name: str,
    tmp_path: Path,
    order: str,
    bad: str,
) -> None:
    ids = pa.table({"id": range(1000), "x": range(1000)})
    pq.write_table(ids, tmp_path / "driver.parquet", compression="none")
    pq.write_table(ids.slice(0, 10), tmp_path / "other.parquet", compression="none")
    path = tmp_path / f"{bad}.parquet"
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * 64)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    sql = f"SELECT d.id, d.x, o.x AS y FROM driver d JOIN other o ON d.id = o.id{order}"
    tables = {name: str(tmp_path / f"{name}.parquet") for name in ("driver", "other")}

    with pytest.raises(LoadError) as caught:
        client.load(DatasetSpec(dataset_name, sources=tables, sql=sql, allow_unordered=True))

    assert str(caught.value).count("cannot load") == 1
    assert f"cannot load {path}: " in str(caught.value)
    wait_until(lambda: not left_behind(cluster, dataset_name), WAIT_S, "nothing left")


def test_a_row_of_a_join_that_fails_names_its_split_once(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    for name in ("driver", "other"):
        pq.write_table(pa.table({"id": [0, 1, 2]}), tmp_path / f"{name}.parquet")
    tables = {name: str(tmp_path / f"{name}.parquet") for name in ("driver", "other")}
    sql = "SELECT d.id, 1 / o.id AS y FROM driver d JOIN other o ON d.id = o.id"

    with pytest.raises(LoadError, match=r"[Dd]ivide by zero") as caught:
        client.load(DatasetSpec(dataset_name, sources=tables, sql=sql, allow_unordered=True))

    assert str(caught.value).count("cannot load") == 1
    assert re.search(r"cannot load \S+\.parquet: cannot run ", str(caught.value))


def test_lost_shards_of_a_result_are_made_again_as_they_were(tmp_path: Path, lake: Path) -> None:
    sql = "SELECT day, id, price FROM source ORDER BY day"  # with ties
    with LocalCluster(2, tmp_path / "cache", node_timeout_s=1.0) as cluster:
        client = CacheClient(cluster.endpoint)
        spec = DatasetSpec("t", lake / "orders", sql=sql, target_shard_bytes="2KiB")
        client.load(spec)
        before = cached(client, "t")
        ids = {node.node_id for node in cluster.nodes}
        wait_until(
            lambda: {n for held in client.describe("t").placement.values() for n in held} == ids,
            WAIT_S,
            "shards on both nodes",
        )

        cluster.nodes[1].kill()
        wait_until(
            lambda: (
                all(
                    held == (cluster.nodes[0].node_id,)
                    for held in client.describe("t").placement.values()
                )
                and client.describe("t").state == "ready"
            ),
            WAIT_S,
            "everything on the node that is left",
        )

        assert cached(client, "t") == before


def test_a_node_that_is_killed_while_it_runs_a_whole_query_is_replaced(
    tmp_path: Path, lake: Path
) -> None:
    sql = "SELECT o.id, p.id AS other FROM orders o, orders2 p WHERE o.day = p.day ORDER BY 1, 2"
    with LocalCluster(2, tmp_path / "cache", node_timeout_s=1.0) as cluster:
        client = CacheClient(cluster.endpoint)
        spec = DatasetSpec(
            "t",
            sources={"orders": str(lake / "orders"), "orders2": str(lake / "orders")},
            sql=sql,
            target_shard_bytes="64KiB",
        )
        client.load(spec, wait=False)
        cluster.nodes[1].kill()

        info = client.load(spec, timeout_s=WAIT_S)

        counts = Counter(row["day"] for row in by_datafusion_alone(lake, "SELECT day FROM orders"))
        assert info.num_rows == sum(count * count for count in counts.values())
