"""Quotes and escapes of CSV: read as other readers read them, or refused with the line."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import ConfigError, LoadError
from cache_server.plan.pinned_version import plan_version
from cache_server.source.pinned import PinnedTable, SourceFile, Split
from cache_server.sql.formats import csv_quotes
from cache_server.sql.loader import infer_schema, read_split
from cache_server.sql.local_tables import LocalFile
from tests.table_files import read

FIRST = "k,text\n" + '0,"a ""b"" c"\n' * 1500  # more than what the columns are found by
BACKSLASH = "\\"
TWO = pa.schema([("a", pa.string()), ("b", pa.string())])


def split_of(path: Path) -> Split:
    return Split(SourceFile(str(path), path.stat().st_size, 0), 0, 1, None, 0)


def rows_of(path: Path, escape: str) -> list[tuple[str | None, ...]]:
    table = PinnedTable("source", "csv", TWO, escape=escape)
    batches = read_split(LocalFile(path, "csv", split_of(path)), "SELECT * FROM source", table)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def ends_in_quotes(text: str) -> bool:
    """Whether a line more would be part of the last value."""
    *_, last = csv.reader(f"{text}\r\nend\r\n".splitlines(keepends=True))
    return last != ["end"]


def has_text_behind_quotes(text: str) -> bool:
    """Whether Python's strict reader refuses a value for what follows its closing quote."""
    try:
        list(csv.reader(io.StringIO(f"{text}\r\n", newline=""), strict=True))
    except csv.Error as error:
        return "expected after" in str(error)
    return False


def test_quotes_that_a_late_row_opens_and_nothing_closes_swallow_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(FIRST + '1,"cut off\n2,x\n3,y\n')
    schema = infer_schema(path, "csv", str(path))

    with pytest.raises(LoadError) as caught:
        read(split_of(path), "csv", schema)

    assert str(caught.value) == (
        f"cannot load {path}: the quotes that are opened in line 1502 are never closed"
    )


@settings(max_examples=200)
@given(text=st.text('a,"\n\r', max_size=30), bom=st.booleans(), block_bytes=st.integers(1, 9))
def test_a_file_is_refused_just_if_it_ends_in_quotes_or_has_text_behind_them(
    tmp_path_factory: pytest.TempPathFactory, text: str, bom: bool, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "quotes.csv"
    path.write_text("\ufeff" * bom + text, newline="")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(csv_quotes, "_BLOCK_BYTES", block_bytes + 3)  # a mark fits in
        try:
            csv_quotes.check_quotes(path, split_of(path))
            refused = False
        except LoadError:
            refused = True

    assert refused == (has_text_behind_quotes(text) or ends_in_quotes(text))


# -- text behind a closing quote -------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('1,"a"b', 'text follows the closing quote of "a"b in line {}: double it'),
        ('1,"a"-"b"', 'text follows the closing quote of "a"- in line {}: double it'),
        (
            r'1,"say \"hi\" now"',
            r'text follows the closing quote of "say \"h in line {}: double it; for quotes escaped '
            r'by a backslash, set escape: "\\"',
        ),
        (r'1,"a \", b"', None),  # two columns become three
        (r'1,"a \""', None),  # the next lines become part of the value
    ],
)
def test_text_behind_a_closing_quote_is_refused_with_its_file_and_line(
    tmp_path: Path, row: str, problem: str | None, late: bool
) -> None:
    path = tmp_path / "a.csv"
    before = FIRST if late else "k,text\n"
    path.write_text(f'{before}{row}\n2,x\n3,"y"\n')

    with pytest.raises(LoadError) as caught:
        schema = infer_schema(path, "csv", str(path))
        read(split_of(path), "csv", schema)

    assert str(path) in str(caught.value)
    if problem is not None:
        assert str(caught.value).endswith(f": {problem.format(1502 if late else 2)}")


# -- escapes ---------------------------------------------------------------------------------------

VALUES = st.text('a\\", \n\r\té', max_size=6)


def written(value: str, *, in_quotes: bool) -> str:
    """A value as Spark writes it; in quotes if it needs them."""
    if not in_quotes and not set(value) & set('\\",\r\n'):
        return value
    return f'"{value.replace(BACKSLASH, BACKSLASH * 2).replace(chr(34), BACKSLASH + chr(34))}"'


@settings(max_examples=100)
@given(
    rows=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=5),
    in_quotes=st.tuples(st.booleans(), st.booleans()),
    last=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    block_bytes=st.sampled_from([1, 7, 1 << 20]),
)
def test_values_with_escapes_are_those_that_other_readers_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    in_quotes: tuple[bool, bool],
    last: bool,
    newline: str,
    block_bytes: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "escapes.csv"
    lines = [
        ",".join(written(v, in_quotes=always) for v, always in zip(row, in_quotes, strict=True))
        for row in rows
    ]
    path.write_text(newline.join(["a,b", *lines]) + newline * last, newline="")
    with open(path, newline="") as file:
        by_csv = list(csv.reader(file, doublequote=False, escapechar=BACKSLASH))[1:]
    by_arrow = pyarrow.csv.read_csv(
        path,
        parse_options=pyarrow.csv.ParseOptions(
            escape_char=BACKSLASH, double_quote=False, newlines_in_values=True
        ),
        convert_options=pyarrow.csv.ConvertOptions(column_types=TWO),
    ).to_pylist()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(csv_quotes, "_BLOCK_BYTES", block_bytes + 3)
        found = rows_of(path, BACKSLASH)

    assert [list(row) for row in rows] == by_csv == [list(row.values()) for row in by_arrow]
    assert [[value or "" for value in row] for row in found] == by_csv


def test_a_file_of_spark_is_read_as_duckdb_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    values = ['say "hi" now', 'ends with "', "back\\slash, comma", "C:\\", "", 'a\n"b"', "é \\\\"]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, doublequote=False, escapechar=BACKSLASH)
        writer.writerows([("a", 'na"me'), *((value, "x") for value in values * 500)])

    schema = plan_version(DatasetSpec("t", path, escape=BACKSLASH)).version.tables[0].schema
    found = rows_of(path, BACKSLASH)
    by_duckdb = duckdb.sql(
        f"SELECT * FROM read_csv('{path}', escape='\\', quote='\"', header=true, all_varchar=true, "
        "auto_detect=false, columns={'a': 'VARCHAR', 'b': 'VARCHAR'})"
    ).fetchall()

    assert schema.names == ["a", 'na"me']
    assert found == by_duckdb == [(value or None, "x") for value in values * 500]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (r'1,"C:\temp, x"', r'"C:\t in line {} has a backslash before another character'),
        ('1,"a\\\nb"', "has a backslash before another character"),
        (r"1,a\,b", "a backslash outside quotes stands before ',' in line {}, which"),
        (r"1,a\"b", "a backslash outside quotes stands before '\"' in line {}, which"),
        (r"\\server,1", r"a backslash outside quotes stands before '\\' in line {}, which"),
        ('1,"a\\"b"c', "text follows the closing quote of"),
        ('1,"a\\"', "the quotes that are opened in line {} are never closed"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_escapes_that_readers_take_differently_are_refused_with_their_line(
    tmp_path: Path, row: str, problem: str, late: bool
) -> None:
    path = tmp_path / "a.csv"
    before = FIRST if late else "k,text\n"
    path.write_text(f"{before}{row}\n")
    spec: dict[str, Any] = {"escape": BACKSLASH}

    with pytest.raises(LoadError, match=re.escape(problem.format(1502 if late else 2))) as caught:
        schema = infer_schema(path, "csv", str(path), **spec)
        table = PinnedTable("source", "csv", schema, **spec)
        list(read_split(LocalFile(path, "csv", split_of(path)), "SELECT * FROM source", table))
    assert str(path) in str(caught.value)


def test_a_backslash_outside_quotes_is_an_ordinary_character(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\nC:\\temp,"x\\\\y"\n')

    assert rows_of(path, BACKSLASH) == [("C:\\temp", "x\\y")]
    assert rows_of(path, "") == [("C:\\temp", "x\\\\y")]


@pytest.mark.parametrize("escape", ["", "/", "\\\\", 0, ["\\"]])
def test_an_escape_is_one_backslash(escape: Any) -> None:
    with pytest.raises(ConfigError, match="escape must be one backslash, got"):
        DatasetSpec("t", "/a.csv", escape=escape)


def test_an_escape_is_part_of_a_version_and_of_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n")
    specs = [DatasetSpec("t", path), DatasetSpec("t", path, escape=BACKSLASH)]

    assert [DatasetSpec.from_proto(spec.to_proto()) for spec in specs] == specs
    assert len({plan_version(spec).version.key for spec in specs}) == 2
    with pytest.raises(ConfigError, match="escape is for csv"):
        DatasetSpec("t", path, format="json", escape=BACKSLASH)
