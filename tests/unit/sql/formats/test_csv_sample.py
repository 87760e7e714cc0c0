from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.sql.formats.csv_sample import MOST_RECORDS, CsvSample, read_sample
from cache_server.sql.loader import infer_schema
from cache_server.sql.session import open_session


def sample_of(text: str, **options: bool) -> CsvSample:
    return read_sample(io.StringIO(text.encode().decode("latin-1"), newline=""), **options)


def types_of(path: Path, data: bytes) -> list[tuple[str, str]]:
    path.write_bytes(data)
    return [(field.name, str(field.type)) for field in infer_schema(path, "csv", "a.csv")]


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "kept"),
    [
        ("1,x\n", "1,x\n"),
        ('"1","x"\r\n', "1,x\n"),
        ("1,x", "1,x\n"),
        ('1,"a\nb"\n', "1,a_\n"),
        ('"a\r\nb",1\n', "a__,1\n"),
        ('"a\n\nb","c\nd"\n', "a_,c_\n"),
        ('1,"a,b"\n', "1,a_b\n"),
        ('1,"a ""b"""\n', "1,a __b__\n"),
        ('1,""\n', "1,\n"),
        ('"a\n""b""\n",1\n', "a_,1\n"),
        ('1,5" x\n', "1,5_ x\n"),
        ('1,"a\\"\n', "1,a_\n"),
    ],
)
def test_a_record_is_kept_without_what_only_quotes_allow(record: str, kept: str) -> None:
    assert sample_of(f"a,b\n{record}") == CsvSample(("a", "b"), ("0,1\n", kept))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_records_end_with_any_kind_of_line(newline: str) -> None:
    text = newline.join(["a,b", "", "1,x", '2,"y', 'z"', ""])

    records = sample_of(text).records

    assert records == ("0,1\n", "1,x\n", f"2,y{'_' * len(newline)}\n")


def test_the_names_are_those_that_the_quotes_hold_behind_a_byte_order_mark() -> None:
    text = '\ufeff"a\nz","b ""c""",ünï,"d,e"\n1,2,3,4\n'

    assert sample_of(text).names == ("a\nz", 'b "c"', "ünï", "d,e")


def test_no_more_records_are_kept_than_datafusion_looks_at() -> None:
    sample = sample_of("a,b\n" + '1,"x\ny"\n' * 2 * MOST_RECORDS)

    assert len(sample.records) == MOST_RECORDS


def test_a_record_that_breaks_off_with_the_beginning_of_a_file_is_left_out() -> None:
    sample = sample_of('a,b\n1,x\n2,"y\n', is_whole=False)

    assert sample.records == ("0,1\n", "1,x\n")


# -- what it tells ---------------------------------------------------------------------------------


VALUES = st.sampled_from(
    [
        *("", "1", "-2.5", "true", "2024-02-29", "2024-02-29T12:00:00", "x", "é", "a,b", '"', "\\"),
        *("a\nb", "1\n", "\n1", "2024-02-29\n12:00:00", "\r\n"),
    ]
)


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(VALUES, VALUES), max_size=5),
    newline=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_the_types_are_those_that_datafusion_finds_in_a_file_of_one_chunk(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    newline: str,
    quoting: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "one-chunk.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator=newline, quoting=quoting)
        writer.writerows([("a", "b"), *rows])
    context = open_session(1)
    context.register_csv("source", path.as_uri())

    found = context.table("source").schema()
    texts = [pa.string() if dtype == pa.null() else dtype for dtype in found.types]
    assert infer_schema(path, "csv", "a.csv").equals(
        pa.schema(list(zip(found.names, texts, strict=True)))
    )


def test_a_value_of_any_length_may_stand_in_quotes(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    value = b"line\n" * limit

    assert types_of(tmp_path / "a.csv", b'a,b\n1,"' + value + b'"\n2,x\n') == [
        ("a", "int64"),
        ("b", "string"),
    ]
    assert csv.field_size_limit() == limit


def test_a_csv_of_names_only_has_columns_of_texts(tmp_path: Path) -> None:
    assert types_of(tmp_path / "a.csv", b'a,"b\n"') == [("a", "string"), ("b\n", "string")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it does not name its columns"),
        (b"\r\n\n", "it does not name its columns"),
        (b"a,b,a\n1,2,3\n", "several columns are named 'a'"),
        (b"a,b\n\xff\xfe,1\n", "invalid utf-8"),
        (b"a,\xe9\n1,2\n", "the names of its columns are not UTF-8"),
        (b'a,b\n1,"x\n2,y\n', "the quotes that are opened in line 2 are never closed"),
        (b'a,"b\n1,2\n', "the quotes that are opened in line 1 are never closed"),
        (b'a,b\n1,"x\ny","z\n', "the quotes that are opened in line 3 are never closed"),
        (b'a,b\n"x\ny"\n', "Expected 2 records, found 1 records"),
        (b"\x1f\x8b\x08\x00\xf7\xeb\x02k", "compressed by gzip"),
        (b'"' + b"a" * 200_000 + b'"\n1\n', "field larger than field limit"),
    ],
)
def test_a_file_that_is_no_csv_is_named_with_the_reason(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    with pytest.raises(LoadError) as caught:
        types_of(tmp_path / "a.csv", data)
    assert "cannot read a.csv as csv: " in str(caught.value)
    assert reason in str(caught.value)
    assert "sample.csv" not in str(caught.value)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read a\.csv as csv: .*No such file"):
        infer_schema(tmp_path / "a.csv", "csv", "a.csv")


def test_the_columns_have_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n1,"x\ny"\n')

    schema = infer_schema(tmp_path / "a.csv", "csv", "a.csv")

    assert schema.equals(pa.schema([("a", pa.int64()), ("b", pa.string())]), check_metadata=True)
