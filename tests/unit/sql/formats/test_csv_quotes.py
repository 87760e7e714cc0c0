"""Quotes that are never closed, against Python's own reader of CSV."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.source.pinned import SourceFile, Split
from cache_server.sql.formats import csv_quotes
from cache_server.sql.loader import infer_schema
from tests.table_files import read

FIRST = "k,text\n" + '0,"a ""b"" c"\n' * 1500  # more than what the columns are found by


def split_of(path: Path) -> Split:
    return Split(SourceFile(str(path), path.stat().st_size, 0), 0, 1, None, 0)


def ends_in_quotes(text: str) -> bool:
    """Whether a line more would be part of the last value."""
    *_, last = csv.reader(f"{text}\r\nend\r\n".splitlines(keepends=True))
    return last != ["end"]


def test_quotes_that_a_late_row_opens_and_nothing_closes_swallow_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(FIRST + '1,"cut off\n2,x\n3,y\n')
    schema = infer_schema(path, "csv", str(path))

    with pytest.raises(LoadError) as caught:
        read(split_of(path), "csv", schema)

    opened = len(FIRST) + len("1,")
    assert str(caught.value) == (
        f"cannot load {path}: the quotes that are opened in byte {opened} are never closed"
    )


@given(text=st.text('a,"\n\r', max_size=30), bom=st.booleans(), block_bytes=st.integers(1, 9))
def test_a_file_is_refused_just_if_it_ends_in_quotes(
    tmp_path_factory: pytest.TempPathFactory, text: str, bom: bool, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "quotes.csv"
    path.write_text("\ufeff" * bom + text, newline="")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(csv_quotes, "_BLOCK_BYTES", block_bytes + 3)  # a mark fits in
        try:
            csv_quotes.check_closed(path, split_of(path))
            refused = False
        except LoadError:
            refused = True

    assert refused == ends_in_quotes(text)
