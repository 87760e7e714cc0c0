"""Files that are of another kind than their names or their specs say."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.sql.formats.first_bytes import FIRST_BYTES, objection
from cache_server.tables import files as sources
from tests.table_files import table_spec

TEXT = {
    "csv": "id,name\n1,a\n2,b\n",
    "json": '{"id": 1, "name": "a"}\n{"id": 2, "name": "b"}\n',
}
PAGE = b"\n<!DOCTYPE html>\n<html><body>Log in, please</body></html>\n"
TABLE = pa.table({"id": [1, 2]})


def zipped(data: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("sheet1", data)
    return archive.getvalue()


def written(format: str) -> bytes:
    target = io.BytesIO()
    if format == "parquet":
        pq.write_table(TABLE, target)
    else:
        feather.write_feather(TABLE, target)
    return target.getvalue()


def texts_of_another_kind(format: str) -> dict[str, tuple[bytes, str]]:
    text = TEXT[format]
    data = text.encode()
    return {
        "gzip": (gzip.compress(data), "compressed by gzip"),
        "zstd": (pa.compress(data, codec="zstd", asbytes=True), "compressed by zstd"),
        "bzip2": (bz2.compress(data), "compressed by bzip2"),
        "xz": (lzma.compress(data), "compressed by xz"),
        "lz4": (pa.compress(data, codec="lz4", asbytes=True), "compressed by lz4"),
        "zip": (zipped(data), "a ZIP archive"),
        "page": (PAGE, "an HTML page"),
        "xml": (b'<?xml version="1.0"?><Error/>', "it is XML"),
        "utf-16": (text.encode("utf-16"), "in UTF-16"),
        "utf-16-be": (b"\xfe\xff" + text.encode("utf-16-be"), "in UTF-16"),
        "utf-16-le, no mark": (text.encode("utf-16-le"), "null characters, as UTF-16 does"),
        "parquet": (written("parquet"), "say format: parquet"),
        "arrow": (written("arrow"), "say format: arrow"),
    }


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("kind", texts_of_another_kind("csv"))
def test_a_text_of_another_kind_is_refused_by_what_it_is(
    tmp_path: Path, format: str, kind: str
) -> None:
    data, reason = texts_of_another_kind(format)[kind]
    path = tmp_path / f"a.{format}"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=f"cannot read {path} as {format}: .*{reason}"):
        sources.pin(table_spec(path))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_page_or_a_compressed_file_by_the_name_of_another_is_told(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    for data, reason in ((PAGE, "an HTML page"), (gzip.compress(PAGE), "compressed by gzip")):
        path.write_bytes(data)
        with pytest.raises(LoadError, match=f"cannot read {path} as {suffix}: it is {reason}"):
            sources.pin(table_spec(path))


def test_feather_of_version_1_is_told_and_a_column_of_that_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100))
    (tmp_path / "a.csv").write_text("FEA1,FEA2\n1,2\n")

    with pytest.raises(LoadError, match=r"a\.feather as arrow: it is Feather of version 1"):
        sources.pin(table_spec(tmp_path / "a.feather"))
    assert sources.pin(table_spec(tmp_path / "a.csv"))[1].schema.names == ["FEA1", "FEA2"]


def test_a_byte_order_mark_is_refused_in_json_and_passed_over_in_csv(tmp_path: Path) -> None:
    for format, text in TEXT.items():
        (tmp_path / f"a.{format}").write_bytes(b"\xef\xbb\xbf" + text.encode())
    with pytest.raises(LoadError, match=r"a\.json as json: it begins with a byte order mark"):
        sources.pin(table_spec(tmp_path / "a.json"))
    assert sources.pin(table_spec(tmp_path / "a.csv"))[1].schema.names == ["id", "name"]


@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_later_file_of_another_kind_is_named(tmp_path: Path, format: str) -> None:
    (tmp_path / f"a.{format}").write_text(TEXT[format])
    (tmp_path / f"b.{format}").write_bytes(gzip.compress(TEXT[format].encode()))
    with pytest.raises(LoadError, match=rf"b\.{format}.* it is compressed by gzip"):
        sources.pin(table_spec(tmp_path))


@given(st.text(st.characters(codec="utf-8", exclude_characters="<\0\ufeff"), max_size=9))
def test_other_texts_are_taken_for_what_they_are_said_to_be(text: str) -> None:
    for format, usual in TEXT.items():
        known = text.startswith(("PAR1\x15", "ARROW1", "BZh91AY&SY", "PK\x03\x04"))
        if not known:
            assert objection((text + usual).encode()[:FIRST_BYTES], format) is None


def test_files_of_their_own_format_are_not_objected_to() -> None:
    assert objection(written("parquet")[:FIRST_BYTES], "parquet") is None
    assert objection(written("arrow")[:FIRST_BYTES], "arrow") is None
    assert objection(b"", "csv") is None
