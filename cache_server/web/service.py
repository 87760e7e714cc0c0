"""The HTTP port of a node: ``/`` for people, ``/metrics`` for Prometheus, the others for probes."""

from __future__ import annotations

import base64
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cache_protocol.errors import (
    ConfigError,
    NodeUnavailableError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.auth.principals import NOTHING, Viewer
from cache_server.node.status import NodeStatus
from cache_server.web.html import View
from cache_server.web.page import REFRESH_S, page

logger = logging.getLogger(__name__)

_IDLE_S = 10.0  # for a caller to send more, or to take more
_REQUEST_S, _CALL_S = 10.0, 60.0  # for a caller to send its request, and to have its answer
_BACKLOG = 128  # of connections that wait to be accepted
MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ADDRESS = 96, 48  # each has a thread
_AT_ONCE = 2  # answers of a path that are made at once, if they take long
_TURN_S = 5.0  # to wait for that
_POLL_S = 0.1  # longest time to stop
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no script, no other file
_ASK_FOR_TOKEN = {"WWW-Authenticate": 'Basic realm="data cache: the token is the password"'}
_NO_HEADERS: Mapping[str, str] = {}
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"


class WebService:
    """Listens from construction, answers after `start`, with a thread for each call.

    Args:
        bind: host to listen on.
        port: 0 picks a free one; see ``.port``.
        authenticator: of callers; default: every caller sees everything.
        tls: certificate and key to serve TLS with, read once; None: plain text.
        require_client_cert: refuse callers without a certificate of ``tls.tls_ca``.

    Raises:
        ConfigError: the port cannot be used.
    """

    def __init__(
        self,
        bind: str,
        port: int,
        authenticator: Authenticator | None = None,
        *,
        tls: Credentials | None = None,
        require_client_cert: bool = False,
    ) -> None:
        try:
            self._server = _Server(bind.strip("[]"), port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on HTTP port {bind}:{port}: {error.strerror or error}; if it is "
                "taken, choose another with --http-port"
            ) from None
        self._server.authenticator = authenticator or Authenticator()
        if tls is not None:
            self._server.socket = _tls_context(tls, require_client_cert).wrap_socket(
                self._server.socket,
                server_side=True,
                do_handshake_on_connect=False,  # it would block the thread that accepts
            )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="http", daemon=True
        )

    def start(
        self, status: Callable[[Viewer, str], NodeStatus], is_ready: Callable[[], bool]
    ) -> None:
        """Starts to answer calls with what a viewer sees now, and probes with ``is_ready``.

        Args:
            status: takes a viewer, and the name of a job to show with its ranks; empty for none.
        """
        self._server.status, self._server.is_ready = status, is_ready
        self._thread.start()

    def stop(self) -> None:
        """Stops listening; running calls finish."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


@dataclass(eq=False)
class _Connection:
    """A connection that has a thread; ``asked`` once its request has arrived."""

    socket: socket.socket
    address: str
    since: float
    asked: bool = False

    def shut_down(self) -> None:
        """Ends its reads and writes, and so its thread."""
        with suppress(OSError):  # it has ended
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # also below TLS


class _Server(ThreadingHTTPServer):
    """Bounds connections, and the time that each takes.

    A new connection always gets a thread. Above the bounds, the oldest one of the same address
    gives its place, or that of the address with most: first one that has not asked yet.
    """

    daemon_threads = True
    request_queue_size = _BACKLOG
    authenticator: Authenticator
    status: Callable[[Viewer, str], NodeStatus]
    is_ready: Callable[[], bool]

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        self.turns = {path: threading.Semaphore(_AT_ONCE) for path in PATHS}
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}  # the oldest first
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a new thread; another connection may give its place."""
        made = _Connection(request, str(client_address[0]), time.monotonic())
        with self._lock:
            self._connections[request] = made
            of_addresses = Counter(each.address for each in self._connections.values())
            crowded = made.address
            if of_addresses[crowded] <= MAX_CONNECTIONS_OF_ADDRESS:
                crowded = max(of_addresses, key=of_addresses.__getitem__)
                if len(self._connections) <= MAX_CONNECTIONS:
                    crowded = ""
            others = [c for c in self._connections.values() if c.address == crowded and c != made]
            if others:
                given_up = min(others, key=lambda each: each.asked)
                del self._connections[given_up.socket]
                given_up.shut_down()
        super().process_request(request, client_address)

    def note_asked(self, request: Any) -> None:
        """Notes that the request of a connection has arrived."""
        with self._lock:
            if (found := self._connections.get(request)) is not None:
                found.asked = True

    def service_actions(self) -> None:
        """Ends connections that take too long; the loop that accepts calls it often."""
        now = time.monotonic()
        with self._lock:
            for each in self._connections.values():
                if now - each.since > (_CALL_S if each.asked else _REQUEST_S):
                    each.shut_down()

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # HTTPServer's method looks up the name of this machine, which can be slow.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        # A caller that disconnects is no failure of this node.
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        logger.log(level, "HTTP call failed from=%s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_S
    server: _Server

    def do_GET(self) -> None:
        self.server.note_asked(self.request)
        path = self.path.partition("?")[0]
        answer = PATHS.get(path)
        if answer is None:
            paths = ", ".join(PATHS)
            self._answer(HTTPStatus.NOT_FOUND, f"not found; paths: {paths}\n".encode(), _TEXT)
            return
        try:
            caller = Caller(
                self.server.authenticator,
                f"http {path}",
                self._caller_headers(),
                self._peer(),
                "{}:{}".format(*self.client_address),
            )
        except UnauthenticatedError as error:
            self._answer(HTTPStatus.UNAUTHORIZED, f"{error}\n".encode(), _TEXT, _ASK_FOR_TOKEN)
        except PermissionDeniedError as error:
            self._answer(HTTPStatus.FORBIDDEN, f"{error}\n".encode(), _TEXT)
        except NodeUnavailableError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), _TEXT)
        else:
            answer(self, caller.principal.viewer)

    do_HEAD = do_GET

    def _page(self, viewer: Viewer) -> None:
        view = View.of(self.path.partition("?")[2])
        # No <meta>: a person can pause it.
        again = _NO_HEADERS if view.paused else {"Refresh": str(REFRESH_S)}

        def make() -> tuple[bytes, str, Mapping[str, str]]:
            text = page(self.server.status(viewer, view.job), view, datetime.now(UTC))
            return text.encode(), _HTML, again

        self._answer_in_turn("/", make)

    def _metrics(self, viewer: Viewer, path: str = "/metrics") -> None:
        from cache_server.web.metrics import exposition

        accept = self.headers.get("Accept", "")
        self._answer_in_turn(
            path, lambda: (*exposition(self.server.status(viewer, ""), accept), _NO_HEADERS)
        )

    def _node_metrics(self, viewer: Viewer) -> None:
        self._metrics(NOTHING, "/metrics/node")

    def _answer_in_turn(
        self, path: str, make: Callable[[], tuple[bytes, str, Mapping[str, str]]]
    ) -> None:
        """Makes an answer that takes long, beside few others of its path; then sends it."""
        turns = self.server.turns[path]
        if not turns.acquire(timeout=_TURN_S):
            body = f"too many calls of {path} at once: try again\n".encode()
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, body, _TEXT)
            return
        try:
            made = make()
        finally:
            turns.release()
        self._answer(HTTPStatus.OK, *made)

    def _live(self, viewer: Viewer) -> None:
        self._answer(HTTPStatus.OK, b"live\n", _TEXT)

    def _ready(self, viewer: Viewer) -> None:
        ready = self.server.is_ready()
        code = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(code, b"ready\n" if ready else b"not ready\n", _TEXT)

    def _caller_headers(self) -> dict[str, str]:
        """The headers; a browser sends the token as the password of HTTP's Basic scheme."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        scheme, _, encoded = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            with suppress(ValueError):
                password = base64.b64decode(encoded).decode().partition(":")[2]
                headers["authorization"] = f"Bearer {password}"
        return headers

    def _peer(self) -> str:
        """The first subject alternative name of the caller's certificate; empty: none."""
        if not isinstance(self.connection, ssl.SSLSocket):
            return ""
        names: Any = (self.connection.getpeercert() or {}).get("subjectAltName", ())
        return str(names[0][1]) if names else ""

    def _answer(
        self,
        code: HTTPStatus,
        body: bytes,
        content_type: str,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "cache-server"

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug(format, *arguments)


PATHS: Mapping[str, Callable[[_Handler, Viewer], None]] = {
    "/": _Handler._page,
    "/metrics": _Handler._metrics,
    "/metrics/node": _Handler._node_metrics,
    "/live": _Handler._live,
    "/ready": _Handler._ready,
}
"""What answers each path; `cache_server.auth.verbs` has the role that it needs."""


def _tls_context(tls: Credentials, require_client_cert: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert tls.tls_cert is not None
    try:
        context.load_cert_chain(tls.tls_cert, tls.tls_key)
        if require_client_cert:
            context.load_verify_locations(tls.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"cannot use the certificate {tls.tls_cert}: {error}") from None
    return context
