"""Servers on loopback that speak as much of a store's protocol as a reader needs, but for S3's.

Handlers for `Served`. What they hold and what they saw is of the class: take a subclass with its
own, as ``type("Hub", (HubStub,), {"files": files, "seen": []})``.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Served:
    """A server of the given handler, for the time of a ``with``.

    Args:
        tls: speaks it, where given.
    """

    def __init__(self, handler: Any, tls: ssl.SSLContext | None = None) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def self_signed(path: Path) -> Path:
    """A certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a store")])
    now = datetime.now(UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


class FilesStub(SimpleHTTPRequestHandler):
    """Files of a folder, by Python's own server, which does not know ranges."""

    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path))
        super().do_GET()

    def do_HEAD(self) -> None:
        self.seen.append((self.command, self.path))
        super().do_HEAD()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Stub(BaseHTTPRequestHandler):
    """Keeps connections, as stores do, and is silent."""

    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class AzureStub(_Stub):
    """As much of Azure's protocol as a reader of one container needs."""

    blobs: ClassVar[dict[str, bytes]] = {}
    seen: ClassVar[list[tuple[str, str]]] = []
    _modified = "Tue, 01 Jul 2025 10:00:00 GMT"

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        _, _, name = unquote(parts.path).lstrip("/").partition("/")  # after the container
        if query.get("comp") == ["list"]:
            body: bytes | None = self._listing(query.get("prefix", [""])[0])
        else:
            body = self.blobs.get(name)
        if body is None:
            self._answer(404, b"", {})
            return
        headers = {"ETag": '"0x1"', "Last-Modified": self._modified, "x-ms-version": "2020-01-01"}
        self._answer(200, body, headers)

    do_HEAD = do_GET

    def _listing(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Blob><Name>{name}</Name><Properties><Last-Modified>{self._modified}</Last-Modified>"
            f"<Etag>0x1</Etag><Content-Length>{len(blob)}</Content-Length>"
            "<Content-Type>x</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, blob in self.blobs.items()
            if name.startswith(prefix)
        )
        return (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>'
            f"{entries}</Blobs><NextMarker /></EnumerationResults>"
        ).encode()


class HubStub(_Stub):
    """As much of the Hub's API as huggingface_hub needs to read one dataset."""

    dataset: ClassVar[str] = "tatsu-lab/alpaca"
    files: ClassVar[dict[str, bytes]] = {}
    seen: ClassVar[list[tuple[str, str, str]]] = []
    failures: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.seen.append((self.command, self.path, self.headers.get("Authorization", "")))
        parts = urlsplit(self.path)
        kind, _, rest = parts.path.removeprefix(f"/api/datasets/{self.dataset}").partition("/main")
        answer: Any = {"id": self.dataset, "sha": "0" * 40, "siblings": []}
        if self.failures and ("/paths-info" in parts.path or "/resolve/" in parts.path):
            self._answer(self.failures.pop(), b"{}", {})
            return
        if not re.match(f"(/api)?/datasets/{self.dataset}(/|$)", parts.path):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if "/nowhen" in parts.path:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
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
