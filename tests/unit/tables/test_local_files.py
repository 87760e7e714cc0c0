"""Which files a path, a glob or a URI of this machine names, and how each is pinned."""

import glob
import itertools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from cache_protocol.errors import LoadError, RequestError
from cache_server.source.pinned import SourceFile
from cache_server.tables import local_files
from tests.table_files import find, paths_of, pinned, table_spec, touch


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


@pytest.mark.parametrize("prefix", ["file:", "file://", "file://localhost", "FILE://"])
def test_a_file_uri_is_a_path_with_its_escapes_undone(tmp_path: Path, prefix: str) -> None:
    path = touch(tmp_path / "a b#1%.parquet")
    uri = (tmp_path / "a b#1%.parquet").as_uri().replace("file://", prefix)

    assert "%20" in uri
    assert paths_of(uri) == [path]


def test_a_file_uri_may_be_a_directory_or_a_glob(tmp_path: Path) -> None:
    path = touch(tmp_path / "a.parquet")

    assert paths_of(f"file://{tmp_path}", f"file://{tmp_path}/*.parquet") == [path, path]


@pytest.mark.parametrize("name", ["?.parquet", "a?.parquet", "#1.parquet", "?", "#"])
def test_a_file_uri_with_a_query_or_a_fragment_is_no_file_of_a_shorter_path(
    tmp_path: Path, name: str
) -> None:
    touch(tmp_path / "a" / "b.parquet")

    with pytest.raises(RequestError, match=r"write %3F for [?] and %23 for #"):
        paths_of(f"file://{tmp_path}/a/{name}")
    assert paths_of(f"file://{tmp_path}/a/%3F.parquet") == [str(tmp_path / "a/b.parquet")]


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


@pytest.mark.parametrize("name", ["loop", "loop/a.parquet", "loop/*.parquet", "loop/**"])
def test_a_path_that_cannot_be_followed_is_not_called_missing(tmp_path: Path, name: str) -> None:
    # As the system says it of a directory that may not be searched, which root always may.
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(LoadError) as caught:
        paths_of(tmp_path / name)
    reason = "Too many levels of symbolic links"
    assert str(caught.value) == f"cannot read source {str(tmp_path / name)!r}: {reason}"


def test_a_path_that_no_system_has_is_missing() -> None:
    with pytest.raises(LoadError, match="does not exist on the node"):
        paths_of("/a\0b.parquet")


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


@pytest.mark.parametrize("name", ["b.csv.gz", "b.CSV.BZ2", "b.csv.zst", "sub/b.csv.zip"])
def test_a_compressed_file_is_refused_and_not_left_out(tmp_path: Path, name: str) -> None:
    plain, compressed = touch(tmp_path / "a.csv"), touch(tmp_path / name)

    for source in (tmp_path, tmp_path / "**/*.*", compressed):
        for format in ("csv", None):
            with pytest.raises(RequestError, match="is compressed, which is not read") as caught:
                paths_of(source, format=format)
            assert compressed in str(caught.value)
    table = table_spec(tmp_path, ignore=[f"*{Path(name).suffix}"])
    assert [file.path for file in local_files.find_files(table)[1]] == [plain]


def test_a_file_whose_name_is_no_utf_8_is_named_unless_it_is_ignored(tmp_path: Path) -> None:
    plain = touch(tmp_path / "a.csv")
    touch(tmp_path / "b\udcff.csv")

    for source in (tmp_path, tmp_path / "*.csv"):
        with pytest.raises(LoadError, match=r"b\\udcff\.csv': its name is not UTF-8"):
            paths_of(source)
    table = table_spec(tmp_path, ignore=["b*"])
    assert [file.path for file in local_files.find_files(table)[1]] == [plain]


def test_a_compressed_file_of_another_format_is_passed_over(tmp_path: Path) -> None:
    plain = touch(tmp_path / "a.csv")
    for name in ("b.json.gz", "c.tar.gz", "d.gz"):
        touch(tmp_path / name)

    assert paths_of(tmp_path, format="csv") == [plain]


@pytest.mark.parametrize("uri", ["ftp://bucket/a.parquet", "file://other-host/a.parquet"])
def test_an_uri_that_is_not_served_is_named(uri: str) -> None:
    with pytest.raises(
        RequestError, match=r"not a file of the node's machine|not served"
    ) as caught:
        paths_of(uri)
    assert uri in str(caught.value)


def test_an_option_that_no_store_has_is_refused_for_files_of_the_node(tmp_path: Path) -> None:
    path = touch(tmp_path / "a.csv")
    with pytest.raises(
        RequestError, match="no store has an option 'z'; no store has an option 'y'"
    ):
        local_files.find_files(table_spec(path, storage_options={"z": "1", "y": "2"}))
    shared = {"AWS_REGION": "us-east-1", "account_name": "a", "revision": "main"}
    assert local_files.find_files(table_spec(path, storage_options=shared))[1][0].path == path


# -- lake tables -----------------------------------------------------------------------------------


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A Delta table beside plain files."""
    names = ["t/_delta_log/0.json", "t/day=1/a.parquet", "t/b.parquet", "c.parquet", "t/d.csv"]
    for name in names:
        touch(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        *("t", "t/", "t/*.parquet", "t/*/*.parquet", "", "**/*.parquet"),
        *("t/day=1", "t/day=1/", "t/day=1/*.parquet"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_files_of_a_delta_table_are_not_read_as_plain_ones(
    lake: Path, source: str, prefix: str
) -> None:
    with pytest.raises(RequestError, match="is a Delta table: say format: delta") as caught:
        paths_of(f"{prefix}{lake}/{source}", format="parquet")
    assert str(lake / "t") in str(caught.value)


def test_files_beside_a_delta_table_are_read(lake: Path) -> None:
    beside = str(lake / "c.parquet")
    assert paths_of(lake / "*.parquet") == [beside]
    table = table_spec(lake, format="parquet", ignore=["t/*"])
    assert [file.path for file in local_files.find_files(table)[1]] == [beside]


def test_a_file_of_a_delta_table_that_is_named_and_its_log_are_read_as_they_are(lake: Path) -> None:
    assert paths_of(lake / "t/b.parquet") == [str(lake / "t/b.parquet")]
    log = [str(lake / "t/_delta_log/0.json")]
    assert paths_of(lake / "t/_delta_log/*.json") == log
    assert paths_of(lake / "t/_*/*.json") == log


_METADATA = "00002-81c84686-1151-417f-bf29-87c00c220852.metadata.json"


@pytest.mark.parametrize(
    "source", ["i", "i/", "i/data", "i/data/*.parquet", "i/data/day=1", "", "**/*.parquet", "i/*/*"]
)
@pytest.mark.parametrize("metadata", [_METADATA, "v3.metadata.json", "v3.gz.metadata.json"])
def test_files_of_an_iceberg_table_are_not_read_as_plain_ones(
    tmp_path: Path, source: str, metadata: str
) -> None:
    for name in (f"i/metadata/{metadata}", "i/data/day=1/a.parquet", "i/data/b.parquet"):
        touch(tmp_path / name)
    with pytest.raises(RequestError, match="is an Iceberg table: say format: iceberg") as caught:
        paths_of(f"{tmp_path}/{source}", format="parquet")
    assert str(tmp_path / "i") in str(caught.value)
    table = table_spec(tmp_path, format="parquet", ignore=["i/*", "c*"])
    beside = touch(tmp_path / "d.parquet")
    assert [file.path for file in local_files.find_files(table)[1]] == [beside]


def test_a_file_of_an_iceberg_table_that_is_named_and_its_metadata_are_read_as_they_are(
    tmp_path: Path,
) -> None:
    metadata = touch(tmp_path / "metadata" / _METADATA)
    file = touch(tmp_path / "data/b.parquet")
    assert paths_of(file) == [file]
    assert paths_of(tmp_path / "metadata/*.json") == [metadata]


def test_a_directory_of_metadata_of_another_kind_makes_no_iceberg_table(tmp_path: Path) -> None:
    touch(tmp_path / "metadata/picture-1.metadata.json")
    touch(tmp_path / "metadata/schema.json")
    file = touch(tmp_path / "data/b.parquet")
    assert paths_of(tmp_path, format="parquet") == [file]
    assert paths_of(tmp_path / "data") == [file]


def test_ignore_is_no_way_out_for_a_source_inside_of_a_table(lake: Path) -> None:
    with pytest.raises(RequestError, match=r"with that as the source$"):
        paths_of(lake / "t/day=1")
    with pytest.raises(RequestError, match=r"or leave its files out by ignore$"):
        paths_of(lake, format="parquet")


# -- neither files nor directories -----------------------------------------------------------------


@pytest.fixture
def oddities(tmp_path: Path) -> Iterator[Path]:
    """A pipe, a socket, a device and a link to the pipe, whose names are those of tables."""
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "pipe.csv")
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(tmp_path / "socket.csv"))  # which may be no longer than this
        yield tmp_path


@pytest.mark.parametrize("name", ["pipe.csv", "link.csv", "socket.csv", "device.csv"])
def test_what_is_no_file_is_refused_by_name(oddities: Path, name: str) -> None:
    others = [path.name for path in oddities.iterdir() if path.name != name]
    for source in (name, "*.csv", "", "**/[a-z]*"):
        with pytest.raises(LoadError, match="neither a file nor a directory") as caught:
            local_files.find_files(table_spec(f"{oddities}/{source}", format="csv", ignore=others))
        assert str(oddities / name) in str(caught.value)


def test_what_is_no_file_may_be_ignored(oddities: Path) -> None:
    good = touch(oddities / "good.csv")
    table = table_spec(oddities, ignore=["[!g]*"])
    assert [file.path for file in local_files.find_files(table)[1]] == [good]


# -- globs, beside those of Python -----------------------------------------------------------------


NAMES = [
    "a.pq",
    "b.pq",
    ".c.pq",
    "_d.pq",
    "_k=1/a.pq",
    "x/a.pq",
    "x/y/a.pq",
    "x/.y/a.pq",
    "_x/a.pq",
    "x/a/b",
]


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
        found = [file.path for file in local_files.find_files(spec)[1]]
    except LoadError as error:
        assert re.search("matches no file|holds no csv files", str(error))
        found = []
    assert found == files_of_glob(written)


def files_of_glob(pattern: str) -> list[str]:
    """What Python's own `glob` finds, with the hidden files left out unless they are named."""

    def is_hidden(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return any(part.startswith((".", "_")) and not part.startswith("_k=") for part in parts)

    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    found = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    named = is_hidden(Path(pattern))
    return sorted(str(Path(path)) for path in found if named or not is_hidden(Path(path)))


# -- changes ---------------------------------------------------------------------------------------


def test_an_unchanged_file_passes(tmp_path: Path) -> None:
    touch(tmp_path / "a.parquet")

    local_files.check_unchanged(pinned(tmp_path / "a.parquet"))


def test_another_size_is_a_change_with_both_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path, size=10)
    file = pinned(path)

    path.write_bytes(b"x" * 12)
    os.utime(path, ns=(0, file.mtime_ns))

    with pytest.raises(LoadError, match=r"it had 10 bytes .* now 12 bytes") as caught:
        local_files.check_unchanged(file)
    assert str(path) in str(caught.value)


def test_another_mtime_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path)
    file = pinned(path)

    os.utime(path, ns=(0, file.mtime_ns + 1))

    with pytest.raises(LoadError, match=f"now 1 bytes and {file.mtime_ns + 1} ns"):
        local_files.check_unchanged(file)


def test_a_removed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    touch(path)
    file = pinned(path)

    path.unlink()

    with pytest.raises(LoadError, match="No such file") as caught:
        local_files.check_unchanged(file)
    assert str(path) in str(caught.value)
