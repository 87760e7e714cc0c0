"""PostgreSQL: the pinned rows, each once, in one order on every node; and named failures."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime
from datetime import time as clock
from decimal import Decimal
from pathlib import Path

import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import CacheError, LoadError, RequestError
from cache_protocol.storage.layout import GUESSED_VALUE_BYTES
from cache_server.plan.pinned_version import plan_version
from cache_server.shards.packing import logical_schema
from cache_server.source.pinned import Pin, PinnedTable, Split
from cache_server.tables import postgres
from cache_server.tables.postgres import cut, snapshot
from cache_server.tables.postgres.ranges import even_ranges
from cache_server.tables.postgres.session import Address, parse_uri
from tests.load_here import load_here
from tests.postgres_server import PASSWORD, PostgresServer, database, postgres_server  # noqa: F401
from tests.waiting import wait_until

SECRETS = {"password": PASSWORD}


class Database:
    """A database of the test server, with what the tests do to it."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server = server
        self.name = name
        self._pins: list[Pin] = []

    def spec(self, *, options: dict[str, str] | None = None, **parameters: str) -> TableSpec:
        uri = self.server.uri(self.name, **parameters)
        return TableSpec("source", (uri,), "postgres", options=options or {}, secrets=SECRETS)

    def run(self, *statements: str) -> None:
        self.server.run(self.name, *statements)

    def pin(self, **arguments) -> Pin:
        pin = postgres.pin(self.spec(**arguments))
        self._pins.append(pin)
        return pin

    def close(self) -> None:
        for pin in self._pins:
            pin.close()


@pytest.fixture
def db(postgres_server: PostgresServer, database: str) -> Iterator[Database]:  # noqa: F811
    db = Database(postgres_server, database)
    yield db
    db.close()
    no_connection(db)


def no_connection(db: Database) -> None:
    wait_until(
        lambda: db.server.num_connections(db.name) == 0, 10, f"no connection to {db.name} is open"
    )


def pinned(pin: Pin, columns: tuple[str, ...] | None = None) -> PinnedTable:
    return PinnedTable("source", "postgres", pin.schema, {}, pin.snapshot, columns)


def splits_of(pin: Pin, target_bytes: int = 5_000) -> tuple[Split, ...]:
    return pin.cut(logical_schema(pin.schema), target_bytes)


def read(pin: Pin, split: Split, columns: tuple[str, ...] | None = None) -> pa.Table:
    table = pinned(pin, columns)
    batches = list(postgres.read(table, split, SECRETS))
    assert all(batch.schema.equals(table.read_schema, check_metadata=True) for batch in batches)
    return pa.Table.from_batches(batches, table.read_schema)


def read_all(pin: Pin, target_bytes: int = 5_000) -> pa.Table:
    splits = splits_of(pin, target_bytes)
    tables = [read(pin, split) for split in splits]
    for split, table in zip(splits, tables, strict=True):
        assert split.num_rows in (None, table.num_rows)
    return pa.concat_tables([pin.schema.empty_table(), *tables])


def failure(call: Callable[[], object], kind: type[CacheError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and PASSWORD not in text
    assert caught.value.__cause__ is None
    return text


TABLES = {
    "integer key": "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "bigint key": "CREATE TABLE t (v text, id bigint PRIMARY KEY)",
    "composite key": "CREATE TABLE t (v text, id int, PRIMARY KEY (id, v))",
    "text key": "CREATE TABLE t (v text PRIMARY KEY, id int)",
    "no key": "CREATE TABLE t (id int, v text)",
    "odd names": 'CREATE TABLE t (id int PRIMARY KEY, v text, "a ""b"" c%" int DEFAULT 3)',
    "partitions": (
        "CREATE TABLE t (id int, v text) PARTITION BY HASH (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    ),
    "keyed partitions": (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (MINVALUE) TO (100);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (100) TO (MAXVALUE)"
    ),
    "children": (
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE t0 () INHERITS (t);"
        "INSERT INTO t0 SELECT g, 'child ' || g FROM generate_series(1, 300) g"
    ),
}


@pytest.mark.parametrize("definition", TABLES.values(), ids=TABLES)
def test_every_row_is_in_one_split(db: Database, definition: str) -> None:
    db.run(*definition.split(";"))
    db.run(
        "INSERT INTO t (id, v) SELECT g * g, rpad('row ' || g, 80) FROM generate_series(1, 350) g",
        "DELETE FROM t WHERE id % 7 = 0",
    )
    pin = db.pin(table="public.t")
    splits = splits_of(pin)
    assert len(splits) >= 3
    assert [(split.part, split.parts) for split in splits] == [
        (part, len(splits)) for part in range(len(splits))
    ]
    assert pin.exact_rows and not pin.comparable
    rows = read_all(pin)
    expected = db.server.rows(db.name, "SELECT id, v FROM t ORDER BY id, v")
    assert sorted(zip(*rows.select(["id", "v"]).to_pydict().values(), strict=True)) == expected
    assert read(pin, splits[1]).equals(read(pin, splits[1])), "the rows come in one order"


def test_a_key_gives_the_order_of_rows(db: Database) -> None:
    db.run(
        "CREATE TABLE t (b int, a int, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT g % 10, g / 10 FROM generate_series(1, 500) g ORDER BY md5(g::text)",
    )
    rows = read_all(db.pin(table="t"))
    assert rows.equals(rows.sort_by([("a", "ascending"), ("b", "ascending")]))


def test_skewed_keys_make_even_splits(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id bigint PRIMARY KEY)",
        "INSERT INTO t SELECT (1.01 ^ g)::bigint + g FROM generate_series(1, 3000) g",
    )
    splits = splits_of(db.pin(table="t"), 800)
    rows = [split.num_rows for split in splits]
    assert sum(rows) == 3000
    assert len(rows) == pytest.approx(30, abs=3)
    assert max(rows) < 2 * 100
    assert [split.estimated_bytes for split in splits] == [count * 8 for count in rows]


def test_a_key_that_repeats_and_null_keys(db: Database) -> None:
    db.run(
        "CREATE TABLE t (k int, v int)",
        "INSERT INTO t SELECT CASE WHEN g % 3 = 0 THEN NULL WHEN g % 3 = 1 THEN 5 ELSE g END, g "
        "FROM generate_series(1, 900) g",
    )
    pin = db.pin(table="t", split_column="k")
    rows = read_all(pin, 800)
    assert sorted(rows["v"].to_pylist()) == list(range(1, 901))
    keys = rows["k"].to_pylist()
    assert keys == [*sorted(key for key in keys if key is not None), *[None] * 300]
    assert max(split.num_rows for split in splits_of(pin, 800)) <= 350


@pytest.mark.parametrize("column", ["t", "f", "d", "u", "m", "n", "c", "j"])
def test_a_split_column_of_any_type_that_has_an_order(db: Database, column: str) -> None:
    db.run(
        "CREATE TYPE mood AS ENUM ('low', 'mid, \"q\"', 'high')",
        "CREATE TABLE t AS SELECT g AS v, chr(1 + g % 120) || '''\\\"{,' || g AS t, "
        "CASE g % 5 WHEN 0 THEN 'NaN' ELSE g / 7.0 END::float8 AS f, date '2020-01-01' + g AS d, "
        "md5(g::text)::uuid AS u, (enum_range(NULL::mood))[1 + g % 3] AS m, (g / 7.0)::numeric n, "
        "(g % 50)::text::char(8) AS c, jsonb_build_object('a', g) AS j "
        "FROM generate_series(1, 400) g",
    )
    pin = db.pin(table="t", split_column=column)
    assert len(splits_of(pin, 12_000)) >= 3
    rows = read_all(pin, 12_000)
    assert sorted(rows["v"].to_pylist()) == list(range(1, 401))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("timetz", "'00:00+05:30'::timetz + g * '1 s'::interval"),
        ("macaddr", "lpad(to_hex(g), 12, '0')::macaddr"),
        ("device", "lpad(to_hex(g), 12, '0')::macaddr"),
    ],
)
def test_keys_that_an_array_pads_lose_no_rows(db: Database, dtype: str, value: str) -> None:
    db.run(
        "CREATE DOMAIN device AS macaddr",
        f"CREATE TABLE t (k {dtype}, v int)",
        f"INSERT INTO t SELECT {value}, g FROM generate_series(1, 1000) g",
    )
    pin = db.pin(table="t", split_column="k")
    assert len(splits_of(pin)) >= 3
    assert sorted(read_all(pin)["v"].to_pylist()) == list(range(1, 1001))


@pytest.mark.parametrize("definition", ["id int PRIMARY KEY", "id int", "id int, v text"])
def test_an_empty_table_has_a_schema_and_no_rows(db: Database, definition: str) -> None:
    db.run(f"CREATE TABLE t ({definition})")
    pin = db.pin(table="t")
    assert pin.schema.field("id").type == pa.int32()
    assert read_all(pin).num_rows == 0


def test_a_query(db: Database) -> None:
    db.run(
        "CREATE TABLE a (id int, v int)",
        "INSERT INTO a SELECT g, g * 2 FROM generate_series(1, 300) g",
    )
    query = "SELECT x.id, y.v AS twice FROM a x JOIN a y USING (id) WHERE id > 10 ORDER BY id DESC;"
    pin = db.pin(query=query)
    (split,) = splits_of(pin)
    assert split.num_rows is None and not pin.exact_rows
    assert str(split).endswith("/(query)")
    assert read_all(pin)["id"].to_pylist() == list(range(300, 10, -1))
    assert read(pin, split, ("twice",))["twice"].to_pylist() == list(range(600, 20, -2))


def test_a_query_with_a_split_column(db: Database) -> None:
    db.run("CREATE TABLE a AS SELECT g % 90 AS id, '[1]'::json AS v FROM generate_series(1, 300) g")
    query = "SELECT nullif(id, 3) AS id, v FROM a -- with a comment"
    pin = db.pin(query=query, split_column="id")
    assert len(splits_of(pin, 4_000)) > 3
    rows = read_all(pin, 4_000)
    expected = db.server.rows(db.name, "SELECT nullif(id, 3), v::text FROM a ORDER BY 1, 2")
    assert list(zip(*rows.to_pydict().values(), strict=True)) == expected


@pytest.mark.parametrize("split_column", ["", "id"])
def test_rows_of_unknown_size_are_cut_into_shards_as_they_come(
    db: Database, tmp_path: Path, split_column: str
) -> None:
    query = "SELECT id, repeat(id::text, 200) AS doc FROM generate_series(1000, 11000) AS id"
    key = {"split_column": split_column} if split_column else {}
    spec = db.spec(query=query, **key)
    options = {**spec.options, **spec.secrets}
    wanted = DatasetSpec("d", spec.source, storage_options=options, target_shard_bytes=2**20)
    planned = plan_version(wanted)
    planned.close()
    is_cut = planned.version.shards is not None
    assert is_cut == bool(split_column) and (not is_cut or len(planned.version.shards) > 5)

    loaded = load_here(wanted, tmp_path)

    assert loaded.to_pylist() == [
        {"id": number, "doc": str(number) * 200} for number in range(1000, 11001)
    ]
    assert max(map(len, loaded["doc"].chunks)) * 800 < 2**21


def test_a_view_and_a_table_outside_the_search_path(db: Database) -> None:
    db.run(
        'CREATE SCHEMA "S p"',
        'CREATE TABLE "S p"."T" (id int PRIMARY KEY)',
        'INSERT INTO "S p"."T" SELECT generate_series(1, 5)',
        'CREATE VIEW v AS SELECT id, id::numeric / 2 AS half FROM "S p"."T"',
    )
    table = db.pin(options={"table": '"S p"."T"'})
    assert read_all(table)["id"].to_pylist() == [1, 2, 3, 4, 5]
    assert str(splits_of(table, 10**6)[0]).endswith("/S p.T")
    assert read_all(db.pin(table="v"))["half"].to_pylist() == [0.5, 1.0, 1.5, 2.0, 2.5]


def test_all_nodes_see_what_was_pinned(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT g, 0 FROM generate_series(1, 600) g",
    )
    pin = db.pin(table="t")
    db.run("UPDATE t SET v = 1", "DELETE FROM t WHERE id < 100", "INSERT INTO t VALUES (1000, 1)")
    splits = splits_of(pin, 2_000)  # cut after the change as well
    stop, writes = threading.Event(), itertools.count(2000)

    def keep_writing() -> None:
        with db.server.connect(db.name) as connection, connection.cursor() as cursor:
            while not stop.is_set():
                cursor.execute(f"INSERT INTO t VALUES ({next(writes)}, 2)")
                cursor.execute("UPDATE t SET v = 3 WHERE id < 50")

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        with ThreadPoolExecutor(4) as nodes:
            tables = list(nodes.map(lambda split: read(pin, split), splits * 2))
    finally:
        stop.set()
        writer.join()
    for half in (tables[: len(splits)], tables[len(splits) :]):
        rows = pa.concat_tables(half)
        assert rows["id"].to_pylist() == list(range(1, 601))
        assert set(rows["v"].to_pylist()) == {0}


def test_a_pinned_table_cannot_be_rewritten(db: Database) -> None:
    db.run("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    db.pin(table="t")
    with db.server.connect(db.name) as connection, connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = 50")
        with pytest.raises(adbc.Error, match="lock timeout"):
            cursor.execute("ALTER TABLE t ADD COLUMN v int")


@pytest.mark.parametrize("change", ["TRUNCATE t", "ALTER TABLE t ALTER id TYPE bigint"])
def test_a_table_that_changes_before_it_is_locked_is_refused(
    db: Database, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    db.run("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    find = snapshot.find_table

    def change_after(*arguments):
        found = find(*arguments)
        db.run(change)
        return found

    monkeypatch.setattr(snapshot, "find_table", change_after)
    text = failure(lambda: db.pin(table="t"), LoadError)
    assert "public.t" in text and "while it was pinned" in text


def test_an_ended_snapshot_is_named(db: Database) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    pin = db.pin(table="t")
    (split,) = splits_of(pin)
    pin.close()
    pin.close()
    text = failure(lambda: read(pin, split), LoadError)
    assert "public.t" in text and "has ended: load it again with --refresh" in text
    assert "has ended" in failure(lambda: splits_of(pin), LoadError)
    no_connection(db)


def test_closing_after_the_server_ended_the_connection(db: Database) -> None:
    db.run("CREATE TABLE t (id int)")
    pin = db.pin(table="t")
    db.run(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        f"WHERE datname = '{db.name}' AND application_name = 'cache_server'"
    )
    assert "public.t" in failure(lambda: splits_of(pin), LoadError)
    pin.close()


def test_a_database_that_exports_no_snapshot_is_refused(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int)",
        f"CREATE ROLE {db.name} LOGIN PASSWORD '{PASSWORD}'",
        f"GRANT SELECT ON t TO {db.name}",
        "REVOKE EXECUTE ON FUNCTION pg_export_snapshot() FROM PUBLIC",
    )
    try:
        text = failure(lambda: db.pin(table="t", user=db.name), LoadError)
    finally:
        db.run(
            f"DROP OWNED BY {db.name}",
            f"DROP ROLE {db.name}",
            "GRANT EXECUTE ON FUNCTION pg_export_snapshot() TO PUBLIC",
        )
    assert "cannot export a snapshot" in text and "permission denied" in text


TYPES = {
    "smallint": ("-7", pa.int16(), -7),
    "integer": ("7", pa.int32(), 7),
    "bigint": ("9007199254740993", pa.int64(), 9007199254740993),
    "oid": ("4000000000", pa.int64(), 4000000000),
    "real": ("'1.5'", pa.float32(), 1.5),
    "double precision": ("'-Infinity'", pa.float64(), float("-inf")),
    "numeric": ("123456.75", pa.float64(), 123456.75),
    "numeric(12,2)": ("-0.25", pa.decimal128(12, 2), Decimal("-0.25")),
    "numeric(5,0)": ("12345", pa.decimal128(5, 0), Decimal(12345)),
    "numeric(38,2)": (f"-{'9' * 36}.99", pa.decimal128(38, 2), Decimal(f"-{'9' * 36}.99")),
    "numeric(76,1)": (f"{'9' * 75}.9", pa.decimal256(76, 1), Decimal(f"{'9' * 75}.9")),
    "numeric(77,0)": ("12345", pa.float64(), 12345.0),
    "numeric(3,-2)": ("12345", pa.decimal128(5, 0), Decimal(12300)),
    "numeric(2,5)": ("0.00012", pa.decimal128(5, 5), Decimal("0.00012")),
    "money": ("'12.34'", pa.float64(), 12.34),
    "boolean": ("true", pa.bool_(), True),
    "text": ("'grün'", pa.string(), "grün"),
    "varchar(9)": ("''", pa.string(), ""),
    "char(4)": ("'ab'", pa.string(), "ab  "),
    "bytea": (r"'\x00ff'", pa.binary(), b"\x00\xff"),
    "date": ("'0044-03-15'", pa.date32(), date(44, 3, 15)),
    "time": ("'23:59:59.000001'", pa.time64("us"), clock(23, 59, 59, 1)),
    "timetz": ("'12:00+02'", pa.string(), "12:00:00+02"),
    "timestamp": (
        "'2024-02-29 12:00:00.5'",
        pa.timestamp("us"),
        datetime(2024, 2, 29, 12, 0, 0, 500000),
    ),
    "timestamptz": (
        "'2024-07-01 12:00+02'",
        pa.timestamp("us", "UTC"),
        datetime(2024, 7, 1, 10, tzinfo=UTC),
    ),
    "interval": ("'1 month 2 days 3 s'", pa.month_day_nano_interval(), (1, 2, 3_000_000_000)),
    "json": ("'{\"a\": [1]}'", pa.string(), '{"a": [1]}'),
    "jsonb": ("'{\"a\":1}'", pa.string(), '{"a": 1}'),
    "uuid": (
        "'00112233-4455-6677-8899-AABBCCDDEEFF'",
        pa.string(),
        "00112233-4455-6677-8899-aabbccddeeff",
    ),
    "mood": ("'ok'", pa.string(), "ok"),
    "amount": ("3", pa.decimal128(8, 2), Decimal("3.00")),
    "pair": ("ROW(1, 'x')", pa.string(), "(1,x)"),
    "priced": ("ROW(1.5, 'x')", pa.string(), "(1.5,x)"),
    "paid": ("ROW('2.50', 1)", pa.string(), "($2.50,1)"),
    "paid[]": ("ARRAY[ROW('2.50', 1)::paid]", pa.list_(pa.string()), ["($2.50,1)"]),
    "inet": ("'10.0.0.1/8'", pa.string(), "10.0.0.1/8"),
    "bit(3)": ("B'101'", pa.string(), "101"),
    "point": ("'(1,2)'", pa.string(), "(1,2)"),
    "int4range": ("'[1,5)'", pa.string(), "[1,5)"),
    "tsvector": ("'a b'", pa.string(), "'a' 'b'"),
    "regclass": ("'pg_class'", pa.string(), "pg_class"),
    "int[]": ("'{1,NULL,3}'", pa.list_(pa.int32()), [1, None, 3]),
    "int[][]": ("'{{1,2},{3,4}}'", pa.list_(pa.int32()), [1, 2, 3, 4]),
    "real[]": ("'{}'", pa.list_(pa.float32()), []),
    "text[]": ("'{a,\"b,c\"}'", pa.list_(pa.string()), ["a", "b,c"]),
    "numeric[]": ("'{1.5,2}'", pa.list_(pa.float64()), [1.5, 2.0]),
    "uuid[]": (
        "'{00112233-4455-6677-8899-aabbccddeeff}'",
        pa.list_(pa.string()),
        ["00112233-4455-6677-8899-aabbccddeeff"],
    ),
    "mood[]": ("'{ok,sad}'", pa.list_(pa.string()), ["ok", "sad"]),
    "jsonb[]": ("ARRAY['{}'::jsonb]", pa.list_(pa.string()), ["{}"]),
    "inet[]": ("'{10.0.0.1/8}'", pa.list_(pa.string()), ["10.0.0.1/8"]),
    "date[]": ("'{2020-01-01}'", pa.list_(pa.date32()), [date(2020, 1, 1)]),
}


def test_types(db: Database) -> None:
    db.run(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN amount AS numeric(8, 2)",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TYPE priced AS (a numeric, b text)",
        "CREATE TYPE paid AS (a money, b oid)",
        "CREATE TABLE t (" + ", ".join(f'"{name}" {name}' for name in TYPES) + ")",
        f"INSERT INTO t VALUES ({', '.join(value for value, _, _ in TYPES.values())})",
        "INSERT INTO t DEFAULT VALUES",
    )
    for pin in (db.pin(table="t"), db.pin(query="SELECT * FROM t")):
        assert pin.schema == pa.schema([(name, dtype) for name, (_, dtype, _) in TYPES.items()])
        (split,) = pin.cut(pa.schema([("integer", pa.int32())]), 10**6)
        values, nulls = read(pin, split).to_pylist()
        assert values == {name: value for name, (_, _, value) in TYPES.items()}
        assert set(nulls.values()) == {None}


def test_composite_values_behind_a_null_one_are_read(db: Database) -> None:
    db.run(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE t (id int PRIMARY KEY, v pair, w pair[])",
        "INSERT INTO t VALUES (1, NULL, ARRAY[NULL, ROW(1, 'x')::pair]), (2, ROW(2, 'y'), NULL)",
    )
    assert read_all(db.pin(table="t")).to_pylist() == [
        {"id": 1, "v": None, "w": [None, "(1,x)"]},
        {"id": 2, "v": "(2,y)", "w": None},
    ]


@pytest.mark.parametrize(
    "value",
    [
        "'infinity'::date",
        "'-infinity'::timestamp",
        "ARRAY[timestamptz 'infinity']",
    ],
)
def test_dates_that_arrow_does_not_have_are_refused(db: Database, value: str) -> None:
    db.run(f"CREATE TABLE t AS SELECT {value} AS moment")
    pin = db.pin(table="t")
    text = failure(lambda: read(pin, splits_of(pin)[0]), LoadError)
    assert "'moment'" in text and "infinite" in text and "public.t" in text


def test_what_is_wrong_with_a_long_value_is_said(db: Database) -> None:
    db.run("CREATE TABLE t AS SELECT 1e1000::numeric AS v")
    pin = db.pin(table="t")
    text = failure(lambda: read(pin, splits_of(pin)[0]), LoadError)
    assert 'public.t: "1000' in text and "out of range for type double precision" in text


def test_columns_that_are_not_read_are_not_sent(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text, bad int)",
        "INSERT INTO t SELECT g, 'x' || g, g FROM generate_series(1, 4) g",
        "CREATE VIEW w AS SELECT id, v, 1 / (bad - 3) AS broken FROM t",
    )
    pin = db.pin(table="w")
    (split,) = splits_of(pin)
    pin = replace(pin, snapshot=json.dumps({**json.loads(pin.snapshot), "order": ["q.id"]}))
    assert read(pin, split, ("v",)).to_pydict() == {"v": ["x1", "x2", "x3", "x4"]}
    assert sum(b.num_rows for b in postgres.read(pinned(pin, ()), split, SECRETS)) == 4
    text = failure(lambda: read(pin, split), LoadError)
    assert "public.w" in text and "division by zero" in text


WRITES = {
    "function": "SELECT spoil()",
    "statement": "UPDATE t SET v = 1 RETURNING v",
    "with": "WITH u AS (UPDATE t SET v = 1 RETURNING v) SELECT * FROM u",
    "break out": "SELECT 1) AS q; UPDATE t SET v = 1; SELECT * FROM (SELECT 1",
    "commit": "SELECT 1) AS q; COMMIT; UPDATE t SET v = 1; --",
    "mode": "SELECT set_config('transaction_read_only', 'off', false), spoil()",
}


@pytest.mark.parametrize("query", WRITES.values(), ids=WRITES)
def test_a_query_changes_nothing(db: Database, query: str) -> None:
    db.run(
        "CREATE TABLE t AS SELECT 0 AS v",
        "CREATE FUNCTION spoil() RETURNS int LANGUAGE sql VOLATILE "
        "AS 'UPDATE t SET v = 1 RETURNING v'",
    )

    def load() -> None:
        pin = db.pin(query=query)
        read_all(pin)

    with pytest.raises(CacheError):
        load()
    assert db.server.rows(db.name, "SELECT v FROM t") == [(0,)]


def test_names_with_quotes_are_names(db: Database) -> None:
    db.run('CREATE TABLE "x""; DROP TABLE y; --" (id int)', "CREATE TABLE y (id int)")
    pin = db.pin(table='"x""; DROP TABLE y; --"')
    assert read_all(pin).num_rows == 0
    failure(lambda: db.pin(table="y'; DROP TABLE y; --"), RequestError)
    assert db.server.rows(db.name, "SELECT * FROM y") == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "needs one of table and query, got none"),
        ({"table": "t", "query": "SELECT 1"}, "got table and query"),
        ({"table": "nope"}, "no table 'nope'"),
        ({"table": "a.b.c.d"}, "a.b.c.d"),
        ({"table": "t_id_seq"}, "is neither a table nor a view"),
        ({"table": "t", "split_column": "nope"}, "no split_column 'nope'; columns: id, j"),
        ({"table": "t", "split_column": "j"}, "ordering operator"),
        ({"table": "t", "tabel": "t"}, "; did you mean 'table'?"),
        ({"table": "t", "options": {"table": "u"}}, "differ in table"),
        ({"table": "t", "options": {"connect_timeout": "soon"}}, "got 'soon'"),
        ({"query": "SELECT nope FROM t"}, 'column "nope" does not exist'),
        ({"query": "SELEC 1"}, "syntax error"),
        ({"query": "SELECT 1 AS a, 2 AS a"}, "several columns named a"),
    ],
)
def test_bad_requests_are_named(db: Database, arguments: dict, expected: str) -> None:
    db.run("CREATE TABLE t (id serial, j json)")
    assert expected in failure(lambda: db.pin(**arguments), RequestError)


def test_connections_that_fail_are_named_and_show_no_password(db: Database) -> None:
    db.run("CREATE TABLE t (id int)")
    with socket.socket() as closed:  # bound and not listening: refused
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        silent = socket.create_server(("127.0.0.1", 0))
        with silent:
            address = "postgresql://owner@127.0.0.1:{}/db?table=t&connect_timeout=2"
            wrong = replace(db.spec(table="t"), secrets={"password": "sesame"})
            cases = {
                "password authentication failed": wrong,
                "does not exist": replace(db.spec(), source=(db.server.uri("nowhere", table="t"),)),
                "Connection refused": replace(db.spec(), source=(address.format(port),)),
                "timeout expired": replace(
                    db.spec(), source=(address.format(silent.getsockname()[1]),)
                ),
            }
            for reason, spec in cases.items():
                started = time.monotonic()
                text = failure(lambda spec=spec: postgres.pin(spec), LoadError)
                assert time.monotonic() - started < 60
                assert reason in text and "sesame" not in text
                assert text.count("postgresql://owner@") == 1
    pin = db.pin(query="SELECT 1 AS one")
    (split,) = splits_of(pin)
    wrong_node = lambda: list(postgres.read(pinned(pin), split, {"password": "sesame"}))  # noqa: E731
    text = failure(wrong_node, LoadError)
    assert "/(query)" in text and "sesame" not in text


def test_what_is_written_down_holds_no_secret(db: Database) -> None:
    db.run("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    pin = db.pin(table="t")
    shown = [pin.snapshot, json.dumps(pin.content), *map(repr, splits_of(pin))]
    assert not any(PASSWORD in text for text in shown)
    assert json.loads(json.dumps(pin.content)) == pin.content


def test_a_secret_that_the_server_quotes_is_not_shown(db: Database) -> None:
    spec = replace(
        db.spec(query="SELECT 'hidden'::int"), secrets={**SECRETS, "application_name": "hidden"}
    )
    text = failure(lambda: postgres.pin(spec), LoadError)
    assert "hidden" not in text and "***" in text


def test_a_reader_that_stops_early_leaves_no_connection(db: Database) -> None:
    db.run("CREATE TABLE t AS SELECT g, repeat('x', 400) AS s FROM generate_series(1, 60000) g")
    pin = db.pin(table="t")
    (split,) = splits_of(pin, 2**30)
    batches = postgres.read(pinned(pin), split, SECRETS)
    assert next(batches).num_rows < 60_000
    batches.close()
    pin.close()
    no_connection(db)


def test_a_large_table_is_sampled_and_not_counted(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_COUNTED_ROWS", 1000)
    monkeypatch.setattr(cut, "_SAMPLED_ROWS", 5000)
    db.run(
        "CREATE TABLE t (k int, v int)",
        "INSERT INTO t SELECT nullif(g % 1000, 7), g FROM generate_series(1, 20000) g",
        "ANALYZE t",
    )
    for arguments in ({"split_column": "k"}, {}):
        pin = db.pin(table="t", **arguments)
        splits = splits_of(pin, 16_000)
        assert not pin.exact_rows and len(splits) > 5
        assert {split.num_rows for split in splits} == {None}
        assert sum(s.estimated_bytes for s in splits) == pytest.approx(160_000, rel=0.1)
        tables = [read(pin, split) for split in splits]
        assert sorted(pa.concat_tables(tables)["v"].to_pylist()) == list(range(1, 20001))
        assert sum(table.num_rows > 0 for table in tables) > 5


@pytest.mark.parametrize("counts", [[0], [5], [1, 1, 1, 1], [9, 0, 0, 1], [0, 0, 7], [3, 90, 3, 1]])
@pytest.mark.parametrize("num_ranges", [1, 2, 3, 10])
def test_ranges_touch_and_hold_all_rows(counts: list[int], num_ranges: int) -> None:
    bounds = [str(index) for index in range(1, len(counts))]
    ranges = even_ranges("k", bounds, counts, num_ranges)
    assert sum(rows for _, rows in ranges) == sum(counts)
    pieces = [piece for piece, _ in ranges]
    assert pieces[0].start is None and pieces[-1].stop is None
    assert all(a.stop == b.start is not None for a, b in itertools.pairwise(pieces))


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("postgresql://h/d", {"host": "h", "dbname": "d"}),
        ("postgres://u%40x@h:5433/d", {"user": "u@x", "host": "h", "port": "5433", "dbname": "d"}),
        ("postgresql://[::1]:5/d", {"host": "::1", "port": "5", "dbname": "d"}),
        ("postgresql://[::1]/d", {"host": "::1", "dbname": "d"}),
        ("postgresql://a:1,b:2/d", {"host": "a,b", "port": "1,2", "dbname": "d"}),
        ("postgresql:///d?host=%2Frun%2Fpg", {"host": "/run/pg", "dbname": "d"}),
        ("postgresql://%2Frun%2Fpg/d", {"host": "/run/pg", "dbname": "d"}),
    ],
)
def test_addresses(uri: str, words: dict[str, str]) -> None:
    assert parse_uri(f"{uri}{'&' if '?' in uri else '?'}query=SELECT%201+1%26") == (
        words,
        {"query": "SELECT 1+1&"},
    )
    assert parse_uri(str(Address(words)))[0] == words


def test_texts_are_measured(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int, s text, f real[], b bytea)",
        "INSERT INTO t SELECT g, repeat('x', 500), ARRAY[1, 2, 3], 'abcd' "
        "FROM generate_series(1, 300) g",
    )
    pin = db.pin(table="t")
    forecast = sum(split.estimated_bytes for split in splits_of(pin, 40_000))
    assert forecast == pytest.approx(read_all(pin, 40_000).nbytes, rel=0.1)


def test_texts_that_a_query_makes_are_guessed(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int, s text, n int)",
        "INSERT INTO t SELECT g, repeat('x', 500), g FROM generate_series(1, 300) g",
    )
    pin = db.pin(table="t")
    made = [("shout", pa.string()), ("n", pa.list_(pa.int64())), ("id", pa.binary())]
    stored = pa.schema([*made, ("s", pa.string())])
    forecast = sum(split.estimated_bytes for split in pin.cut(stored, 5_000))
    assert forecast == 300 * (3 * GUESSED_VALUE_BYTES + 4 + 500)

    spec = db.spec(table="t")
    planned = plan_version(
        DatasetSpec(
            "d",
            spec.source,
            sql="SELECT upper(s) AS shout FROM source",
            storage_options={**spec.options, **spec.secrets},
        )
    )
    planned.close()
    assert planned.version.max_rows == 300


def test_the_password_may_come_from_the_environment(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.run("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    pin = postgres.pin(replace(db.spec(table="t"), secrets={}))
    try:
        (split,) = splits_of(pin)
        assert sum(batch.num_rows for batch in postgres.read(pinned(pin), split, {})) == 1
    finally:
        pin.close()


def test_a_role_that_may_read_some_columns_reads_those(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, secret text, word text)",
        "INSERT INTO t SELECT n, 'hush', 'word ' || n FROM generate_series(1, 500) AS n",
        f"CREATE ROLE {db.name}_some LOGIN PASSWORD '{PASSWORD}'",
        f"GRANT SELECT (id, word) ON t TO {db.name}_some",
    )
    uri = db.server.uri(db.name, user=f"{db.name}_some", table="t")
    pin = postgres.pin(TableSpec("source", (uri,), "postgres", secrets=SECRETS))
    db._pins.append(pin)
    assert len(splits_of(pin)) > 1
    assert read_all(pin).to_pylist() == [{"id": n, "word": f"word {n}"} for n in range(1, 501)]


def test_arrays_of_a_domain_over_numeric_are_numbers(db: Database) -> None:
    db.run(
        "CREATE DOMAIN price AS numeric(10, 2)",
        "CREATE DOMAIN label AS text",
        "CREATE DOMAIN prices AS price[]",
        "CREATE TABLE t (a price[], b prices, c label[], d price)",
        "INSERT INTO t VALUES ('{1.5,NULL}', '{2.25}', '{x}', 4)",
    )
    pin = db.pin(table="t")
    assert read_all(pin).to_pylist() == [
        {"a": [1.5, None], "b": [2.25], "c": ["x"], "d": Decimal(4)}
    ]


def test_a_query_has_decimals_where_it_says_their_digits(db: Database) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, price numeric(20, 2))",
        "INSERT INTO t SELECT g, g + 90071992547409930.01 FROM generate_series(1, 500) AS g",
        "CREATE VIEW v AS SELECT * FROM t",
    )
    exact = [{"price": Decimal(n) + Decimal("90071992547409930.01")} for n in range(1, 501)]
    query = "SELECT {} AS price FROM t ORDER BY id"

    for source in ({"query": query.format("price")}, {"table": "v", "split_column": "id"}):
        pin = db.pin(**source)
        assert read_all(pin).select(["price"]).to_pylist() == exact
    cast = db.pin(query=query.format("(price * 2)::numeric(22, 2)"))
    assert cast.schema.field("price").type == pa.decimal128(22, 2)
    assert db.pin(query=query.format("price * 2")).schema.field("price").type == pa.float64()


def test_a_numeric_that_no_decimal_has_is_named_with_its_column(db: Database) -> None:
    db.run("CREATE TABLE t (id int, price numeric(9, 2))", "INSERT INTO t VALUES (1, 'NaN')")
    pin = db.pin(table="t")
    with pytest.raises(LoadError, match=r"public.t.*'price' holds NaN.*select nullif\(\"price\""):
        read_all(pin)


def test_a_numeric_beyond_float64_is_named_with_its_column(db: Database) -> None:
    db.run("CREATE TABLE t (id int, big numeric)", "INSERT INTO t VALUES (1, 10 ^ 400::numeric)")
    pin = db.pin(table="t")
    with pytest.raises(LoadError, match=r"out of range for type double precision \(column 'big'\)"):
        read_all(pin)
