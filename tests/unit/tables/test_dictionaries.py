"""Columns of dictionaries answer every query as columns of their values do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from tests.load_here import load_here

PART_ROWS = 900
Row = dict[str, Any]


def encoded(values: pa.Array, codes: pa.DataType) -> pa.Array:
    rows = [index % len(values) for index in range(PART_ROWS)]
    return pa.DictionaryArray.from_arrays(pa.array(rows, codes), values)


def part(index: int, num_values: int, codes: pa.DataType) -> pa.Table:
    """Rows whose dictionaries hold other values than those of other parts."""
    first = index * num_values
    names = pa.array([f"value {first + number:04}" for number in range(num_values)])
    numbers = pa.array([first + number + 0.5 for number in range(num_values)])
    name, offsets = encoded(names, codes), pa.array(range(PART_ROWS + 1), pa.int32())
    return pa.table(
        {
            "id": range(index * PART_ROWS, (index + 1) * PART_ROWS),
            "name": name,
            "number": encoded(numbers, codes),
            "large": encoded(names.cast(pa.large_string()), codes),
            "names": pa.ListArray.from_arrays(offsets, name),
            "s": pa.StructArray.from_arrays([name], ["name"]),
        }
    )


# What writes dictionaries: values in each, and codes.
WRITERS = {"pandas category": (100, pa.int8()), "polars Enum": (250, pa.uint8())}


def write_files(parts: list[pa.Table], folder: Path) -> None:
    for index, rows in enumerate(parts):
        pq.write_table(rows, folder / f"{index}.parquet", row_group_size=300)


def write_row_groups(parts: list[pa.Table], folder: Path) -> None:
    with pq.ParquetWriter(folder / "a.parquet", parts[0].schema) as writer:
        for rows in parts:
            writer.write_table(rows)


def write_stream(parts: list[pa.Table], folder: Path) -> None:
    with pa.ipc.new_stream(folder / "a.arrow", parts[0].schema) as writer:
        for rows in parts:
            writer.write_table(rows)


def write_arrow_files(parts: list[pa.Table], folder: Path) -> None:
    for index, rows in enumerate(parts):
        with pa.ipc.new_file(folder / f"{index}.arrow", rows.schema) as writer:
            writer.write_table(rows)


@pytest.mark.parametrize(
    "write",
    [write_files, write_row_groups, write_stream, write_arrow_files],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("writer", WRITERS)
def test_dictionaries_answer_as_their_values_do(tmp_path: Path, writer: str, write: Any) -> None:
    (tmp_path / "table").mkdir()
    parts = [part(index, *WRITERS[writer]) for index in range(3)]
    write(parts, tmp_path / "table")
    rows = [row for table in parts for row in table.to_pylist()]
    columns = "name", "number", "large"

    def found(sql: str) -> list[tuple[Any, ...]]:
        spec = DatasetSpec("t", tmp_path / "table", sql=sql, allow_unordered=True)
        return [tuple(row.values()) for row in load_here(spec, tmp_path / "cache").to_pylist()]

    plain = "SELECT id, name, number, large, names, s['name'] AS s FROM source"
    wanted = [tuple({**row, "s": row["s"]["name"]}.values()) for row in rows]
    assert found(plain) == wanted
    assert found(f"{plain} WHERE id % 3 = 0") == wanted[::3]
    middle = rows[len(rows) // 2]
    for column in columns:
        value = repr(middle[column])
        kept = [(row["id"],) for row in rows if row[column] > middle[column]]
        assert found(f"SELECT id FROM source WHERE {column} > {value}") == kept
        counts = Counter(row[column] for row in rows)
        grouped = f"SELECT {column}, count(*) AS n FROM source GROUP BY {column}"
        assert dict(found(grouped)) == counts
    assert Counter(found("SELECT DISTINCT name FROM source")) == Counter(
        {(name,) for name in (row["name"] for row in rows)}
    )
    in_order = sorted((row["name"], row["id"]) for row in rows)
    assert found("SELECT name, id FROM source ORDER BY name, id") == in_order
    joined = found(
        "SELECT a.id, a.name FROM source a JOIN (SELECT name, min(id) AS id FROM source GROUP BY "
        "name) b ON a.name = b.name AND a.id = b.id"
    )
    assert len(joined) == len(Counter(row["name"] for row in rows))
