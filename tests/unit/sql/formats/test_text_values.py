"""Columns of CSV and JSON whose types a spec gives: exactly what the file says, or a refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.datasets.column_types import parse_type
from cache_protocol.errors import LoadError
from cache_server.source.pinned import GIVEN, PinnedTable
from cache_server.sql.formats.text_values import MisfitError, is_value, read_column, read_value
from cache_server.sql.loader import read_split
from tests.query_source import local, whole

EPOCH = datetime(1970, 1, 1)
BERLIN = "timestamp[us, tz=Europe/Berlin]"


def read_as(texts: list[str | None], name: str) -> list[Any]:
    """Values as Python has them; of times, the number of units."""
    return plain(read_column(pa.array(texts, pa.string()), parse_type(name)))


def plain(values: pa.Array) -> list[Any]:
    if pa.types.is_temporal(values.type):
        is_short = values.type.bit_width == 32
        return list(values.cast(pa.int32() if is_short else pa.int64()).to_pylist())
    return list(values.to_pylist())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("int8", "-128", -128), ("int8", "+7", 7), ("int16", "007", 7), ("int32", "7.0", 7)),
        *(("int64", "1e3", 1000), ("uint64", str(2**64 - 1), 2**64 - 1), ("uint8", "255", 255)),
        *(("float64", "0.1", 0.1), ("float32", "0.1", float(np.float32(0.1)))),
        *(("float64", "-Infinity", -math.inf), ("float32", ".5", 0.5)),
        # Halfway between two float32 and a little more: by way of a float64 it would be 1.
        ("float32", "1.00000005960464477540", float(np.nextafter(np.float32(1), np.float32(2)))),
        *(("decimal32(5, 2)", "1.250", Decimal("1.25")), ("decimal64(9)", "1e3", Decimal(1000))),
        ("decimal128(38, 10)", "1234567890123456789012345678.0123456789", Decimal(
            "1234567890123456789012345678.0123456789")),
        ("decimal256(76, 0)", "9" * 76, Decimal("9" * 76)),
        *(("bool", "true", True), ("bool", "FALSE", False)),
        *(("date32", "2024-02-29", 19_782), ("date32", "2024-2-29", 19_782)),
        *(("date32", "2024-02-29T00:00:00.0Z", 19_782), ("date64", "1970-01-02", 86_400_000)),
        *(("time32[s]", "23:59:59", 86_399), ("time32[ms]", "00:00:00.5", 500)),
        *(("time64[us]", "10:20", 37_200_000_000), ("time64[ns]", "00:00:00.000000001", 1)),
        ("timestamp[s]", "1969-12-31 23:59:59", -1),
        ("timestamp[ms]", "1970-01-01T00:00:01.5", 1500),
        ("timestamp[us]", "1970-01-02", 86_400 * 10**6),
        ("timestamp[us]", "1970-01-01T02:00+02:00", 0),
        ("timestamp[us]", "1970-01-01T00:00:00.1234560", 123_456),
        ("timestamp[ns]", "1970-01-01T00:00:00.000000001Z", 1),
        ("timestamp[us, tz=UTC]", "1970-01-01T00:00:01", 10**6),
        (BERLIN, "1970-01-01T01:00:00+01:00", 0),
        *(("string", "01234", "01234"), ("string", " ", " "), ("large_string", "é", "é")),
    ],
)  # fmt: skip
def test_a_string_is_read_as_its_type(name: str, text: str, value: object) -> None:
    assert read_as([text, None], name) == [value, None]
    # One that Arrow does not cast makes each of the column be read alone.
    if "string" not in name:
        with pytest.raises(MisfitError):
            read_as([text, "?"], name)
        assert pa.array([read_value(text, parse_type(name))], parse_type(name)).equals(
            read_column(pa.array([text]), parse_type(name))
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("int8", "128"), ("int8", "1.5"), ("int8", "0x10"), ("int8", " 1"), ("int64", "1_0")),
        *(("int64", "1e999999999"), ("int64", "1e99999999999999999999"), ("int64", "\u0661")),
        *(("uint8", "-1"), ("uint64", str(2**64)), ("int64", str(2**63)), ("int32", "")),
        *(("float32", "1e39"), ("float64", "1e400"), ("float64", "x"), ("float64", "0x1p3")),
        *(("decimal128(10, 2)", "1.255"), ("decimal128(4, 2)", "123.4"), ("decimal32(5)", "nan")),
        *(("bool", "1"), ("bool", "t"), ("bool", "")),
        *(("date32", "2024-02-30"), ("date32", "2024-01-01T10:00"), ("date32", "20240101")),
        *(("date64", "2024-01-01T00:00:00+01:00"), ("time32[s]", "10:20:30.5")),
        *(("time64[us]", "24:00"), ("time64[us]", "10:20Z"), ("time64[us]", "10:20:30.1234567")),
        *(("timestamp[s]", "2024-01-01T10:20:30.5"), ("timestamp[ns]", "1600-01-01")),
        *(("timestamp[us]", "2016-12-31T23:59:60"), ("timestamp[us]", "2024-01-01x")),
        *(("timestamp[ns]", "2300-01-01"), (BERLIN, "2024-01-01T10:20:30")),
    ],
)
def test_a_string_that_is_not_a_value_of_the_type_is_named(name: str, text: str) -> None:
    with pytest.raises(MisfitError) as caught:
        read_as([None, text, text], name)

    assert (caught.value.index, caught.value.text) == (1, text)
    assert not is_value(text, parse_type(name))


NAMES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64", "decimal32(7, 2)", "decimal64(15, 0)", "decimal128(38, 12)"),
    *("decimal256(70, 30)", "date32", "date64", "time32[s]", "time32[ms]", "time64[us]"),
    *("time64[ns]", "timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ns]"),
    *("timestamp[us, tz=UTC]", BERLIN, "string", "large_string"),
]
PIECES = st.sampled_from(
    [*"0123456789", *"+-.eExXnNT:Z ", "inf", "nan", "true", "2024-02-29", "10:20:30", "+02:00"]
)


@settings(deadline=None, max_examples=150)
@given(text=st.lists(PIECES, max_size=6).map("".join), name=st.sampled_from(NAMES))
def test_a_value_is_the_same_whether_its_neighbours_are_cast_by_arrow_or_not(
    text: str, name: str
) -> None:
    dtype = parse_type(name)
    try:
        whole_column = plain(read_column(pa.array([text]), dtype))
    except MisfitError:
        whole_column = None
    alone = plain(pa.array([read_value(text, dtype)], dtype)) if is_value(text, dtype) else None

    assert repr(whole_column) == repr(alone)


# -- files -----------------------------------------------------------------------------------------


def values_of(dtype: pa.DataType) -> st.SearchStrategy[tuple[str, Any]]:
    """A value as a file has it, and as Python has it; of times, the number of units."""
    types = pa.types
    if types.is_boolean(dtype):
        return st.booleans().map(lambda value: (str(value).lower(), value))
    if types.is_integer(dtype):
        signed = types.is_signed_integer(dtype)
        least = -(2 ** (dtype.bit_width - 1)) if signed else 0
        return st.integers(least, least + 2**dtype.bit_width - 1).map(lambda n: (str(n), n))
    if types.is_floating(dtype):
        width = dtype.bit_width
        return st.floats(allow_nan=False, allow_infinity=False, width=width).map(
            lambda number: (repr(number), number)
        )
    if types.is_decimal(dtype):
        most = 10**dtype.precision - 1
        return st.integers(-most, most).map(lambda n: (f"{scaled(n, dtype):f}", scaled(n, dtype)))
    if types.is_date(dtype):
        return st.dates().map(lambda day: (str(day), (day - date(1970, 1, 1)).days * (
            1 if types.is_date32(dtype) else 86_400_000)))  # fmt: skip
    if types.is_time(dtype):
        return times_of(dtype, st.times().map(lambda clock: datetime.combine(EPOCH, clock)))
    if types.is_timestamp(dtype):
        years = (1700, 2200) if dtype.unit == "ns" else (1, 9999)
        return times_of(dtype, st.datetimes(datetime(years[0], 1, 1), datetime(years[1], 12, 31)))
    return st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(
        lambda text: (text, text)
    )


def scaled(unscaled: int, dtype: pa.DataType) -> Decimal:
    sign, digits = int(unscaled < 0), tuple(map(int, str(abs(unscaled))))
    return Decimal((sign, digits, -dtype.scale))


def times_of(
    dtype: pa.DataType, moments: st.SearchStrategy[datetime]
) -> st.SearchStrategy[tuple[str, int]]:
    digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[dtype.unit]
    zone = "+00:00" if getattr(dtype, "tz", None) else ""
    form = "%H:%M:%S" if pa.types.is_time(dtype) else "%Y-%m-%dT%H:%M:%S"

    def written(moment: datetime, fraction: int) -> tuple[str, int]:
        seconds = (moment.replace(microsecond=0) - EPOCH) // timedelta(seconds=1)
        behind = f".{fraction:0{digits}d}" if digits else ""
        text = moment.strftime(form).rjust(len(EPOCH.strftime(form)), "0")
        return f"{text}{behind}{zone}", seconds * 10**digits + fraction

    return st.builds(written, moments, st.integers(0, 10**digits - 1))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("given") / "a"


def given_table(format: str, name: str, column: str = "a") -> PinnedTable:
    field = pa.field(column, parse_type(name), metadata={GIVEN: b"spec"})
    return PinnedTable("source", format, pa.schema([("k", pa.int64()), field]))


def rows_of(path: Path, format: str, name: str) -> Iterator[pa.Array]:
    file = local(whole(path), format)
    for batch in read_split(file, "SELECT a FROM source", given_table(format, name)):
        yield batch.column("a")


def csv_value(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_what_is_loaded_of_a_given_type_is_what_was_written(
    path: Path, format: str, name: str, data: st.DataObject
) -> None:
    dtype = parse_type(name)
    pairs = data.draw(st.lists(st.none() | values_of(dtype), min_size=1, max_size=8))
    bare = pa.types.is_boolean(dtype) or pa.types.is_integer(dtype) or pa.types.is_floating(dtype)
    bare = (bare or pa.types.is_decimal(dtype)) and data.draw(st.booleans())
    if format == "csv":
        lines = [f"{i},{csv_value(pair[0]) if pair else ''}" for i, pair in enumerate(pairs)]
        path.write_text("\n".join(["k,a", *lines]) + "\n", newline="")
    else:
        texts = [
            "null" if pair is None else pair[0] if bare else json.dumps(pair[0]) for pair in pairs
        ]
        path.write_text("".join(f'{{"k": {i}, "a": {t}}}\n' for i, t in enumerate(texts)))

    found = [value for column in rows_of(path, format, name) for value in plain(column)]

    assert repr(found) == repr([pair and pair[1] for pair in pairs])


@pytest.mark.parametrize("name", ["list<float32>", "list<date32>", "list<list<decimal128(5, 2)>>"])
def test_lists_of_json_have_the_type_that_is_given(path: Path, name: str) -> None:
    lists = {
        "list<float32>": ("[1, 2.5, null]", [1.0, 2.5, None]),
        "list<date32>": ('["2024-02-29"]', [date(2024, 2, 29)]),
        "list<list<decimal128(5, 2)>>": (
            '[[1.25, "2"], null]',
            [[Decimal("1.25"), Decimal(2)], None],
        ),
    }
    written, value = lists[name]
    path.write_text(f'{{"k": 1, "a": {written}}}\n{{"k": 1, "a": []}}\n')

    (column,) = rows_of(path, "json", name)

    assert column.type == parse_type(name)
    assert column.to_pylist() == [value, []]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("01", None),
        ("1.50", "1.50"),
        ("1E3", "1E3"),
        ("true", "true"),
        ('"01"', "01"),
        ("[]", None),
    ],
)
def test_a_number_of_json_is_as_a_string_what_stands_there(
    path: Path, written: str, text: str | None
) -> None:
    path.write_text(f'{{"k": 1, "a": {written}}}\n')
    if text is None:
        with pytest.raises(LoadError):
            list(rows_of(path, "json", "string"))
    else:
        assert [value for c in rows_of(path, "json", "string") for value in c.to_pylist()] == [text]


@pytest.mark.parametrize(
    ("format", "text", "where"),
    [
        ("csv", "k,a\n" + '1,"1.25"\n' * 20_000 + "1,1.255\n", "holds '1.255' in row 20001, but"),
        ("json", '{"k": 1, "a": 1.25}\n' * 3 + '{"a": 1.255}\n', "holds 1.255, but"),
        ("json", '{"k": 1, "a": "x"}\n', 'holds "x", but'),
        ("json", '{"k": 1, "a": {}}\n', "holds {}, but"),
    ],
)
def test_a_value_that_does_not_fit_the_given_type_is_refused(
    path: Path, format: str, text: str, where: str
) -> None:
    path.write_text(text)

    with pytest.raises(LoadError) as caught:
        list(rows_of(path, format, "decimal128(10, 2)"))

    assert f"cannot load {path}: column 'a' {where}" in str(caught.value)
    assert "its type in the spec is decimal128(10, 2)" in str(caught.value)


def test_a_query_sees_the_given_type(path: Path) -> None:
    path.write_text("k,a\n1,2024-01-01T10:00\n2,2024-01-01T10:00:00.5\n")
    table, file = given_table("csv", "timestamp[us]"), local(whole(path), "csv")
    sql = "SELECT k, a FROM source WHERE a > TIMESTAMP '2024-01-01T10:00:00.1'"

    (batch,) = read_split(file, sql, table)

    assert batch.to_pylist() == [{"k": 2, "a": datetime(2024, 1, 1, 10, 0, 0, 500_000)}]
    assert [field.type for field in batch.schema] == [pa.int64(), pa.timestamp("us")]


def test_a_given_column_that_is_not_read_is_not_looked_at(path: Path) -> None:
    path.write_text("k,a\n1,x\n")
    table = given_table("csv", "int8")
    table = PinnedTable("source", "csv", table.schema, columns=("k",))

    (batch,) = read_split(local(whole(path), "csv"), "SELECT k FROM source", table)

    assert batch.to_pylist() == [{"k": 1}]


def test_times_of_day_are_read(path: Path) -> None:
    path.write_text("k,a\n1,10:20:30\n")

    (column,) = rows_of(path, "csv", "time32[s]")

    assert column.to_pylist() == [time(10, 20, 30)]
