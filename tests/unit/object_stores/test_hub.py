"""Datasets of the Hugging Face Hub, from a folder in its place and through its own client."""

from __future__ import annotations

import io
import logging
import os
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server.object_stores import download, expand, read_tail
from cache_server.tables.local_files import find_files
from tests.store_stubs import HubStub, Served, self_signed
from tests.unit.object_stores.conftest import MIB, PARQUET


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


def test_a_file_system_in_the_place_of_the_hub_s_needs_no_package_of_the_hub(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (file,) = expand("hf://datasets/tatsu-lab/alpaca/data/a.parquet", PARQUET, {}, {})
    assert file.size == len("a.parquet")


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


@pytest.mark.parametrize("kind", ["", "datasets/"])
def test_partitions_of_the_hub_are_those_below_the_source(hub: Path, kind: str) -> None:
    (hub / "day=1").mkdir()
    (hub / "day=1" / "c.parquet").write_bytes(b"c")
    for source, relative in (("data/day=1/c.parquet", "c.parquet"), ("**/c.parquet", None)):
        (table,) = DatasetSpec("t", f"hf://{kind}tatsu-lab/alpaca/{source}").tables
        assert find_files(table)[2] == (relative or "data/day=1/c.parquet",)


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


@pytest.mark.parametrize("path", ["", "/data", "/data/a.parquet", "/data/*.parquet"])
def test_a_repository_or_a_revision_that_the_hub_lacks_is_named(path: str) -> None:
    with Served(HubStub) as endpoint:
        options, secrets = {"endpoint": endpoint}, {"token": "hush-hush"}
        with pytest.raises(LoadError, match=r"nobody/none' at .* not found, or is private: check"):
            expand(f"hf://nobody/none{path}", PARQUET, options, secrets)
        with pytest.raises(LoadError, match=r"alpaca@nowhen' at .* has no such revision"):
            expand(f"hf://tatsu-lab/alpaca@nowhen{path}", PARQUET, options, secrets)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("RevisionNotFound", "has no such revision"),
        ("RepoNotFound", "was not found, or is private: check its name and the token"),
    ],
)
def test_a_revision_or_a_repository_that_is_removed_under_a_load_is_named(
    tmp_path: Path, code: str, reason: str
) -> None:
    class Removed(HubStub):
        files: ClassVar[dict[str, bytes]] = {"data/a.parquet": b"rows"}
        seen: ClassVar[list[tuple[str, str, str]]] = []
        is_removed: ClassVar[list[bool]] = []

        def do_GET(self) -> None:
            if self.is_removed:
                self._answer(404, b"{}", {"X-Error-Code": code})
            else:
                super().do_GET()

        do_POST = do_HEAD = do_GET

    with Served(Removed) as endpoint:
        options, secrets = {"endpoint": endpoint}, {"token": "hush-hush"}
        (file,) = expand("hf://tatsu-lab/alpaca/data", PARQUET, options, secrets)
        Removed.is_removed.append(True)
        with pytest.raises(LoadError) as caught:
            download(file, tmp_path / "f", options, secrets)
    assert str(caught.value) == (
        f"source '{file.path}' does not exist: repository 'datasets/tatsu-lab/alpaca' at "
        f"{endpoint} {reason}"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_is_not_there_is_named() -> None:
    options = {"endpoint": "http://127.0.0.1:9", "max_retries": "1"}
    with pytest.raises(LoadError, match=r"alpaca' at http://127\.0\.0\.1:9: .*[Cc]onnect"):
        expand("hf://tatsu-lab/alpaca/data", PARQUET, options, {})


def test_a_hub_with_an_unsigned_certificate_is_named_at_once(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path / "server.pem"))
    began = time.monotonic()
    with (
        Served(HubStub, context) as endpoint,
        pytest.raises(LoadError, match=rf"alpaca' at {endpoint}: .*CERTIFICATE_VERIFY_FAILED"),
    ):
        expand("hf://tatsu-lab/alpaca/a.parquet", PARQUET, {"endpoint": endpoint}, {})
    assert time.monotonic() - began < 25, "ten more attempts take half a minute"


def test_the_password_of_a_mirror_of_the_hub_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://user:hush-hush@127.0.0.1:9")
    secrets = {"max_retries": "0"}
    with pytest.raises(LoadError, match=r"alpaca' at http://127\.0\.0\.1:9: ") as caught:
        expand("hf://tatsu-lab/alpaca/data", PARQUET, {}, secrets)
    assert "hush" not in str(caught.value)


def test_the_password_of_a_mirror_that_fails_for_a_while_is_not_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(HubStub):
        files: ClassVar[dict[str, bytes]] = {"data/a.parquet": b"rows"}
        seen: ClassVar[list[tuple[str, str, str]]] = []
        statuses: ClassVar[list[int]] = [503]

        def do_GET(self) -> None:
            # A password in the address beats the token that the stub wants.
            self.headers.replace_header("Authorization", "Bearer hush-hush")
            if "/tree" in self.path and self.statuses:
                self._answer(self.statuses.pop(), b"{}", {})
            else:
                super().do_GET()

        do_POST = do_HEAD = do_GET

    logger = logging.getLogger("huggingface_hub")
    level, written = logger.level, io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    try:
        with Served(Failing) as endpoint:
            monkeypatch.setenv("HF_ENDPOINT", endpoint.replace("//", "//user:pass-word@"))
            (file,) = expand("hf://tatsu-lab/alpaca/data", PARQUET, {}, {})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert file.path.endswith("/a.parquet")
    assert not Failing.statuses
    assert "pass-word" not in written.getvalue()


@pytest.mark.parametrize(
    "endpoint", ["user:hush-hush@mirror", "http://user:hush/hush@mirror", "http://u:hush@mirror"]
)
def test_a_bad_address_of_the_hub_is_refused(endpoint: str) -> None:
    with pytest.raises(RequestError, match="the option 'endpoint' is not right") as caught:
        expand("hf://tatsu-lab/alpaca/data", PARQUET, {}, {"endpoint": endpoint})
    assert "hush" not in str(caught.value)


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


def test_the_client_of_the_hub_itself_reads_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    files = {"data/a.parquet": os.urandom(1000), "data/b.parquet": b"b", "README.md": b"r"}
    monkeypatch.setattr(HubStub, "files", files)
    monkeypatch.setattr(HubStub, "seen", [])
    with Served(HubStub) as endpoint:
        options, secrets = {"endpoint": endpoint}, {"token": "hush-hush"}
        a, b = expand("hf://tatsu-lab/alpaca/data", PARQUET, options, secrets)
        assert a.path == "hf://datasets/tatsu-lab/alpaca/data/a.parquet"
        assert [a] == expand(a.path, PARQUET, options, secrets)
        HubStub.seen.clear()
        download(a, tmp_path / "f", options, secrets)
        assert (tmp_path / "f").read_bytes() == files["data/a.parquet"]
        assert len([path for _, path, _ in HubStub.seen if "/resolve/" in path]) == 1
        HubStub.failures.extend([503, 429])
        assert read_tail(a, 8, options, secrets) == files["data/a.parquet"][-8:]
        files["data/b.parquet"] = b"B"
        with pytest.raises(LoadError, match=r"b\.parquet changed since"):
            download(b, tmp_path / "g", options, secrets)
        with pytest.raises(LoadError) as caught:
            expand("hf://tatsu-lab/alpaca/data", PARQUET, options, {"token": "wrong-token"})
    assert f"access to repository 'datasets/tatsu-lab/alpaca' at {endpoint}" in str(caught.value)
    assert "wrong-token" not in str(caught.value)
    assert not HubStub.failures
    assert "hush" not in caplog.text


def test_a_file_of_the_hub_that_changes_between_two_requests_is_refused(tmp_path: Path) -> None:
    num_bytes = 17 * MIB  # two requests
    files = {"data/a.parquet": b"a" * num_bytes}

    class Changing(HubStub):
        seen: ClassVar[list[tuple[str, str, str]]] = []

        def do_GET(self) -> None:
            if "/resolve/" in self.path and not self.headers["Range"].startswith("bytes=0-"):
                files["data/a.parquet"] = b"b" * num_bytes
            super().do_GET()

        do_POST = do_HEAD = do_GET

    Changing.files = files
    with Served(Changing) as endpoint:
        options, secrets = {"endpoint": endpoint}, {"token": "hush-hush"}
        (file,) = expand("hf://tatsu-lab/alpaca/data", PARQUET, options, secrets)
        with pytest.raises(LoadError, match=r"a\.parquet changed since the dataset was planned"):
            download(file, tmp_path / "f", options, secrets)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_hub_is_read_without_a_listing_of_its_directory_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"data/{number}.parquet": b"rows" for number in range(5)}
    monkeypatch.setattr(HubStub, "files", files)
    monkeypatch.setattr(HubStub, "seen", [])
    with Served(HubStub) as endpoint:
        options, secrets = {"endpoint": endpoint}, {"token": "hush-hush"}
        found = expand("hf://tatsu-lab/alpaca/data", PARQUET, options, secrets)
        HubStub.seen.clear()
        for file in found:
            download(file, tmp_path / "f", options, secrets)
        paths = [path for _, path, _ in HubStub.seen]
        assert sum("/tree/" in path for path in paths) <= 1
        assert sum("/resolve/" in path for path in paths) == 5
        files["data/new.parquet"] = b"rows"
        (new,) = expand("hf://tatsu-lab/alpaca/data/new.parquet", PARQUET, options, secrets)
        download(new, tmp_path / "f", options, secrets)
    assert (tmp_path / "f").read_bytes() == b"rows"


@pytest.mark.parametrize(
    ("mute", "source"),
    [("/paths-info", "hf://tatsu-lab/alpaca/data/a.parquet"), ("/tree", "hf://tatsu-lab/alpaca")],
)
def test_a_request_that_the_hub_never_answers_is_given_up_and_made_again(
    monkeypatch: pytest.MonkeyPatch, mute: str, source: str
) -> None:
    is_over = threading.Event()
    ignored: list[str] = []

    class Mute(HubStub):
        files: ClassVar[dict[str, bytes]] = {"data/a.parquet": b"rows"}
        seen: ClassVar[list[tuple[str, str, str]]] = []

        def do_GET(self) -> None:
            if mute in self.path and not ignored:
                ignored.append(self.path)
                is_over.wait(60)
                self.close_connection = True
            else:
                super().do_GET()

        do_POST = do_HEAD = do_GET

    monkeypatch.setattr("cache_server.object_stores.hub.READ_TIMEOUT_S", 0.3)
    with Served(Mute) as endpoint:
        (file,) = expand(source, PARQUET, {"endpoint": endpoint}, {"token": "hush-hush"})
        is_over.set()
    assert file.path == "hf://datasets/tatsu-lab/alpaca/data/a.parquet"
    assert ignored
