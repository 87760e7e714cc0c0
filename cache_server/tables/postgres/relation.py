"""A table or query as the server describes it: key, size, and columns that Arrow can read.

Reads the catalogue and the planner, never rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa

from cache_protocol.errors import LoadError, RequestError, some_of
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
_MOST_DIGITS = 76  # of a decimal in Arrow


@dataclass(frozen=True)
class Relation:
    """A table, or a query, which has no ``oid``, as the catalogue describes it.

    Attributes:
        sql: a name or a query in parentheses.
        path: of its splits.
        primary_key: columns, in order; empty if they are not unique.
        integer_key: the first of them is an integer.
        blocks: of its largest part; None if rows have no address.
        is_stored: sampling and counting its rows costs at most a scan.
    """

    sql: str
    path: str
    oid: int | None = None
    primary_key: tuple[str, ...] = ()
    integer_key: bool = False
    blocks: int | None = None
    is_stored: bool = False


def query_relation(address: Address, query: str) -> Relation:
    """A query as a relation, with unknown size and key."""
    # The line break ends a comment at the end of the query.
    return Relation(f"({query.strip().rstrip(';')}\n)", f"{address}/(query)")


def find_table(session: Session, address: Address, name: str) -> Relation:
    """The table or view with a name as in SQL.

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
        raise RequestError(f"{name!r} of database {address} is neither a table nor a view")
    keys = session.rows(
        "SELECT a.attname::text, a.atttypid::int8 FROM pg_catalog.pg_index AS i "
        "CROSS JOIN LATERAL pg_catalog.unnest(i.indkey) WITH ORDINALITY AS k (attnum, place) "
        "JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum "
        f"WHERE i.indrelid = {oid} AND i.indisprimary AND k.place <= i.indnkeyatts "
        "ORDER BY k.place"
    )
    # The table and its partitions or inheritance children.
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
    sql = f"{identifier(schema)}.{identifier(table)}"
    if (readable := _readable_columns(session, oid)) is not None:
        columns = ", ".join(map(identifier, readable))
        key = tuple(column for column, _ in keys if not has_children)
        return Relation(
            f"(SELECT {columns} FROM {sql})",
            f"{address}/{schema}.{table}",
            oid,
            key if set(key) <= set(readable) else (),
            bool(key) and key[0] in readable and keys[0][1] in _INTEGERS,
        )
    return Relation(
        sql,
        f"{address}/{schema}.{table}",
        oid,
        () if has_children else tuple(column for column, _ in keys),
        bool(keys) and not has_children and keys[0][1] in _INTEGERS,
        max(blocks for _, _, blocks in parts) if is_stored else None,
        is_stored,
    )


def _readable_columns(session: Session, oid: int) -> list[str] | None:
    """The columns that the role may read; None if it may read all, and the addresses of rows."""
    found = session.rows(
        "SELECT a.attname::text, pg_catalog.has_table_privilege(a.attrelid, 'SELECT') "
        f"FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = {oid} AND a.attnum > 0 "
        "AND NOT a.attisdropped AND pg_catalog.has_column_privilege(a.attrelid, a.attnum, 'SELECT')"
        " ORDER BY a.attnum"
    )
    if not found or found[0][1]:  # without any, the server says what is missing
        return None
    return [name for name, _ in found]


def check_not_rewritten(session: Session, relation: Relation) -> None:
    """Refuses a table that was rewritten or truncated between the snapshot and its lock.

    A snapshot does not protect from such a change: rows would be missing. Call it after the first
    query of the table, which locks it. A query cannot be checked.

    Raises:
        LoadError: naming the table.
    """
    if relation.oid is None:
        return
    # relfilenode: as the snapshot sees it; pg_relation_filenode: now.
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


def column_expressions(
    session: Session, relation: Relation
) -> tuple[dict[str, str], dict[str, pa.DataType]]:
    """Name -> SQL that casts the column to a type that Arrow has.

    Also the decimals that such texts are, by name.
    """
    schema = session.schema(f"SELECT * FROM {relation.sql} AS q")
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise RequestError(
            f"{relation.path} has several columns named {some_of(repeated)}: rename them with AS"
        )
    if not schema.names:
        raise RequestError(f"{relation.path} has no columns")
    expressions = {
        field.name: f"q.{identifier(field.name)}{_cast(session, relation, field)}"
        for field in schema
    }
    found = {field.name: _decimal(field) for field in schema}
    return expressions, {name: dtype for name, dtype in found.items() if dtype is not None}


def has_gaps(session: Session, relation: Relation, column: str) -> bool:
    """Whether arrays pad its values, such as those of ``timetz`` and ``macaddr``.

    ``width_bucket`` expects them without padding and would use wrong buckets.
    """
    value = f"(SELECT {column} FROM {relation.sql} AS q LIMIT 0)"
    found = session.rows(
        "SELECT typlen > 0 AND typlen % CASE typalign WHEN 'd' THEN 8 WHEN 'i' THEN 4 "
        "WHEN 's' THEN 2 ELSE 1 END <> 0 FROM pg_catalog.pg_type "
        f"WHERE oid = pg_catalog.pg_typeof({value})"
    )
    return bool(found[0][0])


def _decimal(field: pa.Field) -> pa.DataType | None:
    """The decimal that holds each value of a ``numeric`` whose digits are known; else None."""
    metadata = field.metadata or {}
    modifier = int(metadata.get(b"POSTGRESQL:typmod", -1)) - 4  # a header of 4 bytes
    if metadata.get(b"POSTGRESQL:type") != b"numeric" or modifier < 0:
        return None
    scale = ((modifier & 0x7FF) ^ 0x400) - 0x400  # signed, of 11 bits
    digits = max(modifier >> 16, scale) - min(scale, 0)
    if digits > _MOST_DIGITS:
        return None
    make = pa.decimal128 if digits <= 38 else pa.decimal256
    return make(digits, max(scale, 0))


def _cast(session: Session, relation: Relation, field: pa.Field) -> str:
    name = (field.metadata or {}).get(b"POSTGRESQL:type", b"").decode()
    is_array = pa.types.is_list(field.type) or name.startswith("_")
    name = name.removeprefix("_")
    if is_array and has_no_like(field.type):  # the driver does not look into domains
        name = _element_type(session, relation, field.name)
    brackets = "[]" if is_array else ""
    if _decimal(field) is not None:
        return "::text"
    if name in _FLOATS:
        through = f"::numeric{brackets}" if name == "money" else ""
        return f"{through}::float8{brackets}"
    if name in _IDS:
        return f"::text{brackets}::int8{brackets}"
    return f"::text{brackets}" if has_no_like(field.type) else ""


def _element_type(session: Session, relation: Relation, column: str) -> str:
    """The name of the type of an array's values, without domains."""
    value = f"(SELECT q.{identifier(column)} FROM {relation.sql} AS q LIMIT 0)"
    found = session.rows(
        f"WITH RECURSIVE inner_type (oid) AS (SELECT pg_catalog.pg_typeof({value})::oid UNION "
        "SELECT CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.typelem END FROM inner_type "
        "JOIN pg_catalog.pg_type AS t USING (oid) WHERE t.typtype = 'd' OR t.typcategory = 'A') "
        "SELECT t.typname::text FROM inner_type JOIN pg_catalog.pg_type AS t USING (oid) "
        "WHERE t.typtype <> 'd' AND t.typcategory <> 'A'"
    )
    return str(found[0][0]) if found else ""


def has_no_like(dtype: pa.DataType) -> bool:
    """Whether Arrow lacks the type or one inside it, or the driver misreads it."""
    # The driver reads composite values after a null one as null.
    if isinstance(dtype, pa.BaseExtensionType) or pa.types.is_struct(dtype):
        return True
    return any(has_no_like(dtype.field(i).type) for i in range(dtype.num_fields))


def estimated_rows(session: Session, relation: Relation) -> int:
    """What the server's planner expects."""
    plan = session.rows(f"EXPLAIN (FORMAT JSON) SELECT * FROM {relation.sql} AS q")[0][0]
    return int(json.loads(plan)[0]["Plan"]["Plan Rows"])
