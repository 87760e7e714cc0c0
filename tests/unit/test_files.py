import glob
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server import loader
from cache_server.loader import LocalFile
from cache_server.packing import storage_schema
from cache_server.pinned import PinnedTable, SourceFile, Split
from cache_server.tables import files as sources
from cache_server.tables import parquet
from cache_server.versions import plan_version
from protos.errors import LoadError, RequestError
from protos.spec import DatasetSpec, TableSpec

ALL = "SELECT * FROM source"
ASTRAL = "\U00020000"


def touch(path: Path, size: int = 1) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return str(path)


def table_spec(*given: str | Path, **options: Any) -> TableSpec:
    return DatasetSpec("t", given, **options).tables[0]


def find(*given: str | Path, format: str | None = None) -> tuple[str, tuple[SourceFile, ...]]:
    return sources.find_files(table_spec(*given, format=format))[:2]


def paths_of(*given: str | Path, format: str | None = None) -> list[str]:
    return [file.path for file in find(*given, format=format)[1]]


def pinned(path: Path) -> SourceFile:
    return find(path, format="parquet")[1][0]


def parquet_schema(
    files: Sequence[SourceFile], missing: str = "refuse"
) -> tuple[pa.Schema, tuple[pq.FileMetaData, ...]]:
    footers = sources.read_footers(files, table_spec("/"))
    return parquet.common_schema(files, footers, missing=missing), footers


def table_of(num_rows: int, start: int = 0) -> pa.Table:
    row = np.arange(start, start + num_rows)
    text = pa.array([f"row {number}" for number in row], pa.string())
    return pa.table({"row": row, "half": row / 2, "text": text})


def write_groups(path: Path, groups: Sequence[int], **options: Any) -> pa.Table:
    """A Parquet file with row groups of these sizes."""
    table = table_of(sum(groups))
    start = 0
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for size in groups:
            writer.write_table(table.slice(start, size), row_group_size=max(1, size))
            start += size
    return table


def plan_parquet(path: Path, target_bytes: int) -> tuple[pa.Schema, tuple[Split, ...]]:
    files = (pinned(path),)
    schema, footers = parquet_schema(files)
    stored = storage_schema(pa.schema([f for f in schema if not pa.types.is_struct(f.type)]))
    return schema, parquet.cut(files, footers, stored, target_bytes)


def read(split: Split, format: str, schema: pa.Schema, sql: str = ALL) -> list[dict[str, Any]]:
    file, table = (
        LocalFile(Path(split.file.path), format, split),
        PinnedTable("source", format, schema),
    )
    return [row for b in loader.read_split(file, sql, table) for row in b.to_pylist()]


def infer(file: SourceFile, format: str) -> pa.Schema:
    return loader.infer_schema(Path(file.path), format, file.path)


def read_text(path: Path, format: str, target_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """How many splits the file has, and the rows of all of them."""
    files = find(path, format=format)[1]
    schema = infer(files[0], format)
    splits = sources.text_splits(files, format, target_bytes)
    return len(splits), [row for split in splits for row in read(split, format, schema)]


# -- files -----------------------------------------------------------------------------------------


def test_the_files_of_a_directory_come_by_name_with_those_of_its_directories(
    tmp_path: Path,
) -> None:
    names = ["b.parquet", "a.parquet", "B.parquet", "sub/c.parquet", "sub/deep/a.pq", "10.parquet"]
    for name in [*names, "2.parquet"]:
        touch(tmp_path / name)

    assert paths_of(tmp_path) == sorted(str(tmp_path / name) for name in [*names, "2.parquet"])


@pytest.mark.parametrize(
    "name",
    [
        *(".hidden.parquet", "_temporary.parquet", "_SUCCESS", ".part.parquet.crc"),
        *("_temporary/0/a.parquet", ".git/a.parquet", "sub/.cache/a.parquet", "README.md"),
    ],
)
def test_a_directory_passes_over_hidden_and_foreign_files(tmp_path: Path, name: str) -> None:
    good = touch(tmp_path / "good.parquet")
    touch(tmp_path / name)

    assert paths_of(tmp_path) == [good]


def test_hidden_parents_do_not_hide_a_directory(tmp_path: Path) -> None:
    good = touch(tmp_path / ".cache" / "_data" / "a.parquet")

    assert paths_of(tmp_path / ".cache" / "_data") == [good]
    assert paths_of(tmp_path / ".cache" / "_data" / "*.parquet") == [good]


def test_a_format_keeps_the_other_formats_of_a_directory_out(tmp_path: Path) -> None:
    parquet, csv = touch(tmp_path / "a.parquet"), touch(tmp_path / "a.csv")

    assert paths_of(tmp_path, format="parquet") == [parquet]
    assert paths_of(tmp_path, format="csv") == [csv]


def test_a_glob_gives_its_files_by_name(tmp_path: Path) -> None:
    second, first = touch(tmp_path / "y=2/b.parquet"), touch(tmp_path / "y=1/c.parquet")
    touch(tmp_path / "z/a.parquet")

    assert paths_of(tmp_path / "y=*" / "*.parquet") == [first, second]
    assert paths_of(tmp_path / "y=[2]" / "?.parquet") == [second]


def test_a_recursive_glob_gives_the_files_of_every_directory(tmp_path: Path) -> None:
    files = [touch(tmp_path / name) for name in ("a.parquet", "b/c.parquet", "b/d/e.parquet")]

    assert paths_of(tmp_path / "**" / "*.parquet") == files


def test_a_glob_passes_over_hidden_files_unless_it_names_them(tmp_path: Path) -> None:
    good = touch(tmp_path / "a.parquet")
    marked = touch(tmp_path / "_b.parquet")
    nested = touch(tmp_path / "_temporary" / "c.parquet")

    assert paths_of(tmp_path / "*.parquet") == [good]
    assert paths_of(tmp_path / "**" / "*.parquet") == [good]
    assert paths_of(tmp_path / "_*.parquet") == [marked]
    assert paths_of(tmp_path / "_temporary" / "*.parquet") == [nested]


def test_a_file_that_is_named_is_taken_whatever_its_name(tmp_path: Path) -> None:
    names = ["_b.parquet", ".a.parquet", "a[1].parquet", "a*.parquet", "a b.parquet", "c.PARQUET"]
    files = [touch(tmp_path / name) for name in names]

    assert paths_of(*files) == files


def test_several_sources_come_in_the_given_order(tmp_path: Path) -> None:
    b, c, a = (touch(tmp_path / name) for name in ("b.parquet", "d/c.parquet", "a.parquet"))

    assert paths_of(b, tmp_path / "d", a, b) == [b, c, a, b]


@pytest.mark.parametrize("prefix", ["file://", "file://localhost", "FILE://"])
def test_a_file_uri_is_a_path_with_its_escapes_undone(tmp_path: Path, prefix: str) -> None:
    path = touch(tmp_path / "a b#1%.parquet")
    uri = (tmp_path / "a b#1%.parquet").as_uri().replace("file://", prefix)

    assert "%20" in uri
    assert paths_of(uri) == [path]


def test_a_file_uri_may_be_a_directory_or_a_glob(tmp_path: Path) -> None:
    path = touch(tmp_path / "a.parquet")

    assert paths_of(f"file://{tmp_path}", f"file://{tmp_path}/*.parquet") == [path, path]


def test_a_file_is_pinned_by_size_and_mtime(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path, size=17)
    os.utime(path, ns=(0, 1_234_567_890_123_456_789))

    assert pinned(path) == SourceFile(str(path), 17, 1_234_567_890_123_456_789)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(("a.parquet", "parquet"), ("a.pq", "parquet"), ("a.arrow", "arrow"), ("a.ipc", "arrow")),
        *(("a.feather", "arrow"), ("a.csv", "csv"), ("a.json", "json"), ("a.jsonl", "json")),
        *(("a.ndjson", "json"), ("a.PARQUET", "parquet"), ("a.tar.parquet", "parquet")),
    ],
)
def test_the_name_tells_the_format(tmp_path: Path, name: str, format: str) -> None:
    assert find(touch(tmp_path / name))[0] == format


def test_a_name_that_does_not_tell_the_format_needs_it_given(tmp_path: Path) -> None:
    path = touch(tmp_path / "table.dat")

    with pytest.raises(RequestError, match="give format= one of arrow, csv, json, parquet") as e:
        paths_of(path)
    assert path in str(e.value)
    assert find(path, format="csv")[0] == "csv"


@pytest.mark.parametrize("name", ["nowhere", "nowhere.parquet", "nowhere/a.parquet"])
def test_a_missing_path_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(LoadError, match="does not exist on the node") as caught:
        paths_of(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_one_missing_path_of_several_is_named(tmp_path: Path) -> None:
    good = touch(tmp_path / "a.parquet")

    with pytest.raises(LoadError, match=r"b\.parquet"):
        paths_of(good, tmp_path / "b.parquet")


@pytest.mark.parametrize("pattern", ["", "*.parquet", "**/*.parquet"])
def test_a_source_without_files_is_named(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path / "_SUCCESS")

    with pytest.raises(LoadError) as caught:
        paths_of(tmp_path / pattern)
    reason = "matches no file" if pattern else "holds no files of a known format"
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_source_without_files_of_the_format_names_the_format(tmp_path: Path) -> None:
    touch(tmp_path / "a.csv")

    with pytest.raises(LoadError, match="holds no parquet files"):
        paths_of(tmp_path, format="parquet")


def test_mixed_formats_are_refused_with_a_file_of_each(tmp_path: Path) -> None:
    csv, parquet = touch(tmp_path / "a.csv"), touch(tmp_path / "b.parquet")

    with pytest.raises(RequestError, match="one dataset has one format") as caught:
        paths_of(tmp_path)
    assert f"{csv} (csv), {parquet} (parquet)" in str(caught.value)


@pytest.mark.parametrize("uri", ["ftp://bucket/a.parquet", "file://other-host/a.parquet"])
def test_an_uri_that_is_not_served_is_named(uri: str) -> None:
    with pytest.raises(RequestError, match=r"no file of the node's machine|not served") as caught:
        paths_of(uri)
    assert uri in str(caught.value)


# -- links, and what cannot be read ----------------------------------------------------------------

EVERYWHERE = ["", "**/*.parquet"]


def link(path: Path, target: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def make_unreadable(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory refuses to be listed, also to root, whom no mode keeps out."""
    scandir = os.scandir

    def refusing(path: Any = ".") -> Any:
        if os.path.realpath(path) == os.path.realpath(directory):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)


@pytest.mark.parametrize("pattern", [*EVERYWHERE, "*/*.parquet", "year=202[34]/*"])
def test_linked_directories_are_read_like_others(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path / "elsewhere" / "b.parquet")
    first = touch(tmp_path / "tbl" / "year=2023" / "a.parquet")
    linked = link(tmp_path / "tbl" / "year=2024", tmp_path / "elsewhere")

    assert paths_of(tmp_path / "tbl" / pattern) == [first, str(linked / "b.parquet")]


def test_a_directory_that_is_linked_twice_is_read_twice(tmp_path: Path) -> None:
    touch(tmp_path / "tbl" / "1" / "a.parquet")
    link(tmp_path / "tbl" / "2", "1")

    assert [file.path for file in find(tmp_path / "tbl")[1]] == [
        str(tmp_path / "tbl" / name / "a.parquet") for name in "12"
    ]


@pytest.mark.parametrize("pattern", EVERYWHERE)
@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_directory_above_it_is_not_followed(
    tmp_path: Path, pattern: str, target: str
) -> None:
    files = [touch(tmp_path / "tbl" / "x" / name) for name in ("a.parquet", "y/b.parquet")]
    link(tmp_path / "tbl" / "x" / "y" / "loop", target)

    assert paths_of(tmp_path / "tbl" / pattern) == files


def test_two_directories_that_link_each_other_are_read_to_where_that_begins_again(
    tmp_path: Path,
) -> None:
    for here, there in ("xy", "yx"):
        touch(tmp_path / here / "a.parquet")
        link(tmp_path / here / "z", f"../{there}")

    names = ["x/a.parquet", "x/z/a.parquet", "y/a.parquet", "y/z/a.parquet"]
    assert paths_of(tmp_path) == [str(tmp_path / name) for name in names]


def test_linked_files_and_a_linked_source_are_read(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere" / "b")
    linked = link(tmp_path / "tbl" / "a.parquet", tmp_path / "elsewhere" / "b")
    source = link(tmp_path / "source", tmp_path / "tbl")

    assert paths_of(source, linked) == [str(source / "a.parquet"), str(linked)]


@pytest.mark.parametrize(
    "pattern", [*EVERYWHERE, "**", "*/*.parquet", "year=2025/*", "*/**/[a-z]*"]
)
def test_a_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for year in (2024, 2025):
        touch(tmp_path / "tbl" / f"year={year}" / "a.parquet")
        touch(tmp_path / "tbl" / f"year={year}" / "month=1" / "b.parquet")
    closed = tmp_path / "tbl" / "year=2025"
    make_unreadable(closed, monkeypatch)

    with pytest.raises(LoadError, match=f"cannot read directory {closed}: Permission denied"):
        paths_of(tmp_path / "tbl" / pattern)


def test_a_directory_that_cannot_be_entered_is_named_by_the_name_that_is_sought_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought = [touch(tmp_path / f"year={year}" / "a.parquet") for year in (2023, 2024)]
    touch(tmp_path / "year=2025" / "b.parquet")
    lstat = os.lstat

    def refusing(path: Any) -> os.stat_result:
        if os.fspath(path) == sought[1]:
            raise PermissionError(13, "Permission denied", sought[1])
        return lstat(path)

    assert paths_of(tmp_path / "*" / "a.parquet") == sought
    monkeypatch.setattr(os, "lstat", refusing)
    with pytest.raises(LoadError, match=r"year=2024: Permission denied; ignore: 'year=2024/\*'"):
        paths_of(tmp_path / "*" / "a.parquet")


def test_a_source_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "a.parquet")
    make_unreadable(tmp_path, monkeypatch)

    for pattern in ("", "*.parquet", "**/*.parquet"):
        with pytest.raises(
            LoadError, match=f"cannot read directory {tmp_path}: Permission denied$"
        ):
            paths_of(tmp_path / pattern)


def test_a_directory_to_which_nobody_goes_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = touch(tmp_path / "year=2023" / "a.parquet")
    touch(tmp_path / "_temporary" / "b.parquet")
    make_unreadable(tmp_path / "_temporary", monkeypatch)

    for pattern in ("", "**/*.parquet", "*/*.parquet"):
        assert paths_of(tmp_path / pattern) == [good]
    make_unreadable(tmp_path / "year=2024", monkeypatch)
    assert paths_of(tmp_path / "year=2023" / "*.parquet") == [good]


@pytest.mark.parametrize("pattern", EVERYWHERE)
def test_a_directory_that_is_ignored_with_all_below_it_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    touch(tmp_path / "a.parquet")
    touch(tmp_path / "lost+found" / "b.parquet")
    make_unreadable(tmp_path / "lost+found", monkeypatch)

    for ignore in ("lost+found/*", "lost*"):
        spec = table_spec(tmp_path / pattern, ignore=[ignore])
        assert sources.find_files(spec)[2] == ("a.parquet",)
    with pytest.raises(LoadError, match=r"ignore: 'lost\+found/\*' leaves it out"):
        sources.find_files(table_spec(tmp_path / pattern, ignore=["lost+found/*.pq"]))


@pytest.mark.parametrize("pattern", [*EVERYWHERE, "*.parquet", "a*", "a.parque?"])
def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path / "b.parquet")
    linked = link(tmp_path / "a.parquet", "/nowhere/gone.parquet")

    with pytest.raises(LoadError, match=r"a link to '/nowhere/gone\.parquet'") as caught:
        paths_of(tmp_path / pattern)
    assert str(linked) in str(caught.value)
    assert sources.find_files(table_spec(tmp_path, ignore=["a.*"]))[2] == ("b.parquet",)


@pytest.mark.parametrize("pattern", [*EVERYWHERE, "*/*/*.parquet", "**/x/*.parquet"])
@pytest.mark.parametrize("name", ["year=2024", "price=1.5", "2024"])
def test_a_link_to_a_directory_that_is_gone_is_named(
    tmp_path: Path, pattern: str, name: str
) -> None:
    touch(tmp_path / "year=2023" / "x" / "a.parquet")
    linked = link(tmp_path / name, "/nowhere")

    with pytest.raises(LoadError, match="a link to '/nowhere', which does not exist") as caught:
        paths_of(tmp_path / pattern)
    assert str(linked) in str(caught.value)
    for ignore in (name, f"{name}/*"):
        assert len(sources.find_files(table_spec(tmp_path / pattern, ignore=[ignore]))[1]) == 1


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "b.parquet")
    linked = link(tmp_path / "a.parquet", "a.parquet")

    with pytest.raises(LoadError, match="Too many levels of symbolic links") as caught:
        paths_of(tmp_path)
    assert str(linked) in str(caught.value)


@pytest.mark.parametrize("pattern", EVERYWHERE)
def test_what_is_neither_file_nor_directory_is_named_if_it_is_called_like_a_file(
    tmp_path: Path, pattern: str
) -> None:
    touch(tmp_path / "b.parquet")
    os.mkfifo(tmp_path / "pipe")
    assert len(paths_of(tmp_path / pattern)) == 1

    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(LoadError, match=r"a\.parquet: it is neither a file nor a directory"):
        paths_of(tmp_path / pattern)


@pytest.mark.parametrize("name", [".hidden.parquet", "_b.parquet", "README.md", "_x/b.parquet"])
def test_a_link_to_nowhere_that_is_no_file_of_the_table_is_passed_over(
    tmp_path: Path, name: str
) -> None:
    good = touch(tmp_path / "a.parquet")
    link(tmp_path / name, "/nowhere")

    for pattern in EVERYWHERE:
        assert paths_of(tmp_path / pattern) == [good]


NAMES = ["a.pq", "b.pq", ".c.pq", "_d.pq", "x/a.pq", "x/y/a.pq", "x/.y/a.pq", "_x/a.pq", "x/a/b"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("*", "*.pq", "?.pq", "[ab].pq", ".*", "_*", "[_]*", "[.]*", "**", "**/*", "**/a.pq"),
        *("*/*", "*/a.pq", "x*/y/*", "*/y/../*.pq", "**/y/*.pq", "**/.y/*", "**/x/**", "x**/*.pq"),
        *("**/**/*.pq", "**/_x/*", "*/.y/a.pq", "x/../*.pq", "*/", "**/", "./*.pq", "x//*.pq"),
        *("nowhere/*.pq", "a.pq/*", "*/nowhere/*", "*/a.pq/*", "*/[y]/*", "[x]/a", "*/a/b"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_glob_gives_what_globs_of_python_give_but_for_hidden_files(
    tmp_path: Path, pattern: str, prefix: str
) -> None:
    for name in NAMES:
        touch(tmp_path / name)
    source = f"{tmp_path}/{pattern}"
    if prefix:  # which leaves the path as it is written
        source = prefix + quote(source, safe="/*")
    spec = table_spec(source, format="csv")
    written = unquote(spec.source[0].removeprefix(prefix))

    try:
        found = [file.path for file in sources.find_files(spec)[1]]
    except LoadError as error:
        assert re.search("matches no file|holds no csv files", str(error))
        found = []
    assert found == files_of_glob(written)


def files_of_glob(pattern: str) -> list[str]:
    """What Python's own `glob` finds, with the hidden files left out unless they are named."""

    def is_hidden(path: Path) -> bool:
        return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)

    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    found = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    named = is_hidden(Path(pattern))
    return sorted(str(Path(path)) for path in found if named or not is_hidden(Path(path)))


# -- changes ---------------------------------------------------------------------------------------


def test_an_unchanged_file_passes(tmp_path: Path) -> None:
    touch(tmp_path / "a.parquet")

    sources.check_unchanged(pinned(tmp_path / "a.parquet"))


def test_another_size_is_a_change_with_both_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path, size=10)
    file = pinned(path)

    path.write_bytes(b"x" * 12)
    os.utime(path, ns=(0, file.mtime_ns))

    with pytest.raises(LoadError, match=r"it had 10 bytes .* now 12 bytes") as caught:
        sources.check_unchanged(file)
    assert str(path) in str(caught.value)


def test_another_mtime_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path)
    file = pinned(path)

    os.utime(path, ns=(0, file.mtime_ns + 1))

    with pytest.raises(LoadError, match=f"now 1 bytes and {file.mtime_ns + 1} ns"):
        sources.check_unchanged(file)


def test_a_removed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path)
    file = pinned(path)

    path.unlink()

    with pytest.raises(LoadError, match="No such file") as caught:
        sources.check_unchanged(file)
    assert str(path) in str(caught.value)


# -- Parquet schemas -------------------------------------------------------------------------------


def test_the_files_share_one_schema_and_keep_their_footers(tmp_path: Path) -> None:
    for index, rows in enumerate([3, 5]):
        pq.write_table(table_of(rows), tmp_path / f"{index}.parquet")
    _, files = find(tmp_path)

    schema, footers = parquet_schema(files)

    assert schema.equals(table_of(0).schema)
    assert [footer.num_rows for footer in footers] == [3, 5]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"a": pa.array([1]), "b": pa.array(["x"])}, "b is string instead of double"),
        ({"a": pa.array([1])}, "b missing; missing_columns: null makes them null"),
    ],
)
def test_a_file_with_other_columns_is_named_with_what_differs(
    tmp_path: Path, other: dict[str, pa.Array], reason: str
) -> None:
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pq.write_table(pa.table({"a": [1], "b": [0.5]}), first)
    pq.write_table(pa.table(other), second)

    with pytest.raises(LoadError) as caught:
        parquet_schema([pinned(first), pinned(second)])
    assert f"{second} has other columns than {first}: {reason}" in str(caught.value)


def test_a_column_that_an_earlier_file_lacks_names_that_file(tmp_path: Path) -> None:
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pq.write_table(pa.table({"a": [1]}), first)
    pq.write_table(pa.table({"a": [1], "c": pa.array([1], pa.int8())}), second)

    with pytest.raises(LoadError, match="c missing") as caught:
        parquet_schema([pinned(first), pinned(second)])
    assert f"{first} has other columns than {second}" in str(caught.value)


def test_columns_are_found_by_name_and_missing_ones_are_null_where_the_spec_says_so(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"a": [1], "b": [0.5]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": [1.5], "a": [2]}), tmp_path / "2.parquet")
    pq.write_table(pa.table({"c": ["x"], "a": [3]}), tmp_path / "3.parquet")
    files = find(tmp_path)[1]

    schema, footers = parquet_schema(files, "null")
    splits = parquet.cut(files, footers, storage_schema(schema), 10**9)

    assert schema.names == ["a", "b", "c"]
    assert [row for split in splits for row in read(split, "parquet", schema)] == [
        {"a": 1, "b": 0.5, "c": None},
        {"a": 2, "b": 1.5, "c": None},
        {"a": 3, "b": None, "c": "x"},
    ]


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_a_file_without_a_sound_footer_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(100), path)
    sound = path.read_bytes()
    path.write_bytes({"truncated": sound[:-50], "empty": b"", "other": b"row,half\n" * 50}[damage])

    with pytest.raises(LoadError, match="cannot read the Parquet footer of") as caught:
        parquet_schema([pinned(path)])
    assert str(path) in str(caught.value)


# -- Parquet splits: the byte-range rule of DataFusion ---------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    groups=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    target_bytes=st.sampled_from([1, 100, 1_000, 5_000, 20_000, 10**9]),
    compression=st.sampled_from(["none", "zstd"]),
    dictionary=st.booleans(),
)
def test_each_split_reads_the_rows_that_its_footer_promises(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[int],
    target_bytes: int,
    compression: str,
    dictionary: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "groups.parquet"
    table = write_groups(path, groups, compression=compression, use_dictionary=dictionary)

    schema, splits = plan_parquet(path, target_bytes)
    rows = [read(split, "parquet", schema) for split in splits]

    assert [len(part) for part in rows] == [split.num_rows for split in splits]
    assert [row for part in rows for row in part] == table.to_pylist()


@pytest.mark.parametrize("sql", [ALL, "SELECT 1 AS one FROM source", "SELECT text FROM source"])
def test_a_large_file_is_cut_like_a_small_one(tmp_path: Path, sql: str) -> None:
    table = write_groups(tmp_path / "a.parquet", [5_000] * 6)

    schema, splits = plan_parquet(tmp_path / "a.parquet", 200_000)
    counts = [len(read(split, "parquet", schema, sql)) for split in splits]

    assert len(splits) > 2
    assert counts == [split.num_rows for split in splits]
    assert sum(counts) == len(table)


def test_the_target_decides_how_many_row_groups_a_split_has(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [100] * 10)

    _, whole = plan_parquet(tmp_path / "a.parquet", 10**9)
    _, halves = plan_parquet(tmp_path / "a.parquet", whole[0].estimated_bytes // 2 + 1)
    _, groups = plan_parquet(tmp_path / "a.parquet", 1)

    assert [split.num_rows for split in whole] == [1000]
    assert len(halves) == 2
    assert len(groups) > 5
    for splits in (halves, groups):
        assert sum(split.num_rows or 0 for split in splits) == 1000
        assert sum(split.estimated_bytes for split in splits) == whole[0].estimated_bytes


def test_many_tiny_row_groups_are_cut_as_datafusion_counts(tmp_path: Path) -> None:
    # More ranges than the square root of the size: their number is not always the one asked for.
    pq.write_table(pa.table({"a": range(300)}), tmp_path / "a.parquet", row_group_size=1)

    schema, splits = plan_parquet(tmp_path / "a.parquet", 8)

    assert len(splits) > 100
    for split in splits[:: len(splits) // 10]:
        assert len(read(split, "parquet", schema)) == split.num_rows


def test_a_file_without_rows_has_no_splits(tmp_path: Path) -> None:
    pq.write_table(table_of(0), tmp_path / "none.parquet")
    write_groups(tmp_path / "zero.parquet", [0])

    assert plan_parquet(tmp_path / "none.parquet", 10)[1] == ()
    assert plan_parquet(tmp_path / "zero.parquet", 10)[1] == ()


def test_the_decoded_size_is_exact_for_fixed_width_columns(tmp_path: Path) -> None:
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(784 * 50, np.uint8)), 784)
    table = pa.table({"image": zeros, "label": pa.array([1] * 50, pa.int16())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000

    _, splits = plan_parquet(tmp_path / "a.parquet", 10 * 800)

    assert sum(split.estimated_bytes for split in splits) == 50 * (784 + 2)
    assert len(splits) > 1


def test_only_the_columns_that_are_kept_count(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [1000])
    files = (pinned(tmp_path / "a.parquet"),)
    schema, footers = parquet_schema(files)

    def size_of(*fields: pa.Field) -> int:
        (split,) = parquet.cut(files, footers, pa.schema(fields), 10**9)
        return split.estimated_bytes

    assert size_of(schema.field("row")) == 8_000
    assert size_of(pa.field("made", pa.float32())) == 4_000
    assert size_of(schema.field("text")) > 5_000
    assert size_of(schema.field("row"), schema.field("text")) == 8_000 + size_of(
        schema.field("text")
    )


def dotted_table(num_rows: int) -> pa.Table:
    """Names with dots beside structures whose fields have the same paths."""
    return pa.table(
        {
            "a.b": [f"text {i}" for i in range(num_rows)],
            "a": [{"b": i, "c": "x"} for i in range(num_rows)],
            "row": range(num_rows),
            "v.1": np.arange(num_rows) / 2,
            "tags": [[i] for i in range(num_rows)],
        }
    )


@pytest.mark.parametrize(
    ("columns", "leaves"),
    [
        (["a.b"], [0, 1]),  # the field b of a cannot be told from it, and may be read too
        (["a"], [0, 1, 2]),
        (["v.1", "row"], [3, 4]),
        (["tags"], [5]),
        ([], []),
        (None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_bytes_of_a_column_are_found_whatever_its_name(
    tmp_path: Path, columns: list[str] | None, leaves: list[int]
) -> None:
    pq.write_table(dotted_table(100), tmp_path / "a.parquet", use_dictionary=False)
    (split,) = plan_parquet(tmp_path / "a.parquet", 10**9)[1]
    footer = pq.read_metadata(tmp_path / "a.parquet")
    chunks = [footer.row_group(0).column(i) for i in range(6)]
    ends = [(c.data_page_offset, c.data_page_offset + c.total_compressed_size) for c in chunks]

    found = parquet.ranges(footer, split, columns)

    assert found == [*(ends[leaf] for leaf in leaves), (ends[-1][1], split.file.size)]


def test_the_strings_of_a_column_with_a_dot_in_its_name_count(tmp_path: Path) -> None:
    texts = pa.table({"a.b": ["x" * 1000] * 100, "c": ["y" * 1000] * 100})
    pq.write_table(texts, tmp_path / "a.parquet")

    (split,) = plan_parquet(tmp_path / "a.parquet", 10**9)[1]

    assert split.estimated_bytes == 2 * 100 * (1000 + 4)


# -- CSV, JSON, Arrow ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
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
    if ascii:
        texts = [text for text in texts if max(text, default="") < ASTRAL]
    rows = [{"row": index, "text": text} for index, text in enumerate(texts)] or [{"row": 0}]
    lines = newline.join(json.dumps(row, ensure_ascii=ascii) for row in rows)
    path = tmp_path_factory.getbasetemp() / "lines.json"
    path.write_bytes((lines + newline * ends).encode())

    parts, found = read_text(path, "json", target_bytes)

    assert parts == -(-path.stat().st_size // target_bytes)
    assert found == rows


@pytest.mark.xfail(reason="arrow-json joins the escaped surrogates of such characters wrongly")
def test_escaped_characters_of_the_astral_planes_are_read_from_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": ASTRAL}))

    assert read_text(tmp_path / "a.json", "json", 100)[1] == [{"text": ASTRAL}]


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


@pytest.mark.xfail(reason="object_store cuts a CSV inside of quotes: arrow-rs-object-store#650")
def test_the_schema_of_a_csv_does_not_depend_on_quoted_newlines(tmp_path: Path) -> None:
    write_csv_of_newlines(tmp_path / "a.csv", 1000)
    _, files = find(tmp_path)

    assert infer(files[0], "csv").field("row").type == pa.int64()


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


# -- partitions ------------------------------------------------------------------------------------


def write_partitions(root: Path) -> Path:
    for day in (1, 2, 3):
        for land in ("de", "fr", "__HIVE_DEFAULT_PARTITION__"):
            folder = root / f"day={day}" / f"land={land}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table({"n": [day * 10, day * 10 + 1]}), folder / "x.parquet")
    return root


def test_the_columns_in_the_names_of_directories_appear_with_their_types(tmp_path: Path) -> None:
    _, pin = sources.pin(table_spec(write_partitions(tmp_path)))
    splits = pin.cut(storage_schema(pin.schema), 10**9)

    rows = [row for split in splits for row in read(split, "parquet", pin.schema)]

    assert [(f.name, str(f.type)) for f in pin.schema] == [
        ("n", "int64"), ("day", "int64"), ("land", "string"),
    ]  # fmt: skip
    assert rows[:4] == [
        {"n": 10, "day": 1, "land": None},
        {"n": 11, "day": 1, "land": None},
        {"n": 10, "day": 1, "land": "de"},
        {"n": 11, "day": 1, "land": "de"},
    ]
    assert len(rows) == 18


@pytest.mark.parametrize(
    ("filter", "left"),
    [
        ("day >= 2 AND land = 'fr'", ["day=2/land=fr", "day=3/land=fr"]),
        ("day IN (1, 7) AND land IS NOT NULL", ["day=1/land=de", "day=1/land=fr"]),
        ("day = 2 OR n = 30", None),
        ("day > 9", []),
    ],
)
def test_partitions_that_no_row_can_come_from_are_never_looked_at(
    tmp_path: Path, filter: str, left: list[str] | None
) -> None:
    write_partitions(tmp_path)

    plan = plan_version(DatasetSpec("t", tmp_path, filter=filter)).plan

    splits = [split for shard in plan.shards or () for split in shard.splits]
    found = [str(Path(split.file.path).parent.relative_to(tmp_path)) for split in splits]
    assert found == left if left is not None else len(found) == 9


def test_directories_above_the_source_and_keys_that_not_all_files_have_are_no_columns(
    tmp_path: Path,
) -> None:
    root = write_partitions(tmp_path / "year=2024")

    assert sources.pin(table_spec(root / "day=1"))[1].schema.names == ["n", "land"]
    (root / "day=1" / "other").mkdir()
    pq.write_table(pa.table({"n": [1]}), root / "day=1" / "other" / "y.parquet")
    assert sources.pin(table_spec(root))[1].schema.names == ["n", "day"]


def test_a_source_that_is_a_file_has_no_columns_of_the_directories_above(tmp_path: Path) -> None:
    root = write_partitions(tmp_path / "year=2024")
    file = root / "day=1" / "land=de" / "x.parquet"

    for source in (file, file.as_uri(), tmp_path / "year=2024/day=1/land=de" / "[x].parquet"):
        assert sources.find_files(table_spec(source))[2] == ("x.parquet",)
        assert sources.pin(table_spec(source))[1].schema.names == ["n"]


def test_brackets_in_the_name_of_a_directory_do_not_move_the_source_up(tmp_path: Path) -> None:
    root = write_partitions(tmp_path / "set[1]" / "year=2024")

    assert sources.pin(table_spec(root))[1].schema.names == ["n", "day", "land"]


@pytest.mark.parametrize("source", ["//year=2024//", "//year=2024/./day=*"])
def test_a_uri_with_slashes_to_spare_finds_the_same_columns(tmp_path: Path, source: str) -> None:
    write_partitions(tmp_path / "year=2024")
    uri = f"file://{tmp_path}{source}" + ("/*/*.parquet" if "*" in source else "")

    assert sources.pin(table_spec(uri))[1].schema.names == ["n", "day", "land"]


def test_patterns_to_ignore_are_over_paths_below_the_source(tmp_path: Path) -> None:
    kept = touch(tmp_path / "old" / "new" / "a.parquet")
    touch(tmp_path / "old" / "new" / "old" / "b.parquet")

    for source in (tmp_path / "old" / "new", f"file://{tmp_path}/old//new"):
        _, files, relative = sources.find_files(table_spec(source, ignore=["old/*"]))
        assert ([file.path for file in files], relative) == ([kept], ("a.parquet",))


def test_a_sample_makes_up_the_columns_that_are_read_and_no_others(tmp_path: Path) -> None:
    pq.write_table(table_of(500), tmp_path / "a.parquet", row_group_size=100)
    _, pin = sources.pin(table_spec(tmp_path))
    assert pin.sample is not None

    some, every = pin.sample(1000, ("row",)), pin.sample(1000)

    assert (some.num_rows, some.schema.names) == (1000, ["row", "half", "text"])
    assert [column.null_count for column in some.columns] == [0, 1000, 1000]
    assert [column.null_count for column in every.columns] == [0, 0, 0]
    assert set(some["row"].to_pylist()) <= set(range(500))
    assert loader.count_kept("SELECT row FROM source WHERE row < 250", "source", some) in range(
        450, 550
    )
