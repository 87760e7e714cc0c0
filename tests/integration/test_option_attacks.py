"""Options and answers of catalogues that name code, files or addresses, at a node with tokens."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from cache_client import CacheClient, Connection, DatasetSpec
from cache_protocol.errors import CacheError
from cache_server.local import LocalNode
from tests.iceberg_tables import opened_catalog
from tests.store_stubs import Served, _Stub

TOKENS = {role: f"the-token-of-the-{role}" for role in ("node", "writer")}


class Catalogue(_Stub):
    """A REST catalogue of one table, whose answers hold ``extra`` wherever properties are."""

    metadata: ClassVar[dict[str, Any]] = {}
    location: ClassVar[str] = ""
    extra: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        if self.path.startswith("/v1/config"):
            body: dict[str, Any] = {"defaults": self.extra, "overrides": self.extra}
        else:
            texts = {key: text for key, text in self.extra.items() if isinstance(text, str)}
            metadata = {**self.metadata, "properties": texts}
            credentials = [{"prefix": "", "config": texts}]
            body = {"metadata-location": self.location, "metadata": metadata,
                    "config": self.extra, "storage-credentials": credentials}  # fmt: skip
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})


class Listener:
    """A server that notes who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def is_untouched(self) -> bool:
        try:
            self._socket.accept()
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    with closing(Listener()) as opened:
        yield opened


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("table")
    with opened_catalog(folder) as catalog:
        schema = Schema(NestedField(1, "row", LongType(), required=False))
        table = catalog.create_table("ns.t", schema)
        table.append(pa.table({"row": pa.array(range(10), pa.int64())}))
        Catalogue.location = table.metadata_location
        Catalogue.metadata = json.loads(table.metadata.model_dump_json())
    with Served(Catalogue) as uri:
        yield uri


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory, catalogue: str) -> Iterator[CacheClient]:
    """A client with the token of a writer, of a node that may read the table and its catalogue."""
    folder = tmp_path_factory.mktemp("options")
    principals = [
        {"name": role, "sha256": hashlib.sha256(token.encode()).hexdigest(), "roles": [role]}
        for role, token in TOKENS.items()
    ]
    (folder / "tokens.json").write_text(json.dumps({"principals": principals}))
    table = Path(Catalogue.location.removeprefix("file://")).parents[4]
    arguments = ["--allow-source", catalogue, "--allow-source", f"{table}/"]
    for prefix in ("s3://b/", "gs://b/"):
        arguments += ["--allow-source", prefix]
    arguments += ["--auth-tokens", str(folder / "tokens.json"), "--heartbeat-interval-s", "0.1"]
    node = LocalNode(folder / "node", arguments, TOKENS["node"])
    try:
        node.start()
        yield CacheClient(Connection(node.endpoint, token=TOKENS["writer"]))
        assert node.exit_code is None
    finally:
        node.close()


def failure(writer: CacheClient, name: str, source: str, **arguments: Any) -> str:
    """Why a load fails."""
    with pytest.raises(CacheError) as caught:
        writer.load(DatasetSpec(name, source, format="iceberg", **arguments))
    return str(caught.value)


def test_an_answer_of_a_catalogue_runs_no_program_and_reaches_no_address(
    writer: CacheClient, catalogue: str, listener: Listener, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    there = f"127.0.0.1:{listener.port}"
    Catalogue.extra = {
        **{"/bin/sh": "", "-c": "", f"id > {mark}": ""},  # arguments of Popen
        **{"py-io-impl": "subprocess.Popen", "py-catalog-impl": "subprocess.Popen"},
        **{"io-impl": "subprocess.Popen", "s3.retry-strategy-impl": "subprocess.Popen"},
        **{"s3.proxy-uri": f"http://{there}", "adls.blob-storage-authority": there},
        **{"s3.signer.uri": f"http://{there}", "hf.endpoint": f"http://{there}"},
        **{"gcs.session-kwargs": there, "client.profile-name": "evil", "cache.files": "x"},
        **{"auth": {"type": "custom", "impl": "subprocess.Popen", "custom": {"args": "id"}}},
        **{"ssl": {"client": {"cert": "/etc/hostname"}}, "rest.sigv4-enabled": "true"},
        **{"header.Host": there, "credential": "a:b"},
    }
    catalog = {"type": "rest", "uri": catalogue}
    why = failure(writer, "named", "ns.t", catalog=catalog)
    assert "must not answer with the property 'cache.files'" in why
    del Catalogue.extra["cache.files"]
    loaded = writer.load(DatasetSpec("answer", "ns.t", catalog=catalog))
    assert loaded.num_rows == 10
    for spelling in (f"http:{there}", f"http://{there}\\@example.com", there):
        for key in ("uri", "s3.endpoint", "oauth2-server-uri", "gcs.service.host"):
            Catalogue.extra = {key: spelling}
            why = failure(writer, "spelt", "ns.t", catalog=catalog)
            assert f"the catalogue's answer '{key}' is not right" in why
    Catalogue.extra = {}
    assert listener.is_untouched()
    assert not mark.exists()


def test_properties_of_a_table_run_no_program(writer: CacheClient, tmp_path: Path) -> None:
    """pyiceberg makes the files of a table of any catalogue by them."""
    mark, metadata = tmp_path / "ran", Path(Catalogue.location.removeprefix("file://"))
    before = metadata.read_text()
    catalog = {"type": "sql", "uri": f"sqlite:///{metadata.parents[4]}/catalog.db"}
    properties = {"/bin/sh": "", "-c": "", f"id > {mark}": "", "py-io-impl": "subprocess.Popen"}
    try:
        metadata.write_text(json.dumps({**json.loads(before), "properties": properties}))
        loaded = writer.load(DatasetSpec("properties", "ns.t", format="iceberg", catalog=catalog))
    finally:
        metadata.write_text(before)
    assert loaded.num_rows == 10
    assert not mark.exists()


def test_an_option_runs_no_program_and_reaches_no_address(
    writer: CacheClient, catalogue: str, listener: Listener, tmp_path: Path
) -> None:
    """Also: such an answer of a server aborted the process."""
    there = f"127.0.0.1:{listener.port}"
    catalog = {"type": "rest", "uri": catalogue}
    for name, value in (
        *(("py-io-impl", "subprocess.Popen"), ("py-catalog-impl", "this.s")),
        *(("ssl", "/etc/hostname"), ("auth", "custom"), ("s3.retry-strategy-impl", "this.s")),
        *(("adls.blob-storage-authority", there), ("s3.proxy-uri", there), ("nope", "x")),
        *(("header.connection", "x"), ("header.transfer-encoding", "chunked")),
        *(("glue.profile-name", "evil"), ("s3.endpoint", there)),
    ):
        assert f"{name}'" in failure(writer, "o", "ns.t", catalog={**catalog, name: value}), name
    for scheme in ("", "http:", "http:/", "http:\\\\"):
        for options in ({"proxy_url": scheme + there}, {"AWS_ENDPOINT_URL": scheme + there}):
            why = failure(writer, "o", "s3://b/v1.metadata.json", storage_options=options)
            assert next(iter(options)).lower() in why or "may not read" in why
    for kind, uri in (
        ("rest", f"http://{there}\\@example.com"),
        ("rest", f"http:{there}"),
        ("hive", f"thrift:{there}"),
        ("sql", f"postgresql://h/d?host={there}"),
        ("sql", f"sqlite:///{tmp_path}/made.db?uri=true"),
        ("in-memory", "x"),
    ):
        why = failure(writer, "o", "ns.t", catalog={"type": kind, "uri": uri})
        assert any(text in why for text in ("catalog", "may not read", "is not right"))
    key = json.dumps({"type": "external_account", "gcs_base_url": f"http://{there}"})
    options = {"google_service_account_key": key}
    assert "'type'" in failure(writer, "o", "gs://b/v1.metadata.json", storage_options=options)
    assert listener.is_untouched()
    assert not (tmp_path / "made.db").exists()
    assert writer.load(DatasetSpec("after", "ns.t", catalog=catalog)).num_rows == 10
