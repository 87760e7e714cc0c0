"""The types of computed columns, before a row is read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_server.sql.planned_types import is_alike, other_types
from cache_server.sql.queries import check_query
from cache_server.sql.row_queries import check_row_query, run_row_query
from tests.load_here import load_here

SCHEMA = pa.schema(
    {
        "f32": pa.float32(),
        "f64": pa.float64(),
        "i8": pa.int8(),
        "i64": pa.int64(),
        "price": pa.decimal128(9, 2),
        "ms": pa.timestamp("ms"),
        "ns": pa.timestamp("ns"),
    }
)
_BEYOND_F32 = 16_777_217.0


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ("CASE WHEN f64 IS NULL THEN CAST(0 AS FLOAT) ELSE f64 END", pa.float64()),
        ("CASE WHEN f64 IS NULL THEN 0 ELSE f64 END", pa.float64()),
        ("CASE WHEN f32 IS NULL THEN 0 ELSE f32 END", pa.float32()),
        ("CASE WHEN i8 IS NULL THEN i8 ELSE i64 END", pa.int64()),
        ("CASE WHEN i8 > 1 THEN 1 ELSE price END", pa.decimal128(22, 2)),
        ("CASE WHEN i8 > 1 THEN ms ELSE ns END", pa.timestamp("ns")),
        ("make_array(CASE WHEN f64 IS NULL THEN 0 ELSE f64 END)", pa.list_(pa.float64())),
        ("sum(CASE WHEN f64 IS NULL THEN 0 ELSE f64 END)", pa.float64()),
        ("coalesce(f32, f64)", pa.float64()),
        ("greatest(i8, i64)", pa.int64()),
    ],
)
def test_the_type_of_a_column_is_that_of_all_its_values(column: str, dtype: pa.DataType) -> None:
    query = check_query(f"SELECT {column} AS x FROM source", {"source": SCHEMA})

    assert query.schema.field("x").type == dtype


@pytest.mark.parametrize("first", ["f32", "f64", "1", "i8"])
def test_a_union_has_the_widest_type_of_its_queries(first: str) -> None:
    sql = f"SELECT {first} AS x FROM source UNION ALL SELECT f64 FROM source"

    query = check_query(sql, {"source": SCHEMA}, allow_unordered=True)

    assert query.schema.field("x").type == pa.float64()


def test_a_computed_column_loads_without_a_loss(tmp_path: Path) -> None:
    pq.write_table(pa.table({"f": [0.1, None, _BEYOND_F32]}), tmp_path / "a.parquet")
    sql = (
        "SELECT CASE WHEN f IS NULL THEN CAST(0 AS FLOAT) ELSE f END AS a, "
        "CASE WHEN f IS NULL THEN 0 ELSE f END AS b FROM source"
    )

    loaded = load_here(DatasetSpec("t", str(tmp_path), sql=sql), tmp_path / "cache")

    assert loaded.to_pydict() == {"a": [0.1, 0.0, _BEYOND_F32], "b": [0.1, 0.0, _BEYOND_F32]}


def test_an_expression_has_the_type_of_all_its_values() -> None:
    rows = pa.record_batch({"f": [0.1, None, _BEYOND_F32]})
    query = check_row_query("CASE WHEN f IS NULL THEN 0 ELSE f END", (), rows.schema)

    assert [v for a in run_row_query(query, [rows]) for v in a.to_pylist()] == [
        0.1,
        0.0,
        _BEYOND_F32,
    ]


def test_rows_of_other_types_than_planned_are_named_with_both_types() -> None:
    planned = pa.schema({"x": pa.float32(), "y": pa.int64()})

    problem = other_types(pa.schema({"y": pa.int64(), "x": pa.float64()}), planned)

    assert problem == (
        "column 'x' comes as double, but the query was planned with float: cast it in the sql to "
        "the type that you want"
    )


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (pa.dictionary(pa.int8(), pa.string()), pa.string_view()),
        (pa.large_binary(), pa.binary_view()),
        (pa.list_(pa.field("element", pa.int8(), nullable=False)), pa.large_list(pa.int8())),
        (pa.list_(pa.dictionary(pa.int8(), pa.int16())), pa.list_(pa.int16())),
        (
            pa.struct([pa.field("a", pa.large_string(), nullable=False)]),
            pa.struct({"a": pa.string()}),
        ),
        (pa.map_(pa.large_string(), pa.int8()), pa.map_(pa.string(), pa.int8())),
        (pa.run_end_encoded(pa.int32(), pa.float32()), pa.float32()),
        (pa.list_(pa.large_string(), 2), pa.list_(pa.string(), 2)),
    ],
)
def test_an_encoding_is_no_other_type(dtype: pa.DataType, other: pa.DataType) -> None:
    assert is_alike(dtype, other)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (pa.float32(), pa.float64()),
        (pa.int8(), pa.uint8()),
        (pa.string(), pa.binary()),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.timestamp("ms"), pa.timestamp("ms", "UTC")),
        (pa.decimal128(9, 2), pa.decimal128(10, 2)),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8())),
        (pa.struct({"a": pa.int8()}), pa.struct({"b": pa.int8()})),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int16())),
    ],
)
def test_other_values_are_another_type(dtype: pa.DataType, other: pa.DataType) -> None:
    assert not is_alike(dtype, other)
