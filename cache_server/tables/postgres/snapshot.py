"""Tables and queries of a PostgreSQL server, read by key ranges out of one exported snapshot.

The coordinator holds a read-only transaction open and exports its snapshot. Each node opens another
transaction with the same snapshot. Meanwhile the tables can be written, but not altered, dropped or
rewritten: their rows stay at their addresses.

    postgresql://reader@db:5432/shop?table=public.orders
    postgresql://reader@db/shop?query=SELECT%20id,%20price%20FROM%20orders&split_column=id

``table``, ``query`` and ``split_column`` may also be storage options. A table is named as in SQL:
``public.orders``, or ``public."Orders"`` with capital letters. The server casts types that Arrow
lacks:

    numeric(p, s) to 76 digits              text, which becomes a decimal
    other numeric, money                    float8
    oid, xid, cid                           int8
    json, jsonb, uuid, composite and
    all other types                         text

Other types stay: numbers, bool, text, enums, bytea, date, time, timestamps (with a zone: in UTC),
interval, arrays (several dimensions become one, in row-major order). Nothing that this module
stores holds a secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.datasets.dataset_spec import TableSpec
from cache_protocol.datasets.source_options import POSTGRES
from cache_protocol.errors import LoadError, RequestError, some_of
from cache_server.object_stores.options import known
from cache_server.source.outages import load_error
from cache_server.source.pinned import Pin, PinnedTable, Split
from cache_server.sql.quoting import identifier
from cache_server.tables.postgres.cut import Cutting
from cache_server.tables.postgres.ranges import CTID, KeyRange
from cache_server.tables.postgres.relation import (
    Relation,
    check_not_rewritten,
    column_expressions,
    estimated_rows,
    find_table,
    has_gaps,
    has_no_like,
    query_relation,
)
from cache_server.tables.postgres.session import (
    Address,
    Session,
    keywords_of,
    parse_uri,
)

# Counting this many rows takes the server a second or two; for more, its statistics are used.
MAX_COUNTED_ROWS = 10_000_000
_FIRST_DAY = -2_500_000  # before the first date that PostgreSQL has, 4713 BC
_DAY_US = 86_400_000_000
_NO_FLOAT = "out of range for type double precision"  # in a message of the server


@dataclass(frozen=True)
class _Reading:
    """How a node reads the relation, without secrets. Becomes `PinnedTable.snapshot`.

    Attributes:
        connection: libpq's key words.
        snapshot: exported by the coordinator.
        relation: a quoted name or a query in parentheses; ``q`` in the expressions.
        columns: name -> SQL expression.
        order: SQL expressions that order all different rows; empty for a query, whose rows keep
            its order.
    """

    connection: dict[str, str]
    snapshot: str
    search_path: str
    relation: str
    columns: dict[str, str]
    order: list[str]

    def select(self, names: list[str], condition: str = "true") -> str:
        # Without columns, a constant: only the number of rows counts.
        columns = [f"{self.columns[name]} AS {identifier(name)}" for name in names] or ["1 AS one"]
        order = f" ORDER BY {', '.join(self.order)}" if self.order else ""
        return f"SELECT {', '.join(columns)} FROM {self.relation} AS q WHERE {condition}{order}"


def pin(table: TableSpec) -> Pin:
    """The table or query as it is now, held in a transaction until the pin is closed.

    Raises:
        RequestError: a bad option; a table, column or SQL that the server refuses.
        LoadError: the database cannot be reached or read, or cannot export a snapshot.
    """
    address, wanted = _parse(table)
    session = Session(address, table.secrets)
    try:
        return _pin(session, address, wanted)
    except BaseException:
        session.close()
        raise


def read(table: PinnedTable, split: Split, secrets: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The rows of one split in a fixed order, on another connection.

    Args:
        secrets: ``password`` and other key words of libpq are used. Without a password libpq looks
            for one: PGPASSWORD, a password file.

    Yields:
        batches of `PinnedTable.read_schema`, of about 16 MB.

    Raises:
        LoadError: its rows cannot be read, or its snapshot has ended; names the split.
    """
    reading = _Reading(**json.loads(table.snapshot))
    schema = table.read_schema
    session = Session(
        Address(reading.connection),
        secrets,
        snapshot=reading.snapshot,
        search_path=reading.search_path,
        what=str(split),
    )
    try:
        if not reading.order:
            session.execute("SET LOCAL max_parallel_workers_per_gather = 0")
        condition = KeyRange.from_json(split.piece).condition()
        for batch in session.stream(reading.select(schema.names, condition)):
            yield _conform(batch, schema, split)
    except LoadError as error:
        raise _named(error, reading, schema.names) from None
    finally:
        session.close()


def _named(error: LoadError, reading: _Reading, names: list[str]) -> LoadError:
    """The error; of a numeric that no float64 has, with the columns that may hold it."""
    if _NO_FLOAT not in str(error):
        return error
    found = [name for name in names if "::float8" in reading.columns[name]]
    return LoadError(
        f"{error} (column {some_of(map(repr, found))}): select it in a query as text, or without "
        "such rows"
    )


def _parse(table: TableSpec) -> tuple[Address, dict[str, str]]:
    """The database, and what is read of it, by the names of `RELATION`."""
    if len(table.source) != 1:
        raise RequestError(
            f"format postgres reads one source, got {len(table.source)}: name several tables in "
            "sources, and join them in the sql"
        )
    words, others = parse_uri(table.source[0])
    shown = table.source[0].partition("?")[0]
    more_words, more_others = keywords_of(table.options)
    for target, more in ((words, more_words), (others, more_others)):
        for name, value in more.items():
            if target.setdefault(name, value) != value:
                raise RequestError(f"source {shown!r} and storage_options differ in {name}")
    _, unknown = keywords_of(table.secrets)
    for name in {**others, **unknown}:
        known([POSTGRES], name, POSTGRES.find(name))
    given = [name for name in ("table", "query") if others.get(name, "").strip()]
    if len(given) != 1:
        raise RequestError(
            f"source {shown!r} needs one of table and query, got {' and '.join(given) or 'none'}: "
            "append ?table=schema.name or ?query=SELECT%20... to it, or give it in "
            "storage_options"
        )
    timeout = words.get("connect_timeout", "1")
    if not timeout.isdecimal() or int(timeout) < 1:
        raise RequestError(f"connect_timeout must be seconds, at least 1, got {timeout!r}")
    return Address(words), others


def _pin(session: Session, address: Address, wanted: Mapping[str, str]) -> Pin:
    name, query = wanted.get("table", ""), wanted.get("query", "")
    relation = find_table(session, address, name) if name else query_relation(address, query)
    session.what = relation.path
    snapshot = _export(session, address)
    session_facts = session.rows(
        "SELECT pg_catalog.current_setting('search_path'), "
        "(SELECT oid::int8 FROM pg_catalog.pg_database WHERE datname = current_database()), "
        "pg_catalog.txid_current_snapshot()::text"
    )
    search_path, database, state = session_facts[0]
    columns, decimals = column_expressions(session, relation)
    check_not_rewritten(session, relation)
    key = _split_key(session, relation, wanted.get("split_column", ""), columns)
    order = _order(relation, key, columns)
    connection = dict(address.parameters)
    reading = _Reading(connection, snapshot, search_path, relation.sql, columns, order)
    schema = _schema(session, reading, relation, decimals)
    estimate = estimated_rows(session, relation)
    is_counted = relation.is_stored and estimate <= MAX_COUNTED_ROWS
    cutting = Cutting(session, relation, columns, schema, key, estimate, is_counted)
    return Pin(
        schema=schema,
        content=[
            {
                "database": str(address),
                "connection": connection,
                "oid": [database, relation.oid],
                "relation": relation.sql,
                "order": order,
                "snapshot": state,
            }
        ],
        cut=cutting.splits,
        bytes_by="a sample of its rows"
        if relation.is_stored
        else "guesses of the server and of texts",
        snapshot=json.dumps(asdict(reading)),
        exact_rows=is_counted,
        guessed=not relation.is_stored,
        comparable=False,
        close=session.close,
    )


def _export(session: Session, address: Address) -> str:
    try:
        return str(session.rows("SELECT pg_catalog.pg_export_snapshot()")[0][0])
    except (LoadError, RequestError) as error:
        raise load_error(
            f"database {address} cannot export a snapshot, so that its nodes would not read the "
            f"same rows: {error}",
            error,
        ) from None


def _split_key(
    session: Session, relation: Relation, column: str, columns: Mapping[str, str]
) -> str:
    """The SQL expression that splits are cut by; empty: one split."""
    if column:
        if column not in columns:
            raise RequestError(
                f"{relation.path} has no split_column {column!r}; columns: "
                f"{some_of(columns, like=column)}"
            )
        key = f"q.{identifier(column)}"
        return f"{key}::text" if has_gaps(session, relation, key) else key
    if relation.integer_key:
        return f"q.{identifier(relation.primary_key[0])}"
    return CTID if relation.blocks is not None else ""


def _order(relation: Relation, key: str, columns: Mapping[str, str]) -> list[str]:
    physical = [CTID] if relation.blocks is not None else []
    if physical and not relation.primary_key:
        physical = ["q.tableoid", *physical]
    primary = [f"q.{identifier(name)}" for name in relation.primary_key]
    if key == CTID:
        return ["q.tableoid", key]
    if not key and relation.oid is None:
        return []
    rest = primary or physical or list(columns.values())
    return [*([key] if key else []), *(term for term in rest if term != key)]


def _schema(
    session: Session, reading: _Reading, relation: Relation, decimals: Mapping[str, pa.DataType]
) -> pa.Schema:
    found = session.schema(reading.select(list(reading.columns)))
    problems = [
        f"column {field.name!r} is {field.type}: select {identifier(field.name)}::text in a query"
        for field in found
        if has_no_like(field.type)
    ]
    if problems:
        raise RequestError(f"{relation.path} cannot be read: {some_of(problems, '; ')}")
    return pa.schema([(f.name, decimals.get(f.name) or _bare(f.type)) for f in found])


def _bare(dtype: pa.DataType) -> pa.DataType:
    """The type without the driver's metadata on inner fields."""
    if pa.types.is_list(dtype):
        return pa.list_(pa.field("item", _bare(dtype.value_type)))
    return dtype


def _conform(batch: pa.RecordBatch, schema: pa.Schema, split: Split) -> pa.RecordBatch:
    """The batch with exactly ``schema``."""
    if not schema.names:
        return batch.select([])
    for field, column in zip(schema, batch.columns, strict=True):
        if _has_infinity(column):
            raise LoadError(
                f"cannot read {split}: column {field.name!r} holds an infinite {field.type}, or "
                "one too late for Arrow: filter such rows out in a query"
            )
        if pa.types.is_decimal(field.type) and pc.any(pc.equal(column, "NaN")).as_py():
            name = identifier(field.name)
            raise LoadError(
                f"cannot read {split}: column {field.name!r} holds NaN, which {field.type} has "
                f"not: select nullif({name}, 'NaN') or {name}::float8 in a query"
            )
    arrays = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for field, column in zip(schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _has_infinity(column: pa.Array) -> bool:
    """Whether a date or timestamp is beyond Arrow's range: it comes as one before 4713 BC."""
    while pa.types.is_list(column.type):
        column = column.flatten()
    if pa.types.is_date32(column.type):
        least, first = pc.min_max(column.view(pa.int32()))["min"].as_py(), _FIRST_DAY
    elif pa.types.is_timestamp(column.type):
        least, first = pc.min_max(column.view(pa.int64()))["min"].as_py(), _FIRST_DAY * _DAY_US
    else:
        return False
    return least is not None and least < first
