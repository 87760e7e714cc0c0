"""The proxy of a node: who may use it, what it connects to, and through what."""

from __future__ import annotations

import base64
import http.client
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from cache_protocol.errors import ConfigError
from cache_server.egress import gate as gates
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.egress.gate import Gate, Pass
from cache_server.egress.proxy_variables import ProxyVariables


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        proxied = self.headers.get("Proxy-Authorization", "")
        said = f"{self.path} {self.headers['Host']} {proxied}".encode() + self.rfile.read(length)
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_POST = do_GET

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"tunnel to {self.path}\n".encode())
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


class Names:
    """A resolver: each name has one list of addresses after the other."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.answers.get(host.partition(".")[0])
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def opened(names: Names, *prefixes: str, **environ: str) -> Gate:
    return Gate(AllowedSources(list(prefixes) or None, names), ProxyVariables(environ))


def connection(way: Pass) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*way.gate.proxy_address, timeout=20)


def asked(way: Pass, url: str, **more: object) -> tuple[int, str]:
    handler = urllib.request.ProxyHandler(way.proxies)
    try:
        with urllib.request.build_opener(handler).open(url, timeout=20, **more) as answer:
            return answer.status, answer.read().decode()
    except urllib.request.HTTPError as error:
        return error.code, error.read().decode()


def tunnel(way: Pass, target: str) -> tuple[str, socket.socket]:
    """The first line of the answer to CONNECT, and the connection."""
    client = socket.create_connection(way.gate.proxy_address, 20)
    secret = urllib.request._parse_proxy(way.url)[1:3]
    pair = base64.b64encode(":".join(secret).encode()).decode()
    client.sendall(
        f"CONNECT {target} HTTP/1.1\r\nProxy-Authorization: Basic {pair}\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    return head.decode().split("\r\n")[0], client


def test_it_connects_to_the_address_that_it_checked(port: int) -> None:
    names = Names(friend=[["127.0.0.1"]], changing=[["93.184.216.34"], ["127.0.0.1"]])
    gate = opened(names, f"http://friend.example:{port}/")
    try:
        way = gate.pass_for({}, {})
        url = f"http://friend.example:{port}/x?a=/b&c"
        assert asked(way, url) == (200, f"/x?a=/b&c friend.example:{port} ")
        assert names.asked == ["friend.example"]
        line, client = tunnel(way, f"friend.example:{port}")
        client.sendall(b"GET /y HTTP/1.0\r\nHost: h\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
        client.close()
        assert "200" in line and answer.endswith(b"/y h ")
        # The name has another address as soon as it was checked: nobody looks again.
        gate.check_host("changing.example", port)
        status, said = asked(way, f"http://changing.example:{port}/")
        assert (status, said.count("127.0.0.1 is the machine of the node")) == (403, 1)
        assert names.asked.count("changing.example") == 2 and str(way.failure()) in said
    finally:
        gate.close()


def test_only_a_pass_of_this_gate_lets_through(port: int) -> None:
    names = Names(friend=[["127.0.0.1"]])
    gate, other = opened(names, f"http://friend.example:{port}/"), opened(names)
    try:
        url = f"http://friend.example:{port}/"
        for user, password in (("", ""), ("x", "y"), (other.pass_for({}, {}).user, "y")):
            assert asked(Pass(gate, user, password, ""), url)[0] == 407
        foreign = other.pass_for({}, {})
        assert asked(Pass(gate, foreign.user, foreign.password, ""), url)[0] == 407
        client = connection(gate.pass_for({}, {}))
        client.request("GET", url)
        assert client.getresponse().status == 407
        client.close()
    finally:
        gate.close()
        other.close()


def test_a_pass_trusts_what_the_operator_named_for_it_alone(port: int) -> None:
    gate = opened(Names(minio=[["127.0.0.1"]]))
    try:
        url = f"http://minio.example:{port}/"
        trusted = gate.pass_for({"a": "b"}, {}, [("minio.example", port)])
        assert asked(trusted, url)[0] == 200 and trusted.failure() is None
        stranger = gate.pass_for({"a": "c"}, {})
        status, said = asked(stranger, url)
        assert status == 403 and f"--allow-source http://minio.example:{port}/" in said
        assert stranger.failure() and trusted.failure() is None
        line, client = tunnel(stranger, f"minio.example:{port}")
        client.close()
        assert line.split()[1] == "403"
    finally:
        gate.close()


def test_one_connection_reaches_several_hosts_and_keeps_bodies(port: int) -> None:
    names = Names(one=[["127.0.0.1"]], two=[["127.0.0.1"]])
    gate = opened(names, f"http://one.example:{port}/", f"http://two.example:{port}/")
    try:
        way = gate.pass_for({}, {})
        headers = urllib.request.Request("http://h")
        urllib.request.ProxyHandler().proxy_open(headers, way.url, "http")
        sent = dict(headers.header_items())
        client = connection(way)
        for host, body in (("one", b"abc"), ("one", b""), ("two", b"x" * 300_000), ("one", b"e")):
            client.request("POST", f"http://{host}.example:{port}/p", body, sent)
            said = client.getresponse().read()
            assert said == f"/p {host}.example:{port} ".encode() + body
        client.close()
        assert names.asked == ["one.example", "two.example", "one.example"]
    finally:
        gate.close()


@pytest.mark.parametrize(
    "target",
    ["http://127.1/", "http://h\\@x/", "http://u@h/", "ftp://h/", "/x", "http:///x"],
)  # fmt: skip
def test_an_odd_target_is_no_request(target: str) -> None:
    gate = opened(Names())
    try:
        way = gate.pass_for({}, {})
        request = urllib.request.Request("http://h")
        urllib.request.ProxyHandler().proxy_open(request, way.url, "http")
        client = connection(way)
        client.request("GET", target, headers=dict(request.header_items()))
        assert client.getresponse().status == 400
        client.close()
    finally:
        gate.close()


def test_connections_go_on_through_the_proxy_of_the_operator(port: int) -> None:
    names = Names(public=[["93.184.216.34"]], private=[["10.0.0.7"]])
    proxy = f"http://us%40er:pass@127.0.0.1:{port}"
    gate = opened(names, http_proxy=proxy, HTTPS_PROXY=proxy, no_proxy=".local")
    try:
        way = gate.pass_for({}, {})
        pair = "Basic dXNAZXI6cGFzcw=="
        for host in ("public.example", "only-the-proxy-knows.example"):
            said = asked(way, f"http://{host}/x?y")
            assert said == (200, f"http://{host}/x?y {host} {pair}")
            line, client = tunnel(way, f"{host}:443")
            assert "200" in line and client.recv(100) == f"tunnel to {host}:443\n".encode()
            client.close()
        assert asked(way, "http://private.example/")[0] == 403
        assert asked(way, "http://unknown.local/")[0] == 502
        assert "no connection to unknown.local" in str(way.failure())
    finally:
        gate.close()


def test_a_proxy_that_cannot_be_used_ends_the_start() -> None:
    for bad in ("socks5://h:1", "https://h", "http://h:x"):
        with pytest.raises(ConfigError, match="HTTPS_PROXY must be the address of a proxy"):
            ProxyVariables({"https_proxy": bad})
    assert ProxyVariables({"ALL_PROXY": "proxy:3128"}).proxy_for("https", "h", 443) is not None


def test_a_cache_that_allows_everything_has_no_proxy() -> None:
    before = threading.active_count()
    with gates.opened(AllowedSources([""])) as gate:
        assert gate is None and gates.current() is None
        assert threading.active_count() == before
    with gates.opened(AllowedSources(None)) as gate:
        assert gates.current() is gate is not None
        assert urlsplit(gate.pass_for({}, {}).url).hostname == "127.0.0.1"
    assert gates.current() is None
