"""What a URI means in each store, and what becomes of failures, against servers on loopback."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from cache_server.planning import SourceFile
from cache_server.tables.connections import client_for
from cache_server.tables.object_client import Location
from cache_server.tables.stores import download, expand, is_remote, read_tail
from protos.errors import LoadError, RequestError
from tests.object_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

PARQUET = (".parquet", ".pq")
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """The server, with nothing left of other tests, and a machine without credentials."""
    running.clear()
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return running


def found(s3: S3Server, source: str, suffixes: tuple[str, ...] = PARQUET) -> list[str]:
    files = expand(source, suffixes, s3.options, s3.secrets)
    return [file.path for file in files]


def one(s3: S3Server, source: str) -> SourceFile:
    (file,) = expand(source, PARQUET, s3.options, s3.secrets)
    return file


def assert_no_secret(text: str) -> None:
    for secret in (ACCESS_KEY_ID, SECRET_ACCESS_KEY, "AKIA", "ASIA"):
        assert secret not in text


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
                "t/_delta_log/0.parquet",
                "t/sub/_temporary/e.parquet",
                "tt/other.parquet",
                "odd/a b+c=ü%20.parquet",
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
        ("s3://tree/t/_delta_log/*", ["_delta_log/0.parquet"]),
        ("s3://tree/t/.*", [".hidden.parquet"]),
        ("s3://tree/t/*.orc", []),
    ],
)
def test_a_source_means_its_objects_by_name(tree: S3Server, source: str, keys: list[str]) -> None:
    assert found(tree, source) == [f"s3://tree/t/{key}" for key in keys]


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


@pytest.mark.parametrize("source", ["s3://tree/nothing", "s3://tree/t/nothing.parquet"])
def test_a_missing_source_is_named(tree: S3Server, source: str) -> None:
    with pytest.raises(LoadError, match=re.escape(f"{source!r} does not exist")):
        found(tree, source)


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


def test_connections_are_kept(s3: S3Server) -> None:
    location = Location.of("s3://lake/a")
    assert client_for(location, s3.options, s3.secrets) is client_for(
        Location.of("s3a://lake/b"), s3.options, s3.secrets
    )


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


@pytest.mark.parametrize("status", [503, 429])
def test_five_failures_lose_nothing(s3: S3Server, tmp_path: Path, status: int) -> None:
    s3.put("lake", "busy/a.parquet", b"rows")
    s3.fail("^lake", status=status, times=5)
    file = one(s3, "s3://lake/busy/*")
    s3.fail("^lake", status=status, times=5, method="GET")
    download(file, tmp_path / "f", s3.options, s3.secrets)
    assert (tmp_path / "f").read_bytes() == b"rows"
    assert s3.counts() == {("GET", "lake"): 6, ("GET", "lake/busy/a.parquet"): 6}


def test_failures_without_end_are_named(s3: S3Server) -> None:
    s3.put("lake", "busy/a.parquet", b"rows")
    s3.fail("^lake", times=99)
    options = {**s3.options, "max_retries": "2"}
    with pytest.raises(LoadError) as caught:
        expand("s3://lake/busy/*", PARQUET, options, s3.secrets)
    assert str(caught.value) == (
        f"cannot read s3://lake/busy/: bucket 'lake' at {s3.endpoint} answered 503 Service "
        "Unavailable after 2 retries (SlowDown: Please reduce your request rate.)"
    )


def test_a_broken_body_is_taken_up_where_it_broke(s3: S3Server, tmp_path: Path) -> None:
    data = os.urandom(4 * MIB)
    s3.put("lake", "broken.parquet", data)
    file = one(s3, "s3://lake/broken.parquet")
    s3.clear()
    s3.break_body("broken", times=2)
    download(file, tmp_path / "f", s3.options, s3.secrets)
    assert (tmp_path / "f").read_bytes() == data
    assert [request.span for request in s3.requests] == [
        "",
        f"bytes={2 * MIB}-{4 * MIB - 1}",
        f"bytes={3 * MIB}-{4 * MIB - 1}",
    ]


def test_a_body_that_always_breaks_fails_in_time_and_leaves_no_file(
    s3: S3Server, tmp_path: Path
) -> None:
    s3.put("lake", "hopeless.parquet", bytes(MIB))
    file = one(s3, "s3://lake/hopeless.parquet")
    s3.break_body("hopeless", times=999)
    options = {**s3.options, "max_retries": "2"}
    with pytest.raises(LoadError, match=r"cannot read s3://lake/hopeless\.parquet: bucket 'lake'"):
        download(file, tmp_path / "f", options, s3.secrets)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_changes_while_its_body_breaks_is_refused(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("lake", "swapped.parquet", bytes(MIB))
    file = one(s3, "s3://lake/swapped.parquet")
    s3.break_body("swapped")
    answer = s3.answer

    def swap(request: Any, environ: Any) -> Any:
        result = answer(request, environ)
        s3.put("lake", "swapped.parquet", b"1" * MIB)
        return result

    monkeypatch.setattr(s3, "answer", swap)
    with pytest.raises(LoadError, match=r"swapped\.parquet changed since the dataset was planned"):
        download(file, tmp_path / "f", s3.options, s3.secrets)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_named(s3: S3Server) -> None:
    options = {"endpoint": "http://127.0.0.1:9", "max_retries": "1"}
    expected = r"bucket 'lake' at http://127\.0\.0\.1:9 after 1 retries: Connection refused"
    with pytest.raises(LoadError, match=expected):
        expand("s3://lake/a", PARQUET, options, s3.secrets)


@pytest.mark.parametrize("source", ["s3://lake/a.parquet", "s3://lake/a/*"])
def test_wrong_keys_name_bucket_and_endpoint_and_never_the_key(
    s3: S3Server, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    s3.require("SOMEONE-ELSE")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(LoadError) as caught:
        found(s3, source)
    message = str(caught.value)
    assert f"access to bucket 'lake' at {s3.endpoint} was refused (403" in message
    assert message.endswith(": check the credentials")
    assert caught.value.__suppress_context__
    assert_no_secret(message + caplog.text)


def test_nothing_shows_the_keys(s3: S3Server) -> None:
    assert_no_secret(repr(client_for(Location.of("s3://lake/a"), s3.options, s3.secrets)))


def test_anonymous_requests_are_not_signed(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unwanted")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unwanted")
    s3.put("open-data", "a.parquet", b"rows", public=True)
    options = {**s3.options, "skip_signature": "true"}
    (file,) = expand("s3://open-data/a.parquet", PARQUET, options, {})
    download(file, tmp_path / "f", options, {})
    assert (tmp_path / "f").read_bytes() == b"rows"
    assert {request.access_key_id for request in s3.requests} == {""}


def test_a_session_token_is_sent_and_the_environments_is_not_mixed_in(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "from-the-environment")
    s3.put("lake", "token.parquet", b"rows")
    one(s3, "s3://lake/token.parquet")
    expand(
        "s3://lake/token.parquet", PARQUET, s3.options, {**s3.secrets, "aws_session_token": "mine"}
    )
    assert [request.session_token for request in s3.requests] == ["", "mine"]
    assert {request.access_key_id for request in s3.requests} == {ACCESS_KEY_ID}


def test_the_environment_counts_where_the_dataset_says_nothing(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("lake", "env.parquet", b"rows")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ENVSECRET")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "ENVTOKEN")
    (file,) = expand("s3://lake/env.parquet", PARQUET, {}, {})
    assert read_tail(file, 4, {}, {}) == b"rows"
    assert {(r.access_key_id, r.session_token) for r in s3.requests} == {("ENVKEY", "ENVTOKEN")}


def test_a_profile_of_the_environment_counts(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiles = tmp_path / "credentials"
    profiles.write_text("[team]\naws_access_key_id = PROFILEKEY\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    monkeypatch.setenv("AWS_PROFILE", "team")
    s3.put("lake", "profile.parquet", b"rows")
    expand("s3://lake/profile.parquet", PARQUET, s3.options, {})
    assert {request.access_key_id for request in s3.requests} == {"PROFILEKEY"}


def test_an_option_beats_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("lake", "env.parquet", b"rows")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    one(s3, "s3://lake/env.parquet")
    assert {request.access_key_id for request in s3.requests} == {ACCESS_KEY_ID}


def test_a_machine_without_credentials_is_told_so_at_once(s3: S3Server) -> None:
    with pytest.raises(LoadError, match=r"no credentials for bucket 'lake' at .*skip_signature"):
        expand("s3://lake/a", PARQUET, s3.options, {})


def test_a_profile_that_does_not_exist_is_named(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(LoadError, match=r"no credentials for bucket 'lake' at .*nobody"):
        expand("s3://lake/a", PARQUET, s3.options, {})


def test_the_web_identity_of_a_pod_counts(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3.put("lake", "pod.parquet", b"rows")
    (tmp_path / "token").write_text("a-web-identity-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pod")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    expand("s3://lake/pod.parquet", PARQUET, s3.options, {})
    assert s3.requests[-1].access_key_id.startswith("ASIA")


def test_a_role_is_assumed_at_the_same_endpoint(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    s3.put("lake", "role.parquet", b"rows")
    options = {**s3.options, "role_arn": "arn:aws:iam::123456789012:role/reader"}
    (file,) = expand("s3://lake/role.parquet", PARQUET, options, s3.secrets)
    assert read_tail(file, 4, options, s3.secrets) == b"rows"
    sts, *reads = s3.requests
    assert (sts.method, sts.key, sts.access_key_id) == ("POST", "", ACCESS_KEY_ID)
    assert len(reads) == 2
    for read in reads:
        assert read.access_key_id.startswith("ASIA")
        assert read.session_token
    assert_no_secret(caplog.text)


def test_a_role_that_may_not_be_assumed_is_named(s3: S3Server) -> None:
    s3.put("lake", "role2.parquet", b"rows")
    s3.require("SOMEONE-ELSE")
    options = {**s3.options, "role_arn": "arn:aws:iam::123456789012:role/other"}
    with pytest.raises(
        LoadError, match=r"no credentials for bucket 'lake' at .*AssumeRole"
    ) as caught:
        expand("s3://lake/role2.parquet", PARQUET, options, s3.secrets)
    assert_no_secret(str(caught.value))


def test_a_proxy_of_the_environment_is_used(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("lake", "proxied.parquet", b"rows")
    monkeypatch.setenv("http_proxy", s3.endpoint)
    options = {**s3.options, "endpoint": "http://storage.example"}
    expand("s3://lake/proxied.parquet", PARQUET, options, s3.secrets)
    assert [request.host for request in s3.requests] == ["storage.example"]


def test_an_unknown_option_is_named_without_its_value(s3: S3Server) -> None:
    with pytest.raises(RequestError, match="the s3 store has no option 'acess_key_id'") as caught:
        expand("s3://lake/a", PARQUET, s3.options, {"acess_key_id": "hush-hush"})
    assert "hush" not in str(caught.value)
    with pytest.raises(RequestError, match="'skip_signature' must be true or false") as caught:
        expand("s3://lake/a", PARQUET, {"skip_signature": "hush-hush"}, {})
    assert "hush" not in str(caught.value)
    with pytest.raises(RequestError, match="'max_retries' must be a number"):
        expand("s3://lake/a", PARQUET, {"max_retries": "many"}, s3.secrets)
    for endpoint in ("localhost:9000", "not a url", "ftp://host"):
        with pytest.raises(RequestError, match="endpoint of a store must be an http"):
            expand("s3://lake/a", PARQUET, {"endpoint": endpoint}, s3.secrets)
    with pytest.raises(RequestError, match=r"gs store \(application_credentials\) are not right"):
        expand("gs://b/a", PARQUET, {"google_application_credentials": "/nowhere"}, {})
    with pytest.raises(RequestError, match="must be given together"):
        expand("s3://lake/a", PARQUET, {}, {"access_key_id": "hush-hush"})


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(RequestError, match="the scheme 'ftp' is not served"):
        expand("ftp://host/a", PARQUET, {}, {})


def test_google_cloud_storage_is_read_by_a_service_account(s3: S3Server, tmp_path: Path) -> None:
    # moto lets everyone list and read what is public, whatever the protocol's signature.
    for i in range(3):
        s3.put("gcs-bucket", f"t/{i}.parquet", b"rows", public=True)
    account = tmp_path / "account.json"
    account.write_text(
        json.dumps(
            {
                "gcs_base_url": s3.endpoint,
                "disable_oauth": True,
                "client_email": "",
                "private_key": "",
                "private_key_id": "",
            }
        )
    )
    options = {"google_service_account": str(account)}
    files = expand("gs://gcs-bucket/t", PARQUET, options, {})
    assert [file.path for file in files] == [f"gs://gcs-bucket/t/{i}.parquet" for i in range(3)]
    download(files[0], tmp_path / "f", options, {})
    assert (tmp_path / "f").read_bytes() == b"rows"
    assert expand("gs://gcs-bucket/t/0.parquet", PARQUET, options, {}) == files[:1]


class _Azure(http.server.BaseHTTPRequestHandler):
    """As much of Azure's protocol as a reader needs: one container with one blob."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        modified = "Tue, 01 Jul 2025 10:00:00 GMT"
        blob, length = b"azure rows", 10
        if "comp=list" in self.path:
            blob = (
                '<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs><Blob>'
                "<Name>t/a.parquet</Name><Properties>"
                f"<Last-Modified>{modified}</Last-Modified><Etag>0x1</Etag>"
                "<Content-Length>10</Content-Length><Content-Type>x</Content-Type>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob></Blobs><NextMarker />"
                "</EnumerationResults>"
            ).encode()
            length = len(blob)
        elif "/t/a.parquet" not in self.path:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"0x1"')
        self.send_header("Last-Modified", modified)
        self.send_header("x-ms-version", "2020-01-01")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(blob)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Served:
    """A server of the given handler, for the time of a ``with``."""

    def __init__(self, handler: Any) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize(
    "scheme", ["az://container/", "abfss://container@acct.dfs.core.windows.net/"]
)
@pytest.mark.parametrize(
    ("secrets", "authorization", "query"),
    [
        ({"azure_storage_account_key": "c2VjcmV0LWtleQ=="}, "SharedKey acct:", ""),
        ({"azure_storage_sas_token": "sv=2020&sig=hush-hush"}, "", "sig=hush-hush"),
        ({"azure_storage_token": "hush-hush"}, "Bearer hush-hush", ""),
    ],
)
def test_azure_is_read_by_key_by_signature_and_by_token(
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    secrets: dict[str, str],
    authorization: str,
    query: str,
) -> None:
    del s3
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=from-the-environment")
    monkeypatch.setattr(_Azure, "seen", [])
    with _Served(_Azure) as endpoint:
        options = {"azure_storage_account_name": "acct", "azure_storage_endpoint": endpoint}
        (file,) = expand(f"{scheme}t/", PARQUET, options, secrets)
        assert [file] == expand(f"{scheme}t/a.parquet", PARQUET, options, secrets)
        assert file.path == f"{scheme}t/a.parquet"
        download(file, tmp_path / "f", options, secrets)
        assert (tmp_path / "f").read_bytes() == b"azure rows"
        with pytest.raises(LoadError) as caught:
            download(SourceFile(f"{scheme}gone", 1, 0), tmp_path / "g", options, secrets)
    assert "hush" not in str(caught.value)
    for path, header in _Azure.seen:
        assert header.startswith(authorization)
        assert query in path


class _Files(http.server.SimpleHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path))
        super().do_GET()

    def do_HEAD(self) -> None:
        self.seen.append((self.command, self.path))
        super().do_HEAD()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_one_object_is_read_over_http(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    monkeypatch.setattr(_Files, "seen", [])
    served = tmp_path / "served"
    served.mkdir()
    (served / "a b.csv").write_bytes(bytes(range(200)))
    with _Served(functools.partial(_Files, directory=str(served))) as origin:
        uri = f"{origin}/a%20b.csv"
        (file,) = expand(uri, (".csv",), {}, {})
        assert (file.path, file.size) == (uri, 200)
        assert file.mtime_ns
        download(file, tmp_path / "f", {}, {})
        assert (tmp_path / "f").read_bytes() == bytes(range(200))
        assert _Files.seen == [("HEAD", "/a%20b.csv"), ("GET", "/a%20b.csv")]
        # Python's server does not know ranges.
        assert read_tail(file, 5, {}, {}) == bytes(range(195, 200))
        download(file, tmp_path / "f", {}, {}, [(3, 5)])
        assert (tmp_path / "f").read_bytes()[3:5] == bytes([3, 4])
        with pytest.raises(LoadError, match=re.escape(f"{origin}/none.csv' does not exist")):
            expand(f"{origin}/none.csv", (".csv",), {}, {})
        for source in (f"{origin}/", origin, f"{origin}/*.csv", f"{origin}/a?.csv"):
            with pytest.raises(RequestError, match="over HTTP"):
                expand(source, (".csv",), {}, {})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the Hub: ``datasets/ORG/NAME/...``."""
    root = tmp_path / "hub"
    data = root / "datasets/tatsu-lab/alpaca/data"
    data.mkdir(parents=True)
    for name in ("b.parquet", "a.parquet", ".hidden.parquet", "readme.md"):
        (data / name).write_bytes(name.encode())

    class StandIn(DirFileSystem):  # type: ignore[misc]  # fsspec has no types
        cachable = False

        def __init__(self, token: str | None = None) -> None:
            super().__init__(path=str(root), fs=LocalFileSystem(use_listings_cache=False))
            self.token = token

        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            return self._like_the_hub(super().info(path, **kwargs))

        def find(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
            found = super().find(path, *args, **kwargs)
            return {name: self._like_the_hub(info) for name, info in found.items()}

        def _like_the_hub(self, info: dict[str, Any]) -> dict[str, Any]:
            content = (root / info["name"]).read_bytes() if info["type"] == "file" else b""
            return {**info, "blob_id": f"blob-{content.hex()[:20]}"}

    registry = sys.modules["fsspec.registry"]
    monkeypatch.setitem(registry.__dict__["_registry"], "hf", StandIn)
    return data


@pytest.mark.parametrize(
    "source",
    [
        "hf://datasets/tatsu-lab/alpaca/data",
        "hf://tatsu-lab/alpaca/data/",
        "hf://tatsu-lab/alpaca",
        "hf://tatsu-lab/alpaca/data/*.parquet",
        "hf://tatsu-lab/alpaca/**/[ab].parquet",
    ],
)
def test_files_of_the_hub_are_found_and_read(hub: Path, tmp_path: Path, source: str) -> None:
    files = expand(source, PARQUET, {}, {"hf_token": "hush-hush"})
    base = "hf://datasets/tatsu-lab/alpaca/data"
    assert [file.path for file in files] == [f"{base}/a.parquet", f"{base}/b.parquet"]
    assert all(file.etag.startswith("blob-") for file in files)
    assert read_tail(files[0], 7, {}, {}) == b"parquet"
    download(files[1], tmp_path / "f", {}, {})
    assert (tmp_path / "f").read_bytes() == b"b.parquet"
    download(files[1], tmp_path / "f", {}, {}, [(2, 5)])
    assert (tmp_path / "f").read_bytes()[2:5] == b"par"


def test_one_file_of_the_hub_is_pinned(hub: Path, tmp_path: Path) -> None:
    (file,) = expand("hf://tatsu-lab/alpaca/data/a.parquet", PARQUET, {}, {})
    (hub / "a.parquet").write_bytes(b"A.parquet")
    with pytest.raises(LoadError, match=r"a\.parquet changed since the dataset was planned"):
        download(file, tmp_path / "f", {}, {})
    assert not (tmp_path / "f").exists()


def test_what_the_hub_lacks_is_named(hub: Path) -> None:
    with pytest.raises(LoadError, match="'hf://tatsu-lab/alpaca/nothing' does not exist"):
        expand("hf://tatsu-lab/alpaca/nothing", PARQUET, {}, {})
    with pytest.raises(RequestError, match="names no repository"):
        expand("hf://alpaca", PARQUET, {}, {})
    with pytest.raises(RequestError, match="the hf store has no option 'region'"):
        expand("hf://tatsu-lab/alpaca", PARQUET, {"region": "x"}, {})


def test_a_hub_that_is_not_there_is_named() -> None:
    options = {"endpoint": "http://127.0.0.1:9", "max_retries": "1"}
    with pytest.raises(LoadError, match=r"alpaca' at http://127\.0\.0\.1:9: .*[Cc]onnect"):
        expand("hf://tatsu-lab/alpaca/data", PARQUET, options, {})


def test_a_revision_is_kept(hub: Path) -> None:
    (hub.parents[1] / "alpaca@v1").mkdir()
    (hub.parents[1] / "alpaca@v1" / "c.parquet").write_bytes(b"c")
    for source, options in (
        ("hf://tatsu-lab/alpaca@v1", {}),
        ("hf://tatsu-lab/alpaca", {"revision": "v1"}),
    ):
        (file,) = expand(source, PARQUET, options, {})
        assert file.path == "hf://datasets/tatsu-lab/alpaca@v1/c.parquet"
        assert read_tail(file, 1, options, {}) == b"c"


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's API as huggingface_hub needs to read one dataset."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    seen: ClassVar[list[tuple[str, str, str]]] = []
    failures: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.seen.append((self.command, self.path, self.headers.get("Authorization", "")))
        parts = urlsplit(self.path)
        kind, _, rest = parts.path.removeprefix("/api/datasets/tatsu-lab/alpaca").partition("/main")
        answer: Any = {"id": "tatsu-lab/alpaca", "sha": "0" * 40, "siblings": []}
        if self.failures and ("/paths-info" in parts.path or "/resolve/" in parts.path):
            self._answer(self.failures.pop(), b"{}", {})
            return
        if self.headers.get("Authorization") != "Bearer hush-hush":
            self._answer(401, b"{}", {"X-Error-Message": "no"})
            return
        if kind == "/tree":
            answer = [entry for path in self.files if (entry := self._entry(path, rest.strip("/")))]
        elif kind == "/paths-info":
            wanted = parse_qs(body)["paths"]
            answer = [self._entry(path, "") for path in self.files if path in wanted]
        elif parts.path.startswith("/datasets/"):
            data = self.files[unquote(parts.path.partition("/resolve/main/")[2])]
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert span is not None
            self._answer(206, data[int(span[1]) : int(span[2]) + 1], {})
            return
        self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_POST = do_HEAD = do_GET

    def _entry(self, path: str, below: str) -> dict[str, Any] | None:
        if below and not path.startswith(f"{below}/"):
            return None
        oid = hashlib.sha1(self.files[path], usedforsecurity=False).hexdigest()
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": oid}

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_client_of_the_hub_itself_reads_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    files = {"data/a.parquet": os.urandom(1000), "data/b.parquet": b"b", "README.md": b"r"}
    monkeypatch.setattr(_Hub, "files", files)
    monkeypatch.setattr(_Hub, "seen", [])
    with _Served(_Hub) as endpoint:
        options, secrets = {"endpoint": endpoint}, {"token": "hush-hush"}
        a, b = expand("hf://tatsu-lab/alpaca/data", PARQUET, options, secrets)
        assert a.path == "hf://datasets/tatsu-lab/alpaca/data/a.parquet"
        assert [a] == expand(a.path, PARQUET, options, secrets)
        _Hub.seen.clear()
        download(a, tmp_path / "f", options, secrets)
        assert (tmp_path / "f").read_bytes() == files["data/a.parquet"]
        assert len([path for _, path, _ in _Hub.seen if "/resolve/" in path]) == 1
        _Hub.failures.extend([503, 429])
        assert read_tail(a, 8, options, secrets) == files["data/a.parquet"][-8:]
        files["data/b.parquet"] = b"B"
        with pytest.raises(LoadError, match=r"b\.parquet changed since"):
            download(b, tmp_path / "g", options, secrets)
        with pytest.raises(LoadError) as caught:
            expand("hf://tatsu-lab/alpaca/data", PARQUET, options, {"token": "wrong-token"})
    assert f"access to repository 'datasets/tatsu-lab/alpaca' at {endpoint}" in str(caught.value)
    assert "wrong-token" not in str(caught.value)
    assert not _Hub.failures
    assert "hush" not in caplog.text
