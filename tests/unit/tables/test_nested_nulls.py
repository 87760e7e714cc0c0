"""Fields of null structs, lists and maps are null, for each writer and each question."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from cache_protocol.datasets.dataset_spec import DatasetSpec
from tests.iceberg_tables import opened_catalog
from tests.load_here import load_here

ROWS = 240  # in three row groups or batches
Row = dict[str, Any]


def struct(mask: pa.Array | None = None, **fields: pa.Array) -> pa.StructArray:
    """Has values also under its nulls. Fields without nulls are required, as Spark writes them."""
    named = [pa.field(name, a.type, nullable=a.null_count > 0) for name, a in fields.items()]
    return pa.StructArray.from_arrays(list(fields.values()), fields=named, mask=mask)


def nested_table() -> pa.Table:
    """Nulls at every level, with values under them."""

    def every(step: int, offset: int = 0) -> pa.Array:
        return pa.array([(row + offset) % step == 0 for row in range(ROWS)])

    numbers = pa.array(range(1, ROWS + 1), pa.int32())
    starts = pa.array(range(ROWS + 1), pa.int32())
    box = struct(every(5), y=numbers.cast(pa.int64()))
    point = struct(every(3, 1), z=numbers, box=box, required=struct(y=numbers))
    return pa.table(
        {
            "id": starts[:-1].cast(pa.int64()),
            "s": struct(
                every(3),
                zip=numbers,
                name=pa.array([f"name {row}" for row in range(ROWS)]),
                tags=pa.ListArray.from_arrays(starts, numbers),
                maybe=pa.ListArray.from_arrays(starts, numbers, mask=every(2)),
                box=box,
                required=struct(y=numbers, box=box),
            ),
            "l": pa.ListArray.from_arrays(starts, point, mask=every(5, 2)),
            "m": pa.MapArray.from_arrays(starts, ["k"] * ROWS, point, mask=every(4, 1)),
        }
    )


def optional(schema: pa.Schema) -> pa.Schema:
    """The same columns, none of them required."""

    def loose(dtype: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(dtype):
            return pa.struct([(field.name, loose(field.type)) for field in dtype])
        if pa.types.is_map(dtype):
            return pa.map_(dtype.key_type, loose(dtype.item_type))
        return pa.list_(loose(dtype.value_type)) if pa.types.is_list(dtype) else dtype

    return pa.schema([(field.name, loose(field.type)) for field in schema])


# -- writers ---------------------------------------------------------------------------------------


def write_parquet(table: pa.Table, folder: Path) -> str:
    pq.write_table(table, folder / "a.parquet", row_group_size=ROWS // 3)
    return str(folder)


def write_optional_parquet(table: pa.Table, folder: Path) -> str:
    return write_parquet(table.cast(optional(table.schema)), folder)


def write_parts(table: pa.Table, folder: Path) -> str:
    """Some parts with required fields, some without, in folders of Hive."""
    (folder / "part=1").mkdir()
    for index, rows in enumerate((table[:80], table[80:160], table[160:])):
        part = rows.cast(optional(table.schema)) if index == 1 else rows
        pq.write_table(part, folder / "part=1" / f"{index}.parquet")
    return str(folder)


def write_parquet_for_arrow(table: pa.Table, folder: Path) -> str:
    """With a column that only Arrow reads."""
    flags = pa.array([True, False] * (ROWS // 2)).dictionary_encode()
    return write_parquet(table.append_column("flag", flags), folder)


def write_arrow(table: pa.Table, folder: Path) -> str:
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, ROWS // 3)
    return str(folder)


def write_stream(table: pa.Table, folder: Path) -> str:
    """As Hugging Face does."""
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, ROWS // 3)
    return str(folder)


def write_json(table: pa.Table, folder: Path) -> str:
    for name, rows in (("a", table[:120]), ("b", table[120:])):
        lines = map(json.dumps, rows.select(["id", "s"]).to_pylist())
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)


def write_json_for_python(table: pa.Table, folder: Path) -> str:
    """With numbers that only Python reads as integers."""
    write_json(table, folder)
    second = folder / "b.jsonl"
    second.write_text(second.read_text().replace('"id": 239,', '"id": 239.0,'))
    return str(folder)


def write_delta(table: pa.Table, folder: Path) -> str:
    write_deltalake(folder, table)
    return str(folder)


def write_iceberg(table: pa.Table, folder: Path) -> str:
    with opened_catalog(folder) as catalog:
        created = catalog.create_table("ns.t", table.schema)
        pq.write_table(table, folder / "a.parquet")  # pyiceberg would write values for null lists
        created.add_files([f"file://{folder}/a.parquet"])
        return str(created.metadata_location)


WRITERS = {
    function.__name__.removeprefix("write_"): function
    for function in (
        *(write_parquet, write_optional_parquet, write_parts, write_parquet_for_arrow),
        *(write_arrow, write_stream, write_json, write_json_for_python, write_delta, write_iceberg),
    )
}


# -- questions -------------------------------------------------------------------------------------


def at(row: Row, *path: str | int) -> Any:
    """The value at a path, by Python: null below a null."""
    value: Any = row
    for step in path:
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            value = dict(value)
        value = None if value is None else value[step]
    return value


PATHS: dict[str, tuple[str | int, ...]] = {
    "s['zip']": ("s", "zip"),
    "s['name']": ("s", "name"),
    "s['tags']": ("s", "tags"),
    "s['tags'][1]": ("s", "tags", 0),
    "s['maybe']": ("s", "maybe"),
    "s['box']['y']": ("s", "box", "y"),
    "s['required']['y']": ("s", "required", "y"),
    "s['required']['box']['y']": ("s", "required", "box", "y"),
    "l[1]['z']": ("l", 0, "z"),
    "l[1]['box']['y']": ("l", 0, "box", "y"),
    "l[1]['required']['y']": ("l", 0, "required", "y"),
    "m['k']['z']": ("m", "k", "z"),
    "m['k']['box']['y']": ("m", "k", "box", "y"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_under_a_null_is_null(tmp_path: Path, writer: str) -> None:
    table = nested_table()
    rows = table.to_pylist()
    (tmp_path / "table").mkdir()
    source = WRITERS[writer](table, tmp_path / "table")
    format = {"delta": "delta", "iceberg": "iceberg"}.get(writer)
    has_lists = "json" not in writer
    paths = {sql: path for sql, path in PATHS.items() if has_lists or path[0] == "s"}
    values = {sql: [at(row, *path) for row in rows] for sql, path in paths.items()}

    def found(sql: str) -> list[Row]:
        spec = DatasetSpec("t", source, sql=sql, format=format, allow_unordered=True)
        return load_here(spec, tmp_path / "cache").to_pylist()

    def listed(sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in found(sql)]

    # Fields: as texts, because a null among stored numbers is NaN.
    texts = {sql: f"CAST({sql} AS string)" for sql in paths}
    is_list = {sql: any(isinstance(v, list) for v in values[sql]) for sql in paths}
    fields = ", ".join(f'{sql if is_list[sql] else texts[sql]} AS "{sql}"' for sql in paths)
    for row, got in enumerate(found(f"SELECT {fields} FROM source")):
        wanted = {sql: values[sql][row] for sql in paths}
        assert {sql: v if v is None or is_list[sql] else str(v) for sql, v in wanted.items()} == got
    # Filters, and what replaces nulls.
    for sql in list(paths)[::3]:
        kept = [(row["id"],) for row, value in zip(rows, values[sql], strict=True) if value is None]
        assert listed(f"SELECT id FROM source WHERE {sql} IS NULL") == kept, sql
    numbers = values["s['box']['y']"]
    replaced = [(0 if number is None else number,) for number in numbers]
    assert listed("SELECT COALESCE(s['box']['y'], 0) AS y FROM source") == replaced
    large = [(row["id"],) for row, y in zip(rows, numbers, strict=True) if y is not None and y > 9]
    assert listed("SELECT id FROM source WHERE s['box']['y'] > 9 AND id < 999") == large
    # Aggregates, groups, sorts, joins, whole structs and unnested ones.
    zips = [value for value in values["s['zip']"] if value is not None]
    total = "SELECT sum(s['zip']) AS s, count(s['zip']) AS n, count(s) AS m FROM source"
    assert listed(total) == [(sum(zips), len(zips), len(zips))]
    groups = "SELECT CAST(s['zip'] AS string) AS z, count(*) AS n FROM source GROUP BY s['zip']"
    assert Counter(listed(groups)) == Counter(
        [(str(z), 1) for z in zips] + [(None, ROWS - len(zips))]
    )
    joined = "SELECT a.id FROM source a JOIN source b ON a.s['zip'] = b.s['zip']"
    assert len(listed(joined)) == len(zips)
    last = "SELECT id FROM source ORDER BY s['zip'] DESC NULLS LAST, id LIMIT 1"
    assert listed(last) == [(ROWS - 1 - rows[-1::-1].index(next(r for r in rows[::-1] if r["s"])),)]
    whole = "SELECT t.x['box']['y'] IS NULL AS y FROM (SELECT s AS x FROM source) t"
    assert listed(whole) == [(int(number is None),) for number in numbers]
    unnested = "SELECT z FROM (SELECT unnest(s) FROM source) AS t(z, name, tags, maybe, box, r)"
    assert len(listed(f"{unnested} WHERE z IS NOT NULL")) == len(zips)
    if has_lists:
        points = [point for row in rows for point in row["l"] or []]
        zs = [(None if point is None else str(point["z"]),) for point in points]
        sql = "SELECT CAST(p['z'] AS string) AS z FROM (SELECT unnest(l) AS p FROM source)"
        assert listed(sql) == zs
        maps = "SELECT unnest(map_values(m))['z'] AS z FROM source"
        in_maps = [point for row in rows for _, point in row["m"] or []]
        assert sum(point is not None for point in in_maps) == len(
            listed(f"SELECT z FROM ({maps}) WHERE z IS NOT NULL")
        )


def test_the_default_of_a_field_in_a_null_struct_is_null(tmp_path: Path) -> None:
    rows = pa.table({"id": [1, 2, 3], "s": [{"a": 1}, None, {"a": 3}]})
    path, metadata = tmp_path / "a.parquet", tmp_path / "v3.metadata.json"
    pq.write_table(rows, path)
    with opened_catalog(tmp_path) as catalog:
        created = catalog.create_table("ns.t", rows.schema)
        created.add_files([f"file://{path}"])
        written = json.loads(Path(created.metadata_location.removeprefix("file://")).read_text())
    (schema,) = written["schemas"]
    b = {"id": 9, "name": "b", "type": "long", "required": False, "initial-default": 7}
    schema["fields"][1]["type"]["fields"].append(b)
    metadata.write_text(json.dumps({**written, "format-version": 3, "next-row-id": 3}))
    sql = "SELECT id, s['b'] AS b FROM source WHERE s['b'] IS NOT NULL"

    found = load_here(DatasetSpec("t", metadata, sql=sql), tmp_path / "cache")

    assert found.to_pylist() == [{"id": 1, "b": 7}, {"id": 3, "b": 7}]
