import datetime
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_server import tables
from cache_server.source.pinned import PinnedTable, SourceFile, Split
from cache_server.sql.loader import infer_json, infer_schema, read_split, read_together
from cache_server.sql.quoting import identifier
from tests.query_source import (
    SCHEMA,
    all_at_once,
    check,
    local,
    rows_of,
    table_of,
    whole,
    write_parquet,
)

# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("a b.parquet", "a#1.parquet", "a%20b.parquet", "ünï.parquet", "a?.parquet"),
        *("a[1].parquet", "a*.parquet", "{a}.parquet", "_a.parquet", ".a.parquet"),
        *("k=v.parquet", "a:b.parquet", "a+b&c.parquet", "a\\b.parquet", "table", "A.PARQUET"),
    ],
)
def test_a_file_of_any_name_is_read_and_no_other(tmp_path: Path, name: str) -> None:
    for other in ("a1.parquet", "ab.parquet", "a b c.parquet"):
        write_parquet(tmp_path / other, table_of(1))
    split = write_parquet(tmp_path / name, table_of(7))

    assert [row["a"] for row in rows_of(split, "SELECT a FROM source")] == list(range(7))


NAN = float("nan")
HALF_NAN = pa.table(
    {
        "k": range(8),
        "x": pa.array([0, NAN, 0, 0, 200, NAN, None, 5], pa.float64()),
        "y": pa.array([NAN, 0, 0, 0, 5, 5, NAN, 5], pa.float32()).dictionary_encode(),
    }
)


@pytest.mark.parametrize(
    "condition",
    [
        *("x <> 0", "x > 100", "x >= 'NaN'", "x = 'NaN'", "NOT x <= 100", "x NOT IN (0, 200)"),
        *("x IS DISTINCT FROM 0", "x NOT BETWEEN 0 AND 100", "y > 1 AND k < 9", "g > 1", "k > 3"),
    ],
)
def test_a_filter_finds_nan_in_any_row_group(tmp_path: Path, condition: str) -> None:
    pq.write_table(HALF_NAN, tmp_path / "a.parquet", row_group_size=4, write_page_index=True)
    pq.write_table(HALF_NAN, tmp_path / "b.parquet", row_group_size=1)
    sql = f"SELECT k FROM (SELECT *, CAST(x AS float) AS g FROM source) WHERE {condition}"
    table = PinnedTable("source", "parquet", HALF_NAN.schema)
    splits = [whole(tmp_path / name) for name in ("a.parquet", "b.parquet")]

    wanted = all_at_once(HALF_NAN, sql)

    assert [rows_of(split, sql, HALF_NAN.schema) for split in splits] == [wanted, wanted]
    together = read_together([local(split) for split in splits], sql, table)
    assert [row for batch in together for row in batch.to_pylist()] == [*wanted, *wanted]


def write_bounds_by_signed_bytes(path: Path) -> None:
    """Texts with the bounds that Parquet's Java library wrote until its version 1.9."""
    pq.write_table(
        pa.table({"text": ["aaaa", "éé", "bbbb"]}), path, use_dictionary=False, store_schema=False
    )
    least, last, most = b"\x04aaaa", b"\x04bbbb", b"\x04" + "éé".encode()
    new = b"\x36\x00\x28" + most + b"\x18" + least + b"\x11\x11"
    old = b"\x18" + last + b"\x18" + most + b"\x16\x00\x41\x11"  # in the fields of that time
    data = path.read_bytes()
    assert new in data
    path.write_bytes(data.replace(new, old))


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [("text > 'c'", ["éé"]), ("text = 'aaaa'", ["aaaa"]), ("text LIKE 'é%'", ["éé"])],
)
def test_bounds_of_texts_by_signed_bytes_are_not_believed(
    tmp_path: Path, condition: str, wanted: list[str]
) -> None:
    write_bounds_by_signed_bytes(tmp_path / "a.parquet")
    schema = pa.schema([("text", pa.string())])

    rows = rows_of(
        whole(tmp_path / "a.parquet"), f"SELECT text FROM source WHERE {condition}", schema
    )

    assert [row["text"] for row in rows] == wanted


@pytest.mark.parametrize("dtype", [pa.uint32(), pa.uint64()])
@pytest.mark.parametrize("writer", [b"", b"parquet-mr version 1.8.1"])  # pyarrow hides its bounds
@pytest.mark.parametrize(
    ("condition", "wanted"),
    [("x > 2000000000", [3_000_000_000]), ("x = 1", [1]), ("x BETWEEN 1 AND 5", [1, 5])],
)
def test_bounds_of_unsigned_integers_in_signed_order_are_not_believed(
    tmp_path: Path, condition: str, wanted: list[int], dtype: pa.DataType, writer: bytes
) -> None:
    # In signed order, in which old writers kept bounds, the first is the least.
    most = 3_000_000_000 if dtype == pa.uint32() else 2**63 + 3
    values = [1, most, 5]
    pq.write_table(pa.table({"x": pa.array(values, dtype)}), tmp_path / "a.parquet")
    one, five, last = (
        bytes([dtype.byte_width]) + value.to_bytes(dtype.byte_width, "little")
        for value in (1, 5, most)
    )
    new = b"\x36\x00\x28" + last + b"\x18" + one + b"\x11\x11"
    old = b"\x18" + five + b"\x18" + last  # the fields max and min, deprecated
    data = (tmp_path / "a.parquet").read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8]
    assert new in footer
    footer = footer.replace(new, old)
    if writer:
        name = pq.read_metadata(tmp_path / "a.parquet").created_by.encode()
        footer = footer.replace(name, writer.ljust(len(name)))
    (tmp_path / "a.parquet").write_bytes(
        data[:start] + footer + len(footer).to_bytes(4, "little") + data[-4:]
    )

    rows = rows_of(
        whole(tmp_path / "a.parquet"),
        f"SELECT x FROM source WHERE {condition}",
        pa.schema([("x", dtype)]),
    )

    expected = [most if value == 3_000_000_000 else value for value in wanted]
    assert [row["x"] for row in rows] == expected


def test_a_file_in_a_hive_directory_has_its_own_columns_only(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    split = write_parquet(tmp_path / "year=2024" / "a.parquet", table_of(1).select(["a"]))

    assert rows_of(split, "SELECT * FROM source", pa.schema([SCHEMA.field("a")])) == [{"a": 0}]


@settings(max_examples=15)
@given(
    sql=st.sampled_from(
        [
            "SELECT a FROM source WHERE a % 7 <> 3",
            "SELECT a, text FROM source WHERE b > 100 OR text LIKE '%9'",
            "SELECT a, unnest(tags) AS tag FROM source",
            "SELECT a FROM source WHERE a > 990",
            "SELECT a FROM source WHERE a < 0",
            "SELECT a FROM source WHERE 1 = 0",
            "SELECT a FROM source WHERE NULL",
            "SELECT unnest(tags) AS tag FROM source WHERE false",
            "SELECT 'k' AS k FROM source WHERE text = 'row 500'",
        ]
    ),
    parts=st.integers(1, 6),
    group=st.sampled_from([1000, 130]),
)
def test_the_parts_of_a_file_give_the_answer_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, sql: str, parts: int, group: int
) -> None:
    table = table_of(1000)
    path = tmp_path_factory.getbasetemp() / "parts.parquet"
    pq.write_table(table, path, row_group_size=group)
    file = whole(path).file

    rows = [
        row
        for part in range(parts)
        for row in rows_of(Split(file, part, parts, None, 0), check(sql, SCHEMA).sql)
    ]

    assert rows == all_at_once(table, sql)


def test_the_rows_of_a_large_file_come_in_source_order(tmp_path: Path) -> None:
    table = pa.table({"a": range(200_000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20_000)
    split = whole(tmp_path / "a.parquet")

    batches = read_split(
        local(split),
        "SELECT a FROM source WHERE a % 3 = 0",
        PinnedTable("source", "parquet", table.schema),
    )
    found = np.concatenate([batch.column(0).to_numpy() for batch in batches])

    assert np.array_equal(found, np.arange(0, 200_000, 3))


def test_damaged_pages_name_the_file_and_the_split(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, table_of(10_000))
    damaged = bytearray(path.read_bytes())
    damaged[100:2000] = bytes(1900)
    path.write_bytes(damaged)

    with pytest.raises(LoadError) as caught:
        rows_of(Split(whole(path).file, 0, 2, None, 0), "SELECT * FROM source")
    assert f"cannot load {path} (split 1 of 2): " in str(caught.value)


def test_an_error_of_a_row_names_the_file(tmp_path: Path) -> None:
    split = write_parquet(tmp_path / "a.parquet")

    with pytest.raises(LoadError, match=r"a\.parquet: .*[Dd]ivide by zero"):
        rows_of(split, "SELECT 1 / (a - 50) AS x FROM source")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("format", ["parquet", "arrow", "csv", "json"])
def test_a_vanished_file_is_named(tmp_path: Path, format: str, parts: int) -> None:
    split = Split(SourceFile(str(tmp_path / f"a.{format}"), 1000, 0), 0, parts, None, 0)

    with pytest.raises(LoadError, match="the file is gone") as caught:
        list(
            read_split(
                local(split, format),
                "SELECT a FROM source WHERE a > 1",
                PinnedTable("source", format, SCHEMA),
            )
        )
    assert str(tmp_path / f"a.{format}") in str(caught.value)


# -- schemas of files without a footer -------------------------------------------------------------


def schema_of(path: Path, format: str) -> pa.Schema:
    """By the first 1000 rows of CSV, or bytes of JSON."""
    if format == "json":
        return infer_json(path, str(path), max_bytes=1000)
    return infer_schema(path, format, str(path))


@pytest.mark.parametrize(
    ("format", "text", "schema"),
    [
        ("csv", "n,X,s\n1,0.5,a\n2,,b\n", [("n", "int64"), ("X", "double"), ("s", "string")]),
        ("json", '{"n": 1, "s": "a"}\n{"s": "b"}\n', [("n", "int64"), ("s", "string")]),
        ("json", '{"l": [1.5], "b": true}', [("l", "list<item: double>"), ("b", "bool")]),
    ],
)
def test_the_schema_is_inferred(
    tmp_path: Path, format: str, text: str, schema: list[tuple[str, str]]
) -> None:
    path = tmp_path / f"a.{format}"
    path.write_text(text)

    found = schema_of(path, format)

    assert sorted((field.name, str(field.type)) for field in found) == sorted(schema)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("csv", "a,b\n1,2\n3\n"),
        ("json", '{"a": 1}\n{"a":\n'),
        ("json", '[{"a": 1}]'),
        ("arrow", "not arrow at all"),
        ("parquet", "not parquet at all"),
    ],
)
def test_a_file_that_is_not_of_its_format_is_named(tmp_path: Path, format: str, text: str) -> None:
    path = tmp_path / f"a.{format}"
    path.write_text(text)

    with pytest.raises(LoadError) as caught:
        schema_of(path, format)
    what = f"load {path}" if format == "json" else f"read {path} as {format}"
    assert f"cannot {what}: " in str(caught.value)
    assert "bug in DataFusion" not in str(caught.value)


NAMES = {
    "column": pa.schema([("abcdefgh", pa.int8())]),
    "field": pa.schema([("a", pa.list_(pa.struct([("abcdefgh", pa.int8())])))]),
    "time zone": pa.schema([("a", pa.timestamp("s", "abcdefgh"))]),
}


@pytest.mark.parametrize(
    ("bad", "reason"), [(b"ab\xff\xfeefgh", "byte 0xff"), (b"ab\0\0efgh", "has a NUL character")]
)
@pytest.mark.parametrize("kind", NAMES)
def test_an_arrow_file_with_a_name_that_no_query_can_use_is_refused(
    tmp_path: Path, kind: str, bad: bytes, reason: str
) -> None:
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, NAMES[kind]).close()
    path = tmp_path / "a.arrow"
    path.write_bytes(sink.getvalue().to_pybytes().replace(b"abcdefgh", bad))

    with pytest.raises(LoadError, match=f"cannot read {path} as arrow: .*{reason}"):
        infer_schema(path, "arrow", str(path))


@pytest.mark.parametrize("open_writer", [pa.ipc.new_file, pa.ipc.new_stream])
def test_an_arrow_file_with_two_columns_of_one_name_is_refused_by_name(
    tmp_path: Path, open_writer: Callable[..., Any]
) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table([[1], [2], [3]], names=["a", "b", "a"])
    with open_writer(str(path), table.schema) as writer:
        writer.write_table(table)

    with pytest.raises(LoadError, match="several columns are named 'a'") as caught:
        infer_schema(path, "arrow", str(path))
    assert f"cannot read {path} as arrow: " in str(caught.value)


@pytest.mark.parametrize(
    ("format", "text"),
    [("csv", "a\n" + "1\n" * 1500 + "x\n"), ("json", '{"a": 1}\n' * 1500 + '{"a": "x"}\n')],
)
def test_a_value_that_the_sample_did_not_foresee_fails_the_split(
    tmp_path: Path, format: str, text: str
) -> None:
    path = tmp_path / f"a.{format}"
    path.write_text(text)
    schema = schema_of(path, format)

    with pytest.raises(LoadError, match=r"cannot load .*x") as caught:
        list(
            read_split(
                local(whole(path), format),
                "SELECT * FROM source",
                PinnedTable("source", format, schema),
            )
        )
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("first", "later", "value"),
    [
        ("1", "1.5", "1.5"),
        ("1", "-0.25", "-0.25"),
        ("1", "25e-1", "2.5"),
        ("[1, null]", "[3, 1.5]", "1.5"),
        ('{"deep": [1]}', '{"deep": [2, 2.5]}', "2.5"),
    ],
)
def test_a_fraction_is_never_cut_to_the_integer_that_the_sample_foresaw(
    tmp_path: Path, parts: int, first: str, later: str, value: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": {first}, "b": 0.5}}\n' * 1500 + f'{{"a": {later}, "b": 0.5}}\n')
    table = PinnedTable("source", "json", infer_json(path, str(path), max_bytes=1000))
    splits = [replace(whole(path), part=part, parts=parts) for part in range(parts)]

    for split in splits[:-1]:
        assert list(read_split(local(split, "json"), "SELECT * FROM source", table))
    with pytest.raises(LoadError) as caught:
        list(read_split(local(splits[-1], "json"), "SELECT * FROM source", table))

    assert str(caught.value).startswith(
        f"cannot load {splits[-1]}: column 'a' holds {value}, but it is of integers by the first"
    )


@pytest.mark.parametrize("value", ["-9223372036854775809", "-9223372036854776832"])
@pytest.mark.parametrize("later", ["{}", "[3, {}]", '{{"deep": [{}]}}', "{}.0"])
def test_an_integer_below_those_of_64_bits_is_not_read_as_the_least_of_them(
    tmp_path: Path, later: str, value: str
) -> None:
    path = tmp_path / "a.json"
    first, last = later.format(1).replace("1.0", "1"), later.format(value)
    path.write_text(f'{{"a": {first}, "s": "x"}}\n' * 1500 + f'{{"a": {last}, "s": "x"}}\n')
    table = PinnedTable("source", "json", infer_json(path, str(path), max_bytes=1000))

    with pytest.raises(LoadError) as caught:
        list(read_split(local(whole(path), "json"), "SELECT * FROM source", table))

    assert str(caught.value).startswith(f"cannot load {path}: column 'a' holds {value}")


def test_the_least_integer_and_texts_and_floats_below_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    least, below = -(2**63), -(2**63) - 1
    first = '{"a": 1, "s": "x", "f": 0.5}\n'
    path.write_text(first * 1500 + f'{{"a": {least}, "s": "{below}", "f": {below}}}\n')
    table = PinnedTable("source", "json", infer_json(path, str(path), max_bytes=1000))

    batches = list(read_split(local(whole(path), "json"), "SELECT a, s, f FROM source", table))

    assert batches[-1].to_pylist()[-1] == {"a": least, "s": str(below), "f": float(least)}


@pytest.mark.parametrize(
    "later", ["2", "2.0", "1e3", "-10E+2", "null", "9223372036854775807", "9007199254740993"]
)
def test_an_integer_is_read_as_such_however_it_is_written(tmp_path: Path, later: str) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1, "s": "1.5"}\n' * 1500 + f'{{"a": {later}, "s": "1.5"}}\n')
    table = PinnedTable("source", "json", infer_json(path, str(path), max_bytes=1000))

    batches = list(read_split(local(whole(path), "json"), "SELECT a FROM source", table))

    assert batches[-1].column(0)[-1].as_py() == json.loads(later)


def test_a_fraction_in_a_column_that_is_not_read_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1, "b": 1}\n' * 1500 + '{"a": 1.5, "b": 2}\n')
    schema = infer_json(path, str(path), max_bytes=1000)
    table = PinnedTable("source", "json", schema, columns=("b",))

    batches = list(read_split(local(whole(path), "json"), "SELECT b FROM source", table))

    assert sum(batch.num_rows for batch in batches) == 1501


@pytest.fixture(scope="module")
def many_lines(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[int, list[str]]]]:
    """A file of more lines than a batch has rows, and the values of ``a`` and ``t`` in it."""
    rows = [(a, [f"{a}-{i}" * 10 for i in range(a % 3)]) for a in range(40_000)]
    path = tmp_path_factory.mktemp("lines") / "a.json"
    path.write_text("".join(f"{json.dumps({'a': a, 't': t, 'b': 1.5})}\n" for a, t in rows))
    return path, rows


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT a, t FROM source WHERE a % 7 = 3", lambda a, t: [{"a": a, "t": t}] * (a % 7 == 3)),
        ("SELECT unnest(t) AS t, a FROM source", lambda a, t: [{"t": x, "a": a} for x in t]),
        ("SELECT 'k' AS k FROM source", lambda a, t: [{"k": "k"}]),
        ("SELECT a FROM source WHERE 1 = 0", lambda a, t: []),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_query_over_json_is_answered_some_rows_at_a_time_in_their_order(
    many_lines: tuple[Path, list[tuple[int, list[str]]]],
    sql: str,
    wanted: Callable[[int, list[str]], list[Any]],
    parts: int,
) -> None:
    path, rows = many_lines
    schema = infer_json(path, str(path), max_bytes=1000)
    columns = tuple(name for name in schema.names if name in re.findall(r"\w+", sql))
    table = PinnedTable("source", "json", schema, columns=columns)
    splits = [replace(whole(path), part=part, parts=parts) for part in range(parts)]

    batches = [b for split in splits for b in read_split(local(split, "json"), sql, table)]

    assert [row for b in batches for row in b.to_pylist()] == [x for r in rows for x in wanted(*r)]
    assert max((b.num_rows for b in batches), default=0) <= 32_768


def csv_with_a_late_value(path: Path, first: str, later: str) -> PinnedTable:
    path.write_text('k,"a ""b"""\n' + f"0,{first}\n" * 1500 + f"1,{later}\n")
    return PinnedTable("source", "csv", infer_schema(path, "csv", str(path)))


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("2024-01-01", "2024-01-01T10:20:30"),
        ("2024-01-01", "2024-01-01 00:00:01"),
        ("2024-01-01", "2024-01-01T00:00:00-05:00"),
        ("2024-01-01", "2024-1-1x"),
        ("2024-01-01", "2024-1-12*"),
        ("2024-01-01T10:20:30", "2024-01-01T10:20:30.5"),
        ("2024-01-01 10:20:30", "2024-01-01 10:20:30.000001Z"),
        ("2024-01-01T10:20:30.123", "2024-01-01T10:20:30.123456"),
        ("2024-01-01T10:20:30.123456", "2024-01-01T10:20:30.123456789"),
        ("2024-01-01T10:20:30.123456789", "2024-01-01T10:20:30.1234567891"),
    ],
)
def test_a_time_is_never_cut_to_what_the_sample_foresaw(
    tmp_path: Path, first: str, later: str
) -> None:
    table = csv_with_a_late_value(tmp_path / "a.csv", first, later)
    split = whole(tmp_path / "a.csv")

    with pytest.raises(LoadError) as caught:
        list(read_split(local(split, "csv"), "SELECT * FROM source", table))

    assert str(caught.value).startswith(
        f"cannot load {split}: column 'a \"b\"' holds {later!r} in row 1501, but it is "
        f"of {table.schema.types[1]} by the first rows"
    )


@pytest.mark.parametrize(
    ("first", "later", "wider"),
    [
        ("2024-01-01", "2024-01-01T10:20:30", '"timestamp[us]"'),
        ("2024-01-01T10:20:30", "2024-01-01T10:20:30.123456789", '"timestamp[ns]"'),
        ("2024-01-01T10:20:30", "2024-01-01T10:20:30.1234567891", "string"),
        ("2024-01-01T10:20:30", "2016-12-31T23:59:60", "string"),
        ("2024-01-01T10:20:30", "soon", "string"),
        *(("1", "1.5", "float64"), ("1", str(2**63), "string"), ("1", "x", "string")),
        *(("true", "maybe", "string"), ("1.5", "it's", "string")),
    ],
)
def test_a_late_value_of_csv_that_does_not_fit_is_read_by_the_type_that_its_refusal_names(
    tmp_path: Path, first: str, later: str, wider: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("k,a\n" + f"0,{first}\n" * 1500 + f"1,{later}\n")
    table = PinnedTable("source", "csv", infer_schema(path, "csv", str(path)))

    with pytest.raises(LoadError) as caught:
        list(read_split(local(whole(path), "csv"), "SELECT * FROM source", table))

    assert f"column 'a' holds {later!r}" in str(caught.value)
    assert f"set types: {{a: {wider}}}" in str(caught.value)
    spec = DatasetSpec("t", path, types={"a": wider.strip('"')})
    table = replace(table, schema=tables.pin(spec.tables[0])[1].schema)
    batches = list(read_split(local(whole(path), "csv"), "SELECT * FROM source", table))
    assert sum(batch.num_rows for batch in batches) == 1501


@pytest.mark.parametrize("sql", ["SELECT 1 AS x FROM source", "SELECT day FROM source"])
def test_a_csv_of_which_no_column_is_read_gives_all_its_rows(tmp_path: Path, sql: str) -> None:
    (path := tmp_path / "day=3" / "a.csv").parent.mkdir()
    path.write_text("a,b\n" + "1,x\n" * 5)
    spec = DatasetSpec("t", tmp_path, sql=sql)
    schema = tables.pin(spec.tables[0])[1].schema
    table = PinnedTable("source", "csv", schema, columns=("day",) if "day" in sql else ())

    batches = list(read_split(local(whole(path), "csv"), sql, table))

    assert pa.Table.from_batches(batches).column(0).to_pylist() == [3 if "day" in sql else 1] * 5


def test_a_value_of_csv_that_does_not_fit_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("k,n\n" + '"x\ny",0\n' * 9000 + "z,bad\n" + "z,0\n" * 9000)
    table = PinnedTable("source", "csv", infer_schema(path, "csv", str(path)))

    with pytest.raises(LoadError, match=f"load {path}: column 'n' holds 'bad' in row 9001, but it"):
        list(read_split(local(whole(path), "csv"), "SELECT n FROM source", table))


@pytest.mark.parametrize("digits", ["", ".123", ".123456", ".123456789"])
@pytest.mark.parametrize("later", ["2016-12-31T23:59:60", "2016-12-31 235960Z"])
def test_a_leap_second_is_not_read_as_another_second(
    tmp_path: Path, digits: str, later: str
) -> None:
    table = csv_with_a_late_value(tmp_path / "a.csv", f"2024-01-01T10:20:30{digits}", later)
    split = whole(tmp_path / "a.csv")

    with pytest.raises(LoadError, match=f"holds '{later}' in row 1501, .*: string}}"):
        list(read_split(local(split, "csv"), "SELECT * FROM source", table))


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("2024-01-01", "2024-01-02"),
        ("2024-01-01", ""),
        ("2024-01-01", "2024-01-02T00:00:00"),
        ("2024-01-01", "2024-01-02 00:00:00.000Z"),
        ("2024-01-01T10:20:30", "2024-01-02"),
        ("2024-01-01T10:20:30", "9999-12-31T10:20:30.000"),
        ("2024-01-01T10:20:30.123456", "2024-01-01T10:20:30.123456000"),
        ("2024-01-01T10:20:30.123456789", "2024-01-01T10:20:30.987654321"),
    ],
)
def test_a_time_that_fits_is_read(tmp_path: Path, first: str, later: str) -> None:
    table = csv_with_a_late_value(tmp_path / "a.csv", first, later)

    batches = list(
        read_split(local(whole(tmp_path / "a.csv"), "csv"), "SELECT * FROM source", table)
    )

    found = batches[-1].column(1)[-1]
    unit = getattr(found.type, "unit", "D")
    wanted = np.datetime64(later.removesuffix("Z"), unit).astype(int) if later else None
    assert found.type == table.schema.types[1]
    assert getattr(found, "value", None) == wanted


def test_a_csv_column_that_is_empty_at_first_is_one_of_texts(tmp_path: Path) -> None:
    table = csv_with_a_late_value(tmp_path / "a.csv", "", "2.5")
    name = table.schema.names[1]
    sql = f"SELECT CAST({identifier(name)} AS double) AS late FROM source WHERE k = 1"

    batches = list(read_split(local(whole(tmp_path / "a.csv"), "csv"), sql, table))

    assert table.schema.field(name).type == pa.string()
    assert [row for batch in batches for row in batch.to_pylist()] == [{"late": 2.5}]


def test_dates_and_times_pass_through_a_query(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    table = pa.table({"day": [day], "at": pa.array([5], pa.timestamp("us", "UTC"))})
    split = write_parquet(tmp_path / "a.parquet", table)

    query = check("SELECT * FROM source WHERE day = DATE '2024-02-29'", table.schema)

    assert query.schema.equals(table.schema)
    assert rows_of(split, query.sql, table.schema) == table.to_pylist()
