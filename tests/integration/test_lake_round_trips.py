"""Tables of every type of a lake format or PostgreSQL: they are read as the library reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cache_client import DatasetSpec
from cache_protocol.storage.nested_values import retyped
from tests import arrow_values
from tests.iceberg_tables import opened_catalog
from tests.load_here import load_here
from tests.postgres_server import PASSWORD, PostgresServer, database, postgres_server  # noqa: F401
from tests.same_tables import check, values_in

ROWS, CUT, SEEDS = 9, 5, range(3)
_COMMON = {
    *(pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.date32()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC")),
}
DELTA = {*_COMMON, pa.int8(), pa.int16()}
ICEBERG = {*_COMMON, pa.time64("us"), pa.binary(3), pa.binary(16), pa.uuid()}
Reading = tuple[DatasetSpec, pa.Table]


def fits(dtype: pa.DataType, leaves: Collection[pa.DataType]) -> bool:
    """Whether a format has a type: of these leaves, and lists, structs and maps of them."""
    types = pa.types
    if types.is_decimal128(dtype):
        return bool(dtype.scale >= 0)
    if types.is_struct(dtype):
        return dtype.num_fields > 0 and all(fits(child.type, leaves) for child in dtype)
    if types.is_map(dtype):
        return fits(dtype.key_type, leaves) and fits(dtype.item_type, leaves)
    if types.is_list(dtype):
        return fits(dtype.value_type, leaves)
    return dtype in leaves


def table_of(seed: int, depth: int, leaves: Collection[pa.DataType]) -> pa.Table:
    """Columns of random types beside the numbers of the rows."""
    rng = np.random.default_rng(seed)
    fields, columns = [pa.field("row", pa.int64())], [pa.array(range(ROWS))]
    while len(fields) < 8:
        dtype = arrow_values.random_type(rng, depth)
        if fits(dtype, leaves):
            fields.append(pa.field(f"c{len(fields)}", dtype))
            columns.append(arrow_values.array_of(fields[-1], ROWS, rng))
    return pa.table(columns, schema=pa.schema(fields))


def as_read(dtype: pa.DataType) -> pa.DataType:
    """A type with small offsets, and inner fields that are nullable: see the guide on types."""
    types = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        return dtype
    if types.is_large_string(dtype):
        return pa.string()
    if types.is_large_binary(dtype):
        return pa.binary()
    if types.is_struct(dtype):
        return pa.struct([pa.field(child.name, as_read(child.type)) for child in dtype])
    if types.is_map(dtype):
        return pa.map_(as_read(dtype.key_type), as_read(dtype.item_type))
    if types.is_list(dtype) or types.is_large_list(dtype):
        return pa.list_(pa.field("element", as_read(dtype.value_type)))
    return dtype


def normalized(table: pa.Table) -> pa.Table:
    columns = []
    for column in table.columns:
        dtype, whole = as_read(column.type), pa.concat_arrays(column.chunks)
        has_extensions = "extension" in str(dtype)  # no cast of Arrow takes them
        columns.append(retyped(whole, dtype) if has_extensions else whole.cast(dtype))
    return pa.table(columns, names=table.column_names)


def of_delta(directory: Path, table: pa.Table) -> Reading:
    # Not slices: deltalake ends the process at some of them.
    for part in (table.take(list(range(CUT))), table.take(list(range(CUT, ROWS)))):
        write_deltalake(directory / "t", part, mode="append")
    spec = DatasetSpec("t", directory / "t", format="delta", target_shard_bytes=1)
    return spec, DeltaTable(directory / "t").to_pyarrow_table()


def of_iceberg(directory: Path, table: pa.Table) -> Reading:
    with opened_catalog(directory) as catalog:
        made = catalog.create_table("ns.t", schema=table.schema)
        for part in (table.slice(0, CUT), table.slice(CUT)):
            made.append(part)
        spec = DatasetSpec("t", made.metadata_location, format="iceberg", target_shard_bytes=1)
        return spec, made.scan().to_arrow()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("write", "leaves"), [(of_delta, DELTA), (of_iceberg, ICEBERG)])
def test_a_lake_table_is_what_its_library_reads(
    tmp_path: Path,
    write: Callable[[Path, pa.Table], Reading],
    leaves: Collection[pa.DataType],
    seed: int,
    depth: int,
) -> None:
    spec, wanted = write(tmp_path, table_of(seed, depth, leaves))

    found = load_here(spec, tmp_path / "cache")

    assert sorted(found.column("row").to_pylist()) == list(range(ROWS))
    check(
        normalized(values_in(found, np.argsort(found.column("row")))),
        normalized(wanted.sort_by("row")),
    )


# Of PostgreSQL: type -> the Arrow type that it has here. Others are in the guide.
POSTGRES: dict[str, pa.DataType] = {
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "boolean": pa.bool_(),
    "text": pa.string(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "integer[]": pa.list_(pa.int32()),
    "text[]": pa.list_(pa.string()),
    "timestamptz[]": pa.list_(pa.timestamp("us", "UTC")),
    "numeric(9, 2)": pa.decimal128(9, 2),
    "numeric(38, 10)": pa.decimal128(38, 10),
    "numeric(76, 30)": pa.decimal256(76, 30),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_postgres_table_is_what_was_put_into_it(
    tmp_path: Path,
    postgres_server: PostgresServer,  # noqa: F811
    database: str,  # noqa: F811
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    fields = [pa.field("row", pa.int64())]
    fields += [pa.field(f"c{number}", dtype) for number, dtype in enumerate(POSTGRES.values())]
    columns = [pa.array(range(ROWS)), *(without_nul(field, rng) for field in fields[1:])]
    table = pa.table(columns, schema=pa.schema(fields))
    types = ", ".join(f"c{number} {name}" for number, name in enumerate(POSTGRES))
    postgres_server.run(database, f"CREATE TABLE t (row bigint, {types})")
    with postgres_server.connect(database) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest("t", table, mode="append")
    spec = DatasetSpec(
        "t",
        postgres_server.uri(database, table="t"),
        format="postgres",
        storage_options={"password": PASSWORD},
    )

    found = load_here(spec, tmp_path / "cache")

    check(normalized(values_in(found, np.argsort(found.column("row")))), normalized(table))


def without_nul(field: pa.Field, rng: np.random.Generator) -> pa.Array:
    """Values that PostgreSQL has: its texts have no NUL."""
    values = arrow_values.array_of(field, ROWS, rng)
    if "string" not in str(field.type):
        return values
    return pa.array(
        [
            [text and text.replace("\0", "") for text in value] if isinstance(value, list)
            else value and value.replace("\0", "")
            for value in values.to_pylist()
        ],
        field.type,
    )  # fmt: skip
