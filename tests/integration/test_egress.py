"""What a writer can make a node connect to: never more than its operator allowed.

One node with tokens accepts every scheme and names one server, ``friend``. Another server on
loopback, ``secret``, stands for what only the node can reach: it must see nothing.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc
import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.local import LocalNode

WAIT_S = 60.0
TOKENS = {role: f"the-token-of-the-{role}" for role in ("node", "writer")}
ROWS = b"row\n1\n2\n"
FAST = {"max_retries": "0", "retry_timeout_s": "1"}
KEYS = {"access_key_id": "a", "secret_access_key": "b"}
SCHEMES = ("http", "https", "s3", "gs", "az", "abfss", "hf", "postgresql")


class Secret:
    """A server on loopback that notes each connection."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                try:
                    self.seen.append(connection.recv(4096))
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nETag: x\r\n"
                        b"Connection: close\r\n\r\n" + ROWS
                    )
                except OSError:
                    self.seen.append(b"a broken connection")

    def close(self) -> None:
        self._socket.close()


class Friend(BaseHTTPRequestHandler):
    """Serves rows, redirects, and catalogues that lie. ``secret`` is where they lead."""

    secret: ClassVar[str] = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind, _, rest = self.path.removeprefix("/").partition("/")
        if kind.startswith("to-"):
            self._send(
                int(kind.removeprefix("to-")), b"", {"Location": f"http://{self.secret}/x.csv"}
            )
        elif kind == "catalog":
            self._catalog(*rest.partition("/")[::2])
        elif rest == "rows.csv" or kind == "rows.csv":
            self._send(200, ROWS, {"ETag": '"x"'})
        else:
            self._send(404, b"", {})

    do_HEAD = do_POST = do_GET

    def _catalog(self, lie: str, path: str) -> None:
        secret = f"http://{self.secret}"
        if path.startswith("v1/config"):
            if lie == "redirect":
                return self._send(307, b"", {"Location": f"{secret}/v1/config"})
            answer: dict[str, Any] = {"defaults": {}, "overrides": {}}
            if lie in answer:
                answer[lie] = {"uri": secret, "s3.endpoint": secret}
        elif lie == "moved":
            return self._send(302, b"", {"Location": f"{secret}/{path}"})
        else:
            answer = {"metadata": METADATA, "config": {}}
            answer |= {
                "metadata-location": {
                    "http": f"{secret}/v1.metadata.json",
                    "file": "/etc/hostname",
                    "uri": "file:///etc/hostname",
                    "account": f"abfss://c@{self.secret}/v1.metadata.json",
                    "gs": "gs://b/v1.metadata.json",
                }.get(lie, "s3://b/v1.metadata.json")
            }
            if lie == "config":
                answer["config"] = {"s3.endpoint": secret}
                answer["config"] |= {"s3.access-key-id": "a", "s3.secret-access-key": "b"}
            if lie == "gs":
                answer["config"] = {"gcs.service.host": secret, "gcs.oauth2.token": "t"}
        self._send(200, json.dumps(answer).encode(), {})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


METADATA = {
    "format-version": 2, "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
    "location": "s3://b", "last-sequence-number": 0, "last-updated-ms": 1, "last-column-id": 1,
    "current-schema-id": 0, "schemas": [{"type": "struct", "schema-id": 0, "fields": [
        {"id": 1, "name": "row", "required": False, "type": "long"}]}],
    "default-spec-id": 0, "partition-specs": [{"spec-id": 0, "fields": []}],
    "last-partition-id": 999, "default-sort-order-id": 0,
    "sort-orders": [{"order-id": 0, "fields": []}],
}  # fmt: skip


@pytest.fixture(scope="module")
def secret() -> Iterator[Secret]:
    server = Secret()
    yield server
    server.close()


@pytest.fixture(scope="module")
def friend(secret: Secret) -> Iterator[str]:
    Friend.secret = f"127.0.0.1:{secret.port}"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Friend)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def changing(secret: Secret) -> Iterator[None]:
    """A name whose address is public at one look, and that of loopback at the next."""
    resolve = socket.getaddrinfo
    asked: list[str] = []

    def changing(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "changing.example":
            asked.append(host)
            host = "93.184.216.34" if len(asked) % 2 else "127.0.0.1"
        return resolve(host, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", changing)
        patch.setenv("NO_PROXY", "*")
        yield


@pytest.fixture(scope="module")
def node(
    friend: str, changing: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalNode]:
    directory = tmp_path_factory.mktemp("egress")
    (directory / "tokens.json").write_text(json.dumps({"principals": [
        {"name": role, "sha256": hashlib.sha256(token.encode()).hexdigest(), "roles": [role]}
        for role, token in TOKENS.items()
    ]}))  # fmt: skip
    arguments = ["--auth-tokens", str(directory / "tokens.json"), "--allow-source", f"{friend}/"]
    for scheme in SCHEMES:
        arguments += ["--allow-source", f"{scheme}://"]
    running = LocalNode(directory / "node", arguments, TOKENS["node"])
    try:
        running.start()
        yield running
    finally:
        running.close()


class Load:
    """Loads of a writer, several at a time."""

    def __init__(self, node: LocalNode) -> None:
        self._channel = grpc.insecure_channel(node.control_location)
        self._stub = cache_pb2_grpc.CoordinatorStub(self._channel)
        self._options = {"metadata": [("authorization", f"Bearer {TOKENS['writer']}")]}

    def end_of(self, name: str, source: str, options: Mapping[str, str], form: str) -> str:
        """The error of a load; empty: its rows are there."""
        table = pb.TableSpec(name="source", source=[source], format=form, options=options)
        request = pb.CreateDatasetRequest(spec=pb.DatasetSpec(name=name, tables=[table]))
        try:
            self._stub.CreateDataset(request, timeout=WAIT_S, **self._options)
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline:
                found = self._stub.GetDataset(
                    pb.GetDatasetRequest(name=name), timeout=WAIT_S, **self._options
                ).dataset
                if found.state != pb.DATASET_STATE_LOADING:
                    return str(found.error.message)
                threading.Event().wait(0.02)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "it is still loading"

    def all(self, cases: Mapping[str, tuple[str, Mapping[str, str], str]]) -> dict[str, str]:
        """The error of each load."""

        def ended(item: tuple[int, tuple[str, tuple[str, Mapping[str, str], str]]]) -> str:
            number, (label, case) = item
            return self.end_of(f"d{abs(hash(label))}-{number}", *case)

        with ThreadPoolExecutor(8) as pool:
            return dict(zip(cases, pool.map(ended, enumerate(cases.items())), strict=True))


@pytest.fixture(scope="module")
def loads(node: LocalNode) -> Load:
    return Load(node)


def spellings(port: int) -> list[str]:
    """Loopback addresses, as one library or another understands them."""
    place = f"127.0.0.1:{port}"
    return [
        f"http://{place}", place, f"http:{place}", f"http:/{place}", f"http:\\\\{place}",
        f"http:///{place}", f"http://{place}\\@example.com", f"http://example.com@{place}",
        f"http://2130706433:{port}", f"http://0x7f.1:{port}", f"http://[::ffff:127.0.0.1]:{port}",
        f"http://localhost:{port}", f"https://{place}", f"x@{place}/?",
    ]  # fmt: skip


CSV, DELTA, ICEBERG = "csv", "delta", "iceberg"
PLACES: dict[str, tuple[str, dict[str, str], str]] = {
    "source": ("{}/x.csv", FAST, CSV),
    "proxy_url": ("http://example.com/a.csv", {**FAST, "proxy_url": "{}"}, CSV),
    "s3 endpoint": ("s3://b/a.csv", {**FAST, **KEYS, "endpoint": "{}"}, CSV),
    "s3 region": ("s3://b/a.csv", {**FAST, **KEYS, "region": "{}"}, CSV),
    "s3 sts": ("s3://b/a.csv", {**FAST, **KEYS, "role_arn": "arn:aws:iam::1:role/x",
                                "sts_endpoint": "{}"}, CSV),
    "s3 metadata": ("s3://b/a.csv", {**FAST, "imdsv1_fallback": "true",
                                     "metadata_endpoint": "{}"}, CSV),
    "s3 container": ("s3://b/a.csv", {**FAST, "container_credentials_full_uri": "{}"}, CSV),
    "gs base_url": ("gs://b/a.csv", {**FAST, "skip_signature": "true", "base_url": "{}"}, CSV),
    "gs account": ("gs://b/a.csv", {**FAST, "service_account_key": json.dumps(
        {"gcs_base_url": "{}", "disable_oauth": True, "client_email": "", "private_key": "",
         "private_key_id": ""}).replace("{", "{{").replace("}", "}}").replace("{{}}", "{}")}, CSV),
    "az endpoint": ("az://c/a.csv", {**FAST, "skip_signature": "true", "account_name": "x",
                                     "endpoint": "{}"}, CSV),
    "az account": ("az://c/a.csv", {**FAST, "skip_signature": "true", "account_name": "{}"}, CSV),
    "az authority": ("az://c/a.csv", {**FAST, "account_name": "x", "tenant_id": "t",
                                      "client_id": "c", "client_secret": "s",
                                      "authority_host": "{}"}, CSV),
    "az msi": ("az://c/a.csv", {**FAST, "account_name": "x", "msi_endpoint": "{}"}, CSV),
    "hf endpoint": ("hf://datasets/a/b/x.csv", {**FAST, "endpoint": "{}"}, CSV),
    "delta endpoint": ("s3://b/t", {**FAST, **KEYS, "endpoint": "{}", "allow_http": "true"}, DELTA),
    "delta proxy": ("s3://b/t", {**FAST, **KEYS, "proxy_url": "{}"}, DELTA),
    "delta role": ("s3://b/t", {**FAST, **KEYS, "endpoint": "{}", "allow_http": "true",
                                "role_arn": "arn:aws:iam::1:role/x"}, DELTA),
    "iceberg s3": ("s3://b/v1.metadata.json", {**KEYS, "s3.endpoint": "{}"}, ICEBERG),
    "iceberg proxy": ("s3://b/v1.metadata.json", {**KEYS, "s3.proxy-uri": "{}"}, ICEBERG),
    "iceberg gs": ("gs://b/v1.metadata.json", {"gcs.service.host": "{}",
                                               "gcs.oauth2.token": "x"}, ICEBERG),
    "iceberg adls": ("abfss://c@x.dfs.core.windows.net/v1.metadata.json",
                     {"adls.account-name": "x", "adls.account-key": "eA==",
                      "adls.blob-storage-authority": "{}", "adls.blob-storage-scheme": "http"},
                     ICEBERG),
    "catalog": ("ns.t", {"catalog.type": "rest", "catalog.uri": "{}"}, ICEBERG),
    "catalog oauth": ("ns.t", {"catalog.type": "rest", "catalog.uri": "FRIEND/catalog/none",
                               "catalog.credential": "a:b", "catalog.oauth2-server-uri": "{}"},
                      ICEBERG),
    "catalog hive": ("ns.t", {"catalog.type": "hive", "catalog.uri": "{}"}, ICEBERG),
    "catalog glue": ("ns.t", {"catalog.type": "glue", "catalog.glue.endpoint": "{}",
                              "catalog.client.region": "us-east-1"}, ICEBERG),
    "catalog sql": ("ns.t", {"catalog.type": "sql", "catalog.uri": "{}"}, ICEBERG),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, str], str]] = {
    "s3 bucket": ("s3://{0}?/a.csv", {**FAST, "skip_signature": "true",
                                     "virtual_hosted_style_request": "true"}, CSV),
    "s3 bucket @": ("s3://x@{0}%2f/a.csv", {**FAST, "skip_signature": "true",
                                           "virtual_hosted_style_request": "true"}, CSV),
    "abfss host": ("abfss://c@{0}/a.csv", {**FAST, "skip_signature": "true"}, CSV),
    "delta abfss": ("abfss://c@{0}/t", {"skip_signature": "true"}, DELTA),
    "iceberg abfss": ("abfss://c@{0}/v1.metadata.json", {}, ICEBERG),
    "iceberg http": ("http://{0}/v1.metadata.json", {}, ICEBERG),
    "a catalogue option": ("http://{0}/x.csv", {**FAST, "catalog.x": "y"}, CSV),
    **{f"postgres {n}": (f"postgresql://{place}", {}, "") for n, place in enumerate((
        "{0}/x?table=t", "example.com,{0}/x?table=t",
        "example.com/x?table=t&host=%31%32%37.0.0.1&port={1}",
        "example.com/x?table=t&hostaddr=127.0.0.1&port={1}", "u:p@{0}@example.com/x?table=t",
        "{0}\\@example.com/x?table=t", "{0}#@example.com/x?table=t", "2130706433:{1}/x?table=t",
        "127.1:{1}/x?table=t", "localhost:{1}/x?table=t", "[::ffff:127.0.0.1]:{1}/x?table=t",
        "changing.example:{1}/x?table=t"))},
    **{f"redirect {status}": (f"FRIEND/to-{status}/x.csv", FAST, CSV)
       for status in (301, 302, 303, 307, 308)},
    **{f"catalog {lie}": ("ns.t", {"catalog.type": "rest", "catalog.uri": f"FRIEND/catalog/{lie}"},
                          ICEBERG)
       for lie in ("overrides", "defaults", "config", "redirect", "moved", "http", "file", "uri",
                   "account", "gs")},
    "changing source": ("http://changing.example:{1}/x.csv", FAST, CSV),
    "changing endpoint": ("s3://b/a.csv", {**FAST, **KEYS,
                                           "endpoint": "http://changing.example:{1}"}, CSV),
}  # fmt: skip


def test_no_spelling_of_an_address_leads_to_loopback(
    loads: Load, secret: Secret, friend: str
) -> None:
    cases = {}
    for label, (source, options, form) in PLACES.items():
        for number, text in enumerate(spellings(secret.port)):
            cases[f"{label} {number}"] = (
                source.format(text),
                {
                    name: value.replace("FRIEND", friend).replace("{}", text)
                    if "{{" not in value
                    else value.format(text)
                    for name, value in options.items()
                },
                form,
            )
    ends = loads.all(cases)
    assert secret.seen == [], ends
    assert {label for label, end in ends.items() if not end} == set()


def test_no_redirect_catalogue_or_changing_name_leads_to_loopback(
    loads: Load, secret: Secret, friend: str
) -> None:
    place = f"127.0.0.1:{secret.port}"

    def filled(text: str) -> str:
        return text.replace("FRIEND", friend).format(place, secret.port)

    cases = {
        label: (filled(source), {name: filled(text) for name, text in options.items()}, form)
        for label, (source, options, form) in OTHERS.items()
    }
    ends = loads.all(cases)
    assert secret.seen == [], ends
    assert {label for label, end in ends.items() if not end} == set()
    assert "redirects to another host by plain HTTP" in ends["redirect 302"]
    for label in ("catalog redirect", "catalog overrides", "catalog config"):
        assert "may not connect to 127.0.0.1" in ends[label], ends[label]
    for label in ("catalog file", "catalog uri"):
        assert "this cache may not read" in ends[label], ends[label]


def test_what_the_operator_names_is_read(loads: Load, friend: str) -> None:
    assert loads.end_of("good", f"{friend}/rows.csv", FAST, CSV) == ""
