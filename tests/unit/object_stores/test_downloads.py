"""Which bytes are asked for, by how many requests, and that they are of the object as planned."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_protocol.errors import LoadError
from cache_server.object_stores import download, expand, read_tail
from tests.object_store import S3Server
from tests.unit.object_stores.conftest import MIB, PARQUET, one


def test_a_small_object_is_one_request(s3: S3Server, tmp_path: Path) -> None:
    s3.put("lake", "small.parquet", bytes(range(256)))
    file = one(s3, "s3://lake/small.parquet")
    s3.clear()
    download(file, tmp_path / "f", s3.options, s3.secrets)
    assert (tmp_path / "f").read_bytes() == bytes(range(256))
    assert s3.counts() == {("GET", "lake/small.parquet"): 1}
    assert s3.requests[0].span == ""


def test_an_empty_object_is_an_empty_file(s3: S3Server, tmp_path: Path) -> None:
    s3.put("lake", "empty.csv", b"")
    file = one(s3, "s3://lake/empty.csv")
    download(file, tmp_path / "f", s3.options, s3.secrets)
    assert (tmp_path / "f").read_bytes() == b""
    assert read_tail(file, 8, s3.options, s3.secrets) == b""


@pytest.mark.parametrize(("num_bytes", "span"), [(3, "bytes=253-255"), (256, ""), (9999, "")])
def test_the_tail_is_one_request(s3: S3Server, num_bytes: int, span: str) -> None:
    s3.put("lake", "tail.parquet", bytes(range(256)))
    file = one(s3, "s3://lake/tail.parquet")
    s3.clear()
    assert read_tail(file, num_bytes, s3.options, s3.secrets) == bytes(range(256))[-num_bytes:]
    assert [request.span for request in s3.requests] == [span]


def test_close_ranges_are_one_request_and_the_rest_is_a_hole(s3: S3Server, tmp_path: Path) -> None:
    data = os.urandom(6 * MIB)
    s3.put("lake", "ranges.parquet", data)
    file = one(s3, "s3://lake/ranges.parquet")
    s3.clear()
    ranges = [(5 * MIB, 5 * MIB + 10), (0, 100), (1000, 2000), (50, 150), (7, 7)]
    download(file, tmp_path / "f", s3.options, s3.secrets, ranges)
    written = (tmp_path / "f").read_bytes()
    assert len(written) == len(data)
    for start, stop in ranges:
        assert written[start:stop] == data[start:stop]
    assert written[2 * MIB : 4 * MIB] == bytes(2 * MIB)
    assert sorted(request.span for request in s3.requests) == [
        "bytes=0-1999",
        f"bytes={5 * MIB}-{5 * MIB + 9}",
    ]


def test_a_large_object_comes_in_parts(s3: S3Server, tmp_path: Path) -> None:
    data = os.urandom(MIB) * 65
    s3.put("lake", "large.parquet", data)
    file = one(s3, "s3://lake/large.parquet")
    s3.clear()
    download(file, tmp_path / "f", s3.options, s3.secrets)
    assert (tmp_path / "f").read_bytes() == data
    assert s3.counts() == {("GET", "lake/large.parquet"): 3}
    s3.delete("lake", "large.parquet")


def test_threads_share_a_connection_pool(s3: S3Server, tmp_path: Path) -> None:
    s3.put_many("lake", {f"threads/{i}.parquet": bytes([i]) * 1000 for i in range(64)})
    files = expand("s3://lake/threads", PARQUET, s3.options, s3.secrets)

    def read(index: int) -> bytes:
        target = tmp_path / str(index)
        download(files[index], target, s3.options, s3.secrets)
        return target.read_bytes() + read_tail(files[index], 1, s3.options, s3.secrets)

    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(read, range(64)))
    for file, content in zip(files, contents, strict=True):
        assert content == bytes([int(Path(file.path).stem)]) * 1001


@pytest.mark.parametrize("ranges", [None, [(0, 1)]])
def test_a_changed_object_is_refused(
    s3: S3Server, tmp_path: Path, ranges: list[tuple[int, int]] | None
) -> None:
    s3.put("lake", "changing.parquet", b"before")
    file = one(s3, "s3://lake/changing.parquet")
    s3.put("lake", "changing.parquet", b"after!")
    with pytest.raises(LoadError, match=r"changing\.parquet changed since .*6 bytes and etag"):
        download(file, tmp_path / "f", s3.options, s3.secrets, ranges)
    with pytest.raises(LoadError, match=file.etag):
        read_tail(file, 2, s3.options, s3.secrets)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_is_gone_is_named(s3: S3Server, tmp_path: Path) -> None:
    s3.put("lake", "gone.parquet", b"before")
    file = one(s3, "s3://lake/gone.parquet")
    s3.delete("lake", "gone.parquet")
    with pytest.raises(LoadError, match=r"s3://lake/gone\.parquet does not exist in bucket 'lake'"):
        download(file, tmp_path / "f", s3.options, s3.secrets)
    assert list(tmp_path.iterdir()) == []
