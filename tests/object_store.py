"""An S3 server on loopback, moto's, that counts what is asked of it and can be made to fail."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any, BinaryIO, ClassVar
from urllib.parse import quote, unquote, urlsplit

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import get_canned_acl, s3_backends

REGION = "us-east-1"
ACCESS_KEY_ID = "AKIATESTTESTTESTTEST"
SECRET_ACCESS_KEY = "a/secret+access+key+that+must+never+be+shown"

_KEY_ID = re.compile(r"Credential=([^/,\s]+)")
_REFUSAL = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InvalidAccessKeyId</Code><Message>'
    "The AWS Access Key Id you provided does not exist in our records.</Message>"
    "<AWSAccessKeyId>{key_id}</AWSAccessKeyId><RequestId>1</RequestId></Error>"
)
_BUSY = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    "<Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True)
class Request:
    """One that the server got.

    Attributes:
        key: ``bucket/key``, without escapes; of a listing the bucket.
        span: the ``Range`` header.
        access_key_id: who signed it; empty for an anonymous one.
    """

    method: str
    key: str
    query: str
    span: str
    access_key_id: str
    session_token: str
    host: str


@dataclass
class _Fault:
    pattern: re.Pattern[str]
    times: int
    status: int | None  # None: the body breaks in the middle
    method: str | None


@dataclass
class _Hold:
    pattern: re.Pattern[str]
    after: int
    ended: threading.Event


class S3Server:
    """A context manager. Its buckets are the process's: two servers have the same.

    Attributes:
        endpoint: ``http://127.0.0.1:PORT``.
        options: public settings of the store, for the functions that take both.
        secrets: the other ones.
        storage_options: both, for a `DatasetSpec`.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._faults: list[_Fault] = []
        self._holds: list[_Hold] = []
        self._required: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="s3-server"
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.options = {"endpoint": self.endpoint, "region": REGION}
        self.secrets = {
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }
        self.storage_options = {**self.options, **self.secrets}

    def __enter__(self) -> S3Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.close_all()
        _backend().reset()

    def put(self, bucket: str, key: str, data: bytes, *, public: bool = False) -> None:
        """Writes an object, behind the server's back; makes the bucket where there is none.

        Args:
            public: anyone may read it; without, moto refuses a request that is not signed.
        """
        backend = _backend()
        if bucket not in backend.buckets:
            backend.create_bucket(bucket, REGION)
        stored = backend.put_object(bucket, key, data)
        if public:
            stored.set_acl(get_canned_acl("public-read"))

    def put_many(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Like `put`."""
        for key, data in objects.items():
            self.put(bucket, key, data)

    def delete(self, bucket: str, key: str) -> None:
        """Removes an object."""
        _backend().delete_object(bucket, key)

    def fail(
        self, pattern: str, *, status: int = 503, times: int = 1, method: str | None = None
    ) -> None:
        """The next requests of which ``pattern`` finds ``bucket/key`` or the query fail.

        Args:
            times: how many.
        """
        self._faults.append(_Fault(re.compile(pattern), times, status, method))

    def break_body(self, pattern: str, *, times: int = 1) -> None:
        """The next answers to GET break in the middle: the connection is closed."""
        self._faults.append(_Fault(re.compile(pattern), times, None, "GET"))

    def hold(self, pattern: str, *, after: int = 0) -> threading.Event:
        """Requests of which ``pattern`` finds ``bucket/key`` wait until the event is set.

        Args:
            after: the first requests for each key do not wait, such as those of a plan.
        """
        self._holds.append(_Hold(re.compile(pattern), after, threading.Event()))
        return self._holds[-1].ended

    def require(self, *access_key_ids: str) -> None:
        """From now on other keys are refused, as S3 does; without any, all are let in.

        Keys that begin with one of these count, too.
        """
        self._required = frozenset(access_key_ids)

    def counts(self) -> Counter[tuple[str, str]]:
        """How many requests there were for each method and ``bucket/key``."""
        with self._lock:
            return Counter((request.method, request.key) for request in self.requests)

    def clear(self) -> None:
        """Forgets requests, faults and required keys."""
        with self._lock:
            self.requests.clear()
            self._faults.clear()
            for hold in self._holds:
                hold.ended.set()
            self._holds.clear()
            self._required = frozenset()

    def answer(
        self, request: Request, environ: dict[str, Any]
    ) -> tuple[str, list[tuple[str, str]], bytes, bool]:
        """Status, headers, body, and whether the body is to break. Called by the handler."""
        with self._lock:
            self.requests.append(request)
            fault = self._fault(request)
            before = sum(each.key == request.key for each in self.requests) - 1
            holds = [
                hold.ended
                for hold in self._holds
                if before >= hold.after and hold.pattern.search(request.key)
            ]
        for ended in holds:
            ended.wait()
        if self._required and not request.access_key_id.startswith(tuple(self._required)):
            body = _REFUSAL.format(key_id=request.access_key_id).encode()
            return "403 Forbidden", [("Content-Type", "application/xml")], body, False
        if fault is not None and fault.status is not None:
            return (
                f"{fault.status} Failing",
                [("Content-Type", "application/xml")],
                (_BUSY.encode()),
                False,
            )
        started: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            started[:] = [status, headers]

        answer: Iterable[bytes] = self._app(environ, start)
        body = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        return started[0], started[1], body, fault is not None

    def _fault(self, request: Request) -> _Fault | None:
        for fault in self._faults:
            if (
                fault.times
                and fault.method in (None, request.method)
                and any(map(fault.pattern.search, (request.key, request.query)))
            ):
                fault.times -= 1
                return fault
        return None


def _backend() -> Any:
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


def _chunk(body: BinaryIO) -> bytes:
    """The next piece of a body of unknown length; empty: its end."""
    chunk = body.read(int(body.readline().partition(b";")[0], 16))
    body.readline()
    return chunk


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: S3Server) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away

    def close_all(self) -> None:
        """Ends the connections that clients keep, so that the threads end."""
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Keeps connections, which werkzeug's server does not."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server: _Server
    _hop: ClassVar = ("content-length", "connection", "transfer-encoding")

    def _serve(self) -> None:
        parts = urlsplit(self.path)  # absolute, where the server is a proxy
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(partial(_chunk, self.rfile), b""))
            del self.headers["Transfer-Encoding"]
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "aws-chunked":
            body = b"".join(iter(partial(_chunk, BytesIO(body)), b""))
            self.headers.replace_header("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
            del self.headers["Content-Encoding"]
        signed = _KEY_ID.search(self.headers.get("Authorization", ""))
        request = Request(
            self.command,
            unquote(parts.path).strip("/"),
            parts.query,
            self.headers.get("Range", ""),
            signed[1] if signed else "",
            self.headers.get("x-amz-security-token", ""),
            self.headers.get("Host", ""),
        )
        environ: dict[str, Any] = {
            "REQUEST_METHOD": self.command,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote(parts.path, "latin-1"),
            # moto does not decode a bucket, and object_store encodes one's hyphens.
            "RAW_URI": quote(unquote(parts.path)) + (f"?{parts.query}" if parts.query else ""),
            "QUERY_STRING": parts.query,
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": str(self.server.server_address[1]),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": "127.0.0.1",
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(body),
            "wsgi.errors": BytesIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        for name, value in self.headers.items():
            if name.lower() not in ("content-type", "content-length"):
                environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
        # moto looks for a bucket in another host's name, such as that of who is asked by a proxy.
        environ["HTTP_HOST"] = f"127.0.0.1:{environ['SERVER_PORT']}"
        status, headers, answer, breaks = self.server.owner.answer(request, environ)
        code, _, phrase = status.partition(" ")
        self.send_response(int(code), phrase)
        length = str(len(answer))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in self._hop:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer[: len(answer) // 2] if breaks else answer)
        self.wfile.flush()
        if breaks:
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None:
        pass
