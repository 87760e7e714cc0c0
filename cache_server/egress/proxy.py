"""A forward proxy on loopback, which checks each host right before it connects.

Libraries of this process use it by HTTP: CONNECT for TLS, and requests with a whole address for
plain HTTP. It connects to exactly the address that was checked, so that a name that changes, a
redirect or the answer of a server leads nowhere else. A password keeps other processes out.
"""

from __future__ import annotations

import base64
import binascii
import logging
import select
import socket
import socketserver
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple, Protocol

from cache_protocol.errors import CacheError, RequestError
from cache_server.egress.addresses import Address, parse_address
from cache_server.egress.hosts import Endpoint, Hosts, RefusedAddressError
from cache_server.egress.proxy_variables import OperatorProxy, ProxyVariables
from cache_server.source.outages import load_error

MAX_CONNECTIONS = 512
_HEAD_BYTES = 64 * 1024
_HEAD_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 120.0  # longer than libraries keep a connection that they do not use
_PIECE_BYTES = 256 * 1024
_HOP = ("proxy-authorization", "proxy-connection", "host")

logger = logging.getLogger(__name__)


class Credentials(NamedTuple):
    """A user of the proxy.

    Attributes:
        who: for the notes about failures.
        trusted: hosts that it may reach at any address.
    """

    who: str
    trusted: frozenset[Endpoint]


class Doorkeeper(Protocol):
    """Knows the users of the proxy."""

    def admitted(self, user: str, password: str) -> Credentials | None:
        """What a user may do; None: it may not use the proxy."""

    def note(self, who: str, failure: CacheError | None) -> None:
        """Keeps why a connection could not be made; None: it was made."""


class CheckingProxy:
    """The proxy; listens on a free port of loopback until it is closed.

    Args:
        hosts: that may be connected to.
        variables: the proxies of the operator; a connection to one of them is not checked, only
            the host that it is asked for.
        doorkeeper: knows who may use it.
    """

    def __init__(self, hosts: Hosts, variables: ProxyVariables, doorkeeper: Doorkeeper) -> None:
        self._hosts = hosts
        self._variables = variables
        self._doorkeeper = doorkeeper
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="egress", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port to connect to."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stops it; open connections end."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._thread.join()

    def serve(self, client: socket.socket) -> None:
        """Serves one connection of a library until it ends."""
        _Connection(client, self._hosts, self._variables, self._doorkeeper).run()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: CheckingProxy) -> None:
        self._proxy = proxy
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)

    def verify_request(
        self, request: socket.socket | tuple[bytes, socket.socket], _: object
    ) -> bool:
        assert isinstance(request, socket.socket)
        with self._lock:
            has_room = len(self._open) < MAX_CONNECTIONS
            if has_room:
                self._open.add(request)
        return has_room

    def finish_request(
        self, request: socket.socket | tuple[bytes, socket.socket], _: object
    ) -> None:
        assert isinstance(request, socket.socket)
        self._proxy.serve(request)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        with self._lock:
            for client in self._open:
                try:
                    client.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it has ended

    def handle_error(self, request: object, client_address: object) -> None:
        logger.exception("a connection of the proxy failed")


class _Request(NamedTuple):
    """The head of a request.

    Attributes:
        target: of CONNECT ``HOST:PORT``, else a whole address.
        headers: by names in lower case.
    """

    method: str
    target: str
    version: str
    headers: Mapping[str, str]


class _AnswerError(Exception):
    """The request is answered by the proxy."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Connection:
    """One connection of a library: a tunnel, or requests one after another."""

    def __init__(
        self,
        client: socket.socket,
        hosts: Hosts,
        variables: ProxyVariables,
        doorkeeper: Doorkeeper,
    ) -> None:
        self._client = client
        self._hosts = hosts
        self._variables = variables
        self._doorkeeper = doorkeeper
        self._received = b""
        self._server: socket.socket | None = None
        self._connected: tuple[Endpoint, OperatorProxy | None] | None = None

    def run(self) -> None:
        """Serves the connection until one side ends it or neither sends anything for long."""
        try:
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (request := self._next_request()) is not None:
                self._serve(request)
        except _AnswerError as answer:
            self._answer(answer)
        except OSError as error:  # a side that went away, or was silent for too long
            logger.debug("a connection of the proxy ended: %s", error)
        finally:
            if self._server is not None:
                self._server.close()

    def _serve(self, request: _Request) -> None:
        credentials = self._credentials(request.headers)
        if request.method == "CONNECT":
            address = _parsed(f"https://{request.target}", "https")
            self._connect(address, credentials)
            self._client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._pass_on(self._received)
            self._received = b""
            while self._relay():
                pass
            return
        origin, slash, path = _split(request.target)
        address = _parsed(origin, "http")
        proxy = self._connect(address, credentials)
        headers = {name: text for name, text in request.headers.items() if name not in _HOP}
        headers["host"] = address.authority
        target = slash + path if slash == "/" else f"/{slash}{path}"
        if proxy is not None:
            target = str(address) + target
            headers |= _authorization(proxy)
        lines = [f"{request.method} {target} {request.version}"]
        lines += [f"{name}: {text}" for name, text in headers.items()]
        self._pass_on("\r\n".join([*lines, "", ""]).encode("latin-1"))
        self._pass_on_body(request.headers)
        while not self._received and self._relay(is_request=True):
            pass

    def _credentials(self, headers: Mapping[str, str]) -> Credentials:
        kind, _, given = headers.get("proxy-authorization", "").partition(" ")
        found = None
        if kind.lower() == "basic":
            try:
                user, _, password = base64.b64decode(given, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                user = password = ""
            found = self._doorkeeper.admitted(user, password)
        if found is None:
            raise _AnswerError(
                HTTPStatus.PROXY_AUTHENTICATION_REQUIRED, "only libraries of this node may use it"
            )
        return found

    def _connect(self, address: Address, credentials: Credentials) -> OperatorProxy | None:
        """Connects to a host, unless it is connected; returns the proxy on the way."""
        endpoint = address.host, address.used_port
        proxy = self._variables.proxy_for(address.scheme, *endpoint)
        if self._connected == (endpoint, proxy):
            return proxy
        if self._server is not None:
            self._server.close()
            self._server = self._connected = None
        try:
            found = self._addresses(endpoint, credentials, proxy)
            self._server = _dialled(endpoint, found, proxy, is_tunnel=address.scheme == "https")
        except RefusedAddressError as error:
            self._doorkeeper.note(credentials.who, error)
            raise _AnswerError(HTTPStatus.FORBIDDEN, str(error)) from None
        except OSError as error:
            text = f"no connection to {address.authority}: {error.strerror or error}"
            self._doorkeeper.note(credentials.who, load_error(text, error))
            raise _AnswerError(HTTPStatus.BAD_GATEWAY, text) from None
        self._doorkeeper.note(credentials.who, None)
        self._connected = endpoint, proxy
        return proxy

    def _addresses(
        self, endpoint: Endpoint, credentials: Credentials, proxy: OperatorProxy | None
    ) -> list[str]:
        try:
            return self._hosts.checked(*endpoint, credentials.trusted)
        except RefusedAddressError:
            raise
        except OSError:
            if proxy is None:
                raise
            return []  # only the proxy of the operator knows the name, and checks it

    def _relay(self, *, is_request: bool = False) -> bool:
        """Passes on what came from one side; returns whether to go on.

        Args:
            is_request: what comes from the client is another request, which is not read here.
        """
        assert self._server is not None
        poll = select.poll()
        for side in (self._client, self._server):
            poll.register(side, select.POLLIN)
        ready = {number for number, _ in poll.poll(_IDLE_TIMEOUT_S * 1000)}
        if not ready:
            raise TimeoutError("neither side sends")
        if self._server.fileno() in ready:
            data = self._server.recv(_PIECE_BYTES)
            if not data:
                raise ConnectionResetError("the server ended the connection")
            self._client.sendall(data)
        if self._client.fileno() in ready:
            if is_request:
                return False
            data = self._client.recv(_PIECE_BYTES)
            if not data:
                raise ConnectionResetError("the client ended the connection")
            self._pass_on(data)
        return True

    def _next_request(self) -> _Request | None:
        """The next request; None when the client ended the connection."""
        self._client.settimeout(_HEAD_TIMEOUT_S)
        while b"\r\n\r\n" not in self._received:
            if len(self._received) > _HEAD_BYTES:
                raise _AnswerError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too large")
            data = self._client.recv(_HEAD_BYTES)
            if not data:
                return None
            self._received += data
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        self._client.settimeout(_IDLE_TIMEOUT_S)
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        pairs = [line.partition(":") for line in lines]
        names = [name.lower() for name, _, _ in pairs]
        if len(parts) != 3 or len(set(names)) < len(names) or b"\0" in head:
            raise _AnswerError(HTTPStatus.BAD_REQUEST, "this is no request")
        headers = {name: text.strip() for name, (_, _, text) in zip(names, pairs, strict=True)}
        return _Request(parts[0], parts[1], parts[2], headers)

    def _pass_on_body(self, headers: Mapping[str, str]) -> None:
        if "transfer-encoding" in headers:
            raise _AnswerError(HTTPStatus.LENGTH_REQUIRED, "a body must have a length")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal():
            raise _AnswerError(HTTPStatus.BAD_REQUEST, "its length is no number")
        missing = int(length)
        while missing:
            data = self._received or self._client.recv(min(missing, _PIECE_BYTES))
            if not data:
                raise ConnectionResetError("the client ended the connection")
            self._received = data[missing:]
            self._pass_on(data[:missing])
            missing -= len(data[:missing])

    def _pass_on(self, data: bytes) -> None:
        assert self._server is not None
        self._server.sendall(data)

    def _answer(self, answer: _AnswerError) -> None:
        body = f"{answer}\n".encode()
        head = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        if answer.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            head += 'Proxy-Authenticate: Basic realm="cache"\r\n'
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        try:
            self._client.sendall(head.encode() + body)
        except OSError as error:
            logger.debug("a client of the proxy went away: %s", error)


def _parsed(text: str, scheme: str) -> Address:
    try:
        return parse_address("the address", text, (scheme,))
    except RequestError as error:
        raise _AnswerError(HTTPStatus.BAD_REQUEST, str(error)) from None


def _split(target: str) -> tuple[str, str, str]:
    """An address without its path, the character that ends it, and what follows."""
    scheme, found, rest = target.partition("://")
    end = min((i for c in "/?" if (i := rest.find(c)) >= 0), default=len(rest))
    return f"{scheme}{found}{rest[:end]}", rest[end : end + 1], rest[end + 1 :]


def _authorization(proxy: OperatorProxy) -> dict[str, str]:
    if not proxy.user:
        return {}
    pair = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
    return {"proxy-authorization": f"Basic {pair}"}


def _dialled(
    endpoint: Endpoint, addresses: list[str], proxy: OperatorProxy | None, *, is_tunnel: bool
) -> socket.socket:
    """A connection to the first address that answers, or to a proxy, for a tunnel through it."""
    host, port = endpoint
    if proxy is None:
        server = _first_that_answers(addresses, port)
    else:
        server = socket.create_connection((proxy.host, proxy.port), _CONNECT_TIMEOUT_S)
    try:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.settimeout(_IDLE_TIMEOUT_S)
        if proxy is not None and is_tunnel:
            _ask_for_tunnel(server, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except BaseException:
        server.close()
        raise
    return server


def _first_that_answers(addresses: list[str], port: int) -> socket.socket:
    last = OSError("it has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), _CONNECT_TIMEOUT_S)
        except OSError as error:
            last = error
    raise last


def _ask_for_tunnel(server: socket.socket, proxy: OperatorProxy, target: str) -> None:
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    lines += [f"{name}: {text}" for name, text in _authorization(proxy).items()]
    server.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = server.recv(1)  # what follows the head belongs to the tunnel
        if not byte or len(head) > _HEAD_BYTES:
            raise OSError("the proxy of the node's environment ended the connection")
        head += byte
    status = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
    if status != [b"200"]:
        shown = b" ".join(head.split(b"\r\n", 1)[0].split(b" ")[1:]).decode("latin-1")
        raise OSError(f"the proxy of the node's environment answered {shown}")
