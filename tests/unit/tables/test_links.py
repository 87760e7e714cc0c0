"""Links below a source, and what cannot be read there: nothing is left out unsaid."""

import os
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.errors import LoadError
from cache_server.tables import local_files
from tests.table_files import find, paths_of, table_spec, touch

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


def test_a_directory_that_no_glob_enters_may_be_unreadable(
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
        assert local_files.find_files(spec)[2] == ("a.parquet",)
    with pytest.raises(LoadError, match=r"ignore: 'lost\+found/\*' leaves it out"):
        local_files.find_files(table_spec(tmp_path / pattern, ignore=["lost+found/*.pq"]))


@pytest.mark.parametrize("pattern", [*EVERYWHERE, "*.parquet", "a*", "a.parque?"])
def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path / "b.parquet")
    linked = link(tmp_path / "a.parquet", "/nowhere/gone.parquet")

    with pytest.raises(LoadError, match=r"a link to '/nowhere/gone\.parquet'") as caught:
        paths_of(tmp_path / pattern)
    assert str(linked) in str(caught.value)
    assert local_files.find_files(table_spec(tmp_path, ignore=["a.*"]))[2] == ("b.parquet",)


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
        assert len(local_files.find_files(table_spec(tmp_path / pattern, ignore=[ignore]))[1]) == 1


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
