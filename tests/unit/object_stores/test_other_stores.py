"""The stores that are not S3: Google's, Azure's, and one object over HTTP."""

from __future__ import annotations

import functools
import gzip
import json
import re
from pathlib import Path
from typing import ClassVar

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server.object_stores import download, expand, read_tail
from cache_server.source.pinned import SourceFile
from cache_server.tables import pin
from tests.object_store import S3Server
from tests.store_stubs import AzureStub, FilesStub, Served, _Stub
from tests.unit.object_stores.conftest import PARQUET


def test_google_cloud_storage_is_read_by_a_service_account(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    options: dict[str, str] = {}
    files = expand("gs://gcs-bucket/t", PARQUET, options, {})
    assert [file.path for file in files] == [f"gs://gcs-bucket/t/{i}.parquet" for i in range(3)]
    download(files[0], tmp_path / "f", options, {})
    assert (tmp_path / "f").read_bytes() == b"rows"
    assert expand("gs://gcs-bucket/t/0.parquet", PARQUET, options, {}) == files[:1]


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
    monkeypatch.setattr(AzureStub, "seen", [])
    monkeypatch.setattr(AzureStub, "blobs", {"t/a.parquet": b"azure rows"})
    with Served(AzureStub) as endpoint:
        options = {"azure_storage_account_name": "acct", "azure_storage_endpoint": endpoint}
        (file,) = expand(f"{scheme}t/", PARQUET, options, secrets)
        assert [file] == expand(f"{scheme}t/a.parquet", PARQUET, options, secrets)
        assert file.path == f"{scheme}t/a.parquet"
        download(file, tmp_path / "f", options, secrets)
        assert (tmp_path / "f").read_bytes() == b"azure rows"
        with pytest.raises(LoadError) as caught:
            download(SourceFile(f"{scheme}gone", 1, 0), tmp_path / "g", options, secrets)
    assert "hush" not in str(caught.value)
    for path, header in AzureStub.seen:
        assert header.startswith(authorization)
        assert query in path


@pytest.mark.parametrize("status", [403, 404, 405, 501])
def test_a_web_server_that_refuses_to_tell_of_an_object_is_asked_for_it(
    s3: S3Server, tmp_path: Path, status: int
) -> None:
    del s3
    (tmp_path / "a.csv").write_bytes(bytes(range(200)))

    class Refusing(FilesStub):
        def do_HEAD(self) -> None:
            self.send_error(status)

    with Served(functools.partial(Refusing, directory=str(tmp_path))) as origin:
        (file,) = expand(f"{origin}/a.csv", (".csv",), {}, {})
        assert file.size == 200
        assert read_tail(file, 5, {}, {}) == bytes(range(195, 200))
        with pytest.raises(LoadError, match=re.escape(f"{origin}/none.csv' does not exist")):
            expand(f"{origin}/none.csv", (".csv",), {}, {})


def test_a_web_server_that_refuses_to_send_an_object_is_not_taken_for_one_that_lacks_it(
    tmp_path: Path,
) -> None:
    class Refusing(FilesStub):
        def do_GET(self) -> None:
            self.send_error(405)

        do_HEAD = do_GET

    with Served(functools.partial(Refusing, directory=str(tmp_path))) as origin:
        uri = f"{origin}/a.csv"
        expected = f"cannot read {uri}: {origin} answered 405 Method Not Allowed"
        with pytest.raises(LoadError) as planning:
            expand(uri, (".csv",), {}, {})
        with pytest.raises(LoadError) as reading:
            download(SourceFile(uri, 5, 1), tmp_path / "f", {}, {})
    assert [str(caught.value) for caught in (planning, reading)] == [expected, expected]


def test_a_web_server_that_redirects_in_a_circle_is_named() -> None:
    class Circling(_Stub):
        def do_HEAD(self) -> None:
            self._answer(302, b"", {"Location": self.path})

    with Served(Circling) as origin, pytest.raises(LoadError) as caught:
        expand(f"{origin}/a.csv", (".csv",), {}, {})
    uri = f"{origin}/a.csv"
    assert str(caught.value) == f"cannot read {uri}: {origin} redirects without an end"


_ROWS = b"id,name\n" + b"1,a\n" * 50
_MODIFIED = {"Last-Modified": "Tue, 01 Jul 2025 10:00:00 GMT"}


class _OneFile(_Stub):
    """A server of one CSV, which says only in an answer to GET how long that is."""

    encodings: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Last-Modified", _MODIFIED["Last-Modified"])
        self.end_headers()

    def do_GET(self) -> None:
        self.encodings.append(self.headers.get("Accept-Encoding", ""))
        self._answer(200, _ROWS, _MODIFIED)


class _Compressing(_OneFile):
    """Compresses whatever is asked for; does or does not say so beforehand."""

    head: ClassVar[bytes] = _ROWS

    def do_HEAD(self) -> None:
        self._answer(200, self.head, _MODIFIED)

    def do_GET(self) -> None:
        self._answer(200, gzip.compress(_ROWS), {**_MODIFIED, "Content-Encoding": "gzip"})


class _Chunked(_OneFile):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Last-Modified", _MODIFIED["Last-Modified"])
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_ROWS), _ROWS))


def test_a_web_server_that_does_not_tell_the_length_is_asked_for_the_object(
    tmp_path: Path,
) -> None:
    with Served(_OneFile) as origin:
        (file,) = expand(f"{origin}/a.csv", (".csv",), {}, {})
        assert file.size == len(_ROWS)
        download(file, tmp_path / "f", {}, {})
    assert (tmp_path / "f").read_bytes() == _ROWS
    assert set(_OneFile.encodings) == {"identity"}


# Named: gzip writes down the second, and the processes of a test run must collect the same tests.
@pytest.mark.parametrize("head", [_ROWS, gzip.compress(_ROWS)], ids=["plain", "gzip"])
def test_a_web_server_that_compresses_all_the_same_is_named(tmp_path: Path, head: bytes) -> None:
    with Served(type("Handler", (_Compressing,), {"head": head})) as origin:
        (file,) = expand(f"{origin}/a.csv", (".csv",), {}, {})
        with pytest.raises(LoadError, match=f"{origin} sends it with Content-Encoding: gzip"):
            download(file, tmp_path / "f", {}, {})


def test_a_web_server_that_never_tells_the_length_is_named() -> None:
    with (
        Served(_Chunked) as origin,
        pytest.raises(LoadError, match=f"{origin} does not say how large it is"),
    ):
        expand(f"{origin}/a.csv", (".csv",), {}, {})


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_a_page_in_place_of_an_object_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_text("<!DOCTYPE html><title>Log in</title>")
    with Served(functools.partial(FilesStub, directory=str(tmp_path))) as origin:
        (table,) = DatasetSpec("t", f"{origin}/a.{suffix}").tables
        with pytest.raises(LoadError, match=rf"a\.{suffix} as {suffix}: it is an HTML page"):
            pin(table)


def test_one_object_is_read_over_http(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    monkeypatch.setattr(FilesStub, "seen", [])
    served = tmp_path / "served"
    served.mkdir()
    (served / "a b.csv").write_bytes(bytes(range(200)))
    with Served(functools.partial(FilesStub, directory=str(served))) as origin:
        uri = f"{origin}/a%20b.csv"
        (file,) = expand(uri, (".csv",), {}, {})
        assert (file.path, file.size) == (uri, 200)
        assert file.mtime_ns
        download(file, tmp_path / "f", {}, {})
        assert (tmp_path / "f").read_bytes() == bytes(range(200))
        assert FilesStub.seen == [("HEAD", "/a%20b.csv"), ("GET", "/a%20b.csv")]
        # Python's server does not know ranges.
        assert read_tail(file, 5, {}, {}) == bytes(range(195, 200))
        download(file, tmp_path / "f", {}, {}, [(3, 5)])
        assert (tmp_path / "f").read_bytes()[3:5] == bytes([3, 4])
        with pytest.raises(LoadError, match=re.escape(f"{origin}/none.csv' does not exist")):
            expand(f"{origin}/none.csv", (".csv",), {}, {})
        for source in (f"{origin}/", origin, f"{origin}/*.csv", f"{origin}/a?.csv"):
            with pytest.raises(RequestError, match="over HTTP"):
                expand(source, (".csv",), {}, {})
