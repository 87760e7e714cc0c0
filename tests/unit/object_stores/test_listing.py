"""Which objects a URI means, and what of them is pinned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server.object_stores import download, expand, is_remote, root_of
from cache_server.tables.local_files import find_files
from tests.object_store import S3Server
from tests.unit.object_stores.conftest import PARQUET, found, one


def test_uris_are_told_from_paths() -> None:
    assert is_remote("s3://bucket/key")
    assert is_remote("hf://org/name")
    assert not is_remote("file:///a")
    assert not is_remote("/a/b*.parquet")
    assert not is_remote("relative://"[:8])


def test_thousands_of_objects_are_listed_page_by_page(s3: S3Server) -> None:
    keys = [f"many/part-{i:05d}.parquet" for i in range(2500)]
    s3.put_many("lake", {key: b"x" for key in keys})
    assert found(s3, "s3://lake/many") == [f"s3://lake/{key}" for key in keys]
    assert s3.counts() == {("HEAD", "lake/many"): 1, ("GET", "lake"): 3}


@pytest.fixture
def tree(s3: S3Server) -> S3Server:
    s3.put_many(
        "tree",
        {
            key: key.encode()
            for key in (
                "t/b.parquet",
                "t/a.PARQUET",
                "t/sub/c.parquet",
                "t/year=2024/d.parquet",
                "t/notes.txt",
                "t/_SUCCESS",
                "t/.hidden.parquet",
                "t/_log/0.parquet",
                "t/sub/_temporary/e.parquet",
                "tt/other.parquet",
                "odd/a b+c=ü%20.parquet",
                "keys/_hour=5/a.parquet",
                "keys/_temporary/_hour=5/b.parquet",
                "data.parquet/part-0.parquet",
            )
        },
    )
    s3.put("tree", "t/", b"")
    s3.put("tree", "t/sub/", b"")
    s3.clear()
    return s3


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("s3://tree/t", ["a.PARQUET", "b.parquet", "sub/c.parquet", "year=2024/d.parquet"]),
        ("s3a://tree/t/", ["a.PARQUET", "b.parquet", "sub/c.parquet", "year=2024/d.parquet"]),
        ("s3://tree/t/b.parquet", ["b.parquet"]),
        ("s3://tree/t/notes.txt", ["notes.txt"]),
        ("s3://tree/t/*.parquet", ["b.parquet"]),
        ("s3://tree/t/*", ["a.PARQUET", "b.parquet", "notes.txt"]),
        ("s3://tree/t/?.parquet", ["b.parquet"]),
        ("s3://tree/t/[ab].*", ["a.PARQUET", "b.parquet"]),
        ("s3://tree/t/[!a].*", ["b.parquet"]),
        ("s3://tree/t/*/*.parquet", ["sub/c.parquet", "year=2024/d.parquet"]),
        ("s3://tree/t/year=*/d.parquet", ["year=2024/d.parquet"]),
        (
            "s3://tree/t/**/*.parquet",
            ["b.parquet", "sub/c.parquet", "year=2024/d.parquet"],
        ),
        ("s3://tree/t/s**/c.parquet", ["sub/c.parquet"]),
        ("s3://tree/t/_log/*", ["_log/0.parquet"]),
        ("s3://tree/t/.*", [".hidden.parquet"]),
        ("s3://tree/t/*.orc", []),
    ],
)
def test_a_source_means_its_objects_by_name(tree: S3Server, source: str, keys: list[str]) -> None:
    assert found(tree, source) == [f"s3://tree/t/{key}" for key in keys]


@pytest.mark.parametrize("source", ["s3://tree/keys", "s3://tree/keys/**"])
def test_a_key_that_begins_with_an_underscore_hides_no_rows(tree: S3Server, source: str) -> None:
    assert found(tree, source) == ["s3://tree/keys/_hour=5/a.parquet"]


def test_a_compressed_object_is_refused_and_not_left_out(s3: S3Server) -> None:
    s3.put_many("packed", {"t/a.csv": b"a\n1\n", "t/b.csv.gz": b"x"})
    for source in ("s3://packed/t", "s3://packed/t/*", "s3://packed/t/b.csv.gz"):
        (table,) = DatasetSpec("t", source, storage_options=s3.storage_options).tables
        with pytest.raises(RequestError, match=r"s3://packed/t/b\.csv\.gz is compressed"):
            find_files(table)


def test_a_whole_bucket_is_a_prefix(tree: S3Server) -> None:
    assert "s3://tree/tt/other.parquet" in found(tree, "s3://tree")
    assert found(tree, "s3://tree/") == found(tree, "s3://tree")


def test_a_directory_may_look_like_a_file(tree: S3Server) -> None:
    assert found(tree, "s3://tree/data.parquet") == ["s3://tree/data.parquet/part-0.parquet"]


def test_odd_names_are_taken_as_they_are(tree: S3Server, tmp_path: Path) -> None:
    uri = "s3://tree/odd/a b+c=ü%20.parquet"
    assert found(tree, "s3://tree/odd") == [uri]
    file = one(tree, uri)
    download(file, tmp_path / "f", tree.options, tree.secrets)
    assert (tmp_path / "f").read_bytes() == "odd/a b+c=ü%20.parquet".encode()


def test_one_object_needs_no_listing(tree: S3Server) -> None:
    one(tree, "s3://tree/t/b.parquet")
    assert tree.counts() == {("HEAD", "tree/t/b.parquet"): 1}


@pytest.mark.parametrize("name", ["part[1].parquet", "part*.parquet", "part?.parquet"])
def test_an_object_whose_name_is_a_glob_is_that_object_alone(s3: S3Server, name: str) -> None:
    for key in (name, "part1.parquet"):
        s3.put("magic", f"t/{key}", b"rows")
    assert found(s3, f"s3://magic/t/{name}") == [f"s3://magic/t/{name}"]


def test_brackets_in_a_glob_stand_for_themselves_within_brackets(s3: S3Server) -> None:
    for key in ("part[1].parquet", "part[2].parquet", "part1.parquet"):
        s3.put("brackets", key, b"rows")
    pattern = "s3://brackets/part[[]*.parquet"
    assert found(s3, pattern) == [f"s3://brackets/part[{n}].parquet" for n in (1, 2)]


@pytest.fixture
def lake(s3: S3Server) -> S3Server:
    """A Delta table beside plain files."""
    names = ("t/_delta_log/0.json", "t/day=1/a.parquet", "t/b.parquet", "c.parquet")
    s3.put_many("delta-lake", dict.fromkeys(names, b"x"))
    return s3


@pytest.mark.parametrize(
    "source",
    [
        *("t", "t/", "t/*.parquet", "t/*/*.parquet", "t/**", "", "**/*.parquet", "*/*.parquet"),
        *("t/day=1", "t/day=1/", "t/day=1/*.parquet"),
    ],
)
def test_files_of_a_delta_table_are_not_read_as_plain_ones(lake: S3Server, source: str) -> None:
    with pytest.raises(RequestError, match="is a Delta table: say format: delta") as caught:
        found(lake, f"s3://delta-lake/{source}")
    assert "s3://delta-lake/t" in str(caught.value)


def test_files_beside_a_delta_table_are_read(lake: S3Server) -> None:
    beside = "s3://delta-lake/c.parquet"
    assert found(lake, "s3://delta-lake/*.parquet") == [beside]
    (table,) = DatasetSpec(
        "t", "s3://delta-lake", ignore=["t/*"], storage_options=lake.storage_options
    ).tables
    assert [file.path for file in find_files(table)[1]] == [beside]


def test_a_file_of_a_delta_table_that_is_named_and_its_log_are_read_as_they_are(
    lake: S3Server,
) -> None:
    for name, pattern in (("t/b.parquet",) * 2, ("t/_delta_log/0.json", "t/_delta_log/*.json")):
        assert found(lake, f"s3://delta-lake/{pattern}") == [f"s3://delta-lake/{name}"]
    assert found(lake, "s3://delta-lake/t/_*/*.json") == ["s3://delta-lake/t/_delta_log/0.json"]


_METADATA = "i/metadata/00002-81c84686-1151-417f-bf29-87c00c220852.metadata.json"


@pytest.mark.parametrize(
    "source",
    [
        *("i", "i/", "i/*.parquet", "i/*/*.parquet", "", "**/*.parquet"),
        *("i/data", "i/data/*.parquet", "i/data/day=1/", "i/data/day=1/h=2/*.parquet"),
    ],
)
def test_files_of_an_iceberg_table_are_not_read_as_plain_ones(s3: S3Server, source: str) -> None:
    names = ("i/a.parquet", "i/data/b.parquet", "i/data/day=1/h=2/c.parquet", "d.parquet")
    s3.put_many("iceberg-lake", dict.fromkeys((*names, _METADATA), b"x"))
    with pytest.raises(RequestError, match="is an Iceberg table: say format: iceberg") as caught:
        found(s3, f"s3://iceberg-lake/{source}")
    assert "s3://iceberg-lake/i" in str(caught.value)
    for named in (names[0], names[2], _METADATA):
        assert found(s3, f"s3://iceberg-lake/{named}") == [f"s3://iceberg-lake/{named}"]
    assert found(s3, "s3://iceberg-lake/*.parquet") == ["s3://iceberg-lake/d.parquet"]


def test_what_may_not_be_listed_above_a_source_does_not_hinder_it(s3: S3Server) -> None:
    s3.put("partly", "t/day=1/a.parquet", b"x")
    s3.clear()
    s3.fail(r"prefix=t(%2F|/)(_delta_log|metadata)", times=9, status=403)
    assert found(s3, "s3://partly/t/day=1/") == ["s3://partly/t/day=1/a.parquet"]
    queries = [request.query for request in s3.requests if request.key == "partly"]
    assert any("_delta_log" in query for query in queries)


@pytest.mark.parametrize("pattern", ["", "**", "**/*", "*", "*/*"])
def test_empty_objects_in_the_place_of_directories_are_no_files(s3: S3Server, pattern: str) -> None:
    markers = ("t/", "t/sub/", "t/odd.parquet/", "t/sub_$folder$", "t/odd.parquet_$folder$")
    s3.put_many("marked", dict.fromkeys(("t_$folder$", *markers), b""))
    names = ("a.parquet", "odd.parquet/b.parquet", "sub/c.parquet")
    s3.put_many("marked", {f"t/{name}": b"rows" for name in names})
    depth = {"*": 0, "*/*": 1}.get(pattern)
    expected = [name for name in names if depth in (None, name.count("/"))]
    assert found(s3, f"s3://marked/t/{pattern}") == [f"s3://marked/t/{name}" for name in expected]


@pytest.mark.parametrize("pattern", ["", "**", "*"])
def test_an_empty_object_beside_which_there_is_no_directory_is_a_file(
    s3: S3Server, pattern: str
) -> None:
    s3.put("truncated", "t/a.parquet", b"")
    assert found(s3, f"s3://truncated/t/{pattern}") == ["s3://truncated/t/a.parquet"]


def test_a_directory_of_an_empty_object_may_look_like_a_file(s3: S3Server) -> None:
    s3.put_many("looks", {"d.parquet/": b"", "d.parquet/a.parquet": b"rows"})
    for pattern in ("d.parquet", "d.parquet/", "d.parquet/**", "**", ""):
        assert found(s3, f"s3://looks/{pattern}") == ["s3://looks/d.parquet/a.parquet"]


@pytest.mark.parametrize("source", ["s3://tree/nothing", "s3://tree/t/nothing.parquet"])
def test_a_missing_source_is_named(tree: S3Server, source: str) -> None:
    with pytest.raises(LoadError, match=re.escape(f"{source!r} does not exist")):
        found(tree, source)


@pytest.mark.parametrize("body", [b"", b"rows"])
@pytest.mark.parametrize("source", ["s3://folder/t", "s3://folder/t/"])
def test_an_object_in_place_of_a_directory_makes_an_empty_one(
    s3: S3Server, source: str, body: bytes
) -> None:
    s3.put("folder", "t/", body)
    (table,) = DatasetSpec("t", source, storage_options=s3.storage_options).tables
    with pytest.raises(LoadError, match=re.escape(f"{source!r} holds no files of a known format")):
        find_files(table)


def test_a_missing_bucket_is_named(s3: S3Server) -> None:
    expected = re.escape(f"bucket 'no-such-bucket' at {s3.endpoint} does not exist")
    with pytest.raises(LoadError, match=expected):
        found(s3, "s3://no-such-bucket/a")


def test_an_object_is_pinned_the_same_by_head_and_by_listing(tree: S3Server) -> None:
    by_head = one(tree, "s3://tree/t/b.parquet")
    assert [by_head] == expand("s3://tree/t/b*", PARQUET, tree.options, tree.secrets)
    assert by_head.size == len("t/b.parquet")
    assert re.fullmatch("[0-9a-f]{32}", by_head.etag)
    assert by_head.mtime_ns % 10**9 == 0


@pytest.mark.parametrize(
    ("source", "root"),
    [
        ("s3a://b/t", "s3://b/t/"),
        ("S3://b/t/", "s3://b/t/"),
        ("s3://b", "s3://b/"),
        ("gcs://b/t/year=*/x.parquet", "gs://b/t/"),
        ("abfss://c@a.dfs.core.windows.net/t", "abfss://c@a.dfs.core.windows.net/t/"),
        ("hf://org/name", "hf://datasets/org/name/"),
        ("hf://datasets/org/name@v1/data/", "hf://datasets/org/name@v1/data/"),
    ],
)
def test_the_root_of_a_source_is_in_the_form_of_its_objects(source: str, root: str) -> None:
    assert root_of(source, {}) == root


@pytest.mark.parametrize(
    ("source", "relative"),
    [
        ("s3://tree/t/year=2024/d.parquet", "d.parquet"),
        ("s3a://tree/t/year=2024", "d.parquet"),
        ("s3a://tree/t/year=*/d.parquet", "year=2024/d.parquet"),
        ("s3://tree/t//", "a.PARQUET b.parquet sub/c.parquet year=2024/d.parquet"),
    ],
)
def test_paths_are_relative_to_the_source(tree: S3Server, source: str, relative: str) -> None:
    (table,) = DatasetSpec("t", source, storage_options={**tree.options, **tree.secrets}).tables

    assert find_files(table)[2] == tuple(relative.split())


@pytest.mark.parametrize(
    "source", ["s3://lake/odd/", "s3://lake/odd/*", "s3://lake/odd/a\nb.parquet"]
)
def test_a_key_with_a_line_break_is_refused_by_name_in_one_line(s3: S3Server, source: str) -> None:
    s3.put("lake", "odd/a\nb.parquet", b"rows")
    with pytest.raises(LoadError) as caught:
        found(s3, source)
    s3.delete("lake", "odd/a\nb.parquet")
    asked = source.rstrip("*").replace("\n", r"\n")
    assert str(caught.value) == (
        f"cannot read {asked}: the key 'odd/a\\nb.parquet' of bucket 'lake' at {s3.endpoint} has a "
        "control character, which cannot be read"
    )
