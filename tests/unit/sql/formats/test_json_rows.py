"""Newline JSON against Python's own reader: what is read, and what is refused with which words."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datafusion import SessionContext
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.source.pinned import SourceFile, Split
from cache_server.sql.formats import json_lines, json_rows

INT, FLOAT, TEXT, TRUTH = pa.int64(), pa.float64(), pa.string(), pa.bool_()
NESTED = pa.struct([("x", INT), ("names", pa.list_(TEXT))])
RARE = "\U00020bb7"  # escaped as \ud842\udfb7, of which DataFusion's reader makes another character


def rows_of(path: Path, schema: pa.Schema, part: int = 0, parts: int = 1) -> list[dict[str, Any]]:
    split = Split(SourceFile(str(path), path.stat().st_size, 0), part, parts, None, 0)
    batches = list(json_rows.read(path, split, schema))
    for batch in batches:
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


def values_of(path: Path, text: str | bytes, dtype: pa.DataType) -> list[Any]:
    """The column ``a`` of some lines."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [row["a"] for row in rows_of(path, pa.schema([("a", dtype)]))]


def refusal(path: Path, text: str | bytes, dtype: pa.DataType) -> str:
    with pytest.raises(LoadError) as caught:
        values_of(path, text, dtype)
    assert str(caught.value).startswith(f"cannot load {path}: ")
    return str(caught.value).removeprefix(f"cannot load {path}: ")


# -- what is read ----------------------------------------------------------------------------------

LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("beside", ["1", "1.0"])  # which Arrow reads, and Python
@pytest.mark.parametrize(
    ("written", "dtype", "value"),
    [
        *(("0", INT, 0), ("-0", INT, 0), (str(LEAST), INT, LEAST), (str(MOST), INT, MOST)),
        *(("2.0", INT, 2), ("1e3", INT, 1000), ("-10E+2", INT, -1000), ("1230e-1", INT, 123)),
        ("9007199254740993.0", INT, 2**53 + 1),  # which no float is
        *((f"{LEAST}.00", INT, LEAST), (f"{MOST}e0", INT, MOST), ("null", INT, None)),
        *(("1", FLOAT, 1.0), ("0.1", FLOAT, 0.1), ("-1e300", FLOAT, -1e300)),
        *(("5e-324", FLOAT, 5e-324), ("1e-400", FLOAT, 0.0), (f"{MOST}0", FLOAT, MOST * 10.0)),
        *(("Infinity", FLOAT, math.inf), ("-Infinity", FLOAT, -math.inf)),
        *(("true", TRUTH, True), ("false", TRUTH, False), ("null", TRUTH, None)),
        *(('""', TEXT, ""), ('"null"', TEXT, "null"), ('"1.5"', TEXT, "1.5")),
        *((r'"\ud842\udfb7"', TEXT, RARE), (r'"\uD83D\uDE00"', TEXT, "\U0001f600")),
        *((r'"\\ud842\/\u0000"', TEXT, "\\ud842/\0"), (f'"{RARE}"', TEXT, RARE)),
        *(('"a\tb\x1f"', TEXT, "a\tb\x1f"), ('"\\n\u2028"', TEXT, "\n\u2028")),
        *(('"}null"', TEXT, "}null"), (r'"}\n null"', TEXT, "}\n null")),
        *(("[1, null, 3]", pa.list_(INT), [1, None, 3]), ("[]", pa.list_(INT), [])),
        *(
            ("[4.0]", pa.list_(INT), [4]),
            ("[[1.5], null]", pa.list_(pa.list_(FLOAT)), [[1.5], None]),
        ),
        ("[null, null, null]", pa.list_(pa.null()), [None, None, None]),
        ('{"x": 1, "names": ["b"]}', NESTED, {"x": 1, "names": ["b"]}),
        ('{"x": 1.0, "more": [{}]}', NESTED, {"x": 1, "names": None}),
        (
            '[{"x": null}, null, {}]',
            pa.list_(pa.struct([("x", INT)])),
            [{"x": None}, None, {"x": None}],
        ),
    ],
)
def test_a_value_is_read_as_what_it_says(
    tmp_path: Path, written: str, dtype: pa.DataType, value: object, beside: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": {written}, "b": {beside}}}\n')

    assert rows_of(path, pa.schema([("a", dtype), ("b", INT)])) == [{"a": value, "b": 1}]


def test_nan_is_read_as_such(tmp_path: Path) -> None:
    (value,) = values_of(tmp_path / "a.json", json.dumps({"a": math.nan}), FLOAT)

    assert math.isnan(value)


@pytest.mark.parametrize("code", range(0x10000, 0x110000, 0x2000))
def test_the_escapes_of_every_plane_are_read(tmp_path: Path, code: int) -> None:
    text = chr(code) + chr(code + 0x1FFF)

    assert values_of(tmp_path / "a.json", json.dumps({"a": text}), TEXT) == [text]


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        *(("", []), ("\n \n\r\n", []), ('{"a": 1}', [1]), ('\n\n{"a": 1}\n\n{"a": 2}', [1, 2])),
        *(('{"a": 1}\r\n{"a": 2}\r\n', [1, 2]), ('{}\n{"A": 3}\n', [None, None])),
        ('{"b": "\\u0061"}\n{"\\u0061": 2}\n', [None, 2]),
        *(('{"a":\r1}\r\n \t{"a": 2} \r\n\r\n', [1, 2]), ('{"a": 1}\r', [1])),
        *(('{"a": 1, "a": 2}\n', [2]), ('{"b": 1, "b": "x", "a": 2}\n', [2])),
        *(('{"b": 1e999, "a": 1}\n', [1]), ('{"b": {"a": [{}, {"a": "x"}]}, "a": 1}\n', [1])),
        ('{"b": "}\\nnull", "c":\rnull, "a": 1}\n', [1]),
    ],
)
def test_lines_are_read_by_the_names_in_them(
    tmp_path: Path, lines: str, values: list[int | None]
) -> None:
    assert values_of(tmp_path / "a.json", lines, INT) == values


def test_without_columns_the_rows_are_still_counted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n{}\n{"a": "x"}\n')

    assert rows_of(tmp_path / "a.json", pa.schema([])) == [{}, {}, {}]


SCHEMA = pa.schema(
    [("i", INT), ("f", FLOAT), ("s", TEXT), ("b", TRUTH), ("l", pa.list_(FLOAT)), ("t", NESTED)]
)
TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
INTS, FLOATS = st.integers(LEAST, MOST), st.floats(allow_nan=False)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "i": st.none() | INTS,
        "f": st.none() | FLOATS | INTS,
        "s": st.none() | TEXTS,
        "b": st.none() | st.booleans(),
        "l": st.none() | st.lists(st.none() | FLOATS, max_size=3),
        "t": st.none()
        | st.fixed_dictionaries({}, optional={"x": INTS, "names": st.lists(TEXTS, max_size=3)}),
        "other": st.none() | FLOATS | TEXTS | st.lists(st.none(), max_size=3),
    },
)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    nested, number = row.get("t"), row.get("f")
    return {
        **{field.name: row.get(field.name) for field in SCHEMA},
        "f": number if number is None else float(number),
        "t": nested if nested is None else {"x": None, "names": None, **nested},
    }


@settings(max_examples=100)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=12),
    block_bytes=st.sampled_from([1, 40, 1000]),
    parts=st.integers(1, 5),
    ascii=st.booleans(),
    with_fraction=st.booleans(),
)
def test_rows_are_those_of_python_for_every_cut_and_parser(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    block_bytes: int,
    parts: int,
    ascii: bool,
    with_fraction: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.json"
    lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
    if with_fraction:  # which Arrow refuses, so that Python reads the lot
        lines.append('{"i": 7.0}')
        rows = [*rows, {"i": 7}]
    path.write_text("\n".join(lines) + "\n")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_lines, "_BLOCK_BYTES", block_bytes)
        found = [row for part in range(parts) for row in rows_of(path, SCHEMA, part, parts)]

    assert found == [expected(row) for row in rows]


def by_datafusion(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    context = SessionContext()
    context.register_json("t", str(path), schema=schema, file_extension=path.suffix)
    return context.table("t").to_pylist()


@settings(max_examples=50)
@given(rows=st.lists(ROWS, min_size=1, max_size=12))
def test_what_datafusion_reads_rightly_is_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "same.json"
    finite = [{**row, "f": None, "l": None, "other": None} for row in rows]  # it has no Infinity
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in finite))

    assert rows_of(path, SCHEMA) == by_datafusion(path, SCHEMA)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "dtype", "message"),
    [
        (
            "1.5",
            INT,
            "holds 1.5, but it is of integers by the first rows of the table: "
            "set types: {a: float64} (",
        ),
        ("25e-1", INT, "holds 2.5, but it is of integers by the first rows"),
        ("9007199254740993.5", INT, "holds 9007199254740993.5, but it is of integers by"),
        ("1e-400", INT, "holds 1E-400, but it is of integers by the first rows"),
        (str(LEAST - 1), INT, f"holds {LEAST - 1}, but it is of integers of 64 bits"),
        (str(MOST + 1), INT, f"holds {MOST + 1}, but it is of integers of 64 bits"),
        ("1e999999999", INT, "holds 1E+999999999, but it is of integers of 64 bits"),
        ("1e-999999999", INT, "holds 1E-999999999, but it is of integers by the first rows"),
        ("NaN", INT, "holds NaN, but it is of int64 by the first rows"),
        *(('"1"', INT, 'holds "1", but it is of int64'), ("true", INT, "holds true, but")),
        *(('"1"', FLOAT, 'holds "1", but it is of double'), ("1e400", FLOAT, "holds 1E+400, but")),
        *(("1", TEXT, "holds 1, but it is of string"), ("{}", TEXT, "holds {}, but it is of")),
        *(("1", TRUTH, "holds 1, but it is of bool"), ('"true"', TRUTH, 'holds "true", but')),
        (r'"\ud842"', TEXT, r'holds "\ud842", but it is of string'),
        ('"one\ttwo"', INT, r'holds "one\ttwo", but'),
        (f'"{"x" * 500}"', INT, f'holds "{"x" * 99}..., but'),
        *(("1", pa.null(), "holds 1, but it is of null"), ("[1]", pa.list_(pa.null()), "holds 1,")),
        *(("[3, 1.5]", pa.list_(INT), "holds 1.5, but"), ("1", pa.list_(INT), "holds 1, but")),
        ('{"x": 2.5}', NESTED, "holds 2.5, but it is of integers"),
        ("[[2]]", NESTED, "holds [[2.0]], but it is of struct"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_column_and_its_line(
    tmp_path: Path, written: str, dtype: pa.DataType, message: str
) -> None:
    lines = '{"a": null, "é": 1}\n' * 3 + f'{{"a": {written}}}\n{{"a": null}}\n'

    refused = refusal(tmp_path / "a.json", lines, dtype)

    assert refused.startswith(f"column 'a' {message}")
    assert refused.endswith(" (line 4)")
    assert len(refused.splitlines()) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"a": 1}\n{"a":\n', "it is not JSON with one object a line: Expecting value (line 2)"),
        (
            '{"a": 1},\n{"a": 2}\n',
            'a line must be one object, got more behind it: "," (line 1)',
        ),
        (
            '{"é": 1, "a" 1}\n',
            "it is not JSON with one object a line: Expecting ':' delimiter (line 1)",
        ),
        ("{'a': 1}\n", "Expecting property name enclosed in double quotes"),
        ('{"a": 01}\n', "it is not JSON with one object a line: Expecting ',' delimiter (line 1)"),
        ('{"a": .5}\n', "it is not JSON with one object a line: Expecting value (line 1)"),
        ('{"a": 1,}\n', "it is not JSON with one object a line: "),
        ('{"a": 1}{"a": 2}\n', 'got more behind it: "{\\"a\\": 2}" (line 1)'),
        ('{"a": 1}\n{"a": 1}\r{"a": 2}\n', 'got more behind it: "\\r{\\"a\\": 2}" (line 2)'),
        (
            '{"a": 1}\n{"a":\n2}\n',
            "it is not JSON with one object a line: Expecting value (line 2)",
        ),
        ('{"a": 1}{"a":\n2}\n', "a line must be one object, got more behind it"),
        ('{"a": 1, "b": "x\ny"}\n', "Unterminated string starting at (line 1)"),
        *(('{"a": 1, "b": Inf}\n', "Expecting value (line 1)"),),
        *(('{"a": 1, "b": -NaN}\n', "Expecting value (line 1)"),),
        ('[{"a": 1}]', 'a line must be one object, got [{"a": 1.0}] (line 1)'),
        ('{"a": 1}\n5\n', "a line must be one object, got 5 (line 2)"),
        ('"a"\n', 'a line must be one object, got "a" (line 1)'),
        ('{"a": 1e99999999999999999999}\n', "an exponent is too long (line 1)"),
        (b'{"a": 1, "b": "\xff"}\n', "it is not UTF-8 (line 1)"),
        (b'{"a": 1}\n{"b": "\xed\xa0\x80"}\n', "it is not UTF-8 (line 2)"),
        (b'{"a": 1, "\xff": 2}\n', "it is not UTF-8 (line 1)"),
    ],
)
def test_what_is_no_object_of_json_is_named_with_its_line(
    tmp_path: Path, lines: str | bytes, message: str
) -> None:
    assert message in refusal(tmp_path / "a.json", lines, INT)


@pytest.mark.parametrize("before", ["", "\n", " \t\r\n", '{"a": 1}\n', '{"a": 1} \n\n'])
def test_a_row_that_is_null_is_refused_and_ends_no_process(tmp_path: Path, before: str) -> None:
    refused = refusal(tmp_path / "a.json", f'{before}null\n{{"a": 1}}\n', INT)

    assert refused == f"a line must be one object, got null (line {before.count(chr(10)) + 1})"


def test_a_row_that_is_null_behind_a_byte_order_mark_ends_no_process(tmp_path: Path) -> None:
    assert "it is not JSON with" in refusal(tmp_path / "a.json", "\ufeffnull\n", INT)


def test_a_row_that_is_nested_beyond_what_python_reads_is_refused(tmp_path: Path) -> None:
    lines = f'{{"a": 1.0, "b": {"[" * 100_000}{"]" * 100_000}}}\n'

    assert "recursion" in refusal(tmp_path / "a.json", lines, INT)


# -- lines and blocks ------------------------------------------------------------------------------


@pytest.fixture(params=[1, 7, 64])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", request.param)
    yield


@pytest.mark.usefixtures("small_blocks")
def test_each_split_reads_the_lines_that_begin_in_it(tmp_path: Path) -> None:
    lines = [json.dumps({"a": i, "b": "x" * i}) + "\n" for i in range(12)]
    path = tmp_path / "a.json"
    path.write_text("".join(lines))
    begins = [sum(map(len, lines[:i])) for i in range(12)]
    for parts in range(1, 40):
        part_bytes = -(-path.stat().st_size // parts)
        for part in range(parts):
            found = rows_of(path, pa.schema([("a", INT)]), part, parts)
            assert [row["a"] for row in found] == [
                i for i in range(12) if begins[i] // part_bytes == part
            ]


@pytest.mark.usefixtures("small_blocks")
def test_the_line_in_a_message_is_that_of_the_file_in_every_block_and_split(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    line = '{"a": 1, "b": "é"}\n'
    path.write_text(line * 9 + '{"a": 1.5}\n' + line * 3)

    with pytest.raises(LoadError, match=r"\(line 10\)$"):
        rows_of(path, pa.schema([("a", INT)]), 2, 3)


def test_a_line_that_is_longer_than_a_block_is_read(tmp_path: Path) -> None:
    text = "x" * 3_000_000

    assert values_of(tmp_path / "a.json", f"{json.dumps({'a': text})}\n" * 2, TEXT) == [text, text]


def test_numbers_are_exact_in_any_number_of_digits(tmp_path: Path) -> None:
    values = [2**53 + 1, -(2**53) - 1, MOST, LEAST, 10**18 + 7]
    written = [f"{value}{end}" for value in values for end in ("", ".0", "e0", ".000e+0")]
    scaled = [f"{Decimal(value).scaleb(-18):f}e18" for value in values]
    lines = "".join(f'{{"a": {number}}}\n' for number in [*written, *scaled])

    assert values_of(tmp_path / "a.json", lines, INT) == [
        *(value for value in values for _ in range(4)),
        *values,
    ]
