"""Leading zeros of CSV: noted once for each column of numbers that loses them."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.source.pinned import GIVEN, PinnedTable
from cache_server.sql.formats import csv_zeros
from cache_server.sql.loader import infer_schema, read_split
from tests.query_source import local, whole

FIRST = "\n".join(["1,0.5,x,2024-01-02"] * 1200)  # more than what the types are found by


def notes_of(path: Path, text: str, *, columns: tuple[str, ...] | None = None) -> list[str]:
    path.write_text(text)
    table = PinnedTable("source", "csv", infer_schema(path, "csv", str(path)), columns=columns)
    names = "*" if columns is None else ", ".join(columns)
    notes: list[str] = []
    for _ in read_split(
        local(whole(path), "csv"), f"SELECT {names} FROM source", table, notes.append
    ):
        pass
    return notes


@pytest.mark.parametrize("before", ["", f"{FIRST}\n"])
def test_each_column_of_numbers_that_loses_zeros_is_noted_once(tmp_path: Path, before: str) -> None:
    row = '"007",01,"0x1, 02",2024-01-03\n08,0.25,03,2024-01-04'
    notes = notes_of(tmp_path / "a.csv", f"zip,part,text,day\n{before}{row}\n")

    assert sorted(notes) == [
        "column 'part' lost leading zeros, because it is of double: set types: {part: string} to "
        "keep them",
        "column 'zip' lost leading zeros, because it is of int64: set types: {zip: string} to keep "
        "them",
    ]


@pytest.mark.parametrize(
    "rows",
    [
        *("1,0.5,x,2024-01-02", "0,0,x01,2024-01-02", '1,0.5,"a,01,b",2024-01-02'),
        *("10,00.5,08:30,2024-01-02", "100,0e1,0x7,2024-01-02", "1,0.5,\n"),
    ],
)
def test_other_zeros_are_not_noted(tmp_path: Path, rows: str) -> None:
    assert notes_of(tmp_path / "a.csv", f"zip,part,text,day\n{rows}\n".replace(",\n", ",,\n")) == []


def test_columns_that_are_not_read_or_whose_type_is_given_are_not_noted(tmp_path: Path) -> None:
    path, text = tmp_path / "a.csv", "zip,n\n007,1\n"
    assert notes_of(path, text, columns=("n",)) == []
    given = pa.field("zip", pa.int32(), metadata={GIVEN: b"spec"})
    notes: list[str] = []
    table = PinnedTable("source", "csv", pa.schema([given, ("n", pa.int64())]))
    for _ in read_split(local(whole(path), "csv"), "SELECT * FROM source", table, notes.append):
        pass
    assert notes == []


@given(
    values=st.lists(st.text('0017.,"\n\rx', max_size=6), max_size=9), block_bytes=st.integers(1, 9)
)
def test_no_value_is_missed_where_blocks_end(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "zeros.csv"
    path.write_text("\n".join(values), newline="")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(csv_zeros, "_BLOCK_BYTES", block_bytes)
        found = csv_zeros.may_have_zeros(path)

    pieces = "\n".join(values)
    for end in '\n\r"':
        pieces = pieces.replace(end, ",")
    assert found == any(
        len(v) > 1 and v[0] == "0" and v.isdigit() and v.isascii() for v in pieces.split(",")
    )


def test_the_remedy_keeps_what_duckdb_keeps(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("zip\n01234\n98765\n")
    schema = pa.schema([pa.field("zip", pa.string(), metadata={GIVEN: b"spec"})])
    table = PinnedTable("source", "csv", schema)
    batches = read_split(local(whole(path), "csv"), "SELECT * FROM source", table)

    truth = duckdb.sql(f"SELECT zip FROM read_csv('{path}', all_varchar=true)").fetchall()
    assert [(row["zip"],) for b in batches for row in b.to_pylist()] == truth
