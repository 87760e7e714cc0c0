"""Two real nodes load every spec of docs/sources, with the rows that the pages promise.

Only the names of places and of secrets are replaced, see `Lake.substitutes`: servers by ones on
loopback, ``/data`` by a folder, ids by those that the tables here have.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import write_deltalake
from moto.server import ThreadedMotoServer
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import SortOrder
from pyiceberg.types import LongType, NestedField

from cache_client import CacheClient, DatasetSpec
from cache_protocol.datasets.dataset_spec import FORMATS
from cache_protocol.errors import CacheError
from cache_server import LocalCluster
from tests.object_store import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server, _backend
from tests.postgres_server import PASSWORD, PostgresServer, database, postgres_server  # noqa: F401
from tests.store_stubs import AzureStub, FilesStub, HubStub, Served
from tests.waiting import wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = "".join(
    page.read_text(encoding="utf-8") for page in sorted((DOCS / "sources").glob("*.md"))
)
SPECS = {
    spec["name"]: spec
    for spec in map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", PAGES, re.DOTALL | re.M))
}
NUM_HOUSES = 120
WAIT_S = 30.0
HUB_TOKEN = "hush-hush"
ACCOUNT_KEY = "bXkgYWNjb3VudCBrZXk="
SECRETS = (SECRET_ACCESS_KEY, PASSWORD, HUB_TOKEN, ACCOUNT_KEY, "a-catalogue-token")


def houses() -> pa.Table:
    ids = np.arange(NUM_HOUSES)
    return pa.table(
        {
            "id": ids,
            "rooms": (ids % 6 + 1).astype(np.int32),
            "area": (ids * 0.5 + 20).astype(np.float32),
            "price": ids * 3.0,
            "town": [f"town {i % 4}" for i in ids],
        }
    )


def orders() -> pa.Table:
    ids = np.arange(90)
    return pa.table({"id": ids, "customer": ids % 7, "price": ids * 1.0})


def halves(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    middle = table.num_rows // 2
    return table.slice(0, middle), table.slice(middle)


def parquet(table: pa.Table) -> bytes:
    buffer = BytesIO()
    pq.write_table(table, buffer, row_group_size=20)
    return buffer.getvalue()


@dataclass
class Lake:
    """The servers that hold the tables of the page.

    Attributes:
        substitutes: what stands on the page -> what it is here.
        snapshots: of the Iceberg table.
    """

    root: Path
    s3: S3Server
    substitutes: dict[str, str]
    snapshots: list[int]

    def spec(self, name: str, **more: str) -> DatasetSpec:
        """A spec of the page; ``more`` stands on the page -> is here, too."""
        return DatasetSpec.from_mapping(self._replaced(SPECS[name], {**self.substitutes, **more}))

    def _replaced(self, value: Any, places: dict[str, str]) -> Any:
        if isinstance(value, dict):
            return {key: self._replaced(item, places) for key, item in value.items()}
        if isinstance(value, list):
            return [self._replaced(item, places) for item in value]
        if value == 3051729675574597004:
            return self.snapshots[0]
        if not isinstance(value, str):
            return value
        for place, here in places.items():
            value = value.replace(place, here)
        return re.sub(r"^(sqlite:///)?/data/", rf"\1{self.root}/", value)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    root = tmp_path_factory.mktemp("lake")
    _write_files(root)
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server())
        for index, half in enumerate(halves(houses())):
            s3.put("my-lake", f"houses/part-{index}.parquet", parquet(half), public=True)
            s3.put("open-data", f"houses/part-{index}.parquet", parquet(half), public=True)
        s3.put("my-lake", "orders/part-0.parquet", parquet(orders()))
        metadata, snapshots = _write_tables(root)
        blobs = {f"houses/part-{i}.parquet": parquet(t) for i, t in enumerate(halves(houses()))}
        azure = stack.enter_context(
            Served(type("Azure", (AzureStub,), {"blobs": blobs, "seen": []}))
        )
        files = {f"data/part-{i}.parquet": parquet(t) for i, t in enumerate(halves(houses()))}
        hub = stack.enter_context(Served(type("Hub", (HubStub,), {"files": files, "seen": []})))
        web = stack.enter_context(Served(functools.partial(FilesStub, directory=str(root))))
        rest = stack.enter_context(Served(_catalogue(metadata, s3.endpoint)))
        account = root / "account.json"
        keys = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account.write_text(json.dumps({"gcs_base_url": s3.endpoint, "disable_oauth": True, **keys}))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        _set_environment(patch, s3, azure, hub)
        patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        substitutes = {
            "https://minio.example.org:9000": s3.endpoint,
            "https://data.example.org": web,
            "https://catalog.example.org": rest,
            "s3://my-lake/warehouse/shop/orders/metadata/00009-0a1b2c3d.metadata.json": metadata,
            "MY-KEY-ID": ACCESS_KEY_ID,
            "MY-SECRET-KEY": SECRET_ACCESS_KEY,
            "MY-HUB-TOKEN": HUB_TOKEN,
            "MY-CATALOGUE-TOKEN": "a-catalogue-token",
            "MY-PASSWORD": PASSWORD,
        }
        yield Lake(root, s3, substitutes, snapshots)


def _set_environment(patch: pytest.MonkeyPatch, s3: S3Server, azure: str, hub: str) -> None:
    """What the nodes inherit: settings for the specs that give none."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_")):
            patch.delenv(name)
    for name, value in {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AZURE_STORAGE_ENDPOINT": azure,
        "HF_ENDPOINT": hub,
        "HF_TOKEN": HUB_TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }.items():
        patch.setenv(name, value)


def _write_files(root: Path) -> None:
    table, (first, second) = houses(), halves(houses())
    pq.write_table(table, root / "houses.parquet", row_group_size=20)
    for folder in ("houses/more", "arrow", "export", "grown", "mixed/old"):
        (root / folder).mkdir(parents=True)
    pq.write_table(first, root / "houses/part-0.parquet")
    pq.write_table(second, root / "houses/part-1.parquet")
    for name, half in (("b", first), ("a", second)):
        with pa.ipc.new_file(root / f"arrow/{name}.arrow", half.schema) as writer:
            writer.write_table(half)
    csv.write_csv(table, root / "houses.csv")
    csv.write_csv(table, root / "export/houses.dat")
    csv.write_csv(table, root / "spark.csv")
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (root / "houses.jsonl").write_text(lines)
    for year, half in ((2023, first), (2024, second)):
        folder = root / f"sales/year={year}"
        folder.mkdir(parents=True)
        pq.write_table(half.select(["id", "price"]), folder / "a.parquet")
    floors = pa.array([None if i % 2 else i for i in range(60)], pa.int32())
    pq.write_table(first.select(["id"]).append_column("floors", floors), root / "grown/a.parquet")
    pq.write_table(second.select(["id"]), root / "grown/b.parquet")
    pq.write_table(table, root / "mixed/a.parquet")
    pq.write_table(table, root / "mixed/old/b.parquet")
    (root / "mixed/notes.json").write_text("{}")
    write_deltalake(str(root / "trips"), first)
    write_deltalake(str(root / "trips"), second, mode="append")


def _write_tables(root: Path) -> tuple[str, list[int]]:
    """Iceberg and Delta in the buckets; the location of the metadata, the snapshots."""
    # The buckets are the process's. pyarrow uploads in chunks, which only moto's own server knows.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        properties = {
            "s3.endpoint": endpoint,
            "s3.access-key-id": ACCESS_KEY_ID,
            "s3.secret-access-key": SECRET_ACCESS_KEY,
            "s3.region": REGION,
        }
        catalog = SqlCatalog(
            "default",
            uri=f"sqlite:///{root}/catalog.db",
            warehouse="s3://my-lake/warehouse",
            **properties,
        )
        with closing(catalog):
            catalog.create_namespace("shop")
            location = "s3://my-lake/warehouse/shop/orders"
            table = catalog.create_table("shop.orders", orders().schema, location=location)
            for half in halves(orders()):
                table.append(half)
            first = table.metadata.snapshots[0].snapshot_id
            table.manage_snapshots().create_tag(first, "v1").commit()
            metadata = table.metadata_location
            snapshots = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
        storage = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": REGION,
        }
        write_deltalake("s3://my-lake/trips", houses(), storage_options=storage)
    finally:
        server.stop()
    return metadata, snapshots


def _write_iceberg_files(root: Path) -> None:
    """A table without a catalogue, as Hadoop's are."""
    for name in ("metadata", "data"):
        (root / name).mkdir(parents=True)
    metadata = new_table_metadata(
        Schema(NestedField(1, "id", LongType())), PartitionSpec(), SortOrder(), str(root)
    )
    (root / "metadata/v1.metadata.json").write_text(metadata.model_dump_json())
    pq.write_table(houses(), root / "data/a.parquet")


def _catalogue(metadata: str, endpoint: str) -> type[FilesStub]:
    """A REST catalogue that lends keys to those who have a token."""

    class Handler(FilesStub):
        def do_GET(self) -> None:
            assert self.headers["Authorization"] == "Bearer a-catalogue-token"
            path = self.path.partition("?")[0]
            lent = {
                "s3.endpoint": endpoint,
                "s3.access-key-id": ACCESS_KEY_ID,
                "s3.secret-access-key": SECRET_ACCESS_KEY,
                "s3.region": REGION,
            }
            answer: dict[str, object] = {"defaults": {}, "overrides": {}}
            if path == "/v1/namespaces/shop/tables/orders":
                answer = {
                    "metadata-location": metadata,
                    "metadata": json.loads(_object(metadata)),
                    "config": lent,
                }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _object(uri: str) -> bytes:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bytes(_backend().get_object(bucket, key).value)


@pytest.fixture(scope="module")
def nodes(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> dict[str, str]:
    """The database of the page, as substitutes."""
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name: str = request.getfixturevalue("database")
    server.run(
        name,
        "CREATE TABLE orders (id int PRIMARY KEY, customer int NOT NULL, price float8 NOT NULL)",
        "INSERT INTO orders SELECT g, g % 7, g FROM generate_series(0, 89) g",
        "CREATE TABLE customers (id int PRIMARY KEY, segment text)",
        "INSERT INTO customers SELECT g, 'segment ' || g % 2 FROM generate_series(0, 6) g",
    )
    place = "postgresql://reader@db.example.org:5432/shop"
    return {f"{place}?": f"{server.uri(name)}&", place: server.uri(name)}


def rows_of(name: str) -> list[dict[str, Any]]:
    """What a spec of the page must give."""
    all_houses, all_orders = houses().to_pylist(), orders().to_pylist()
    if name in ("iceberg", "iceberg-sql", "iceberg-rest", "postgres-table"):
        return all_orders
    if name in ("iceberg-snapshot", "iceberg-tag"):
        return all_orders[:45]
    if name == "given-types":
        return [{**row, "id": str(row["id"])} for row in all_houses]
    if name == "delta-version":
        return all_houses[:60]
    if name == "postgres-query":
        return [row for row in all_orders if row["price"] > 10]
    if name == "partitions":
        return [{"id": r["id"], "price": r["price"], "year": 2024} for r in all_houses[60:]]
    if name == "missing-columns":
        return [{"id": i, "floors": i if i < 60 and i % 2 == 0 else 1} for i in range(NUM_HOUSES)]
    if name == "whole-query":
        towns = {f"town {i}": [r["price"] for r in all_houses[i::4]] for i in range(4)}
        return [{"town": t, "houses": len(p), "price": sum(p) / len(p)} for t, p in towns.items()]
    if name == "any-order":
        return [{"town": f"town {i}"} for i in range(4)]
    if name == "join":
        return [
            {"id": r["id"], "price": r["price"], "segment": f"segment {r['customer'] % 2}"}
            for r in all_orders
        ]
    if name == "settings":
        return [{"id": r["id"], "price": r["price"]} for r in all_houses if r["price"] > 100]
    return all_houses


IN_ANY_ORDER = {"any-order", "join", "iceberg", "iceberg-sql", "iceberg-rest", "delta"}


def multiset(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(map(repr, rows))


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_of_the_page_loads_its_rows_and_shows_no_secret(
    request: pytest.FixtureRequest, nodes: LocalCluster, lake: Lake, name: str
) -> None:
    needs_shop = "postgresql://" in json.dumps(SPECS[name])
    spec = lake.spec(name, **(request.getfixturevalue("shop") if needs_shop else {}))
    client = CacheClient(nodes.endpoint)
    try:
        info = client.load(spec, timeout_s=WAIT_S)

        found, expected = client.head(name, 10**6).to_pylist(), rows_of(name)
        if name in IN_ANY_ORDER:
            assert multiset(found) == multiset(expected)
        else:
            assert found == expected
        assert client.load(spec, timeout_s=WAIT_S).fingerprint == info.fingerprint
        wait_until(
            lambda: {len(n) for n in client.describe(name).placement.values()} == {spec.replicas},
            WAIT_S,
            f"{spec.replicas} nodes for each shard",
        )
        assert_no_secret(f"{spec!r} {info!r} {client.describe(name)!r}".encode(), "descriptions")
        for folder, _, files in os.walk(nodes.cache_dir):
            for path in (Path(folder, file) for file in files):
                with suppress(FileNotFoundError):  # of a dataset that is being removed
                    assert_no_secret(path.read_bytes(), str(path))
    finally:
        if name in {info.name for info in client.datasets()}:
            client.drop(name)


def assert_no_secret(data: bytes, where: str) -> None:
    for secret in SECRETS:
        assert secret.encode() not in data, f"a secret is in {where}"


def test_every_format_and_store_of_the_tables_has_a_spec() -> None:
    text = json.dumps(list(SPECS.values()))
    for scheme in ("s3", "gs", "az", "https", "hf", "postgresql"):
        assert f'"{scheme}://' in text
    for format in FORMATS:
        assert re.search(rf"^\| `{format}`", PAGES, re.M), format


def test_every_key_of_a_spec_is_explained() -> None:
    for key in inspect.signature(DatasetSpec).parameters:
        assert f"`{key}`" in PAGES, key


# -- what is refused, by the messages of docs/troubleshooting.md ----------------------------------


def refusals(root: Path) -> dict[str, dict[str, Any]]:
    """The message on the page -> the spec that gets it."""
    path = str(root / "houses.parquet")
    keys = {"acces_key": "x", "AWS_REGION": "r"}
    return {
        "the scheme 'ftp' is not served": {"source": "ftp://host/a.parquet"},
        "does not exist on the node": {"source": f"{root}/nowhere"},
        "is compressed, which is not read": {"source": f"{root}/houses.csv.gz"},
        "it is neither a file nor a directory": {"source": "/dev/zero", "format": "csv"},
        "over HTTP a directory cannot be listed": {"source": "https://data.example.org/a/"},
        "which would be kept and shown with it: give credentials in storage_options instead": {
            "source": "https://data.example.org/a.parquet?X-Amz-Signature=abc"
        },
        "the s3 store has no option 'acces_key'": {"source": "s3://b/k", "storage_options": keys},
        "access_key_id and secret_access_key must be given together": {
            "source": "s3://b/k",
            "storage_options": {"AWS_ACCESS_KEY_ID": "x"},
        },
        "one dataset has one format, found several": {"source": f"{root}/mixed"},
        "it is an HTML page, such as that of a login": {"source": f"{root}/login.csv"},
        "has other columns than": {"source": f"{root}/grown"},
        "several columns are named 'rooms'": {"source": f"{root}/twice.csv"},
        "is a Delta table: say format: delta": {"source": f"{root}/trips"},
        "is an Iceberg table: say format: iceberg": {"source": f"{root}/files-of-iceberg"},
        "snapshot 7 is for iceberg and delta tables": {"source": path, "snapshot": 7},
        "has no version 7; its versions go up to 0": {
            "source": f"{root}/one-version",
            "format": "delta",
            "snapshot": 7,
        },
        "has no tag or branch 'v2'": {
            "source": f"{root}/files-of-iceberg/metadata/v1.metadata.json",
            "snapshot": "v2",
        },
        "the rows of DISTINCT have no defined order": {
            "source": path,
            "sql": "SELECT DISTINCT town FROM source",
        },
        "Invalid function 'random'": {"source": path, "sql": "SELECT random() AS r FROM source"},
        "DML not supported": {"source": path, "sql": "DELETE FROM source"},
        "needs one of table and query, got none": {"source": "postgresql://db.example.org/shop"},
        "it is of integers by the first rows": {"source": f"{root}/fractions.jsonl"},
        "is of date32[day] by the first rows of the table": {"source": f"{root}/times.csv"},
        "is not in the first rows of the table": {"source": f"{root}/late-key.jsonl"},
        "a line must be one object, got more behind it": {"source": f"{root}/two-a-line.jsonl"},
        "text follows the closing quote of": {"source": f"{root}/behind.csv"},
        "which readers take differently": {"source": f"{root}/behind.csv", "escape": "\\"},
        "are never closed": {"source": f"{root}/cut-off.csv"},
        "is of timestamp[s] by the first rows of the table": {"source": f"{root}/leap.csv"},
        "what follows would not be read": {"source": f"{root}/joined.arrow"},
        "column 'rooms' holds 1 null": {"source": f"{root}/nulls.parquet", "nulls": "refuse"},
        "and meets a time of": {
            "source": f"{root}/tokyo.parquet",
            "sql": "SELECT * FROM source WHERE at > TIMESTAMP '2024-01-01'",
        },
        "Cast error": {
            "source": f"{root}/text.parquet",
            "sql": "SELECT CAST(a AS INT) AS a FROM source",
        },
    }


# These two need a source that changes meanwhile; other tests make it.
_OF_SQL = "tests/integration/test_expression_attacks.py"
ELSEWHERE = {
    "changed since the dataset was planned": "tests/unit/object_stores/test_downloads.py",
    "has ended: load it again with --refresh": "tests/integration/test_formats_end_to_end.py",
    "needed more than 1.0 GiB of memory while it was planned": _OF_SQL,
    "the query needed more than ... of memory": _OF_SQL,
    "but the query was planned with": "tests/unit/node/test_loading.py",
    "show a time never or twice": "tests/unit/sql/test_exactness.py",
}


def test_what_the_page_says_is_refused_is_refused_with_these_words(
    nodes: LocalCluster, lake: Lake
) -> None:
    write_deltalake(str(lake.root / "one-version"), houses())
    _write_iceberg_files(lake.root / "files-of-iceberg")
    pq.write_table(pa.table({"rooms": pa.array([1, None])}), lake.root / "nulls.parquet")
    (lake.root / "twice.csv").write_text("rooms,rooms\n1,2\n")
    pq.write_table(pa.table({"a": ["1", "x"]}), lake.root / "text.parquet")
    tokyo = pa.array([0], pa.timestamp("us", "Asia/Tokyo"))
    pq.write_table(pa.table({"at": tokyo}), lake.root / "tokyo.parquet")
    (lake.root / "login.csv").write_text("<html><body>Who are you?</body></html>")
    (lake.root / "houses.csv.gz").write_bytes(b"")
    (lake.root / "times.csv").write_text("at\n" + "2024-01-01\n" * 1000 + "2024-01-01T10:00\n")
    (lake.root / "cut-off.csv").write_text("town\n" + '"Bonn"\n' * 1001 + '"Kö')
    (lake.root / "leap.csv").write_text("at\n2016-12-31T23:59:60\n")
    first = f'{{"rooms": 1{" " * 1_000_000}}}\n' * 5  # 4 MiB of integers
    (lake.root / "fractions.jsonl").write_text(first + '{"rooms": 1.5}\n')
    (lake.root / "late-key.jsonl").write_text(first + '{"rooms": 2, "attic": true}\n')
    (lake.root / "two-a-line.jsonl").write_text('{"rooms": 1} {"rooms": 2}\n')
    (lake.root / "behind.csv").write_text('town\n"C:\\temp"x\n')
    with pa.ipc.new_stream(lake.root / "one.arrow", houses().schema) as stream:
        stream.write_table(houses())
    (lake.root / "joined.arrow").write_bytes((lake.root / "one.arrow").read_bytes() * 2)
    client = CacheClient(nodes.endpoint)
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## A load is refused")[2]
    on_page = set(re.findall(r"^\| [^|]+ \| `([^`]+)` \|", section, re.M))
    cases = refusals(lake.root)
    assert on_page == {*cases, *ELSEWHERE}
    for message, arguments in cases.items():
        with pytest.raises(CacheError) as caught:
            client.load(
                DatasetSpec.from_mapping({"name": "refused", **arguments}), timeout_s=WAIT_S
            )
        assert message in str(caught.value)


def test_a_refusal_of_the_hub_names_the_one_that_the_nodes_ask(
    nodes: LocalCluster, lake: Lake
) -> None:
    spec = lake.spec("hub-short", **{HUB_TOKEN: "wrong-token"})
    with pytest.raises(CacheError) as caught:
        CacheClient(nodes.endpoint).load(spec, timeout_s=WAIT_S)
    assert f"alpaca' at {os.environ['HF_ENDPOINT']} was refused" in str(caught.value)
    assert "wrong-token" not in str(caught.value)
