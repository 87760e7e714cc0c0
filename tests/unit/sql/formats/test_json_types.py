"""Newline JSON: where a line stands decides nothing, and a refusal names its file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import CacheError, LoadError
from cache_server.plan.pinned_version import plan_version
from cache_server.source.pinned import PinnedTable
from cache_server.sql import loader
from cache_server.sql.formats import json_lines, json_rows, json_types
from cache_server.sql.local_tables import LocalFile
from cache_server.tables import files
from tests.table_files import find, table_spec

GOOD = '{"a": 1, "s": "x"}'
# What one parser takes and another refuses: all of it stands alone on a line.
ODD = (
    *('{"a": 1}', '{"a": null}', "{}", "", " \t", '{"s": "x"} \r', '{"a": 2.0}', '{"a": 1e2}'),
    *('{"a": 1.5}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1, "a": 2}', '{"a": 3, "b": [{}]}'),
    *('{"s": "a\tb"}', '{"s": "\x01"}', r'{"s": "\ud83d\ude00"}', '{"s": "2024-01-01"}'),
    *('{"t": {"x": 1}, "a": 1}', '{"t": {"y": [1.5]}}', '{"l": []}', '{"l": [1, null]}'),
    *('{"a":\r1}', '{"l": [{"x": 1}]}', '{"l": [{"y": "s"}, {}]}', f'{{"a": {2**63}}}'),
)
REFUSED = (
    *('{"a": Inf}', '{"b": Inf}', '{"a": -NaN}', '{"a": 1}{"a": 2}', '{"a": 1}\r{"a": 2}', "null"),
    *('{"a":', "1}", '{"a": 1},', '[{"a": 1}]', '{"a": 01}', '{"a": "x"}', '{"s": 1}', '{"l": 1}'),
    *(r'{"s": "\ud83d"}', '{"a": 1} null', '\ufeff{"a": 1}', "{'a': 1}", '{"l": [1, "x"]}', "nul"),
    *('{"a": true}', '{"t": {"x": "s"}}', '{"a": {}}', '{"a": 1}}', '{"a": 1} // note', "\x00"),
)
LINES = st.lists(
    st.sampled_from([GOOD] * 5) | st.sampled_from(ODD) | st.sampled_from([*ODD, *REFUSED]),
    min_size=1,
    max_size=8,
)


def outcome(paths: Iterable[Path], parts: int) -> list[str] | None:
    """The types and rows of a table, in an order that does not depend on files; None if refused."""
    _, found = find(*paths, format="json")
    try:
        schema = files.pin(table_spec(*paths, format="json"))[1].schema
        splits = files.text_splits(found, "json", -(-max(f.size for f in found) // parts))
        batches = [
            batch
            for split in splits
            for batch in json_rows.read(Path(split.file.path), split, schema, is_every_key=True)
        ]
    except LoadError as error:
        assert any(str(path) in str(error) for path in paths)
        return None
    types = sorted(f"{field.name} {_sorted(field.type)}" for field in schema)
    return [
        *types,
        *sorted(json.dumps(row, sort_keys=True) for b in batches for row in b.to_pylist()),
    ]


def _sorted(dtype: pa.DataType) -> str:
    if pa.types.is_struct(dtype):
        return str(sorted(f"{field.name} {_sorted(field.type)}" for field in dtype))
    return f"[{_sorted(dtype.value_type)}]" if pa.types.is_list(dtype) else str(dtype)


@settings(max_examples=60)
@given(lines=LINES, other=LINES, data=st.data())
@example(lines=[GOOD, '{"s": "a\tb"}'], other=[GOOD], data=None)
def test_shuffled_lines_and_renamed_files_give_the_same_rows_or_refusal(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], other: list[str], data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    a, b = folder / "a.json", folder / "b.json"
    a.write_text("\n".join(lines), newline="")
    b.write_text("\n".join([*other, ""]), newline="")
    before = outcome([a, b], 1)
    if data is None:
        moved, cut, parts, block_bytes = [*other, *lines], 1, 2, 9
    else:
        moved = data.draw(st.permutations([*lines, *other]))
        cut = data.draw(st.integers(0, len(moved)))
        parts, block_bytes = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 30, 999]))

    a.write_text("\n".join(moved[:cut]) or "\n", newline="")
    b.write_text("\n".join(moved[cut:]) or "\n", newline="")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_lines, "_BLOCK_BYTES", block_bytes)
        after = outcome([b, a], parts)

    assert after == before


@pytest.mark.parametrize("line", [*ODD, *REFUSED])
def test_a_line_has_one_outcome_among_the_first_rows_and_after_them(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "a.json"
    first = {"a": 0.5, "s": "x", "t": {"x": 1, "y": [0.5]}, "l": [1], "b": None}
    if '"l": [{' in line:
        first["l"] = [{"x": 1, "y": "s"}]
    path.write_text(f"{json.dumps(first)}\n{line}\n", newline="")
    names = ("a", "s", "t", "l")

    def read_by(max_bytes: int) -> str:
        try:
            schema = loader.infer_json(path, str(path), max_bytes=max_bytes)
            (split,) = files.text_splits(find(path)[1], "json", 1 << 20)
            table = PinnedTable("source", "json", schema, columns=names)
            rows = loader.read_split(LocalFile(path, "json", split), "SELECT * FROM source", table)
            return json.dumps([row for batch in rows for row in batch.to_pylist()])
        except LoadError as error:
            return str(error)

    assert read_by(1) == read_by(1 << 20)


def types_of(path: Path, *lines: str, **options: Any) -> dict[str, str]:
    path.write_text("\n".join(lines))
    schema = json_types.infer(path, str(path), **options)
    return {field.name: str(field.type).replace("item: ", "") for field in schema}


@pytest.mark.parametrize("exact", ["", "null_", "\t"])  # by Arrow, and by Python
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        *((["1", "-2"], "int64"), (["1", "2.5"], "double"), (["2.0", "1"], "double")),
        *((["1e3"], "double"), ([str(2**63 - 1)], "int64"), ([str(2**63)], "double")),
        *((["NaN", "1"], "double"), (["1", "Infinity"], "double"), (["-0"], "int64")),
        *((['"x"', "null"], "string"), (['"2024-01-01T00:00:00"'], "string"), (["true"], "bool")),
        *((["null"], "null"), (["[]", "[null]"], "list<null>"), (["[1]", "[0.5]"], "list<double>")),
        *((['["2024-01-01"]'], "list<string>"), (["[[]]", "[[true]]"], "list<list<bool>>")),
        (['{"x": 1}', '{"y": "s"}', '{"x": 0.5}'], "struct<x: double, y: string>"),
        (['[{"x": 1}]', '[{"y": []}, {}]'], "list<struct<x: int64, y: list<null>>>"),
        *((["{}"], "struct<>"), (["{}", '{"x": 1}'], "struct<x: int64>")),
    ],
)
def test_the_types_are_those_of_all_values_in_any_order(
    tmp_path: Path, values: list[str], dtype: str, exact: str
) -> None:
    tail = {"": "", "null_": ', "b": "}null"', "\t": ', "b": "\t"'}[exact]
    lines = [f'{{"a": {value}{tail}}}' for value in values]
    with pytest.MonkeyPatch.context() as patched:
        if exact == "null_":
            patched.setattr(json_lines, "_BLOCK_BYTES", 1)

        assert types_of(tmp_path / "a.json", *lines)["a"] == dtype
        backwards = types_of(tmp_path / "b.json", *lines[::-1])["a"]
    assert sorted(re.findall(r"\w+", backwards)) == sorted(re.findall(r"\w+", dtype))


def test_a_conflict_among_the_first_rows_names_its_file_its_line_and_the_remedy(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text('{"n": [1]}\n\n{"n": [2]}\n')
    (tmp_path / "b.json").write_text('\n{"n": [3]}\n{"n": [4, "x"]}\n')

    with pytest.raises(LoadError) as caught:
        plan_version(DatasetSpec("t", tmp_path))
    assert str(caught.value) == (
        f"cannot load {tmp_path / 'b.json'}: column 'n' holds \"x\", but it is of int64 by the "
        'first rows of the table: set types: {n: "list<string>"} (line 3)'
    )
    plan = plan_version(DatasetSpec("t", tmp_path, types={"n": "list<string>"}))
    (field,) = plan.version.tables[0].schema
    assert field.type == pa.list_(pa.string())


def test_nesting_beyond_what_a_parser_takes_ends_no_process(tmp_path: Path) -> None:
    for opening, closing in (("[", "]"), ('{"x":', "}")):
        path = tmp_path / "a.json"
        path.write_text(f'{{"a": {opening * 100_000}1{closing * 100_000}}}\n')
        with pytest.raises(LoadError, match=r"recursion.* \(line 1\)$"):
            loader.infer_json(path, str(path))


@pytest.fixture
def late_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose last line has a key that the first rows lack."""
    monkeypatch.setattr(files, "_JSON_BYTES", 1)
    monkeypatch.setattr(files, "_FEWEST_JSON_BYTES", 1)
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}\n' * 5 + '{"a": 2, "late": [7]}\n')
    return path


def rows_of(path: Path, **options: Any) -> list[dict[str, Any]]:
    plan = plan_version(DatasetSpec("t", path, **options)).version
    (table,), (shard,) = plan.tables, plan.shards or ()
    local = LocalFile(path, "json", shard.splits[0])
    return [row for b in loader.read_split(local, plan.sql, table) for row in b.to_pylist()]


@pytest.mark.parametrize("options", [{}, {"sql": "SELECT *, a + 1 AS b FROM source"}])
def test_a_key_that_the_first_rows_lack_is_refused_where_every_column_is_read(
    late_key: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(LoadError) as caught:
        rows_of(late_key, **options)
    assert str(caught.value) == (
        f"cannot load {late_key}: the key 'late' is not in the first rows of the table, so it "
        'makes no column: set types: {late: "list<int64>"}, or name the columns to keep (line 6)'
    )


@pytest.mark.parametrize(
    "options",
    [{"columns": ["a"]}, {"sql": "SELECT a FROM source"}, {"sql": "SELECT 1 AS a FROM source"}],
)
def test_a_key_that_a_query_does_not_name_does_not_matter(
    late_key: Path, options: dict[str, Any]
) -> None:
    assert len(rows_of(late_key, **options)) == 6


def test_types_add_the_columns_of_later_keys(late_key: Path) -> None:
    rows = rows_of(late_key, types={"late": "list<int64>"})

    assert rows == [*[{"a": 1, "late": None}] * 5, {"a": 2, "late": [7]}]


def test_types_of_a_column_that_no_row_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n')

    with pytest.raises(CacheError, match="types names the column 'late'"):
        plan_version(DatasetSpec("t", tmp_path, types={"late": "string"}))
