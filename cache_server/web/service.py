"""The HTTP port of a node: ``/`` for people, ``/metrics`` for Prometheus, ``/ready`` for probes."""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from cache_protocol.errors import ConfigError
from cache_server.node.status import NodeStatus
from cache_server.web.page import page

logger = logging.getLogger(__name__)

_IDLE_S = 10.0  # time for a caller to send its request
_POLL_S = 0.1  # longest time to stop
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no script, no other file
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"


class WebService:
    """Listens from construction, answers after `start`, with a thread for each call.

    Args:
        bind: host to listen on.
        port: 0 picks a free one; see ``.port``.

    Raises:
        ConfigError: the port cannot be used.
    """

    def __init__(self, bind: str, port: int) -> None:
        try:
            self._server = _Server(bind.strip("[]"), port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on HTTP port {bind}:{port}: {error.strerror or error}"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="http", daemon=True
        )

    def start(self, status: Callable[[str], NodeStatus], is_ready: Callable[[], bool]) -> None:
        """Starts to answer calls with the current status, and probes with ``is_ready``.

        Args:
            status: takes the name of a job to show with its ranks; empty for none.
        """
        self._server.status, self._server.is_ready = status, is_ready
        self._thread.start()

    def stop(self) -> None:
        """Stops listening; running calls finish."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    status: Callable[[str], NodeStatus]
    is_ready: Callable[[], bool]

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__((str(address[0]), port), _Handler)

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
        path, _, query = self.path.partition("?")
        if path == "/":
            job = parse_qs(query).get("job", [""])[-1]
            self._answer(HTTPStatus.OK, page(self.server.status(job), job).encode(), _HTML)
        elif path == "/metrics":
            from cache_server.web.metrics import exposition

            accept = self.headers.get("Accept", "")
            self._answer(HTTPStatus.OK, *exposition(self.server.status(""), accept))
        elif path == "/ready":
            ready = self.server.is_ready()
            code = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(code, b"ready\n" if ready else b"not ready\n", _TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found; paths: /, /metrics, /ready\n", _TEXT)

    do_HEAD = do_GET

    def _answer(self, code: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(code)
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
