"""CSV, newline JSON and Arrow files: their types, and all their rows in order."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datafusion import SessionContext
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.source.pinned import SourceFile
from cache_server.sql import loader
from cache_server.tables import files as sources
from tests.table_files import find, read, table_of, touch


def infer(file: SourceFile, format: str) -> pa.Schema:
    if format == "json":
        return loader.infer_json(Path(file.path), file.path)
    return loader.infer_schema(Path(file.path), format, file.path)


def read_text(path: Path, format: str, target_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """How many splits the file has, and the rows of all of them."""
    files = find(path, format=format)[1]
    schema = infer(files[0], format)
    splits = sources.text_splits(files, format, target_bytes)
    return len(splits), [row for split in splits for row in read(split, format, schema)]


@settings(max_examples=25)
@given(
    texts=st.lists(
        st.text(st.characters(blacklist_categories=["Cs"]), max_size=30), min_size=1, max_size=60
    ),
    target_bytes=st.sampled_from([7, 50, 300, 10**6]),
    ascii=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    ends=st.booleans(),
)
def test_newline_json_is_read_whole_and_in_order_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    target_bytes: int,
    ascii: bool,
    newline: str,
    ends: bool,
) -> None:
    rows = [{"row": index, "text": text} for index, text in enumerate(texts)] or [{"row": 0}]
    lines = newline.join(json.dumps(row, ensure_ascii=ascii) for row in rows)
    path = tmp_path_factory.getbasetemp() / "lines.json"
    path.write_bytes((lines + newline * ends).encode())

    parts, found = read_text(path, "json", target_bytes)

    assert parts == -(-path.stat().st_size // target_bytes)
    assert found == rows


def write_csv_of_newlines(path: Path, num_rows: int) -> list[dict[str, Any]]:
    lines = [f'{i},"line {i}\nsecond, ""line"""' for i in range(num_rows)]
    path.write_text("\n".join(["row,text", *lines]))
    return [{"row": i, "text": f'line {i}\nsecond, "line"'} for i in range(num_rows)]


def test_a_csv_with_quoted_newlines_is_read_whole_and_in_order(tmp_path: Path) -> None:
    rows = write_csv_of_newlines(tmp_path / "a.csv", 5000)
    _, files = find(tmp_path)
    schema = pa.schema([("row", pa.int64()), ("text", pa.string())])

    (split,) = sources.text_splits(files, "csv", 100)

    assert read(split, "csv", schema) == rows


def test_the_schema_of_a_csv_is_that_of_its_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'n,x,flag,day,at,"odd ""name""",text\n'
        ",0.5,true,2024-02-29,2024-02-29T12:00:00,1,\n"
        '7,2,false,2024-02-29,2024-02-29T12:00:00,2,"a\nb"\n'
    )
    _, files = find(tmp_path)

    schema = infer(files[0], "csv")

    assert schema.names == ["n", "x", "flag", "day", "at", 'odd "name"', "text"]
    assert [str(dtype) for dtype in schema.types] == [
        *("int64", "double", "bool", "date32[day]", "timestamp[s]", "int64", "string")
    ]


@pytest.mark.parametrize("num_rows", [1000, 150_000])
def test_a_large_csv_with_quoted_newlines_gets_its_types_and_is_read_whole(
    tmp_path: Path, num_rows: int
) -> None:
    rows = write_csv_of_newlines(tmp_path / "a.csv", num_rows)

    parts, found = read_text(tmp_path / "a.csv", "csv", 100_000)

    assert (parts, found) == (1, rows)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream])
def test_an_arrow_file_is_read_whole_and_in_order(
    tmp_path: Path, writer: Any, compression: str | None
) -> None:
    table = table_of(1000).append_column(
        "kind", pa.array([f"kind {i % 3}" for i in range(1000)]).dictionary_encode()
    )
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with writer(str(tmp_path / "a.arrow"), table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=70)

    parts, rows = read_text(tmp_path / "a.arrow", "arrow", 100)

    assert parts == 1
    assert rows == table.to_pylist()


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream])
def test_what_follows_the_end_of_an_arrow_file_is_refused_and_not_left_out(
    tmp_path: Path, writer: Any
) -> None:
    path = tmp_path / "a.arrow"
    written = []
    for number in range(2):
        with writer(str(path), table_of(0).schema) as stream:
            stream.write_table(table_of(5, number * 5))
        written.append(path.read_bytes())
    path.write_bytes(b"".join(written))

    with pytest.raises(LoadError, match=rf"{path}: its rows end at byte \d+, .* joined by cat"):
        read_text(path, "arrow", 100)


def test_zeros_at_the_end_of_an_arrow_stream_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), table_of(5).schema) as stream:
        stream.write_table(table_of(5))
    path.write_bytes(path.read_bytes() + bytes(64))

    assert read_text(path, "arrow", 100)[1] == table_of(5).to_pylist()


def test_an_arrow_file_of_datafusion_is_read_whole(tmp_path: Path) -> None:
    path, table = tmp_path / "a.arrow", table_of(20_000)
    context = SessionContext()
    context.register_record_batches("t", [table.to_batches(max_chunksize=3000)])
    copy = f"COPY (SELECT * FROM t ORDER BY row) TO '{path}' STORED AS ARROW"
    context.sql(copy).collect()  # aligned by 64 bytes

    assert read_text(path, "arrow", 100)[1] == table.to_pylist()


def test_text_splits_do_not_know_their_rows(tmp_path: Path) -> None:
    touch(tmp_path / "a.json", size=1000)
    touch(tmp_path / "b.json", size=0)
    touch(tmp_path / "c.json", size=90)
    _, files = find(tmp_path)

    splits = sources.text_splits(files, "json", 400)

    assert [(split.file.path[-6:], split.part, split.parts) for split in splits] == [
        *(("a.json", 0, 3), ("a.json", 1, 3), ("a.json", 2, 3)),
        ("c.json", 0, 1),
    ]
    assert {split.num_rows for split in splits} == {None}
    assert [split.estimated_bytes for split in splits] == [333, 333, 333, 90]
