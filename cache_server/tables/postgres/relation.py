"""What a server says of a table or a query: its key, its size, its columns as Arrow takes them.

Reads the catalogue and the planner, never rows. It does not know splits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa

from cache_protocol.errors import LoadError, RequestError
from cache_server.sql.quoting import identifier, literal
from cache_server.tables.postgres.session import Address, Session

_INTEGERS = {20, 21, 23}  # int8, int2 and int4 in pg_type
_KINDS = {"r": "table", "p": "table", "m": "table", "v": "view", "f": "foreign table"}
_PARTS = (
    "WITH RECURSIVE parts (oid) AS ("
    "SELECT {oid}::oid UNION SELECT i.inhrelid FROM pg_catalog.pg_inherits AS i "
    "JOIN parts ON i.inhparent = parts.oid) "
)
_FLOATS, _IDS = {"numeric", "money"}, {"oid", "xid", "cid"}


@dataclass(frozen=True)
class Relation:
    """What the catalogue says of a table, or of a query, which has no ``oid``.

    Attributes:
        sql: a name or a query in brackets.
        path: of its splits.
        primary_key: columns, in order; only where they tell all rows apart.
        integer_key: the first of them is an integer.
        blocks: of its largest part; None where rows have no address.
        is_stored: its rows can be sampled and counted at no more than the cost of a scan.
    """

    sql: str
    path: str
    oid: int | None = None
    primary_key: tuple[str, ...] = ()
    integer_key: bool = False
    blocks: int | None = None
    is_stored: bool = False


def query_relation(address: Address, query: str) -> Relation:
    """A query as a relation; what it is like only the server knows."""
    # The new line ends a comment that the query may end with.
    return Relation(f"({query.strip().rstrip(';')}\n)", f"{address}/(query)")


def find_table(session: Session, address: Address, name: str) -> Relation:
    """The table or view of that name, which is written as in SQL.

    Raises:
        RequestError: naming what the database does not have.
    """
    session.what = f"table {name!r} of {address}"
    found = session.rows(
        "SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text "
        "FROM pg_catalog.pg_class AS c "
        "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
        f"WHERE c.oid = pg_catalog.to_regclass({literal(name)})"
    )
    if not found:
        raise RequestError(
            f"database {address} has no table {name!r}: write it as in SQL, such as "
            'public.orders or public."Orders"'
        )
    oid, schema, table, kind = found[0]
    if kind not in _KINDS:
        raise RequestError(f"{name!r} of database {address} is no table or view")
    keys = session.rows(
        "SELECT a.attname::text, a.atttypid::int8 FROM pg_catalog.pg_index AS i "
        "CROSS JOIN LATERAL pg_catalog.unnest(i.indkey) WITH ORDINALITY AS k (attnum, place) "
        "JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum "
        f"WHERE i.indrelid = {oid} AND i.indisprimary AND k.place <= i.indnkeyatts "
        "ORDER BY k.place"
    )
    # It and whatever inherits from it: partitions or, of old, children.
    parts = session.rows(
        f"{_PARTS.format(oid=oid)}"
        "SELECT c.relkind::text, coalesce(a.amname::text, ''), "
        "coalesce(pg_catalog.pg_relation_size(c.oid) "
        "/ pg_catalog.current_setting('block_size')::int8, 0)::int8 "
        "FROM parts JOIN pg_catalog.pg_class AS c USING (oid) "
        "LEFT JOIN pg_catalog.pg_am AS a ON a.oid = c.relam"
    )
    has_children = kind == "r" and len(parts) > 1
    is_stored = all(k == "p" or (k in "rm" and am == "heap") for k, am, _ in parts)
    return Relation(
        f"{identifier(schema)}.{identifier(table)}",
        f"{address}/{schema}.{table}",
        oid,
        () if has_children else tuple(column for column, _ in keys),
        bool(keys) and not has_children and keys[0][1] in _INTEGERS,
        max(blocks for _, _, blocks in parts) if is_stored else None,
        is_stored,
    )


def check_not_rewritten(session: Session, relation: Relation) -> None:
    """Refuses a table whose rows were moved or truncated between the snapshot and its lock.

    They would be missing: to such a change no snapshot holds. Call it once the table was queried,
    which locks it. For a query it is not known.

    Raises:
        LoadError: naming the table.
    """
    if relation.oid is None:
        return
    # The one is what the snapshot sees, the other what is.
    moved = session.rows(
        f"{_PARTS.format(oid=relation.oid)}"
        "SELECT 1 FROM parts JOIN pg_catalog.pg_class AS c USING (oid) WHERE c.relfilenode <> 0 "
        "AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid) LIMIT 1"
    )
    if moved:
        raise LoadError(
            f"cannot read {relation.path}: it was truncated or rewritten while it was pinned: "
            "load it again"
        )


def column_expressions(session: Session, relation: Relation) -> dict[str, str]:
    """Name -> the SQL that gives the column in a type that Arrow has."""
    schema = session.schema(f"SELECT * FROM {relation.sql} AS q")
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise RequestError(
            f"{relation.path} has several columns named {', '.join(repeated)}: rename them with AS"
        )
    if not schema.names:
        raise RequestError(f"{relation.path} has no columns")
    return {field.name: f"q.{identifier(field.name)}{_cast(field)}" for field in schema}


def has_gaps(session: Session, relation: Relation, column: str) -> bool:
    """Whether its values lie padded in an array, such as of ``timetz`` and ``macaddr``.

    ``width_bucket`` takes them for dense and puts keys into wrong buckets.
    """
    value = f"(SELECT {column} FROM {relation.sql} AS q LIMIT 0)"
    found = session.rows(
        "SELECT typlen > 0 AND typlen % CASE typalign WHEN 'd' THEN 8 WHEN 'i' THEN 4 "
        "WHEN 's' THEN 2 ELSE 1 END <> 0 FROM pg_catalog.pg_type "
        f"WHERE oid = pg_catalog.pg_typeof({value})"
    )
    return bool(found[0][0])


def _cast(field: pa.Field) -> str:
    source = (field.metadata or {}).get(b"POSTGRESQL:type", b"").decode()
    is_array = pa.types.is_list(field.type)
    brackets = "[]" if is_array or source.startswith("_") else ""
    name = source.removeprefix("_")
    if name in _FLOATS:
        through = f"::numeric{brackets}" if name == "money" else ""
        return f"{through}::float8{brackets}"
    if name in _IDS:
        return f"::text{brackets}::int8{brackets}"
    return f"::text{brackets}" if has_no_like(field.type) else ""


def has_no_like(dtype: pa.DataType) -> bool:
    """Whether Arrow has no such type, or none of a value inside, or the driver misreads it."""
    # Of composite values that follow a null one, the driver makes nulls.
    if isinstance(dtype, pa.BaseExtensionType) or pa.types.is_struct(dtype):
        return True
    return any(has_no_like(dtype.field(i).type) for i in range(dtype.num_fields))


def estimated_rows(session: Session, relation: Relation) -> int:
    """What the server's planner expects."""
    plan = session.rows(f"EXPLAIN (FORMAT JSON) SELECT * FROM {relation.sql} AS q")[0][0]
    return int(json.loads(plan)[0]["Plan"]["Plan Rows"])
