"""What is tried again, from where, and how it ends when nothing helps."""

from __future__ import annotations

import os
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.errors import LoadError
from cache_server.object_stores import download, expand
from cache_server.object_stores.client import Location
from cache_server.object_stores.connections import client_for
from tests.object_store import S3Server
from tests.store_stubs import FilesStub, Served, self_signed
from tests.unit.object_stores.conftest import MIB, PARQUET, one
from tests.waiting import wait_until


@pytest.mark.parametrize("status", [503, 429])
def test_five_failures_lose_nothing(s3: S3Server, tmp_path: Path, status: int) -> None:
    s3.put("lake", "busy/a.parquet", b"rows")
    s3.fail("^lake", status=status, times=5)
    file = one(s3, "s3://lake/busy/*")
    s3.fail("^lake", status=status, times=5, method="GET")
    download(file, tmp_path / "f", s3.options, s3.secrets)
    assert (tmp_path / "f").read_bytes() == b"rows"
    # Three listings: of the glob, and of what a Delta or an Iceberg table would have there.
    assert s3.counts() == {("GET", "lake"): 8, ("GET", "lake/busy/a.parquet"): 6}


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


def without_etags(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the server say nothing of an object but its size and when it was written."""
    answer = s3.answer

    def stripped(request: Any, environ: Any) -> Any:
        status, headers, body, breaks = answer(request, environ)
        return status, [(k, v) for k, v in headers if k.lower() != "etag"], body, breaks

    monkeypatch.setattr(s3, "answer", stripped)


def test_a_broken_body_of_an_object_without_an_etag_is_taken_up_where_it_broke(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(4 * MIB)
    s3.put("lake", "plain.parquet", data, public=True)
    without_etags(s3, monkeypatch)
    (file,) = expand(f"{s3.endpoint}/lake/plain.parquet", PARQUET, {}, {})
    assert not file.etag
    s3.clear()
    s3.break_body("plain", times=2)
    download(file, tmp_path / "f", {}, {}, [(MIB, 4 * MIB)])
    assert (tmp_path / "f").read_bytes() == bytes(MIB) + data[MIB:]
    starts = [int(request.span[6:].partition("-")[0]) for request in s3.requests]
    assert len(starts) == 3 and MIB == starts[0] < 2 * MIB < starts[1] < starts[2]
    s3.break_body("plain", times=99)
    with pytest.raises(LoadError, match=r"cannot read http://.*plain\.parquet"):
        download(file, tmp_path / "g", {"max_retries": "2"}, {})
    assert s3.counts()["GET", "lake/plain.parquet"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_body_that_took_longer_than_retries_may_is_taken_up_where_it_broke(s3: S3Server) -> None:
    data = os.urandom(32 * MIB)  # more than is on its way before anyone reads it
    s3.put("lake", "long.parquet", data)
    file = one(s3, "s3://lake/long.parquet")
    s3.break_body("long")
    options = {**s3.options, "retry_timeout_s": "0.3"}
    client = client_for(Location.of(file.path), options, s3.secrets)
    began = time.monotonic()
    pieces = client.read(file, None)
    found = bytearray(next(pieces))
    wait_until(lambda: time.monotonic() - began > 0.3, 5, "the time for retries is over")
    for piece in pieces:
        found += piece
    assert found == data
    s3.delete("lake", "long.parquet")


def test_a_body_that_always_breaks_fails_in_time_and_leaves_no_file(
    s3: S3Server, tmp_path: Path
) -> None:
    s3.put("lake", "hopeless.parquet", bytes(MIB))
    file = one(s3, "s3://lake/hopeless.parquet")
    s3.break_body("hopeless", times=999)
    options = {**s3.options, "max_retries": "2"}
    expected = r"cannot read s3://lake/hopeless\.parquet: .*'lake' at .* broke off its answer: it"
    with pytest.raises(LoadError, match=expected):
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


def test_a_server_with_an_unsigned_certificate_is_named(s3: S3Server, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path / "server.pem"))
    with Served(FilesStub, context) as address:
        options = {"endpoint": address, "max_retries": "0"}
        expected = rf"bucket 'lake' at {address}: its certificate is not accepted \(UnknownIssuer\)"
        with pytest.raises(LoadError, match=expected):
            expand("s3://lake/a", PARQUET, options, s3.secrets)


def test_a_server_that_speaks_no_tls_is_named(s3: S3Server) -> None:
    options = {"endpoint": s3.endpoint.replace("http:", "https:"), "max_retries": "0"}
    with pytest.raises(LoadError, match=r"bucket 'lake' at https://.*: it does not speak TLS"):
        expand("s3://lake/a", PARQUET, options, s3.secrets)


def test_a_proxy_that_wants_another_password_is_named(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(FilesStub):
        protocol_version = "HTTP/1.1"

        def do_CONNECT(self) -> None:
            self.send_error(407)

    with Served(Refusing) as proxy:
        options = {"endpoint": "https://store.example", "max_retries": "0"}
        monkeypatch.setenv("HTTPS_PROXY", proxy.replace("//", "//me:hush-hush@"))
        with pytest.raises(LoadError, match="the proxy wants another user or password") as caught:
            expand("s3://lake/a", PARQUET, options, s3.secrets)
    assert "hush" not in str(caught.value)


def test_a_server_whose_name_is_nowhere_is_named(s3: S3Server) -> None:
    options = {"endpoint": "http://store.invalid", "max_retries": "0"}
    with pytest.raises(LoadError, match=r"at http://store\.invalid: failed to lookup address"):
        expand("s3://lake/a", PARQUET, options, s3.secrets)
